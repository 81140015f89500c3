from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import json
import os
import signal
import socket
import stat
from collections.abc import Callable, Iterator

import pytest
from msgspec.structs import replace
from tests.dataplane.envoy.harness import (
    EnvoyProcess,
    Gateway,
    LoopThread,
    eventually,
    model,
    running_gateway,
    short_paths,
)
from tests.dataplane.envoy.upstream import Upstream

from preheat.core.errors import GatewayError
from preheat.dataplane.envoy.publish import Publisher, write_initial
from preheat.dataplane.envoy.resources import Resources, resources
from preheat.dataplane.envoy.routing import Key, Listener, ModelRoute, RoutingTable


def told(gateway: Gateway, *models: ModelRoute) -> Resources:
    return resources(RoutingTable(gateway.listener, models), gateway.paths)


def versions_on_disk(gateway: Gateway) -> dict[str, str]:
    return {
        path.stem: json.loads(path.read_text())["version_info"]
        for path in gateway.paths.xds.glob("*.json")
    }


@pytest.fixture
def own_gateway(loop: LoopThread) -> Iterator[Gateway]:
    """An Envoy that a test may stop."""
    with running_gateway(loop) as gateway:
        yield gateway


# ── what is acknowledged ────────────────────────────────────────────────────────────────────────


def test_models_come_and_go_and_come_again(gateway: Gateway, start: Callable[[], Upstream]) -> None:
    one, two = start(), start()
    gateway.publish(model("one", one))
    for _ in range(3):
        gateway.publish(model("one", one), model("two", two))
        assert gateway.ask("two").status == 200
        gateway.publish(model("two", two))
        assert gateway.ask("one").status == 404
        assert gateway.ask("two").status == 200
        gateway.publish(model("one", one))
    gateway.publish()
    assert gateway.ask("one").status == 404


def test_what_was_published_is_known_and_publishing_it_again_writes_nothing(
    gateway: Gateway, engine: Upstream
) -> None:
    gateway.publish(model("m", engine))
    assert gateway.publisher.published == told(gateway, model("m", engine))
    before = versions_on_disk(gateway)
    gateway.publish(model("m", engine))
    assert versions_on_disk(gateway) == before


def test_files_of_what_is_gone_are_removed_and_the_rest_is_private(
    gateway: Gateway, engine: Upstream
) -> None:
    gateway.publish(model("stays", engine), model("goes", engine))
    gateway.publish(model("stays", engine))
    names = {path.name.partition("-")[0] for path in gateway.paths.xds.iterdir()}
    assert names == {"cds.json", "lds.json", "eds", "rds"}
    assert len(list(gateway.paths.xds.glob("eds-*"))) == 1
    for path in gateway.paths.xds.iterdir():
        assert stat.S_IMODE(path.stat().st_mode) == 0o600


def test_two_publishes_at_once_are_taken_one_after_the_other(
    gateway: Gateway, engine: Upstream
) -> None:
    async def both() -> None:
        await asyncio.gather(
            *(gateway.publishing(model(f"m{number}", engine)) for number in range(5))
        )

    gateway.publish(model("m", engine))
    gateway.loop.run(both())
    assert [m["id"] for m in gateway.get("/v1/models").json()["data"]] == ["m4"]


def test_the_listener_can_move_to_another_port(gateway: Gateway, engine: Upstream) -> None:
    gateway.publish(model("m", engine))
    before = gateway.port
    gateway.publish(model("m", engine), listener=gateway.on_a_port_of_its_own())
    assert gateway.port != before
    assert gateway.ask().status == 200
    eventually(lambda: refuses(before), "the old port is closed")


def refuses(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) != 0


def test_forgetting_makes_everything_be_acknowledged_again(
    gateway: Gateway, engine: Upstream
) -> None:
    gateway.publish(model("m", engine))
    before = versions_on_disk(gateway)
    gateway.publisher.forget()
    gateway.publish(model("m", engine))
    after = versions_on_disk(gateway)
    assert before.keys() == after.keys()
    assert not before.items() & after.items()


@pytest.mark.parametrize("by_a_new_publisher", [False, True])
def test_routes_change_over_when_the_new_starts_have_been_checked(
    gateway: Gateway, start: Callable[[], Upstream], by_a_new_publisher: bool
) -> None:
    """From one version to another whose start's health is slow to be told: no request fails."""
    old, new = start(), start()
    new.health_delay_s = 0.3
    gateway.publish(model("m", old, name="v1"))
    if by_a_new_publisher:
        gateway.publisher = Publisher(gateway.paths, log_tail=gateway.envoy.log_tail)
    publishing = gateway.loop.start(gateway.publishing(model("m", new, name="v2")))
    seen = set()
    while not publishing.done():
        seen.add(gateway.ask().headers.get("x-preheat-replica", "none"))
    publishing.result()
    assert seen <= {old.start_id, new.start_id}
    assert gateway.ask().headers["x-preheat-replica"] == new.start_id


