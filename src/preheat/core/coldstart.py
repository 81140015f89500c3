"""Cold-start records: where the time of one start of one replica went.

A record is a tree of named phases on the machine's monotonic clock (CLOCK_MONOTONIC is one clock
for all processes). Phases of one ``track`` never overlap except by nesting, and what lies inside a
phase is named under it; the track ``main`` is the critical path from spawn to first token.

Pure values and arithmetic, and ``Recorder``, which collects phases while a process starts. This is
imported on the start path: nothing heavier than msgspec comes in here. Files and exports stand in
``core.traces``, pictures in ``cli.waterfall``.
"""

from __future__ import annotations

import time
from math import inf, isfinite
from typing import TYPE_CHECKING

from msgspec import Struct

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence
    from types import TracebackType

MAIN = "main"

GOOD_COVERAGE = 0.98
"""Least coverage of a record that can be trusted to say where the time went."""

CACHED_SHARE = 0.9
"""From this share of the weights in the page cache on, a start counts as one with a warm cache."""

Attribute = str | int | float | bool


class Phase(Struct, frozen=True, kw_only=True):
    name: str
    """Dotted path of the phase, its parent's path first: ``weights.hash``."""
    start_s: float
    """Seconds on CLOCK_MONOTONIC."""
    end_s: float
    track: str = MAIN
    """``main`` is the critical path; other tracks run beside it (``envoy``, ``controlplane``)."""
    attributes: dict[str, Attribute] = {}

    @property
    def duration_s(self) -> float:
        return self.end_s - self.start_s


class ColdStart(Struct, frozen=True, kw_only=True):
    """One start of one replica."""

    start_id: str
    """``REPLICA@NUMBER``, as in the response header ``x-preheat-replica``."""
    model: str
    version: str
    engine: str
    unix_time_s: float
    """Wall clock at ``spawned_s``."""
    spawned_s: float
    """When the process that started it all was spawned (CLOCK_MONOTONIC)."""
    ready_s: float | None = None
    first_token_s: float | None = None
    """When the first token of the probe through the gateway (or of a first request) had arrived."""
    outcome: str = "ready"
    """``ready``, or the reason of the failure."""
    bytes_read: int = 0
    """Bytes the weights' reader read."""
    page_cache_share: float | None = None
    """Share of the weights found in the page cache before reading, 0 to 1; None if not known."""
    phases: tuple[Phase, ...] = ()

    @property
    def time_to_first_token_s(self) -> float | None:
        """Seconds from spawn to first token; None if there was none."""
        return None if self.first_token_s is None else self.first_token_s - self.spawned_s


class Percentiles(Struct, frozen=True, kw_only=True):
    """Nearest-rank percentiles: see ``percentiles``."""

    p50: float
    p95: float
    p99: float


# --- The tree -------------------------------------------------------------------------------------


def named_under(name: str, ancestor: str) -> bool:
    """Whether the dotted ``name`` lies below ``ancestor``."""
    return name.startswith(ancestor + ".")


def parents(phases: Sequence[Phase]) -> tuple[int | None, ...]:
    """For each phase the index of the innermost phase of its track that it lies in, or None.

    Of two phases with the same times the one with the shorter path is the outer one. A phase
    without length at the very edge of another lies in it only if it is named under it.
    """
    order = outer_first(phases)
    result: list[int | None] = [None] * len(phases)
    for position, index in enumerate(order):
        for candidate in reversed(order[:position]):
            if _lies_in(phases[index], phases[candidate]):
                result[index] = candidate
                break
    return tuple(result)


def outer_first(phases: Sequence[Phase]) -> list[int]:
    """Indices by start; what starts together, longest first; what is equal, shortest path first."""
    return sorted(
        range(len(phases)),
        key=lambda i: (phases[i].start_s, -phases[i].end_s, phases[i].name.count("."), i),
    )


def _lies_in(inner: Phase, outer: Phase) -> bool:
    if inner.track != outer.track or not _within(inner, outer):
        return False
    at_edge = inner.start_s == inner.end_s and inner.start_s in (outer.start_s, outer.end_s)
    return not at_edge or named_under(inner.name, outer.name)


