"""The fleet: the one owner of what should run and what does.

Everybody else tells it what happened and carries out the actions it returns. Synchronous, no I/O,
the time passed in; the routing table is a function of its state. What does not belong here:
processes, sockets, files (``drivers/``), Envoy.
"""

from __future__ import annotations

import datetime as dt
from collections.abc import Iterable, Mapping
from typing import Any

from preheat.controlplane.failures import Failure, Kind, kind_of
from preheat.controlplane.preload import Decision, Moment, decide
from preheat.controlplane.replicas import Action, Heat, Kill, Launch, Order, Replica, Start, Stop
from preheat.core.spec.schema import Dependency, Model, Spec, Version
from preheat.dataplane.envoy.routing import (
    Endpoint,
    Listener,
    ModelRoute,
    RoutingTable,
    VersionRoute,
    cluster_name,
)
from preheat.replica.lifecycle import ROUTABLE, TERMINAL, State

FIRST_BACKOFF_S = 0.5
LONGEST_BACKOFF_S = 30.0
# A start that served so long was sound; its end is no reason to wait before the next.
SOUND_S = 60.0
# A replica that never was ready and failed so often will not become ready by trying again.
ATTEMPTS_BEFORE_GIVING_UP = 3
# What an agent may take from its last event to its end.
TEARDOWN_S = 10.0

_PROGRESS = tuple(State)


def backoff_s(failures: int) -> float:
    """Seconds to wait after so many failures in a row, one or more."""
    return min(LONGEST_BACKOFF_S, FIRST_BACKOFF_S * 2.0 ** min(failures - 1, 16))


