from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from tests.controlplane.samples import fleet, one_model
from tests.core.spec.test_properties import specs

from preheat.acceleration.weights.located import Located
from preheat.controlplane.adoption import adopt, keep, kept
from preheat.controlplane.drivers.local import LocalDriver
from preheat.controlplane.fleet import Fleet
from preheat.controlplane.replicas import Start
from preheat.core.paths import Paths
from preheat.core.spec.schema import Spec
from preheat.dataplane.envoy.routing import Key, Listener
from preheat.replica.lifecycle import State

LOCATED = Located(Path("/models/m.gguf"), 123, "a" * 64, "/models/m.gguf")
UP = ("loading", "warm", "starting", "heating", "proving", "ready")


class Link:
    def spawn(self, *_: Any, **__: Any) -> None:
        pass


@pytest.fixture
def paths(tmp_path: Path) -> Paths:
    made = Paths(tmp_path / "run", tmp_path / "state", tmp_path / "cache")
    made.create()
    return made


def driver(paths: Paths) -> LocalDriver:
    return LocalDriver(paths, Link(), drain_timeout_s=7.0)  # type: ignore[arg-type]


def launched(paths: Paths, of: Fleet, states: tuple[str, ...] = UP) -> Start:
    """A start of the fleet's first place, whose agent wrote that it went through these states."""
    place = next(iter(of.replicas.values()))
    start = driver(paths).launch(place, LOCATED)
    with (paths.logs / f"{place.name}.events.jsonl").open("a") as file:
        for number, state in enumerate(states, start=1):
            event = {"n": number, "event": "x", "state": state, "start_id": start.start_id}
            file.write(json.dumps({**event, "monotonic_s": float(number)}) + "\n")
    return start


def test_what_runs_is_where_it_was(paths: Paths) -> None:
    before, after = fleet(), fleet()
    start = launched(paths, before)
    (adopted,), surplus = adopt((start.start_id, "envoy"), after, driver(paths), paths, now_s=5.0)
    assert surplus == []
    before.launched(start.start_id.rpartition("@")[0], start)
    for event in adopted.events:
        before.observe(start.start_id, event, now_s=5.0)
    assert after.routing_table() == before.routing_table()
    assert adopted.start.state is State.READY
    assert after.starts() == [start] == [adopted.start]


def test_of_two_starts_of_a_replica_the_newer_one_has_the_place(paths: Paths) -> None:
    older, newer = (launched(paths, fleet()) for _ in range(2))
    after = fleet()
    adopted, surplus = adopt((older.start_id, newer.start_id), after, driver(paths), paths, now_s=0)
    assert [one.start.start_id for one in adopted] == [newer.start_id]
    assert surplus == [older.start_id]


def test_an_agent_for_which_there_is_no_place_is_surplus(paths: Paths) -> None:
    start = launched(paths, fleet())
    other = fleet(one_model(name="v2"))
    assert adopt((start.start_id,), other, driver(paths), paths, now_s=0) == ([], [start.start_id])


def test_nothing_stays_of_what_does_not_run(paths: Paths) -> None:
    gone = launched(paths, fleet())
    broken = paths.runtime / "r" / "broken"
    broken.mkdir()
    (broken / "plan.json").write_text('{"replica": ')
    assert adopt((), fleet(), driver(paths), paths, now_s=0) == ([], [])
    assert not gone.sockets.exists()
    assert not broken.exists()


def test_events_behind_a_gap_are_left_to_the_agent(paths: Paths) -> None:
    start = launched(paths, fleet(), UP[:1])
    with (paths.logs / f"{start.start_id.rpartition('@')[0]}.events.jsonl").open("a") as file:
        event = {"n": 3, "event": "x", "state": "ready", "start_id": start.start_id}
        file.write(json.dumps(event) + '\n{"n": 4, "ev')
    after = fleet()
    (adopted,), _ = adopt((start.start_id,), after, driver(paths), paths, now_s=0)
    assert [event["n"] for event in adopted.events] == [1]
    assert adopted.start.state is State.LOADING


@given(spec=specs())
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_what_is_kept_comes_back_as_it_was(paths: Paths, spec: Spec) -> None:
    listener = Listener("127.0.0.1", 8080, "certificate", "key", (Key("owner", "secret"),))
    before = Fleet(spec, listener, created_unix_s=1234)
    keep(paths, before)
    found = kept(paths)
    assert found is not None
    assert (found.spec, found.listener, found.created_unix_s) == (spec, listener, 1234)
    assert paths.kept.stat().st_mode & 0o777 == 0o600


@pytest.mark.parametrize("text", [None, "", "{}", '{"spec": 1}'])
def test_without_anything_kept_there_is_nothing(paths: Paths, text: str | None) -> None:
    if text is not None:
        paths.kept.write_text(text)
    assert kept(paths) is None
