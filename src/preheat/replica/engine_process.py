"""The engine's process as the agent owns it: what it is told, how it ends, what it leaves behind.

Everything the engine starts ends with it, also what left its process group, because orphans come to
the agent (subreaper). If the agent itself is killed, the kernel kills the engine, and the engine's
own children go to the next subreaper above (the supervisor, or a pod's first process).
What does not belong here: when to start or end it (``agent.py``).
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import time
from pathlib import Path
from typing import TYPE_CHECKING

from preheat.core.errors import EngineExited
from preheat.core.spawn import kill_group
from preheat.replica import exits

if TYPE_CHECKING:
    from preheat.replica.begun import Begun

STOP_GRACE_S = 2.0
"""What an engine has to end after SIGTERM."""
ORPHANS_S = 1.0
# How long the last words of a dead engine are waited for; orphans may keep its pipe open.
LAST_WORDS_S = 0.25
TICK_S = 0.005


class EngineProcess:
    """Made inside the running loop; ``reap`` is to be called on SIGCHLD, ``hear`` on news."""

    def __init__(self, begun: Begun, start_id: str) -> None:
        self._begun = begun
        self._start_id = start_id
        self._oom_kills_before = exits.oom_kill_count()
        self.ended = asyncio.Event()
        self.status: int | None = None
        """As from waitpid; None while it runs."""
        self._all_said = asyncio.Event()
        self.ordered = False
        """Whether we ended it."""

    @property
    def pid(self) -> int:
        """0 before it was launched."""
        return self._begun.engine_pid

    def ensure_launched(self) -> None:
        """Raises EngineExited when its program cannot be run."""
        if not self.pid and self._begun.engine_error is None:
            self._begun.launch_engine()
        if (error := self._begun.engine_error) is not None:
            raise EngineExited(
                f"the engine of {self._start_id} could not be started: {error}",
                advice="install preheat anew: a program that belongs to it is missing or broken",
            )

    def hear(self) -> None:
        """Sees what the threads of ``begun`` have to tell."""
        if self._begun.output_ended:
            self._all_said.set()

    def reap(self) -> None:
        """Collects the engine and whatever orphans it left that are dead by now."""
        with contextlib.suppress(ChildProcessError):
            while (dead := os.waitpid(-1, os.WNOHANG))[0]:
                if dead[0] == self.pid:
                    self.status = dead[1]
                    self.ended.set()

    async def end(self) -> None:
        """SIGTERM, then SIGKILL; returns when nothing that the engine started is left."""
        self.reap()
        if self.pid and self.status is None:
            self.ordered = True
            self._begun.close_engine_stdin()
            kill_group(self.pid, signal.SIGTERM)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(STOP_GRACE_S):
                    await self.ended.wait()
            if self.status is None:
                kill_group(self.pid, signal.SIGKILL)
                await self.ended.wait()
        await self._end_orphans()

    async def _end_orphans(self) -> None:
        """The engine was our only child: whoever is one now is an orphan of it."""
        deadline_s = time.monotonic() + ORPHANS_S
        while (orphans := _children()) and time.monotonic() < deadline_s:
            for pid in orphans:
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.kill(pid, signal.SIGKILL)
            await asyncio.sleep(TICK_S)
            self.reap()

    async def exit_error(self) -> EngineExited:
        """Why it is gone, once it is."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(LAST_WORDS_S):
                await self._all_said.wait()
        around = exits.Surroundings(
            ordered=self.ordered,
            oom_kills=exits.oom_kill_count() - self._oom_kills_before,
            last_lines=tuple(self._begun.ring.lines()[-50:]),
        )
        why = exits.explain(self.status or 0, around)
        return EngineExited(f"the engine of {self._start_id} is gone: {why}")


def _children() -> list[int]:
    """Pids of this process's children, dead ones that were not collected included."""
    found: list[int] = []
    try:
        for task in Path("/proc/self/task").iterdir():
            found += map(int, (task / "children").read_text().split())
    except OSError:  # a kernel without this file, or a thread that ended meanwhile
        return _children_by_scan()
    return found


def _children_by_scan() -> list[int]:
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdecimal():
            with contextlib.suppress(OSError):
                # The name before the last parenthesis may hold anything.
                fields = (entry / "stat").read_text().rpartition(")")[2].split()
                if int(fields[1]) == os.getpid():
                    found.append(int(entry.name))
    return found
