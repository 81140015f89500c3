"""llama.cpp through xllamacpp: the LaunchPlan. The process itself is ``llamacpp_host``."""

from __future__ import annotations

import json
import sys
from pathlib import Path

from preheat.core.spec.schema import Engine
from preheat.replica.engines.plan import Capability, HardwareConfig, LaunchPlan

BUILD = "xllamacpp 2026.10.11549"
"""The build in the lock. A test compares it with the installed one."""
HOST = "preheat.replica.engines.llamacpp_host"
# Its threads meet at a barrier some 600 times for each token, and by default wait there spinning.
# Beside other work on the same cores that spins whole time slices away: 6 tokens/s instead of 55
# beside two busy processes on two cores. A short spin costs nothing measurable on a quiet machine.
ENVIRONMENT = {"GOMP_SPINCOUNT": "3000"}
# Connections the agent itself uses (health, proof, metrics), beside the gateway's.
AGENT_CONNECTIONS = 8


def plan(engine: Engine, hardware: HardwareConfig, *, model: str, socket: Path) -> LaunchPlan:
    """``model`` is the name that answers carry; ``socket`` must fit into a Unix address."""
    threads = engine.threads or hardware.cores
    # Its server holds one thread per connection; the gateway keeps some connections open and
    # queues the rest, so a few for each slot are enough.
    connections = 4 * engine.max_batch_size + 16
    options: dict[str, str | int | float | bool] = {
        "context_length": engine.context_length,
        "max_batch_size": engine.max_batch_size,
        "threads": threads,
        "prefix_caching": engine.prefix_caching,
        "embeddings": engine.embeddings,
        "flash_attention": engine.flash_attention,
        "kv_cache_type": engine.kv_cache_type,
        "gpu_layers": engine.gpu_layers,
    }
    arguments = {
        **options,
        "model": model,
        "socket": str(socket),
        "http_threads": connections + AGENT_CONNECTIONS,
    }
    serves: tuple[Capability, ...] = ("chat", "completions", "streaming", "logprobs")
    return LaunchPlan(
        argv=(sys.executable, "-P", "-m", HOST, json.dumps(arguments)),
        environment=ENVIRONMENT,
        endpoint=str(socket),
        in_flight_gauges=("llamacpp:requests_processing", "llamacpp:requests_deferred"),
        capabilities=("embeddings",) if engine.embeddings else serves,
        max_connections=connections,
        build=BUILD,
        options=options,
    )
