"""Tasks that run beside the loop, and what becomes of one that dies.

What does not belong here: what they do.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

Died = Callable[[BaseException], None]


class Tasks:
    """``essential`` ones are the control plane's life; ``errand`` ones are done when they are
    done."""

    def __init__(self, *, essential_died: Died, errand_died: Died) -> None:
        self._essential_died = essential_died
        self._errand_died = errand_died
        self._running: set[asyncio.Task[None]] = set()

    def essential(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        return self._run(work, self._essential_died)

    def errand(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        return self._run(work, self._errand_died)

    def _run(self, work: Coroutine[Any, Any, None], died: Died) -> asyncio.Task[None]:
        task = asyncio.ensure_future(work)
        # The loop itself holds tasks weakly.
        self._running.add(task)
        task.add_done_callback(lambda done: self._done(done, died))
        return task

    def _done(self, task: asyncio.Task[None], died: Died) -> None:
        self._running.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            died(error)

    async def cancel(self) -> None:
        """Ends all of them."""
        running = list(self._running)
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)
