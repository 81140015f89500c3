"""Where preheat keeps things: runtime (sockets, gone after a stop), state (records, logs), cache.

Each follows its XDG variable and can be overridden by ``PREHEAT_RUNTIME_DIR``,
``PREHEAT_STATE_DIR`` and ``PREHEAT_CACHE_DIR``. All are mode 0700. What does not belong here:
names of single files that only one module uses.
"""

from __future__ import annotations

import os
from pathlib import Path

from msgspec import Struct

from preheat.core.errors import SpecError

# sockaddr_un.sun_path holds 108 bytes with its terminator; the longest name preheat appends to the
# runtime directory is "/r/<12>/<start>/engine.sock".
SOCKET_PATH_MAX_BYTES = 107
LONGEST_SOCKET_SUFFIX_BYTES = 48


class Paths(Struct, frozen=True):
    runtime: Path
    state: Path
    cache: Path

    @property
    def admin_socket(self) -> Path:
        """The control plane's HTTP API (status, metrics, orders)."""
        return self.runtime / "admin.sock"

    @property
    def envoy_admin_socket(self) -> Path:
        return self.runtime / "envoy-admin.sock"

    @property
    def probe_socket(self) -> Path:
        """Envoy's private listener, whose routes are pinned to single starts."""
        return self.runtime / "probe.sock"

    @property
    def records_pipe(self) -> Path:
        """Where Envoy writes its access log."""
        return self.runtime / "records.pipe"

    @property
    def kept(self) -> Path:
        """What a control plane leaves for the one after it."""
        return self.runtime / "kept.json"

    @property
    def xds(self) -> Path:
        return self.runtime / "xds"

    @property
    def coldstarts(self) -> Path:
        """One JSON file for each start of a replica."""
        return self.state / "coldstarts"

    @property
    def logs(self) -> Path:
        return self.state / "logs"

    def create(self) -> None:
        for path in (self.runtime, self.state, self.cache, self.xds, self.coldstarts, self.logs):
            path.mkdir(mode=0o700, parents=True, exist_ok=True)
        if not self.records_pipe.is_fifo():
            self.records_pipe.unlink(missing_ok=True)
            os.mkfifo(self.records_pipe, 0o600)


def _directory(override: str, xdg: str, fallback: Path) -> Path:
    if value := os.environ.get(override):
        return Path(value).absolute()
    if value := os.environ.get(xdg):
        return Path(value).absolute() / "preheat"
    return fallback


def default_paths() -> Paths:
    """The directories of this user, not created yet. Raises SpecError if sockets would not fit."""
    home = Path.home()
    uid = os.getuid()
    runtime = _directory("PREHEAT_RUNTIME_DIR", "XDG_RUNTIME_DIR", Path(f"/tmp/preheat-{uid}"))
    if len(os.fsencode(runtime)) + LONGEST_SOCKET_SUFFIX_BYTES > SOCKET_PATH_MAX_BYTES:
        raise SpecError(
            f"the runtime directory {runtime} is too long for Unix sockets",
            advice="set PREHEAT_RUNTIME_DIR to a shorter path (at most "
            f"{SOCKET_PATH_MAX_BYTES - LONGEST_SOCKET_SUFFIX_BYTES} bytes)",
        )
    return Paths(
        runtime=runtime,
        state=_directory("PREHEAT_STATE_DIR", "XDG_STATE_HOME", home / ".local/state/preheat"),
        cache=_directory("PREHEAT_CACHE_DIR", "XDG_CACHE_HOME", home / ".cache/preheat"),
    )
