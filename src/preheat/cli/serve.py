"""``preheat serve``: this process becomes the supervisor.

What does not belong here: anything about models; the control plane reads the spec.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import sys
import time

TYPE_CHECKING = False
if TYPE_CHECKING:
    from pathlib import Path

    from preheat.core.paths import Paths

EXAMPLES = """\
examples:
  preheat serve                          the embedded default model, or ./preheat.yaml
  preheat serve model.gguf --port 9000   a model of your own
  preheat serve preheat.yaml             what a spec says
  preheat serve --log-json | jq .        notices as JSON lines

Ctrl-C (or SIGTERM) takes readiness away, finishes what is in flight and leaves nothing behind;
a second one stops at once.
"""

OURS = (
    "xds",
    "r",
    "envoy.json",
    "admin.sock",
    "envoy-admin.sock",
    "probe.sock",
    "records.pipe",
    "kept.json",
    "kept.tmp",
)
"""What preheat puts into its runtime directory, beside ``lock``, and what is removed at the end."""


def register(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = subparsers.add_parser(
        "serve",
        help="bring models up and serve them",
        description="Brings models from nothing to proven hot and serves them to OpenAI clients.",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "target",
        nargs="?",
        help="a spec, a .gguf file or a directory (default: ./preheat.yaml, or the default model)",
    )
    parser.add_argument("--port", type=_port, help="listen here instead of where the spec says")
    parser.add_argument("--log-json", action="store_true", help="print notices as JSON lines")
    parser.add_argument(
        "--insecure-listen",
        action="store_true",
        help="allow listening beyond loopback without keys and TLS",
    )
    parser.set_defaults(func=run)


def run(args: argparse.Namespace) -> int:
    _import_msgspec()
    from preheat.core.paths import default_paths
    from preheat.supervisor import Supervisor

    spawned_s = _spawned_s()
    paths = default_paths()
    lock = _lock(paths)

    def control_plane(descriptor: int, running: tuple[str, ...] | None) -> int:
        from preheat.controlplane.process import main

        return main(
            descriptor=descriptor,
            running=running,
            target=args.target,
            port=args.port,
            log_json=args.log_json,
            insecure_listen=args.insecure_listen,
            spawned_s=spawned_s if running is None else time.monotonic(),
        )

    try:
        return Supervisor().run(control_plane)
    finally:
        _clean(paths.runtime)
        os.close(lock)


def _lock(paths: Paths) -> int:
    """One preheat per runtime directory. What a killed one left there is removed."""
    import fcntl

    from preheat.core.errors import Busy, SpecError

    try:
        _require_own(paths.runtime)
        paths.create()
        lock = os.open(paths.runtime / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except OSError as error:
        raise SpecError(
            f"{error.filename} cannot be used: {error.strerror}",
            advice="set PREHEAT_RUNTIME_DIR, PREHEAT_STATE_DIR and PREHEAT_CACHE_DIR to "
            "directories that this user may write to",
        ) from error
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(lock)
        raise Busy(
            f"another preheat runs in {paths.runtime}",
            advice="see `preheat status`, stop it, or set PREHEAT_RUNTIME_DIR for a second one",
        ) from None
    _clean(paths.runtime)
    paths.create()
    return lock


def _require_own(runtime: Path) -> None:
    """What is in it will be removed, and others must not have a hand in it."""
    from preheat.core.errors import SpecError

    try:
        status, names = runtime.stat(), set(os.listdir(runtime))  # noqa: PTH208 — names are wanted
    except FileNotFoundError:
        return
    advice = "set PREHEAT_RUNTIME_DIR to a directory of its own, which is made if need be"
    if status.st_uid != os.getuid():
        raise SpecError(
            f"the runtime directory {runtime} belongs to another user (uid {status.st_uid})",
            advice=advice,
        )
    if "lock" not in names and names - set(OURS):
        raise SpecError(f"the runtime directory {runtime} holds other things", advice=advice)
    if status.st_mode & 0o022:
        raise SpecError(
            f"others may write to the runtime directory {runtime}", advice=f"chmod 700 {runtime}"
        )


def _clean(runtime: Path) -> None:
    for entry in (runtime / name for name in OURS):
        if entry.is_dir() and not entry.is_symlink():
            import shutil  # mostly there is nothing to remove

            shutil.rmtree(entry, ignore_errors=True)
        else:
            with contextlib.suppress(OSError):
                entry.unlink()


def _import_msgspec() -> None:
    """It asks for typing_extensions, which brings inspect and ast, 8 ms of a start; all that it
    wants of it is in the typing of Python 3.11, which it takes when there is no other."""
    if {"msgspec", "typing_extensions"} & sys.modules.keys():
        return
    sys.modules["typing_extensions"] = None  # type: ignore[assignment]
    try:
        import msgspec  # noqa: F401
    finally:
        del sys.modules["typing_extensions"]


def _spawned_s() -> float:
    """When this process was spawned, on CLOCK_MONOTONIC; the kernel keeps it in ticks of 10 ms."""
    with open("/proc/self/stat") as file:  # noqa: PTH123 — before anything else is imported
        ticks = int(file.read().rpartition(")")[2].split()[19])
    since_s = time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK")
    return time.monotonic() - since_s


def _port(text: str) -> int:
    if not (text.isascii() and text.isdigit()) or not 0 < int(text) < 65536:
        raise argparse.ArgumentTypeError(f"{text!r} is not a port (1 to 65535)")
    return int(text)
