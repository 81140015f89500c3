from __future__ import annotations

import json
from itertools import combinations
from pathlib import Path
from typing import Any

from hypothesis import given
from tests.core.records import example, phase, record, sound_records

from preheat.core.coldstart import MAIN, ColdStart
from preheat.core.traces.chrome import chrome_trace, write_chrome_trace

REQUIRED = {
    "X": {"name", "cat", "ts", "dur", "pid", "tid", "args"},
    "i": {"name", "ts", "pid", "tid", "s"},
    "M": {"name", "pid", "tid", "args"},
}
"""What the trace event format asks of each kind of event used here."""


def of_kind(trace: dict[str, Any], kind: str) -> list[dict[str, Any]]:
    return [event for event in trace["traceEvents"] if event["ph"] == kind]


def nanoseconds(event: dict[str, Any]) -> tuple[int, int]:
    return round(event["ts"] * 1e3), round((event["ts"] + event["dur"]) * 1e3)


@given(sound_records())
def test_every_trace_is_valid(sound: ColdStart) -> None:
    trace = json.loads(json.dumps(chrome_trace(sound), allow_nan=False))
    threads = {
        event["tid"]: event["args"]["name"]
        for event in of_kind(trace, "M")
        if event["name"] == "thread_name"
    }
    assert sorted(threads.values()) == sorted({MAIN} | {one.track for one in sound.phases})
    for event in trace["traceEvents"]:
        assert set(event) >= REQUIRED[event["ph"]]
        assert event["tid"] in threads
        assert event.get("ts", 0) >= 0
        assert event.get("dur", 0) >= 0
    complete = of_kind(trace, "X")
    assert len(complete) == len(sound.phases)
    for one, event in zip(sound.phases, complete, strict=True):
        assert (threads[event["tid"]], event["name"]) == (one.track, one.name)
    for left, right in combinations(complete, 2):
        if left["tid"] == right["tid"]:
            (a, b), (c, d) = sorted([nanoseconds(left), nanoseconds(right)])
            assert b <= c or d <= b or a == c, "events of one thread must nest or be apart"


def test_times_are_microseconds_from_the_earliest_moment() -> None:
    trace = chrome_trace(record(phase("a", 0.25, 0.75), phase("b", -0.5, 0.5, "envoy")))
    first, second = of_kind(trace, "X")
    assert (first["ts"], first["dur"]) == (750_000.0, 500_000.0)
    assert (second["ts"], second["dur"]) == (0.0, 1_000_000.0)
    assert {event["name"]: event["ts"] for event in of_kind(trace, "i")} == {
        "ready": 1_500_000.0,
        "first token": 1_500_000.0,
    }


def test_the_file_is_plain_json_with_the_starts_facts(tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    write_chrome_trace(example(), path)
    trace = json.loads(path.read_text(encoding="utf-8"))
    assert trace["otherData"]["start_id"] == "chat-v1-0@1"
    assert trace["otherData"]["bytes_read"] == 98_362_432
    (hashing,) = [event for event in trace["traceEvents"] if event["name"] == "weights.hash"]
    assert hashing["args"] == {"threads": 2}


def test_a_failed_start_makes_a_trace_as_well() -> None:
    trace = chrome_trace(record(first_token_s=None, outcome="killed by signal 9"))
    assert trace["otherData"]["outcome"] == "killed by signal 9"
    assert of_kind(trace, "X") == []
