from __future__ import annotations

import io
import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest

from preheat.controlplane import notices
from preheat.controlplane.notices import Notices, bar, trim_in_place
from preheat.core.errors import EngineError, PreheatError


def logged(directory: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (directory / "preheat.jsonl").read_text().splitlines()]


def test_people_read_text_and_the_file_has_json(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    Notices(tmp_path, as_json=False).say("  ✓ hot", event="ready", start="a@1")
    assert capsys.readouterr().out == "  ✓ hot\n"
    (entry,) = logged(tmp_path)
    assert (entry["event"], entry["text"], entry["start"]) == ("ready", "✓ hot", "a@1")


def test_as_json_every_line_is_json_the_failure_too(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    said = Notices(tmp_path, as_json=True)
    said.say("two\nlines", event="x", path=tmp_path)
    said.progress("… 34 MB")
    said.fail(EngineError("it broke", advice="mend it"))
    out, err = capsys.readouterr()
    lines = [json.loads(line) for line in out.splitlines()]
    assert [line["event"] for line in lines] == ["x", "failed"]
    assert (lines[1]["advice"], lines[1]["exit_code"]) == ("mend it", 4)
    assert err == ""


def test_a_failure_is_one_message_with_its_advice_on_standard_error(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    Notices(tmp_path, as_json=False).fail(EngineError("it broke", advice="mend it"))
    assert capsys.readouterr() == ("", "preheat: it broke\n  → mend it\n")
    assert logged(tmp_path)[0]["event"] == "failed"


def test_a_reader_that_left_does_not_end_anything(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    broken = os.fdopen(writer, "w")
    monkeypatch.setattr("sys.stdout", broken)
    said = Notices(tmp_path, as_json=False)
    said.say("one", event="one")
    said.say("two", event="two")
    assert [entry["event"] for entry in logged(tmp_path)] == ["one", "two"]
    sys.stdout.close()
    with pytest.raises(BrokenPipeError):
        broken.close()


def test_a_file_that_takes_nothing_does_not_end_anything(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    said = Notices(tmp_path / "gone", as_json=False)
    said.say("one", event="one")
    assert said.lost == 1
    assert capsys.readouterr().out == "one\n"


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_progress_is_replaced_on_a_terminal_and_fits_its_width(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    terminal = Terminal()
    monkeypatch.setattr("sys.stdout", terminal)
    monkeypatch.setenv("COLUMNS", "20")
    said = Notices(tmp_path, as_json=False)
    said.progress("x" * 50)
    said.say("done", event="done")
    assert terminal.getvalue() == f"\r\x1b[2K{'x' * 19}\r\x1b[2Kdone\n"


def test_progress_is_nothing_where_there_is_no_terminal(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    Notices(tmp_path, as_json=False).progress("34 MB")
    assert capsys.readouterr().out == ""


def test_the_log_file_is_private_and_rotated(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(notices, "FILE_MAX_BYTES", 1000)
    said = Notices(tmp_path, as_json=False)
    for number in range(200):
        said.say("a line of some length", event="test", number=number)
    names = sorted(path.name for path in tmp_path.iterdir())
    assert names == ["preheat.jsonl", *(f"preheat.jsonl.{n}" for n in range(1, 4))]
    assert all(path.stat().st_size < 1200 for path in tmp_path.iterdir())
    assert all(path.stat().st_mode & 0o777 == 0o600 for path in tmp_path.iterdir())
    kept = [
        json.loads(line)["number"]
        for name in reversed(names)
        for line in (tmp_path / name).read_text().splitlines()
    ]
    assert kept == list(range(kept[0], 200))


def test_a_log_that_another_process_writes_is_trimmed_in_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(notices, "FILE_MAX_BYTES", 100)
    log = tmp_path / "envoy.log"
    with log.open("ab", buffering=0) as writer:
        writer.write(b"old\n" * 10)
        trim_in_place(log)
        assert log.stat().st_size == 40
        writer.write(b"new\n" * 30)
        trim_in_place(log)
        assert log.stat().st_size == 0
        assert (tmp_path / "envoy.log.1").read_bytes() == b"new\n" * 25
        writer.write(b"later\n")
    assert log.read_bytes() == b"later\n"


def test_a_log_that_does_not_exist_is_no_error(tmp_path: Path) -> None:
    trim_in_place(tmp_path / "none.log")


@pytest.mark.parametrize(
    ("done", "total", "shown"),
    [(0, 100, "░░░░"), (50, 100, "██░░"), (100, 100, "████"), (130, 100, "████"), (5, None, "")],
)
def test_the_bar_shows_the_share(done: int, total: int | None, shown: str) -> None:
    assert bar(done, total, width=4) == shown


def test_a_failure_before_there_is_a_log_is_said_too(capsys: pytest.CaptureFixture[str]) -> None:
    notices.say_failure(PreheatError("no spec"), as_json=True)
    assert json.loads(capsys.readouterr().out)["text"] == "no spec"
