from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Any

import pytest
from tests.controlplane.rooms import House, Scenario

from preheat.core import localhttp
from preheat.core.coldstart import Phase, problems
from preheat.core.errors import PreheatError
from preheat.core.traces import otel
from preheat.core.traces.store import read_records
from preheat.replica.lifecycle import State


def proven(start_id: str) -> dict[str, Any]:
    now_s = time.monotonic()
    phases = [{"name": "weights", "start_s": now_s, "end_s": now_s}]
    return {"event": "proven", "state": "ready", "monotonic_s": now_s, "phases": phases}


async def ready(house: House) -> str:
    start = await house.launch()
    event = proven(start.start_id)
    house.fleet.observe(start.start_id, event, now_s=time.monotonic())
    house.starts.heard(start.start_id, event)
    return start.start_id


async def gateway(house: House, status: int = 200) -> asyncio.Server:
    """Answers what the private listener would."""

    async def answer(request: localhttp.Request) -> localhttp.Response:
        assert request.headers["x-preheat-pin"] in house.driver.launched
        return localhttp.Response(status, b"data: {}\n\n")

    return await localhttp.serve(house.paths.probe_socket, answer)


def stored(house: House) -> list[Any]:
    return [entry.record for entry in read_records(house.paths.coldstarts)[0]]


def test_a_start_that_serves_leaves_a_record_with_its_first_token(
    play: Callable[[Scenario], House],
) -> None:
    async def scenario(house: House) -> None:
        server = await gateway(house)
        await ready(house)
        house.starts.published(house.fleet.routing_table(), time.monotonic())
        await house.until(lambda: stored(house))
        server.close()

    house = play(scenario)
    (record,) = stored(house)
    assert problems(record) == []
    assert record.first_token_s > record.ready_s
    assert house.recorded == [record]
    assert house.starts.last[house.place.name] == record
    assert [entry["event"] for entry in house.said()] == ["ready"]


def test_a_table_that_does_not_hold_the_start_yet_records_nothing(
    play: Callable[[Scenario], House],
) -> None:
    async def scenario(house: House) -> None:
        before = house.fleet.routing_table()
        await ready(house)
        house.starts.published(before, time.monotonic())
        assert house.starts._trails
        house.starts.published(house.fleet.routing_table(), time.monotonic())
        house.starts.published(house.fleet.routing_table(), time.monotonic())
        await house.until(lambda: stored(house))

    assert len(stored(play(scenario))) == 1


@pytest.mark.parametrize("listening", [True, False])
def test_without_a_first_token_it_is_ready_all_the_same(
    play: Callable[[Scenario], House], listening: bool
) -> None:
    async def scenario(house: House) -> None:
        server = await gateway(house, 503) if listening else None
        await ready(house)
        house.starts.published(house.fleet.routing_table(), time.monotonic())
        await house.until(lambda: stored(house))
        if server is not None:
            server.close()

    (record,) = stored(play(scenario))
    assert record.first_token_s is None


def test_a_start_that_failed_leaves_a_record_with_its_reason(
    play: Callable[[Scenario], House],
) -> None:
    async def scenario(house: House) -> None:
        start = await house.launch()
        house.starts.heard(start.start_id, {"state": "loading", "monotonic_s": time.monotonic()})
        start.state, start.reason = State.FAILED, "another hash"
        house.starts.ended(start, "exit code 4")
        await house.until(lambda: stored(house))

    (record,) = stored(play(scenario))
    assert record.outcome == "another hash"
    assert problems(record) == []


def test_one_that_was_told_to_end_leaves_none(play: Callable[[Scenario], House]) -> None:
    async def scenario(house: House) -> None:
        start = await house.launch()
        house.fleet.order_end()
        house.starts.ended(start, "it was stopped")
        assert not house.starts._trails

    assert stored(play(scenario)) == []


def test_a_record_that_cannot_be_kept_is_said_and_forgotten(
    play: Callable[[Scenario], House],
) -> None:
    async def scenario(house: House) -> None:
        house.paths.coldstarts.rmdir()
        house.paths.coldstarts.write_text("in the way")
        await ready(house)
        house.starts.published(house.fleet.routing_table(), time.monotonic())
        await house.until(lambda: len(house.said()) == 2)

    house = play(scenario)
    assert [entry["event"] for entry in house.said()] == ["ready", "record lost"]
    assert len(house.recorded) == 1


def test_spans_that_nobody_takes_are_said_and_forgotten(
    play: Callable[[Scenario], House], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(_: object) -> int:
        raise PreheatError("no collector")

    monkeypatch.setattr(otel, "otlp_configured", lambda: True)
    monkeypatch.setattr(otel, "export_otlp", refuse)

    async def scenario(house: House) -> None:
        await ready(house)
        house.starts.published(house.fleet.routing_table(), time.monotonic())
        await house.until(lambda: len(house.said()) == 2)

    assert [entry["event"] for entry in play(scenario).said()] == ["ready", "export failed"]


def test_what_went_before_is_part_of_a_first_start(play: Callable[[Scenario], House]) -> None:
    async def scenario(house: House) -> None:
        now_s = time.monotonic()
        before = [Phase(name="process", start_s=now_s - 5.0, end_s=now_s - 4.0)]
        house.launches.begin(house.place, spawned_s=now_s - 5.0, before=before)
        await house.until(lambda: house.place.start)
        start = house.place.start
        assert start is not None
        event = proven(start.start_id)
        house.fleet.observe(start.start_id, event, now_s=time.monotonic())
        house.starts.heard(start.start_id, event)
        house.starts.published(house.fleet.routing_table(), time.monotonic())
        await house.until(lambda: stored(house))

    (record,) = stored(play(scenario))
    assert record.phases[0].name == "process"
    assert record.ready_s - record.spawned_s > 5.0
    assert problems(record) == []
