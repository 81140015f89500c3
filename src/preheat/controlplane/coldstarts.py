"""Makes the cold-start record of a start from what the processes noted. Pure.

What does not belong here: collecting the notes, timing the first token, files (``starts.py``).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec

from preheat.controlplane.replicas import Replica, Start
from preheat.core.coldstart import MAIN, ColdStart, Phase

# Shorter gaps between phases are the clock's grain, not somewhere time went.
GAP_S = 20e-6
HELD = "held"
"""An agent's phase: the weights were resident and nobody wanted more."""


@dataclass(slots=True)
class Trail:
    """What is known of a start while it comes up. Times are readings of CLOCK_MONOTONIC."""

    spawned_s: float
    before: tuple[Phase, ...]
    """Phases up to the agent's launch."""
    states: list[tuple[float, str]] = field(default_factory=list)
    """When the agent came to which state."""
    agent: tuple[Phase, ...] = ()
    """Its phases, known once it is proven."""
    proven_s: float | None = None
    """When the control plane heard that it is proven."""


def phases_from(event: dict[str, Any]) -> tuple[Phase, ...]:
    """The phases that an agent sent with its ``proven`` event."""
    return msgspec.convert(event.get("phases", []), tuple[Phase, ...])


def assemble(
    start: Start,
    replica: Replica,
    trail: Trail,
    *,
    after: Sequence[Phase],
    ready_s: float,
    first_token_s: float | None,
    unix_offset_s: float,
) -> ColdStart:
    """The record of a start that is ready. ``after`` are the phases from its proof on; the wall
    clock is ``unix_offset_s`` ahead of the monotonic one.

    One that was held warm counts from the order to heat it: what it waited was nobody's loss.
    """
    parts = (trail.before, trail.agent, after)
    held_until_s = max((p.end_s for p in trail.agent if p.name == HELD), default=None)
    spawned_s = trail.spawned_s
    if held_until_s is not None:
        spawned_s = held_until_s
        parts = ((), tuple(p for p in trail.agent if p.start_s >= held_until_s), after)
    was_held = held_until_s is not None
    return ColdStart(
        start_id=start.start_id,
        model=replica.model.name,
        version=replica.version.name,
        engine=replica.version.engine.kind,
        unix_time_s=unix_offset_s + spawned_s,
        spawned_s=spawned_s,
        ready_s=ready_s,
        first_token_s=first_token_s,
        bytes_read=0 if was_held else start.bytes_read,
        page_cache_share=None if was_held else start.page_cache_share,
        phases=_complete(parts, spawned_s, first_token_s),
    )


def failed(
    start: Start,
    replica: Replica,
    trail: Trail,
    *,
    outcome: str,
    ended_s: float,
    unix_offset_s: float,
) -> ColdStart:
    """The record of a start that never was ready: how long it was in which state."""
    moments = [at_s for at_s, _ in trail.states[1:]] + [ended_s]
    states = [
        Phase(name=state, start_s=at_s, end_s=max(at_s, until_s))
        for (at_s, state), until_s in zip(trail.states, moments, strict=False)
    ]
    return ColdStart(
        start_id=start.start_id,
        model=replica.model.name,
        version=replica.version.name,
        engine=replica.version.engine.kind,
        unix_time_s=unix_offset_s + trail.spawned_s,
        spawned_s=trail.spawned_s,
        outcome=outcome,
        bytes_read=start.bytes_read,
        page_cache_share=start.page_cache_share,
        phases=_complete((trail.before, states), trail.spawned_s, None),
    )


def _complete(
    parts: Sequence[Sequence[Phase]], spawned_s: float, first_token_s: float | None
) -> tuple[Phase, ...]:
    """The parts one after the other on the main track, and phases for the time between."""
    limits_s = [min((p.start_s for p in part if p.track == MAIN), default=None) for part in parts]
    phases: list[Phase] = []
    for index, part in enumerate(parts):
        # One process may still be busy when the next one has begun; from then on that is the path.
        limit_s = min((s for s in limits_s[index + 1 :] if s is not None), default=None)
        phases += part if limit_s is None else _until(part, limit_s)
    gaps = _gaps(phases, spawned_s, first_token_s)
    return tuple(sorted((*phases, *gaps), key=lambda p: (p.start_s, -p.end_s)))


def _until(phases: Sequence[Phase], limit_s: float) -> list[Phase]:
    """The phases, cut where the main track goes on elsewhere."""
    return [
        p if p.track != MAIN or p.end_s <= limit_s else msgspec.structs.replace(p, end_s=limit_s)
        for p in phases
        if p.track != MAIN or p.start_s < limit_s
    ]


def _gaps(phases: Sequence[Phase], spawned_s: float, first_token_s: float | None) -> list[Phase]:
    """The time between top-level phases of the main track: ``agent`` before the weights (its
    process and first imports), else ``wait …``."""
    outer = sorted(
        (p for p in phases if p.track == MAIN and "." not in p.name),
        key=lambda p: (p.start_s, -p.end_s),
    )
    moments = [(p.name, p.start_s, p.end_s) for p in outer]
    if first_token_s is not None:
        moments.append(("first token", first_token_s, first_token_s))
    gaps = []
    before, reached_s = "", spawned_s
    for name, start_s, end_s in moments:
        if start_s - reached_s > GAP_S:
            waited = f"wait after {before}" if before else f"wait for {name}"
            if name in ("weights", "loading"):
                waited = "agent"
            gaps.append(Phase(name=waited, start_s=reached_s, end_s=start_s))
        if end_s >= reached_s:
            before, reached_s = name, end_s
    return gaps
