"""What all benchmarks share: options, statistics, the table, the result file, the machine.

What does not belong here: starting processes (``processes.py``), other people's programs
(``peers.py``), anything that only one benchmark measures.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median

CONFIDENCE = 0.95
RESAMPLES = 4000


@dataclass(frozen=True, slots=True)
class Interval:
    """An estimate and the ends of its 95 % bootstrap interval."""

    value: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.value:.3g} [{self.low:.3g}, {self.high:.3g}]"


def ratio_of_medians(
    ours: Sequence[float], theirs: Sequence[float], *, seed: int = 0, resamples: int = RESAMPLES
) -> Interval:
    """median(ours) / median(theirs) of paired rounds; whole rounds are drawn again, never halves.

    Percentile bootstrap (Efron 1979). Raises ValueError unless both hold the same number of rounds,
    at least one, and theirs are positive.
    """
    _check_pairs(ours, theirs)
    draw = random.Random(seed)
    rounds = range(len(ours))
    ratios = []
    for _ in range(resamples):
        drawn = draw.choices(rounds, k=len(ours))
        ratios.append(median([ours[i] for i in drawn]) / median([theirs[i] for i in drawn]))
    low, high = _ends(ratios)
    return Interval(median(ours) / median(theirs), low, high)


def median_of_ratios(
    ours: Sequence[float], theirs: Sequence[float], *, seed: int = 0, resamples: int = RESAMPLES
) -> Interval:
    """The median over paired rounds of ours / theirs, and its percentile bootstrap interval.

    For machines whose speed drifts between rounds, which then cancels. Raises like
    ``ratio_of_medians``.
    """
    _check_pairs(ours, theirs)
    ratios = [a / b for a, b in zip(ours, theirs, strict=True)]
    return median_interval(ratios, seed=seed, resamples=resamples)


def _check_pairs(ours: Sequence[float], theirs: Sequence[float]) -> None:
    if len(ours) != len(theirs) or not ours:
        raise ValueError(f"{len(ours)} and {len(theirs)} rounds cannot be paired")
    if min(theirs) <= 0:
        raise ValueError(f"a ratio to {min(theirs)} says nothing")


def median_interval(
    values: Sequence[float], *, seed: int = 0, resamples: int = RESAMPLES
) -> Interval:
    """The median of ``values`` (at least one) and its percentile bootstrap interval."""
    if not values:
        raise ValueError("no values, no median")
    draw = random.Random(seed)
    low, high = _ends([median(draw.choices(values, k=len(values))) for _ in range(resamples)])
    return Interval(median(values), low, high)


def _ends(values: list[float]) -> tuple[float, float]:
    ordered = sorted(values)
    cut = (1 - CONFIDENCE) / 2
    last = len(ordered) - 1
    return ordered[round(cut * last)], ordered[round((1 - cut) * last)]


def machine() -> dict[str, str | int]:
    """What the numbers were measured on; no names that identify the machine."""
    return {
        "cpu": _cpu_model(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "kernel": platform.release(),
        "architecture": platform.machine(),
        "python": platform.python_version(),
    }


def _cpu_model() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return "unknown"


def format_table(title: str, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A plain table: the first column to the left, the others to the right."""
    widths = [max(len(row[i]) for row in (columns, *rows)) for i in range(len(columns))]

    def line(cells: Sequence[str]) -> str:
        first, *others = (cell.rjust(width) for cell, width in zip(cells, widths, strict=True))
        return "  ".join([first.strip().ljust(widths[0]), *others]).rstrip()

    rule = "  ".join("-" * width for width in widths)
    return "\n".join(["", title, line(columns), rule, *(line(row) for row in rows)])


def write_result(
    path: Path | None,
    *,
    ratios: Mapping[str, float | Interval],
    runs: object,
    extra: Mapping[str, object] | None = None,
) -> None:
    """Writes ``{"ratios", "intervals", "runs", "machine"}`` (and ``extra``) in one step."""
    if path is None:
        return
    result = {
        "ratios": {
            name: ratio.value if isinstance(ratio, Interval) else ratio
            for name, ratio in ratios.items()
        },
        "intervals": {
            name: [ratio.low, ratio.high]
            for name, ratio in ratios.items()
            if isinstance(ratio, Interval)
        },
        "runs": runs,
        "machine": machine(),
        **(extra or {}),
    }
    unfinished = path.with_name(path.name + ".part")
    unfinished.write_text(json.dumps(result, indent=1, allow_nan=False) + "\n")
    unfinished.replace(path)


def options(description: str) -> argparse.ArgumentParser:
    """A parser with the options every benchmark has."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--quick", action="store_true", help="few short rounds: shows that it runs")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the result there")
    return parser
