from __future__ import annotations

import argparse
import json
import os
import pty
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest
from tests.core.records import example, phase, record

from preheat.cli.coldstart import find_record, parse_duration_s, register
from preheat.core.coldstart import ColdStart
from preheat.core.errors import PreheatError, SpecError
from preheat.core.traces.store import StoredRecord, write_record


@pytest.fixture
def coldstarts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The directory of records of a user who has none yet."""
    monkeypatch.setenv("PREHEAT_STATE_DIR", str(tmp_path / "state"))
    monkeypatch.setenv("COLUMNS", "90")
    return tmp_path / "state" / "coldstarts"


def preheat(*argv: str) -> int:
    parser = argparse.ArgumentParser()
    register(parser.add_subparsers())
    args = parser.parse_args(["coldstart", *argv])
    code: int = args.func(args)
    return code


def two_starts(directory: Path) -> tuple[Path, Path]:
    older = write_record(record(start_id="chat-v1-0@1", unix_time_s=1000.0), directory)
    newer = msgspec.structs.replace(example(), start_id="chat-v1-0@2")
    return older, write_record(newer, directory)


def test_list_shows_every_start_newest_first(
    coldstarts: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    two_starts(coldstarts)
    assert preheat("list") == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == [
        "ID",
        "1760000000000-chat-v1-0@2",
        "1000000-chat-v1-0@1",
    ]
    assert "weights.hash" in lines[1]
    assert "1,000 ms" in lines[1]


def test_list_as_json_carries_the_derived_figures(
    coldstarts: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    two_starts(coldstarts)
    assert preheat("list", "--json") == 0
    newest, oldest = json.loads(capsys.readouterr().out)
    assert newest["dominating"]["name"] == "weights.hash"
    assert newest["coverage"] == pytest.approx(0.99)
    assert newest["time_to_first_token_s"] == 1.0
    assert oldest["dominating"] is None


def test_an_empty_list_is_no_error(coldstarts: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert preheat("list") == 0
    assert str(coldstarts) in capsys.readouterr().out
    assert preheat("list", "--json") == 0
    assert json.loads(capsys.readouterr().out) == []


def test_a_broken_record_is_warned_of_and_skipped(
    coldstarts: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    two_starts(coldstarts)
    (coldstarts / "1760000000009-broken.json").write_text("{")
    assert preheat("list") == 0
    output = capsys.readouterr()
    assert "1760000000009-broken.json: skipped" in output.err
    assert len(output.out.splitlines()) == 3


def test_show_draws_the_latest_start_as_plain_text_in_a_pipe(
    coldstarts: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    two_starts(coldstarts)
    assert preheat("show") == 0
    text = capsys.readouterr().out
    assert text.startswith("chat-v1-0@2: chat v1 on llama.cpp")
    assert "Most of it went to weights.hash" in text
    assert "\x1b" not in text
    assert max(map(len, text.splitlines())) == 90


def test_show_colours_a_terminal_and_keeps_to_its_width(coldstarts: Path) -> None:
    two_starts(coldstarts)
    script = "import sys; from preheat.cli.main import main; sys.exit(main(sys.argv[1:]))"
    controller, terminal = pty.openpty()
    environment = {**os.environ, "COLUMNS": "60", "TERM": "xterm-256color"}
    environment.pop("NO_COLOR", None)
    try:
        with subprocess.Popen(
            [sys.executable, "-c", script, "coldstart", "show"], stdout=terminal, env=environment
        ) as process:
            os.close(terminal)
            output = b""
            # Reading from a terminal that the other side has closed is an error on Linux.
            while chunk := _read(controller):
                output += chunk
        assert process.returncode == 0
    finally:
        os.close(controller)
    assert b"\x1b[1;31m" in output
    plain = _without_colours(output.decode())
    assert max(map(len, plain.splitlines())) == 60


def _read(descriptor: int) -> bytes:
    try:
        return os.read(descriptor, 65536)
    except OSError:
        return b""


def _without_colours(text: str) -> str:
    import re

    return re.sub(r"\x1b\[[0-9;]*m", "", text)


def test_show_as_json_holds_the_whole_record(
    coldstarts: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_record(example(), coldstarts)
    assert preheat("show", "--json") == 0
    shown = json.loads(capsys.readouterr().out)
    assert msgspec.convert(shown["record"], ColdStart) == example()
    assert shown["problems"] == []
    assert shown["slower_than_baseline"] is None


def test_show_tells_of_a_start_slower_than_its_baseline(
    coldstarts: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for number in range(5):
        write_record(record(first_token_s=1.0, unix_time_s=1000.0 + number), coldstarts)
    write_record(record(first_token_s=1.5, unix_time_s=2000.0), coldstarts)
    assert preheat("show") == 0
    assert "Slower than its baseline: chat-v1-0@1 took 1500 ms" in capsys.readouterr().out


def test_show_without_any_record_says_how_to_get_one(coldstarts: Path) -> None:
    with pytest.raises(SpecError, match="no start is recorded yet"):
        preheat("show")


def stored(*ids: str) -> list[StoredRecord]:
    return [
        StoredRecord(Path(f"{one}.json"), record(start_id=one.partition("-")[2])) for one in ids
    ]


@pytest.mark.parametrize(
    ("wanted", "index"),
    [("latest", 0), ("30-a@2", 0), ("a@1", 1), ("b@1", 2), ("10", 3), ("20-b", 2)],
)
def test_a_start_is_found_by_id_beginning_or_start_id(wanted: str, index: int) -> None:
    """A start id that occurs twice means the newest."""
    known = stored("30-a@2", "21-a@1", "20-b@1", "10-a@1")
    assert find_record(known, wanted) is known[index]


@pytest.mark.parametrize(
    ("wanted", "text"), [("2", "2 recorded starts"), ("x", "no recorded"), ("", "no")]
)
def test_what_names_no_single_start_is_an_error(wanted: str, text: str) -> None:
    with pytest.raises(SpecError, match=text):
        find_record(stored("30-a@2", "21-a@1", "20-b@1"), wanted)


def test_export_writes_a_chrome_trace(
    coldstarts: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    two_starts(coldstarts)
    target = tmp_path / "trace.json"
    assert preheat("export", "chat-v1-0@2", "--chrome", str(target)) == 0
    assert str(target) in capsys.readouterr().out
    assert len(json.loads(target.read_text())["traceEvents"]) > 10


def test_an_export_that_cannot_be_written_is_an_error(coldstarts: Path, tmp_path: Path) -> None:
    two_starts(coldstarts)
    with pytest.raises(SpecError, match=r"no/trace\.json cannot be written: No such file"):
        preheat("export", "--chrome", str(tmp_path / "no" / "trace.json"))


def test_export_without_a_destination_is_an_error(coldstarts: Path) -> None:
    two_starts(coldstarts)
    with pytest.raises(SpecError, match="where to export"):
        preheat("export")


def test_export_sends_spans_to_the_endpoint_given(
    coldstarts: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from preheat.core.traces import otel

    asked: list[str | None] = []

    def export(start: ColdStart, endpoint: str | None = None) -> int:
        asked.append(endpoint)
        return len(start.phases) + 1

    monkeypatch.setattr(otel, "export_otlp", export)
    two_starts(coldstarts)
    assert preheat("export", "--otlp", "http://127.0.0.1:4318") == 0
    assert preheat("export", "--otlp") == 0
    assert asked == ["http://127.0.0.1:4318", None]
    assert "11 OpenTelemetry spans sent" in capsys.readouterr().out


def test_otlp_without_any_endpoint_is_an_error(
    coldstarts: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("OTEL_EXPORTER_OTLP_ENDPOINT", raising=False)
    monkeypatch.delenv("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", raising=False)
    two_starts(coldstarts)
    with pytest.raises(PreheatError, match="no endpoint"):
        preheat("export", "--otlp")


@pytest.mark.parametrize(
    ("text", "value_s"),
    [("1.2s", 1.2), ("1200ms", 1.2), ("1.2", 1.2), (" 3 s", 3.0), ("1e3ms", 1.0)],
)
def test_times_are_given_in_seconds_or_milliseconds(text: str, value_s: float) -> None:
    assert parse_duration_s(text) == pytest.approx(value_s)


@pytest.mark.parametrize("text", ["", "s", "ms", "fast", "0", "-1s", "nan", "inf", "1.2m", "1,2s"])
def test_what_is_no_time_is_refused(text: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError, match="is no time"):
        parse_duration_s(text)


@pytest.mark.parametrize(
    "argv", [["run"], ["run", "--cold", "--warm"], ["run", "--cold", "--starts", "0"], []]
)
def test_wrong_arguments_are_refused(argv: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        preheat(*argv)
    assert stopped.value.code == 2
    assert "usage:" in capsys.readouterr().err


def test_list_cells_stay_on_one_line(coldstarts: Path, capsys: pytest.CaptureFixture[str]) -> None:
    failed = record(phase("a", 0, 1), first_token_s=None, outcome="bad file:\n  no magic")
    write_record(failed, coldstarts)
    assert preheat("list") == 0
    assert len(capsys.readouterr().out.splitlines()) == 2
