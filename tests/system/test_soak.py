"""Memory, descriptors and threads stay flat while requests come and are broken off."""

from __future__ import annotations

import asyncio

import pytest
from tests.system.served import Served, wait_until
from tests.system.soak import Soak, slope, slopes


def test_a_planted_leak_is_found_and_noise_is_not() -> None:
    leak = [(i, 1000.0 + i * 10 + (i * 7919 % 13)) for i in range(600)]
    flat = [(i, 1000.0 + (i * 7919 % 1300)) for i in range(600)]
    assert slope("p", "rss_kb", leak).grows
    assert not slope("p", "rss_kb", flat).grows


@pytest.mark.parametrize(
    "requests",
    [1200, pytest.param(6_000, marks=[pytest.mark.slow, pytest.mark.timeout(900)])],
)
def test_nothing_grows_while_requests_come_and_a_fifth_is_broken_off(requests: int) -> None:
    with Served() as preheat:
        soak = Soak(preheat, requests)
        asyncio.run(soak.run())
        assert soak.failed == []
        assert soak.cancelled > requests * 0.02
        grown = [s for s in slopes(soak.samples) if s.grows]
        assert [s for s in grown if s.quantity != "rss_kb" or requests > 5_000] == []
        # Every slot is free again: as many requests as there are slots are answered side by side.
        wait_until(lambda: preheat.chat()[0] == 200, "it answers")
