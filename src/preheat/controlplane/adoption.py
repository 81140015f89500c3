"""What a control plane leaves for the one after it, and how that one takes over what runs.

Agents and Envoy outlive a control plane that dies. The next one gets their names from the
supervisor, the spec from a file here, each agent's plan from its directory, and what became of each
start from the events that its agent has written.
What does not belong here: deciding what to do with it (``fleet.py``), Envoy's files
(``dataplane/envoy/publish.py``).
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any

import msgspec

from preheat.controlplane.agents import written_events
from preheat.controlplane.drivers.local import LocalDriver
from preheat.controlplane.fleet import Fleet
from preheat.controlplane.replicas import Start
from preheat.core.paths import Paths
from preheat.core.spec.schema import Spec
from preheat.dataplane.envoy.routing import Listener
from preheat.replica.plan import ReplicaPlan


class Kept(msgspec.Struct, frozen=True, kw_only=True):
    """What cannot be found out again: the spec, and keys and certificates that it names, may have
    changed since."""

    spec: Spec
    listener: Listener
    created_unix_s: int


class Adopted(msgspec.Struct, frozen=True):
    """A start that went on, and what its agent had written of it by then."""

    start: Start
    events: tuple[dict[str, Any], ...]


def keep(paths: Paths, fleet: Fleet) -> None:
    """Raises OSError."""
    kept = Kept(spec=fleet.spec, listener=fleet.listener, created_unix_s=fleet.created_unix_s)
    temporary = paths.kept.with_suffix(".tmp")
    # Keys stand inside, as in Envoy's files.
    descriptor = os.open(temporary, os.O_CREAT | os.O_TRUNC | os.O_WRONLY, 0o600)
    with os.fdopen(descriptor, "wb") as file:
        file.write(msgspec.json.encode(kept))
    temporary.rename(paths.kept)


def kept(paths: Paths) -> Kept | None:
    """None if the one before died before it had written it."""
    try:
        return msgspec.json.decode(paths.kept.read_bytes(), type=Kept)
    except (OSError, msgspec.DecodeError):
        return None


def adopt(
    running: Collection[str], fleet: Fleet, driver: LocalDriver, paths: Paths, *, now_s: float
) -> tuple[list[Adopted], list[str]]:
    """Puts what runs into its places. Returns those starts, and the names of agents for which there
    is no place. Directories of agents that do not run are removed."""
    adopted: list[Adopted] = []
    surplus: list[str] = []
    for directory, plan in sorted(_plans(paths), key=lambda found: -_number(found[1].start_id)):
        place = fleet.replicas.get(plan.replica)
        if plan.start_id not in running:
            shutil.rmtree(directory, ignore_errors=True)
        elif place is None or place.start is not None:
            surplus.append(plan.start_id)
        else:
            start = Start(
                plan.start_id,
                _number(plan.start_id),
                directory,
                max_connections=plan.launch.max_connections,
                hold_at=plan.hold_at,
            )
            driver.adopt(place, start)
            fleet.launched(place.name, start)
            events = tuple(_without_gaps(written_events(paths.logs, place.name, plan.start_id)))
            for event in events:
                fleet.observe(plan.start_id, event, now_s=now_s)
            adopted.append(Adopted(start, events))
    return adopted, surplus


def _plans(paths: Paths) -> Iterator[tuple[Path, ReplicaPlan]]:
    for file in paths.runtime.glob("r/*/plan.json"):
        try:
            yield file.parent, msgspec.json.decode(file.read_bytes(), type=ReplicaPlan)
        except (OSError, msgspec.DecodeError):
            # Its control plane died while it wrote this; no agent was asked for.
            shutil.rmtree(file.parent, ignore_errors=True)


def _number(start_id: str) -> int:
    return int(start_id.rpartition("@")[2])


def _without_gaps(events: list[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """Those from the first one on; what a full disk did not take is asked of the agent."""
    for number, event in enumerate(events, start=1):
        if event["n"] != number:
            return
        yield event
