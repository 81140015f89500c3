"""Processes that a benchmark starts, measures and ends; ports, waiting and directories for them.

A process started here dies with the benchmark, whatever kills it, and is ended with its whole
group. What does not belong here: what is started (``peers.py``, ``native_tools.py``).
"""

from __future__ import annotations

import contextlib
import ctypes
import http.client
import os
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import TracebackType

PR_SET_PDEATHSIG = 1
TICKS_PER_S = os.sysconf("SC_CLK_TCK")
PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")
POLL_S = 0.02


class BenchError(Exception):
    """The benchmark cannot go on; says what went wrong and where to look."""


def cache_dir() -> Path:
    """What outlives a run: compiled tools and peers' environments."""
    base = os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
    return Path(base).absolute() / "preheat-bench"


def free_port() -> int:
    """A TCP port of the loopback address that nothing listens on now."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port: int = listener.getsockname()[1]
        return port


_libc = ctypes.CDLL(None, use_errno=True)


def _die_with_parent() -> None:
    _libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)


class Process:
    """A child in a session of its own, with its output in a file (or on a pipe, when asked)."""

    def __init__(
        self,
        argv: Sequence[str],
        *,
        log: Path,
        env: Mapping[str, str] | None = None,
        pipe_stdout: bool = False,
    ) -> None:
        self.name = Path(argv[0]).name
        self.log = log
        with log.open("ab") as output:
            self.popen = subprocess.Popen(
                argv,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE if pipe_stdout else output,
                stderr=output,
                env=None if env is None else {**os.environ, **env},
                start_new_session=True,
                # Runs between fork and exec: safe because benchmarks have a single thread.
                preexec_fn=_die_with_parent,
            )

    @property
    def pid(self) -> int:
        return self.popen.pid

    def check(self) -> None:
        """Raises BenchError, with the end of its log, if the process has ended."""
        if self.popen.poll() is not None:
            tail = self.log.read_text(errors="replace")[-2000:]
            raise BenchError(f"{self.name} ended with {self.popen.returncode}:\n{tail}")

    def stop(self, grace_s: float = 5.0) -> None:
        """Ends the process and its group; returns when it is gone."""
        if self.popen.poll() is None:
            self._signal_group(signal.SIGTERM)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.popen.wait(grace_s)
        # Also reaches what an orderly exit left behind in the group.
        self._signal_group(signal.SIGKILL)
        self.popen.wait()
        if self.popen.stdout is not None:
            self.popen.stdout.close()

    def _signal_group(self, number: signal.Signals) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, number)

    def __enter__(self) -> Process:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        at: TracebackType | None,
    ) -> None:
        self.stop()


def parse_stat(text: str) -> tuple[int, int, int]:
    """(parent's pid, CPU ticks with those of reaped children, resident pages) of /proc/PID/stat."""
    # The command's name, in parentheses, may hold spaces and parentheses itself.
    fields = text[text.rindex(")") + 2 :].split()
    return int(fields[1]), sum(int(field) for field in fields[11:15]), int(fields[21])


def usage(roots: Sequence[int]) -> tuple[float, int]:
    """(CPU seconds since their start, resident bytes) of processes and all their descendants."""
    stats: dict[int, tuple[int, int, int]] = {}
    for entry in (path.name for path in Path("/proc").iterdir()):
        if entry.isdigit():
            try:
                stats[int(entry)] = parse_stat(Path("/proc", entry, "stat").read_text())
            except (FileNotFoundError, ProcessLookupError):
                continue
    family = set(roots)
    grown = True
    while grown:
        children = {pid for pid, (parent, _, _) in stats.items() if parent in family}
        grown = not children <= family
        family |= children
    members = [stats[pid] for pid in family if pid in stats]
    return sum(m[1] for m in members) / TICKS_PER_S, sum(m[2] for m in members) * PAGE_BYTES


def settled_cpu_s(roots: Sequence[int], *, quiet_s: float = 0.3, limit_s: float = 3.0) -> float:
    """CPU seconds, once work left over (buffered records) has been done or ``limit_s`` is over."""
    deadline = time.monotonic() + limit_s
    before, _ = usage(roots)
    while True:
        time.sleep(quiet_s)
        after, _ = usage(roots)
        # Two ticks: what idle servers spend on their timers.
        if after - before <= 2 / TICKS_PER_S or time.monotonic() > deadline:
            return after
        before = after


def wait_until(ready: Callable[[], bool], what: str, *, process: Process, limit_s: float) -> None:
    """Returns once ``ready``; raises BenchError if the process ends or time runs out first."""
    deadline = time.monotonic() + limit_s
    while not ready():
        process.check()
        if time.monotonic() > deadline:
            raise BenchError(f"{what} not ready within {limit_s:g} s; its log: {process.log}")
        time.sleep(POLL_S)


def answers(port: int, body: str, *, key: str = "none") -> bool:
    """Whether a chat completion with this JSON body is answered 200 on the port."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=10)
    try:
        headers = {"content-type": "application/json", "authorization": f"Bearer {key}"}
        connection.request("POST", "/v1/chat/completions", body, headers)
        return connection.getresponse().status == 200
    except (OSError, http.client.HTTPException):
        return False
    finally:
        connection.close()
