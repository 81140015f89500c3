from __future__ import annotations

import asyncio
import json
import os
from pathlib import Path

import pytest

from preheat.replica import events
from preheat.replica.events import EventLog


def log_at(path: Path) -> EventLog:
    return EventLog(path, replica="m-0", start_id="m-0@1")


async def numbers(log: EventLog, after: int = 0) -> list[int]:
    return [json.loads(line)["n"] async for line in log.follow(after)]


def test_followers_get_old_and_new_events_once_and_in_order(tmp_path: Path) -> None:
    async def scenario() -> None:
        log = log_at(tmp_path / "events")
        log.add("one", "loading")
        early = asyncio.ensure_future(numbers(log))
        await asyncio.sleep(0)
        log.add("two", "warm")
        log.add("three", "warm", reason="x")
        late = asyncio.ensure_future(numbers(log, after=2))
        await asyncio.sleep(0)
        await log.close()
        assert await early == [1, 2, 3]
        assert await late == [3]

    asyncio.run(scenario())


def test_the_file_holds_what_followers_were_told(tmp_path: Path) -> None:
    async def scenario() -> list[bytes]:
        log = log_at(tmp_path / "new" / "events")
        log.add("one", "loading", sha256="ab")
        log.add("two", "warm")
        followed = asyncio.ensure_future(collect(log))
        await asyncio.sleep(0)
        await log.close()
        return await followed

    async def collect(log: EventLog) -> list[bytes]:
        return [line async for line in log.follow(0)]

    followed = asyncio.run(scenario())
    assert (tmp_path / "new" / "events").read_bytes() == b"".join(followed)
    assert json.loads(followed[0]).items() >= {"event": "one", "sha256": "ab"}.items()


def test_a_follower_that_does_not_read_holds_the_end_for_its_time_only(tmp_path: Path) -> None:
    async def scenario() -> None:
        log = log_at(tmp_path / "events")
        log.add("one", "loading")
        stalled = log.follow(0)
        await anext(stalled)
        await log.close(timeout_s=0.01)
        await stalled.aclose()  # type: ignore[attr-defined]

    asyncio.run(scenario())


def test_a_disk_that_takes_no_more_loses_events_of_the_file_and_says_so() -> None:
    async def scenario() -> None:
        log = EventLog(Path("/dev/full"), replica="m-0", start_id="m-0@1")
        log.add("one", "loading")
        assert log.file_error == "No space left on device, from event 1 on"
        reader = asyncio.ensure_future(numbers(log))
        await asyncio.sleep(0)
        await log.close()
        assert await reader == [1]

    asyncio.run(scenario())


def test_a_file_that_has_grown_large_is_set_aside_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def one_event() -> None:
        log = log_at(tmp_path / "events.jsonl")
        log.add("one", "loading")
        await log.close()

    monkeypatch.setattr(events, "FILE_MAX_BYTES", 10)
    for _ in range(3):
        asyncio.run(one_event())
    assert sorted(os.listdir(tmp_path)) == ["events.1.jsonl", "events.jsonl"]  # noqa: PTH208
    for file in tmp_path.iterdir():
        assert len(file.read_text().splitlines()) == 1
