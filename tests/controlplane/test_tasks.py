from __future__ import annotations

import asyncio

from preheat.controlplane.tasks import Tasks


async def fails() -> None:
    raise ValueError("broken")


def test_who_dies_is_reported_by_its_weight() -> None:
    async def scenario() -> None:
        tasks = Tasks(essential_died=essential.append, errand_died=errands.append)
        await asyncio.wait([tasks.essential(fails()), tasks.errand(fails())])
        await asyncio.sleep(0)

    essential: list[BaseException] = []
    errands: list[BaseException] = []
    asyncio.run(scenario())
    assert [str(e) for e in essential] == [str(e) for e in errands] == ["broken"]


def test_cancelling_ends_all_and_is_no_death() -> None:
    async def scenario() -> None:
        tasks = Tasks(essential_died=died.append, errand_died=died.append)
        running = [tasks.essential(asyncio.sleep(3600)), tasks.errand(asyncio.sleep(3600))]
        await asyncio.sleep(0)
        await tasks.cancel()
        assert all(task.cancelled() for task in running)

    died: list[BaseException] = []
    asyncio.run(scenario())
    assert died == []
