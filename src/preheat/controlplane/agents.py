"""Follows agents: their events into the fleet, orders to them, their ends.

When an agent's process has ended, its last events lie in its socket still, or, if it was never
connected to, in its file; they are heard before its end counts.
What does not belong here: deciding (``fleet.py``), starting agents (``launches.py``).
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from preheat.controlplane.replicas import Heat, Kill, Order, Start, Stop
from preheat.controlplane.saying import say_failed
from preheat.core import localhttp
from preheat.core.errors import SourceError
from preheat.replica.lifecycle import TERMINAL, Event

if TYPE_CHECKING:
    from preheat.controlplane.adoption import Adopted
    from preheat.controlplane.common import Common
    from preheat.controlplane.starts import Starts

CONNECT_RETRY_S = 0.002
CONNECT_RETRY_MAX_S = 0.01
EVENTS_TAIL_BYTES = 256 << 10
EVICTED = "the damaged file was removed from the cache; the next start fetches it anew"
_SIGNALS = {Stop: signal.SIGTERM, Kill: signal.SIGKILL}


class Agents:
    def __init__(self, common: Common, starts: Starts) -> None:
        self._fleet = common.fleet
        self._driver = common.driver
        self._link = common.link
        self._paths = common.paths
        self._notices = common.notices
        self._tasks = common.tasks
        self._changed = common.changed
        self._starts = starts
        self._followers: dict[str, asyncio.Task[None]] = {}
        self._heard: dict[str, int] = {}
        """Events of each start that were heard."""
        self._gone: set[str] = set()

    def follow(self, start: Start) -> None:
        self._followers[start.start_id] = self._tasks.errand(self._follow(start))

    def adopt(self, adopted: Adopted) -> None:
        """Follows a start from where the control plane before had come to, or its file has."""
        self._heard[adopted.start.start_id] = len(adopted.events)
        self.follow(adopted.start)

    # ── orders ──

    def give(self, order: Order) -> None:
        """Stops by signal, which needs no socket and so reaches an agent in its first moments
        too."""
        self._fleet.carried_out(order, now_s=time.monotonic())
        if isinstance(order, Heat):
            self._tasks.errand(self._heat(order))
        else:
            self._link.kill(order.start_id, _SIGNALS[type(order)])

    async def _heat(self, order: Heat) -> None:
        start = self._fleet.start(order.start_id)
        try:
            if start is not None:
                await localhttp.request(start.agent_socket, "POST", "/heat")
        except OSError:
            # The next reconciliation orders it again, or finds the agent gone.
            self._fleet.not_carried_out(order)

    # ── events ──

    async def _follow(self, start: Start) -> None:
        """Reads an agent's events until it closes the stream, or its process is gone."""
        pause_s = CONNECT_RETRY_S
        while True:
            with contextlib.suppress(OSError):
                async with localhttp.Connection(start.agent_socket) as connection:
                    await connection.send(
                        "GET", f"/events?after={self._heard.get(start.start_id, 0)}", None, None
                    )
                    await connection.head()
                    rest = b""
                    async for chunk in connection.chunks():
                        *lines, rest = (rest + chunk).split(b"\n")
                        for line in lines:
                            await self._hear(start, json.loads(line))
                    return
            if start.start_id in self._gone:
                return
            await asyncio.sleep(pause_s)
            pause_s = min(CONNECT_RETRY_MAX_S, pause_s * 1.2)

    async def _hear(self, start: Start, event: dict[str, Any]) -> None:
        self._heard[start.start_id] = self._heard.get(start.start_id, 0) + 1
        if event["event"] == Event.WEIGHTS_BAD:
            event = await self._with_cache_mended(start, event)
        elif event["event"] == Event.WEIGHTS_VERIFIED:
            self._tasks.errand(self._keep_baseline(start, str(event["sha256"])))
        self._fleet.observe(start.start_id, event, now_s=time.monotonic())
        self._starts.heard(start.start_id, event)
        if start.state not in TERMINAL:
            self._notices.progress(f"  … {start.start_id}: {start.state}")
        self._changed.set()

    async def _with_cache_mended(self, start: Start, event: dict[str, Any]) -> dict[str, Any]:
        """Hashes a cached file again, which may take long, and drops it if it is damaged."""
        try:
            evicted = await asyncio.to_thread(self._driver.weights_were_bad, start.start_id)
        except (OSError, SourceError):
            evicted = False
        return {**event, "advice": EVICTED} if evicted else event

    async def _keep_baseline(self, start: Start, sha256: str) -> None:
        """A local file without a promised hash is held to what it was at its first start."""
        located = self._driver.weights_of(start.start_id)
        if located is None or located.sha256 is not None:
            return
        from preheat.acceleration.weights.baselines import Baselines

        baselines = Baselines(self._paths.state)
        try:
            await asyncio.to_thread(
                baselines.compare_or_record, located.path, sha256, located.size_bytes
            )
        except SourceError as error:
            self._notices.say(f"  ! {error}", event="baseline", start=start.start_id)

    # ── ends ──

    async def ended(self, start_id: str, why: str) -> None:
        """The agent's process ended."""
        self._gone.add(start_id)
        if (follower := self._followers.pop(start_id, None)) is not None:
            # The kernel has closed its socket, so that this ends.
            await asyncio.wait([follower])
        self._gone.discard(start_id)
        start = self._fleet.start(start_id)
        if start is None:
            return
        place = self._fleet.replicas[start_id.rpartition("@")[0]]
        events = await asyncio.to_thread(written_events, self._paths.logs, place.name, start_id)
        for event in events:
            if event["n"] > self._heard.get(start_id, 0):
                await self._hear(start, event)
        self._heard.pop(start_id, None)
        before = place.failure
        advice = f"its last lines are in {self._paths.logs / (place.name + '.log')}"
        self._fleet.agent_gone(start_id, why, now_s=time.monotonic(), advice=advice)
        if place.failure is not before:
            say_failed(self._fleet, place, self._notices, start=start_id)
        self._starts.ended(start, why)
        self._driver.ended(start_id)
        self._changed.set()


def written_events(logs: Path, replica: str, start_id: str) -> list[dict[str, Any]]:
    """What an agent has written of its start; without what a full disk did not take."""
    try:
        with (logs / f"{replica}.events.jsonl").open("rb") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - EVENTS_TAIL_BYTES))
            lines = file.read().splitlines()
    except OSError:
        return []
    events = []
    for line in lines:
        # The first one may be cut, and so may the last of an agent that was killed.
        with contextlib.suppress(ValueError):
            event = json.loads(line)
            if event.get("start_id") == start_id:
                events.append(event)
    return events
