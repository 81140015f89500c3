from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from preheat.acceleration.weights.residency import page_cache_share
from preheat.cli import coldstart_run
from preheat.cli.coldstart_run import Run, drop_from_page_cache, run_and_report, weight_files
from preheat.core.coldstart import ColdStart
from preheat.core.errors import EngineError, SpecError
from preheat.core.spec.load import default_spec, resolve_target

FAKE_SERVE = Path(__file__).with_name("fake_serve.py")


@dataclass
class Stage:
    """A user with directories of their own, and a ``serve`` that does what a test asks for."""

    home: Path
    options: dict[str, str] = field(default_factory=dict)

    @property
    def cache(self) -> Path:
        return self.home / "cache"

    @property
    def serve(self) -> tuple[str, ...]:
        options = [f"--{name}={value}" for name, value in self.options.items()]
        journal = f"--journal={self.home / 'journal'}"
        return (sys.executable, str(FAKE_SERVE), journal, *options)

    def run(
        self,
        *,
        starts: int = 2,
        cold: bool = False,
        sla_s: float | None = None,
        target: str | None = None,
        timeout_s: float = 60.0,
    ) -> int:
        run = Run(target=target, starts=starts, cold=cold, timeout_s=timeout_s, serve=self.serve)
        return run_and_report(run, sla_s=sla_s, json_file=self.home / "report.json")

    def journal(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in (self.home / "journal").read_text().splitlines()]

    def await_journal(self) -> list[dict[str, Any]]:
        """The journal, once a start has written its line."""
        path = self.home / "journal"
        deadline_s = time.monotonic() + 30
        while not (path.exists() and path.read_text().endswith("\n")):
            assert time.monotonic() < deadline_s, "nothing was started"
            time.sleep(0.01)
        return self.journal()

    def report(self) -> dict[str, Any]:
        report: dict[str, Any] = json.loads((self.home / "report.json").read_text())
        return report

    def leftovers(self) -> list[Path]:
        return list((self.home / "tmp").iterdir())


