from __future__ import annotations

from enum import StrEnum
from pathlib import Path

import pytest

from preheat.replica import document
from preheat.replica.lifecycle import INITIAL, TABLE, Event, State


class Light(StrEnum):
    RED = "red"
    """Stop."""
    GREEN = "green"
    """Go, ``now``."""


class Turn(StrEnum):
    TIME = "time is over"
    """It took
    long."""


SMALL = {Light.RED: {Turn.TIME: Light.GREEN}, Light.GREEN: {}}


def test_the_committed_page_is_what_the_table_says() -> None:
    for path, text in document.outputs().items():
        assert path.read_text(encoding="utf-8") == text


def test_a_diagram_has_an_arrow_for_each_way_from_state_to_state() -> None:
    assert document.mermaid(SMALL, Light.RED) == (
        "stateDiagram-v2\n    [*] --> red\n    red --> green: time is over\n    green --> [*]\n"
    )
    diagram = document.mermaid(TABLE, INITIAL)
    for state, row in TABLE.items():
        for event, target in row.items():
            (arrow,) = [
                x for x in diagram.splitlines() if x.startswith(f"    {state} --> {target}:")
            ]
            assert str(event) in arrow


def test_a_section_explains_every_state_and_event() -> None:
    text = document.section("Lights", SMALL, Light.RED)
    assert "| `red` | Stop. | time is over → `green` |" in text
    assert "| `green` | Go, `now`. | none, it is over |" in text
    assert "| time is over | It took long. |" in text
    page = document.section("Life", TABLE, INITIAL)
    for member in (*State, *Event):
        assert f"{member}" in page


def test_check_says_what_is_stale_and_writes_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    page = tmp_path / "sub" / "page.md"
    assert document.main({page: "x\n"}, ["--check"], module="some.module") == 1
    assert "run python -m some.module" in capsys.readouterr().out
    assert not page.parent.exists()
    assert document.main({page: "x\n"}, []) == 0
    assert page.read_text() == "x\n"
    assert document.main({page: "x\n"}, ["--check"]) == 0
    assert capsys.readouterr().out == f"wrote {page}\n"
