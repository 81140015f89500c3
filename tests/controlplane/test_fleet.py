"""The fleet as a whole: whatever happens in whatever order, what it decides stays true."""

from __future__ import annotations

import datetime as dt
from collections.abc import Callable
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st
from tests.controlplane.samples import DATABASE, fleet, one_model, spec, start_of, version

from preheat.controlplane.failures import TABLE as FAILURES
from preheat.controlplane.failures import Failure, Kind
from preheat.controlplane.fleet import (
    ATTEMPTS_BEFORE_GIVING_UP,
    FIRST_BACKOFF_S,
    LONGEST_BACKOFF_S,
    SOUND_S,
    TEARDOWN_S,
    Fleet,
    backoff_s,
    state_of,
)
from preheat.controlplane.replicas import Action, Heat, Kill, Launch, Stop
from preheat.core.spec.schema import Dependency, Model, Preload, Spec
from preheat.replica.lifecycle import TABLE, TERMINAL, Event, State

NOON = dt.time(12)
UP = (Event.WEIGHTS_VERIFIED, Event.HEAT, Event.ENGINE_UP, Event.WARMED_UP, Event.PROVEN)


class World:
    """A fleet and the agents it believes in, with what they have really become."""

    def __init__(self, of: Spec) -> None:
        self.now_s = 100.0
        self.fleet: Fleet = fleet(of, now_s=self.now_s)
        self.agents: dict[str, State] = {}
        self.ended: list[str] = []
        self.number = 0
        self.healthy: frozenset[Dependency] = frozenset()
        self.log: list[Action] = []

    def reconcile(self) -> list[Action]:
        return self.fleet.reconcile(now_s=self.now_s, local_time=NOON, healthy=self.healthy)

    def carry_out(self, *, launches_succeed: bool = True) -> None:
        for action in self.reconcile():
            self.log.append(action)
            if not isinstance(action, Launch):
                self.fleet.carried_out(action, now_s=self.now_s)
                if isinstance(action, Kill):
                    self.dies(action.start_id)
                elif isinstance(action, Stop):
                    self.happens(action.start_id, Event.DRAIN)
                    self.happens(action.start_id, Event.DRAINED)
                else:
                    self.happens(action.start_id, Event.HEAT)
                continue
            self.fleet.launching(action.replica, "finding its weights")
            if launches_succeed:
                self.number += 1
                start = start_of(self.fleet.replicas[action.replica], self.number)
                self.fleet.launched(action.replica, start)
                self.agents[start.start_id] = start.state
            else:
                failure = Failure(Kind.SOURCE_FAILED, "no network")
                self.fleet.launch_failed(action.replica, failure, now_s=self.now_s)

    def happens(self, start_id: str, event: Event) -> None:
        """In the agent, which tells the fleet; nothing if its state does not allow it."""
        state = self.agents.get(start_id)
        if state is not None and event in TABLE[state]:
            self.agents[start_id] = TABLE[state][event]
            self.tell(start_id, event, self.agents[start_id])

    def tell(self, start_id: str, event: Event, state: State) -> None:
        self.fleet.observe(start_id, {"event": str(event), "state": str(state)}, now_s=self.now_s)

    def comes_late(self, index: int, state: State) -> None:
        over = [i for i, s in self.agents.items() if s in TERMINAL] + self.ended
        if over:
            self.tell(over[index % len(over)], Event.PROVEN, state)

    def dies(self, start_id: str) -> None:
        """The agent's process."""
        if self.agents.pop(start_id, None) is not None:
            self.ended.append(start_id)
            self.fleet.agent_gone(start_id, "somebody killed it", now_s=self.now_s)

    def comes_up(self, start_id: str, steps: int = len(UP)) -> None:
        """As far as that; steps that it has behind it count."""
        start = self.fleet.start(start_id)
        for event in UP[:steps]:
            # One that is held warm goes on only when it is told to.
            if not (event is Event.HEAT and start and start.hold_at == "warm"):
                self.happens(start_id, event)

    # ── what must always hold ──

    def check(self) -> None:
        endpoints = {
            e.start_id: e.serving
            for m in self.fleet.routing_table().models
            for v in m.versions
            for e in v.endpoints
        }
        assert {i for i, serving in endpoints.items() if serving} == {
            i for i, state in self.agents.items() if state is State.READY
        }
        assert not endpoints.keys() & set(self.ended)
        assert {s.start_id for s in self.fleet.starts()} == self.agents.keys()
        first, again = self.reconcile(), self.reconcile()
        assert first == again
        for action in first:
            if isinstance(action, Launch):
                place = self.fleet.replicas[action.replica]
                assert place.start is None
                assert not place.busy
                assert not place.given_up


