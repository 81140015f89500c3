"""The plan for llama.cpp; what its process makes of it is in ``test_llamacpp_host.py``."""

from __future__ import annotations

import json
from importlib.metadata import version
from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from preheat.core.spec.schema import Engine
from preheat.replica.engines.llamacpp import AGENT_CONNECTIONS, BUILD, plan
from preheat.replica.engines.plan import (
    HardwareConfig,
    LaunchPlan,
    local_hardware,
    usable_cores,
)

HARDWARE = HardwareConfig(cores=6, memory_bytes=8 << 30)
SOCKET = Path("/run/e.sock")


def planned(**engine: object) -> LaunchPlan:
    spec = msgspec.convert(engine, Engine)
    return plan(spec, HARDWARE, model="org/smol ✅", socket=SOCKET)


def arguments(launch: LaunchPlan) -> dict[str, object]:
    found: dict[str, object] = json.loads(launch.argv[-1])
    return found


def test_a_plan_is_a_value_that_survives_the_way_to_the_agent() -> None:
    launch = planned()
    assert msgspec.json.decode(msgspec.json.encode(launch), type=LaunchPlan) == launch == planned()


@given(
    st.builds(
        Engine,
        max_batch_size=st.integers(1, 256),
        context_length=st.integers(64, 1 << 20),
        threads=st.none() | st.integers(1, 1024),
        prefix_caching=st.booleans(),
        embeddings=st.booleans(),
        flash_attention=st.sampled_from(["auto", "on", "off"]),
        kv_cache_type=st.sampled_from(["f16", "q8_0", "f32"]),
        gpu_layers=st.integers(0, 1024),
    )
)
def test_every_option_reaches_the_process_and_the_key_of_recorded_answers(engine: Engine) -> None:
    launch = plan(engine, HARDWARE, model="m", socket=SOCKET)
    told = arguments(launch)
    for name, value in msgspec.structs.asdict(engine).items():
        if name != "kind" and value is not None:
            assert told[name] == launch.options[name] == value


def test_threads_default_to_the_cores_there_are() -> None:
    assert arguments(planned())["threads"] == 6
    assert arguments(planned(threads=3))["threads"] == 3


def test_the_server_has_threads_for_the_gateway_and_the_agent() -> None:
    for size in (1, 4, 64):
        launch = planned(max_batch_size=size)
        assert launch.max_connections > size
        assert arguments(launch)["http_threads"] == launch.max_connections + AGENT_CONNECTIONS


@pytest.mark.parametrize("embeddings", [True, False])
def test_a_model_serves_embeddings_or_text(embeddings: bool) -> None:
    serves = planned(embeddings=embeddings).capabilities
    assert ("embeddings" in serves) is embeddings
    assert ("chat" in serves) is not embeddings


def test_the_build_named_in_keys_is_the_installed_one() -> None:
    assert f"xllamacpp {version('xllamacpp')}" == BUILD


def test_the_hardware_of_this_machine_is_seen() -> None:
    hardware = local_hardware()
    assert hardware.cores == usable_cores() >= 1
    assert hardware.memory_bytes > 1 << 28
