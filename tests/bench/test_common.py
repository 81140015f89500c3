from __future__ import annotations

import json
import random
import socket
from pathlib import Path
from statistics import median

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from common import (
    Interval,
    format_table,
    machine,
    median_interval,
    median_of_ratios,
    ratio_of_medians,
    write_result,
)

positive = st.floats(min_value=1e-3, max_value=1e6)
pairs = st.lists(st.tuples(positive, positive), min_size=1, max_size=12)


@settings(max_examples=25, deadline=None)
@given(pairs)
def test_a_ratio_of_medians_lies_between_the_ends_of_possible_ratios(
    rounds: list[tuple[float, float]],
) -> None:
    ours, theirs = [a for a, _ in rounds], [b for _, b in rounds]
    ratio = ratio_of_medians(ours, theirs, resamples=100)
    assert ratio.value == pytest.approx(median(ours) / median(theirs))
    assert min(ours) / max(theirs) * 0.999 <= ratio.low <= ratio.high
    assert ratio.high <= max(ours) / min(theirs) * 1.001


@settings(max_examples=25, deadline=None)
@given(st.lists(positive, min_size=1, max_size=12))
def test_something_compared_with_itself_is_exactly_one_with_no_doubt(values: list[float]) -> None:
    assert ratio_of_medians(values, values, resamples=50) == Interval(1.0, 1.0, 1.0)
    assert median_of_ratios(values, values, resamples=50) == Interval(1.0, 1.0, 1.0)


def test_drift_that_falls_on_both_sides_of_a_round_cancels_in_the_median_of_ratios() -> None:
    drift = [1.0, 5.0, 2.0, 9.0, 3.0]
    assert median_of_ratios([2 * d for d in drift], drift) == Interval(2.0, 2.0, 2.0)


def test_the_interval_covers_the_true_median_about_as_often_as_promised() -> None:
    draw = random.Random(7)
    covered = 0
    for trial in range(100):
        values = [draw.gauss(10.0, 2.0) for _ in range(25)]
        interval = median_interval(values, seed=trial, resamples=300)
        covered += interval.low <= 10.0 <= interval.high
    assert covered >= 85


def test_the_same_seed_gives_the_same_interval() -> None:
    values = [1.0, 4.0, 2.0, 8.0, 5.0]
    assert median_interval(values, seed=3) == median_interval(values, seed=3)


@pytest.mark.parametrize("compare", [ratio_of_medians, median_of_ratios])
@pytest.mark.parametrize(("ours", "theirs"), [([], []), ([1.0], [1.0, 2.0]), ([1.0], [0.0])])
def test_rounds_that_cannot_be_compared_are_refused(
    compare: object, ours: list[float], theirs: list[float]
) -> None:
    assert callable(compare)
    with pytest.raises(ValueError, match=r"rounds cannot be paired|says nothing"):
        compare(ours, theirs)


def test_the_table_keeps_columns_apart_whatever_their_lengths() -> None:
    table = format_table("title", ("name", "n"), [("a", "1000"), ("longer", "1")])
    assert table.splitlines()[1:] == [
        "title",
        "name       n",
        "------  ----",
        "a       1000",
        "longer     1",
    ]


def test_the_result_file_holds_numbers_and_the_machine(tmp_path: Path) -> None:
    path = tmp_path / "result.json"
    write_result(path, ratios={"r": Interval(1.5, 1.0, 2.0), "errors": 0}, runs=[{"a": 1}])
    result = json.loads(path.read_text())
    assert result["ratios"] == {"r": 1.5, "errors": 0}
    assert result["intervals"] == {"r": [1.0, 2.0]}
    assert result["runs"] == [{"a": 1}]
    assert result["machine"] == machine()
    assert list(tmp_path.iterdir()) == [path]


def test_without_a_file_to_write_nothing_is_written(tmp_path: Path) -> None:
    write_result(None, ratios={}, runs=[])
    assert not list(tmp_path.iterdir())


def test_the_machine_is_described_without_naming_it() -> None:
    described = machine()
    assert isinstance(described["cores"], int)
    assert described["cores"] >= 1
    assert socket.gethostname() not in described.values()
