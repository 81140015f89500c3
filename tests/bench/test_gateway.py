from __future__ import annotations

from pathlib import Path

import pytest

from common import Interval
from gateway import LOADS, RECORDS_LOG, Measurement, check_records, ratios_of, tables
from processes import BenchError


def measurement(subject: str, load: str, round_: int, scale: float) -> Measurement:
    return Measurement(
        subject=subject,
        load=load,
        round=round_,
        requests_per_s=1000 / scale,
        ttfb_p50_ms=scale,
        ttfb_p99_ms=2 * scale,
        cpu_us_per_request=50 * scale,
        rss_bytes=1 << 20,
        errors=1 if (subject, load) == ("preheat", "parallel") else 0,
        errors_by_kind={},
        completed=100,
    )


def rounds_of(scales: dict[str, float], rounds: range) -> list[Measurement]:
    return [
        measurement(subject, load, i, scale * (i + 1))
        for i in rounds
        for load in LOADS
        for subject, scale in scales.items()
    ]


def test_ratios_are_ours_over_the_peers_round_by_round() -> None:
    ratios = ratios_of(rounds_of({"preheat": 3.0, "vllm-router": 2.0}, range(4)))
    assert ratios["p99_ttfb_unary_vs_vllm_router"] == Interval(1.5, 1.5, 1.5)
    assert ratios["cpu_per_request_vs_vllm_router"] == Interval(1.5, 1.5, 1.5)
    assert "litellm_cpu_over_preheat" not in ratios


def test_errors_of_parallel_requests_are_summed_over_rounds() -> None:
    assert (
        ratios_of(rounds_of({"preheat": 1.0, "vllm-router": 1.0}, range(4)))["errors_parallel_1000"]
        == 4
    )


def test_only_rounds_that_both_ran_are_compared() -> None:
    others = rounds_of({"preheat": 1.0, "vllm-router": 1.0}, range(1, 4))
    slow = [measurement("litellm", "unary", i, 100.0 * (i + 1)) for i in (0, 3)]
    ratio = ratios_of([*others, *slow])["litellm_cpu_over_preheat"]
    assert ratio == Interval(100.0, 100.0, 100.0)


def test_the_tables_name_every_subject_and_ratio() -> None:
    measurements = rounds_of({"direct": 1.0, "preheat": 1.0, "vllm-router": 1.0}, range(2))
    ratios = ratios_of(measurements)
    text = tables(measurements, ratios)
    assert all(name in text for name in ("direct", "preheat", "vllm-router", *ratios))


def test_requests_that_left_no_record_make_the_comparison_void(tmp_path: Path) -> None:
    measurements = rounds_of({"preheat": 1.0, "vllm-router": 1.0}, range(2))
    (tmp_path / RECORDS_LOG).write_text("601\n")
    check_records(tmp_path, measurements)
    (tmp_path / RECORDS_LOG).write_text("some warning\n599\n")
    with pytest.raises(BenchError, match="600 requests went through preheat, but left 599 records"):
        check_records(tmp_path, measurements)
