from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.core.records import example, phase, record, sound_records

from preheat.cli.waterfall import ASCII, UNICODE, Line, milliseconds, percent, size, waterfall
from preheat.core.coldstart import ColdStart


def text_of(lines: list[Line]) -> str:
    return "\n".join("".join(text for text, _ in line).rstrip() for line in lines)


def row(text: str, name: str) -> str:
    (found,) = [line for line in text.splitlines() if line.lstrip().startswith(name)]
    return found


@settings(max_examples=50)
@given(sound_records(), st.integers(24, 200), st.sampled_from([UNICODE, ASCII]))
def test_no_line_is_wider_than_asked(sound: ColdStart, width: int, glyphs: object) -> None:
    lines = waterfall(sound, width, glyphs=ASCII if glyphs is ASCII else UNICODE)
    assert max(map(len, text_of(lines).splitlines())) <= width


def test_bars_stand_where_their_phases_were() -> None:
    halves = record(phase("first", 0, 0.5), phase("second", 0.5, 0.75), phase("third", 0.75, 1))
    text = text_of(waterfall(halves, 6 + 1 + 40 + 18, glyphs=ASCII))
    assert row(text, "first")[7:47] == "#" * 20 + " " * 20
    assert row(text, "second")[7:47] == " " * 20 + "#" * 10 + " " * 10
    assert row(text, "third")[7:47] == " " * 30 + "#" * 10
    assert row(text, "second")[47:].split() == ["250.0", "ms", "25", "%"]


def test_children_are_indented_under_their_parents_in_order_of_time() -> None:
    lines = text_of(waterfall(example(), 100)).splitlines()
    labels = [line[:8].rstrip() for line in lines[2:14]]
    assert labels == [
        "process",
        "weights",
        "  read",
        "  hash",
        "warmup",
        "  prompt",
        "  prompt",
        "publish",
        "track en",
        "start",
        "  listen",
        "",
    ]


def test_the_conclusions_name_phase_bytes_cache_and_coverage() -> None:
    text = text_of(waterfall(example(), 100))
    assert "Most of it went to weights.hash: 400 ms, 40 %." in text
    assert "98.4 MB read; 100 % of them lay in the page cache before (a warm start)." in text
    assert "The phases cover 99.0 % of the time from spawn to first token." in text
    assert "Ready after 1,000 ms, first token after 1,000 ms." in text


def test_only_the_dominating_phase_is_marked() -> None:
    marked = [line for line in waterfall(example(), 80) if any(s == "bold red" for _, s in line)]
    assert len(marked) == 1
    assert marked[0][0][0].strip() == "hash"


def test_a_record_with_holes_says_so() -> None:
    text = text_of(waterfall(record(phase("a", 0, 0.5), phase("b", 0.4, 0.9)), 100))
    assert "cover 90.0 % of the time from spawn to first token; below 98 %" in text
    assert "The record is not sound: a and b overlap by 0.100000 s on the track main." in text


def test_a_failed_start_shows_its_reason_and_what_is_known() -> None:
    failed = record(phase("a", 0, 0.5), first_token_s=None, outcome="killed by signal 9")
    text = text_of(waterfall(failed, 80))
    assert "This start failed: killed by signal 9" in text
    assert "No first token." in text
    assert row(text, "a ").endswith("500.0 ms 100 %")
    assert "This start failed" in text_of(waterfall(record(first_token_s=None, outcome="x"), 80))


def test_an_unknown_share_of_the_page_cache_is_not_made_up() -> None:
    text = text_of(waterfall(record(page_cache_share=None), 100))
    assert "their share in the page cache is not known" in text
    assert "warm" not in text_of(waterfall(record(page_cache_share=0.5), 100))


def test_a_note_about_the_baseline_is_added() -> None:
    text = text_of(waterfall(example(), 100, note="it took 2 s"))
    assert "Slower than its baseline: it took 2 s." in text


def test_ascii_glyphs_give_plain_ascii() -> None:
    assert text_of(waterfall(example(), 30, glyphs=ASCII)).isascii()


@pytest.mark.parametrize(
    ("shown", "text"),
    [
        (milliseconds(0.0004), "0.4 ms"),
        (milliseconds(0.0371), "37 ms"),
        (milliseconds(1.2041), "1,204 ms"),
        (percent(0.3719), "37 %"),
        (percent(0.9871, 1), "98.7 %"),
        (size(0), "0 B"),
        (size(98_362_432), "98.4 MB"),
        (size(2_500_000_000_000), "2.5 TB"),
    ],
)
def test_figures_have_their_units(shown: str, text: str) -> None:
    assert shown == text


def test_long_names_are_cut_and_leave_room_for_the_figures() -> None:
    long = record(phase("a" * 200, 0, 1))
    for width in (30, 80):
        text = text_of(waterfall(long, width))
        (line,) = [line for line in text.splitlines() if "…" in line]
        assert line.startswith("aaa")
        assert line.endswith("1000.0 ms 100 %")
