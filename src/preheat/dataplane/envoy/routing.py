"""The routing table: what the gateway should do, as one value.

The control plane makes it, ``resources.py`` turns it into Envoy's dicts. Nothing here knows Envoy.
"""

from __future__ import annotations

import hashlib
import re
from pathlib import Path

from msgspec import Struct


class Endpoint(Struct, frozen=True):
    """One start of one replica that the gateway may know about."""

    start_id: str
    """``REPLICA@NUMBER``; the value of ``x-preheat-replica``."""
    engine_socket: Path
    """Unix socket of this start's OpenAI server; never reused by another start."""
    health_socket: Path
    """Unix socket of the agent, which answers ``/routable``."""
    serving: bool
    """False while it proves itself: only pinned probes reach it."""


class VersionRoute(Struct, frozen=True):
    name: str
    share: int
    """Per cent of the model's traffic."""
    endpoints: tuple[Endpoint, ...]
    max_connections: int
    """Connections the engine can hold at once; further requests wait in the gateway."""


class ModelRoute(Struct, frozen=True):
    name: str
    versions: tuple[VersionRoute, ...]
    embeddings: bool = False
    created_unix_s: int = 0

    @property
    def state(self) -> str:
        """``ready`` when a serving endpoint takes its traffic, else ``loading``."""
        return "ready" if any(v.share and serving(v) for v in self.versions) else "loading"


class Key(Struct, frozen=True):
    owner: str
    secret: str

    def __repr__(self) -> str:
        """Without the secret, for it may come into a log."""
        return f"Key(owner={self.owner!r})"


class Listener(Struct, frozen=True):
    host: str
    port: int
    certificate_pem: str = ""
    key_pem: str = ""
    keys: tuple[Key, ...] = ()
    max_body_bytes: int = 4 << 20
    max_connections: int = 9_900
    max_requests_waiting: int = 4096
    retries: int = 2

    def __repr__(self) -> str:
        """Without the private key, for it may come into a log."""
        tls = ", tls" if self.certificate_pem else ""
        return f"Listener({self.host}:{self.port}{tls}, keys={self.keys!r})"


class RoutingTable(Struct, frozen=True):
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
