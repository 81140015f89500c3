from __future__ import annotations

import datetime as dt
import itertools

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from preheat.controlplane.preload import TABLE, Decision, Moment, decide, in_window, markdown
from preheat.core.spec.schema import Preload

NIGHT = Preload(not_before="22:00", not_after="06:00", deadline_s=100.0)
times = st.times()


def moment(time: str, *unhealthy: str, waited_s: float = 0.0) -> Moment:
    return Moment(dt.time.fromisoformat(time), waited_s, unhealthy)


def test_the_table_has_every_combination() -> None:
    assert set(TABLE) == set(itertools.product((True, False), repeat=2))


@pytest.mark.parametrize(
    ("time", "unhealthy", "decision"),
    [
        ("23:00", (), Decision.TRIGGER),
        ("12:00", (), Decision.WAIT),
        ("23:00", ("auth",), Decision.REFUSE),
        ("12:00", ("auth",), Decision.REFUSE),
    ],
)
def test_every_combination_is_decided_by_the_table(
    time: str, unhealthy: tuple[str, ...], decision: Decision
) -> None:
    assert decide(NIGHT, moment(time, *unhealthy))[0] is decision


@pytest.mark.parametrize("time", ["23:00", "12:00"])
@pytest.mark.parametrize("unhealthy", [(), ("auth",)])
def test_at_its_deadline_a_start_may_begin_and_after_it_never(
    time: str, unhealthy: tuple[str, ...]
) -> None:
    before = decide(NIGHT, moment(time, *unhealthy, waited_s=99.999))
    assert decide(NIGHT, moment(time, *unhealthy, waited_s=100.0)) == before
    assert before[0] is not Decision.EXPIRED
    assert decide(NIGHT, moment(time, *unhealthy, waited_s=100.001))[0] is Decision.EXPIRED


def test_reasons_name_what_is_missing() -> None:
    assert decide(NIGHT, moment("23:00", "auth", "gateway"))[1] == "not healthy: auth, gateway"
    assert decide(NIGHT, moment("12:00"))[1] == "its window is 22:00 to 06:00"
    expired = decide(NIGHT, moment("23:00", "auth", waited_s=101.0))[1]
    assert "within 100 s" in expired
    assert "auth" in expired


@pytest.mark.parametrize(
    ("time", "inside"),
    [
        ("21:59:59", False),
        ("22:00", True),
        ("23:59:59", True),
        ("00:00", True),
        ("06:00:59", True),
        ("06:01", False),
    ],
)
def test_a_window_over_midnight_holds_its_edges(time: str, inside: bool) -> None:
    assert in_window(NIGHT, dt.time.fromisoformat(time)) is inside


@pytest.mark.parametrize(
    ("time", "inside"), [("08:59:59", False), ("09:00", True), ("17:00", True), ("17:01", False)]
)
def test_a_window_within_a_day_holds_its_edges(time: str, inside: bool) -> None:
    day = Preload(not_before="09:00", not_after="17:00")
    assert in_window(day, dt.time.fromisoformat(time)) is inside


@given(times)
def test_without_a_window_it_is_always_open(time: dt.time) -> None:
    assert in_window(Preload(), time)


@given(times)
def test_one_edge_alone_reaches_to_the_end_of_the_day(time: dt.time) -> None:
    assert in_window(Preload(not_before="08:00"), time) == (time >= dt.time(8))
    assert in_window(Preload(not_after="08:00"), time) == (time < dt.time(8, 1))


@given(times, times, times)
def test_a_window_and_its_opposite_cover_the_day(a: dt.time, b: dt.time, now: dt.time) -> None:
    first, second = f"{a:%H:%M}", f"{b:%H:%M}"
    assume(first != second)  # the spec refuses such a window
    assert in_window(Preload(not_before=first, not_after=second), now) or in_window(
        Preload(not_before=second, not_after=first), now
    )


@given(st.floats(0, 1e6), times, st.lists(st.sampled_from(["a", "b"]), max_size=2))
def test_without_a_deadline_nothing_expires(
    waited_s: float, time: dt.time, unhealthy: list[str]
) -> None:
    decision, _ = decide(Preload(), Moment(time, waited_s, tuple(unhealthy)))
    assert decision is (Decision.REFUSE if unhealthy else Decision.TRIGGER)


def test_the_reference_shows_every_row() -> None:
    assert len(markdown().splitlines()) == 2 + len(TABLE)
    assert "| no | no | refuse |" in markdown()
