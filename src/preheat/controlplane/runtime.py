"""The control plane's loop: hears of events, lets the fleet decide, carries out, has it published.

What does not belong here: decisions (``fleet.py``), agents (``agents.py``), Envoy (``gateway.py``,
``routing.py``), records of starts (``starts.py``).
"""

from __future__ import annotations

import asyncio
import contextlib
import datetime as dt
import signal
import time
from typing import TYPE_CHECKING

from preheat.controlplane.agents import Agents
from preheat.controlplane.common import Common
from preheat.controlplane.dependencies import Dependencies
from preheat.controlplane.gateway import NAME as ENVOY
from preheat.controlplane.gateway import Gateway
from preheat.controlplane.launches import Launches
from preheat.controlplane.replicas import Launch
from preheat.controlplane.routing import Routing, log_tail
from preheat.controlplane.saying import invitation
from preheat.controlplane.starts import Starts
from preheat.controlplane.tasks import Tasks
from preheat.core.errors import GatewayError, PreheatError
from preheat.dataplane.envoy.records import RecordStream

if TYPE_CHECKING:
    from preheat.controlplane.boot import Boot
    from preheat.controlplane.metrics import Metrics
    from preheat.core.coldstart import ColdStart

TICK_S = 0.25
HOUSEKEEPING_S = 5.0
# Envoys in a row that died at once while nothing was up yet: the next would die too.
GATEWAY_DEATHS = 3
# Readiness is gone and what comes is still served: so long others have to notice.
LAME_DUCK_S = 1.0
SETTLE_S = 2.0
GATEWAY_END_S = 2.0
# What agents need beside their drain.
AGENTS_END_S = 5.0


def run(control: ControlPlane) -> int:
    """In a loop of its own, whose threads are not waited for at its end."""
    return asyncio.new_event_loop().run_until_complete(control.run())


