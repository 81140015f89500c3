"""A real Envoy with preheat's own publisher and records, on loopback and Unix sockets only."""

from __future__ import annotations

import asyncio
import contextlib
import http.client
import json
import os
import shutil
import socket
import ssl
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Coroutine, Iterator
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from msgspec.structs import replace
from tests.dataplane.envoy.upstream import Upstream

from preheat.controlplane.gateway import RECORDS_FLUSH_MS
from preheat.core import localhttp
from preheat.core.paths import Paths
from preheat.dataplane.envoy import records
from preheat.dataplane.envoy.binary import environment, envoy_binary
from preheat.dataplane.envoy.publish import Publisher, write_initial
from preheat.dataplane.envoy.resources import bootstrap, resources
from preheat.dataplane.envoy.routing import Listener, ModelRoute, RoutingTable, VersionRoute

T = TypeVar("T")
WORKERS = 2
USAGE_TOO = {"stream_options": {"include_usage": True}}
LIMIT_S = 20.0
CHAT = "/v1/chat/completions"


def eventually(condition: Callable[[], T], what: str = "") -> T:
    """Returns what ``condition`` gave when it was true for the first time."""
    end_s = time.monotonic() + LIMIT_S
    while not (value := condition()):
        assert time.monotonic() < end_s, what or "it did not come true"
        time.sleep(0.002)
    return value


class LoopThread:
    """An event loop of its own for stubs, publisher and records."""

    def __init__(self) -> None:
        self.loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self.loop.run_forever, daemon=True)
        self._thread.start()

    def start(self, work: Coroutine[Any, Any, T]) -> Future[T]:
        return asyncio.run_coroutine_threadsafe(work, self.loop)

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        return self.start(work).result(2 * LIMIT_S)

    def stop(self) -> None:
        self.loop.call_soon_threadsafe(self.loop.stop)
        self._thread.join(LIMIT_S)
        self.loop.close()


@dataclass(frozen=True, slots=True)
class Reply:
    status: int
    headers: dict[str, str]
    body: bytes

    def json(self) -> Any:
        return json.loads(self.body)

    @property
    def code(self) -> Any:
        """OpenAI's error code, after a look at the error's shape."""
        assert self.headers["content-type"] == "application/json"
        error = self.json()["error"]
        assert sorted(error) == ["code", "message", "param", "type"]
        return error["code"]


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


class EnvoyProcess:
    """Started as the control plane starts it."""

    def __init__(self, paths: Paths) -> None:
        self.log = paths.logs / "envoy.log"
        config = paths.runtime / "envoy.json"
        config.write_text(json.dumps(bootstrap(paths, max_connections=9_900)))
        argv = [str(envoy_binary()), "-c", str(config), "--concurrency", str(WORKERS)]
        argv += ["--disable-hot-restart", "--reject-unknown-dynamic-fields", "-l", "warning"]
        argv += ["--component-log-level", "misc:error,dynamic_modules:off"]
        argv += ["--file-flush-interval-msec", str(RECORDS_FLUSH_MS)]
        with self.log.open("ab") as log, paths.records_pipe.open("r+b", buffering=0) as pipe:
            self.process = subprocess.Popen(
                argv, stdin=pipe, stdout=log, stderr=log, env={**os.environ, **environment()}
            )

    @property
    def pid(self) -> int:
        return self.process.pid

    def log_tail(self) -> str:
        return self.log.read_text(errors="replace")[-8192:]

    def stop(self) -> None:
        self.process.kill()
        self.process.wait(LIMIT_S)


@contextlib.contextmanager
def short_paths() -> Iterator[Paths]:
    """Directories whose sockets' paths fit into 107 bytes."""
    base = Path(tempfile.mkdtemp(prefix="ph", dir="/tmp"))
    try:
        paths = Paths(base / "r", base / "s", base / "c")
        paths.create()
        yield paths
    finally:
        shutil.rmtree(base)


@contextlib.contextmanager
def running_gateway(loop: LoopThread) -> Iterator[Gateway]:
    """One with directories of its own."""
    with short_paths() as paths:
        gateway = Gateway(loop, paths)
        try:
            yield gateway
        finally:
            gateway.stop()


class Records(records.RecordStream):
    on_record: Callable[[records.RequestRecord], None] | None = None

    def put(self, record: records.RequestRecord) -> None:
        if self.on_record is not None:
            self.on_record(record)
        super().put(record)


