from __future__ import annotations

from dataclasses import dataclass

import pytest
from tests.core.records import record

from preheat.core.baseline import BASELINE_STARTS, slower_than_baseline
from preheat.core.coldstart import ColdStart

NOW_S = 2_000_000_000.0


@dataclass(frozen=True)
class Odd:
    """How the earlier starts differ."""

    model: str = "chat"
    share: float | None = 1.0
    outcome: str = "ready"
    age_s: float = 100.0


def earlier(*times_s: float | None, odd: Odd = Odd()) -> list[ColdStart]:
    return [
        record(
            first_token_s=time_s,
            unix_time_s=NOW_S - odd.age_s,
            model=odd.model,
            page_cache_share=odd.share,
            outcome=odd.outcome,
        )
        for time_s in times_s
    ]


def now(time_s: float | None, share: float | None = 1.0) -> ColdStart:
    return record(first_token_s=time_s, unix_time_s=NOW_S, page_cache_share=share)


BASELINE_S = (1.0, 1.1, 0.9, 1.0, 1.2)
"""Median 1.0, MAD 0.1: the limit is 1.3."""


def test_a_start_above_median_and_three_deviations_is_slower() -> None:
    text = slower_than_baseline(now(1.31), earlier(*BASELINE_S))
    assert text == (
        "chat-v1-0@1 took 1310 ms to its first token; the baseline of 5 earlier starts is 1000 ms "
        "and at most 1300 ms"
    )
    assert slower_than_baseline(now(1.29), earlier(*BASELINE_S)) is None


def test_too_few_earlier_starts_make_no_baseline() -> None:
    few = earlier(*BASELINE_S)[: BASELINE_STARTS - 1]
    assert slower_than_baseline(now(9.0), few) is None


@pytest.mark.parametrize(
    "odd",
    [
        Odd(model="other"),
        Odd(share=0.1),
        Odd(share=None),
        Odd(outcome="killed by signal 9"),
        Odd(age_s=-1.0),
        Odd(age_s=0.0),
    ],
)
def test_starts_of_another_kind_failed_or_later_ones_do_not_count(odd: Odd) -> None:
    assert slower_than_baseline(now(9.0), earlier(*BASELINE_S, odd=odd)) is None


def test_cold_starts_are_held_against_cold_ones() -> None:
    cold = earlier(*BASELINE_S, odd=Odd(share=0.89))
    assert slower_than_baseline(now(9.0, share=0.0), cold) is not None
    assert slower_than_baseline(now(9.0, share=0.9), cold) is None


def test_starts_without_a_first_token_are_neither_slow_nor_baseline() -> None:
    assert slower_than_baseline(now(None), earlier(*BASELINE_S)) is None
    assert slower_than_baseline(now(9.0), earlier(1.0, 1.0, 1.0, 1.0, None)) is None
