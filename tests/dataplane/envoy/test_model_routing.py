from __future__ import annotations

import json
import random
import re
from collections.abc import Callable
from urllib.parse import quote

import pytest
from tests.dataplane.envoy.harness import CHAT, Gateway, model, version
from tests.dataplane.envoy.upstream import Exchange, Upstream

from preheat.dataplane.envoy.routing import ModelRoute, VersionRoute

NAMES = ["m", "org/model", "org/Übermodell-✅", "a.b:c@d+e", "m%2Fn", "名" * 200]


@pytest.mark.parametrize("name", NAMES)
def test_a_model_is_reached_by_the_name_in_the_body(
    gateway: Gateway, start: Callable[[], Upstream], name: str
) -> None:
    wanted, other = start(), start()
    gateway.publish(model(name, wanted), model("other", other))
    reply = gateway.ask(name)
    assert (reply.status, reply.headers["x-preheat-replica"]) == (200, wanted.start_id)
    escaped = json.dumps({"x": 1, "model": name}).encode()
    assert gateway.post(escaped).headers["x-preheat-replica"] == wanted.start_id
    assert gateway.ask("other").headers["x-preheat-replica"] == other.start_id


def test_completions_and_chat_go_to_the_same_path_at_the_engine(
    gateway: Gateway, engine: Upstream
) -> None:
    gateway.publish(model("m", engine))
    for path in (CHAT, "/v1/completions", CHAT + "?api-version=1"):
        assert gateway.post({"model": "m"}, path).status == 200
        assert engine.received[-1].target == path


def test_a_model_for_embeddings_serves_embeddings_only(
    gateway: Gateway, start: Callable[[], Upstream]
) -> None:
    embedder, talker = start(), start()
    gateway.publish(ModelRoute("e", (version(embedder),), embeddings=True), model("m", talker))
    assert gateway.post({"model": "e"}, "/v1/embeddings").status == 200
    refused = gateway.post({"model": "e"})
    assert (refused.status, refused.code) == (400, "unsupported_operation")
    assert "/v1/embeddings" in refused.json()["error"]["message"]
    refused = gateway.post({"model": "m"}, "/v1/embeddings")
    assert (refused.status, refused.code) == (400, "unsupported_operation")


def test_an_unknown_model_is_answered_404_and_told_which_there_are(
    gateway: Gateway, engine: Upstream
) -> None:
    gateway.publish(model("org/one", engine), model("two"))
    reply = gateway.ask("three")
    assert (reply.status, reply.code) == (404, "model_not_found")
    assert "org/one, two" in reply.json()["error"]["message"]
    assert engine.received == []


@pytest.mark.parametrize(
    ("body", "code"),
    [
        (b"{", "invalid_json"),
        (b'{"model": "m"} and more', "invalid_json"),
        (b'{"model": "\xff"}', "invalid_json"),
        (b'{"model": "m", "seed": 18446744073709551615}', "invalid_json"),
        (b'{"x": ' + b"[" * 100_000 + b"]" * 100_000 + b"}", "invalid_json"),
        (b"", "missing_model"),
        (b"[1]", "missing_model"),
        (b'"m"', "missing_model"),
        (b'{"messages": []}', "missing_model"),
        (b'{"model": null}', "missing_model"),
        (b'{"model": {"name": "m"}}', "missing_model"),
        (b'{"model": ""}', "invalid_json"),
    ],
)
def test_a_body_without_a_model_is_answered_400(
    gateway: Gateway, engine: Upstream, body: bytes, code: str
) -> None:
    gateway.publish(model("m", engine))
    reply = gateway.post(body)
    assert (reply.status, reply.code) == (400, code)
    assert engine.received == []


def test_the_body_decides_whatever_content_type_is_claimed(
    gateway: Gateway, engine: Upstream
) -> None:
    gateway.publish(model("m", engine))
    for claimed in ("application/x-www-form-urlencoded", "text/plain; charset=utf-8", ""):
        headers = {"content-type": claimed}
        assert gateway.request("POST", CHAT, b'{"model":"m"}', headers).status == 200


@pytest.mark.parametrize("method", ["GET", "PUT", "DELETE", "PATCH", "OPTIONS"])
def test_another_method_is_answered_405(gateway: Gateway, engine: Upstream, method: str) -> None:
    gateway.publish(model("m", engine))
    reply = gateway.request(method, CHAT, b'{"model":"m"}')
    assert (reply.status, reply.code, reply.headers["allow"]) == (405, "wrong_method", "POST")
    reply = gateway.request("POST", "/v1/models", b"{}")
    assert (reply.status, reply.code, reply.headers["allow"]) == (405, "wrong_method", "GET")


def test_junk_for_names_is_refused_and_leaves_no_trace_in_envoys_statistics(
    gateway: Gateway, engine: Upstream
) -> None:
    gateway.publish(model("m", engine))
    junk = ["m ", "M", "m/", "\x00no-model", "💥", "x" * 100_000, '"', "\\", "*", ".*", "m\n", "-"]
    random_source = random.Random(7)
    junk += ["".join(chr(random_source.randrange(1, 0xD800)) for _ in range(9)) for _ in range(200)]
    known = gateway.ask("nobody")
    before = gateway.admin("/stats").count(b"\n")
    for name in junk:
        reply = gateway.ask(name)
        assert reply.status in (400, 404)
        assert reply.code in ("missing_model", "model_not_found")
    assert known.status == 404
    assert gateway.admin("/stats").count(b"\n") == before
    assert engine.received == []


