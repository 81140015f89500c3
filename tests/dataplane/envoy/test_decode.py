from __future__ import annotations

from typing import Any

import pytest

from preheat.dataplane.envoy.records import decode, outcome
from preheat.dataplane.envoy.usage import COUNTS


def entry(
    start: str = "m-0@1",
    flags: str = "-",
    status: int = 200,
    kind: str = "DownstreamEnd",
    content_type: str = "application/json",
    model: str = "-",
    **counts: Any,
) -> str:
    """A line as Envoy writes it."""
    noted = " ".join(str(counts.get(name, "")) for name in COUNTS) if counts else "-"
    times = ("1767323045.250000", "125", "125000", "1500", "8000")
    return "\t".join(
        (
            *(*times, "9", "99", noted),
            *(kind, str(status), flags, start, "v1", "-", content_type, "1"),
            *("/v1/completions?x=1", model),
        )
    )


def streamed(**fields: Any) -> str:
    return entry(content_type="text/event-stream; charset=utf-8", **fields)


def test_times_are_in_seconds() -> None:
    record = decode(streamed(model="m", completion_tokens=5))
    assert record.start_unix_s == 1767323045.25
    assert record.duration_s == 0.125
    assert record.ttft_s == pytest.approx(0.0015)
    assert record.time_per_output_token_s == pytest.approx(0.002)


@pytest.mark.parametrize("tokens", [None, 0, 1])
def test_fewer_than_two_tokens_have_no_time_between_them(tokens: int | None) -> None:
    fields: dict[str, Any] = {} if tokens is None else {"completion_tokens": tokens}
    assert decode(streamed(**fields)).time_per_output_token_s is None


def test_a_whole_answer_has_no_first_token_and_the_engines_own_time() -> None:
    record = decode(entry(predicted_n=4, predicted_ms=10.0, completion_tokens=4))
    assert record.ttft_s is None
    assert record.time_per_output_token_s == pytest.approx(0.0025)
    assert decode(entry(predicted_ms=10.0)).time_per_output_token_s is None
    assert decode(entry(predicted_n=0, predicted_ms=0.0)).time_per_output_token_s is None


def test_usage_wins_over_the_engines_counts() -> None:
    record = decode(entry(prompt_tokens=1, completion_tokens=2, prompt_n=8, predicted_n=9))
    assert (record.prompt_tokens, record.completion_tokens) == (1, 2)
    record = decode(entry(prompt_n=8, cache_n=3, predicted_n=9))
    assert (record.prompt_tokens, record.completion_tokens) == (11, 9)


def test_a_line_that_knows_nothing_is_a_record_too() -> None:
    record = decode("\t".join(["0.5", *["-"] * 7, "NotSet", "0", *["-"] * 8]))
    assert (record.model, record.replica, record.version, record.status) == ("", "", "", 0)
    assert record.prompt_tokens is record.completion_tokens is record.ttft_s is None
    assert record.duration_s == 0.0


def test_a_model_may_hold_tabs_and_line_ends_and_moves_nothing() -> None:
    record = decode(entry(model="a\tb\n200\tc", completion_tokens=2))
    assert (record.model, record.completion_tokens) == ("a\tb\n200\tc", 2)
    assert record.path == "/v1/completions"


@pytest.mark.parametrize(
    ("kind", "final"),
    [("NotSet", True), ("DownstreamPeriodic", False), ("DownstreamEnd", True)],
)
def test_only_periodic_entries_are_not_final(kind: str, final: bool) -> None:
    assert decode(entry(kind=kind)).final is final


@pytest.mark.parametrize(
    ("flag", "status", "wanted"),
    [
        ("DC", 0, "client_left"),
        ("DC", 200, "client_left"),
        ("DR", 200, "client_left"),
        ("UH", 503, "no_capacity"),
        ("NC", 503, "no_capacity"),
        ("UO", 429, "no_capacity"),
        ("UF,URX", 503, "upstream_failed"),
        ("UC", 502, "upstream_failed"),
        ("UR", 200, "upstream_failed"),
        ("UPE", 200, "upstream_failed"),
        ("DPE", 400, "refused"),
        ("-", 200, "ok"),
        ("-", 302, "ok"),
        ("-", 404, "refused"),
        ("-", 500, "error"),
        ("-", 503, "error"),
    ],
)
def test_flags_say_whose_fault_it_was(flag: str, status: int, wanted: str) -> None:
    assert decode(entry(flags=flag, status=status)).outcome == wanted


def test_a_503_of_the_gateways_own_is_a_lack_of_capacity() -> None:
    assert outcome(503, "-", upstream=False) == "no_capacity"
    assert outcome(503, "-", upstream=True) == "error"
