"""A cold start as a waterfall: lines of styled text that fit a width, without any terminal.

Who prints them decides about colours; without these the lines say the same. What does not belong
here: reading records, consoles, and statistics over several starts.
"""

from __future__ import annotations

import textwrap
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import TYPE_CHECKING

from preheat.core.coldstart import (
    CACHED_SHARE,
    GOOD_COVERAGE,
    MAIN,
    coverage,
    heaviest,
    outer_first,
    parents,
    problems,
)

if TYPE_CHECKING:
    from preheat.core.coldstart import ColdStart, Phase

LABEL_MIN_COLUMNS = 12
BAR_MIN_COLUMNS = 8
FIGURES_COLUMNS = 18
"""``123456.7 ms 100 %`` and the blank before it."""

Line = tuple[tuple[str, str], ...]
"""Pieces of a line: (text, style); a style is one that rich knows, or empty."""


@dataclass(frozen=True, slots=True)
class Glyphs:
    bar: str
    sliver: str
    """A bar shorter than half a column."""
    cut: str
    """Stands for what had no room."""


UNICODE = Glyphs(bar="█", sliver="▏", cut="…")
ASCII = Glyphs(bar="#", sliver="|", cut="~")


@dataclass(frozen=True, slots=True)
class _Row:
    label: str
    phase: Phase
    style: str


@dataclass(frozen=True, slots=True)
class _Scale:
    origin_s: float
    total_s: float
    columns: int

    def bar(self, phase: Phase, glyphs: Glyphs) -> str:
        """The phase's bar with the blanks before it, at most ``columns`` long."""
        per_s = self.columns / self.total_s
        start = min(max(0.0, (phase.start_s - self.origin_s) * per_s), self.columns - 1.0)
        length = min((phase.end_s - self.origin_s) * per_s, self.columns) - start
        first = int(start)
        if length < 0.5:
            return " " * first + glyphs.sliver
        return " " * first + glyphs.bar * min(max(1, round(length)), self.columns - first)


def milliseconds(value_s: float) -> str:
    """``0.4 ms``, ``37 ms``, ``1,204 ms``."""
    return f"{value_s * 1e3:.1f} ms" if value_s < 0.01 else f"{value_s * 1e3:,.0f} ms"


def percent(share: float, digits: int = 0) -> str:
    """``37 %``."""
    return f"{share * 100:.{digits}f} %"


def size(value_bytes: float) -> str:
    """``98.4 MB`` (decimal units)."""
    for unit in ("B", "kB", "MB", "GB"):
        if value_bytes < 1000:
            return f"{value_bytes:.3g} {unit}"
        value_bytes /= 1000
    return f"{value_bytes:,.1f} TB"


def waterfall(
    record: ColdStart, width: int, *, glyphs: Glyphs = UNICODE, note: str | None = None
) -> list[Line]:
    """The picture with its heading and conclusions; ``note`` is a further one.

    Lines of plain ASCII names are at most ``width`` long; wide characters have to be cut by who
    prints them.
    """
    lines = [*_paragraph(_heading(record), width, "bold"), ()]
    if record.phases:
        lines += [*_picture(record, width, glyphs), ()]
    for text, style in _conclusions(record):
        lines += _paragraph(text, width, style)
    if note:
        lines += _paragraph(f"Slower than its baseline: {note}.", width, "yellow")
    return lines


def end_s(record: ColdStart) -> float:
    """Where the picture ends: the first token, or the last that is known."""
    if record.first_token_s is not None:
        return record.first_token_s
    ends = [phase.end_s for phase in record.phases if phase.track == MAIN]
    return max([record.spawned_s, record.ready_s or record.spawned_s, *ends])


def _paragraph(text: str, width: int, style: str) -> list[Line]:
    # A figure stays with its unit: NUL is no blank to break at.
    glued = text.replace(" %", "\0%").replace(" ms", "\0ms")
    lines = textwrap.wrap(glued, max(1, width), tabsize=1)
    return [((line.replace("\0", " "), style),) for line in lines]


def _heading(record: ColdStart) -> str:
    when = datetime.fromtimestamp(record.unix_time_s, UTC).astimezone()
    return (
        f"{record.start_id}: {record.model} {record.version} on {record.engine}, "
        f"{when:%Y-%m-%d %H:%M:%S}"
    )


