from __future__ import annotations

import http.client
import select
import threading
from collections import Counter
from collections.abc import Callable
from functools import partial

import pytest
from msgspec.structs import replace
from tests.dataplane.envoy.harness import LIMIT_S, WORKERS, Gateway, eventually, model, version
from tests.dataplane.envoy.upstream import (
    Exchange,
    Script,
    Upstream,
    reset,
    silence,
    stream,
    whole,
)

from preheat.dataplane.envoy import clusters
from preheat.dataplane.envoy.routing import ModelRoute, VersionRoute


def routed(*endpoints: tuple[Upstream, bool]) -> ModelRoute:
    """A model of starts of which each serves or proves itself."""
    known = tuple(start.endpoint(serving=serving) for start, serving in endpoints)
    return ModelRoute("m", (VersionRoute("v1", 100, known, 512),))


# ── who gets traffic ────────────────────────────────────────────────────────────────────────────


def test_only_serving_starts_get_traffic_and_probes_reach_the_pinned_one(
    gateway: Gateway, start: Callable[[], Upstream]
) -> None:
    serving, proving = start(), start()
    gateway.publish(routed((serving, True), (proving, False)))
    for _ in range(20):
        assert gateway.ask().headers["x-preheat-replica"] == serving.start_id
    assert proving.received == []
    for pinned in (proving, serving):
        reply = gateway.probe(pinned.start_id)
        assert (reply.status, reply.headers["x-preheat-replica"]) == (200, pinned.start_id)
        assert pinned.received[-1].target == "/health"
        assert "x-preheat-pin" not in pinned.received[-1].headers
    assert gateway.probe("nobody@1").status == 404


def test_a_proven_start_serves_as_soon_as_that_is_published(
    gateway: Gateway, start: Callable[[], Upstream]
) -> None:
    first, second = start(), start()
    gateway.publish(routed((first, True)))
    for number in range(10):
        proving, serving = (second, first) if number % 2 == 0 else (first, second)
        gateway.publish(routed((serving, True), (proving, False)))
        gateway.probed(proving)
        checks = proving.health_checks
        gateway.publish(routed((proving, True)))
        assert gateway.ask().headers["x-preheat-replica"] == proving.start_id
        # Envoy's own default would hold the change back for a second, or four checks.
        assert proving.health_checks <= checks + 1


@pytest.mark.parametrize("starts", [0, 1])
def test_without_a_serving_start_the_answer_is_503_with_retry_after(
    gateway: Gateway, start: Callable[[], Upstream], starts: int
) -> None:
    gateway.publish(routed(*((start(), False) for _ in range(starts))))
    reply = gateway.ask()
    assert (reply.status, reply.code, reply.headers["retry-after"]) == (503, "no_capacity", "1")
    assert "x-preheat-replica" not in reply.headers


def test_a_model_whose_versions_have_no_share_is_answered_503(
    gateway: Gateway, engine: Upstream
) -> None:
    gateway.publish(model("m", engine, share=0))
    reply = gateway.ask()
    assert (reply.status, reply.code, reply.headers["retry-after"]) == (503, "no_capacity", "1")
    assert engine.received == []


@pytest.mark.parametrize(("threshold_percent", "status"), [(None, 503), (50, 200)])
def test_an_unhealthy_start_is_served_only_with_envoys_own_panic_threshold(
    gateway: Gateway,
    engine: Upstream,
    monkeypatch: pytest.MonkeyPatch,
    threshold_percent: int | None,
    status: int,
) -> None:
    """Envoy's is 50; preheat's is what stands in the module."""
    if threshold_percent is not None:
        monkeypatch.setattr(clusters, "PANIC_THRESHOLD_PERCENT", threshold_percent)
    engine.healthy = False
    gateway.publish(model("m", engine))
    assert gateway.ask().status == status
    assert bool(engine.received) == (status == 200)


def test_a_start_that_turns_unhealthy_gets_no_traffic_until_it_is_healthy_again(
    gateway: Gateway, start: Callable[[], Upstream]
) -> None:
    well, ill = start(), start()
    gateway.publish(model("m", well, ill))
    ill.healthy = False
    eventually(lambda: b"/failed_active_hc" in gateway.admin("/clusters"))
    before = len(ill.received)
    for _ in range(20):
        assert gateway.ask().headers["x-preheat-replica"] == well.start_id
    assert len(ill.received) == before
    ill.healthy = True
    eventually(lambda: gateway.ask().headers["x-preheat-replica"] == ill.start_id)


