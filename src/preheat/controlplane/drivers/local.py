"""Starts of replicas as processes under the supervisor: from a fleet's Launch to an agent's plan.

What does not belong here: when to start what (``fleet.py``), following agents (``agents.py``).
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import sys
from pathlib import Path

import msgspec

from preheat.acceleration.weights.sources import Located, Progress, evict, needs_fetch, resolve
from preheat.controlplane.drivers.link import SupervisorLink
from preheat.controlplane.replicas import Replica, Start
from preheat.core.errors import PreheatError
from preheat.core.paths import Paths
from preheat.replica.engines import llamacpp
from preheat.replica.engines.plan import local_hardware, usable_cores
from preheat.replica.plan import ReplicaPlan, WeightsPlan

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable

NUMBER_MAX_BYTES = 32


class LocalDriver:
    def __init__(self, paths: Paths, link: SupervisorLink, *, drain_timeout_s: float) -> None:
        self._paths = paths
        self._link = link
        self._drain_timeout_s = drain_timeout_s
        self._located: dict[str, Located] = {}
        self._sockets: dict[str, Path] = {}

    def must_fetch(self, replica: Replica) -> bool:
        """Whether the weights have to come over the network first."""
        return needs_fetch(replica.version.source, self._paths.cache)

    def locate(
        self, replica: Replica, progress: Callable[[Progress], None] | None = None
    ) -> Located:
        """The weights' file, fetched if need be. Blocks; raises SpecError, SourceError."""
        return resolve(replica.version.source, self._paths.cache, progress=progress)

    def launch(self, replica: Replica, located: Located) -> Start:
        """Asks the supervisor for an agent. Cheap; the agent's process is named after the start.

        Raises SourceError for a recorded hash that cannot be read, and OSError. Nothing of a launch
        that failed stays.
        """
        number = next_number(self._paths.state / "start-number")
        start_id = f"{replica.name}@{number}"
        sockets = self._paths.runtime / "r" / f"{replica.name.rpartition('-')[0][-8:]}-{number}"
        start = Start(start_id, number, sockets, max_connections=0, hold_at=_hold_at(replica))
        plan = self._plan(replica, start, located)
        start.max_connections = plan.launch.max_connections
        try:
            sockets.mkdir(mode=0o700, parents=True)
            plan_file = sockets / "plan.json"
            plan_file.write_bytes(msgspec.json.encode(plan))
            self._link.spawn(
                start_id,
                (sys.executable, "-P", "-m", "preheat.replica", str(plan_file)),
                log=self._paths.logs / f"{replica.name}.log",
            )
        except OSError:
            shutil.rmtree(sockets, ignore_errors=True)
            raise
        self._located[start_id] = located
        self._sockets[start_id] = sockets
        return start

    def adopt(self, replica: Replica, start: Start) -> None:
        """A start that another control plane launched."""
        self._sockets[start.start_id] = start.sockets
        # Where its weights are missing by now, that is the next start's concern.
        with contextlib.suppress(PreheatError):
            if not self.must_fetch(replica):
                self._located[start.start_id] = self.locate(replica)

    def weights_of(self, start_id: str) -> Located | None:
        return self._located.get(start_id)

    def weights_were_bad(self, start_id: str) -> bool:
        """Drops a damaged cache entry, so that the next start fetches it anew; whether it was one.

        Hashes the file again, so it may take long.
        """
        located = self._located.get(start_id)
        return located is not None and evict(located, self._paths.cache)

    def ended(self, start_id: str) -> None:
        """Nothing of a start stays behind."""
        self._located.pop(start_id, None)
        if (sockets := self._sockets.pop(start_id, None)) is not None:
            shutil.rmtree(sockets, ignore_errors=True)

    def _plan(self, replica: Replica, start: Start, located: Located) -> ReplicaPlan:
        sha256 = located.sha256 or self._baseline(located.path)
        return ReplicaPlan(
            replica=replica.name,
            start_id=start.start_id,
            model=replica.model.name,
            version=replica.version.name,
            weights=WeightsPlan(
                path=str(located.path), size_bytes=located.size_bytes, sha256=sha256
            ),
            launch=llamacpp.plan(
                replica.version.engine,
                local_hardware(),
                model=replica.model.name,
                socket=start.engine_socket,
            ),
            warmup=replica.version.warmup,
            hold_at="warm" if start.hold_at == "warm" else "hot",
            agent_socket=str(start.agent_socket),
            probe_socket=str(self._paths.probe_socket),
            answers=str(self._paths.state / "answers"),
            events=str(self._paths.logs / f"{replica.name}.events.jsonl"),
            gateway_workers=usable_cores(),
            drain_timeout_s=self._drain_timeout_s,
        )

    def _baseline(self, path: Path) -> str | None:
        """What a local file without a promised hash was at its first start."""
        from preheat.acceleration.weights.baselines import recorded_sha256  # some 10 ms

        return recorded_sha256(path, self._paths.state)


def _hold_at(replica: Replica) -> str:
    return "warm" if replica.hold_at == "warm" else "hot"


def next_number(file: Path) -> int:
    """Numbers of starts never repeat on a machine, so that a record's name means one start; also if
    several preheats share the state directory. Raises OSError."""
    descriptor = os.open(file, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        held = os.pread(descriptor, NUMBER_MAX_BYTES, 0).split()
        number = int(held[0]) + 1 if held and held[0].isdigit() else 1
        # It only grows, so that no digit of an older one stays.
        os.pwrite(descriptor, b"%d\n" % number, 0)
        return number
    finally:
        os.close(descriptor)
