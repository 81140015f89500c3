"""When a preload may start: the gate, as a table. Pure, with the time passed in.

Two conditions: the critical dependencies are healthy, and the preload's own time window is open.
What does not belong here: taking traffic, which is another gate (``replica/lifecycle.py``).
"""

from __future__ import annotations

import datetime as dt
from enum import StrEnum

from msgspec import Struct

from preheat.core.spec.schema import Preload


class Decision(StrEnum):
    TRIGGER = "trigger"
    """Start now."""
    WAIT = "wait"
    """Not now; ask again."""
    REFUSE = "refuse"
    """Not while things are so; ask again when a dependency has changed."""
    EXPIRED = "expired"
    """The deadline passed; this preload will not start any more."""


TABLE: dict[tuple[bool, bool], Decision] = {
    # (dependencies healthy, inside its window)
    (True, True): Decision.TRIGGER,
    (True, False): Decision.WAIT,
    (False, True): Decision.REFUSE,
    # Nothing speaks for starting, and refusing is what is safe.
    (False, False): Decision.REFUSE,
}


class Moment(Struct, frozen=True):
    """What the gate looks at."""

    local_time: dt.time
    waited_s: float
    """Seconds since the preload was first asked for."""
    unhealthy: tuple[str, ...]
    """Names of critical dependencies that are not healthy, or not known to be."""


def decide(preload: Preload, moment: Moment) -> tuple[Decision, str]:
    """The decision and its reason in words. The deadline is still inside: at it, a start may
    begin."""
    decision = TABLE[(not moment.unhealthy, in_window(preload, moment.local_time))]
    reason = _reason(decision, preload, moment)
    if preload.deadline_s is not None and moment.waited_s > preload.deadline_s:
        held = "" if decision is Decision.TRIGGER else f"; the last thing missing: {reason}"
        return Decision.EXPIRED, f"it could not start within {preload.deadline_s:g} s{held}"
    return decision, reason


def _reason(decision: Decision, preload: Preload, moment: Moment) -> str:
    if decision is Decision.REFUSE:
        return f"not healthy: {', '.join(moment.unhealthy)}"
    if decision is Decision.WAIT:
        return f"its window is {preload.not_before or '00:00'} to {preload.not_after or '24:00'}"
    return "dependencies are healthy and its window is open"


def in_window(preload: Preload, now: dt.time) -> bool:
    """Whether ``now`` lies in the daily window; the edges belong to it, and one that ends before it
    begins runs over midnight."""
    if preload.not_before is None and preload.not_after is None:
        return True
    begin = _minutes(preload.not_before or "00:00")
    end = _minutes(preload.not_after or "23:59")
    minute = now.hour * 60 + now.minute
    return begin <= minute <= end if begin <= end else minute >= begin or minute <= end


def _minutes(text: str) -> int:
    hours, _, minutes = text.partition(":")
    return int(hours) * 60 + int(minutes)


def markdown() -> str:
    """The table for the reference."""
    rows = [
        f"| {'yes' if healthy else 'no'} | {'yes' if ready else 'no'} | {decision} |"
        for (healthy, ready), decision in TABLE.items()
    ]
    return (
        "\n".join(["| dependencies healthy | window open | decision |", "|---|---|---|", *rows])
        + "\n"
    )
