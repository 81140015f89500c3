"""The routing table: what the gateway should do, as one value.

The control plane makes it, ``resources.py`` turns it into Envoy's dicts. Nothing here knows Envoy.
"""

from __future__ import annotations

import hashlib
import re
from dataclasses import dataclass, field
from pathlib import Path


@dataclass(frozen=True, slots=True)
class Endpoint:
    """One start of one replica that the gateway may know about."""

    start_id: str
    """``REPLICA@NUMBER``; the value of ``x-preheat-replica``."""
    engine_socket: Path
    """Unix socket of this start's OpenAI server; never reused by another start."""
    health_socket: Path
    """Unix socket of the agent, which answers ``/routable``."""
    serving: bool
    """False while it proves itself: only pinned probes reach it."""


@dataclass(frozen=True, slots=True)
class VersionRoute:
    name: str
    share: int
    """Per cent of the model's traffic."""
    endpoints: tuple[Endpoint, ...]
    max_connections: int
    """Connections the engine can hold at once; further requests wait in the gateway."""


@dataclass(frozen=True, slots=True)
class ModelRoute:
    name: str
    versions: tuple[VersionRoute, ...]
    embeddings: bool = False
    created_unix_s: int = 0

    @property
    def state(self) -> str:
        """``ready`` when a serving endpoint takes its traffic, else ``loading``."""
        return "ready" if any(v.share and serving(v) for v in self.versions) else "loading"


@dataclass(frozen=True, slots=True)
class Key:
    owner: str
    secret: str = field(repr=False)


@dataclass(frozen=True, slots=True)
class Listener:
    host: str
    port: int
    certificate_pem: str = ""
    key_pem: str = field(default="", repr=False)
    keys: tuple[Key, ...] = ()
    max_body_bytes: int = 4 << 20
    max_connections: int = 9_900
    max_requests_waiting: int = 4096
    retries: int = 2


@dataclass(frozen=True, slots=True)
class RoutingTable:
    listener: Listener
    models: tuple[ModelRoute, ...]
    missing: tuple[str, ...] = ()
    """What is not ready yet, in words, for ``/ready``; empty means ready."""


def serving(version: VersionRoute) -> tuple[Endpoint, ...]:
    return tuple(e for e in version.endpoints if e.serving)


def cluster_name(model: str, version: str) -> str:
    """A unique name that is safe in files and statistics: ``org_Model_v1-`` and 8 hex digits."""
    digest = hashlib.sha256(f"{model}\0{version}".encode()).hexdigest()[:8]
    slug = re.sub(r"[^A-Za-z0-9_-]+", "_", f"{model}.{version}")[:60]
    return f"{slug}-{digest}"
