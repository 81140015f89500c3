from __future__ import annotations

import argparse
import fcntl
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from preheat.cli import main as cli
from preheat.cli import serve
from preheat.core.errors import Busy, SpecError
from preheat.core.paths import Paths, default_paths


@pytest.fixture
def paths(short_dir: Path, monkeypatch: pytest.MonkeyPatch) -> Paths:
    for name in ("RUNTIME", "STATE", "CACHE"):
        monkeypatch.setenv(f"PREHEAT_{name}_DIR", str(short_dir / name.lower()))
    return default_paths()


def supervised(
    monkeypatch: pytest.MonkeyPatch, run: Callable[[Paths], int]
) -> list[dict[str, Any]]:
    """Puts ``run`` where the supervisor would be; returns what its control plane is told."""
    told: list[dict[str, Any]] = []

    class Supervisor:
        def run(self, control_plane: Callable[[int, None], int]) -> int:
            control_plane(5, None)
            return run(default_paths())

    monkeypatch.setattr("preheat.supervisor.Supervisor", Supervisor)
    monkeypatch.setattr("preheat.controlplane.process.main", lambda **orders: told.append(orders))
    return told


def test_the_exit_code_is_the_supervisors_and_nothing_stays_but_the_lock(
    paths: Paths, monkeypatch: pytest.MonkeyPatch
) -> None:
    def run(paths: Paths) -> int:
        (paths.runtime / "r" / "a-1").mkdir(parents=True)
        (paths.runtime / "admin.sock").touch()
        return 4

    told = supervised(monkeypatch, run)
    assert cli.main(["serve", "model.gguf", "--port", "9000", "--log-json"]) == 4
    assert [entry.name for entry in paths.runtime.iterdir()] == ["lock"]
    assert {"descriptor": 5, "target": "model.gguf", "port": 9000, "log_json": True}.items() <= (
        told[0].items()
    )


def test_what_a_killed_one_left_is_gone_before_the_next_begins(
    paths: Paths, monkeypatch: pytest.MonkeyPatch
) -> None:
    def run(paths: Paths) -> int:
        assert list((paths.runtime / "xds").iterdir()) == []
        assert not (paths.runtime / "probe.sock").exists()
        return 0

    paths.create()
    (paths.runtime / "lock").touch()
    (paths.runtime / "xds" / "lds.json").touch()
    (paths.runtime / "probe.sock").touch()
    supervised(monkeypatch, run)
    assert cli.main(["serve"]) == 0


def test_a_second_one_is_refused_and_touches_nothing(
    paths: Paths, capsys: pytest.CaptureFixture[str]
) -> None:
    paths.create()
    (paths.runtime / "admin.sock").touch()
    with (paths.runtime / "lock").open("w") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        assert cli.main(["serve"]) == Busy.exit_code
    assert (paths.runtime / "admin.sock").exists()
    assert "another preheat runs" in capsys.readouterr().err


def test_a_directory_that_holds_other_things_is_not_touched(
    paths: Paths, capsys: pytest.CaptureFixture[str]
) -> None:
    """Somebody's home, say, with a folder for R."""
    (paths.runtime / "r").mkdir(parents=True)
    (paths.runtime / "r" / "thesis.R").touch()
    (paths.runtime / "letters").mkdir()
    assert cli.main(["serve"]) == SpecError.exit_code
    assert (paths.runtime / "r" / "thesis.R").exists()
    assert "holds other things" in capsys.readouterr().err


def test_a_directory_that_others_may_write_to_is_refused(
    paths: Paths, capsys: pytest.CaptureFixture[str]
) -> None:
    paths.create()
    paths.runtime.chmod(0o777)
    assert cli.main(["serve"]) == SpecError.exit_code
    assert f"chmod 700 {paths.runtime}" in capsys.readouterr().err


def test_a_directory_of_another_user_is_refused(
    paths: Paths, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    paths.create()
    monkeypatch.setattr(os, "getuid", lambda: 4711)
    assert cli.main(["serve"]) == SpecError.exit_code
    assert "belongs to another user" in capsys.readouterr().err


def test_a_directory_that_cannot_be_made_is_named(
    paths: Paths, capsys: pytest.CaptureFixture[str]
) -> None:
    paths.state.write_text("in the way")
    assert cli.main(["serve"]) == SpecError.exit_code
    err = capsys.readouterr().err
    assert str(paths.state) in err
    assert "PREHEAT_STATE_DIR" in err


def test_a_runtime_directory_that_is_gone_at_the_end_is_no_error(
    paths: Paths, monkeypatch: pytest.MonkeyPatch
) -> None:
    def run(paths: Paths) -> int:
        for entry in (paths.runtime / "xds", paths.runtime):
            for file in entry.iterdir():
                file.unlink()
            entry.rmdir()
        return 1

    supervised(monkeypatch, run)
    assert cli.main(["serve"]) == 1


def test_ctrl_c_before_anything_is_started_ends_quietly(
    paths: Paths, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupted(_: Paths) -> int:
        raise KeyboardInterrupt

    supervised(monkeypatch, interrupted)
    assert cli.main(["serve"]) == 130
    assert capsys.readouterr() == ("", "")
    assert [entry.name for entry in paths.runtime.iterdir()] == ["lock"]


@pytest.mark.parametrize("port", ["0", "65536", "-1", "http", "", "٣"])
def test_what_is_no_port_is_refused(port: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError, match="1 to 65535"):
        serve._port(port)


def test_the_moment_of_the_spawn_is_found() -> None:
    before_s = time.monotonic()
    program = "from preheat.cli.serve import _spawned_s; print(_spawned_s())"
    shown = subprocess.run([sys.executable, "-c", program], capture_output=True, check=True)
    # The kernel counts in ticks of 10 ms.
    assert before_s - 0.02 <= float(shown.stdout) <= time.monotonic()