def two_models() -> Spec:
    waits = Preload(critical_dependencies=(DATABASE,), deadline_s=50.0)
    return spec(
        Model(
            name="chat",
            versions=(
                version("v1", share=90, replicas=2),
                version("v2", share=10, strategy="warm"),
            ),
        ),
        Model(name="embed", versions=(version(preload=waits),)),
        Model(name="rare", versions=(version(strategy="cold"),)),
    )


Step = Callable[[World], None]


def some_start(world: World, index: int) -> str:
    known = [*world.agents, *world.ended]
    return known[index % len(known)] if known else "nobody@1"


steps = st.one_of(
    st.booleans().map(lambda ok: lambda w: w.carry_out(launches_succeed=ok)),
    st.floats(0.0, 40.0).map(lambda s: lambda w: setattr(w, "now_s", w.now_s + s)),
    st.tuples(st.integers(0, 9), st.sampled_from(Event)).map(
        lambda t: lambda w: w.happens(some_start(w, t[0]), t[1])
    ),
    st.tuples(st.integers(0, 9), st.integers(1, len(UP))).map(
        lambda t: lambda w: w.comes_up(some_start(w, t[0]), t[1])
    ),
    st.integers(0, 9).map(lambda i: lambda w: w.dies(some_start(w, i))),
    # What comes late from a start that has ended, or is over.
    st.tuples(st.integers(0, 9), st.sampled_from(State)).map(
        lambda t: lambda w: w.comes_late(t[0], t[1])
    ),
    st.sampled_from([frozenset[Dependency](), frozenset({DATABASE})]).map(
        lambda h: lambda w: setattr(w, "healthy", h)
    ),
    st.sampled_from(["chat", "rare", "embed"]).map(
        lambda m: lambda w: w.fleet.order_heat(m, now_s=w.now_s)
    ),
)


@given(st.lists(steps, max_size=40))
@settings(deadline=None)
def test_only_ready_starts_serve_and_ended_ones_are_nowhere(happening: list[Step]) -> None:
    world = World(two_models())
    for step in happening:
        step(world)
        world.check()


@given(st.lists(steps, max_size=30))
@settings(deadline=None)
def test_the_same_happening_gives_the_same_actions(happening: list[Step]) -> None:
    one, other = World(two_models()), World(two_models())
    for step in happening:
        step(one)
        step(other)
    assert one.log == other.log
    assert one.fleet.routing_table() == other.fleet.routing_table()


@given(st.lists(steps, max_size=30))
@settings(deadline=None)
def test_once_launches_succeed_all_that_may_be_ready_becomes_ready(happening: list[Step]) -> None:
    world = World(two_models())
    for step in happening:
        step(world)
    world.healthy = frozenset({DATABASE})
    for _ in range(4):
        world.now_s += LONGEST_BACKOFF_S + TEARDOWN_S + 1.0
        for start_id, state in list(world.agents.items()):
            if state in TERMINAL:
                world.dies(start_id)
        world.carry_out()
        for start_id in list(world.agents):
            world.comes_up(start_id)
        world.check()
    for place in world.fleet.replicas.values():
        draining = place.start is not None and place.start.state is State.DRAINING
        assert place.given_up or place.held_back or draining or state_of([place]) == "ready", place


@given(st.lists(steps, max_size=30))
@settings(deadline=None)
def test_ending_ends_every_start_and_begins_none(happening: list[Step]) -> None:
    world = World(two_models())
    for step in happening:
        step(world)
    world.fleet.order_end()
    begun = world.number
    world.carry_out()
    for start_id in list(world.agents):
        world.dies(start_id)
    world.now_s += 1000.0
    world.carry_out()
    assert world.number == begun
    assert world.fleet.ended()


# ── one rule each ──


def up(of: Spec | None = None) -> World:
    world = World(of or spec())
    world.carry_out()
    for start_id in list(world.agents):
        world.comes_up(start_id)
    return world


def the_start(world: World) -> str:
    return next(iter(world.agents))


def the_place(world: World) -> Any:
    return next(iter(world.fleet.replicas.values()))


@given(st.integers(1, 100_000))
def test_backoff_grows_and_is_bounded(failures: int) -> None:
    assert FIRST_BACKOFF_S <= backoff_s(failures) <= backoff_s(failures + 1) <= LONGEST_BACKOFF_S


def test_an_event_that_comes_after_the_end_changes_nothing() -> None:
    world = up()
    gone = the_start(world)
    world.dies(gone)
    before = world.fleet.routing_table()
    world.tell(gone, Event.PROVEN, State.READY)
    assert world.fleet.routing_table() == before


