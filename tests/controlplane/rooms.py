"""The running control plane's parts around a driver and a supervisor that tests play."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import AsyncIterator, Callable, Coroutine
from pathlib import Path
from typing import Any

from tests.controlplane.samples import fleet, one_model

from preheat.acceleration.weights.located import Located, Progress
from preheat.controlplane.agents import Agents
from preheat.controlplane.common import Common
from preheat.controlplane.launches import Launches
from preheat.controlplane.notices import Notices
from preheat.controlplane.replicas import Replica, Start
from preheat.controlplane.starts import Starts
from preheat.controlplane.tasks import Tasks
from preheat.core import localhttp
from preheat.core.coldstart import ColdStart
from preheat.core.paths import Paths
from preheat.core.spec.schema import Spec

PATIENCE_S = 10.0
STATES = {
    "spawned": "loading",
    "weights verified": "warm",
    "weights bad": "failed",
    "heat ordered": "starting",
    "engine up": "heating",
    "warmed up": "proving",
    "proven": "ready",
    "engine exited": "failed",
    "drained": "stopped",
}


class Driver:
    """Launches nothing; a start is what the test makes of it."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.launched: list[str] = []
        self.ended_ids: list[str] = []
        self.error: Exception | None = None
        self.evicts = False
        self.progress: list[Progress] = []
        self.fetching = threading.Event()
        """Set while ``locate`` runs."""
        self.hangs = False
        self._number = 0

    def locate(self, replica: Replica, report: Callable[[Progress], None]) -> Located:
        for progress in self.progress:
            report(progress)
        self.fetching.set()
        while self.hangs:
            report(Progress("downloading", 1, 2))
        if self.error is not None:
            raise self.error
        return Located(Path("/m.gguf"), 1, None, "/m.gguf")

    def launch(self, replica: Replica, located: Located) -> Start:
        self._number += 1
        sockets = self.directory / str(self._number)
        sockets.mkdir()
        start = Start(f"{replica.name}@{self._number}", self._number, sockets, 32)
        self.launched.append(start.start_id)
        return start

    def weights_of(self, start_id: str) -> Located | None:
        return None

    def weights_were_bad(self, start_id: str) -> bool:
        return self.evicts

    def ended(self, start_id: str) -> None:
        self.ended_ids.append(start_id)


class Link:
    def __init__(self) -> None:
        self.killed: list[tuple[str, int]] = []

    def kill(self, name: str, number: int) -> None:
        self.killed.append((name, int(number)))


class House:
    """Made inside the running loop."""

    def __init__(self, directory: Path, spec: Spec | None = None) -> None:
        self.paths = Paths(directory / "run", directory / "state", directory / "cache")
        self.paths.create()
        self.fleet = fleet(spec)
        self.driver, self.link = Driver(directory), Link()
        self.defects: list[BaseException] = []
        self.recorded: list[ColdStart] = []
        self.tasks = Tasks(essential_died=self.defects.append, errand_died=self.defects.append)
        self.common = Common(
            paths=self.paths,
            fleet=self.fleet,
            driver=self.driver,  # type: ignore[arg-type]
            link=self.link,  # type: ignore[arg-type]
            notices=Notices(self.paths.logs, as_json=False),
            tasks=self.tasks,
            changed=asyncio.Event(),
        )
        self.starts = Starts(self.common, self.recorded.append)
        self.agents = Agents(self.common, self.starts)
        self.launches = Launches(self.common, self.agents, self.starts)

    @property
    def place(self) -> Replica:
        return next(iter(self.fleet.replicas.values()))

    async def launch(self) -> Start:
        self.launches.begin(self.place)
        await self.until(lambda: self.place.start is not None)
        assert self.place.start is not None
        return self.place.start

    async def until(self, condition: Callable[[], Any]) -> None:
        async with asyncio.timeout(PATIENCE_S):
            while not condition():  # noqa: ASYNC110 — whatever the test looks at
                await asyncio.sleep(0.001)

    def said(self) -> list[dict[str, Any]]:
        file = self.paths.logs / "preheat.jsonl"
        return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []


class Agent:
    """An agent's socket: streams the events that the test adds."""

    def __init__(self, start: Start) -> None:
        self.start = start
        self.orders: list[str] = []
        self._events: list[bytes] = []
        self._closed = False
        self._changed = asyncio.Condition()
        self._server: asyncio.Server | None = None

    async def listen(self) -> Agent:
        self._server = await localhttp.serve(self.start.agent_socket, self._answer)
        return self

    async def _answer(self, request: localhttp.Request) -> localhttp.Response:
        if request.method == "POST":
            self.orders.append(request.path)
            return localhttp.Response(202, b"{}")
        return localhttp.Response(stream=self._follow(int(request.query["after"])))

    async def _follow(self, after: int) -> AsyncIterator[bytes]:
        while True:
            async with self._changed:
                while not self._closed and len(self._events) <= after:
                    await self._changed.wait()
            for line in self._events[after:]:
                yield line
                after += 1
            if self._closed and after == len(self._events):
                return

    async def tells(self, *names: str, **details: Any) -> None:
        for name in names:
            event = {"event": name, "state": STATES[name], "monotonic_s": 0.0, **details}
            self._events.append(json.dumps({"sha256": "0" * 64, **event}).encode() + b"\n")
        async with self._changed:
            self._changed.notify_all()

    async def closes(self) -> None:
        self._closed = True
        async with self._changed:
            self._changed.notify_all()
        assert self._server is not None
        self._server.close()


Scenario = Callable[[House], Coroutine[Any, Any, None]]


def play_in(directory: Path, scenario: Scenario, **options: Any) -> House:
    """Plays it in a loop of its own, with a spec of these options; nothing may fail silently."""

    async def body() -> House:
        house = House(directory, one_model(**options))
        await scenario(house)
        await house.tasks.cancel()
        assert house.defects == []
        return house

    return asyncio.run(body())
