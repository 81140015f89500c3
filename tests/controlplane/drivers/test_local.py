from __future__ import annotations

import json
import stat
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from tests.controlplane.samples import fleet, one_model

from preheat.acceleration.weights.located import Located
from preheat.controlplane.drivers.local import LocalDriver, next_number
from preheat.core.paths import Paths

LOCATED = Located(Path("/m.gguf"), 123, "a" * 64, "/m.gguf")


class Link:
    def __init__(self) -> None:
        self.spawned: list[tuple[str, tuple[str, ...], Path]] = []
        self.error: OSError | None = None

    def spawn(self, name: str, argv: tuple[str, ...], *, log: Path) -> None:
        if self.error is not None:
            raise self.error
        self.spawned.append((name, argv, log))


@pytest.fixture
def paths(tmp_path: Path) -> Paths:
    made = Paths(tmp_path / "run", tmp_path / "state", tmp_path / "cache")
    made.create()
    return made


def driver(paths: Paths, link: Link) -> LocalDriver:
    return LocalDriver(paths, link, drain_timeout_s=7.0)  # type: ignore[arg-type]


def place(**options: Any) -> Any:
    return next(iter(fleet(one_model(**options)).replicas.values()))


def plan_of(link: Link) -> dict[str, Any]:
    plan: dict[str, Any] = json.loads(Path(link.spawned[-1][1][-1]).read_text())
    return plan


def test_a_start_is_an_agent_with_a_plan_in_a_private_directory(paths: Paths) -> None:
    link = Link()
    replica = place()
    start = driver(paths, link).launch(replica, LOCATED)
    name, argv, log = link.spawned[0]
    assert name == start.start_id == f"{replica.name}@1"
    assert argv[1:4] == ("-P", "-m", "preheat.replica")
    assert log == paths.logs / f"{replica.name}.log"
    assert stat.S_IMODE(start.sockets.stat().st_mode) == 0o700
    plan = plan_of(link)
    assert plan["weights"] == {"path": "/m.gguf", "size_bytes": 123, "sha256": "a" * 64}
    assert plan["agent_socket"] == str(start.agent_socket)
    assert (plan["hold_at"], plan["drain_timeout_s"]) == ("hot", 7.0)
    assert start.max_connections == plan["launch"]["max_connections"] > 0


@pytest.mark.parametrize(
    ("strategy", "hold_at"), [("warm", "warm"), ("hot", "hot"), ("cold", "hot")]
)
def test_only_what_is_kept_warm_stops_there(paths: Paths, strategy: str, hold_at: str) -> None:
    link = Link()
    start = driver(paths, link).launch(place(strategy=strategy), LOCATED)
    assert plan_of(link)["hold_at"] == start.hold_at == hold_at


def test_starts_never_share_a_name_or_a_socket(paths: Paths) -> None:
    local = driver(paths, Link())
    replicas = fleet(one_model(replicas=3)).replicas.values()
    starts = [local.launch(replica, LOCATED) for replica in [*replicas, *replicas]]
    assert len({start.start_id for start in starts}) == 6
    assert len({start.sockets for start in starts}) == 6


def test_nothing_of_a_start_stays_when_it_has_ended(paths: Paths) -> None:
    local = driver(paths, Link())
    start = local.launch(place(), LOCATED)
    assert local.weights_of(start.start_id) == LOCATED
    local.ended(start.start_id)
    local.ended(start.start_id)
    assert not start.sockets.exists()
    assert local.weights_of(start.start_id) is None


def test_nothing_stays_of_a_launch_that_failed(paths: Paths) -> None:
    link = Link()
    link.error = OSError("the supervisor takes no more")
    with pytest.raises(OSError, match="no more"):
        driver(paths, link).launch(place(), LOCATED)
    assert list((paths.runtime / "r").iterdir()) == []


def test_a_local_file_is_not_evicted(paths: Paths) -> None:
    local = driver(paths, Link())
    start = local.launch(place(), LOCATED)
    assert not local.weights_were_bad(start.start_id)
    assert not local.weights_were_bad("nobody@1")


def test_numbers_grow_whoever_asks(tmp_path: Path) -> None:
    file = tmp_path / "start-number"
    with ThreadPoolExecutor(8) as pool:
        numbers = list(pool.map(lambda _: next_number(file), range(200)))
    assert sorted(numbers) == list(range(1, 201))
    assert next_number(file) == 201


@pytest.mark.parametrize("content", ["", "garbage", "\n", "12x"])
def test_a_file_that_holds_no_number_begins_anew(tmp_path: Path, content: str) -> None:
    file = tmp_path / "start-number"
    file.write_text(content)
    assert next_number(file) == 1
    assert next_number(file) == 2
