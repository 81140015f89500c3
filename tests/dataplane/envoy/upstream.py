"""A stub engine on a Unix socket, and its agent's health socket, that does what a test says."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from preheat.core import localhttp
from preheat.dataplane.envoy.routing import Endpoint

USAGE = {"prompt_tokens": 7, "completion_tokens": 3, "total_tokens": 10}
REPLY = json.dumps({"object": "chat.completion", "choices": [], "usage": USAGE}).encode()
DONE = b"data: [DONE]\n\n"


@dataclass(frozen=True, slots=True)
class Received:
    method: str
    target: str
    headers: dict[str, str]
    body: bytes


class Exchange:
    """One request at the engine and the means to answer it, byte by byte."""

    def __init__(self, received: Received, writer: asyncio.StreamWriter) -> None:
        self.received = received
        self._writer = writer
        self.keep = True

    async def raw(self, data: bytes) -> None:
        self._writer.write(data)
        await self._writer.drain()

    async def head(
        self, content_type: str, *, status: int = 200, length: int | None = None
    ) -> None:
        framing = "transfer-encoding: chunked" if length is None else f"content-length: {length}"
        text = f"HTTP/1.1 {status} X\r\ncontent-type: {content_type}\r\n{framing}\r\n\r\n"
        await self.raw(text.encode())

    async def chunk(self, data: bytes) -> None:
        await self.raw(b"%x\r\n%b\r\n" % (len(data), data))

    async def end(self) -> None:
        await self.raw(b"0\r\n\r\n")

    def reset(self) -> None:
        self.keep = False
        self._writer.transport.abort()


Answer = Callable[[Exchange], Awaitable[None]]


def whole(body: bytes, *, status: int = 200, content_type: str = "application/json") -> Answer:
    async def answer(exchange: Exchange) -> None:
        await exchange.head(content_type, status=status, length=len(body))
        await exchange.raw(body)

    return answer


def stream(*chunks: bytes, pause_s: float = 0.0) -> Answer:
    """Each chunk in a write of its own."""

    async def answer(exchange: Exchange) -> None:
        await exchange.head("text/event-stream")
        for chunk in chunks:
            await exchange.chunk(chunk)
            await asyncio.sleep(pause_s)
        await exchange.end()

    return answer


def event(value: Any) -> bytes:
    return b"data: " + json.dumps(value, ensure_ascii=False).encode() + b"\n\n"


async def silence(_: Exchange) -> None:
    """Never answers; ends when the gateway closes the connection."""
    await asyncio.Event().wait()


async def reset(exchange: Exchange) -> None:
    exchange.reset()


class Script:
    """An answer that the test gives step by step from its own thread."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._steps: asyncio.Queue[Answer | None] = asyncio.Queue()

    async def __call__(self, exchange: Exchange) -> None:
        while (step := await self._steps.get()) is not None:
            await step(exchange)

    def _put(self, step: Answer | None) -> None:
        self._loop.call_soon_threadsafe(self._steps.put_nowait, step)

    def head(self, content_type: str = "text/event-stream") -> None:
        self._put(lambda exchange: exchange.head(content_type))

    def chunk(self, data: bytes) -> None:
        self._put(lambda exchange: exchange.chunk(data))

    def end(self) -> None:
        self._put(lambda exchange: exchange.end())
        self._put(None)

    def reset(self) -> None:
        self._put(reset)
        self._put(None)


class Scripts:
    """A script of its own for each request, in the order in which they come."""

    def __init__(self, loop: asyncio.AbstractEventLoop, count: int) -> None:
        self.all = [Script(loop) for _ in range(count)]
        self._next = iter(self.all)

    async def __call__(self, exchange: Exchange) -> None:
        await next(self._next)(exchange)


@dataclass
class Upstream:
    """All but ``answer`` and ``healthy`` is written by the loop's thread only."""

    start_id: str
    directory: Path
    answer: Answer = field(default_factory=lambda: whole(REPLY))
    healthy: bool = True
    health_delay_s: float = 0.0
    received: list[Received] = field(default_factory=list)
    in_flight: int = 0
    most_in_flight: int = 0
    left: int = 0
    """Requests whose connection the gateway closed before they were answered."""
    connections: int = 0
    health_checks: int = 0
    _servers: list[asyncio.Server] = field(default_factory=list)
    _open: set[asyncio.Task[None]] = field(default_factory=set)

    @property
    def engine_socket(self) -> Path:
        return self.directory / f"{self.start_id}.e"

    @property
    def health_socket(self) -> Path:
        return self.directory / f"{self.start_id}.h"

    def endpoint(self, *, serving: bool = True) -> Endpoint:
        return Endpoint(self.start_id, self.engine_socket, self.health_socket, serving=serving)

    async def start(self) -> None:
        engine = await asyncio.start_unix_server(
            self._connection, path=str(self.engine_socket), backlog=4096
        )
        self._servers = [engine, await localhttp.serve(self.health_socket, self._health)]

    async def stop(self) -> None:
        for server in self._servers:
            server.close()
        for task in list(self._open):
            task.cancel()
        await asyncio.gather(*self._open, return_exceptions=True)
        for path in (self.engine_socket, self.health_socket):
            path.unlink(missing_ok=True)

    async def _health(self, _: localhttp.Request) -> localhttp.Response:
        await asyncio.sleep(self.health_delay_s)
        self.health_checks += 1
        return localhttp.Response(200 if self.healthy else 503)

    async def _connection(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._open.add(task)
        self.connections += 1
        try:
            with contextlib.suppress(OSError, asyncio.IncompleteReadError, asyncio.CancelledError):
                while await self._exchange(Exchange(await _request(reader), writer), reader):
                    pass
        finally:
            self._open.discard(task)
            writer.close()

    async def _exchange(self, exchange: Exchange, reader: asyncio.StreamReader) -> bool:
        self.received.append(exchange.received)
        self.in_flight += 1
        self.most_in_flight = max(self.most_in_flight, self.in_flight)
        answering = asyncio.ensure_future(self.answer(exchange))
        watching = asyncio.ensure_future(reader.read(1))
        try:
            await asyncio.wait([answering, watching], return_when=asyncio.FIRST_COMPLETED)
            if not answering.done():
                self.left += 1
                return False
            answering.result()
            return exchange.keep and not watching.done()
        finally:
            answering.cancel()
            watching.cancel()
            await asyncio.gather(answering, watching, return_exceptions=True)
            self.in_flight -= 1


async def _request(reader: asyncio.StreamReader) -> Received:
    head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1")
    first, *lines = head.rstrip("\r\n").split("\r\n")
    method, target, _ = first.split(" ")
    headers = {}
    for line in lines:
        name, _, value = line.partition(":")
        headers[name.lower()] = value.strip()
    if headers.get("transfer-encoding") != "chunked":
        body = await reader.readexactly(int(headers.get("content-length", "0")))
        return Received(method, target, headers, body)
    parts = bytearray()
    while size := int(await reader.readline(), 16):
        parts += (await reader.readexactly(size + 2))[:-2]
    await reader.readline()
    return Received(method, target, headers, bytes(parts))
