"""Keeps the last lines of a process's output, bounded, without ever making the process wait.

A thread of its own drains the pipe, whatever readers of the ring do. Imported on the start path.
"""

from __future__ import annotations

import collections
import os
import threading

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable

LINE_MAX_BYTES = 8192
"""What is kept of one line."""
LINE_OVERHEAD_BYTES = 64
"""What Python itself takes for a line: without it, empty lines would be free and without number."""
READ_BYTES = 65536
MARK = b"\x1epreheat "


class LogRing:
    """The last ``capacity_bytes`` of lines. Safe to use from any thread."""

    def __init__(self, capacity_bytes: int = 256 << 10) -> None:
        self._capacity_bytes = capacity_bytes
        self._lines: collections.deque[bytes] = collections.deque()
        self._held_bytes = 0
        self._lock = threading.Lock()
        self.dropped_lines = 0

    def append(self, line: bytes) -> None:
        line = line[:LINE_MAX_BYTES]
        with self._lock:
            self._lines.append(line)
            self._held_bytes += len(line) + LINE_OVERHEAD_BYTES
            while self._held_bytes > self._capacity_bytes:
                self._held_bytes -= len(self._lines.popleft()) + LINE_OVERHEAD_BYTES
                self.dropped_lines += 1

    def lines(self) -> list[str]:
        with self._lock:
            held = list(self._lines)
        return [line.decode(errors="replace") for line in held]


def drain(
    fd: int, ring: LogRing, on_mark: Callable[[bytes], None], on_end: Callable[[], None]
) -> threading.Thread:
    """Starts the thread that reads ``fd`` to its end and then closes it.

    What follows ``MARK`` in a line is for the agent and goes to ``on_mark``, what stands before it
    to the ring. Both functions are called in the thread, ``on_end`` when the ring has it all.
    """
    thread = threading.Thread(
        target=_drain, args=(fd, ring, on_mark, on_end), name="log-ring", daemon=True
    )
    thread.start()
    return thread


def _drain(
    fd: int, ring: LogRing, on_mark: Callable[[bytes], None], on_end: Callable[[], None]
) -> None:
    rest = b""
    while chunk := os.read(fd, READ_BYTES):
        *lines, rest = (rest + chunk).split(b"\n")
        for line in lines:
            # The engine's own threads write to the same pipe, so a mark may follow half a line.
            said, marked, mark = line.partition(MARK)
            if marked:
                on_mark(mark)
            if said or not marked:
                ring.append(said)
        # A line without an end must not grow without bound.
        rest = rest[:LINE_MAX_BYTES]
    if rest:
        ring.append(rest)
    os.close(fd)
    on_end()
