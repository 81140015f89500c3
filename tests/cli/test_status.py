from __future__ import annotations

import json
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tests.cli.running import Running, replica, status

from preheat.cli import client
from preheat.cli import main as cli
from preheat.cli import status as command
from preheat.core.paths import default_paths

Answer = Callable[[str, str], tuple[int, Any] | None]


@pytest.fixture
def running(short_dir: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[Answer], Running]:
    monkeypatch.setattr(command, "WATCH_S", 0.001)
    monkeypatch.setenv("PREHEAT_RUNTIME_DIR", str(short_dir))
    return lambda answer: Running(default_paths().admin_socket, answer)


def fixed(value: Any, code: int = 200) -> Answer:
    return lambda _method, _target: (code, value)


def in_turn(*values: Any) -> Answer:
    """One after the other; then it is gone."""
    left = list(values)
    return lambda _method, _target: (200, left.pop(0)) if left else None


def test_ready_is_a_table_and_exit_code_0(
    running: Callable[[Answer], Running], capsys: pytest.CaptureFixture[str]
) -> None:
    with running(fixed(status())):
        assert cli.main(["status"]) == 0
    out = capsys.readouterr().out
    assert out.startswith("ready  http://127.0.0.1:8080\n")
    row = next(line for line in out.splitlines() if "chat-v1-0@7" in line)
    assert row.split() == ["chat", "v1", "chat-v1-0@7", "ready", "100", "%", "1.23", "s", "0"]


def test_names_are_not_cut_where_there_is_no_screen(
    running: Callable[[Answer], Running],
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("COLUMNS", "40")
    name = "a-replica-with-a-long-name-v1-0@7"
    with running(fixed(status(replica(start_id=name)))):
        assert cli.main(["status"]) == 0
    assert name in capsys.readouterr().out


def test_not_ready_says_what_is_missing_and_is_exit_code_1(
    running: Callable[[Answer], Running], capsys: pytest.CaptureFixture[str]
) -> None:
    failing = replica(
        state="failed", start_id=None, last_cold_start_s=None, last_reason="another [hash]"
    )
    with running(fixed(status(failing, missing=("chat: given up",)))):
        assert cli.main(["status"]) == 1
    out = capsys.readouterr().out
    assert out.startswith("not ready")
    assert "missing: chat: given up" in out
    # What looks like markup is text.
    assert "last failure of chat-v1-0: another [hash]" in out


def test_json_is_what_the_control_plane_says(
    running: Callable[[Answer], Running], capsys: pytest.CaptureFixture[str]
) -> None:
    with running(fixed(status(missing=("chat: x",)))):
        assert cli.main(["status", "--json"]) == 1
    assert json.loads(capsys.readouterr().out) == status(missing=("chat: x",))


def test_nobody_there_is_exit_code_6(
    running: Callable[[Answer], Running], capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["status"]) == 6
    assert "preheat serve" in capsys.readouterr().err
    default_paths().admin_socket.touch()
    assert cli.main(["status"]) == 6


@pytest.mark.parametrize("arguments", [[], ["--json"], ["--watch"], ["--watch", "--json"]])
def test_one_that_dies_before_it_answers_is_exit_code_6(
    running: Callable[[Answer], Running],
    capsys: pytest.CaptureFixture[str],
    arguments: list[str],
) -> None:
    with running(in_turn()):
        assert cli.main(["status", *arguments]) == 6
    assert capsys.readouterr().err.startswith("preheat: no preheat runs in")


def test_watching_shows_each_change_once_until_it_dies(
    running: Callable[[Answer], Running], capsys: pytest.CaptureFixture[str]
) -> None:
    loading, ready = status(missing=("chat: loading",)), status()
    with running(in_turn(loading, loading, ready, ready)):
        assert cli.main(["status", "--watch", "--json"]) == 6
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert lines == [loading, ready]


def test_watching_without_a_terminal_prints_a_table_for_each_change(
    running: Callable[[Answer], Running], capsys: pytest.CaptureFixture[str]
) -> None:
    with running(in_turn(status(missing=("chat: x",)), status(), status())):
        assert cli.main(["status", "--watch"]) == 6
    out = capsys.readouterr().out
    assert out.count("http://127.0.0.1:8080") == 2


def test_watching_on_a_terminal_ends_with_what_was_last(
    running: Callable[[Answer], Running],
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("TERM", "xterm")
    with running(in_turn(status(missing=("chat: x",)), status())):
        assert cli.main(["status", "--watch"]) == 6
    assert "ready" in capsys.readouterr().out


def test_one_that_does_not_answer_is_said(
    running: Callable[[Answer], Running],
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(client.ask, "__kwdefaults__", {"timeout_s": 0.05})
    release = threading.Event()

    def slow(_method: str, _target: str) -> tuple[int, Any]:
        release.wait(10)
        return 200, status()

    with running(slow):
        assert cli.main(["status"]) == 1
        release.set()
    assert "does not answer within" in capsys.readouterr().err
