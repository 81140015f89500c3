"""Says why an engine's process ended, from its wait status and what is known around it.

``explain`` is pure; ``oom_kill_count`` reads the kernel's counters. What does not belong here:
waiting for processes (``engine_process.py``).
"""

from __future__ import annotations

import os
import re
import signal
from dataclasses import dataclass
from pathlib import Path

BAD_FILE_EXIT = 3
"""Exit code by which an engine's host says that the model could not be loaded."""

_ERROR_LINE = re.compile(
    r"error|fail|could not|cannot|abort|out of memory|exception", re.IGNORECASE
)
_ENGINE_ERROR = re.compile(r"[0-9.]+ E (.+)")
_PROC = Path("/proc")
_CGROUPS = Path("/sys/fs/cgroup")


@dataclass(frozen=True, slots=True)
class Surroundings:
    """What was seen around the end."""

    ordered: bool
    """We ended it ourselves."""
    oom_kills: int
    """Processes that the kernel killed for memory while it ran, in its control group or, where
    there is none, on this machine."""
    last_lines: tuple[str, ...]


def explain(status: int, around: Surroundings) -> str:
    """``status`` as from waitpid."""
    said = _said(around.last_lines)
    if os.WIFSIGNALED(status):
        number = os.WTERMSIG(status)
        name = _signal_name(number)
        if around.ordered:
            return f"it was stopped ({name})"
        if number == signal.SIGKILL and around.oom_kills:
            return "the kernel killed it: out of memory (SIGKILL, and its count of such kills rose)"
        if number == signal.SIGKILL:
            return "somebody killed it (SIGKILL); the kernel counted no kill for memory"
        return f"it crashed ({name}, {signal.strsignal(number) or 'no known signal'}){said}"
    code = os.waitstatus_to_exitcode(status)
    if around.ordered:
        return f"it was stopped (exit code {code})"
    if code == BAD_FILE_EXIT:
        return f"it could not load the model{_said_first(around.last_lines) or said}"
    return f"it ended by itself with exit code {code}{said}"


def _said(lines: tuple[str, ...]) -> str:
    """The last line that tells of an error, else the last that says anything."""
    spoken = [line.strip() for line in lines if line.strip()]
    telling = [line for line in spoken if _ERROR_LINE.search(line)] or spoken
    return f"; it said: {telling[-1][:300]}" if telling else ""


def _said_first(lines: tuple[str, ...]) -> str:
    """llama.cpp's first complaint: those that follow only pass it on."""
    found = next(filter(None, map(_ENGINE_ERROR.match, lines)), None)
    return f"; it said: {found[1][:300]}" if found else ""


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:  # real-time signals between the first and the last have no name
        return f"signal {number}"


def oom_kill_count(proc: Path = _PROC, cgroups: Path = _CGROUPS) -> int:
    """Kills for memory that the kernel has counted in this process's control group (version 2 or
    1), or machine-wide where no group counts them; 0 where the kernel does not say."""
    for file in _counters(_read(proc / "self/cgroup"), cgroups):
        if (count := _counted(file)) is not None:
            return count
    return _counted(proc / "vmstat") or 0


def _counters(membership: str, cgroups: Path) -> list[Path]:
    """Files that may hold the count, nearest first. In a container the path may be the host's and
    exist nowhere; then the mounted root is the container's own group."""
    files = []
    for line in membership.splitlines():
        _, controllers, path = line.split(":", 2)
        if not controllers:
            root, name = cgroups, "memory.events"
        elif "memory" in controllers.split(","):
            root, name = cgroups / "memory", "memory.oom_control"
        else:
            continue
        files += [root / path.strip("/") / name, root / name]
    return files


def _counted(file: Path) -> int | None:
    found = re.search(r"^oom_kill (\d+)$", _read(file), re.MULTILINE)
    return int(found[1]) if found else None


def _read(file: Path) -> str:
    try:
        return file.read_text()
    except OSError:
        return ""
