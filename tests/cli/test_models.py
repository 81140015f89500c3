from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tests.acceleration.weights.samples import gguf
from tests.cli.running import Running, replica, status

from preheat.acceleration.weights.baselines import recorded_sha256
from preheat.cli import main as cli
from preheat.core.paths import default_paths

Answer = Callable[[str, str], tuple[int, Any] | None]


@pytest.fixture
def running(
    short_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Callable[[Answer], Running]:
    monkeypatch.setenv("PREHEAT_STATE_DIR", str(tmp_path / "state"))
    monkeypatch.setenv("PREHEAT_RUNTIME_DIR", str(short_dir))
    return lambda answer: Running(default_paths().admin_socket, answer)


def test_models_are_listed_with_their_state(
    running: Callable[[Answer], Running], capsys: pytest.CaptureFixture[str]
) -> None:
    shown = status(replica(), replica(state="loading"))
    with running(lambda _m, _t: (200, shown)):
        assert cli.main(["models"]) == 0
        table = capsys.readouterr().out.splitlines()
        assert cli.main(["models", "list", "--json"]) == 0
    assert [line.split(maxsplit=2) for line in table] == [
        ["MODEL", "STATE", "REPLICAS READY"],
        ["chat", "ready", "1 of 2"],
    ]
    assert json.loads(capsys.readouterr().out) == shown["models"]


@pytest.mark.parametrize("name", ["chat", "org/Model", "a b+c&d=e%20ü"])
def test_heat_names_the_model_as_it_is(
    running: Callable[[Answer], Running], capsys: pytest.CaptureFixture[str], name: str
) -> None:
    with running(lambda _m, _t: (202, {"ordered": "heat"})) as control:
        assert cli.main(["models", "heat", name]) == 0
    assert control.asked == [("POST", f"/heat?model={name}")]
    assert f"{name} is being heated" in capsys.readouterr().out


def test_what_is_refused_is_said(
    running: Callable[[Answer], Running], capsys: pytest.CaptureFixture[str]
) -> None:
    with running(lambda _m, _t: (404, {"error": "no model 'x'; there are: chat"})):
        assert cli.main(["models", "heat", "x"]) == 1
    assert capsys.readouterr().err == "preheat: no model 'x'; there are: chat\n"


def test_nobody_there_is_exit_code_6(running: Callable[[Answer], Running]) -> None:
    assert cli.main(["models"]) == 6
    assert cli.main(["models", "heat", "chat"]) == 6


def test_trust_needs_no_running_preheat(
    running: Callable[[Answer], Running], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "m.gguf"
    file.write_bytes(gguf())
    assert cli.main(["models", "trust", str(file)]) == 0
    sha256 = recorded_sha256(file, tmp_path / "state")
    assert sha256 is not None
    assert sha256 in capsys.readouterr().out
