from __future__ import annotations

import asyncio
import contextlib
import json
import socket
from functools import partial
from typing import Any

import pytest
from tests.dataplane.envoy.harness import LIMIT_S, Gateway, eventually, model
from tests.dataplane.envoy.upstream import (
    DONE,
    USAGE,
    Exchange,
    Script,
    Scripts,
    Upstream,
    event,
    silence,
    stream,
)

from preheat.dataplane.envoy.usage import OBJECT_MAX_BYTES

TOKENS = (event({"choices": [{"delta": {"content": "✅ é"}}]}), event({"choices": []}))
STREAM = b"".join((*TOKENS, event({"choices": [], "usage": USAGE}), DONE))


def usage_seen(gateway: Gateway, count: int) -> set[tuple[int | None, int | None]]:
    found = gateway.records_where(lambda record: record.model == "m", count)
    return {(record.prompt_tokens, record.completion_tokens) for record in found}


def received_in_pieces(gateway: Gateway, engine: Upstream, *pieces: bytes) -> bytes:
    """What a client gets of an answer of which each piece is sent when the last has arrived."""
    script = engine.answer = Script(gateway.loop.loop)
    with contextlib.closing(gateway.open_stream()) as connection:
        script.head()
        answer = connection.getresponse()
        seen = b""
        for piece in pieces:
            script.chunk(piece)
            seen += answer.read(len(piece))
        script.end()
        return seen + answer.read()


def test_a_stream_cut_anywhere_arrives_as_it_was_sent_and_its_usage_is_exact(
    gateway: Gateway, engine: Upstream
) -> None:
    gateway.publish(model("m", engine))
    pieces = [(STREAM[:cut], STREAM[cut:]) for cut in range(1, len(STREAM))]
    for cut in pieces:
        assert received_in_pieces(gateway, engine, *cut) == STREAM
    assert usage_seen(gateway, len(pieces)) == {(7, 3)}


def test_a_stream_of_single_bytes_arrives_as_it_was_sent_and_its_usage_is_exact(
    gateway: Gateway, engine: Upstream
) -> None:
    gateway.publish(model("m", engine))
    single = (bytes([byte]) for byte in STREAM)
    assert received_in_pieces(gateway, engine, *single) == STREAM
    assert usage_seen(gateway, 1) == {(7, 3)}


@pytest.mark.parametrize(
    "body",
    [
        STREAM.replace(b"data: ", b"data:"),
        STREAM.replace(b"\n", b"\r\n"),
        b": a comment\n\nevent: x\nid: 1\n" + STREAM,
        STREAM.removesuffix(DONE),
        event({"usage": None})
        + event({"usage": {"prompt_tokens": 7, "completion_tokens": 1}})
        + STREAM,
        b"data: not JSON\n\n" + STREAM,
        b"data: 1\n\ndata: null\n\ndata: []\n\ndata:\n\n" + STREAM,
        b'data: {"usage": {"prompt_tokens": -5, "completion_tokens": 1e999}}\n\n' + STREAM,
        b'data: {"usage": {"prompt_tokens": 1-2, "completion_tokens": "9"}}\n\n' + STREAM,
        event({"usage": 1, "timings": "x"}) + event('"usage": {"prompt_tokens": 1}') + STREAM,
        b'data: {"usage":\ndata: {"prompt_tokens": 7,\ndata: "completion_tokens":3}}\n\n',
        b"data: " + b"x" * 2_000_000 + b"\n\n" + STREAM,
    ],
    ids=[
        "no-space",
        "crlf",
        "other-fields",
        "no-done",
        "earlier-usage",
        "not-json",
        "scalars",
        "numbers",
        "no-numbers",
        "look-alikes",
        "lines",
        "huge-event",
    ],
)
def test_other_ways_of_writing_a_stream_are_read_too(
    gateway: Gateway, engine: Upstream, body: bytes
) -> None:
    engine.answer = stream(body)
    gateway.publish(model("m", engine))
    assert gateway.ask().body == body
    assert usage_seen(gateway, 1) == {(7, 3)}


@pytest.mark.parametrize(
    "usage",
    [
        b'{"prompt_tokens": -5, "completion_tokens": 1e999}',
        b'{"prompt_tokens": 1-2, "completion_tokens": "9"}',
        b'{"prompt_tokens": null, "completion_tokens": []}',
    ],
)
def test_what_is_no_count_is_not_counted(gateway: Gateway, engine: Upstream, usage: bytes) -> None:
    engine.answer = stream(b'data: {"usage": %b}\n\n' % usage)
    gateway.publish(model("m", engine))
    gateway.ask()
    assert usage_seen(gateway, 1) == {(None, None)}


@pytest.mark.parametrize(
    "options",
    [{}, None, {"include_usage": False}, {"include_usage": "yes"}, {"include_usage": {}}, 5],
)
def test_usage_is_in_a_stream_only_when_it_was_asked_for(
    gateway: Gateway, engine: Upstream, options: Any
) -> None:
    """An engine that sends it with every stream; it is counted all the same."""
    told = {"choices": [], "usage": {"prompt_tokens": 7, "completion_tokens": 3}, "id": "x"}
    engine.answer = stream(*TOKENS, event(told), DONE)
    gateway.publish(model("m", engine))
    lines = gateway.ask(stream_options=options).body.replace(b"data: ", b"").split(b"\n\n")
    assert json.loads(lines[len(TOKENS)]) == {"choices": [], "id": "x"}
    assert gateway.ask().body == b"".join((*TOKENS, event(told), DONE))
    assert usage_seen(gateway, 2) == {(7, 3)}
    assert "include_usage" not in gateway.envoy.log_tail()


