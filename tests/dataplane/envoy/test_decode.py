from __future__ import annotations

from typing import Any

import pytest
from envoy.data.accesslog.v3 import accesslog_pb2
from google.protobuf import json_format

from preheat.dataplane.envoy.records import decode, outcome
from preheat.dataplane.envoy.usage import COUNTS, COUNTS_KEY


def _noted(counts: dict[str, Any]) -> dict[str, Any]:
    """As the filters note it: the model, and the counts in one text."""
    noted = {"model": counts.pop("model")} if "model" in counts else {}
    if counts:
        noted[COUNTS_KEY] = " ".join(str(counts.get(name, "")) for name in COUNTS)
    return noted


def entry(
    tag: str = "1500 8000 m-0@1 v1", flags: str = "", **fields: Any
) -> accesslog_pb2.HTTPAccessLogEntry:
    value: dict[str, Any] = {
        "commonProperties": {
            "startTime": "2026-01-02T03:04:05.250Z",
            "duration": "0.125s",
            "metadata": {"filterMetadata": {"preheat": _noted(fields)}},
            "customTags": {"preheat": tag},
            "upstreamRequestAttemptCount": 1,
            "accessLogType": "DownstreamEnd",
        },
        "request": {"path": "/v1/completions?x=1", "requestBodyBytes": "9"},
        "response": {"responseCode": 200, "responseBodyBytes": "99"},
    }
    if flags:
        value["commonProperties"]["responseFlags"] = {flags: True}
    made = accesslog_pb2.HTTPAccessLogEntry()
    json_format.ParseDict(value, made)
    return made


def streamed(tag: str = "1500 8000 m-0@1 v1", **fields: Any) -> accesslog_pb2.HTTPAccessLogEntry:
    made = entry(tag, **fields)
    made.response.response_headers["content-type"] = "text/event-stream; charset=utf-8"
    return made


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


def test_an_entry_that_knows_nothing_is_a_record_too() -> None:
    made = entry("   ")
    made.common_properties.ClearField("metadata")
    made.response.Clear()
    record = decode(made)
    assert (record.model, record.replica, record.version, record.status) == ("", "", "", 0)
    assert record.prompt_tokens is record.completion_tokens is record.ttft_s is None


@pytest.mark.parametrize(("kind", "final"), [(0, True), (5, False), (6, True)])
def test_only_periodic_entries_are_not_final(kind: int, final: bool) -> None:
    made = entry()
    made.common_properties.access_log_type = kind
    assert decode(made).final is final


@pytest.mark.parametrize(
    ("flag", "status", "wanted"),
    [
        ("downstreamConnectionTermination", 0, "client_left"),
        ("downstreamConnectionTermination", 200, "client_left"),
        ("downstreamRemoteReset", 200, "client_left"),
        ("noHealthyUpstream", 503, "no_capacity"),
        ("noClusterFound", 503, "no_capacity"),
        ("upstreamOverflow", 429, "no_capacity"),
        ("upstreamConnectionFailure", 503, "upstream_failed"),
        ("upstreamConnectionTermination", 502, "upstream_failed"),
        ("upstreamRemoteReset", 200, "upstream_failed"),
        ("upstreamProtocolError", 200, "upstream_failed"),
        ("downstreamProtocolError", 400, "refused"),
        ("", 200, "ok"),
        ("", 302, "ok"),
        ("", 404, "refused"),
        ("", 500, "error"),
        ("", 503, "error"),
    ],
)
def test_flags_say_whose_fault_it_was(flag: str, status: int, wanted: str) -> None:
    made = entry(flags=flag)
    made.response.response_code.value = status
    assert decode(made).outcome == wanted


def test_a_503_of_the_gateways_own_is_a_lack_of_capacity() -> None:
    assert outcome(503, None, upstream=False) == "no_capacity"
    assert outcome(503, None, upstream=True) == "error"
