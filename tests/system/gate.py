"""Did a request meet a cold replica? Joins what clients got with the agents' own event logs."""

from __future__ import annotations

import contextlib
import http.client
import json
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from tests.system.served import MODEL


@dataclass(frozen=True, slots=True)
class Answer:
    """One answer as a client saw it; times on CLOCK_MONOTONIC, which all processes share."""

    sent_s: float
    headers_s: float
    status: int
    start_id: str


@dataclass(frozen=True, slots=True)
class Served:
    """When a start had the right to serve, by its own log."""

    proven_s: float
    unready_s: float


def rights(events: Sequence[dict[str, Any]]) -> dict[str, Served]:
    """For each start that proved itself: from its proof until it was unready or ended."""
    found: dict[str, Served] = {}
    for event in events:
        start, at_s = event["start_id"], event["monotonic_s"]
        if event["state"] == "ready":
            found.setdefault(start, Served(at_s, float("inf")))
        elif start in found and found[start].unready_s == float("inf"):
            found[start] = Served(found[start].proven_s, at_s)
    return found


def violations(
    answers: Sequence[Answer], events: Sequence[dict[str, Any]], *, grace_s: float
) -> list[str]:
    """2xx answers from a start before its proof, or to a request sent later than ``grace_s`` after
    it took its readiness away (the time a health check needs)."""
    served = rights(events)
    wrong = []
    for answer in answers:
        if not 200 <= answer.status < 300:
            continue
        right = served.get(answer.start_id)
        if right is None:
            wrong.append(f"{answer.start_id or 'nobody'} answered and never proved itself")
        elif answer.headers_s < right.proven_s:
            early_s = right.proven_s - answer.headers_s
            wrong.append(f"{answer.start_id} answered {early_s:.3f} s before its proof")
        elif answer.sent_s > right.unready_s + grace_s:
            late_s = answer.sent_s - right.unready_s
            wrong.append(
                f"{answer.start_id} was sent a request {late_s:.3f} s after it was unready"
            )
    return wrong


class Load:
    """Clients that ask without a pause and write down every answer."""

    def __init__(self, port: int, clients: int = 4) -> None:
        self._port = port
        self._ended = threading.Event()
        self._answers: list[Answer] = []
        self._threads = [threading.Thread(target=self._ask) for _ in range(clients)]

    @contextlib.contextmanager
    def running(self) -> Iterator[Load]:
        for thread in self._threads:
            thread.start()
        try:
            yield self
        finally:
            self._ended.set()
            for thread in self._threads:
                thread.join()

    @property
    def answers(self) -> list[Answer]:
        return list(self._answers)

    def _ask(self) -> None:
        body = json.dumps({"model": MODEL, "prompt": "Hi", "max_tokens": 1}).encode()
        while not self._ended.is_set():
            connection = http.client.HTTPConnection("127.0.0.1", self._port, timeout=30)
            with (
                contextlib.closing(connection),
                contextlib.suppress(OSError, http.client.HTTPException),
            ):
                while not self._ended.is_set():
                    sent_s = time.monotonic()
                    connection.request(
                        "POST", "/v1/completions", body, {"content-type": "application/json"}
                    )
                    answer = connection.getresponse()
                    headers_s = time.monotonic()
                    answer.read()
                    start_id = answer.headers.get("x-preheat-replica", "")
                    self._answers.append(Answer(sent_s, headers_s, answer.status, start_id))
                    if answer.status != 200:
                        self._ended.wait(0.002)
