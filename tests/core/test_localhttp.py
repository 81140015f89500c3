from __future__ import annotations

import asyncio
import stat
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path

import pytest

from preheat.core import localhttp
from preheat.core.localhttp import Connection, Request, Response, json_response, request, serve

LIMIT_S = 20.0


async def echo(asked: Request) -> Response:
    return json_response(
        {
            "method": asked.method,
            "path": asked.path,
            "query": asked.query,
            "body": asked.body.decode(),
            "pin": asked.headers.get("x-pin", ""),
        }
    )


def served(
    handler: Callable[[Request], Awaitable[Response]],
    socket: Path,
    client: Callable[[], Awaitable[None]],
) -> None:
    async def both() -> None:
        async with asyncio.timeout(LIMIT_S), await serve(socket, handler):
            await client()

    asyncio.run(both())


@pytest.fixture
def socket(tmp_path: Path) -> Path:
    return tmp_path / "s"


def test_a_request_arrives_whole_and_its_answer_comes_back(socket: Path) -> None:
    async def client() -> None:
        answer = await request(
            socket, "POST", "/a%20b?x=1&y=%C3%A9+z&empty=", body={"k": 1}, headers={"X-Pin": "p"}
        )
        assert answer.status == 200
        assert answer.content_type == "application/json"
        assert answer.json() == {
            "method": "POST",
            "path": "/a%20b",
            "query": {"x": "1", "y": "é z", "empty": ""},
            "body": '{"k": 1}',
            "pin": "p",
        }

    served(echo, socket, client)


def test_the_socket_is_private_and_replaces_a_stale_one(socket: Path) -> None:
    socket.touch()

    async def client() -> None:
        assert stat.S_IMODE(socket.stat().st_mode) == 0o600
        assert (await request(socket, "GET", "/")).status == 200

    served(echo, socket, client)


def test_a_kept_connection_serves_many_requests(socket: Path) -> None:
    async def client() -> None:
        async with Connection(socket) as connection:
            for number in range(5):
                answer = await connection.request("GET", f"/{number}")
                assert answer.json()["path"] == f"/{number}"

    served(echo, socket, client)


def test_a_stream_is_read_chunk_by_chunk(socket: Path) -> None:
    go_on = asyncio.Event()

    async def count() -> AsyncIterator[bytes]:
        yield b"1"
        await go_on.wait()
        yield b"2"

    async def handler(_: Request) -> Response:
        return Response(content_type="text/plain", stream=count())

    async def client() -> None:
        async with Connection(socket) as connection:
            await connection.send("GET", "/", None, None)
            assert (await connection.head()).status_code == 200
            chunks = connection.chunks()
            assert await anext(chunks) == b"1"
            go_on.set()
            assert [chunk async for chunk in chunks] == [b"2"]
            assert (await connection.request("GET", "/")).body == b"12"

    served(handler, socket, client)


def test_a_client_that_leaves_closes_the_stream(socket: Path) -> None:
    closed = asyncio.Event()

    async def endless() -> AsyncIterator[bytes]:
        try:
            while True:
                yield b"x" * 100_000
        finally:
            closed.set()

    async def handler(_: Request) -> Response:
        return Response(stream=endless())

    async def client() -> None:
        async with Connection(socket) as connection:
            await connection.send("GET", "/", None, None)
            await connection.head()
            await anext(connection.chunks())
        await closed.wait()

    served(handler, socket, client)


def test_a_body_above_the_limit_is_refused(socket: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(localhttp, "BODY_MAX_BYTES", 100)

    async def client() -> None:
        assert (await request(socket, "POST", "/", body="x" * 98)).status == 200
        answer = await request(socket, "POST", "/", body="x" * 99)
        assert answer.status == 413
        assert "100 bytes" in answer.json()["error"]

    served(echo, socket, client)


@pytest.mark.parametrize("junk", [b"", b"\r\n", b"GET", b"\x16\x03\x01", b"GET / HTTP/1.1\r\n\r\n"])
def test_a_peer_that_speaks_no_http_ends_only_its_own_connection(socket: Path, junk: bytes) -> None:
    async def client() -> None:
        reader, writer = await asyncio.open_unix_connection(str(socket))
        writer.write(junk)
        writer.write_eof()
        await reader.read()
        writer.close()
        assert (await request(socket, "GET", "/")).status == 200

    served(echo, socket, client)


@pytest.mark.parametrize(
    "answer",
    [
        b"",
        b"junk\r\n\r\n",
        b"HTTP/1.1 200 OK\r\n",
        b"HTTP/1.1 200 OK\r\ncontent-length: 9\r\n\r\nshort",
        b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n5\r\nab",
    ],
)
def test_a_broken_answer_is_a_connection_error(socket: Path, answer: bytes) -> None:
    async def broken(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(answer)
        writer.close()

    async def main() -> None:
        async with asyncio.timeout(LIMIT_S), await asyncio.start_unix_server(broken, str(socket)):
            with pytest.raises(ConnectionError, match=str(socket)):
                await request(socket, "GET", "/")

    asyncio.run(main())


def test_a_connection_that_the_peer_gave_up_is_a_connection_error(socket: Path) -> None:
    async def once(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 100 Continue\r\n\r\n")
        writer.write(b"HTTP/1.1 200 OK\r\nconnection: close\r\ncontent-length: 0\r\n\r\n")
        writer.close()

    async def main() -> None:
        async with (
            asyncio.timeout(LIMIT_S),
            await asyncio.start_unix_server(once, str(socket)),
            Connection(socket) as connection,
        ):
            assert (await connection.request("GET", "/")).status == 200
            with pytest.raises(ConnectionError, match="over"):
                await connection.request("GET", "/")

    asyncio.run(main())


def test_an_answer_that_does_not_come_in_time_is_a_timeout(socket: Path) -> None:
    async def handler(_: Request) -> Response:
        await asyncio.Event().wait()
        raise AssertionError

    async def client() -> None:
        with pytest.raises(TimeoutError):
            await request(socket, "GET", "/", timeout_s=0.05)

    served(handler, socket, client)


def test_nobody_at_the_socket_is_an_os_error(socket: Path) -> None:
    with pytest.raises(FileNotFoundError):
        asyncio.run(request(socket, "GET", "/"))
