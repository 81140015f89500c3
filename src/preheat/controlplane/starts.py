"""Follows each start to its first token and keeps its cold-start record.

Nothing here stands between a start and its traffic: a record that cannot be kept, or exported, is
said and forgotten. What does not belong here: what a record holds (``coldstarts.py``).
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from preheat.controlplane import coldstarts
from preheat.controlplane.coldstarts import Trail
from preheat.core import localhttp
from preheat.core.coldstart import ColdStart, Phase
from preheat.core.errors import PreheatError
from preheat.replica.lifecycle import TERMINAL, State

if TYPE_CHECKING:
    from preheat.controlplane.adoption import Adopted
    from preheat.controlplane.common import Common
    from preheat.controlplane.replicas import Replica, Start
    from preheat.dataplane.envoy.routing import RoutingTable

FIRST_TOKEN_TIMEOUT_S = 60.0


class Starts:
    def __init__(self, common: Common, recorded: Callable[[ColdStart], None]) -> None:
        """``recorded`` is told of each start that is ready, once its record is complete."""
        self._fleet = common.fleet
        self._paths = common.paths
        self._notices = common.notices
        self._tasks = common.tasks
        self._recorded = recorded
        self._trails: dict[str, Trail] = {}
        self.last: dict[str, ColdStart] = {}
        """The last complete record of each replica."""

    def begun(self, start_id: str, spawned_s: float, before: Sequence[Phase]) -> None:
        self._trails[start_id] = Trail(spawned_s, tuple(before))

    def adopt(self, all_adopted: Sequence[Adopted]) -> None:
        """Starts of another control plane: those that it has not seen to their first token are
        followed to theirs, and the records of the others are found. Reads files."""
        from preheat.core.traces import store

        found: Sequence[store.StoredRecord] = ()
        with contextlib.suppress(OSError):
            found, _ = store.read_records(self._paths.coldstarts)
        records = {entry.record.start_id: entry.record for entry in found}
        for start, events in ((one.start, one.events) for one in all_adopted):
            if (record := records.get(start.start_id)) is not None:
                self.last[self._replica_of(start).name] = record
            elif events and start.state not in TERMINAL:
                self.begun(start.start_id, float(events[0]["monotonic_s"]), ())
                for event in events:
                    self.heard(start.start_id, event)

    def heard(self, start_id: str, event: dict[str, Any]) -> None:
        """An event of its agent."""
        if (trail := self._trails.get(start_id)) is None:
            return
        trail.states.append((float(event["monotonic_s"]), str(event["state"])))
        if event["state"] == State.READY:
            trail.agent = coldstarts.phases_from(event)
            trail.proven_s = time.monotonic()

    def published(self, table: RoutingTable, acknowledged_s: float) -> None:
        """Envoy routes by this table now."""
        for start_id in _serving(table) & self._trails.keys():
            start = self._fleet.start(start_id)
            if start is not None and self._trails[start_id].proven_s is not None:
                trail = self._trails.pop(start_id)
                self._tasks.errand(self._complete(start, trail, acknowledged_s))

    def ended(self, start: Start, why: str) -> None:
        """Its agent is gone. One that never served leaves a record too, unless it was told to
        end."""
        trail = self._trails.pop(start.start_id, None)
        if trail is None or start.state is State.STOPPED or self._fleet.ending:
            return
        outcome = start.reason if start.state in TERMINAL and start.reason else why
        record = coldstarts.failed(
            start,
            self._replica_of(start),
            trail,
            outcome=outcome,
            ended_s=time.monotonic(),
            unix_offset_s=time.time() - time.monotonic(),
        )
        self._tasks.errand(self._write(record))

    def _replica_of(self, start: Start) -> Replica:
        return self._fleet.replicas[start.start_id.rpartition("@")[0]]

    async def _complete(self, start: Start, trail: Trail, published_s: float) -> None:
        replica = self._replica_of(start)
        first_s = await self._first_token_s(start.start_id, replica)
        proven_s = published_s if trail.proven_s is None else trail.proven_s
        after = [Phase(name="publish", start_s=proven_s, end_s=max(proven_s, published_s))]
        if first_s is not None:
            after.append(Phase(name="first token", start_s=published_s, end_s=first_s))
        record = coldstarts.assemble(
            start,
            replica,
            trail,
            after=after,
            ready_s=published_s,
            first_token_s=first_s,
            unix_offset_s=time.time() - time.monotonic(),
        )
        self.last[replica.name] = record
        self._say_ready(record)
        self._recorded(record)
        await self._write(record)
        await self._export(record)

    def _say_ready(self, record: ColdStart) -> None:
        took = record.time_to_first_token_s
        shown = f"first token after {took:.2f} s" if took is not None else "no first token came"
        self._notices.say(
            f"  ✓ {record.model} is proven hot ({record.start_id}, {shown})",
            event="ready",
            start=record.start_id,
            model=record.model,
            time_to_first_token_s=took,
        )

    async def _first_token_s(self, start_id: str, replica: Replica) -> float | None:
        """Sends one small request through the gateway to this start; when its first token came, or
        None when none did."""
        name = replica.model.name
        path, body = "/v1/completions", {"model": name, "prompt": "Hi", "max_tokens": 1}
        if replica.version.engine.embeddings:
            path, body = "/v1/embeddings", {"model": name, "input": "Hi"}
        else:
            body["stream"] = True
        with contextlib.suppress(OSError):
            async with (
                asyncio.timeout(FIRST_TOKEN_TIMEOUT_S),
                localhttp.Connection(self._paths.probe_socket) as connection,
            ):
                await connection.send("POST", path, body, {"x-preheat-pin": start_id})
                head = await connection.head()
                async for _ in connection.chunks():
                    return time.monotonic() if head.status_code == 200 else None
        return None

    async def _write(self, record: ColdStart) -> None:
        """Keeps the record; slower than its like is said."""
        from preheat.core.baseline import slower_than_baseline
        from preheat.core.traces import store

        try:
            store.write_record(record, self._paths.coldstarts)
            earlier, _ = await asyncio.to_thread(store.read_records, self._paths.coldstarts)
            await asyncio.to_thread(store.prune_records, self._paths.coldstarts)
        except OSError as error:
            text = f"  ! the record of {record.start_id} could not be kept: {error}"
            self._notices.say(text, event="record lost", start=record.start_id)
            return
        if (slow := slower_than_baseline(record, [e.record for e in earlier])) is not None:
            text = f"  ! slow start: {slow}"
            self._notices.say(text, event="slow start", start=record.start_id, why=slow)

    async def _export(self, record: ColdStart) -> None:
        """As OpenTelemetry spans, where a collector is configured."""
        from preheat.core.traces import otel

        if not otel.otlp_configured():
            return
        try:
            await asyncio.to_thread(otel.export_otlp, record)
        except (PreheatError, OSError) as error:
            text = f"  ! the spans of {record.start_id} were not exported: {error}"
            self._notices.say(text, event="export failed", start=record.start_id)


def _serving(table: RoutingTable) -> set[str]:
    return {
        endpoint.start_id
        for model in table.models
        for version in model.versions
        for endpoint in version.endpoints
        if endpoint.serving
    }
