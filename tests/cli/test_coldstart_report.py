from __future__ import annotations

from tests.core.records import example, phase, record

from preheat.cli.coldstart_report import columns, most_time, phase_rows, report_lines
from preheat.cli.coldstart_run import Measured, Results, Run
from preheat.core.coldstart import ColdStart

RUN = Run(target=None, starts=3, cold=False, timeout_s=60.0, serve=("serve",))


def report(*records: ColdStart, lag_s: float = 0.001) -> str:
    starts = tuple(Measured(one, one.spawned_s - lag_s) for one in records)
    return "\n".join(report_lines(RUN, Results(starts, ()), None))


def test_phases_of_one_name_are_summed_within_a_start() -> None:
    rows = {row.name: row for row in phase_rows([example()])}
    assert round(rows["warmup.prompt"].total_s, 6) == 0.29
    assert round(rows["weights"].total_s, 6) == 0.5
    assert round(rows["weights"].self_s, 6) == 0.0


def test_rows_hold_medians_over_all_starts_and_zero_where_a_phase_was_missing() -> None:
    rows = phase_rows(
        [
            record(phase("a", 0, 0.2), phase("retry", 0.5, 0.9)),
            record(phase("a", 0, 0.3)),
            record(phase("a", 0, 0.9)),
        ]
    )
    assert [(row.name, round(row.total_s, 6)) for row in rows] == [("a", 0.3), ("retry", 0.0)]


def test_rows_stand_in_the_order_of_time_the_main_track_first() -> None:
    names = [(row.track, row.name) for row in phase_rows([example()])]
    assert names == [
        ("main", "process"),
        ("main", "weights"),
        ("main", "weights.read"),
        ("main", "weights.hash"),
        ("main", "warmup"),
        ("main", "warmup.prompt"),
        ("main", "publish"),
        ("envoy", "start"),
        ("envoy", "start.listen"),
    ]


def test_the_phase_with_most_time_is_one_of_the_main_track() -> None:
    worst = most_time(phase_rows([example()]))
    assert worst is not None
    assert worst.name == "weights.hash"
    assert most_time([]) is None


def test_records_that_miss_a_part_of_the_start_are_called_out() -> None:
    assert "!" not in report(example(), example())
    assert "! the records miss the beginning" in report(example(), lag_s=0.2)
    assert "! below 98 % a record does not say" in report(record(phase("a", 0, 0.5)))


def test_records_that_do_not_know_their_page_cache_are_called_out() -> None:
    unknown = record(phase("a", 0, 1), page_cache_share=None)
    assert "! the records do not say how much" in report(unknown)


def test_columns_are_aligned() -> None:
    assert columns([("a", "1"), ("bcd", "22")], right=(1,)) == ["a     1", "bcd  22"]
