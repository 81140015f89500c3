"""Whether a start was slower than starts of its kind: slower than the baseline is an event.

Pure arithmetic over recorded starts. What does not belong here: reading records, raising alarms.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from preheat.core.coldstart import CACHED_SHARE, median

if TYPE_CHECKING:
    from collections.abc import Iterable

    from preheat.core.coldstart import ColdStart

BASELINE_STARTS = 5
"""Earlier starts that a baseline needs."""

BASELINE_DEVIATIONS = 3.0
"""Median absolute deviations above the median from which a start is slower than its baseline."""


def slower_than_baseline(record: ColdStart, earlier_records: Iterable[ColdStart]) -> str | None:
    """Why the start was slower than its like, in words; None if it was not or too few are known.

    The baseline are the successful earlier starts of the same model and engine that found the
    weights equally cached (at least ``CACHED_SHARE``, less, or not known). Slower means above their
    median + 3 · MAD (median absolute deviation, not scaled).
    """
    took_s = record.time_to_first_token_s
    if took_s is None:
        return None
    earlier_s = [
        other.time_to_first_token_s
        for other in earlier_records
        if other.time_to_first_token_s is not None
        and other.outcome == "ready"
        and other.unix_time_s < record.unix_time_s
        and _kind(other) == _kind(record)
    ]
    if len(earlier_s) < BASELINE_STARTS:
        return None
    middle_s = median(earlier_s)
    deviation_s = median(abs(value - middle_s) for value in earlier_s)
    limit_s = middle_s + BASELINE_DEVIATIONS * deviation_s
    if took_s <= limit_s:
        return None
    return (
        f"{record.start_id} took {took_s * 1e3:.0f} ms to its first token; the baseline of "
        f"{len(earlier_s)} earlier starts is {middle_s * 1e3:.0f} ms and at most "
        f"{limit_s * 1e3:.0f} ms"
    )


def _kind(record: ColdStart) -> tuple[str, str, bool | None]:
    share = record.page_cache_share
    return record.model, record.engine, None if share is None else share >= CACHED_SHARE
