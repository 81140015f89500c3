from __future__ import annotations

from typing import Any

from tests.controlplane.samples import fleet, start_of
from tests.core.records import example

from preheat.controlplane.metrics import UNKNOWN, Metrics
from preheat.dataplane.envoy.records import RecordStream, RequestRecord
from preheat.replica.lifecycle import State


def metrics() -> Metrics:
    return Metrics(fleet(), RecordStream())


def record(**changes: Any) -> RequestRecord:
    values: dict[str, Any] = {
        "start_unix_s": 0.0,
        "model": "chat",
        "path": "/v1/chat/completions",
        "status": 200,
        "outcome": "ok",
        "replica": "chat-v1-0@1",
        "version": "v1",
        "duration_s": 0.5,
        "ttft_s": 0.05,
        "prompt_tokens": 7,
        "completion_tokens": 3,
    }
    return RequestRecord(**{**values, **changes})


def lines(of: Metrics, name: str) -> list[str]:
    return [line for line in of.render().decode().splitlines() if line.startswith(name)]


def test_a_model_without_a_ready_replica_has_an_explicit_zero() -> None:
    assert 'preheat_replicas{model="chat",state="ready",version="v1"} 0.0' in lines(
        metrics(), "preheat_replicas"
    )


def test_replicas_are_counted_by_state() -> None:
    of = fleet()
    (place,) = of.replicas.values()
    start = start_of(place, 1)
    of.launched(place.name, start)
    counted = Metrics(of, RecordStream())
    assert 'preheat_replicas{model="chat",state="loading",version="v1"} 1.0' in lines(
        counted, "preheat_replicas"
    )
    of.observe(start.start_id, {"event": "proven", "state": str(State.READY)}, now_s=1.0)
    shown = lines(counted, "preheat_replicas")
    assert 'preheat_replicas{model="chat",state="ready",version="v1"} 1.0' in shown
    assert not any("loading" in line for line in shown)
    assert lines(counted, "preheat_ready ") == ["preheat_ready 1.0"]


def test_names_of_models_that_do_not_exist_make_no_series() -> None:
    counted = metrics()
    for number in range(5_000):
        counted.count(
            record(model=f"junk-{number}", status=404, outcome="refused", replica="", version="")
        )
    shown = lines(counted, "preheat_requests_total")
    assert len(shown) == 1
    assert f'model="{UNKNOWN}"' in shown[0]
    assert shown[0].endswith(" 5000.0")


def test_versions_that_do_not_exist_make_no_series() -> None:
    counted = metrics()
    for number in range(50):
        counted.count(record(version=f"v{number}"))
    assert len(lines(counted, "preheat_requests_total")) == 2


def test_only_answers_of_a_replica_are_timed() -> None:
    counted = metrics()
    counted.count(record())
    counted.count(record(outcome="refused", status=404, replica=""))
    counted.count(record(final=False))
    assert (
        'gen_ai_server_time_to_first_token_seconds_count{model="chat",version="v1"} 1.0'
        in lines(counted, "gen_ai_server_time_to_first_token_seconds_count")
    )
    assert sum(float(x.split()[-1]) for x in lines(counted, "preheat_requests_total")) == 2
    assert 'preheat_tokens_total{kind="completion",model="chat",version="v1"} 3.0' in lines(
        counted, "preheat_tokens_total"
    )


def test_cold_starts_are_counted_when_they_have_a_first_token() -> None:
    counted = metrics()
    counted.cold_start(example())
    assert 'preheat_cold_start_seconds_count{model="chat",version="v1"} 1.0' in lines(
        counted, "preheat_cold_start_seconds_count"
    )
