from __future__ import annotations

import os
import threading
import tracemalloc
from dataclasses import dataclass, field

from hypothesis import given, settings
from hypothesis import strategies as st

from preheat.replica.logring import LINE_MAX_BYTES, LINE_OVERHEAD_BYTES, LogRing, drain


@dataclass
class Drained:
    """What became of an output that was written in these pieces."""

    pieces: list[bytes]
    capacity_bytes: int = 1 << 20
    marks: list[bytes] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.ring = LogRing(self.capacity_bytes)
        ended = threading.Event()
        read_end, write_end = os.pipe()
        thread = drain(read_end, self.ring, self.marks.append, ended.set)
        for piece in self.pieces:
            os.write(write_end, piece)
        os.close(write_end)
        assert ended.wait(30)
        thread.join()


@settings(max_examples=50, deadline=None)
@given(st.lists(st.binary(min_size=1, max_size=50), max_size=20))
def test_lines_come_out_whole_however_the_output_was_cut(pieces: list[bytes]) -> None:
    joined = b"".join(pieces).replace(b"\x1e", b"")
    expected = joined.removesuffix(b"\n").split(b"\n") if joined else []
    drained = Drained([piece.replace(b"\x1e", b"") or b"" for piece in pieces if piece != b"\x1e"])
    assert drained.ring.lines() == [line.decode(errors="replace") for line in expected]


@given(st.lists(st.binary(max_size=300), max_size=60), st.integers(100, 2000))
def test_a_ring_keeps_the_last_lines_and_never_more_than_its_capacity(
    lines: list[bytes], capacity_bytes: int
) -> None:
    ring = LogRing(capacity_bytes)
    for line in lines:
        ring.append(line)
    kept = ring.lines()
    assert kept == [line.decode(errors="replace") for line in lines[len(lines) - len(kept) :]]
    assert ring.dropped_lines == len(lines) - len(kept)
    held = sum(len(line) + LINE_OVERHEAD_BYTES for line in lines[len(lines) - len(kept) :])
    assert held <= capacity_bytes


def test_empty_lines_are_bounded_too() -> None:
    ring = LogRing(64 * LINE_OVERHEAD_BYTES)
    for _ in range(100_000):
        ring.append(b"")
    assert len(ring.lines()) == 64


def test_a_line_without_an_end_is_cut_and_the_next_one_is_whole() -> None:
    drained = Drained([b"x" * 50_000] * 20 + [b"\nnext\n"])
    first, second = drained.ring.lines()
    assert len(first) == LINE_MAX_BYTES
    assert second == "next"


def test_a_line_without_an_end_takes_no_memory_that_grows_with_it() -> None:
    tracemalloc.start()
    try:
        Drained([b"x" * 65536] * 128)
        _, peak_bytes = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak_bytes < 2 << 20


def test_marks_are_told_apart_from_lines_wherever_they_begin() -> None:
    drained = Drained([b"a\n\x1epreheat {}\nhalf\x1epreh", b"eat [1]\n\x1eother\nlast"])
    assert drained.marks == [b"{}", b"[1]"]
    assert drained.ring.lines() == ["a", "half", "\x1eother", "last"]


def test_the_descriptor_is_closed_at_the_end() -> None:
    before = set(os.listdir("/proc/self/fd"))  # noqa: PTH208
    Drained([b"a\n"])
    assert set(os.listdir("/proc/self/fd")) <= before  # noqa: PTH208
