"""Asks critical dependencies whether they are healthy.

What does not belong here: what follows from it (``preload.py``).
"""

from __future__ import annotations

import asyncio
import contextlib
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

if TYPE_CHECKING:
    from preheat.controlplane.fleet import Fleet
    from preheat.controlplane.routing import Routing
    from preheat.core.spec.schema import Dependency

INTERVAL_S = 1.0
STATUS_LINE_MAX_BYTES = 4096


class Dependencies:
    """Keeps which of them are healthy. None is until it has been asked."""

    def __init__(self, fleet: Fleet, routing: Routing, changed: asyncio.Event) -> None:
        self._fleet = fleet
        self._routing = routing
        self._changed = changed
        self._healthy: set[Dependency] = set()

    @property
    def healthy(self) -> frozenset[Dependency]:
        return frozenset(self._healthy)

    async def keep(self) -> None:
        """Asks each of them once in a while, as long as a preload waits for it; for ever."""
        versions = [v for model in self._fleet.spec.models for v in model.versions]
        critical = {d for v in versions for d in v.preload.critical_dependencies}
        # Each in its own time: one that hangs must not hide that another is up.
        await asyncio.gather(*(self._watch(dependency) for dependency in critical))

    async def _watch(self, dependency: Dependency) -> None:
        while True:
            if dependency in self._fleet.dependencies_in_question():
                if await is_healthy(dependency, self._routing):
                    self._healthy.add(dependency)
                else:
                    self._healthy.discard(dependency)
                self._changed.set()
            await asyncio.sleep(INTERVAL_S)


async def is_healthy(dependency: Dependency, routing: Routing) -> bool:
    """Whether it answers a GET with 2xx in its time; redirects are not followed. One without a URL
    is preheat's own Envoy, healthy when it has taken a routing table."""
    if dependency.url is None:
        return routing.published is not None
    # Whoever answers with something else than HTTP is not healthy either.
    with contextlib.suppress(OSError, ValueError, IndexError):
        async with asyncio.timeout(dependency.timeout_s):
            return 200 <= await _status(dependency.url) < 300
    return False


async def _status(url: str) -> int:
    """The status of a GET. Raises OSError, and ValueError or IndexError for what is no HTTP."""
    parts = urlsplit(url)
    target = (parts.path or "/") + (f"?{parts.query}" if parts.query else "")
    host = parts.netloc.rpartition("@")[2]
    head = f"GET {target} HTTP/1.1\r\nHost: {host}\r\nConnection: close\r\n\r\n"
    reader, writer = await asyncio.open_connection(parts.hostname, parts.port or 80)
    try:
        writer.write(head.encode("ascii"))
        line = await reader.readline()
        protocol, _, rest = line[:STATUS_LINE_MAX_BYTES].decode("latin-1").partition(" ")
        if not protocol.startswith("HTTP/1."):
            raise ValueError(f"{url} does not speak HTTP")
        return int(rest.split()[0])
    finally:
        writer.close()
