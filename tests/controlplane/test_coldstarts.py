from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st
from tests.controlplane.samples import fleet, start_of

from preheat.controlplane.coldstarts import Trail, assemble, failed, phases_from
from preheat.core.coldstart import GOOD_COVERAGE, MAIN, ColdStart, Phase, coverage, problems

SPAWNED_S = 1000.0
PLACE = next(iter(fleet().replicas.values()))
START = start_of(PLACE, 7)
durations = st.floats(0.0, 3.0)


def phase(name: str, start_s: float, end_s: float, track: str = MAIN) -> Phase:
    return Phase(name=name, start_s=SPAWNED_S + start_s, end_s=SPAWNED_S + end_s, track=track)


def record_of(trail: Trail, *after: Phase) -> ColdStart:
    return assemble(
        START,
        PLACE,
        trail,
        after=after,
        ready_s=after[0].end_s,
        first_token_s=after[-1].end_s,
        unix_offset_s=1e9,
    )


@st.composite
def chains(draw: st.DrawFn, names: tuple[str, ...], begin_s: float) -> tuple[list[Phase], float]:
    """Phases one after the other with gaps, each with a child, and where they end."""
    at_s, phases = begin_s, []
    for name in names:
        start_s = at_s + draw(durations)
        end_s = start_s + draw(durations)
        middle_s = start_s + (end_s - start_s) * draw(st.floats(0.0, 1.0))
        phases.append(phase(name, start_s, end_s))
        if start_s < middle_s < end_s:
            phases.append(phase(f"{name}.part", start_s, middle_s))
        at_s = end_s
    return phases, at_s


@st.composite
def records(draw: st.DrawFn) -> ColdStart:
    """The control plane may still be busy when the agent has begun, and the agent when its proof
    has been heard; what runs beside the main track lies anywhere."""
    before, end_s = draw(chains(("process", "controlplane"), 0.0))
    agent_s = max(0.0, end_s - draw(durations))
    agent, end_s = draw(chains(("weights", "engine", "warmup", "proof"), agent_s))
    proven_s = max(agent_s, end_s - draw(st.floats(0.0, 0.2)))
    beside = phase("agent.imports", draw(durations), 4.0, "agent")
    published_s = proven_s + 0.001 + draw(durations)
    first_s = published_s + 0.001 + draw(durations)
    trail = Trail(SPAWNED_S, tuple(before), agent=(*agent, beside))
    return record_of(
        trail,
        phase("publish", proven_s, published_s),
        phase("first token", published_s, first_s),
    )


@given(records())
def test_every_record_is_sound_and_accounts_for_its_time(record: ColdStart) -> None:
    assert problems(record) == []
    assert coverage(record) >= GOOD_COVERAGE


def test_the_time_before_the_weights_is_named_after_the_agent() -> None:
    trail = Trail(
        SPAWNED_S,
        (phase("process", 0.0, 0.1),),
        agent=(phase("weights", 0.3, 0.5), phase("engine", 0.6, 1.0)),
    )
    record = record_of(trail, phase("publish", 1.0, 1.1), phase("first token", 1.1, 1.2))
    assert [p.name for p in record.phases] == [
        "process",
        "agent",
        "weights",
        "wait after weights",
        "engine",
        "publish",
        "first token",
    ]


def test_a_start_that_was_held_counts_from_the_order_to_heat_it() -> None:
    trail = Trail(
        SPAWNED_S,
        (phase("process", 0.0, 0.1),),
        agent=(
            phase("weights", 0.1, 0.5),
            phase("held", 0.5, 3600.0),
            phase("engine", 3600.0, 3601.0),
        ),
    )
    record = record_of(
        trail, phase("publish", 3601.0, 3601.1), phase("first token", 3601.1, 3601.2)
    )
    assert round(record.time_to_first_token_s or 0.0, 3) == 1.2
    assert record.unix_time_s == 1e9 + SPAWNED_S + 3600.0
    assert not {"weights", "held"} & {p.name for p in record.phases}
    assert record.page_cache_share is None
    assert problems(record) == []


@given(st.lists(durations, min_size=1, max_size=4))
def test_a_start_that_failed_says_how_long_it_was_in_which_state(lasted_s: list[float]) -> None:
    names = ["loading", "warm", "starting", "heating"]
    at_s = SPAWNED_S + 0.2
    states = []
    for name, seconds in zip(names, lasted_s, strict=False):
        states.append((at_s, name))
        at_s += seconds
    trail = Trail(SPAWNED_S, (phase("process", 0.0, 0.1),), states=states)
    record = failed(START, PLACE, trail, outcome="it broke", ended_s=at_s, unix_offset_s=0.0)
    assert record.outcome == "it broke"
    assert record.first_token_s is None
    assert problems(record) == []
    assert {p.name for p in record.phases} & {*names} == {*names[: len(lasted_s)]}


def test_phases_are_read_from_the_agents_event() -> None:
    event = {"event": "proven", "phases": [{"name": "weights", "start_s": 1.0, "end_s": 2.0}]}
    assert phases_from(event) == (Phase(name="weights", start_s=1.0, end_s=2.0),)
    assert phases_from({"event": "proven"}) == ()