def test_an_object_that_does_not_end_is_not_waited_for(gateway: Gateway, engine: Upstream) -> None:
    gateway.publish(model("m", engine))
    begin = b'data: {"usage": {"x": "' + b"y" * OBJECT_MAX_BYTES
    end = b'", "prompt_tokens": 7}}\n\n'
    assert received_in_pieces(gateway, engine, begin, end) == begin + end
    assert usage_seen(gateway, 1) == {(None, None)}


def test_a_stream_without_usage_leaves_it_open(gateway: Gateway, engine: Upstream) -> None:
    engine.answer = stream(*TOKENS, DONE)
    gateway.publish(model("m", engine))
    assert gateway.ask().body == b"".join((*TOKENS, DONE))
    assert usage_seen(gateway, 1) == {(None, None)}


def test_a_character_split_over_chunks_arrives_byte_by_byte(
    gateway: Gateway, engine: Upstream
) -> None:
    gateway.publish(model("m", engine))
    text = "data: ✅\n\n".encode()
    assert received_in_pieces(gateway, engine, *(bytes([byte]) for byte in text)) == text


def test_headers_and_each_event_are_passed_on_before_there_is_more(
    gateway: Gateway, engine: Upstream, script: Script
) -> None:
    engine.answer = script
    gateway.publish(model("m", engine))
    connection = gateway.open_stream()
    script.head()
    answer = connection.getresponse()
    assert answer.status == 200
    for number in range(5):
        data = event(number)
        script.chunk(data)
        assert answer.read(len(data)) == data
    script.end()
    assert answer.read() == b""
    connection.close()


def test_no_timeout_ends_a_stream(gateway: Gateway) -> None:
    """Every one that Envoy has by default is off; the dump shows what is in force."""
    gateway.publish(model("m"))
    dump = gateway.admin("/config_dump").decode()
    assert '"stream_idle_timeout": "0s"' in dump
    assert dump.count('"timeout": "0s"') >= 2
    assert "max_stream_duration" not in dump
    assert "max_connection_duration" not in dump


@pytest.mark.parametrize("after_bytes", [0, 9])
def test_a_client_that_leaves_ends_the_request_at_the_engine(
    gateway: Gateway, engine: Upstream, script: Script, after_bytes: int
) -> None:
    """Before the headers, and in mid-stream."""
    gateway.publish(model("m", engine))
    engine.answer = script if after_bytes else silence
    connection = gateway.open_stream()
    if after_bytes:
        script.head()
        script.chunk(b"data: 1\n\n")
        assert connection.getresponse().read(after_bytes) == b"data: 1\n\n"
    eventually(lambda: engine.in_flight == 1)
    connection.close()
    eventually(lambda: engine.in_flight == 0)
    assert engine.left == 1


def test_a_client_that_leaves_after_the_headers_ends_the_request_at_the_engine(
    gateway: Gateway, engine: Upstream
) -> None:
    async def thinking(exchange: Exchange) -> None:
        await exchange.head("text/event-stream")
        await silence(exchange)

    engine.answer = thinking
    gateway.publish(model("m", engine))
    connection = gateway.open_stream()
    assert connection.getresponse().status == 200
    connection.close()
    eventually(lambda: engine.left == 1 and engine.in_flight == 0)


def test_a_client_that_stops_sending_its_body_leaves_nothing_at_the_engine(
    gateway: Gateway, engine: Upstream
) -> None:
    gateway.publish(model("m", engine))
    with socket.create_connection(("127.0.0.1", gateway.port), LIMIT_S) as client:
        client.sendall(b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 99\r\n\r\n{")
    gateway.records_where(lambda record: record.outcome == "client_left")
    assert engine.received == []


def runs(engine: Upstream, count: int) -> bool:
    return engine.in_flight == count


def test_two_streams_of_the_same_request_id_share_nothing(
    gateway: Gateway, engine: Upstream
) -> None:
    scripts = Scripts(gateway.loop.loop, 2)
    engine.answer = scripts
    gateway.publish(model("m", engine))
    streams = []
    for number in range(2):
        streams.append(gateway.open_stream(headers={"x-request-id": "same"}))
        eventually(partial(runs, engine, number + 1))
    answers = []
    for script, connection in zip(scripts.all, streams, strict=True):
        script.head()
        answers.append(connection.getresponse())
    for script, letter in zip(scripts.all, (b"a", b"b"), strict=True):
        script.chunk(letter)
    assert [answer.read(1) for answer in answers] == [b"a", b"b"]
    streams[0].close()
    eventually(lambda: engine.left == 1)
    scripts.all[1].chunk(b"c")
    scripts.all[1].end()
    assert answers[1].read() == b"c"
    assert answers[1].headers["x-request-id"] == "same"
    streams[1].close()


def test_150_streams_run_in_parallel(gateway: Gateway, engine: Upstream) -> None:
    count = 150
    gathered = asyncio.Event()

    async def meet(exchange: Exchange) -> None:
        await exchange.head("text/event-stream")
        await exchange.chunk(b"data: 1\n\n")
        if engine.in_flight == count:
            gathered.set()
        await gathered.wait()
        await exchange.chunk(DONE)
        await exchange.end()

    engine.answer = meet
    gateway.publish(model("m", engine))
    with contextlib.ExitStack() as stack:
        streams = [
            stack.enter_context(contextlib.closing(gateway.open_stream())) for _ in range(count)
        ]
        bodies = {connection.getresponse().read() for connection in streams}
    assert bodies == {b"data: 1\n\n" + DONE}
    assert engine.most_in_flight == count