def test_a_start_that_is_over_stays_over_whatever_it_says() -> None:
    world = up()
    start_id = the_start(world)
    world.happens(start_id, Event.ENGINE_EXITED)
    world.tell(start_id, Event.PROVEN, State.READY)
    assert world.fleet.routing_table().models[0].versions[0].endpoints == ()
    assert state_of([the_place(world)]) == "failed"


def test_a_start_that_failed_holds_its_place_until_its_agent_is_gone() -> None:
    world = up()
    first = the_start(world)
    world.happens(first, Event.ENGINE_EXITED)
    world.now_s += 5.0
    assert world.reconcile() == []
    world.dies(first)
    world.now_s += 5.0
    assert world.reconcile() == [Launch(the_place(world).name)]


def test_an_agent_that_does_not_end_after_its_last_word_is_killed() -> None:
    world = up()
    stuck = the_start(world)
    world.happens(stuck, Event.ENGINE_EXITED)
    world.now_s += TEARDOWN_S + 0.1
    assert world.reconcile() == [Kill(stuck)]
    world.fleet.carried_out(Kill(stuck), now_s=world.now_s)
    assert world.reconcile() == []


def test_a_start_that_does_not_end_when_told_is_killed_after_its_drain() -> None:
    world = up()
    stuck = the_start(world)
    world.fleet.order_end()
    world.fleet.carried_out(Stop(stuck), now_s=world.now_s)
    world.now_s += world.fleet.spec.limits.drain_timeout_s + TEARDOWN_S
    assert world.reconcile() == []
    world.now_s += 0.1
    assert world.reconcile() == [Kill(stuck)]


def test_stopping_takes_readiness_away_and_leaves_starts_serving() -> None:
    world = up()
    world.fleet.order_stop()
    table = world.fleet.routing_table()
    assert table.missing == ("preheat is stopping",)
    assert [e.serving for e in table.models[0].versions[0].endpoints] == [True]
    assert world.reconcile() == []


def test_what_the_agent_said_explains_its_end_better_than_its_exit() -> None:
    world = up()
    start_id = the_start(world)
    world.fleet.observe(
        start_id,
        {"event": "engine exited", "state": "failed", "reason": "out of memory", "advice": "add"},
        now_s=world.now_s,
    )
    world.dies(start_id)
    assert the_place(world).failure == Failure(Kind.ENGINE_EXITED, "out of memory", "add")


def test_a_start_that_served_long_is_replaced_at_once_and_a_quick_death_waits() -> None:
    world = up()
    world.now_s += SOUND_S
    world.dies(the_start(world))
    assert world.reconcile() == [Launch(the_place(world).name)]
    world.carry_out()
    world.comes_up(the_start(world))
    world.dies(the_start(world))
    assert world.reconcile() == []
    world.now_s += backoff_s(2)
    assert world.reconcile() == [Launch(the_place(world).name)]


def test_what_never_was_ready_is_given_up_after_some_attempts() -> None:
    world = World(spec())
    for attempt in range(ATTEMPTS_BEFORE_GIVING_UP):
        assert world.fleet.hopeless() is None, attempt
        world.carry_out(launches_succeed=False)
        world.now_s += LONGEST_BACKOFF_S
    assert world.reconcile() == []
    assert world.fleet.hopeless() is the_place(world)
    assert world.fleet.routing_table().missing == ("chat: given up: no network",)


def test_what_was_ready_once_is_never_given_up() -> None:
    world = up()
    world.dies(the_start(world))
    for _ in range(2000):
        world.now_s += LONGEST_BACKOFF_S
        world.carry_out(launches_succeed=False)
    world.now_s += LONGEST_BACKOFF_S
    assert world.reconcile() == [Launch(the_place(world).name)]
    assert world.fleet.hopeless() is None


def test_bad_weights_are_given_up_at_once() -> None:
    world = World(spec())
    world.carry_out()
    world.happens(the_start(world), Event.WEIGHTS_BAD)
    world.dies(the_start(world))
    assert world.fleet.hopeless() is the_place(world)


def test_one_model_that_cannot_be_brought_up_does_not_end_another_that_can() -> None:
    world = World(
        spec(
            Model(name="bad", versions=(version(),)),
            Model(name="good", versions=(version(),)),
        )
    )
    world.carry_out()
    bad, good = world.agents
    world.happens(bad, Event.WEIGHTS_BAD)
    world.dies(bad)
    assert world.fleet.hopeless() is None
    world.comes_up(good)
    assert world.fleet.hopeless() is None
    assert [m.partition(":")[0] for m in world.fleet.routing_table().missing] == ["bad"]


