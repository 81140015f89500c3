from __future__ import annotations

import json
import os
import signal
import stat
from pathlib import Path
from typing import Any

import pytest

from preheat.controlplane.gateway import LONGEST_RESTART_S, SOUND_S, Gateway, restart_pause_s
from preheat.core.errors import GatewayError
from preheat.core.paths import Paths


class Link:
    """What would go to the supervisor."""

    def __init__(self) -> None:
        self.spawned: list[tuple[str, ...]] = []
        self.killed: list[tuple[str, int]] = []

    def spawn(self, name: str, argv: tuple[str, ...], *, stdin: Path, **_: Any) -> None:
        assert stdin.is_fifo()
        self.spawned.append(argv)

    def kill(self, name: str, number: int) -> None:
        self.killed.append((name, number))


class Clock:
    now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


@pytest.fixture
def paths(tmp_path: Path) -> Paths:
    made = Paths(tmp_path / "run", tmp_path / "state", tmp_path / "cache")
    made.create()
    return made


def test_restarts_wait_longer_and_longer_but_not_for_ever() -> None:
    pauses = [restart_pause_s(deaths) for deaths in range(1, 2000)]
    assert pauses[0] == 0.0
    assert pauses == sorted(pauses)
    assert pauses[-1] == LONGEST_RESTART_S


def test_it_is_asked_for_with_its_files_and_they_are_kept_for_the_next(paths: Paths) -> None:
    link = Link()
    gateway = Gateway(paths, link)  # type: ignore[arg-type]
    gateway.start()
    assert gateway.alive
    argv = link.spawned[0]
    assert os.access(argv[0], os.X_OK)
    assert json.loads(Path(argv[argv.index("-c") + 1]).read_text())["admin"]
    (paths.xds / "lds.json").write_text("routes of before")
    gateway.ended()
    gateway.start()
    assert (paths.xds / "lds.json").read_text() == "routes of before"


def test_an_envoy_that_lived_long_is_started_again_at_once(paths: Paths) -> None:
    clock = Clock()
    gateway = Gateway(paths, Link(), clock=clock)  # type: ignore[arg-type]
    for _ in range(5):
        gateway.start()
        last_s = gateway.ended()
    assert last_s > 0.0
    gateway.start()
    clock.now_s += SOUND_S
    assert gateway.ended() == 0.0
    assert gateway.restarts == 6
    assert not gateway.alive


def test_without_a_binary_it_says_so(paths: Paths, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PREHEAT_ENVOY", "/does/not/exist")
    with pytest.raises(GatewayError, match="/does/not/exist"):
        Gateway(paths, Link()).start()  # type: ignore[arg-type]


def test_it_is_ended_by_signal(paths: Paths) -> None:
    link = Link()
    Gateway(paths, link).stop()  # type: ignore[arg-type]
    assert link.killed == [("envoy", signal.SIGTERM)]


def test_files_that_will_hold_keys_are_private(paths: Paths) -> None:
    Gateway(paths, Link()).start()  # type: ignore[arg-type]
    modes = {stat.S_IMODE(file.stat().st_mode) for file in paths.xds.iterdir()}
    assert modes == {0o600}
