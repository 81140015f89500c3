from __future__ import annotations

import json
from collections.abc import Iterator

import pytest
from tests.dataplane.envoy.harness import CHAT, Gateway, model
from tests.dataplane.envoy.upstream import Exchange, Upstream, whole

KIB, MIB = 1 << 10, 1 << 20
LIMIT = 4 * MIB


def body_of(size_bytes: int) -> bytes:
    empty = json.dumps({"model": "m", "x": ""}).encode()
    return empty.replace(b'""', b'"%b"' % (b"y" * (size_bytes - len(empty))))


def in_pieces(body: bytes) -> Iterator[bytes]:
    for begin in range(0, len(body), 50_000):
        yield body[begin : begin + 50_000]


def send(gateway: Gateway, body: bytes, *, chunked: bool) -> tuple[int, str]:
    data = in_pieces(body) if chunked else body
    reply = gateway.request("POST", CHAT, data, {"content-type": "application/json"})
    return reply.status, reply.code if reply.status >= 400 else ""


@pytest.mark.parametrize("chunked", [False, True])
@pytest.mark.parametrize("size_bytes", [128 * KIB, 300_000, 640 * KIB, LIMIT])
def test_a_body_within_the_limit_arrives_as_it_was_sent(
    gateway: Gateway, engine: Upstream, size_bytes: int, chunked: bool
) -> None:
    gateway.publish(model("m", engine))
    body = body_of(size_bytes)
    assert len(body) == size_bytes
    assert send(gateway, body, chunked=chunked) == (200, "")
    assert engine.received[0].body == body


@pytest.mark.parametrize("chunked", [False, True])
@pytest.mark.parametrize("size_bytes", [LIMIT + 1, 5 * MIB])
def test_a_body_above_the_limit_is_answered_413(
    gateway: Gateway, engine: Upstream, size_bytes: int, chunked: bool
) -> None:
    gateway.publish(model("m", engine))
    assert send(gateway, body_of(size_bytes), chunked=chunked) == (413, "body_too_large")
    assert engine.received == []


@pytest.mark.parametrize("limit_bytes", [1024, 128 * KIB])
def test_the_limit_is_the_one_that_was_set(
    gateway: Gateway, engine: Upstream, limit_bytes: int
) -> None:
    listener = gateway.on_a_port_of_its_own(max_body_bytes=limit_bytes)
    gateway.publish(model("m", engine), listener=listener)
    assert send(gateway, body_of(limit_bytes), chunked=False) == (200, "")
    assert send(gateway, body_of(limit_bytes + 1), chunked=False) == (413, "body_too_large")


def test_what_a_client_adds_is_not_touched(gateway: Gateway, engine: Upstream) -> None:
    gateway.publish(model("m", engine))
    body = (
        '{ "tools":[{"type":"function"}],\t"response_format" : {"b":1,"a":2},"max_tokens":1e3,'
        '"unknown":[1.10, 0.1e-7, 9223372036854775807, "\\u00e9✅\\/"],\r\n"model":"m" }\n'
    ).encode()
    assert gateway.post(body).status == 200
    assert engine.received[0].body == body
    assert engine.received[0].headers["content-type"] == "application/json"


def test_an_answer_is_not_touched(gateway: Gateway, engine: Upstream) -> None:
    gateway.publish(model("m", engine))
    body = '{"usage" : {"prompt_tokens":1.0 ,"x":[] },"é":"✅\\u00e9", "n":1e400}\n'.encode()
    engine.answer = whole(body)
    assert gateway.ask().body == body


@pytest.mark.parametrize("body", [b"", b"not JSON", b'{"cut": ', b"\xff\xfe"])
def test_an_answer_that_is_no_json_passes_too(
    gateway: Gateway, engine: Upstream, body: bytes
) -> None:
    gateway.publish(model("m", engine))
    engine.answer = whole(body)
    reply = gateway.ask()
    assert (reply.status, reply.body) == (200, body)


@pytest.mark.parametrize("status", [400, 401, 404, 413, 429, 500, 503])
def test_an_error_of_the_engine_is_not_rewritten(
    gateway: Gateway, engine: Upstream, status: int
) -> None:
    gateway.publish(model("m", engine))
    engine.answer = whole(b'{"error": "mine"}', status=status)
    reply = gateway.ask()
    assert (reply.status, reply.body) == (status, b'{"error": "mine"}')
    assert "retry-after" not in reply.headers
    assert len(engine.received) == 1


@pytest.mark.parametrize("chunked", [False, True])
def test_a_large_answer_passes_whatever_the_limit_for_requests(
    gateway: Gateway, engine: Upstream, chunked: bool
) -> None:
    listener = gateway.on_a_port_of_its_own(max_body_bytes=1024)
    gateway.publish(model("m", engine), listener=listener)
    body = b'{"data": "%b", "usage": {"prompt_tokens": 7}}' % (b"z" * 20 * MIB)

    async def in_chunks(exchange: Exchange) -> None:
        await exchange.head("application/json")
        for begin in range(0, len(body), MIB):
            await exchange.chunk(body[begin : begin + MIB])
        await exchange.end()

    engine.answer = in_chunks if chunked else whole(body)
    reply = gateway.ask()
    assert reply.status == 200
    assert reply.body == body
    (record,) = gateway.records_where(lambda record: record.model == "m")
    assert (record.prompt_tokens, record.response_bytes) == (7, len(body))
