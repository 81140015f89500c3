"""A real llama.cpp engine as its plan says, without an agent."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
from tests.replica.starts import SOURCES, UnixConnection, call

from preheat.core.spec.schema import Engine
from preheat.replica.engines.llamacpp import plan
from preheat.replica.engines.plan import LaunchPlan, local_hardware
from preheat.replica.warmup import gauge_sum

NAME = "org/smol ✅"


@dataclass
class RunningEngine:
    launch: LaunchPlan
    process: subprocess.Popen[bytes]
    log: list[str] = field(default_factory=list)

    @property
    def socket(self) -> Path:
        return Path(self.launch.endpoint)

    def listen(self) -> None:
        """To its last line."""
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.log.append(line.decode(errors="replace").rstrip())

    def said(self, text: str) -> int:
        """How many lines with this text there are."""
        return sum(text in line for line in self.log)

    def get(self, target: str) -> tuple[int, Any]:
        return call(self.socket, "GET", target)

    def post(self, target: str, body: dict[str, Any]) -> tuple[int, Any]:
        return call(self.socket, "POST", target, body)

    def complete(self, prompt: str, **fields: Any) -> Any:
        """The answer to a greedy completion that must succeed."""
        body = {"prompt": prompt, "temperature": 0, "max_tokens": 4, **fields}
        status, answer = self.post("/v1/completions", body)
        assert status == 200, answer
        return answer

    def stream(self, target: str, body: dict[str, Any]) -> bytes:
        """All bytes of a stream."""
        connection = UnixConnection(self.socket)
        text = json.dumps({**body, "stream": True})
        connection.request("POST", target, text, {"content-type": "application/json"})
        data = connection.getresponse().read()
        connection.close()
        return data

    def in_flight(self) -> int | None:
        _, metrics = self.get("/metrics")
        return gauge_sum(metrics, self.launch.in_flight_gauges)


def events(stream: bytes) -> list[Any]:
    """The JSON of each ``data:`` line, which must be UTF-8; the stream must end as it should."""
    lines = [line for line in stream.split(b"\n\n") if line.strip()]
    assert lines[-1] == b"data: [DONE]"
    return [json.loads(line.removeprefix(b"data: ").decode()) for line in lines[:-1]]


@contextlib.contextmanager
def running(model: Path, directory: Path, **options: Any) -> Iterator[RunningEngine]:
    socket = directory / f"{len(list(directory.iterdir()))}.sock"
    spec = msgspec.convert(options, Engine)
    launch = plan(spec, local_hardware(), model=NAME, socket=socket)
    process = subprocess.Popen(
        launch.argv,
        env={**os.environ, **launch.environment, "PYTHONPATH": str(SOURCES)},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )
    engine = RunningEngine(launch, process)
    assert process.stdin is not None
    assert process.stdout is not None
    try:
        process.stdin.write(os.fsencode(model) + b"\n")
        process.stdin.flush()
        for line in process.stdout:
            engine.log.append(line.decode(errors="replace").rstrip())
            if "serving" in engine.log[-1]:
                break
        reader = threading.Thread(target=engine.listen, daemon=True)
        reader.start()
        yield engine
    finally:
        with contextlib.suppress(BrokenPipeError):
            process.stdin.close()
        try:
            process.wait(timeout=10)
        finally:
            process.kill()
            process.wait()
        reader.join()
        process.stdout.close()
