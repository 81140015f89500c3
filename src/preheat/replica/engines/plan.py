"""The engine contract: from a spec and the hardware to a LaunchPlan. Pure.

A LaunchPlan is all that an agent, a container or a pod needs to run an engine. An engine's module
gives ``plan()`` and says what its server can do; nothing here starts a process.
"""

from __future__ import annotations

import os
from typing import Literal

from msgspec import Struct

Capability = Literal["chat", "completions", "embeddings", "streaming", "logprobs"]


class HardwareConfig(Struct, frozen=True, kw_only=True):
    """What an engine may use."""

    cores: int
    memory_bytes: int
    target_arch: Literal["cpu", "cuda", "vulkan", "npu"] = "cpu"
    memory_layout: Literal["NHWC", "NCHW"] = "NHWC"


class LaunchPlan(Struct, frozen=True, kw_only=True):
    """How an engine is run."""

    argv: tuple[str, ...]
    """Program and arguments. The path of the verified weights is written to its standard input as
    one line once they are verified, so that imports and hashing can overlap."""
    environment: dict[str, str] = {}
    """Variables added to the agent's own."""
    endpoint: str
    """Unix socket of its OpenAI server, mode 0600."""
    health_path: str = "/health"
    """Answers 200 when the model is loaded."""
    in_flight_gauges: tuple[str, ...] = ()
    """Gauges at ``/metrics`` whose sum is the requests that it computes or keeps waiting. Without
    them nobody knows when it has drained, and a drain takes all of its time."""
    capabilities: tuple[Capability, ...]
    max_connections: int
    """Connections that it serves at once, the agent's own not counted."""
    build: str
    """Engine and version; part of the key of recorded answers."""
    options: dict[str, str | int | float | bool] = {}
    """What shapes its numbers; part of the key of recorded answers."""


def usable_cores() -> int:
    """Cores this process may run on."""
    return len(os.sched_getaffinity(0))


def local_hardware() -> HardwareConfig:
    """This machine."""
    memory_bytes = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return HardwareConfig(cores=usable_cores(), memory_bytes=memory_bytes)
