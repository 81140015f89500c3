"""Starts real agents over a fake engine, and looks at what becomes of them."""

from __future__ import annotations

import contextlib
import hashlib
import http.client
import json
import os
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from preheat.core.spec.schema import Engine, KnownAnswer, Warmup
from preheat.replica.engines import llamacpp
from preheat.replica.engines.plan import LaunchPlan, local_hardware
from preheat.replica.plan import ReplicaPlan, WeightsPlan

FAKE_ENGINE = Path(__file__).with_name("fake_engine.py")
SOURCES = Path(__file__).parents[2] / "src"
KNOWN = "The capital of France is"
PATIENCE_S = 30.0
"""How long a test waits for what must come; no test is about it."""


class UnixConnection(http.client.HTTPConnection):
    def __init__(self, path: Path, timeout_s: float = PATIENCE_S) -> None:
        super().__init__("localhost", timeout=timeout_s)
        self._path = path

    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX)
        self.sock.settimeout(self.timeout)
        try:
            self.sock.connect(str(self._path))
        except OSError:
            self.close()
            raise


def call(path: Path, method: str, target: str, body: Any = None) -> tuple[int, Any]:
    """Status and body, decoded if it is JSON."""
    connection = UnixConnection(path)
    try:
        data = None if body is None else json.dumps(body)
        connection.request(method, target, data, {"content-type": "application/json"})
        answer = connection.getresponse()
        text = answer.read().decode()
    finally:
        connection.close()
    try:
        return answer.status, json.loads(text)
    except ValueError:
        return answer.status, text


def eventually(condition: Callable[[], bool]) -> None:
    """Waits until it holds; fails when it does not come to hold."""
    deadline_s = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < deadline_s, "it did not come to hold"
        time.sleep(0.003)