def test_traffic_is_shared_by_weight_and_a_version_without_a_share_gets_none(
    gateway: Gateway, start: Callable[[], Upstream]
) -> None:
    none, few, many = start(), start(), start()
    versions = (
        version(none, name="none", share=0),
        version(few, name="few", share=20),
        version(many, name="many", share=80),
    )
    gateway.publish(ModelRoute("m", versions))
    count = 400
    seen = Counter(gateway.ask().headers["x-preheat-replica"] for _ in range(count))
    assert seen.keys() == {few.start_id, many.start_id}
    # Five standard deviations.
    assert abs(seen[few.start_id] - 0.2 * count) < 5 * (count * 0.2 * 0.8) ** 0.5


def test_a_version_that_nothing_serves_leaves_its_share_to_the_others(
    gateway: Gateway, start: Callable[[], Upstream]
) -> None:
    stable, canary = start(), start()
    versions = (
        version(stable, name="stable", share=50),
        version(canary, name="canary", share=50, serving=False),
    )
    gateway.publish(ModelRoute("m", versions))
    for _ in range(30):
        assert gateway.ask().headers["x-preheat-replica"] == stable.start_id


def test_too_many_waiting_requests_are_answered_429(gateway: Gateway, engine: Upstream) -> None:
    engine.answer = silence
    listener = gateway.on_a_port_of_its_own(max_requests_waiting=1)
    gateway.publish(model("m", engine, max_connections=1), listener=listener)
    # One connection and one waiting request, and Envoy allows each worker one connection.
    held = [gateway.open_stream() for _ in range(12)]
    try:
        sockets = [connection.sock for connection in held]
        eventually(lambda: len(select.select(sockets, [], [], 0)[0]) >= 12 - 2 * WORKERS)
        reply = gateway.ask()
        assert (reply.status, reply.code, reply.headers["retry-after"]) == (429, "overloaded", "1")
        assert engine.most_in_flight <= 2
    finally:
        for connection in held:
            connection.close()
    # What waited has left its place.
    engine.answer = whole(b"{}")
    eventually(lambda: gateway.ask().status == 200)
    assert engine.in_flight == 0


# ── retries ─────────────────────────────────────────────────────────────────────────────────────


def test_a_reset_before_any_byte_is_tried_again_once_on_another_start(
    gateway: Gateway, start: Callable[[], Upstream]
) -> None:
    broken, well = start(), start()
    broken.answer = reset
    gateway.publish(model("m", broken, well))
    count = 0
    while not broken.received:
        reply = gateway.ask()
        assert (reply.status, reply.headers["x-preheat-replica"]) == (200, well.start_id)
        count += 1
    assert (len(broken.received), len(well.received)) == (1, count)
    assert broken.received[0].body == well.received[-1].body


def test_a_start_whose_socket_is_gone_is_passed_over(
    gateway: Gateway, start: Callable[[], Upstream]
) -> None:
    gone, well = start(), start()
    gateway.publish(model("m", gone, well))
    gone.engine_socket.unlink()
    for _ in range(20):
        assert gateway.ask().headers["x-preheat-replica"] == well.start_id


def test_when_every_attempt_is_reset_the_answer_is_502(gateway: Gateway, engine: Upstream) -> None:
    engine.answer = reset
    gateway.publish(model("m", engine))
    reply = gateway.ask()
    assert (reply.status, reply.code) == (502, "replica_failed")
    assert len(engine.received) == 1 + gateway.listener.retries


def test_no_retry_is_made_when_none_is_wanted(gateway: Gateway, engine: Upstream) -> None:
    engine.answer = reset
    gateway.publish(model("m", engine), listener=replace(gateway.listener, retries=0))
    assert gateway.ask().status == 502
    assert len(engine.received) == 1


