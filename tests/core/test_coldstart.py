from __future__ import annotations

import subprocess
import sys
from itertools import count

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.core.records import SPAWNED_S, example, phase, record, sound_records

from preheat.core.coldstart import (
    GOOD_COVERAGE,
    MAIN,
    ColdStart,
    Recorder,
    coverage,
    dominating,
    heaviest,
    median,
    named_under,
    parents,
    percentiles,
    problems,
    self_times,
)

# --- soundness ------------------------------------------------------------------------------------


@given(sound_records())
def test_records_that_nest_as_they_are_named_have_no_problems(sound: ColdStart) -> None:
    assert problems(sound) == []


@given(sound_records())
def test_a_record_survives_json_exactly(sound: ColdStart) -> None:
    assert msgspec.json.decode(msgspec.json.encode(sound), type=ColdStart) == sound


@given(sound_records())
def test_the_parent_is_the_innermost_phase_around(sound: ColdStart) -> None:
    for inner, parent in zip(sound.phases, parents(sound.phases), strict=True):
        around = [
            other
            for other in sound.phases
            if other.track == inner.track and named_under(inner.name, other.name)
        ]
        expected = max(around, key=lambda other: len(other.name), default=None)
        found = None if parent is None else sound.phases[parent]
        assert (found and found.name) == (expected and expected.name)


@given(sound_records(), st.data())
def test_a_phase_moved_over_a_neighbours_edge_is_a_problem(
    sound: ColdStart, data: st.DataObject
) -> None:
    long = [one for one in sound.phases if one.duration_s > 0 and one.track == MAIN]
    if not long:
        return
    victim = data.draw(st.sampled_from(long))
    across = phase("across", 0, 0)
    across = msgspec.structs.replace(
        across,
        start_s=(victim.start_s + victim.end_s) / 2,
        end_s=victim.end_s + victim.duration_s / 4,
    )
    broken = msgspec.structs.replace(sound, phases=(*sound.phases, across))
    assert any("overlap" in text for text in problems(broken))


def test_overlap_is_allowed_between_tracks_only() -> None:
    apart = record(phase("a", 0, 0.6), phase("b", 0.5, 1, "envoy"))
    assert problems(apart) == []
    (problem,) = problems(record(phase("a", 0, 0.6), phase("b", 0.5, 1)))
    assert problem == "a and b overlap by 0.100000 s on the track main"


def test_a_child_outside_its_parent_is_a_problem() -> None:
    (problem,) = problems(record(phase("weights", 0, 0.5), phase("weights.hash", 0.6, 0.7)))
    assert problem == "weights.hash lies outside weights"


def test_a_child_may_lie_in_any_of_several_phases_of_its_parents_name() -> None:
    twice = record(phase("try", 0, 0.2), phase("try", 0.4, 1), phase("try.load", 0.5, 0.6))
    assert problems(twice) == []


def test_a_parent_that_is_not_recorded_is_no_problem() -> None:
    assert problems(record(phase("engine.launch", 0, 0.5), phase("engine.load", 0.5, 1))) == []


def test_a_phase_inside_another_must_be_named_under_it() -> None:
    (problem,) = problems(record(phase("weights", 0, 1), phase("hash", 0.2, 0.4)))
    assert problem == "hash lies in weights but is not named under it"


def test_phases_without_length_may_stand_at_the_edge_of_others() -> None:
    marks = (phase("a", 0, 0.5), phase("mark", 0.5, 0.5), phase("b", 0.5, 1), phase("b.c", 1, 1))
    assert problems(record(*marks)) == []
    assert parents(marks) == (None, None, None, 2)


def test_a_child_as_long_as_its_parent_lies_in_it() -> None:
    same = (phase("a.b", 0, 1), phase("a", 0, 1))
    assert parents(same) == (1, None)
    assert problems(record(*same)) == []


@pytest.mark.parametrize(
    ("wrong", "text"),
    [
        (record(phase("a", 0.5, 0.2)), "a ends 0.300000 s before it starts"),
        (record(phase("a", -0.1, 0.2)), "a starts before the spawn"),
        (record(phase("a", 0.1, float("nan"))), "a has a time that is not a number"),
        (record(phase("a..b", 0.1, 0.2)), "the name 'a..b' has an empty part"),
    ],
)
def test_times_and_names_must_make_sense(wrong: ColdStart, text: str) -> None:
    assert text in problems(wrong)


def test_moments_before_the_spawn_are_problems() -> None:
    early = record(first_token_s=-1.0)
    assert problems(early) == ["ready lies before the spawn", "first token lies before the spawn"]


# --- coverage and self times ----------------------------------------------------------------------


@given(sound_records())
def test_coverage_is_the_share_of_the_top_level_phases_of_the_main_track(sound: ColdStart) -> None:
    top_s = sum(
        one.duration_s
        for one, parent in zip(sound.phases, parents(sound.phases), strict=True)
        if parent is None and one.track == MAIN
    )
    assert coverage(sound) == pytest.approx(top_s / 1.0, abs=1e-9)