def test_heating_gives_what_was_given_up_another_chance() -> None:
    world = World(spec())
    world.carry_out()
    world.happens(the_start(world), Event.WEIGHTS_BAD)
    world.dies(the_start(world))
    world.fleet.order_heat("chat", now_s=world.now_s)
    assert world.reconcile() == [Launch(the_place(world).name)]


def test_a_cold_model_starts_when_it_is_heated_and_says_so_until_then() -> None:
    world = World(one_model(strategy="cold"))
    assert world.reconcile() == []
    assert "preheat models heat chat" in world.fleet.routing_table().missing[0]
    world.fleet.order_heat("chat", now_s=world.now_s)
    world.carry_out()
    world.comes_up(the_start(world))
    assert not world.fleet.routing_table().missing


def test_a_warm_model_waits_with_its_weights_and_goes_on_when_it_is_heated() -> None:
    world = up(one_model(strategy="warm"))
    start_id = the_start(world)
    assert world.agents[start_id] is State.WARM
    assert "preheat models heat chat" in world.fleet.routing_table().missing[0]
    world.fleet.order_heat("chat", now_s=world.now_s)
    assert world.reconcile() == [Heat(start_id)]
    world.fleet.carried_out(Heat(start_id), now_s=world.now_s)
    assert world.reconcile() == []
    world.fleet.not_carried_out(Heat(start_id))
    assert world.reconcile() == [Heat(start_id)]


def test_heating_a_warm_model_that_still_loads_is_not_forgotten() -> None:
    world = World(one_model(strategy="warm"))
    world.carry_out()
    world.fleet.order_heat("chat", now_s=world.now_s)
    assert world.reconcile() == []
    world.happens(the_start(world), Event.WEIGHTS_VERIFIED)
    assert world.reconcile() == [Heat(the_start(world))]


def test_a_dependency_that_is_down_holds_the_preload_until_it_is_up() -> None:
    world = World(one_model(preload=Preload(critical_dependencies=(DATABASE,))))
    assert world.reconcile() == []
    assert world.fleet.routing_table().missing == (
        "chat: its preload waits: not healthy: database",
    )
    assert world.fleet.dependencies_in_question() == {DATABASE}
    world.healthy = frozenset({DATABASE})
    assert world.reconcile() == [Launch(the_place(world).name)]
    world.carry_out()
    assert not world.fleet.dependencies_in_question()


def test_two_dependencies_of_one_name_are_two() -> None:
    other = Dependency(name="database", url="http://127.0.0.1:2/health")
    waits = Preload(critical_dependencies=(other,))
    world = World(one_model(preload=waits))
    world.healthy = frozenset({DATABASE})
    assert world.reconcile() == []


def test_a_preload_that_could_not_start_in_time_is_given_up_with_what_was_missing() -> None:
    waits = Preload(critical_dependencies=(DATABASE,), deadline_s=5.0)
    world = World(one_model(preload=waits))
    world.now_s += 5.0
    assert world.reconcile() == []
    assert world.fleet.hopeless() is None
    world.now_s += 0.001
    assert world.reconcile() == []
    hopeless = world.fleet.hopeless()
    assert hopeless is not None
    assert hopeless.failure is not None
    assert FAILURES[hopeless.failure.kind].error.exit_code == 4
    assert "within 5 s" in hopeless.failure.reason
    assert "database" in hopeless.failure.reason


def test_the_gate_is_not_asked_again_when_what_served_has_crashed() -> None:
    waits = Preload(critical_dependencies=(DATABASE,), not_before="00:00", not_after="13:00")
    world = World(one_model(preload=waits))
    world.healthy = frozenset({DATABASE})
    world.carry_out()
    world.comes_up(the_start(world))
    world.dies(the_start(world))
    world.now_s += SOUND_S
    actions = world.fleet.reconcile(now_s=world.now_s, local_time=dt.time(23), healthy=frozenset())
    assert actions == [Launch(the_place(world).name)]


def test_an_order_to_stop_is_no_failure() -> None:
    world = up()
    start_id = the_start(world)
    world.fleet.order_end()
    world.fleet.carried_out(Stop(start_id), now_s=world.now_s)
    world.dies(start_id)
    assert the_place(world).failure is None


def test_the_gateways_limit_does_not_fall_while_a_replica_is_replaced() -> None:
    world = up()
    before = world.fleet.routing_table().models[0].versions[0].max_connections
    world.dies(the_start(world))
    assert world.fleet.routing_table().models[0].versions[0].max_connections == before


def test_every_model_version_and_replica_has_a_place_of_its_own() -> None:
    world = up(two_models())
    assert len(world.fleet.replicas) == 5
    chat = world.fleet.routing_table().models[0]
    assert [len(v.endpoints) for v in chat.versions] == [2, 0]
    assert [v.share for v in chat.versions] == [90, 10]
