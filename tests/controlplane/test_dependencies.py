from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from types import SimpleNamespace
from typing import Any

import pytest
from tests.controlplane.samples import fleet, one_model

from preheat.controlplane import dependencies
from preheat.controlplane.dependencies import Dependencies, is_healthy
from preheat.core.spec.schema import Dependency, Preload

PATIENCE_S = 10.0
NO_ROUTING: Any = SimpleNamespace(published=None)


class Service:
    """Answers each connection with ``answer``, or with nothing at all."""

    def __init__(self) -> None:
        self.answer = b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n"
        self.asked: list[bytes] = []
        self.port = 0

    async def handle(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            self.asked.append(await reader.readuntil(b"\r\n\r\n"))
            writer.write(self.answer)
            if not self.answer:
                await reader.read()
        finally:
            writer.close()

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        server = await asyncio.start_server(self.handle, "127.0.0.1", self.port)
        self.port = server.sockets[0].getsockname()[1]
        try:
            yield
        finally:
            server.close()

    def dependency(self, path: str = "/health", timeout_s: float = PATIENCE_S) -> Dependency:
        url = f"http://127.0.0.1:{self.port}{path}"
        return Dependency(name="service", url=url, timeout_s=timeout_s)


def healthy(answer: bytes, *, path: str = "/health", timeout_s: float = PATIENCE_S) -> bool:
    async def scenario() -> bool:
        async with service.running():
            return await is_healthy(service.dependency(path, timeout_s), NO_ROUTING)

    service = Service()
    service.answer = answer
    result = asyncio.run(scenario())
    assert service.asked[0].startswith(f"GET {path} HTTP/1.1\r\n".encode())
    return result


@pytest.mark.parametrize(
    ("answer", "expected"),
    [
        (b"HTTP/1.1 200 OK\r\n\r\n", True),
        (b"HTTP/1.0 204 No Content\r\n\r\n", True),
        (b"HTTP/1.1 302 Found\r\nLocation: /\r\n\r\n", False),
        (b"HTTP/1.1 503 Service Unavailable\r\n\r\n", False),
        (b"SSH-2.0-OpenSSH\r\n", False),
        (b"HTTP/1.1\r\n", False),
        (b"HTTP/1.1 two\r\n", False),
        (b"\xff" * 100_000, False),
    ],
)
def test_only_a_2xx_is_healthy(answer: bytes, expected: bool) -> None:
    assert healthy(answer) is expected


def test_the_query_is_sent() -> None:
    assert healthy(b"HTTP/1.1 200 OK\r\n\r\n", path="/health?deep=1")


def test_silence_is_not_healthy() -> None:
    assert not healthy(b"", timeout_s=0.05)


def test_nobody_there_is_not_healthy() -> None:
    nobody = Dependency(name="none", url="http://127.0.0.1:1/")
    assert not asyncio.run(is_healthy(nobody, NO_ROUTING))


def test_preheats_own_gateway_is_healthy_once_it_routes() -> None:
    own = Dependency(name="gateway")
    assert not asyncio.run(is_healthy(own, NO_ROUTING))
    assert asyncio.run(is_healthy(own, SimpleNamespace(published=object())))  # type: ignore[arg-type]


def test_what_comes_up_is_noticed_whatever_else_hangs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dependencies, "INTERVAL_S", 0.005)

    async def scenario() -> None:
        async with hangs.running(), asyncio.timeout(PATIENCE_S):
            async with service.running():
                pass
            wanted = (service.dependency(), hangs.dependency("/", 3600.0))
            preload = Preload(critical_dependencies=wanted)
            changed = asyncio.Event()
            watch = Dependencies(fleet(one_model(preload=preload)), NO_ROUTING, changed)
            task = asyncio.ensure_future(watch.keep())
            await changed.wait()
            assert watch.healthy == frozenset()
            async with service.running():
                while not watch.healthy:
                    changed.clear()
                    await changed.wait()
            assert watch.healthy == {wanted[0]}
            while watch.healthy:
                changed.clear()
                await changed.wait()
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
        for _ in range(3):  # the handler of the one that hangs sees its end
            await asyncio.sleep(0)

    service, hangs = Service(), Service()
    hangs.answer = b""
    asyncio.run(scenario())