def _within(inner: Phase, outer: Phase) -> bool:
    return outer.start_s <= inner.start_s and inner.end_s <= outer.end_s


# --- Whether a record is sound --------------------------------------------------------------------


def problems(record: ColdStart) -> list[str]:
    """What makes the record one that cannot be trusted, in words; empty for a sound one.

    There is no tolerance: all times are readings of one clock, so neighbours share a reading or lie
    apart. Low coverage is not a problem of form; compare ``coverage`` with ``GOOD_COVERAGE``.
    """
    found = [text for phase in record.phases for text in _own_problems(phase, record)]
    found += [
        f"{moment} lies before the spawn"
        for moment, at_s in (("ready", record.ready_s), ("first token", record.first_token_s))
        if at_s is not None and at_s < record.spawned_s
    ]
    for track in dict.fromkeys(phase.track for phase in record.phases):
        on_track = [phase for phase in record.phases if phase.track == track]
        found += _overlaps(on_track)
        found += _misnamed(on_track)
    return found


def _own_problems(phase: Phase, record: ColdStart) -> list[str]:
    found = []
    if not all(phase.name.split(".")):
        found.append(f"the name {phase.name!r} has an empty part")
    if not (isfinite(phase.start_s) and isfinite(phase.end_s)):
        found.append(f"{phase.name} has a time that is not a number")
    elif phase.end_s < phase.start_s:
        found.append(f"{phase.name} ends {phase.start_s - phase.end_s:.6f} s before it starts")
    elif phase.track == MAIN and phase.start_s < record.spawned_s:
        found.append(f"{phase.name} starts before the spawn")
    return found


def _overlaps(phases: Sequence[Phase]) -> list[str]:
    order = [phases[i] for i in outer_first(phases)]
    return [
        f"{first.name} and {second.name} overlap by {first.end_s - second.start_s:.6f} s "
        f"on the track {first.track}"
        for position, first in enumerate(order)
        for second in order[position + 1 :]
        if first.start_s < second.start_s < first.end_s < second.end_s
    ]


def _misnamed(phases: Sequence[Phase]) -> list[str]:
    """Where the tree of the names and the tree of the times disagree."""
    found = []
    for phase, parent in zip(phases, parents(phases), strict=True):
        if parent is not None and not named_under(phase.name, phases[parent].name):
            found.append(f"{phase.name} lies in {phases[parent].name} but is not named under it")
    by_name: dict[str, list[Phase]] = {}
    for phase in phases:
        by_name.setdefault(phase.name, []).append(phase)
    for phase in phases:
        ancestor = _nearest_recorded(phase.name, by_name)
        if ancestor and not any(_within(phase, outer) for outer in by_name[ancestor]):
            found.append(f"{phase.name} lies outside {ancestor}")
    return found


def _nearest_recorded(name: str, recorded: dict[str, list[Phase]]) -> str | None:
    while "." in name:
        name = name.rpartition(".")[0]
        if name in recorded:
            return name
    return None


# --- Where the time went --------------------------------------------------------------------------


def coverage(record: ColdStart) -> float:
    """Share, 0 to 1, of the time from spawn to first token that the main track accounts for.

    Without a first token that is 0. Time that two phases claim counts once.
    """
    if record.first_token_s is None or not record.spawned_s < record.first_token_s:
        return 0.0
    main = [(p.start_s, p.end_s) for p in record.phases if p.track == MAIN]
    covered_s = _union_s(main, record.spawned_s, record.first_token_s)
    return covered_s / (record.first_token_s - record.spawned_s)


def self_times(record: ColdStart) -> tuple[float, ...]:
    """Seconds of each phase that none of its children accounts for, in the order of ``phases``."""
    children: dict[int, list[tuple[float, float]]] = {}
    for phase, parent in zip(record.phases, parents(record.phases), strict=True):
        if parent is not None:
            children.setdefault(parent, []).append((phase.start_s, phase.end_s))
    return tuple(
        max(
            0.0,
            phase.duration_s - _union_s(children.get(index, ()), phase.start_s, phase.end_s),
        )
        for index, phase in enumerate(record.phases)
    )


