"""What happened to one start, in order: kept in memory, streamed to followers, appended to a file.

The file is the agent's own log: who wants to know later whether a start had proved itself asks it,
not the control plane. Bounded: a file over 4 MiB is set aside once; a start has a dozen events.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import time
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path

FILE_MAX_BYTES = 4 << 20
FLUSH_S = 0.5
"""What followers have at the end to read what is left. One that never reads must not hold us."""


class EventLog:
    def __init__(self, path: Path, *, replica: str, start_id: str) -> None:
        """Raises OSError when the file cannot be opened."""
        self._common = {"replica": replica, "start_id": start_id}
        self._lines: list[bytes] = []
        self._followers = 0
        self._unfollowed = asyncio.Event()
        self._changed = asyncio.Event()
        self._closed = False
        self.file_error = ""
        """Why the file lacks events; empty when it has all."""
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        if path.exists() and path.stat().st_size > FILE_MAX_BYTES:
            path.replace(path.with_suffix(".1.jsonl"))
        self._fd = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600)

    def add(self, event: str, state: str, **details: Any) -> None:
        """Appends one event. One write each, so that lines of several agents never mix."""
        entry = {
            "n": len(self._lines) + 1,
            "unix_time_s": time.time(),
            "monotonic_s": time.monotonic(),
            **self._common,
            "event": event,
            "state": state,
            **details,
        }
        line = json.dumps(entry).encode() + b"\n"
        try:
            os.write(self._fd, line)
        except OSError as error:  # a full disk must not take a serving replica down
            self.file_error = f"{error.strerror}, from event {entry['n']} on"
        self._lines.append(line)
        self._wake()

    def _wake(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()

    async def follow(self, after: int) -> AsyncIterator[bytes]:
        """Lines after number ``after``, then each new one, until the log is closed."""
        self._followers += 1
        try:
            while True:
                changed = self._changed
                for line in self._lines[after:]:
                    yield line
                    after += 1
                if changed is not self._changed:
                    continue
                if self._closed:
                    return
                await changed.wait()
        finally:
            self._followers -= 1
            self._unfollowed.set()

    async def close(self, timeout_s: float = FLUSH_S) -> None:
        """Closes the log once its followers have read it to the end, or the time is over."""
        self._closed = True
        self._wake()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                while self._followers:
                    self._unfollowed.clear()
                    await self._unfollowed.wait()
        os.close(self._fd)
