"""What several starts say together: the list of the recorded, and the report of the measured.

Pure: records in, lines and JSON out. What does not belong here: running or reading anything.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

import msgspec

from preheat.cli.waterfall import milliseconds, percent, size
from preheat.core.coldstart import (
    CACHED_SHARE,
    GOOD_COVERAGE,
    MAIN,
    Percentiles,
    coverage,
    heaviest,
    median,
    percentiles,
    self_times,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

    from preheat.cli.coldstart_run import Results, Run
    from preheat.core.coldstart import ColdStart
    from preheat.core.traces.store import StoredRecord

SPAWN_TOLERANCE_S = 0.05
"""A record that begins later than this after its launch hides a part of the start."""

DEFINITION = "nearest rank"


@dataclass(frozen=True, slots=True)
class PhaseRow:
    """Medians over all starts of the phases of one name; a start without it counts as zero."""

    name: str
    track: str
    total_s: float
    self_s: float


@dataclass(frozen=True, slots=True)
class Report:
    content: dict[str, Any]
    sla_met: bool | None

    def encoded(self) -> bytes:
        return msgspec.json.format(msgspec.json.encode(self.content), indent=2) + b"\n"


# --- The list -------------------------------------------------------------------------------------


def list_lines(stored: Sequence[StoredRecord]) -> list[str]:
    header = ("ID", "STARTED", "READY", "FIRST TOKEN", "CACHED", "MOST TIME IN", "OUTCOME", "MODEL")
    return columns([header, *(_list_row(one) for one in stored)], right=(2, 3, 4))


def _list_row(stored: StoredRecord) -> tuple[str, ...]:
    record = stored.record
    when = datetime.fromtimestamp(record.unix_time_s, UTC).astimezone()
    worst = heaviest(record)
    token_s = record.time_to_first_token_s
    return (
        stored.id,
        f"{when:%Y-%m-%d %H:%M:%S}",
        "-" if record.ready_s is None else milliseconds(record.ready_s - record.spawned_s),
        "-" if token_s is None else milliseconds(token_s),
        "-" if record.page_cache_share is None else percent(record.page_cache_share),
        "-" if worst is None else worst[0].name,
        " ".join(record.outcome.split()),
        f"{record.model} {record.version}",
    )


def columns(rows: Sequence[Sequence[str]], *, right: Sequence[int] = ()) -> list[str]:
    """Rows as lines with aligned columns; those in ``right`` are aligned to the right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  ".join(
            cell.rjust(width) if index in right else cell.ljust(width)
            for index, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]


# --- The report of a run --------------------------------------------------------------------------


def phase_rows(records: Sequence[ColdStart]) -> list[PhaseRow]:
    """Where the time goes: the main track first, and in each in the order of the phases' starts."""
    totals: dict[tuple[str, str], list[tuple[float, float]]] = {}
    starts: dict[tuple[str, str], list[float]] = {}
    for record in records:
        sums: dict[tuple[str, str], tuple[float, float]] = {}
        for phase, own_s in zip(record.phases, self_times(record), strict=True):
            key = (phase.track, phase.name)
            total_s, self_s = sums.get(key, (0.0, 0.0))
            sums[key] = (total_s + phase.duration_s, self_s + own_s)
            starts.setdefault(key, []).append(phase.start_s - record.spawned_s)
        for key, pair in sums.items():
            totals.setdefault(key, []).append(pair)
    rows = {}
    for key, pairs in totals.items():
        pairs += [(0.0, 0.0)] * (len(records) - len(pairs))
        rows[key] = PhaseRow(
            name=key[1],
            track=key[0],
            total_s=median(total_s for total_s, _ in pairs),
            self_s=median(self_s for _, self_s in pairs),
        )
    # At the same start the shorter path is the outer phase.
    return [
        rows[key]
        for key in sorted(rows, key=lambda key: (key[0] != MAIN, key[0], min(starts[key]), key[1]))
    ]


def most_time(rows: Sequence[PhaseRow]) -> PhaseRow | None:
    """The row of the main track with the largest median self time."""
    main = [row for row in rows if row.track == MAIN]
    return max(main, key=lambda row: row.self_s, default=None)


def first_token_times_s(results: Results) -> list[float]:
    times_s = [measured.record.time_to_first_token_s for measured in results.starts]
    return [time_s for time_s in times_s if time_s is not None]