@pytest.mark.parametrize("content_type", ["text/event-stream", "application/json"])
def test_after_the_headers_of_an_answer_nothing_is_tried_again(
    gateway: Gateway, start: Callable[[], Upstream], content_type: str
) -> None:
    async def headers_only(exchange: Exchange) -> None:
        await exchange.head(content_type)
        exchange.reset()

    starts = [start(), start()]
    for one in starts:
        one.answer = headers_only
    gateway.publish(model("m", *starts))
    with pytest.raises(http.client.IncompleteRead):
        gateway.ask()
    assert sum(len(one.received) for one in starts) == 1


def test_a_reset_in_mid_stream_ends_the_answer_and_nothing_is_made_up(
    gateway: Gateway, start: Callable[[], Upstream], script: Script
) -> None:
    starts = [start(), start()]
    for one in starts:
        one.answer = script
    gateway.publish(model("m", *starts))
    connection = gateway.open_stream()
    script.head()
    script.chunk(b"data: 1\n\n")
    answer = connection.getresponse()
    script.chunk(b"data: 2\n\n")
    assert answer.read(18) == b"data: 1\n\ndata: 2\n\n"
    script.reset()
    with pytest.raises(http.client.IncompleteRead) as broken:
        answer.read()
    assert broken.value.partial == b""
    connection.close()
    assert sum(len(one.received) for one in starts) == 1


# ── make before break ───────────────────────────────────────────────────────────────────────────


def has_more_than(start: Upstream, count: int) -> bool:
    return len(start.received) > count


def test_starts_are_exchanged_under_load_without_a_failure(
    gateway: Gateway, start: Callable[[], Upstream]
) -> None:
    """Add and prove B, let B serve and A not, take A away; and back; while 50 clients ask."""
    first, second = start(), start()
    gateway.publish(routed((first, True)))
    statuses: Counter[int] = Counter()
    lock = threading.Lock()
    ended = threading.Event()

    def ask() -> None:
        connection = gateway.connect()
        while not ended.is_set():
            connection.request("POST", "/v1/completions", b'{"model":"m"}')
            answer = connection.getresponse()
            answer.read()
            with lock:
                statuses[answer.status] += 1
        connection.close()

    clients = [threading.Thread(target=ask) for _ in range(50)]
    for client in clients:
        client.start()
    try:
        for _ in range(5):
            gateway.publish(routed((first, True), (second, False)))
            gateway.probed(second)
            asked = len(second.received)
            gateway.publish(routed((second, True)))
            eventually(partial(has_more_than, second, asked + 20))
            first, second = second, first
    finally:
        ended.set()
        for client in clients:
            client.join(LIMIT_S)
    assert statuses.keys() == {200}


def test_what_a_removed_start_has_begun_it_finishes(
    gateway: Gateway, start: Callable[[], Upstream], script: Script
) -> None:
    old, new = start(), start()
    old.answer = script
    gateway.publish(routed((old, True), (new, False)))
    connection = gateway.open_stream()
    script.head()
    script.chunk(b"data: 1\n\n")
    answer = connection.getresponse()
    gateway.publish(routed((new, True)))
    gateway.publish(routed((new, True)))
    assert gateway.ask().headers["x-preheat-replica"] == new.start_id
    script.chunk(b"data: 2\n\n")
    script.end()
    assert answer.read() == b"data: 1\n\ndata: 2\n\n"
    connection.close()


def test_what_a_removed_model_has_begun_it_finishes(
    gateway: Gateway, engine: Upstream, script: Script
) -> None:
    engine.answer = script
    gateway.publish(model("m", engine))
    connection = gateway.open_stream()
    script.head()
    script.chunk(b"data: 1\n\n")
    answer = connection.getresponse()
    gateway.publish()
    assert gateway.ask().status == 404
    script.chunk(b"data: 2\n\n")
    script.end()
    assert answer.read() == b"data: 1\n\ndata: 2\n\n"
    connection.close()


def test_a_version_of_another_size_keeps_serving_while_it_changes(
    gateway: Gateway, engine: Upstream
) -> None:
    engine.answer = stream(b"data: 1\n\n")
    for connections in range(100, 110):
        gateway.publish(model("m", engine, max_connections=connections))
        for _ in range(3):
            assert gateway.ask().status == 200
