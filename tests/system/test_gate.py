"""No request meets a replica that has not proved itself, or that is not ready any more."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from tests.system.gate import Answer, Load, violations
from tests.system.served import MODEL, Served, wait_until

from preheat.core import localhttp

MUTATIONS = Path(__file__).with_name("mutations")
# A health check every .25 s, two failures, a timeout of 1 s each, and a busy machine.
GRACE_S = 3.0


def event(start: str, state: str, at_s: float) -> dict[str, Any]:
    return {"start_id": start, "state": state, "monotonic_s": at_s}


def test_an_answer_before_the_proof_is_a_violation() -> None:
    events = [event("a@1", "proving", 1.0), event("a@1", "ready", 2.0)]
    assert violations([Answer(1.5, 1.9, 200, "a@1")], events, grace_s=1.0)
    assert not violations([Answer(1.5, 2.1, 200, "a@1")], events, grace_s=1.0)


def test_an_answer_of_a_start_that_never_proved_itself_is_a_violation() -> None:
    assert violations([Answer(1.0, 1.0, 200, "a@1")], [event("a@1", "proving", 0.5)], grace_s=1.0)
    assert not violations([Answer(1.0, 1.0, 503, "")], [], grace_s=1.0)


def test_a_request_sent_long_after_readiness_was_taken_away_is_a_violation() -> None:
    events = [event("a@1", "ready", 1.0), event("a@1", "draining", 2.0)]
    assert violations([Answer(3.5, 3.6, 200, "a@1")], events, grace_s=1.0)
    assert not violations([Answer(2.5, 3.6, 200, "a@1")], events, grace_s=1.0)


def restart_under_load(preheat: Served, restarts: int) -> list[Answer]:
    """Kills the engine or its agent, in turn, and waits for another start each time."""
    with Load(preheat.port).running() as load:
        wait_until(partial(_answered, load, 0), "an answer of the first start")
        for number in range(restarts):
            before = preheat.replica()["start_id"]
            victim = "llamacpp_host" if number % 2 else "-m preheat.replica "
            os.kill(preheat.pid_of(victim), signal.SIGKILL)
            wait_until(partial(_is_another, preheat, before), "another start is ready")
            count = len(load.answers)
            wait_until(partial(_answered, load, count), "an answer of it")
    return load.answers


def _is_another(preheat: Served, before: str) -> bool:
    replica = preheat.replica()
    return bool(replica["state"] == "ready" and replica["start_id"] != before)


def _answered(load: Load, after: int) -> bool:
    return any(answer.status == 200 for answer in load.answers[after:])


@contextlib.contextmanager
def stopped(pid: int) -> Iterator[None]:
    """The process does not run meanwhile."""
    os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(pid, signal.SIGCONT)


def unready_while_nobody_publishes(preheat: Served) -> list[Answer]:
    """The agent takes its readiness away while the control plane stands still: only Envoy's own
    health checks can keep requests away. A stream on the engine itself keeps it from ending."""
    replica = preheat.replica()
    sockets = Path(replica["agent_socket"]).parent
    with socket.socket(socket.AF_UNIX) as stream:
        body = f'{{"model": "{MODEL}", "prompt": "Count:", "max_tokens": 1800, "stream": true}}'
        head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n"
        stream.connect(str(sockets / "engine.sock"))
        stream.sendall((head + body).encode())
        assert stream.recv(100).startswith(b"HTTP/1.1 200")
        with (
            stopped(preheat.pid_of("preheat-control:")),
            Load(preheat.port, clients=2).running() as load,
        ):
            wait_until(lambda: any(a.status == 200 for a in load.answers), "it serves")
            asyncio.run(localhttp.request(sockets / "agent.sock", "POST", "/drain"))
            drained_s = time.monotonic()
            wait_until(
                lambda: any(a.sent_s > drained_s + GRACE_S for a in load.answers),
                "the grace is over",
            )
            count = len(load.answers)
            wait_until(lambda: len(load.answers) > count + 20, "requests after it")
    return load.answers


@pytest.mark.parametrize(
    "restarts", [4, pytest.param(50, marks=[pytest.mark.slow, pytest.mark.timeout(900)])]
)
def test_no_answer_comes_from_a_start_that_has_not_proved_itself(restarts: int) -> None:
    with Served(environment={"PYTHONPATH": _path("no_backoff")}) as preheat:
        answers = restart_under_load(preheat, restarts)
        assert violations(answers, preheat.events(), grace_s=GRACE_S) == []
        assert len({a.start_id for a in answers if a.status == 200}) == restarts + 1


def test_without_the_gate_that_test_fails() -> None:
    with Served(environment={"PYTHONPATH": _path("no_gate")}) as preheat:
        answers = restart_under_load(preheat, 3)
        assert violations(answers, preheat.events(), grace_s=GRACE_S)


def test_health_checks_keep_requests_from_a_start_that_says_it_is_not_ready() -> None:
    with Served() as preheat:
        answers = unready_while_nobody_publishes(preheat)
        assert violations(answers, preheat.events(), grace_s=GRACE_S) == []


def test_with_the_default_panic_threshold_that_test_fails() -> None:
    with Served(environment={"PYTHONPATH": _path("panic_default")}) as preheat:
        answers = unready_while_nobody_publishes(preheat)
        assert violations(answers, preheat.events(), grace_s=GRACE_S)


def _path(mutation: str) -> str:
    """An import path that begins with the mutation's ``sitecustomize``."""
    return os.pathsep.join(
        [str(MUTATIONS / mutation), *filter(None, [os.environ.get("PYTHONPATH")])]
    )
