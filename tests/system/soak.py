"""Many requests, some broken off at random points, while every process is watched for growth.

``python -m tests.system.soak --requests 200000`` runs it alone and prints a table; ``test_soak.py``
runs shorter ones. What is judged is the second half, when caches and pools are full.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import random
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean, median

from tests.system.served import MODEL, Served, called

CLIENTS = 16
CANCELLED = 0.2
SAMPLES = 240
BLOCKS = 12
# Student's t for 97.5 % and BLOCKS − 2 degrees of freedom.
T_975 = 2.228
# Allocators step by arenas and the kernel rounds to pages: growth below these over the whole second
# half cannot be told from none.
# asyncio's pool on two cores has six threads, which come as they are needed.
NOISE = {"rss_kb": 2048.0, "descriptors": 2.0, "threads": 6.0}


@dataclass(slots=True)
class Sample:
    requests: int
    rss_kb: dict[str, float] = field(default_factory=dict)
    descriptors: dict[str, float] = field(default_factory=dict)
    threads: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Slope:
    """Growth over the judged half, with its 95 % interval."""

    process: str
    quantity: str
    growth: float
    low: float
    high: float

    @property
    def grows(self) -> bool:
        return self.low > 0 and self.growth > NOISE[self.quantity]


def slope(process: str, quantity: str, points: Sequence[tuple[int, float]]) -> Slope:
    """Least squares over medians of blocks (neighbours are not independent), times the span."""
    size = max(1, len(points) // BLOCKS)
    blocks = [points[i : i + size] for i in range(0, size * BLOCKS, size)]
    xs = [fmean(x for x, _ in block) for block in blocks]
    ys = [median(y for _, y in block) for block in blocks]
    mean_x, mean_y = fmean(xs), fmean(ys)
    spread = sum((x - mean_x) ** 2 for x in xs)
    steepness = sum((x - mean_x) * (y - mean_y) for x, y in zip(xs, ys, strict=True)) / spread
    left = sum((y - mean_y - steepness * (x - mean_x)) ** 2 for x, y in zip(xs, ys, strict=True))
    error = (left / (len(xs) - 2) / spread) ** 0.5
    span = xs[-1] - xs[0]
    return Slope(
        process,
        quantity,
        steepness * span,
        (steepness - T_975 * error) * span,
        (steepness + T_975 * error) * span,
    )


def slopes(samples: Sequence[Sample]) -> list[Slope]:
    """Of every process and quantity, over the second half."""
    judged = samples[len(samples) // 2 :]
    found = []
    for quantity in NOISE:
        for process in getattr(judged[0], quantity):
            points = [(s.requests, getattr(s, quantity)[process]) for s in judged]
            found.append(slope(process, quantity, points))
    return found


class Soak:
    def __init__(self, preheat: Served, requests: int, *, seed: int = 1) -> None:
        self._preheat = preheat
        self._requests = requests
        self._random = random.Random(seed)
        self._names = {pid: _name(pid) for pid in preheat.descendants()}
        self.done = 0
        self.cancelled = 0
        self.failed: list[str] = []
        self.samples: list[Sample] = []

    async def run(self) -> None:
        await asyncio.gather(*(self._client() for _ in range(CLIENTS)))

    async def _client(self) -> None:
        while self.done < self._requests:
            self.done += 1
            if self.done % max(1, self._requests // SAMPLES) == 0:
                self.samples.append(self._sample())
            cancel = self._random.random() < CANCELLED
            stream = self._random.random() < 0.5
            # Anywhere: before the request is whole, before the first token, in mid-stream.
            patience_s = self._random.expovariate(1 / 0.03) if cancel else 60.0
            try:
                async with asyncio.timeout(patience_s):
                    await self._request(stream=stream, tokens=12 if cancel else 1)
            except TimeoutError:
                self.cancelled += 1
                if not cancel:
                    self.failed.append("no answer in 60 s")
            except (OSError, asyncio.IncompleteReadError) as error:
                self.failed.append(repr(error))

    async def _request(self, *, stream: bool, tokens: int) -> None:
        body = json.dumps({"model": MODEL, "prompt": "Hi", "max_tokens": tokens, "stream": stream})
        head = (
            "POST /v1/completions HTTP/1.1\r\nHost: soak\r\nConnection: close\r\n"
            f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
        )
        reader, writer = await asyncio.open_connection("127.0.0.1", self._preheat.port)
        try:
            writer.write((head + body).encode())
            answer = await reader.read()
            if not answer.startswith(b"HTTP/1.1 200"):
                self.failed.append(answer[:60].decode(errors="replace"))
        finally:
            writer.transport.abort()

    def _sample(self) -> Sample:
        sample = Sample(self.done)
        for pid, name in self._names.items():
            status = Path(f"/proc/{pid}/status").read_text()
            values = dict(line.split(":", 1) for line in status.splitlines())
            sample.rss_kb[name] = float(values["VmRSS"].split()[0])
            sample.threads[name] = float(values["Threads"])
            sample.descriptors[name] = float(len(list(Path(f"/proc/{pid}/fd").iterdir())))
        return sample


def _name(pid: int) -> str:
    line = called(pid)
    roles = {
        "llamacpp_host": "engine",
        "preheat.replica ": "agent",
        "preheat-control:": "control plane",
        "envoy": "envoy",
        "preheat serve": "supervisor",
    }
    return next((role for part, role in roles.items() if part in line), f"{pid}")


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--requests", type=int, default=200_000)
    args = parser.parse_args()
    with Served() as preheat:
        soak = Soak(preheat, args.requests)
        began_s = time.monotonic()
        asyncio.run(soak.run())
        took_s = time.monotonic() - began_s
    grown = slopes(soak.samples)
    ended = f"{soak.cancelled} broken off, {len(soak.failed)} failed"
    print(f"{soak.done} requests in {took_s:.0f} s, {ended}")
    for item in grown:
        print(
            f"{item.process:<14} {item.quantity:<12} {item.growth:+10.1f} "
            f"[{item.low:+.1f}, {item.high:+.1f}]{'  GROWS' if item.grows else ''}"
        )
    with contextlib.suppress(IndexError):
        print("failures:", soak.failed[:5])
    return int(bool(soak.failed) or any(item.grows for item in grown))


if __name__ == "__main__":
    sys.exit(main())
