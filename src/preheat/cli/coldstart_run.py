"""Starts made to be measured: ``preheat serve`` N times, each in directories of its own.

A start is over when its record with a first token lies in its state directory; then the process is
interrupted and has to be gone before the next. What does not belong here: percentiles, tables
(``coldstart_report.py``).
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from preheat.core.errors import EngineError, SpecError
from preheat.core.paths import LONGEST_SOCKET_SUFFIX_BYTES, SOCKET_PATH_MAX_BYTES, default_paths
from preheat.core.spec.load import resolve_target
from preheat.core.traces.store import read_records

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from types import FrameType

    from preheat.core.coldstart import ColdStart
    from preheat.core.spec.schema import Spec

POLL_S = 0.01
STOP_TIMEOUT_S = 60.0
"""Seconds an interrupted process has to drain and go."""

WEIGHTS_MIN_BYTES = 1 << 20
"""Smaller files in the cache are no weights."""

TAIL_LINES = 12
STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
SCRATCH_PREFIX = "preheat-start-"


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    target: str | None
    starts: int
    cold: bool
    timeout_s: float
    serve: tuple[str, ...]
    """Command line before TARGET and the port."""


@dataclass(frozen=True, slots=True)
class Measured:
    record: ColdStart
    launched_s: float
    """When this process launched it (CLOCK_MONOTONIC): what the record says must agree."""


@dataclass(frozen=True, slots=True)
class Results:
    starts: tuple[Measured, ...]
    dropped: tuple[Path, ...]
    """Files whose pages were dropped before each start."""


def run_and_report(run: Run, *, sla_s: float | None, json_file: Path | None) -> int:
    """All of ``preheat coldstart run``. Returns 1 if P95 misses the SLA, else 0. Raises EngineError
    if a start failed."""
    from preheat.cli.coldstart_report import report_json, report_lines

    with _terminated_as_interrupted(), _progress(run.starts) as advance:
        results = measure(run, advance)
    for line in report_lines(run, results, sla_s):
        print(line)
    report = report_json(run, results, sla_s)
    if json_file is not None:
        try:
            json_file.write_bytes(report.encoded())
        except OSError as error:
            raise SpecError(f"{json_file} cannot be written: {error.strerror}") from error
    return 1 if report.sla_met is False else 0


def measure(run: Run, advance: Callable[[], None]) -> Results:
    """Makes one start that is not counted, then ``run.starts`` that are.

    Raises SpecError if TARGET is wrong and EngineError if a start failed.
    """
    spec = resolve_target(run.target)
    # The first start fetches the model if need be and fills the page cache: what a warm start
    # means, and without it there would be no file to drop for a cold one.
    _one_start(run, "the first, uncounted start")
    dropped = weight_files(spec, default_paths().cache) if run.cold else []
    if run.cold and not dropped:
        raise SpecError(
            f"no model file was found in {default_paths().cache} to drop from the page cache",
            advice="measure with --warm, or give the .gguf file as TARGET",
        )
    starts = []
    for number in range(1, run.starts + 1):
        for path in dropped:
            drop_from_page_cache(path)
        starts.append(_one_start(run, f"start {number} of {run.starts}"))
        advance()
    return Results(tuple(starts), tuple(dropped))


# --- One start ------------------------------------------------------------------------------------


def _one_start(run: Run, name: str) -> Measured:
    with tempfile.TemporaryDirectory(prefix=SCRATCH_PREFIX, dir=_scratch_parent()) as scratch:
        log = Path(scratch, "output.log")
        state = Path(scratch, "s")
        target = [] if run.target is None else [run.target]
        argv = [*run.serve, *target, "--port", str(_free_port())]
        environment = {
            **os.environ,
            "PREHEAT_RUNTIME_DIR": str(Path(scratch, "r")),
            "PREHEAT_STATE_DIR": str(state),
            "PREHEAT_CACHE_DIR": str(default_paths().cache),
        }
        try:
            with _process(argv, environment, log) as (child, launched_s):
                record = _await_record(child, state / "coldstarts", launched_s + run.timeout_s)
            if child.returncode != 0:
                raise _StartError(f"it did not stop cleanly ({_exit_words(child.returncode)})")
        except _StartError as failure:
            raise EngineError(
                f"{name} failed: {failure}{_tail(log)}",
                advice=f"try it alone: {' '.join(argv[:-2])}",
            ) from failure
        return Measured(record, launched_s)


class _StartError(Exception):
    """Why a start gave nothing to measure."""


def _await_record(child: subprocess.Popen[bytes], directory: Path, deadline_s: float) -> ColdStart:
    """The first record with a first token. With several replicas that is the first to get there."""
    while True:
        code = child.poll()  # before looking: what an ended process has written is there
        records = [stored.record for stored in read_records(directory)[0]]
        for record in records:
            if record.outcome != "ready":
                raise _StartError(record.outcome)
        proven = [record for record in records if record.first_token_s is not None]
        if proven:
            return min(proven, key=lambda record: record.first_token_s or 0.0)
        state = "its record has no first token" if records else "it was not ready"
        if code is not None:
            raise _StartError(f"{state} when it ended ({_exit_words(code)})")
        if time.monotonic() > deadline_s:
            raise _StartError(f"{state} in time")
        time.sleep(POLL_S)


@contextmanager
def _process(
    argv: Sequence[str], environment: dict[str, str], log: Path
) -> Iterator[tuple[subprocess.Popen[bytes], float]]:
    """A process in a session of its own, so that Ctrl-C reaches it only through us; gone after."""
    with log.open("wb") as output:
        launched_s = time.monotonic()
        try:
            child = subprocess.Popen(
                argv,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                env=environment,
                start_new_session=True,
            )
        except OSError as error:
            raise _StartError(f"{argv[0]} cannot be run: {error.strerror}") from error
    try:
        yield child, launched_s
    finally:
        _stop(child)


def _stop(child: subprocess.Popen[bytes]) -> None:
    """Interrupts the process and waits until it is gone; kills it if it stays, or if we are
    interrupted while we wait."""
    if child.poll() is None:
        child.send_signal(signal.SIGINT)
    try:
        child.wait(STOP_TIMEOUT_S)
    except subprocess.TimeoutExpired as error:
        raise _StartError(f"it did not stop within {STOP_TIMEOUT_S:.0f} s") from error
    finally:
        if child.poll() is None:
            os.killpg(child.pid, signal.SIGKILL)
            child.wait()


def _exit_words(code: int) -> str:
    return f"signal {-code}" if code < 0 else f"exit code {code}"


def _tail(log: Path) -> str:
    try:
        lines = log.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return ""
    lines = [line for line in lines if line.strip()][-TAIL_LINES:]
    return "".join(f"\n  | {line}" for line in lines)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def _scratch_parent() -> str:
    """The directory for temporary files, or /tmp where that would be too long for sockets."""
    usual = tempfile.gettempdir()
    needed = len(SCRATCH_PREFIX) + len("/12345678/r") + LONGEST_SOCKET_SUFFIX_BYTES
    return usual if len(os.fsencode(usual)) + needed <= SOCKET_PATH_MAX_BYTES else "/tmp"


# --- Page cache -----------------------------------------------------------------------------------


def weight_files(spec: Spec, cache: Path) -> list[Path]:
    """The files that hold the spec's weights: its own; if it fetches any, what the cache holds."""
    sources = [version.source.uri for model in spec.models for version in model.versions]
    found: list[Path] = []
    if any(uri.startswith("pypi:") for uri in sources):
        cached = [path for path in cache.rglob("*") if path.is_file() and not path.is_symlink()]
        found += [path for path in cached if path.stat().st_size >= WEIGHTS_MIN_BYTES]
    for path in (Path(uri) for uri in sources if not uri.startswith("pypi:")):
        found += path.glob("*.gguf") if path.is_dir() else [path]
    return sorted({path.resolve() for path in found})