# ── what is refused ─────────────────────────────────────────────────────────────────────────────


def spoilt(good: Resources, kind: str) -> Resources:
    """Resources of which one has something in it that Envoy must not accept."""
    bad = json.loads(json.dumps(getattr(good, kind)))
    first = next(iter(bad.values()))
    first["no_such_field"] = 1
    return dataclasses.replace(good, **{kind: bad})


@pytest.mark.parametrize(
    ("kind", "file"),
    [("clusters", "cds"), ("endpoints", "eds-m"), ("routes", "rds-public"), ("listeners", "lds")],
)
def test_an_unknown_field_is_refused_with_envoys_reason_and_what_was_before_serves_on(
    gateway: Gateway, engine: Upstream, kind: str, file: str
) -> None:
    gateway.publish(model("m", engine))
    before = told(gateway, model("m", engine))
    changed = told(gateway, replace(model("m", engine), created_unix_s=9), model("new", engine))
    with pytest.raises(GatewayError, match=f"refused the configuration of {file}") as refusal:
        gateway.loop.run(gateway.publisher.publish(spoilt(changed, kind)))
    assert "no_such_field" in refusal.value.what
    assert gateway.publisher.published == before
    for _ in range(10):
        assert gateway.ask().status == 200
    # No file that Envoy would refuse at its next start is left.
    assert "no_such_field" not in "".join(p.read_text() for p in gateway.paths.xds.iterdir())
    gateway.publish(model("m", engine), model("new", engine))
    assert gateway.ask("new").status == 200


def test_a_value_that_makes_no_sense_is_refused(gateway: Gateway, engine: Upstream) -> None:
    gateway.publish(model("m", engine))
    listener = replace(gateway.listener, certificate_pem="no certificate", key_pem="no key")
    with pytest.raises(GatewayError, match="refused the configuration of lds"):
        gateway.publish(model("m", engine), listener=listener)
    assert gateway.ask().status == 200
    gateway.publish(model("m", engine))
    assert gateway.ask().status == 200


def test_a_port_that_is_taken_is_an_error_that_says_so(gateway: Gateway, engine: Upstream) -> None:
    gateway.publish(model("m", engine))
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        listener = replace(gateway.listener, port=taken.getsockname()[1])
        with pytest.raises(GatewayError, match="Address already in use"):
            gateway.publish(model("m", engine), listener=listener)
    assert gateway.ask().status == 200


def test_a_refusal_tells_no_key(gateway: Gateway, engine: Upstream) -> None:
    gateway.publish(model("m", engine))
    listener = replace(gateway.listener, keys=(Key("a", "sk-same"), Key("b", "sk-same")))
    with pytest.raises(GatewayError, match="Duplicated credential key") as refusal:
        gateway.publish(model("m", engine), listener=listener)
    assert "sk-same" not in str(refusal.value)


def test_one_refusal_does_not_spoil_the_next_publish(gateway: Gateway, engine: Upstream) -> None:
    gateway.publish(model("m", engine))
    bad = spoilt(told(gateway, model("m", engine)), "routes")
    for _ in range(3):
        with pytest.raises(GatewayError, match="no_such_field"):
            gateway.loop.run(gateway.publisher.publish(bad))
        gateway.publish(model("m", engine))


# ── an Envoy that does not answer ───────────────────────────────────────────────────────────────


def test_without_envoy_publishing_ends_in_a_gateway_error(loop: LoopThread) -> None:
    with short_paths() as paths:
        write_initial(paths)

        async def publish() -> None:
            table = RoutingTable(Listener("127.0.0.1", 1), ())
            await Publisher(paths, timeout_s=0.1).publish(resources(table, paths))

        with pytest.raises(GatewayError, match="nobody answers at"):
            loop.run(publish())


def test_an_envoy_that_hangs_ends_in_a_gateway_error_and_is_caught_up_with(
    own_gateway: Gateway, engine: Upstream
) -> None:
    gateway = own_gateway
    gateway.publish(model("m", engine))
    gateway.publisher = Publisher(gateway.paths, timeout_s=0.2)
    os.kill(gateway.envoy.pid, signal.SIGSTOP)
    try:
        with pytest.raises(GatewayError, match="did not take its configuration within"):
            gateway.publish(model("other", engine))
    finally:
        os.kill(gateway.envoy.pid, signal.SIGCONT)
    gateway.publisher = Publisher(gateway.paths)
    gateway.publish(model("m", engine), model("third", engine))
    assert gateway.ask("m").status == gateway.ask("third").status == 200
    assert gateway.ask("other").status == 404


