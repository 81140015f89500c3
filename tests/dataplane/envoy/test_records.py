from __future__ import annotations

import asyncio
import fcntl
import json
import os
import select
import threading
import time
from pathlib import Path

import pytest
from tests.dataplane.envoy.harness import CHAT, LIMIT_S, Gateway, eventually, model
from tests.dataplane.envoy.upstream import (
    DONE,
    REPLY,
    USAGE,
    Exchange,
    Script,
    Upstream,
    event,
    reset,
    silence,
    stream,
    whole,
)

from preheat.dataplane.envoy import listeners
from preheat.dataplane.envoy.records import (
    LINE_END,
    LINE_MAX_BYTES,
    TEXT_MAX_BYTES,
    RecordPipe,
    RecordStream,
    RequestRecord,
)

# Between an event and the clock being read.
SLACK_S = 0.002
TIMINGS = {"prompt_n": 5, "cache_n": 2, "predicted_n": 4, "predicted_ms": 100.0}


def only(gateway: Gateway, name: str = "m") -> RequestRecord:
    (record,) = gateway.records_where(lambda record: record.model == name)
    return record


def test_the_time_to_the_first_token_is_the_clients_own(gateway: Gateway, engine: Upstream) -> None:
    """The record's lies between what the engine took and what the client saw, headers or not."""
    took: dict[str, float] = {}

    async def thinking(exchange: Exchange) -> None:
        began_s = time.monotonic()
        await exchange.head("text/event-stream")
        await asyncio.sleep(0.1)
        took["first"] = time.monotonic() - began_s
        first_s = time.monotonic()
        for _ in range(5):
            await exchange.chunk(event({"choices": []}))
            await asyncio.sleep(0.03)
        await exchange.chunk(event({"usage": {"completion_tokens": 6}}))
        took["rest"] = time.monotonic() - first_s
        await exchange.end()

    engine.answer = thinking
    gateway.publish(model("m", engine))
    connection = gateway.connect()
    began_s = time.monotonic()
    connection.request("POST", CHAT, json.dumps({"model": "m", "stream": True}))
    answer = connection.getresponse()
    headers_s = time.monotonic() - began_s
    answer.read(1)
    first_s = time.monotonic() - began_s
    answer.read()
    rest_s = time.monotonic() - began_s - first_s
    connection.close()
    record = only(gateway)
    assert headers_s < took["first"]
    assert record.ttft_s is not None
    assert took["first"] - SLACK_S <= record.ttft_s <= first_s + SLACK_S
    assert record.time_per_output_token_s is not None
    assert record.time_per_output_token_s * 5 / took["rest"] == pytest.approx(1, rel=0.3)
    assert record.time_per_output_token_s * 5 / rest_s == pytest.approx(1, rel=0.3)
    assert record.duration_s >= record.ttft_s


def test_a_record_says_who_asked_what_of_whom(gateway: Gateway, engine: Upstream) -> None:
    gateway.publish(model("org/m", engine))
    before_s = time.time()
    gateway.post({"model": "org/m"}, CHAT + "?api-version=1")
    record = only(gateway, "org/m")
    assert before_s - SLACK_S <= record.start_unix_s <= time.time()
    assert (record.path, record.status, record.outcome) == (CHAT, 200, "ok")
    assert (record.replica, record.version, record.client) == (engine.start_id, "v1", "")
    assert (record.streamed, record.attempts, record.final) == (False, 1, True)
    assert (record.prompt_tokens, record.completion_tokens) == (7, 3)
    assert (record.request_bytes, record.response_bytes) == (len('{"model": "org/m"}'), len(REPLY))
    assert record.ttft_s is None


@pytest.mark.parametrize("streamed", [False, True])
def test_what_llama_cpp_says_of_its_own_timings_counts_where_usage_is_not_given(
    gateway: Gateway, engine: Upstream, streamed: bool
) -> None:
    answer = {"timings": TIMINGS}
    engine.answer = stream(event(answer), DONE) if streamed else whole(json.dumps(answer).encode())
    gateway.publish(model("m", engine))
    gateway.ask()
    record = only(gateway)
    assert (record.prompt_tokens, record.completion_tokens) == (7, 4)
    if not streamed:
        assert record.time_per_output_token_s == pytest.approx(0.025)


