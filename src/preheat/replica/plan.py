"""What an agent is told: one start of one replica, as a JSON file.

The agent reads it with ``json`` alone, before anything else is imported, and again typed.
"""

from __future__ import annotations

from typing import Literal

from msgspec import Struct

from preheat.core.spec.schema import Warmup
from preheat.replica.engines.plan import LaunchPlan


class WeightsPlan(Struct, frozen=True, kw_only=True):
    path: str
    size_bytes: int
    sha256: str | None = None
    """None: whatever it is, the control plane compares it with the first start's."""


class ReplicaPlan(Struct, frozen=True, kw_only=True):
    replica: str
    start_id: str
    """``REPLICA@NUMBER``."""
    model: str
    version: str
    weights: WeightsPlan
    launch: LaunchPlan
    warmup: Warmup
    hold_at: Literal["warm", "hot"]
    """Temperature to reach by itself; from ``warm`` it goes on when it is told to."""
    agent_socket: str
    probe_socket: str
    """Envoy's private listener."""
    answers: str
    """Directory of recorded answers."""
    events: str
    """File that each event is appended to, one JSON object per line."""
    gateway_workers: int
    """Workers of the gateway, each of which opens connections of its own."""
    drain_timeout_s: float
