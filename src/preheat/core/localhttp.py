"""HTTP/1.1 over Unix sockets between preheat's own processes: a small client and a small server.

h11 does the protocol. The server reads a whole request (bounded) and answers with a whole response
or a stream of chunks. What does not belong here: anything that clients of the gateway reach.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import h11

BODY_MAX_BYTES = 1 << 20
CHUNK_BYTES = 65536
BACKLOG = 1024


@dataclass(frozen=True, slots=True)
class Request:
    method: str
    path: str
    """Without the query, as it was sent."""
    query: dict[str, str]
    """Decoded; of a repeated name the last value."""
    headers: dict[str, str]
    """Names in lower case."""
    body: bytes


@dataclass(frozen=True, slots=True)
class Response:
    status: int = 200
    body: bytes = b""
    content_type: str = "application/json"
    headers: dict[str, str] = field(default_factory=dict)
    stream: AsyncIterator[bytes] | None = None
    """Instead of ``body``; closed when it ends or the client leaves."""

    def json(self) -> Any:
        return json.loads(self.body)


def json_response(value: Any, status: int = 200) -> Response:
    return Response(status, json.dumps(value).encode())


Handler = Callable[[Request], Awaitable[Response]]


# ── server ──────────────────────────────────────────────────────────────────────────────────────


async def serve(path: Path, handler: Handler) -> asyncio.Server:
    """Listens on the Unix socket ``path`` with mode 0600, replacing a stale one."""
    path.unlink(missing_ok=True)
    previous = os.umask(0o177)
    try:
        return await asyncio.start_unix_server(
            lambda r, w: _connection(r, w, handler), path=str(path), backlog=BACKLOG
        )
    finally:
        os.umask(previous)


async def _connection(
    reader: asyncio.StreamReader, writer: asyncio.StreamWriter, handler: Handler
) -> None:
    connection = h11.Connection(h11.SERVER)
    try:
        # A peer that leaves or stops speaking HTTP ends its own connection, nothing else.
        # Cancellation comes only when the loop ends; Python 3.11 would report it as an error.
        with contextlib.suppress(OSError, h11.ProtocolError, asyncio.CancelledError):
            while (request := await _read_request(connection, reader)) is not None:
                response = await _answer(request, handler)
                await _write_response(connection, writer, response)
                if connection.our_state is not h11.DONE or connection.their_state is not h11.DONE:
                    break
                connection.start_next_cycle()
    finally:
        writer.close()


async def _answer(request: Request | Response, handler: Handler) -> Response:
    return request if isinstance(request, Response) else await handler(request)


async def _next_event(connection: h11.Connection, reader: asyncio.StreamReader) -> Any:
    while (event := connection.next_event()) is h11.NEED_DATA:
        connection.receive_data(await reader.read(CHUNK_BYTES))
    return event


async def _read_request(
    connection: h11.Connection, reader: asyncio.StreamReader
) -> Request | Response | None:
    """A request; the refusal of one that is too large; None when there is no other."""
    event = await _next_event(connection, reader)
    if not isinstance(event, h11.Request):
        return None
    body = bytearray()
    while isinstance(data := await _next_event(connection, reader), h11.Data):
        body += data.data
        if len(body) > BODY_MAX_BYTES:
            return json_response({"error": f"the body is larger than {BODY_MAX_BYTES} bytes"}, 413)
    target, _, query = event.target.decode("latin-1").partition("?")
    return Request(
        method=event.method.decode(),
        path=target,
        query=_parsed(query) if query else {},
        headers={key.decode(): value.decode("latin-1") for key, value in event.headers},
        body=bytes(body),
    )


def _parsed(query: str) -> dict[str, str]:
    from urllib.parse import parse_qsl

    return dict(parse_qsl(query, keep_blank_values=True))


async def _write_response(
    connection: h11.Connection, writer: asyncio.StreamWriter, response: Response
) -> None:
    framing = ("transfer-encoding", "chunked")
    if response.stream is None:
        framing = ("content-length", str(len(response.body)))
    headers = [("content-type", response.content_type), *response.headers.items(), framing]
    data = connection.send(h11.Response(status_code=response.status, headers=headers)) or b""
    if response.stream is None:
        data += connection.send(h11.Data(data=response.body)) or b""
    else:
        writer.write(data)
        data = b""
        await _write_chunks(connection, writer, response.stream)
    writer.write(data + (connection.send(h11.EndOfMessage()) or b""))
    await writer.drain()


async def _write_chunks(
    connection: h11.Connection, writer: asyncio.StreamWriter, stream: AsyncIterator[bytes]
) -> None:
    async with contextlib.AsyncExitStack() as stack:
        if isinstance(stream, AsyncGenerator):
            await stack.enter_async_context(contextlib.aclosing(stream))
        async for chunk in stream:
            writer.write(connection.send(h11.Data(data=chunk)) or b"")
            await writer.drain()


# ── client ──────────────────────────────────────────────────────────────────────────────────────


async def request(
    path: Path,
    method: str,
    target: str,
    *,
    body: Any = None,
    headers: dict[str, str] | None = None,
    timeout_s: float = 10.0,
) -> Response:
    """One request on a connection of its own. ``body`` is sent as JSON.

    Raises OSError when nobody listens, TimeoutError, or ConnectionError on a broken answer.
    """
    async with asyncio.timeout(timeout_s), Connection(path) as connection:
        return await connection.request(method, target, body=body, headers=headers)


async def connect(path: Path) -> Connection:
    """A connection that the caller closes. Raises OSError when nobody listens."""
    return await Connection(path).__aenter__()


class Connection:
    """A kept connection to a Unix socket; one request at a time."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._protocol = h11.Connection(h11.CLIENT)

    async def __aenter__(self) -> Connection:
        self._reader, self._writer = await asyncio.open_unix_connection(str(self._path))
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def close(self) -> None:
        self._writer.close()
        with contextlib.suppress(OSError):
            await self._writer.wait_closed()

    async def send(
        self, method: str, target: str, body: Any, headers: dict[str, str] | None
    ) -> None:
        """Sends a request whole. Raises ConnectionError when the peer keeps no connections."""
        data = b"" if body is None else json.dumps(body).encode()
        fields = [("host", "preheat"), ("content-length", str(len(data)))]
        fields += (headers or {}).items()
        if data:
            fields.append(("content-type", "application/json"))
        try:
            if self._protocol.our_state is h11.DONE:
                self._protocol.start_next_cycle()
            out = self._protocol.send(h11.Request(method=method, target=target, headers=fields))
        except h11.LocalProtocolError as error:
            raise ConnectionError(f"{self._path}: the connection is over ({error})") from error
        out = (out or b"") + (self._protocol.send(h11.Data(data=data)) or b"")
        self._writer.write(out + (self._protocol.send(h11.EndOfMessage()) or b""))
        await self._writer.drain()

    async def head(self) -> h11.Response:
        """Status and headers of the answer."""
        event = await self._event()
        while isinstance(event, h11.InformationalResponse):
            event = await self._event()
        if not isinstance(event, h11.Response):
            raise ConnectionError(f"{self._path}: no answer to the request")
        return event

    async def chunks(self) -> AsyncIterator[bytes]:
        """The body as it comes. Raises ConnectionError when it ends too early."""
        while isinstance(event := await self._event(), h11.Data):
            yield bytes(event.data)

    async def request(
        self, method: str, target: str, *, body: Any = None, headers: dict[str, str] | None = None
    ) -> Response:
        await self.send(method, target, body, headers)
        head = await self.head()
        content = b"".join([chunk async for chunk in self.chunks()])
        fields = {key.decode(): value.decode("latin-1") for key, value in head.headers}
        return Response(head.status_code, content, fields.get("content-type", ""), fields)

    async def _event(self) -> Any:
        try:
            return await _next_event(self._protocol, self._reader)
        except h11.RemoteProtocolError as error:
            raise ConnectionError(f"{self._path}: broken answer ({error})") from error
