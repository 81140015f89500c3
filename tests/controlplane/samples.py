"""Specs and starts for tests of the control plane."""

from __future__ import annotations

from pathlib import Path

from preheat.controlplane.fleet import Fleet
from preheat.controlplane.replicas import Replica, Start
from preheat.core.spec.schema import (
    Dependency,
    Limits,
    Model,
    Preload,
    Source,
    Spec,
    Version,
    Warmup,
)
from preheat.dataplane.envoy.routing import Listener

LISTENER = Listener(host="127.0.0.1", port=8080)
DATABASE = Dependency(name="database", url="http://127.0.0.1:1/health")


def version(
    name: str = "v1",
    *,
    share: int = 100,
    replicas: int = 1,
    strategy: str = "hot",
    preload: Preload | None = None,
) -> Version:
    return Version(
        name=name,
        source=Source(uri="/models/m.gguf"),
        traffic_share=share,
        replicas=replicas,
        warmup=Warmup(strategy=strategy),  # type: ignore[arg-type]
        preload=preload or Preload(),
    )


def spec(*models: Model) -> Spec:
    return Spec(models=models or (Model(name="chat", versions=(version(),)),), limits=Limits())


def one_model(**options: object) -> Spec:
    return spec(Model(name="chat", versions=(version(**options),)))  # type: ignore[arg-type]


def fleet(of: Spec | None = None, *, now_s: float = 0.0) -> Fleet:
    return Fleet.from_spec(of or spec(), LISTENER, now_s=now_s, unix_s=0.0)


def start_of(place: Replica, number: int) -> Start:
    """As a driver makes it."""
    return Start(
        f"{place.name}@{number}",
        number,
        Path("/run/r") / str(number),
        max_connections=32,
        hold_at="warm" if place.hold_at == "warm" else "hot",
    )