class Fleet:
    def __init__(self, spec: Spec, listener: Listener, *, created_unix_s: int = 0) -> None:
        self.spec = spec
        self.listener = listener
        self.replicas: dict[str, Replica] = {}
        self.stopping = False
        """Readiness is taken away and nothing new begins."""
        self.ending = False
        """Every start is to end."""
        self.created_unix_s = created_unix_s

    @classmethod
    def from_spec(cls, spec: Spec, listener: Listener, *, now_s: float, unix_s: float) -> Fleet:
        fleet = cls(spec, listener, created_unix_s=int(unix_s))
        for model in spec.models:
            for version in model.versions:
                slug = cluster_name(model.name, version.name)
                for index in range(version.replicas):
                    name = f"{slug}-{index}"
                    hold_at = version.warmup.strategy
                    fleet.replicas[name] = Replica(
                        name, model, version, hold_at, wanted_since_s=now_s
                    )
        return fleet

    # ── what is there ──

    def starts(self) -> list[Start]:
        return [p.start for p in self.replicas.values() if p.start is not None]

    def start(self, start_id: str) -> Start | None:
        return next((s for s in self.starts() if s.start_id == start_id), None)

    def places(self, model: str) -> list[Replica]:
        return [p for p in self.replicas.values() if p.model.name == model]

    def _holder(self, start_id: str) -> Replica | None:
        places = self.replicas.values()
        return next((p for p in places if p.start and p.start.start_id == start_id), None)

    # ── what happens ──

    def launching(self, replica: str, what: str) -> None:
        """A launch has begun, and does this."""
        place = self.replicas[replica]
        place.busy, place.waiting_for = what, ""

    def launched(self, replica: str, start: Start) -> None:
        """Its agent has been asked for."""
        place = self.replicas[replica]
        place.start, place.busy, place.waiting_for = start, "", ""
        place.max_connections = start.max_connections

    def launch_failed(self, replica: str, failure: Failure, *, now_s: float) -> None:
        """There is no agent and will be none."""
        self.replicas[replica].busy = ""
        self._failed(self.replicas[replica], failure, now_s)

    def launch_abandoned(self, replica: str) -> None:
        """It was called off, because preheat stops."""
        self.replicas[replica].busy = ""

    def observe(self, start_id: str, event: Mapping[str, Any], *, now_s: float) -> None:
        """An event of an agent (``replica/events.py``). One of a start that is gone, or over,
        changes nothing."""
        place = self._holder(start_id)
        if place is None or place.start is None or place.start.state in TERMINAL:
            return
        start = place.start
        start.state = State(event["state"])
        start.last_event = str(event.get("event", ""))
        start.reason = event.get("reason", "") or start.reason
        start.advice = event.get("advice", "") or start.advice
        start.sha256 = event.get("sha256", start.sha256)
        start.bytes_read = event.get("bytes_read", start.bytes_read)
        start.page_cache_share = event.get("page_cache_share", start.page_cache_share)
        if start.state is State.READY and place.ready_since_s is None:
            place.was_ready, place.ready_since_s = True, now_s
        if start.state in TERMINAL:
            start.gone_by_s = now_s + TEARDOWN_S

    def agent_gone(self, start_id: str, why: str, *, now_s: float, advice: str = "") -> None:
        """The agent's process ended: the place is free again. ``why`` counts if it had not said so
        itself."""
        place = self._holder(start_id)
        if place is None or place.start is None:
            return
        start, place.start = place.start, None
        if start.state not in TERMINAL and not {Stop, Kill} & start.ordered:
            text = f"the agent of {start_id} is gone: {why}"
            self._failed(place, Failure(Kind.AGENT_GONE, text, advice), now_s)
        elif start.state is State.FAILED:
            failure = Failure(kind_of(start.last_event), start.reason or why, start.advice)
            self._failed(place, failure, now_s)
        place.ready_since_s = None

    def _failed(self, place: Replica, failure: Failure, now_s: float) -> None:
        sound = place.ready_since_s is not None and now_s - place.ready_since_s >= SOUND_S
        place.failures = 1 if sound else place.failures + 1
        place.failure = failure
        place.not_before_s = now_s if sound else now_s + backoff_s(place.failures)
        place.wanted_since_s = place.not_before_s
        if not place.was_ready:
            place.given_up = failure.hopeless or place.failures >= ATTEMPTS_BEFORE_GIVING_UP

    def order_heat(self, model: str, *, now_s: float) -> None:
        """Wants every replica of the model hot, also those that had been given up."""
        for place in self.places(model):
            place.hold_at = "hot"
            if place.given_up:
                place.given_up, place.failures, place.not_before_s = False, 0, now_s
            if place.start is None:
                place.wanted_since_s = now_s

    def order_stop(self) -> None:
        """From now on nobody should be sent here; what serves goes on serving."""
        self.stopping = True

    def order_end(self) -> None:
        """Every start is to drain and end."""
        self.stopping = self.ending = True

    # ── what to do ──

    def reconcile(
        self, *, now_s: float, local_time: dt.time, healthy: frozenset[Dependency]
    ) -> list[Action]:
        """Actions that bring what runs nearer to what should. The same again, as long as nobody
        says that something happened."""
        actions: list[Action] = []
        for place in self.replicas.values():
            if place.start is not None:
                actions += self._orders(place, place.start, now_s)
            elif (
                not (self.stopping or place.busy or place.given_up)
                and now_s >= place.not_before_s
                and self._gate_opens(place, now_s, local_time, healthy)
            ):
                actions.append(Launch(place.name))
        return actions

    def _orders(self, place: Replica, start: Start, now_s: float) -> list[Order]:
        over = start.state in TERMINAL
        waits = start.state is State.WARM and start.hold_at == "warm"
        wanted: list[Order] = []
        if self.ending and not over:
            wanted.append(Stop(start.start_id))
        elif waits and place.hold_at == "hot" and not self.stopping:
            wanted.append(Heat(start.start_id))
        if start.gone_by_s is not None and now_s > start.gone_by_s:
            wanted.append(Kill(start.start_id))
        return [order for order in wanted if type(order) not in start.ordered]

    def carried_out(self, order: Order, *, now_s: float) -> None:
        """The start has been told."""
        if (start := self.start(order.start_id)) is not None:
            start.ordered.add(type(order))
            if isinstance(order, Stop) and start.gone_by_s is None:
                start.gone_by_s = now_s + self.spec.limits.drain_timeout_s + TEARDOWN_S

    def not_carried_out(self, order: Order) -> None:
        """The start could not be told after all."""
        if (start := self.start(order.start_id)) is not None:
            start.ordered.discard(type(order))

    def _gate_opens(
        self, place: Replica, now_s: float, local_time: dt.time, healthy: frozenset[Dependency]
    ) -> bool:
        if place.hold_at == "cold":
            place.waiting_for = f"kept cold; `preheat models heat {place.model.name}` starts it"
            return False
        # The gate is for preloads. What has served already comes back at once.
        if place.was_ready:
            return True
        preload = place.version.preload
        unhealthy = tuple(d.name for d in preload.critical_dependencies if d not in healthy)
        moment = Moment(local_time, now_s - place.wanted_since_s, unhealthy)
        decision, why = decide(preload, moment)
        place.waiting_for = "" if decision is Decision.TRIGGER else f"its preload waits: {why}"
        if decision is Decision.EXPIRED:
            place.given_up = True
            place.failure = Failure(Kind.PRELOAD_EXPIRED, why)
        return decision is Decision.TRIGGER

    def dependencies_in_question(self) -> frozenset[Dependency]:
        """Those that a preload which has not begun waits for, or will."""
        return frozenset(
            dependency
            for place in self.replicas.values()
            if not (place.start or place.busy or place.given_up or place.was_ready)
            and place.hold_at != "cold"
            for dependency in place.version.preload.critical_dependencies
        )

    def hopeless(self) -> Replica | None:
        """A replica that was given up, if nothing serves and nothing else is on its way."""
        places = list(self.replicas.values())
        if any(not (p.given_up or p.held_back) for p in places):
            return None
        return next((p for p in places if p.given_up), None)

    def ended(self) -> bool:
        """Whether everything is over, as ordered."""
        return self.ending and not any(p.start or p.busy for p in self.replicas.values())

    # ── what the gateway should do ──

    def routing_table(self) -> RoutingTable:
        models = tuple(self._route(model) for model in self.spec.models)
        return RoutingTable(self.listener, models, self._missing(models))

    def _route(self, model: Model) -> ModelRoute:
        return ModelRoute(
            name=model.name,
            versions=tuple(self._version_route(model, version) for version in model.versions),
            embeddings=all(v.engine.embeddings for v in model.versions),
            created_unix_s=self.created_unix_s,
        )

    def _version_route(self, model: Model, version: Version) -> VersionRoute:
        places = [p for p in self.places(model.name) if p.version.name == version.name]
        starts = [p.start for p in places if p.start is not None]
        return VersionRoute(
            name=version.name,
            share=version.traffic_share,
            endpoints=tuple(_endpoint(s) for s in starts if s.state in ROUTABLE),
            max_connections=sum(p.max_connections for p in places) or 1,
        )

    def _missing(self, models: Iterable[ModelRoute]) -> tuple[str, ...]:
        if self.stopping:
            return ("preheat is stopping",)
        return tuple(
            f"{m.name}: {why_not_ready(self.places(m.name))}" for m in models if m.state != "ready"
        )