def drop_from_page_cache(path: Path) -> None:
    """Asks the kernel to forget the file's pages; dirty ones are written first, as only clean ones
    can go. Pages that another process has mapped stay."""
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
    finally:
        os.close(descriptor)


# --- Terminal -------------------------------------------------------------------------------------


@contextmanager
def _terminated_as_interrupted() -> Iterator[None]:
    """SIGTERM and SIGHUP stop us as Ctrl-C does, so that child and directories go, too.

    SIGINT is among them because what a shell ignores for us (`&` in a script), our children would
    ignore as well; what we handle is at its default for them.
    """

    def interrupt(number: int, frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    before = {number: signal.signal(number, interrupt) for number in STOP_SIGNALS}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextmanager
def _progress(starts: int) -> Iterator[Callable[[], None]]:
    """A bar on the terminal's error stream; nothing elsewhere."""
    if not sys.stderr.isatty():
        yield lambda: None
        return
    from rich.console import Console
    from rich.progress import Progress

    # Redrawn only between starts: a refreshing thread would take time from what is measured.
    with Progress(console=Console(stderr=True), auto_refresh=False, transient=True) as bar:
        task = bar.add_task("starting", total=starts)
        bar.refresh()

        def advance() -> None:
            bar.advance(task)
            bar.refresh()

        yield advance