@pytest.fixture
def stage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Stage:
    for name in ("cache", "tmp", "work"):
        (tmp_path / name).mkdir()
    monkeypatch.setenv("PREHEAT_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr(coldstart_run, "_scratch_parent", lambda: str(tmp_path / "tmp"))
    monkeypatch.chdir(tmp_path / "work")  # without a preheat.yaml
    return Stage(tmp_path)


def is_gone(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    return False


def test_each_start_has_directories_and_a_port_of_its_own_and_the_users_cache(stage: Stage) -> None:
    assert stage.run(starts=3) == 0
    starts = stage.journal()
    assert len(starts) == 4, "three that count and the one before them"
    assert {start["cache"] for start in starts} == {str(stage.cache)}
    assert len({start["runtime"] for start in starts} | {start["state"] for start in starts}) == 8
    assert all(1024 <= start["port"] < 65536 for start in starts)


def test_nothing_is_left_of_a_run(stage: Stage) -> None:
    stage.run()
    assert all(is_gone(start["pid"]) for start in stage.journal())
    assert stage.leftovers() == []


def test_the_target_is_handed_on(stage: Stage) -> None:
    model = stage.home / "tiny.gguf"
    model.write_bytes(b"GGUF")
    stage.run(starts=1, target=str(model))
    assert {start["target"] for start in stage.journal()} == {str(model)}


def test_the_first_start_is_not_counted(stage: Stage, capsys: pytest.CaptureFixture[str]) -> None:
    stage.options["takes-s"] = "50.0,1.0,1.5"
    assert stage.run(starts=2, sla_s=2.0) == 0
    assert stage.report()["time_to_first_token_s"] == pytest.approx(
        {"p50": 1.0, "p95": 1.5, "p99": 1.5}
    )


def test_the_report_says_where_the_time_goes(
    stage: Stage, capsys: pytest.CaptureFixture[str]
) -> None:
    stage.options["takes-s"] = "1.0"
    stage.run(starts=2, sla_s=1.2)
    text = capsys.readouterr().out
    assert "2 warm starts of chat v1" in text
    assert "P50 1,000 ms   P95 1,000 ms   P99 1,000 ms   (nearest rank of 2" in text
    assert "Most of it goes to weights: 750 ms, 75 %." in text
    assert "SLA met: P95 1,000 ms of 1,200 ms" in text
    assert "weights found in the page cache: 100 % to 100 %; 98.4 MB read each time" in text


def test_the_json_file_holds_everything(stage: Stage) -> None:
    import msgspec

    stage.run(starts=2, sla_s=1.2)
    report = stage.report()
    assert report["sla"] == {"p95_s": 1.2, "met": True}
    assert report["dominating"] == "weights"
    assert report["coverage"] == [1.0, 1.0]
    assert [row["name"] for row in report["phases"]] == ["weights", "engine"]
    records = msgspec.convert(report["records"], list[ColdStart])
    assert [record.start_id for record in records] == ["chat-v1-0@2", "chat-v1-0@3"]
    assert all(lag_s >= 0 for lag_s in report["spawn_lag_s"])


def test_a_missed_sla_is_exit_code_one(stage: Stage, capsys: pytest.CaptureFixture[str]) -> None:
    stage.options["takes-s"] = "1.0,1.0,1.0,1.0,1.3"
    assert stage.run(starts=4, sla_s=1.2) == 1
    assert "SLA missed: P95 1,300 ms of 1,200 ms, 100 ms too long" in capsys.readouterr().out
    assert stage.report()["sla"]["met"] is False


def test_without_an_sla_there_is_no_verdict(stage: Stage) -> None:
    assert stage.run(starts=1) == 0
    assert stage.report()["sla"] is None


# --- failed starts --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("behave", "reason"),
    [
        (
            "exit",
            r"it was not ready when it ended \(exit code 3\)\n  \| error: the model is broken",
        ),
        ("failed", "killed by signal 9"),
        ("dirty", r"it did not stop cleanly \(exit code 9\)"),
    ],
)
def test_a_failed_start_ends_the_run_with_its_reason(
    stage: Stage, behave: str, reason: str
) -> None:
    stage.options["behave"] = behave
    with pytest.raises(EngineError, match=reason) as failure:
        stage.run()
    assert failure.value.exit_code == 4
    assert "uncounted start" in str(failure.value)
    assert len(stage.journal()) == 1
    assert is_gone(stage.journal()[0]["pid"])
    assert stage.leftovers() == []


@pytest.mark.parametrize(
    ("behave", "reason"),
    [("hang", "it was not ready in time"), ("tokenless", "its record has no first token in time")],
)
def test_a_start_that_takes_too_long_has_failed(stage: Stage, behave: str, reason: str) -> None:
    stage.options["behave"] = behave
    with pytest.raises(EngineError, match=reason):
        stage.run(timeout_s=1.0)
    assert all(is_gone(start["pid"]) for start in stage.journal())


def test_a_process_that_does_not_stop_is_killed_and_has_failed(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(coldstart_run, "STOP_TIMEOUT_S", 0.2)
    stage.options["behave"] = "stay"
    with pytest.raises(EngineError, match="did not stop within"):
        stage.run()
    assert is_gone(stage.journal()[0]["pid"])
    assert stage.leftovers() == []


def test_a_command_that_does_not_exist_is_a_failed_start(stage: Stage) -> None:
    run = Run(target=None, starts=1, cold=False, timeout_s=5.0, serve=("/nonexistent/preheat",))
    with pytest.raises(EngineError, match="cannot be run: No such file"):
        run_and_report(run, sla_s=None, json_file=None)


def test_a_wrong_target_is_told_before_anything_starts(stage: Stage) -> None:
    with pytest.raises(SpecError, match=r"none\.gguf does not exist"):
        stage.run(target="none.gguf")
    assert not (stage.home / "journal").exists()


# --- interrupts -----------------------------------------------------------------------------------

INTERRUPTED_RUN = """
import sys
from pathlib import Path
from preheat.cli import coldstart_run
from preheat.cli.coldstart_run import Run, run_and_report
coldstart_run._scratch_parent = lambda: sys.argv[1]
try:
    run_and_report(
        Run(target=None, starts=3, cold=False, timeout_s=60.0, serve=tuple(sys.argv[2:])),
        sla_s=None, json_file=None,
    )
except KeyboardInterrupt:
    sys.exit(130)
"""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_an_interrupted_run_stops_its_child_and_clears_up(
    stage: Stage, number: signal.Signals
) -> None:
    stage.options["behave"] = "hang"
    with subprocess.Popen(
        [sys.executable, "-c", INTERRUPTED_RUN, str(stage.home / "tmp"), *stage.serve]
    ) as runner:
        try:
            pid = stage.await_journal()[0]["pid"]
            assert len(stage.leftovers()) == 1
            runner.send_signal(number)
            assert runner.wait(30) == 130
        finally:
            runner.kill()
    assert is_gone(pid)
    assert stage.leftovers() == []


def test_a_run_whose_shell_ignores_interrupts_can_interrupt_its_child(stage: Stage) -> None:
    """As for `preheat coldstart run … &` in a script; the fake blocks nothing here."""
    script = (
        "import signal, subprocess, sys; signal.signal(signal.SIGINT, signal.SIG_IGN); "
        "sys.exit(subprocess.call([sys.executable, '-c', *sys.argv[1:]]))"
    )
    stage.options["behave"] = "default-interrupt"
    done = subprocess.run(
        [sys.executable, "-c", script, INTERRUPTED_RUN, str(stage.home / "tmp"), *stage.serve],
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    assert "did not stop cleanly (signal 2)" in done.stderr


# --- the page cache -------------------------------------------------------------------------------


def planted(path: Path, size_bytes: int = 4 << 20) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(os.urandom(4096) * (size_bytes // 4096))
    return path


def cached_share(path: Path) -> float | None:
    with path.open("rb") as file:
        return page_cache_share(file.fileno(), path.stat().st_size)


def test_dropping_a_file_empties_its_page_cache_even_if_just_written(tmp_path: Path) -> None:
    path = planted(tmp_path / "model.gguf")
    path.read_bytes()
    before = cached_share(path)
    if before is None:
        pytest.skip("this kernel does not tell what it caches")
    assert before == 1.0
    drop_from_page_cache(path)
    after = cached_share(path)
    if after == 1.0 and _in_memory(tmp_path):
        pytest.skip("the temporary directory lies in memory")
    assert after == 0.0


def _in_memory(path: Path) -> bool:
    done = subprocess.run(
        ["stat", "-f", "-c", "%T", str(path)], capture_output=True, text=True, check=True
    )
    return done.stdout.strip() in ("tmpfs", "ramfs")


def test_a_cold_run_drops_the_weights_before_each_counted_start(
    stage: Stage, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    weights = planted(stage.cache / "models" / "weights.gguf")
    planted(stage.cache / "notes.json", 4096)
    dropped: list[tuple[Path, int]] = []
    monkeypatch.setattr(
        coldstart_run,
        "drop_from_page_cache",
        lambda path: dropped.append((path, len(stage.journal()))),
    )
    stage.options["cached"] = "0.0"
    assert stage.run(starts=3, cold=True) == 0
    assert dropped == [(weights, 1), (weights, 2), (weights, 3)]
    text = capsys.readouterr().out
    assert "weights.gguf (the weights only, not the programs)" in text
    assert "weights found in the page cache: 0 % to 0 %" in text
    assert "not all starts" not in text
    assert stage.report()["dropped_files"] == [str(weights)]


def test_a_cold_run_whose_records_are_warm_says_so(
    stage: Stage, capsys: pytest.CaptureFixture[str]
) -> None:
    planted(stage.cache / "weights.gguf")
    stage.options["cached"] = "1.0"
    stage.run(starts=1, cold=True)
    assert "! not all starts were cold" in capsys.readouterr().out


def test_a_warm_run_whose_records_are_cold_says_so(
    stage: Stage, capsys: pytest.CaptureFixture[str]
) -> None:
    stage.options["cached"] = "0.2"
    stage.run(starts=1)
    assert "! not all starts were warm" in capsys.readouterr().out


def test_a_cold_run_without_weights_to_drop_is_refused(stage: Stage) -> None:
    with pytest.raises(SpecError, match="no model file was found"):
        stage.run(cold=True)


def test_the_weights_of_a_target_are_its_own_files(stage: Stage) -> None:
    cached = planted(stage.cache / "fetched.gguf")
    model = planted(stage.home / "models" / "own.gguf", 4096)
    assert weight_files(default_spec(), stage.cache) == [cached]
    assert weight_files(resolve_target(str(model)), stage.cache) == [model]
    assert weight_files(resolve_target(str(model.parent)), stage.cache) == [model]
    spec = stage.home / "preheat.yaml"
    spec.write_text(
        "models: [{name: a, versions: [{source: {uri: models/own.gguf}}]}]", encoding="utf-8"
    )
    assert weight_files(resolve_target(str(spec)), stage.cache) == [model]


# --- small things ---------------------------------------------------------------------------------


def test_a_free_port_can_be_bound() -> None:
    with socket.socket() as server:
        server.bind(("127.0.0.1", coldstart_run._free_port()))


def test_directories_too_long_for_sockets_are_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "gettempdir", lambda: "/short")
    assert coldstart_run._scratch_parent() == "/short"
    monkeypatch.setattr(tempfile, "gettempdir", lambda: "/" + "long" * 20)
    assert coldstart_run._scratch_parent() == "/tmp"
