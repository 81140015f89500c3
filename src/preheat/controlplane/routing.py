"""Keeps what Envoy does equal to what is wanted, and drains it. The only one that publishes.

One task writes, so that an older routing table can never overtake a newer one.
What does not belong here: making the table (``fleet.py``), Envoy's process (``gateway.py``).
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable
from pathlib import Path

from preheat.core import localhttp
from preheat.core.errors import GatewayError
from preheat.core.paths import Paths
from preheat.dataplane.envoy.publish import Publisher
from preheat.dataplane.envoy.resources import resources
from preheat.dataplane.envoy.routing import RoutingTable

RETRY_S = 1.0
DRAIN_LOOK_S = 0.02
LOG_TAIL_BYTES = 8192
_ACTIVE = "http.public.downstream_rq_active"

Published = Callable[[RoutingTable, float], None]
"""Called with a table and when Envoy had acknowledged it (CLOCK_MONOTONIC)."""


class Routing:
    def __init__(
        self, paths: Paths, published: Published, refused: Callable[[GatewayError], None]
    ) -> None:
        """``refused`` is told why Envoy did not take a table; the same table is then tried
        again."""
        self._paths = paths
        self._on_published = published
        self._on_refused = refused
        self._publisher = Publisher(paths, log_tail=lambda: log_tail(paths.logs / "envoy.log"))
        self._wanted: RoutingTable | None = None
        self._generation = 0
        self._news = asyncio.Event()
        self._settled = asyncio.Event()
        self.published: RoutingTable | None = None
        """What the Envoy that runs now has acknowledged last."""

    def want(self, table: RoutingTable) -> None:
        if table != self._wanted:
            self._wanted = table
            self._settled.clear()
            self._news.set()

    def forget(self) -> None:
        """There is no Envoy any more that has acknowledged anything."""
        self._generation += 1
        self._publisher.forget()
        self.published = None
        self._settled.clear()
        self._news.set()

    async def settled(self, timeout_s: float) -> bool:
        """Whether what is wanted was published within that time."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                await self._settled.wait()
        return self._settled.is_set()

    async def keep(self) -> None:
        """Publishes whatever is wanted, for ever."""
        while True:
            await self._news.wait()
            self._news.clear()
            table, generation = self._wanted, self._generation
            if table is None or table == self.published:
                self._settled.set()
                continue
            try:
                await self._publisher.publish(resources(table, self._paths))
            except GatewayError as error:
                self._on_refused(error)
                await asyncio.sleep(RETRY_S)
                self._news.set()
                continue
            if generation != self._generation:
                # It was in part another Envoy's acknowledgement.
                self._news.set()
                continue
            self.published = table
            if table == self._wanted:
                self._settled.set()
            self._on_published(table, time.monotonic())

    async def discourage(self) -> None:
        """From now on each answer asks its client to close the connection."""
        with contextlib.suppress(OSError):
            await localhttp.request(self._paths.envoy_admin_socket, "POST", "/healthcheck/fail")

    async def idle(self, timeout_s: float) -> bool:
        """Whether no request was in flight at some moment within that time; also if Envoy is
        gone."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                while await self._active():  # noqa: ASYNC110 — it is another process's state
                    await asyncio.sleep(DRAIN_LOOK_S)
                return True
        return False

    async def _active(self) -> bool:
        target = f"/stats?filter=^{_ACTIVE}$&format=text"
        try:
            answer = await localhttp.request(self._paths.envoy_admin_socket, "GET", target)
        except OSError:
            return False
        text = answer.body.decode(errors="replace").strip()
        return bool(text) and not text.endswith(": 0")


def log_tail(log: Path) -> str:
    """The last lines in which Envoy complains."""
    try:
        with log.open("rb") as file:
            file.seek(max(0, log.stat().st_size - LOG_TAIL_BYTES))
            lines = file.read().decode(errors="replace").splitlines()
    except OSError:
        return ""
    telling = [line for line in lines if _complains(line.lower())]
    return "\n".join(telling[-3:])


def _complains(line: str) -> bool:
    return any(word in line for word in ("reject", "[critical]", "error"))
