"""The one publisher, with an Envoy that the test plays; the real one stands in tests/system."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from tests.controlplane.samples import LISTENER

from preheat.controlplane import routing
from preheat.controlplane.routing import Routing, log_tail
from preheat.core import localhttp
from preheat.core.errors import GatewayError
from preheat.core.paths import Paths
from preheat.dataplane.envoy.routing import RoutingTable

PATIENCE_S = 10.0


def table(missing: str) -> RoutingTable:
    return RoutingTable(LISTENER, (), (missing,))


class Envoy:
    """Stands for the publisher: acknowledges when it is told to."""

    def __init__(self) -> None:
        self.taken: list[Any] = []
        self.forgotten = 0
        self.acknowledge = asyncio.Event()
        self.acknowledge.set()
        self.called = asyncio.Event()
        self.refusals: list[str] = []
        self.running = 0

    async def publish(self, resources: Any) -> None:
        self.running += 1
        assert self.running == 1, "two publish at once"
        try:
            self.called.set()
            await self.acknowledge.wait()
            if self.refusals:
                raise GatewayError(self.refusals.pop())
            self.taken.append(resources)
        finally:
            self.running -= 1

    def forget(self) -> None:
        self.forgotten += 1


class Bench:
    def __init__(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.envoy = Envoy()
        self.published: list[RoutingTable] = []
        self.refused: list[str] = []
        monkeypatch.setattr(routing, "Publisher", lambda *_, **__: self.envoy)
        monkeypatch.setattr(routing, "resources", lambda table, _: table)
        monkeypatch.setattr(routing, "RETRY_S", 0.001)
        self.routing = Routing(
            Paths(tmp_path, tmp_path, tmp_path),
            lambda table, _: self.published.append(table),
            lambda error: self.refused.append(error.what),
        )

    @contextlib.asynccontextmanager
    async def keeping(self) -> AsyncIterator[None]:
        task = asyncio.ensure_future(self.routing.keep())
        try:
            async with asyncio.timeout(PATIENCE_S):
                yield
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)


@pytest.fixture
def bench(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Bench:
    return Bench(tmp_path, monkeypatch)


def test_what_is_wanted_is_published_once(bench: Bench) -> None:
    async def scenario() -> None:
        async with bench.keeping():
            bench.routing.want(table("a"))
            bench.routing.want(table("a"))
            assert await bench.routing.settled(PATIENCE_S)
            bench.routing.want(table("a"))
            assert await bench.routing.settled(PATIENCE_S)

    asyncio.run(scenario())
    assert bench.published == bench.envoy.taken == [table("a")]
    assert bench.routing.published == table("a")


def test_a_newer_table_follows_an_older_one_and_those_between_are_left_out(bench: Bench) -> None:
    async def scenario() -> None:
        async with bench.keeping():
            bench.envoy.acknowledge.clear()
            bench.routing.want(table("a"))
            await bench.envoy.called.wait()
            bench.routing.want(table("b"))
            bench.routing.want(table("c"))
            assert not await bench.routing.settled(0.0)
            bench.envoy.acknowledge.set()
            assert await bench.routing.settled(PATIENCE_S)

    asyncio.run(scenario())
    assert bench.published == [table("a"), table("c")]


def test_what_an_envoy_that_is_gone_acknowledged_does_not_count(bench: Bench) -> None:
    async def scenario() -> None:
        async with bench.keeping():
            bench.envoy.acknowledge.clear()
            bench.routing.want(table("a"))
            await bench.envoy.called.wait()
            bench.routing.forget()
            bench.envoy.acknowledge.set()
            assert await bench.routing.settled(PATIENCE_S)
            bench.routing.forget()
            assert bench.routing.published is None
            assert await bench.routing.settled(PATIENCE_S)

    asyncio.run(scenario())
    assert bench.envoy.taken == [table("a")] * 3
    assert bench.published == [table("a")] * 2
    assert bench.envoy.forgotten == 2


def test_what_envoy_refuses_is_said_and_tried_again(bench: Bench) -> None:
    async def scenario() -> None:
        bench.envoy.refusals = ["second", "first"]
        async with bench.keeping():
            bench.routing.want(table("a"))
            assert await bench.routing.settled(PATIENCE_S)

    asyncio.run(scenario())
    assert bench.refused == ["first", "second"]
    assert bench.published == [table("a")]


class Admin:
    """Envoy's admin socket."""

    def __init__(self, path: Path, *active: str) -> None:
        self.path = path
        self.active = list(active)
        self.orders: list[str] = []

    async def answer(self, request: localhttp.Request) -> localhttp.Response:
        if request.method == "POST":
            self.orders.append(request.path)
            return localhttp.Response(200)
        text = self.active.pop(0) if len(self.active) > 1 else self.active[0]
        return localhttp.Response(200, text.encode())


def idle(bench: Bench, path: Path, *active: str, timeout_s: float = PATIENCE_S) -> tuple[bool, int]:
    async def scenario() -> bool:
        server = await localhttp.serve(path / "envoy-admin.sock", admin.answer)
        try:
            return await bench.routing.idle(timeout_s)
        finally:
            server.close()

    admin = Admin(path, *active)
    return asyncio.run(scenario()), len(admin.active)


NAME = "http.public.downstream_rq_active"


def test_it_is_idle_when_nothing_is_in_flight(bench: Bench, tmp_path: Path) -> None:
    answers = [f"{NAME}: 2\n", f"{NAME}: 1\n", f"{NAME}: 0\n"]
    assert idle(bench, tmp_path, *answers) == (True, 1)
    assert idle(bench, tmp_path, f"{NAME}: 10\n", timeout_s=0.1) == (False, 1)


def test_an_envoy_that_knows_of_no_request_or_is_gone_is_idle(bench: Bench, tmp_path: Path) -> None:
    assert idle(bench, tmp_path, "") == (True, 1)
    (tmp_path / "envoy-admin.sock").unlink()
    assert asyncio.run(bench.routing.idle(PATIENCE_S))
    asyncio.run(bench.routing.discourage())


def test_the_log_tail_holds_what_envoy_complains_of(tmp_path: Path) -> None:
    log = tmp_path / "envoy.log"
    assert log_tail(log) == ""
    log.write_text("noise\n" * 5000 + "a [critical] one\nnoise\nUpdate REJECTED: two\nnoise\n")
    assert log_tail(log) == "a [critical] one\nUpdate REJECTED: two"
