"""The life of one start of a replica, as a table.

A start is never revived: what failed or stopped is followed by another start with its own number.
``docs/reference/lifecycle.md`` is generated from the table. What does not belong here: I/O, clocks.
"""

from __future__ import annotations

from enum import StrEnum

from preheat.core.errors import LifecycleError


class State(StrEnum):
    LOADING = "loading"
    """Weights are read and hashed."""
    WARM = "warm"
    """Weights verified and resident; the engine is not started, or waits for them."""
    STARTING = "starting"
    """The engine reads the verified weights."""
    HEATING = "heating"
    """Warm-up prompts run through the engine."""
    PROVING = "proving"
    """The known answer is checked, on the engine and through the gateway."""
    READY = "ready"
    """Proven hot; the only state that takes traffic."""
    DRAINING = "draining"
    """Takes nothing new; finishes what is in flight."""
    STOPPED = "stopped"
    """Over, as somebody ordered."""
    FAILED = "failed"
    """Over, for the reason that its last event gives."""


class Event(StrEnum):
    WEIGHTS_VERIFIED = "weights verified"
    """Every byte is in sealed memory and the hash is the promised one."""
    WEIGHTS_BAD = "weights bad"
    """They could not be read, or are not the promised bytes."""
    HEAT = "heat ordered"
    """By the plan, or by somebody when the plan says to hold at warm."""
    ENGINE_UP = "engine up"
    """The engine says that it has loaded the model."""
    WARMED_UP = "warmed up"
    """All warm-up prompts were answered."""
    PROVEN = "proven"
    """The known answer agrees, on the engine and through the gateway."""
    PROOF_FAILED = "proof failed"
    """An answer is an error, or another one than it should be."""
    ENGINE_EXITED = "engine exited"
    """The engine's process ended, or could not be started."""
    DEADLINE = "deadline passed"
    """``warmup.deadline_s`` is over and the start is not ready."""
    AGENT_BROKEN = "agent broken"
    """The agent cannot go on: no descriptors, no place for its socket."""
    DRAIN = "drain ordered"
    """Stop, but finish what is in flight."""
    DRAINED = "drained"
    """Nothing is in flight any more, or the drain's time is over."""
    STOP = "stop ordered"
    """Stop now."""


_ON_FAULT = {Event.ENGINE_EXITED: State.FAILED, Event.AGENT_BROKEN: State.FAILED}
_IN_TIME = {Event.DEADLINE: State.FAILED}
_ON_ORDER = {Event.DRAIN: State.STOPPED, Event.STOP: State.STOPPED}

INITIAL = State.LOADING

TABLE: dict[State, dict[Event, State]] = {
    State.LOADING: {
        Event.WEIGHTS_VERIFIED: State.WARM,
        Event.WEIGHTS_BAD: State.FAILED,
        **_ON_FAULT,
        **_ON_ORDER,
    },
    State.WARM: {Event.HEAT: State.STARTING, **_ON_FAULT, **_ON_ORDER},
    State.STARTING: {Event.ENGINE_UP: State.HEATING, **_IN_TIME, **_ON_FAULT, **_ON_ORDER},
    State.HEATING: {
        Event.WARMED_UP: State.PROVING,
        Event.PROOF_FAILED: State.FAILED,
        **_IN_TIME,
        **_ON_FAULT,
        **_ON_ORDER,
    },
    State.PROVING: {
        Event.PROVEN: State.READY,
        Event.PROOF_FAILED: State.FAILED,
        **_IN_TIME,
        **_ON_FAULT,
        **_ON_ORDER,
    },
    State.READY: {
        Event.DRAIN: State.DRAINING,
        Event.STOP: State.STOPPED,
        **_ON_FAULT,
    },
    State.DRAINING: {
        Event.DRAINED: State.STOPPED,
        Event.STOP: State.STOPPED,
        **_ON_FAULT,
    },
    State.STOPPED: {},
    State.FAILED: {},
}

TERMINAL = frozenset(state for state, row in TABLE.items() if not row)
ROUTABLE = frozenset({State.HEATING, State.PROVING, State.READY})
"""States in which the gateway may reach the engine: for pinned probes, and in READY for traffic."""


def next_state(state: State, event: Event) -> State:
    """Raises LifecycleError, naming both, for an event that the state does not allow."""
    try:
        return TABLE[state][event]
    except KeyError:
        raise LifecycleError(
            f"a replica that is {state} cannot take the event '{event}'",
            advice=f"allowed here: {', '.join(TABLE[state]) or 'nothing, this state is final'}",
        ) from None