def test_a_publish_that_is_cancelled_at_any_point_leaves_the_next_one_whole(
    gateway: Gateway, start: Callable[[], Upstream]
) -> None:
    one, two = start(), start()
    gateway.publish(model("one", one))
    tables = [(model("two", two),), (model("one", one), model("two", two, serving=False))]
    # After so many steps of the event loop; a publish that ends before is not cancelled.
    for steps in range(0, 60, 3):
        gateway.loop.run(cancelled_after(gateway, steps, *tables[steps % 2]))
        gateway.publish(model("one", one))
        assert gateway.ask("one").status == 200
        assert gateway.ask("two").status == 404
        assert gateway.publisher.published == told(gateway, model("one", one))


async def cancelled_after(gateway: Gateway, steps: int, *models: ModelRoute) -> None:
    publishing = asyncio.ensure_future(gateway.publishing(*models))
    for _ in range(steps):
        await asyncio.sleep(0)
    publishing.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await publishing


# ── processes that are started again ────────────────────────────────────────────────────────────


def test_an_envoy_that_is_started_again_serves_from_its_files_and_is_published_to(
    own_gateway: Gateway, start: Callable[[], Upstream]
) -> None:
    gateway, (one, two) = own_gateway, (start(), start())
    gateway.publish(model("one", one))
    gateway.envoy.stop()
    gateway.publisher.forget()
    assert gateway.publisher.published is None
    gateway.envoy = EnvoyProcess(gateway.paths)
    eventually(lambda: not refuses(gateway.port), "Envoy listens again")
    assert eventually(lambda: gateway.ask("one").status == 200)
    gateway.publish(model("one", one), model("two", two))
    assert gateway.ask("two").status == 200


def test_publishing_goes_through_when_envoy_dies_in_the_middle(
    own_gateway: Gateway, engine: Upstream
) -> None:
    gateway = own_gateway
    gateway.publish(model("m", engine))
    os.kill(gateway.envoy.pid, signal.SIGSTOP)
    publishing = gateway.loop.start(gateway.publishing(model("other", engine)))
    gateway.envoy.stop()
    gateway.envoy = EnvoyProcess(gateway.paths)
    publishing.result(20)
    assert eventually(lambda: gateway.ask("other").status == 200)
    assert gateway.ask("m").status == 404


def test_a_table_published_while_envoy_is_down_is_what_it_starts_with(
    own_gateway: Gateway, engine: Upstream
) -> None:
    gateway = own_gateway
    gateway.publish(model("m", engine))
    gateway.envoy.stop()
    gateway.publisher.forget()
    publishing = gateway.loop.start(gateway.publishing(model("other", engine)))
    eventually(lambda: '"other"' in (gateway.paths.xds / "rds-public.json").read_text())
    gateway.envoy = EnvoyProcess(gateway.paths)
    publishing.result(20)
    assert eventually(lambda: gateway.ask("other").status == 200)
    assert len(list(gateway.paths.xds.glob("eds-*"))) == 1


def test_a_new_publisher_takes_over_a_running_envoy(
    gateway: Gateway, start: Callable[[], Upstream]
) -> None:
    one, two = start(), start()
    gateway.publish(model("one", one), model("gone", one))
    gateway.publisher = Publisher(gateway.paths, log_tail=gateway.envoy.log_tail)
    assert gateway.publisher.published is None
    gateway.publish(model("one", one), model("two", two))
    assert [gateway.ask(name).status for name in ("one", "two", "gone")] == [200, 200, 404]
    assert len(list(gateway.paths.xds.glob("eds-*"))) == 2


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b'{"resources": 1}', b"\xff"])
def test_a_new_publisher_is_not_stopped_by_a_broken_file(
    own_gateway: Gateway, engine: Upstream, content: bytes
) -> None:
    gateway = own_gateway
    gateway.publish(model("m", engine))
    (gateway.paths.xds / "rds-public.json").write_bytes(content)
    for name in ("eds-stale.json", "eds-stale.tmp"):
        (gateway.paths.xds / name).write_bytes(content)
    gateway.publisher = Publisher(gateway.paths, log_tail=gateway.envoy.log_tail)
    gateway.publish(model("other", engine))
    assert gateway.ask("other").status == 200
    assert not list(gateway.paths.xds.glob("eds-stale*"))