def is_alive(pid: int) -> bool:
    """A corpse that nobody collected is not alive."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return False
    return stat.rpartition(")")[2].split()[0] not in "ZX"


@dataclass
class Start:
    """One agent. ``behaviour`` goes to the fake engine, the other fields into the plan."""

    directory: Path
    behaviour: dict[str, Any] = field(default_factory=dict)
    warmup: Warmup = field(
        default_factory=lambda: Warmup(prompts=("Hello!",), known_answer=KnownAnswer(prompt=KNOWN))
    )
    hold_at: str = "hot"
    drain_timeout_s: float = 20.0
    weights_sha256: str | None = ""
    weights_bytes: bytes = b"these are the weights" * 1000
    argv: tuple[str, ...] | None = None
    gateway: bool = True
    number: int = 1
    environment: dict[str, str] = field(default_factory=dict)
    pass_fds: tuple[int, ...] = ()
    model: Path | None = None
    """A real model, which llama.cpp serves instead of the fake engine."""
    process: subprocess.Popen[bytes] = field(init=False)

    def __post_init__(self) -> None:
        self.weights = self.model or self.directory / "weights.gguf"
        if not self.weights.exists():
            self.weights.write_bytes(self.weights_bytes)
        self.engine_socket = self.directory / f"e{self.number}.sock"
        self.agent_socket = self.directory / f"a{self.number}.sock"
        self.probe_socket = self.directory / f"p{self.number}.sock"
        self.events_file = self.directory / "events.jsonl"
        self.seen = self.directory / f"seen{self.number}"
        if self.gateway:
            self.open_gateway()

    def open_gateway(self) -> None:
        """There is none: its private route leads straight to the engine."""
        self.probe_socket.symlink_to(self.engine_socket)

    def plan(self) -> ReplicaPlan:
        sha256 = self.weights_sha256
        if sha256 == "":
            with self.weights.open("rb") as file:
                sha256 = hashlib.file_digest(file, "sha256").hexdigest()
        return ReplicaPlan(
            replica="m-0",
            start_id=f"m-0@{self.number}",
            model="m",
            version="v1",
            weights=WeightsPlan(
                path=str(self.weights), size_bytes=self.weights.stat().st_size, sha256=sha256
            ),
            launch=self._real_engine() if self.model else self._fake_engine(),
            warmup=self.warmup,
            hold_at="warm" if self.hold_at == "warm" else "hot",
            agent_socket=str(self.agent_socket),
            probe_socket=str(self.probe_socket),
            answers=str(self.directory / "answers"),
            events=str(self.events_file),
            gateway_workers=2,
            drain_timeout_s=self.drain_timeout_s,
        )

    def _fake_engine(self) -> LaunchPlan:
        does = {
            "socket": str(self.engine_socket),
            "known_prompt": KNOWN,
            "seen": str(self.seen),
            **self.behaviour,
        }
        return LaunchPlan(
            argv=self.argv or (sys.executable, "-IS", str(FAKE_ENGINE), json.dumps(does)),
            endpoint=str(self.engine_socket),
            in_flight_gauges=("busy", "waiting"),
            capabilities=("completions",),
            max_connections=8,
            build="fake 1",
        )

    def _real_engine(self) -> LaunchPlan:
        engine = Engine(max_batch_size=2, context_length=1024)
        return llamacpp.plan(engine, local_hardware(), model="m", socket=self.engine_socket)

    def launch(self, plan: ReplicaPlan | None = None) -> Start:
        file = self.directory / f"plan{self.number}.json"
        file.write_bytes(msgspec.json.encode(plan or self.plan()))
        self.log = self.directory / f"agent{self.number}.log"
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-P", "-m", "preheat.replica", str(file)],
                env={**os.environ, "PYTHONPATH": str(SOURCES), **self.environment},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                pass_fds=self.pass_fds,
            )
        return self

    def signal(self, number: int) -> None:
        self.process.send_signal(number)

    def get(self, target: str) -> tuple[int, Any]:
        return call(self.agent_socket, "GET", target)

    def post(self, target: str) -> tuple[int, Any]:
        return call(self.agent_socket, "POST", target)

    def follow(self, after: int = 0) -> Iterator[dict[str, Any]]:
        """Events as they are streamed, to the end of the start."""
        connection = self.connected()
        try:
            connection.request("GET", f"/events?after={after}")
            answer = connection.getresponse()
            while line := answer.readline():
                yield json.loads(line)
        finally:
            connection.close()

    def connected(self) -> UnixConnection:
        connection = UnixConnection(self.agent_socket)

        def connected() -> bool:
            assert self.process.poll() is None, self.log.read_text()
            with contextlib.suppress(OSError):
                connection.connect()
                return True
            return False

        eventually(connected)
        return connection

    def until(self, state: str) -> dict[str, Any]:
        """Waits for the event that leads to the state; fails when the start ends without it."""
        seen = []
        for event in self.follow():
            seen.append((event["event"], event["state"], event.get("reason", "")))
            if event["state"] == state:
                return event
        raise AssertionError(f"it never was {state}: {seen}")

    def finish(self) -> list[dict[str, Any]]:
        """Waits for the agent's end; returns its events as its file has them."""
        watched = os.pidfd_open(self.process.pid)
        try:
            ended, _, _ = select.select([watched], [], [], PATIENCE_S)
        finally:
            os.close(watched)
        assert ended, f"it does not end: {self.log.read_text()}"
        self.process.wait()
        return self.recorded()

    def recorded(self) -> list[dict[str, Any]]:
        lines = self.events_file.read_text().splitlines() if self.events_file.exists() else []
        parsed = [json.loads(line) for line in lines]
        return [event for event in parsed if event["start_id"] == f"m-0@{self.number}"]

    def engine_pid(self) -> int:
        _, status = self.get("/status")
        return int(status["engine_pid"])

    def close(self) -> None:
        """However the test went, nothing stays."""
        if hasattr(self, "process") and self.process.poll() is None:
            self.process.send_signal(signal.SIGKILL)
            self.process.wait()
