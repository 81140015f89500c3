"""Sentences for people about what the fleet knows.

What does not belong here: where they go (``notices.py``).
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from preheat.controlplane.fleet import Fleet
    from preheat.controlplane.notices import Notices
    from preheat.controlplane.replicas import Replica


def say_failed(fleet: Fleet, place: Replica, notices: Notices, *, start: str = "") -> None:
    """Says the last failure of a replica; not the one with which preheat ends, which is said
    then."""
    failure = place.failure
    if failure is None or fleet.hopeless() is not None:
        return
    given_up = "; it is given up" if place.given_up else ""
    text = f"  ! {place.model.name}: {failure.reason}{given_up}"
    if failure.advice:
        text += f"\n    → {failure.advice}"
    notices.say(text, event="start failed", replica=place.name, start=start, why=str(failure.kind))


def invitation(url: str, fleet: Fleet) -> str:
    """What to do with what is served, in two lines."""
    model = fleet.spec.models[0]
    keyed = " -H 'authorization: Bearer KEY'" if fleet.listener.keys else ""
    body: dict[str, Any] = {"model": model.name}
    if all(v.engine.embeddings for v in model.versions):
        path, body["input"] = "/v1/embeddings", "Hi!"
    else:
        path, body["messages"] = "/v1/chat/completions", [{"role": "user", "content": "Hi!"}]
    # In a shell's single quotes a single quote needs this.
    data = json.dumps(body).replace("'", "'\\''")
    return f"serving on {url}\n  try: curl {url}{path}{keyed} -d '{data}'"