# ── listing ─────────────────────────────────────────────────────────────────────────────────────


def test_models_are_listed_with_their_state(
    gateway: Gateway, start: Callable[[], Upstream]
) -> None:
    one, two = start(), start()
    gateway.publish(model("org/one", one), model("two", two, serving=False))
    listed = gateway.get("/v1/models").json()
    assert listed["object"] == "list"
    assert [(m["id"], m["object"], m["state"]) for m in listed["data"]] == [
        ("org/one", "model", "ready"),
        ("two", "model", "loading"),
    ]
    assert listed["data"][0]["versions"] == [
        {"name": "v1", "traffic_share": 100, "replicas_serving": 1}
    ]


@pytest.mark.parametrize("name", NAMES)
def test_a_model_is_found_by_every_spelling_of_its_name_in_the_path(
    gateway: Gateway, name: str
) -> None:
    gateway.publish(model(name), model("other"))
    whole = quote(name, safe="")
    lower = re.sub("%..", lambda escape: escape[0].lower(), whole)
    for spelling in (whole, lower, quote(name, safe="/"), quote(name, safe="/:@+")):
        reply = gateway.get(f"/v1/models/{spelling}")
        assert (reply.status, reply.json()["id"]) == (200, name)


def test_a_model_that_is_not_listed_is_answered_404(gateway: Gateway) -> None:
    gateway.publish(model("a.b"))
    for path in ("/v1/models/axb", "/v1/models/a.bc", "/v1/models/", "/v1/models/a.b/x"):
        reply = gateway.get(path)
        assert (reply.status, reply.code) == (404, "model_not_found")


def test_a_path_that_is_nothing_is_answered_404_with_what_there_is(gateway: Gateway) -> None:
    gateway.publish(model("m"))
    reply = gateway.get("/v2/models")
    assert (reply.status, reply.code) == (404, "not_found")
    assert CHAT in reply.json()["error"]["message"]


# ── health ──────────────────────────────────────────────────────────────────────────────────────


def test_live_is_answered_whatever_is_missing_and_ready_says_what(gateway: Gateway) -> None:
    gateway.publish(model("m"), missing=("m v1: 0 of 1 replicas",))
    assert gateway.get("/live").status == 200
    for path in ("/ready", "/health"):
        reply = gateway.get(path)
        assert (reply.status, reply.json()["missing"]) == (503, ["m v1: 0 of 1 replicas"])
        assert reply.headers["retry-after"] == "1"
    gateway.publish(model("m"))
    for path in ("/live", "/ready", "/health"):
        reply = gateway.get(path)
        assert (reply.status, reply.headers["content-type"]) == (200, "application/json")


def test_the_listing_says_nothing_about_readiness(gateway: Gateway) -> None:
    gateway.publish(model("m"), missing=("m",))
    assert gateway.get("/v1/models").status == 200
    assert gateway.get("/ready").status == 503


# ── headers ─────────────────────────────────────────────────────────────────────────────────────


def test_internal_headers_of_a_client_are_neither_followed_nor_passed_on(
    gateway: Gateway, start: Callable[[], Upstream]
) -> None:
    serving, proving = start(), start()
    endpoints = (serving.endpoint(), proving.endpoint(serving=False))
    gateway.publish(ModelRoute("m", (VersionRoute("v1", 100, endpoints, 512),)))
    sent = {
        "x-preheat-pin": proving.start_id,
        "X-Preheat-Replica": proving.start_id,
        "x-preheat-client": "mallory",
        "x-envoy-upstream-rq-timeout-ms": "1",
        "x-envoy-max-retries": "9",
    }
    for _ in range(20):
        reply = gateway.ask("m", headers=sent)
        assert (reply.status, reply.headers["x-preheat-replica"]) == (200, serving.start_id)
    assert proving.received == []
    passed = {name for request in serving.received for name in request.headers}
    assert not passed & {name.lower() for name in sent}
    assert {r.client for r in gateway.records_where(lambda r: r.model == "m", 20)} == {""}


def test_an_engine_cannot_claim_to_be_another_start(gateway: Gateway, engine: Upstream) -> None:
    async def claim(exchange: Exchange) -> None:
        await exchange.raw(
            b"HTTP/1.1 200 OK\r\nx-preheat-replica: other@9\r\ncontent-length: 0\r\n\r\n"
        )

    engine.answer = claim
    gateway.publish(model("m", engine))
    assert gateway.ask().headers["x-preheat-replica"] == engine.start_id


def test_a_request_id_is_kept_or_made(gateway: Gateway, engine: Upstream) -> None:
    gateway.publish(model("m", engine))
    assert gateway.ask("m", headers={"x-request-id": "mine"}).headers["x-request-id"] == "mine"
    assert engine.received[-1].headers["x-request-id"] == "mine"
    assert len(gateway.ask("m").headers["x-request-id"]) == 36
