from __future__ import annotations

import asyncio
import contextlib
import ctypes
import json
import os
import re
import socket
from collections import Counter
from pathlib import Path

from tests.dataplane.envoy.harness import CHAT, LIMIT_S, WORKERS, Gateway, eventually, model
from tests.dataplane.envoy.upstream import Exchange, Upstream, whole

from preheat.core import localhttp
from preheat.dataplane.envoy import clusters
from preheat.dataplane.envoy.listeners import FAST_OPEN_QUEUE

PIDFD_GETFD = 438


def test_a_probe_opens_every_workers_connection_before_traffic_needs_one(
    gateway: Gateway, engine: Upstream
) -> None:
    gateway.publish(model("m", engine, serving=False))
    gateway.loop.run(probe_on_every_worker(gateway, engine))
    gateway.publish(model("m", engine))
    opened = engine.connections
    before = gateway.statistics("^cluster.m_.*upstream_cx_total$")
    assert opened >= WORKERS
    # Held at once: the listener gives each new connection to the worker that has the fewest.
    with contextlib.ExitStack() as stack:
        held = [gateway.connect() for _ in range(WORKERS)]
        for connection in held:
            stack.callback(connection.close)
            connection.request("POST", CHAT, json.dumps({"model": "m"}))
            answer = connection.getresponse()
            assert (answer.status, bool(answer.read())) == (200, True)
        spread = gateway.statistics("^listener.127.0.0.1_[0-9]+.worker_.*downstream_cx_active$")
    workers = {name for name, count in spread.items() if count}
    assert len({name.rpartition("worker_")[2] for name in workers}) == WORKERS
    assert engine.connections == opened
    assert gateway.statistics("^cluster.m_.*upstream_cx_total$") == before


async def probe_on_every_worker(gateway: Gateway, engine: Upstream) -> None:
    """As the agent does: one connection for each worker, all held at once."""
    together = asyncio.Event()

    async def meet(exchange: Exchange) -> None:
        # No connection can be used twice while all of them wait for an answer.
        if engine.in_flight == WORKERS:
            together.set()
        await together.wait()
        await whole(b"{}")(exchange)

    engine.answer = meet
    pin = {"x-preheat-pin": engine.start_id}
    async with contextlib.AsyncExitStack() as stack:
        held = [
            await stack.enter_async_context(localhttp.Connection(gateway.paths.probe_socket))
            for _ in range(WORKERS)
        ]
        async with asyncio.timeout(LIMIT_S):
            replies = await asyncio.gather(*(c.request("GET", "/", headers=pin) for c in held))
    assert [reply.status for reply in replies] == [200] * WORKERS
    engine.answer = whole(b"{}")


def test_a_connection_is_given_up_before_the_engine_would_close_it(
    gateway: Gateway, engine: Upstream
) -> None:
    gateway.publish(model("m", engine))
    requests = 3 * clusters.UPSTREAM_REQUESTS_PER_CONNECTION
    with contextlib.closing(gateway.connect()) as connection:
        for _ in range(requests):
            connection.request("POST", "/v1/completions", b'{"model":"m"}')
            assert connection.getresponse().read()
    assert engine.connections == 3


def test_1000_requests_at_once_are_all_answered(gateway: Gateway, engine: Upstream) -> None:
    gateway.publish(model("m", engine))
    request = (
        b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 13\r\n\r\n" + b'{"model":"m"}'
    )

    async def ask() -> bytes:
        reader, writer = await asyncio.open_connection("127.0.0.1", gateway.port)
        try:
            writer.write(request)
            return await reader.readline()
        finally:
            writer.close()
            await writer.wait_closed()

    async def ask_all() -> list[bytes]:
        async with asyncio.timeout(LIMIT_S):
            return await asyncio.gather(*(ask() for _ in range(1000)))

    assert Counter(asyncio.run(ask_all())) == {b"HTTP/1.1 200 OK\r\n": 1000}
    assert len(engine.received) == 1000


def test_requests_above_the_engines_connections_wait_for_their_turn(
    gateway: Gateway, engine: Upstream
) -> None:
    released = asyncio.Event()

    async def hold(exchange: Exchange) -> None:
        await released.wait()
        await whole(b"{}")(exchange)

    engine.answer = hold
    gateway.publish(model("m", engine, max_connections=1))
    active = "http.public.downstream_rq_active"
    with contextlib.ExitStack() as stack:
        waiting = [stack.enter_context(contextlib.closing(gateway.open_stream())) for _ in range(9)]
        eventually(lambda: gateway.statistics(f"^{active}$") == {active: 9})
        gateway.loop.loop.call_soon_threadsafe(released.set)
        assert {connection.getresponse().status for connection in waiting} == {200}
    assert len(engine.received) == 9
    # Envoy allows each worker one connection, whatever the limit.
    assert engine.most_in_flight <= WORKERS


def test_the_listening_sockets_are_one_for_each_worker_and_take_fast_open(
    gateway: Gateway,
) -> None:
    gateway.publish(model("m"))
    sockets = listening(gateway.envoy.pid, gateway.port)
    try:
        assert len(sockets) == WORKERS
        for one in sockets:
            assert one.getsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT) == 1
            assert one.getsockopt(socket.IPPROTO_TCP, socket.TCP_FASTOPEN) == FAST_OPEN_QUEUE
    finally:
        for one in sockets:
            one.close()


def listening(pid: int, port: int) -> list[socket.socket]:
    """Duplicates of the sockets of a process that listen at a port."""
    lines = Path(f"/proc/{pid}/net/tcp").read_text().splitlines()[1:]
    rows = [line.split() for line in lines]
    inodes = {row[9] for row in rows if row[1].endswith(f":{port:04X}") and row[3] == "0A"}
    libc = ctypes.CDLL(None, use_errno=True)
    process = os.pidfd_open(pid)
    found = []
    try:
        for link in Path(f"/proc/{pid}/fd").iterdir():
            held = re.fullmatch(r"socket:\[(\d+)\]", link.readlink().as_posix())
            if held is None or held[1] not in inodes:
                continue
            number = libc.syscall(PIDFD_GETFD, process, int(link.name), 0)
            assert number >= 0, os.strerror(ctypes.get_errno())
            found.append(socket.socket(fileno=number))
    finally:
        os.close(process)
    return found