class ControlPlane:
    def __init__(self, boot: Boot) -> None:
        self.paths = boot.paths
        self.fleet = boot.fleet
        self.gateway = Gateway(boot.paths, boot.link)
        self.records = RecordStream()
        self._boot = boot
        self._link = boot.link
        self._notices = boot.notices
        # Whoever has adopted what serves need not come up.
        self._came_up = bool(boot.adopted) and not boot.fleet.routing_table().missing
        self._failure: PreheatError | None = None
        self._metrics: Metrics | None = None
        self._said: dict[str, str] = {}
        self._changed = asyncio.Event()
        self._stopping = asyncio.Event()
        self._empty = asyncio.Event()
        """Every start has ended as ordered, and no launch is under way."""
        self._gateway_gone = asyncio.Event()
        self._tasks = Tasks(essential_died=self._essential_died, errand_died=self._errand_died)
        common = Common(
            paths=boot.paths,
            fleet=boot.fleet,
            driver=boot.driver,
            link=boot.link,
            notices=boot.notices,
            tasks=self._tasks,
            changed=self._changed,
        )
        self.starts = Starts(common, self._recorded)
        self.routing = Routing(self.paths, self.starts.published, self._refused)
        self._dependencies = Dependencies(boot.fleet, self.routing, self._changed)
        self._agents = Agents(common, self.starts)
        self._launches = Launches(common, self._agents, self.starts)

    @property
    def url(self) -> str:
        listener = self.fleet.listener
        host = f"[{listener.host}]" if ":" in listener.host else listener.host
        return f"{'https' if listener.certificate_pem else 'http'}://{host}:{listener.port}"

    def metrics(self) -> Metrics:
        """Made when first needed: its library is not wanted on the start path."""
        if self._metrics is None:
            from preheat.controlplane.metrics import Metrics

            self._metrics = Metrics(self.fleet, self.records)
        for record in self.records.take():
            self._metrics.count(record)
        return self._metrics

    def order_stop(self) -> None:
        self._stopping.set()

    def order_heat(self, model: str) -> None:
        self.fleet.order_heat(model, now_s=time.monotonic())
        self._changed.set()

    # ── life ──

    async def run(self) -> int:
        """Until it is told to stop, or nothing can be brought up; the exit code."""
        from preheat.controlplane import adoption, api
        from preheat.dataplane.envoy import records

        adoption.keep(self.paths, self.fleet)
        self._begin_gateway()
        loop = asyncio.get_running_loop()
        loop.add_signal_handler(signal.SIGTERM, self.order_stop)
        loop.add_reader(self._link.fileno(), self._hear)
        self._say_alive()
        self._go_on_from_boot()
        pipe = records.RecordPipe(self.paths.records_pipe, self.records)
        server = await api.serve(self)
        self._tasks.essential(self.routing.keep())
        self._tasks.essential(self._steer())
        self._tasks.essential(self._keep_house())
        self._tasks.essential(self._dependencies.keep())
        await self._stopping.wait()
        if self._reachable():
            await self._come_down()
        await self._tasks.cancel()
        server.close()
        pipe.close()
        if self._failure is None:
            return 0
        self._notices.fail(self._failure)
        return self._failure.exit_code

    def _go_on_from_boot(self) -> None:
        boot = self._boot
        phases = boot.recorder.phases
        if boot.adopted:
            self.starts.adopt(boot.adopted)
        for adopted in boot.adopted:
            self._agents.adopt(adopted)
        known = {one.start.start_id for one in boot.adopted}
        for start in (s for s in self.fleet.starts() if s.start_id not in known):
            self.starts.begun(start.start_id, boot.spawned_s, phases)
            self._agents.follow(start)
        for name in boot.to_fetch:
            replica = self.fleet.replicas[name]
            self._launches.begin(replica, spawned_s=boot.spawned_s, before=phases)

    def _begin_gateway(self) -> None:
        if ENVOY in self._boot.running:
            self.gateway.adopt()
        else:
            self.gateway.start()

    def _essential_died(self, error: BaseException) -> None:
        """A loop that died silently would leave a control plane that looks alive and does
        nothing."""
        if isinstance(error, OSError) and not self._reachable():
            error = self._unreachable()
        elif isinstance(error, OSError):
            error = PreheatError(f"the machine refuses what is needed: {error}")
        elif not isinstance(error, PreheatError):
            error = PreheatError(f"a defect of preheat: {error!r}")
        self._fail(error)

    def _reachable(self) -> bool:
        return self.paths.admin_socket.exists()

    def _unreachable(self) -> PreheatError:
        return PreheatError(
            f"the runtime directory {self.paths.runtime} was emptied or removed while preheat ran; "
            "its sockets cannot be reached any more",
            advice="start it again, with PREHEAT_RUNTIME_DIR where nothing cleans up",
        )

    def _errand_died(self, error: BaseException) -> None:
        self._notices.say(f"  ! a defect of preheat: {error!r}", event="defect")

    def _fail(self, error: PreheatError) -> None:
        """What goes wrong once it stops anyway is no failure of its own."""
        if not self._stopping.is_set():
            self._failure = error
            self._stopping.set()

    # ── the loop ──

    async def _steer(self) -> None:
        while True:
            self._carry_out()
            self.routing.want(self.fleet.routing_table())
            if self.fleet.ended():
                self._empty.set()
            self._say_what_waits()
            if (hopeless := self.fleet.hopeless()) is not None and hopeless.failure is not None:
                self._fail(hopeless.failure.error(hopeless.model.name))
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(TICK_S):
                    await self._changed.wait()
            self._changed.clear()

    def _carry_out(self) -> None:
        actions = self.fleet.reconcile(
            now_s=time.monotonic(),
            local_time=dt.datetime.now().astimezone().time(),
            healthy=self._dependencies.healthy,
        )
        for action in actions:
            if isinstance(action, Launch):
                self._launches.begin(self.fleet.replicas[action.replica])
            else:
                self._agents.give(action)

    def _say_what_waits(self) -> None:
        """Once for each reason."""
        for place in self.fleet.replicas.values():
            if place.waiting_for and self._said.get(place.name) != place.waiting_for:
                self._notices.say(
                    f"  … {place.model.name}: {place.waiting_for}",
                    event="waiting",
                    replica=place.name,
                )
            self._said[place.name] = place.waiting_for

    def _refused(self, error: GatewayError) -> None:
        if not self._came_up and self.gateway.alive:
            self._fail(error)
        else:
            self._notices.say(f"  ! {error}", event="publish failed", reason=error.what)

    def _recorded(self, record: ColdStart) -> None:
        if not self._came_up and not self.fleet.routing_table().missing:
            self._came_up = True
            self._notices.say(invitation(self.url, self.fleet), event="serving", url=self.url)
        self.metrics().cold_start(record)

    # ── the supervisor ──

    def _hear(self) -> None:
        try:
            messages = self._link.receive()
        except OSError:
            asyncio.get_running_loop().remove_reader(self._link.fileno())
            self._fail(PreheatError("the supervisor is gone"))
            return
        for message in messages:
            if message.get("order") == "stop":
                self.order_stop()
            elif "question" in message:
                self._say_alive()
            elif "exited" in message:
                self._process_ended(message["exited"], self._explained(message["status"]))
            elif "failed" in message:
                self._process_ended(message["failed"], f"it cannot be run: {message['error']}")

    def _say_alive(self) -> None:
        # A supervisor that is gone is noticed where messages are received.
        with contextlib.suppress(OSError):
            self._link.say_alive()

    def _explained(self, status: int) -> str:
        from preheat.replica.exits import Surroundings, explain

        return explain(status, Surroundings(self._stopping.is_set(), 0, ()))

    def _process_ended(self, name: str, why: str) -> None:
        if name == ENVOY:
            self._tasks.essential(self._gateway_ended(why))
        else:
            self._tasks.essential(self._agents.ended(name, why))

    async def _gateway_ended(self, why: str) -> None:
        pause_s = self.gateway.ended()
        self.routing.forget()
        if self._stopping.is_set():
            self._gateway_gone.set()
            return
        log = self.paths.logs / "envoy.log"
        if not self._came_up and self.gateway.deaths >= GATEWAY_DEATHS:
            said = log_tail(log).rpartition("\n")[2]
            raise GatewayError(
                f"Envoy does not stay up: {why}" + (f"; it said: {said}" if said else ""),
                advice=f"see {log}",
            )
        again = f"starting it again in {pause_s:.1f} s" if pause_s else "starting it again"
        self._notices.say(f"  ! Envoy is gone: {why}; {again}", event="gateway gone", why=why)
        await asyncio.sleep(pause_s)
        if not self._stopping.is_set():
            self.gateway.start()

    # ── beside the loop ──

    async def _keep_house(self) -> None:
        from preheat.controlplane.notices import trim_in_place

        while True:
            await asyncio.sleep(HOUSEKEEPING_S)
            self.metrics()
            for log in self.paths.logs.glob("*.log"):
                with contextlib.suppress(OSError):
                    await asyncio.to_thread(trim_in_place, log)
            if not self._reachable():
                raise self._unreachable()

    # ── down ──

    async def _come_down(self) -> None:
        """Readiness off first, then what is in flight is finished, then agents end; Envoy goes
        last."""
        begun_s = time.monotonic()
        timeout_s = self.fleet.spec.limits.drain_timeout_s
        self._launches.call_off()
        self.fleet.order_stop()
        self._changed.set()
        if self._failure is None:
            self._notices.say("stopping: what is in flight is finished first", event="stopping")
        if self.gateway.alive and self._served():
            self.routing.want(self.fleet.routing_table())
            await self.routing.settled(SETTLE_S)
            await self.routing.discourage()
            await self.routing.idle(min(LAME_DUCK_S, timeout_s))
        self.fleet.order_end()
        self._changed.set()
        await self._all_ended(timeout_s + AGENTS_END_S)
        left_s = timeout_s - (time.monotonic() - begun_s)
        if self.gateway.alive and left_s > 0:
            # Answers that are complete, but not yet with their clients.
            await self.routing.idle(left_s)
        await self._end_gateway()

    def _served(self) -> bool:
        return any(p.was_ready for p in self.fleet.replicas.values())

    async def _all_ended(self, timeout_s: float) -> None:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                await self._empty.wait()

    async def _end_gateway(self) -> None:
        if not self.gateway.alive:
            return
        with contextlib.suppress(OSError, TimeoutError):
            self.gateway.stop()
            async with asyncio.timeout(GATEWAY_END_S):
                await self._gateway_gone.wait()