def _endpoint(start: Start) -> Endpoint:
    return Endpoint(
        start_id=start.start_id,
        engine_socket=start.engine_socket,
        health_socket=start.agent_socket,
        serving=start.state is State.READY,
    )


def state_of(places: Iterable[Replica]) -> str:
    """A model's state in one word: how far its furthest replica is."""
    place = _furthest(places)
    if place is None:
        return "none"
    if place.start is not None:
        return str(place.start.state)
    if place.given_up:
        return "failed"
    if place.busy:
        return "fetching"
    return "cold" if place.held_back else "waiting"


def why_not_ready(places: Iterable[Replica]) -> str:
    """What stands between a model and its first ready replica, in words."""
    place = _furthest(places)
    if place is None:
        return "it has no replicas"
    if place.start is not None:
        text = f"{place.start.start_id} is {place.start.state}"
        heat = f"; `preheat models heat {place.model.name}` brings it up"
        return text + heat if place.held_back else text
    failure = place.failure.reason if place.failure else ""
    if place.given_up:
        return f"given up: {failure}"
    if failure and not (place.busy or place.waiting_for):
        return f"another attempt follows: {failure}"
    return place.busy or place.waiting_for or "its first start is about to begin"


def _furthest(places: Iterable[Replica]) -> Replica | None:
    def progress(place: Replica) -> tuple[int, bool, bool]:
        start = place.start
        alive = start is not None and start.state not in TERMINAL
        reached = _PROGRESS.index(start.state) if alive and start else -1
        return reached, bool(place.busy), not place.given_up

    return max(places, key=progress, default=None)