class Gateway:
    """Envoy, its publisher and its records; a test publishes what it needs and asks."""

    def __init__(self, loop: LoopThread, paths: Paths) -> None:
        self.loop = loop
        self.paths = paths
        self.listener = Listener("127.0.0.1", free_port())
        self.port = 0
        self.records = Records()
        self.since_unix_s = 0.0
        self.start_reading()
        write_initial(paths)
        self.envoy = EnvoyProcess(paths)
        self.publisher = Publisher(paths, log_tail=self.envoy.log_tail)

    def start_reading(self) -> None:
        self._records_pipe = records.RecordPipe(self.paths.records_pipe, self.records)

    def stop_reading(self) -> None:
        self._records_pipe.close()

    def stop(self) -> None:
        self.envoy.stop()
        self.stop_reading()

    def records_where(
        self, wanted: Callable[[records.RequestRecord], bool], count: int = 1
    ) -> list[records.RequestRecord]:
        """Waits for so many wanted records of this test's requests, and sorts them by start."""
        found: list[records.RequestRecord] = []

        def enough() -> bool:
            found.extend(
                record
                for record in self.records.take()
                if record.start_unix_s >= self.since_unix_s and wanted(record)
            )
            return len(found) >= count

        eventually(enough, "the records did not come")
        assert len(found) == count
        return sorted(found, key=lambda record: record.start_unix_s)

    # ── what to route ──

    def publish(
        self, *models: ModelRoute, listener: Listener | None = None, missing: tuple[str, ...] = ()
    ) -> None:
        self.loop.run(self.publishing(*models, listener=listener, missing=missing))
        eventually(self._all_checked, "the first health checks")
        if self.port != (port := (listener or self.listener).port):
            self.port = port
            eventually(self._listens, "the new listener")

    def _all_checked(self) -> bool:
        """Whether each start's health has been asked once; a new one takes no traffic before."""
        return b"pending_active_hc" not in self.admin("/clusters")

    def _listens(self) -> bool:
        with socket.socket() as probe:
            return probe.connect_ex(("127.0.0.1", self.port)) == 0

    async def publishing(
        self, *models: ModelRoute, listener: Listener | None = None, missing: tuple[str, ...] = ()
    ) -> None:
        table = RoutingTable(listener or self.listener, models, missing)
        await self.publisher.publish(resources(table, self.paths))

    # ── how to ask ──

    def connect(self, context: ssl.SSLContext | None = None) -> http.client.HTTPConnection:
        if context is not None:
            return http.client.HTTPSConnection(
                "localhost", self.port, timeout=LIMIT_S, context=context
            )
        return http.client.HTTPConnection("127.0.0.1", self.port, timeout=LIMIT_S)

    def request(
        self,
        method: str,
        target: str,
        body: Any = None,
        headers: dict[str, str] | None = None,
        *,
        context: ssl.SSLContext | None = None,
    ) -> Reply:
        with contextlib.closing(self.connect(context)) as connection:
            connection.request(method, target, body, headers or {})
            answer = connection.getresponse()
            fields = {name.lower(): value for name, value in answer.getheaders()}
            return Reply(answer.status, fields, answer.read())

    def get(self, target: str, headers: dict[str, str] | None = None) -> Reply:
        return self.request("GET", target, headers=headers)

    def post(self, body: Any, target: str = CHAT, headers: dict[str, str] | None = None) -> Reply:
        data = body if isinstance(body, bytes) else json.dumps(body, ensure_ascii=False).encode()
        fields = {"content-type": "application/json", **(headers or {})}
        return self.request("POST", target, data, fields)

    def ask(self, model: str = "m", headers: dict[str, str] | None = None, **more: Any) -> Reply:
        """For usage too, unless ``more`` says otherwise: then nothing of the answer is changed."""
        return self.post({"model": model, **USAGE_TOO, **more}, headers=headers)

    def open_stream(
        self, model: str = "m", headers: dict[str, str] | None = None
    ) -> http.client.HTTPConnection:
        """A connection with a request on its way; the caller reads the answer and closes."""
        connection = self.connect()
        connection.request(
            "POST", CHAT, json.dumps({"model": model, "stream": True, **USAGE_TOO}), headers or {}
        )
        return connection

    def on_a_port_of_its_own(self, **changes: Any) -> Listener:
        """The listener, changed: at another port no request can meet the one that was before."""
        return replace(self.listener, port=free_port(), **changes)

    def probe(self, start_id: str, target: str = "/health", method: str = "GET") -> Reply:
        """Over the private listener, pinned to one start."""
        answer = self.loop.run(
            localhttp.request(
                self.paths.probe_socket, method, target, headers={"x-preheat-pin": start_id}
            )
        )
        return Reply(answer.status, answer.headers, answer.body)

    def probed(self, *starts: Upstream) -> None:
        """Returns when pinned probes have passed: Envoy holds the starts for healthy."""
        for start in starts:
            eventually(partial(self._passes, start.start_id), start.start_id)

    def _passes(self, start_id: str) -> bool:
        return self.probe(start_id).status == 200

    # ── what Envoy says ──

    def admin(self, target: str) -> bytes:
        return self.loop.run(localhttp.request(self.paths.envoy_admin_socket, "GET", target)).body

    def statistics(self, pattern: str) -> dict[str, int]:
        lines = self.admin(f"/stats?filter={pattern}").decode().splitlines()
        pairs = (line.rpartition(": ") for line in lines)
        return {name: int(value) for name, _, value in pairs if value.isdigit()}


def version(
    *starts: Upstream,
    name: str = "v1",
    share: int = 100,
    max_connections: int = 512,
    serving: bool = True,
) -> VersionRoute:
    endpoints = tuple(start.endpoint(serving=serving) for start in starts)
    return VersionRoute(name, share, endpoints, max_connections)


def model(name: str, /, *starts: Upstream, **options: Any) -> ModelRoute:
    """A model of one version."""
    return ModelRoute(name, (version(*starts, **options),))