def _picture(record: ColdStart, width: int, glyphs: Glyphs) -> list[Line]:
    rows = _rows(record)
    longest = max(len(row.label) for row in rows)
    label_columns = min(longest, max(LABEL_MIN_COLUMNS, width * 2 // 5))
    bar_columns = width - label_columns - 1 - FIGURES_COLUMNS
    if bar_columns < BAR_MIN_COLUMNS:
        bar_columns = 0
        label_columns = max(1, min(longest, width - FIGURES_COLUMNS))
    total_s = end_s(record) - record.spawned_s
    scale = _Scale(record.spawned_s, total_s if total_s > 0 else 1.0, bar_columns)
    lines: list[Line] = []
    track = MAIN
    for row in rows:
        if row.phase.track != track:
            track = row.phase.track
            lines.append(((f"track {track}, beside it:"[:width], "dim"),))
        label = row.label
        if len(label) > label_columns:
            label = label[: label_columns - 1] + glyphs.cut
        share = row.phase.duration_s / scale.total_s
        figures = f" {row.phase.duration_s * 1e3:8.1f} ms {percent(share):>5}"
        bar = f" {scale.bar(row.phase, glyphs):<{bar_columns}}" if bar_columns else ""
        pieces = ((f"{label:<{label_columns}}", ""), (bar, row.style), (figures, ""))
        lines.append(_cropped(pieces, width))
    return lines


def _cropped(pieces: Line, width: int) -> Line:
    kept = []
    for text, style in pieces:
        kept.append((text[:width], style))
        width -= len(kept[-1][0])
    return tuple(kept)


def _rows(record: ColdStart) -> list[_Row]:
    """All phases, the main track's first; what lies in a phase follows it, indented."""
    above = parents(record.phases)
    order = outer_first(record.phases)
    tracks = dict.fromkeys([MAIN, *(record.phases[index].track for index in order)])
    worst = heaviest(record)
    rows = []
    for track in tracks:
        for index in order:
            phase = record.phases[index]
            if phase.track != track:
                continue
            depth, name, parent = 0, phase.name, above[index]
            if parent is not None:
                name = name.removeprefix(record.phases[parent].name + ".")
            while parent is not None:
                depth, parent = depth + 1, above[parent]
            style = "bold red" if worst and phase is worst[0] else "cyan" if depth else "blue"
            rows.append(_Row("  " * depth + name, phase, style))
    return rows


def _conclusions(record: ColdStart) -> list[tuple[str, str]]:
    texts = [(_times(record), "")]
    if record.outcome != "ready":
        texts.append((f"This start failed: {record.outcome}", "bold red"))
    worst = heaviest(record)
    total_s = end_s(record) - record.spawned_s
    if worst is not None and total_s > 0:
        phase, own_s = worst
        share = percent(own_s / total_s)
        texts.append((f"Most of it went to {phase.name}: {milliseconds(own_s)}, {share}.", "bold"))
    texts.append((_weights(record), ""))
    if record.first_token_s is not None:
        covered = coverage(record)
        text = f"The phases cover {percent(covered, 1)} of the time from spawn to first token"
        if covered >= GOOD_COVERAGE:
            texts.append((f"{text}.", ""))
        else:
            texts.append(
                (f"{text}; below {percent(GOOD_COVERAGE)} the record is not whole.", "yellow")
            )
    texts += [(f"The record is not sound: {problem}.", "yellow") for problem in problems(record)]
    return texts


def _times(record: ColdStart) -> str:
    parts = [
        f"{name} after {milliseconds(at_s - record.spawned_s)}"
        for name, at_s in (("ready", record.ready_s), ("first token", record.first_token_s))
        if at_s is not None
    ]
    if record.first_token_s is None:
        parts.append("no first token")
    text = ", ".join(parts)
    return f"{text[0].upper()}{text[1:]}."


def _weights(record: ColdStart) -> str:
    text = f"Weights: {size(record.bytes_read)} read"
    share = record.page_cache_share
    if share is None:
        return f"{text}; their share in the page cache is not known."
    text += f"; {percent(share)} of them lay in the page cache before"
    return f"{text} (a warm start)." if share >= CACHED_SHARE else f"{text}."