@given(sound_records())
def test_self_times_add_up_to_what_is_covered(sound: ColdStart) -> None:
    own_s = self_times(sound)
    assert all(value >= 0 for value in own_s)
    main_s = sum(value for value, one in zip(own_s, sound.phases, strict=True) if one.track == MAIN)
    assert main_s == pytest.approx(coverage(sound), abs=1e-9)


def test_coverage_counts_only_the_main_track_until_the_first_token() -> None:
    assert coverage(example()) == pytest.approx(0.99)
    assert coverage(example()) > GOOD_COVERAGE
    late = record(phase("a", 0, 0.5), phase("b", 0.9, 5), phase("c", 0, 1, "envoy"))
    assert coverage(late) == pytest.approx(0.6)


def test_time_that_two_phases_claim_counts_once() -> None:
    assert coverage(record(phase("a", 0, 0.6), phase("b", 0.4, 0.8))) == pytest.approx(0.8)


def test_without_a_first_token_nothing_is_covered() -> None:
    assert coverage(record(phase("a", 0, 1), first_token_s=None)) == 0.0


def test_the_dominating_phase_has_the_largest_self_time_not_the_largest_duration() -> None:
    assert dominating(example()).name == "weights.hash"
    parent = record(phase("a", 0, 1), phase("a.b", 0, 0.3))
    assert dominating(parent).name == "a"


def test_other_tracks_and_what_follows_the_first_token_never_dominate() -> None:
    mixed = record(phase("a", 0, 0.2), phase("b", 0, 9, "envoy"), phase("c", 1, 9))
    assert dominating(mixed).name == "a"


def test_a_record_without_phases_has_no_dominating_one() -> None:
    assert heaviest(record()) is None
    with pytest.raises(ValueError, match="chat-v1-0@1"):
        dominating(record())


# --- percentiles ----------------------------------------------------------------------------------


def test_percentiles_are_by_nearest_rank() -> None:
    ranks = percentiles(float(number) for number in range(100, 0, -1))
    assert (ranks.p50, ranks.p95, ranks.p99) == (50, 95, 99)
    ranks = percentiles(float(number) for number in range(1, 21))
    assert (ranks.p50, ranks.p95, ranks.p99) == (10, 19, 20)


def test_few_values_make_the_largest_the_high_percentiles() -> None:
    assert percentiles([7.0]).p50 == 7.0
    ranks = percentiles([3.0, 1.0, 2.0])
    assert (ranks.p50, ranks.p95, ranks.p99) == (2.0, 3.0, 3.0)
    with pytest.raises(ValueError, match="without values"):
        percentiles([])


@given(st.lists(st.floats(0, 1e6), min_size=1))
def test_at_least_the_stated_share_is_not_above_a_percentile(values: list[float]) -> None:
    ranks = percentiles(values)
    for percent, value in ((50, ranks.p50), (95, ranks.p95), (99, ranks.p99)):
        assert value in values
        assert sum(other <= value for other in values) * 100 >= percent * len(values)
        assert sum(other < value for other in values) * 100 < percent * len(values)


def test_the_median_of_an_even_count_lies_between_the_middle_two() -> None:
    assert median([4, 1, 3, 2]) == 2.5
    assert median([3, 1, 2]) == 2
    with pytest.raises(ValueError, match="without values"):
        median([])


# --- the recorder ---------------------------------------------------------------------------------


def recorder() -> Recorder:
    """With a clock that advances by a second at each reading, from the spawn on."""
    ticks = count(SPAWNED_S)
    return Recorder(clock=lambda: next(ticks))


def test_a_recorder_times_nested_blocks_and_keeps_their_attributes() -> None:
    notes = recorder()
    with notes.phase("weights", bytes=3) as weights:
        with notes.phase("weights.hash"):
            pass
        weights.set(threads=2)
    assert notes.phases == (phase("weights", 0, 3, bytes=3, threads=2), phase("weights.hash", 1, 2))
    assert problems(record(*notes.phases)) == []


def test_a_block_that_raises_is_recorded_with_the_errors_name() -> None:
    notes = recorder()
    with pytest.raises(OSError, match="gone"), notes.phase("weights"):
        raise OSError("gone")
    assert notes.phases == (phase("weights", 0, 1, error="OSError"),)


def test_known_times_are_added_on_any_track() -> None:
    notes = recorder()
    notes.add("listen", SPAWNED_S + 2, SPAWNED_S + 3, track="envoy", port=8080)
    notes.add("process", SPAWNED_S, SPAWNED_S + 1)
    assert notes.phases == (phase("process", 0, 1), phase("listen", 2, 3, "envoy", port=8080))


def test_a_recorder_reads_the_monotonic_clock_unless_told_otherwise() -> None:
    import time

    before_s = time.monotonic()
    notes = Recorder()
    with notes.phase("a"):
        pass
    (made,) = notes.phases
    assert before_s <= made.start_s <= made.end_s <= time.monotonic()


def test_importing_the_module_brings_in_nothing_heavy() -> None:
    script = (
        "import sys, msgspec; before = set(sys.modules); import preheat.core.coldstart; "
        "print(*sorted(set(sys.modules) - before))"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True
    )
    assert {name for name in done.stdout.split() if not name.startswith("preheat")} <= {"math"}
