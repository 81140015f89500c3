from __future__ import annotations

import asyncio
import json
import signal
from collections.abc import Callable

import pytest
from tests.controlplane.rooms import Agent, House

from preheat.controlplane.agents import EVICTED
from preheat.controlplane.failures import Kind
from preheat.controlplane.replicas import Heat, Kill, Stop
from preheat.replica.lifecycle import State

UP = ("spawned", "weights verified", "heat ordered", "engine up", "warmed up", "proven")


def test_what_an_agent_tells_reaches_the_fleet(play: Callable[..., House]) -> None:
    async def scenario(house: House) -> None:
        start = await house.launch()
        agent = await Agent(start).listen()
        await agent.tells(*UP)
        await house.until(lambda: start.state is State.READY)
        await agent.closes()

    play(scenario)


def test_its_last_words_count_although_its_process_has_ended_already(
    play: Callable[..., House],
) -> None:
    async def scenario(house: House) -> None:
        start = await house.launch()
        agent = await Agent(start).listen()
        await agent.tells("spawned")
        await house.until(lambda: start.last_event)
        ended = asyncio.ensure_future(house.agents.ended(start.start_id, "exit code 4"))
        await asyncio.sleep(0)
        assert house.place.start is start
        await agent.tells("engine exited", reason="out of memory")
        await agent.closes()
        await ended

    house = play(scenario)
    assert house.place.start is None
    assert house.place.failure is not None
    assert house.place.failure.reason == "out of memory"
    assert house.driver.ended_ids == house.driver.launched


def test_one_that_ends_before_it_listens_is_a_failure_with_advice(
    play: Callable[..., House], capsys: pytest.CaptureFixture[str]
) -> None:
    async def scenario(house: House) -> None:
        start = await house.launch()
        await house.agents.ended(start.start_id, "it crashed (SIGSEGV)")

    house = play(scenario)
    failure = house.place.failure
    assert failure is not None
    assert failure.kind is Kind.AGENT_GONE
    assert "SIGSEGV" in failure.reason
    assert str(house.paths.logs) in failure.advice
    assert "SIGSEGV" in capsys.readouterr().out


def test_one_that_ends_before_it_was_connected_to_is_read_from_its_file(
    play: Callable[..., House],
) -> None:
    async def scenario(house: House) -> None:
        start = await house.launch()
        common = {"start_id": start.start_id, "monotonic_s": 0.0}
        events = [
            {"n": 1, "event": "spawned", "state": "loading", **common},
            {"event": "weights bad", "state": "failed", "reason": "of another start"},
            {"n": 2, "event": "weights bad", "state": "failed", "reason": "another hash", **common},
        ]
        lines = "".join(json.dumps(event) + "\n" for event in events)
        file = house.paths.logs / f"{house.place.name}.events.jsonl"
        file.write_text('{"cut' + "\n" + lines + '{"event": "pro')
        await house.agents.ended(start.start_id, "exit code 4")

    failure = play(scenario).place.failure
    assert failure is not None
    assert (failure.kind, failure.reason) == (Kind.WEIGHTS_BAD, "another hash")


def test_one_that_ends_as_told_is_no_failure(
    play: Callable[..., House], capsys: pytest.CaptureFixture[str]
) -> None:
    async def scenario(house: House) -> None:
        start = await house.launch()
        house.fleet.order_end()
        house.agents.give(Stop(start.start_id))
        await house.agents.ended(start.start_id, "it was stopped (SIGTERM)")

    house = play(scenario)
    assert house.place.failure is None
    assert house.fleet.ended()
    assert capsys.readouterr().out == ""


def test_a_connection_that_breaks_is_taken_up_where_it_was(play: Callable[..., House]) -> None:
    async def scenario(house: House) -> None:
        start = await house.launch()
        first = await Agent(start).listen()
        await first.tells(*UP[:3])
        await house.until(lambda: start.state is State.STARTING)

        second = Agent(start)
        second._events = list(first._events)
        await second.listen()
        for task in asyncio.all_tasks():
            if "_connection" in repr(task.get_coro()):
                task.cancel()
        await second.tells(*UP[3:])
        await house.until(lambda: start.state is State.READY)
        assert house.agents._heard[start.start_id] == len(UP)
        await second.closes()
        await first.closes()

    house = play(scenario)
    assert house.place.was_ready


def test_orders_are_signals_and_heat_is_asked_for(play: Callable[..., House]) -> None:
    async def scenario(house: House) -> None:
        start = await house.launch()
        agent = await Agent(start).listen()
        house.agents.give(Heat(start.start_id))
        await house.until(lambda: agent.orders == ["/heat"])
        house.agents.give(Stop(start.start_id))
        house.agents.give(Kill(start.start_id))
        assert start.ordered == {Heat, Stop, Kill}
        await agent.closes()

    house = play(scenario)
    (start_id,) = house.driver.launched
    assert house.link.killed == [(start_id, signal.SIGTERM), (start_id, signal.SIGKILL)]


def test_heat_that_did_not_arrive_is_ordered_again(play: Callable[..., House]) -> None:
    async def scenario(house: House) -> None:
        start = await house.launch()
        house.agents.give(Heat(start.start_id))
        await house.until(lambda: Heat not in start.ordered)

    play(scenario)


def test_a_damaged_file_of_the_cache_is_dropped_before_the_failure_counts(
    play: Callable[..., House],
) -> None:
    async def scenario(house: House) -> None:
        house.driver.evicts = True
        start = await house.launch()
        agent = await Agent(start).listen()
        await agent.tells("spawned")
        await house.until(lambda: start.last_event)
        await agent.tells("weights bad", reason="another hash", advice="")
        await agent.closes()
        await house.agents.ended(start.start_id, "exit code 4")

    house = play(scenario)
    assert house.place.failure is not None
    assert house.place.failure.kind is Kind.WEIGHTS_BAD
    assert house.place.failure.advice == EVICTED


def test_the_end_of_a_process_that_is_no_agent_is_nothing(play: Callable[..., House]) -> None:
    async def scenario(house: House) -> None:
        await house.agents.ended("nobody@1", "why ever")

    play(scenario)