def report_lines(run: Run, results: Results, sla_s: float | None) -> list[str]:
    """The report in words and tables."""
    records = [measured.record for measured in results.starts]
    times_s = first_token_times_s(results)
    ranks = percentiles(times_s)
    rows = phase_rows(records)
    temperature = "cold" if run.cold else "warm"
    lines = [
        f"{len(records)} {temperature} starts of {records[0].model} {records[0].version}",
        "",
        _percentile_line(ranks, times_s),
        *_cache_lines(run, results),
        *_trust_lines(results),
        "",
        "where the time goes (medians)",
        *_phase_lines(rows, ranks.p50),
    ]
    worst = most_time(rows)
    if worst is not None:
        share = percent(worst.self_s / ranks.p50)
        lines += ["", f"Most of it goes to {worst.name}: {milliseconds(worst.self_s)}, {share}."]
    if sla_s is not None:
        lines.append(_sla_line(ranks, sla_s))
    return lines


def report_json(run: Run, results: Results, sla_s: float | None) -> Report:
    """Everything that was measured, records included, and the verdict."""
    records = [measured.record for measured in results.starts]
    ranks = percentiles(first_token_times_s(results))
    rows = phase_rows(records)
    worst = most_time(rows)
    met = None if sla_s is None else ranks.p95 <= sla_s
    content = {
        "target": run.target,
        "page_cache": "cold" if run.cold else "warm",
        "dropped_files": [str(path) for path in results.dropped],
        "starts": len(records),
        "time_to_first_token_s": ranks,
        "percentiles": DEFINITION,
        "sla": None if sla_s is None else {"p95_s": sla_s, "met": met},
        "dominating": None if worst is None else worst.name,
        "phases": rows,
        "coverage": [coverage(record) for record in records],
        "spawn_lag_s": [one.record.spawned_s - one.launched_s for one in results.starts],
        "records": records,
    }
    return Report(content, met)


def _percentile_line(ranks: Percentiles, times_s: Sequence[float]) -> str:
    return (
        f"spawn to first token   P50 {milliseconds(ranks.p50)}   P95 {milliseconds(ranks.p95)}   "
        f"P99 {milliseconds(ranks.p99)}   ({DEFINITION} of {len(times_s)}; "
        f"{milliseconds(min(times_s))} to {milliseconds(max(times_s))})"
    )


def _phase_lines(rows: Sequence[PhaseRow], whole_s: float) -> list[str]:
    header = ("phase", "total", "own", "own share", "track")
    body = [
        (
            row.name,
            milliseconds(row.total_s),
            milliseconds(row.self_s),
            percent(row.self_s / whole_s) if row.track == MAIN else "-",
            row.track,
        )
        for row in rows
    ]
    return [f"  {line}" for line in columns([header, *body], right=(1, 2, 3))]


def _cache_lines(run: Run, results: Results) -> list[str]:
    """What was dropped, and whether the records bear it out."""
    lines = []
    if run.cold:
        files = ", ".join(path.name for path in results.dropped)
        lines.append(
            f"dropped from the page cache before each start: {files} (the weights only, not the "
            "programs)"
        )
    shares = [measured.record.page_cache_share for measured in results.starts]
    known = [share for share in shares if share is not None]
    if not known:
        return [*lines, "! the records do not say how much of the weights the page cache held"]
    read = size(median(measured.record.bytes_read for measured in results.starts))
    lines.append(
        f"weights found in the page cache: {percent(min(known))} to {percent(max(known))}; "
        f"{read} read each time"
    )
    if run.cold and max(known) > 1 - CACHED_SHARE:
        lines.append("! not all starts were cold: does another process have the file mapped?")
    if not run.cold and min(known) < CACHED_SHARE:
        lines.append("! not all starts were warm: is memory short?")
    return lines


def _trust_lines(results: Results) -> list[str]:
    """Whether the records tell the whole time."""
    least = min(coverage(measured.record) for measured in results.starts)
    lag_s = max(measured.record.spawned_s - measured.launched_s for measured in results.starts)
    late = milliseconds(max(0.0, lag_s))
    lines = [f"phases cover {percent(least, 1)} or more; records begin at most {late} after launch"]
    if least < GOOD_COVERAGE:
        lines.append(f"! below {percent(GOOD_COVERAGE)} a record does not say where the time went")
    if lag_s > SPAWN_TOLERANCE_S:
        lines.append("! the records miss the beginning of the start")
    return lines


def _sla_line(ranks: Percentiles, sla_s: float) -> str:
    if ranks.p95 <= sla_s:
        return f"SLA met: P95 {milliseconds(ranks.p95)} of {milliseconds(sla_s)}"
    missed_s = ranks.p95 - sla_s
    return (
        f"SLA missed: P95 {milliseconds(ranks.p95)} of {milliseconds(sla_s)}, "
        f"{milliseconds(missed_s)} too long"
    )
