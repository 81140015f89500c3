"""What the fleet holds and what it asks for: places, their starts, actions.

Values that only the fleet writes; Structs, since they stand on the start path and a dataclass takes
a millisecond to make. What does not belong here: deciding (``fleet.py``).
"""

from __future__ import annotations

from pathlib import Path

from msgspec import Struct

from preheat.controlplane.failures import Failure
from preheat.core.spec.schema import Model, Version
from preheat.replica.lifecycle import INITIAL, State


class Launch(Struct, frozen=True):
    """Begin a start of this replica."""

    replica: str


class Heat(Struct, frozen=True):
    """Tell this start, which waits with its weights resident, to go on."""

    start_id: str


class Stop(Struct, frozen=True):
    """Drain this start and end it."""

    start_id: str


class Kill(Struct, frozen=True):
    """End this start's agent, which should have been gone by now."""

    start_id: str


Order = Heat | Stop | Kill
Action = Launch | Order


class Start(Struct):
    """One start of a replica, as last heard of."""

    start_id: str
    number: int
    sockets: Path
    """Directory of its sockets."""
    max_connections: int
    hold_at: str = "hot"
    """Temperature to which it goes by itself."""
    state: State = INITIAL
    reason: str = ""
    advice: str = ""
    last_event: str = ""
    sha256: str = ""
    bytes_read: int = 0
    page_cache_share: float | None = None
    ordered: set[type[Order]] = set()
    """What it has been told already."""
    gone_by_s: float | None = None
    """When its agent must have ended; None as long as nothing ends it."""

    @property
    def engine_socket(self) -> Path:
        return self.sockets / "engine.sock"

    @property
    def agent_socket(self) -> Path:
        return self.sockets / "agent.sock"


class Replica(Struct):
    """A place that a start should fill."""

    name: str
    model: Model
    version: Version
    hold_at: str
    """Temperature at which it is kept."""
    start: Start | None = None
    busy: str = ""
    """What a launch that has begun does before its agent exists (fetching), in words."""
    waiting_for: str = ""
    """Why no start is under way, in words."""
    wanted_since_s: float = 0.0
    not_before_s: float = 0.0
    failures: int = 0
    """In a row."""
    failure: Failure | None = None
    """The last one."""
    given_up: bool = False
    was_ready: bool = False
    ready_since_s: float | None = None
    max_connections: int = 0
    """Of its last start; the gateway's limit must not jump while it is replaced."""

    @property
    def held_back(self) -> bool:
        """Whether it is as far as it goes by itself without being ready."""
        if self.start is None:
            return self.hold_at == "cold" and not self.busy
        return self.hold_at == "warm" and self.start.state is State.WARM