def heaviest(record: ColdStart) -> tuple[Phase, float] | None:
    """The phase of the main track with the largest self time, and that time; None without phases.

    Of equals it is the one recorded first. What starts after the first token does not count.
    """
    until_s = inf if record.first_token_s is None else record.first_token_s
    own = [
        (phase, self_s)
        for phase, self_s in zip(record.phases, self_times(record), strict=True)
        if phase.track == MAIN and phase.start_s < until_s
    ]
    return max(own, key=lambda pair: pair[1], default=None)


def dominating(record: ColdStart) -> Phase:
    """The phase of ``heaviest``. Raises ValueError if the main track has none."""
    found = heaviest(record)
    if found is None:
        raise ValueError(f"the start {record.start_id} has no phase on the main track")
    return found[0]


def _union_s(intervals: Iterable[tuple[float, float]], low_s: float, high_s: float) -> float:
    """Length of the union of the intervals, cut to ``low_s`` … ``high_s``."""
    total_s = 0.0
    reached_s = low_s
    for start_s, end_s in sorted(intervals):
        start_s, end_s = max(start_s, reached_s), min(end_s, high_s)
        if end_s > start_s:
            total_s += end_s - start_s
            reached_s = end_s
    return total_s


# --- Many starts ----------------------------------------------------------------------------------


def percentiles(values: Iterable[float]) -> Percentiles:
    """P50, P95 and P99 by nearest rank: the smallest value that at least p % of all do not exceed.

    Each is thus a value that occurred. With few values the high ones are the largest: P95 below 20
    values, P99 below 100. Raises ValueError without values.
    """
    ordered = sorted(values)
    if not ordered:
        raise ValueError("no percentiles without values")

    def at(percent: int) -> float:
        rank = -(-percent * len(ordered) // 100)  # rounded up, without floats
        return ordered[rank - 1]

    return Percentiles(p50=at(50), p95=at(95), p99=at(99))


def median(values: Iterable[float]) -> float:
    """Middle value, or the mean of the two middle ones. Raises ValueError without values."""
    ordered = sorted(values)
    if not ordered:
        raise ValueError("no median without values")
    middle = len(ordered) // 2
    if len(ordered) % 2:
        return ordered[middle]
    return (ordered[middle - 1] + ordered[middle]) / 2


# --- Collecting -----------------------------------------------------------------------------------


class Recorder:
    """Collects the phases of one process::

    recorder = Recorder()
    with recorder.phase("weights.hash", bytes=size) as hashing:
        hashing.set(threads=2)
    recorder.add("process", spawned_s, main_s)
    """

    def __init__(self, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._phases: list[Phase] = []

    @property
    def phases(self) -> tuple[Phase, ...]:
        """What is finished, by start, outer phases first."""
        return tuple(self._phases[i] for i in outer_first(self._phases))

    def phase(self, name: str, /, *, track: str = MAIN, **attributes: Attribute) -> OpenPhase:
        """A context manager that records its block, also when the block raises."""
        return OpenPhase(self, name, track, attributes)

    def add(
        self,
        name: str,
        start_s: float,
        end_s: float,
        /,
        *,
        track: str = MAIN,
        **attributes: Attribute,
    ) -> None:
        """Records a phase whose times (readings of the same clock) are known from elsewhere."""
        self._phases.append(
            Phase(name=name, start_s=start_s, end_s=end_s, track=track, attributes=attributes)
        )

    def now_s(self) -> float:
        return self._clock()


class OpenPhase:
    """A phase that has not ended. Made by ``Recorder.phase``."""

    def __init__(
        self, recorder: Recorder, name: str, track: str, attributes: dict[str, Attribute]
    ) -> None:
        self._recorder = recorder
        self._name = name
        self._track = track
        self._attributes = attributes
        self._start_s = 0.0

    def set(self, **attributes: Attribute) -> None:
        """Adds attributes that are known only while the phase runs."""
        self._attributes.update(attributes)

    def __enter__(self) -> OpenPhase:
        self._start_s = self._recorder.now_s()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        end_s = self._recorder.now_s()
        if kind is not None:
            self._attributes.setdefault("error", kind.__name__)
        self._recorder.add(self._name, self._start_s, end_s, track=self._track, **self._attributes)
