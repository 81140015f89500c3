from __future__ import annotations

from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from preheat.core.errors import LifecycleError
from preheat.replica.lifecycle import INITIAL, ROUTABLE, TABLE, TERMINAL, Event, State, next_state

ALIVE = [state for state in State if state not in TERMINAL]
WAY_TO_READY = [
    Event.WEIGHTS_VERIFIED,
    Event.HEAT,
    Event.ENGINE_UP,
    Event.WARMED_UP,
    Event.PROVEN,
]


Life = list[tuple[State, Event, State]]
LONGEST = 12


def lives_from(state: State, before: Life) -> Iterator[Life]:
    """Every sequence of events that the table allows. It has no way back, so they are few."""
    yield before
    if len(before) < LONGEST:
        for event in TABLE[state]:
            after = next_state(state, event)
            yield from lives_from(after, [*before, (state, event, after)])


LIVES = list(lives_from(INITIAL, []))
lives = st.sampled_from(LIVES)


def test_ready_is_reached() -> None:
    assert any(after is State.READY for life in LIVES for _, _, after in life)


def test_ready_is_reached_through_every_step_in_order_and_by_no_other_way() -> None:
    for life in LIVES:
        for position, (_, _, after) in enumerate(life):
            if after is State.READY:
                assert [event for _, event, _ in life[: position + 1]] == WAY_TO_READY


@given(lives)
def test_a_life_never_comes_back_to_a_state_it_has_left(life: Life) -> None:
    passed = [INITIAL, *(after for _, _, after in life)]
    assert len(set(passed)) == len(passed)


@given(lives)
def test_what_the_gateway_may_reach_has_an_engine_that_is_up(life: Life) -> None:
    seen: set[Event] = set()
    for _, event, after in life:
        seen.add(event)
        if after in ROUTABLE:
            assert Event.ENGINE_UP in seen


@given(st.sampled_from(State), st.sampled_from(Event))
def test_an_event_that_the_state_does_not_allow_is_an_error_that_names_both(
    state: State, event: Event
) -> None:
    if event in TABLE[state]:
        assert next_state(state, event) is TABLE[state][event]
        return
    with pytest.raises(LifecycleError) as caught:
        next_state(state, event)
    assert str(state) in caught.value.what
    assert str(event) in caught.value.what


def test_final_states_take_nothing() -> None:
    assert {State.STOPPED, State.FAILED} == TERMINAL
    for state in TERMINAL:
        for event in Event:
            with pytest.raises(LifecycleError, match="this state is final"):
                next_state(state, event)


@pytest.mark.parametrize("state", ALIVE)
def test_every_living_state_can_fail_and_can_be_stopped(state: State) -> None:
    assert next_state(state, Event.STOP) is State.STOPPED
    assert next_state(state, Event.ENGINE_EXITED) is State.FAILED
    assert next_state(state, Event.AGENT_BROKEN) is State.FAILED


@pytest.mark.parametrize("state", [s for s in ALIVE if s is not State.DRAINING])
def test_a_drain_can_be_ordered_wherever_there_is_something_to_end(state: State) -> None:
    ready = state is State.READY
    assert next_state(state, Event.DRAIN) is (State.DRAINING if ready else State.STOPPED)


def test_every_state_is_in_the_table_and_reachable() -> None:
    reached = {INITIAL}
    for _ in State:
        reached |= {target for state in reached for target in TABLE[state].values()}
    assert set(TABLE) == set(State) == reached