def test_no_text_of_a_prompt_or_an_answer_is_in_a_record(
    gateway: Gateway, engine: Upstream, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not in what is decoded, and not in what Envoy sends."""
    from preheat.dataplane.envoy import records

    seen: list[str] = []
    decode = records.decode

    def spy(line: str) -> RequestRecord:
        seen.append(line)
        return decode(line)

    monkeypatch.setattr(records, "decode", spy)
    gateway.publish(model("m", engine))
    secret = "xyzzy-secret"
    reply = {"usage": USAGE, "choices": [{"text": secret}], "timings": {"prompt": secret}}
    headers = {"authorization": f"Bearer {secret}", "cookie": secret}
    for answer in (whole(json.dumps(reply).encode()), stream(event(reply), DONE)):
        engine.answer = answer
        gateway.ask("m", headers, messages=[{"content": secret}], user=secret, metadata=secret)
    found = gateway.records_where(lambda record: record.model == "m", 2)
    assert [record.completion_tokens for record in found] == [3, 3]
    assert any("/v1/" in text for text in seen)
    assert not any(secret in text for text in [*seen, *map(str, found)])


# ── what became of it ───────────────────────────────────────────────────────────────────────────


def test_refused_requests_are_told_from_failed_ones(gateway: Gateway, engine: Upstream) -> None:
    gateway.publish(model("m", engine), model("empty"))

    def outcome_of(name: str) -> tuple[str, int, str]:
        gateway.ask(name)
        record = only(gateway, name)
        return record.outcome, record.status, record.replica

    assert outcome_of("unknown") == ("refused", 404, "")
    assert outcome_of("empty") == ("no_capacity", 503, "")
    for status, outcome in ((400, "refused"), (429, "refused"), (500, "error"), (503, "error")):
        engine.answer = whole(b"{}", status=status)
        assert outcome_of("m") == (outcome, status, engine.start_id)
        gateway.since_unix_s = time.time()
    engine.answer = reset
    assert outcome_of("m") == ("upstream_failed", 502, engine.start_id)


def test_a_body_without_a_model_leaves_a_record_without_one(gateway: Gateway) -> None:
    gateway.publish(model("m"))
    gateway.post(b"{")
    gateway.post(b"{}")
    gateway.get("/v1/models")
    found = gateway.records_where(lambda record: record.path.startswith("/v1/"), 3)
    assert [(record.model, record.status) for record in found] == [("", 400), ("", 400), ("", 200)]


@pytest.mark.parametrize("begun", [False, True])
def test_a_client_that_leaves_is_told_from_an_engine_that_fails(
    gateway: Gateway, engine: Upstream, script: Script, begun: bool
) -> None:
    engine.answer = script if begun else silence
    gateway.publish(model("m", engine))
    connection = gateway.open_stream()
    if begun:
        script.head()
        script.chunk(b"data: 1\n\n")
        connection.getresponse().read(9)
    eventually(lambda: engine.in_flight == 1)
    connection.close()
    record = only(gateway)
    assert (record.outcome, record.replica) == ("client_left", engine.start_id)
    assert (record.ttft_s is not None) == begun


def test_a_stream_that_breaks_off_is_the_engines_failure(
    gateway: Gateway, engine: Upstream, script: Script
) -> None:
    engine.answer = script
    gateway.publish(model("m", engine))
    connection = gateway.open_stream()
    script.head()
    script.chunk(b"data: 1\n\n")
    connection.getresponse().read(9)
    script.reset()
    record = only(gateway)
    assert (record.outcome, record.status, record.streamed) == ("upstream_failed", 200, True)
    connection.close()


def test_retries_are_counted(gateway: Gateway, engine: Upstream) -> None:
    calls = iter([reset, whole(REPLY)])

    async def second_time(exchange: Exchange) -> None:
        await next(calls)(exchange)

    engine.answer = second_time
    gateway.publish(model("m", engine))
    assert gateway.ask().status == 200
    record = only(gateway)
    assert (record.attempts, record.outcome) == (2, "ok")


# ── while it runs, and when nobody takes it ─────────────────────────────────────────────────────


def test_a_long_stream_is_told_of_while_it_runs(
    gateway: Gateway, engine: Upstream, script: Script, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(listeners, "RECORDS_PERIOD_S", 0.1)
    engine.answer = script
    gateway.publish(model("m", engine), listener=gateway.on_a_port_of_its_own())
    connection = gateway.open_stream()
    script.head()
    script.chunk(b"data: 1\n\n")
    answer = connection.getresponse()
    seen: list[RequestRecord] = []

    def running() -> bool:
        seen.extend(record for record in gateway.records.take() if record.model == "m")
        return len(seen) >= 2

    eventually(running)
    assert all(not record.final and record.replica == engine.start_id for record in seen)
    script.end()
    answer.read()
    connection.close()
    (ended,) = gateway.records_where(lambda record: record.final and record.model == "m")
    assert (ended.outcome, ended.ttft_s is not None) == ("ok", True)


def test_a_consumer_that_stalls_does_not_hold_requests_up_and_gets_its_records_later(
    gateway: Gateway, engine: Upstream
) -> None:
    go_on = threading.Event()

    def stall(_: RequestRecord) -> None:
        go_on.wait(LIMIT_S)

    gateway.records.on_record = stall
    gateway.publish(model("m", engine))
    count = 300
    with gateway.paths.records_pipe.open("r+b", buffering=0) as pipe:
        size = fcntl.fcntl(pipe, fcntl.F_GETPIPE_SZ)
        # What Envoy has to keep for later is more than the pipe holds.
        fcntl.fcntl(pipe, fcntl.F_SETPIPE_SZ, 4096)
    try:
        for _ in range(count):
            assert gateway.ask().status == 200
        assert not go_on.is_set()
    finally:
        go_on.set()
        with gateway.paths.records_pipe.open("r+b", buffering=0) as pipe:
            fcntl.fcntl(pipe, fcntl.F_SETPIPE_SZ, size)
    assert len(gateway.records_where(lambda record: record.model == "m", count)) == count


def test_records_of_a_time_without_a_reader_are_read_by_the_next_one(
    gateway: Gateway, engine: Upstream
) -> None:
    gateway.publish(model("m", engine))
    gateway.stop_reading()
    try:
        for _ in range(20):
            assert gateway.ask().status == 200
    finally:
        gateway.start_reading()
    assert len(gateway.records_where(lambda record: record.model == "m", 20)) == 20


@pytest.mark.parametrize("name", ["a\nb", "a\tb\t200\tc", "\x00", "ÿ", "\u001e", "x" * 4000])
def test_no_name_of_a_model_makes_more_or_less_than_one_record(gateway: Gateway, name: str) -> None:
    gateway.publish(model("m"))
    gateway.ask(name)
    gateway.ask("m")
    found = gateway.records_where(lambda record: record.path == CHAT, 2)
    assert [record.model for record in found] == [name.strip("\x00")[:TEXT_MAX_BYTES], "m"]
    assert gateway.records.dropped == 0


def test_a_path_of_any_length_is_one_record(gateway: Gateway) -> None:
    gateway.publish(model("m"))
    path = "/v1/" + "x" * 20_000
    assert gateway.get(path).status == 404
    (record,) = gateway.records_where(lambda record: record.path.startswith("/v1/x"))
    assert (record.path, record.status) == (path[:TEXT_MAX_BYTES], 404)


def test_what_is_damaged_is_counted_and_costs_no_other_record(tmp_path: Path) -> None:
    """An Envoy that is killed leaves half a line; the next one goes on behind it."""
    line = "\t".join(["0.5", *["-"] * 7, "NotSet", "0", *["-"] * 8]).encode() + LINE_END
    stream = RecordStream()
    at = tmp_path / "pipe"
    os.mkfifo(at)

    def read(*parts: bytes) -> None:
        pipe = RecordPipe(at, stream)
        with at.open("r+b", buffering=0) as writer:
            for part in parts:
                writer.write(part)
            eventually(lambda: not select.select([writer], [], [], 0)[0])
        pipe.close()

    read(line, line[:9] + line, line, b"\x80rubbish" + LINE_END, line)
    assert (stream.received, stream.dropped) == (5, 2)
    assert len(stream.take()) == 3
    read(b"x" * LINE_MAX_BYTES, b"x" * LINE_MAX_BYTES, LINE_END, line)
    assert (stream.received, stream.dropped) == (7, 3)


def test_the_oldest_records_are_dropped_first_and_counted() -> None:
    stream = RecordStream(capacity=3)
    records = [
        RequestRecord(start_unix_s=float(n), model="m", path="/", status=200, outcome="ok")
        for n in range(5)
    ]
    for record in records:
        stream.put(record)
    assert (stream.received, stream.dropped) == (5, 2)
    assert stream.take() == records[2:]
    assert stream.take() == []
    stream.put(records[0])
    assert (stream.received, stream.dropped) == (6, 2)


def test_only_the_owner_can_write_records(gateway: Gateway) -> None:
    assert gateway.paths.records_pipe.stat().st_mode & 0o777 == 0o600
