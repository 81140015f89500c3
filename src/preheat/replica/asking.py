"""Asks the engine, directly and through the gateway: the agent's requests as functions.

What does not belong here: whether an answer agrees (``warmup.py``), what follows from it
(``agent.py``).
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from pathlib import Path
from typing import TYPE_CHECKING

from preheat.core import localhttp
from preheat.replica import warmup

if TYPE_CHECKING:
    from collections.abc import Callable

    from preheat.replica.plan import ReplicaPlan

# A request through the gateway fails while Envoy still checks the endpoint's health.
RETRY_FIRST_S = 0.003
RETRY_LAST_S = 0.025
_NOT_YET = {502, 503, 504}

DRAIN_LOOK_S = 0.025
DRAIN_LOOKS = 4
"""Looks in a row that must find nothing in flight: what has been received, but not yet been cut
into tokens, is counted nowhere."""


async def engine_is_up(plan: ReplicaPlan) -> bool:
    """Whether the engine has loaded the model."""
    try:
        answer = await localhttp.request(
            Path(plan.launch.endpoint), "GET", plan.launch.health_path, timeout_s=1.0
        )
    except OSError:  # it does not listen yet, or answers too late to be called up
        return False
    return answer.status == 200


async def ask_engine(plan: ReplicaPlan, prompt: str, max_tokens: int) -> localhttp.Response:
    """Raises OSError when the engine breaks the connection."""
    path, body = warmup.request_for(plan.launch, plan.model, prompt, max_tokens)
    return await localhttp.request(
        Path(plan.launch.endpoint), "POST", path, body=body, timeout_s=plan.warmup.deadline_s
    )


async def ask_through_gateway(
    plan: ReplicaPlan, prompt: str, max_tokens: int, refused: Callable[[str], None]
) -> localhttp.Response:
    """Asks over the private route that is pinned to this start, until the gateway lets it through.

    ``refused`` is told what stands in the way; how long to go on is the caller's timeout.
    """
    pause_s = RETRY_FIRST_S
    while True:
        try:
            answer = await _through_gateway_once(plan, prompt, max_tokens)
        except OSError as error:
            refused(f"the gateway at {plan.probe_socket} does not answer: {error}")
        else:
            if answer.status not in _NOT_YET:
                return answer
            shown = answer.body[:200].decode(errors="replace")
            refused(f"the gateway answers {answer.status} for it: {shown}")
        await asyncio.sleep(pause_s)
        pause_s = min(pause_s * 1.3, RETRY_LAST_S)


async def _through_gateway_once(
    plan: ReplicaPlan, prompt: str, max_tokens: int
) -> localhttp.Response:
    """First one connection for each of the gateway's workers is held at once, so that each worker
    opens its own connection to the engine before traffic needs one."""
    socket, pin = Path(plan.probe_socket), {"x-preheat-pin": plan.start_id}
    path, body = warmup.request_for(plan.launch, plan.model, prompt, max_tokens)
    async with contextlib.AsyncExitStack() as stack:
        held = [
            await stack.enter_async_context(localhttp.Connection(socket))
            for _ in range(plan.gateway_workers)
        ]
        opened = await asyncio.gather(
            *(c.request("GET", plan.launch.health_path, headers=pin) for c in held)
        )
        for answer in opened:
            if answer.status != 200:
                return localhttp.Response(503, answer.body)
        return await held[0].request("POST", path, body=body, headers=pin)


async def drained(plan: ReplicaPlan, given_up: Callable[[], bool]) -> bool:
    """Waits until nothing is in flight on the engine; False when the drain's time is over first.

    An engine that does not count its requests gets all of that time. Returns at once when
    ``given_up`` says so.
    """
    deadline_s = time.monotonic() + plan.drain_timeout_s
    idle = 0
    while idle < DRAIN_LOOKS and not given_up():
        left_s = deadline_s - time.monotonic()
        if left_s <= 0:
            return False
        idle = idle + 1 if await _in_flight(plan, left_s) == 0 else 0
        await asyncio.sleep(min(DRAIN_LOOK_S, left_s))
    return True


async def _in_flight(plan: ReplicaPlan, timeout_s: float) -> int | None:
    """Requests that the engine computes or keeps waiting; None when it does not say."""
    gauges = plan.launch.in_flight_gauges
    if not gauges:
        return None
    try:
        answer = await localhttp.request(
            Path(plan.launch.endpoint), "GET", "/metrics", timeout_s=min(1.0, timeout_s)
        )
        return warmup.gauge_sum(answer.body.decode(errors="replace"), gauges)
    except OSError:  # too busy to answer, or gone, which the agent sees by itself
        return None
