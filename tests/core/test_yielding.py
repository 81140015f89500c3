from __future__ import annotations

import os
import threading

import pytest

from preheat.core.yielding import LOWEST_PRIORITY, yielding


def test_the_work_has_the_lowest_priority_and_nothing_else_has() -> None:
    before = os.getpriority(os.PRIO_PROCESS, 0)
    seen: list[int] = []
    yielding(lambda: seen.append(os.getpriority(os.PRIO_PROCESS, threading.get_native_id())))
    assert seen == [LOWEST_PRIORITY]
    assert os.getpriority(os.PRIO_PROCESS, 0) == before


@pytest.mark.parametrize("error", [ImportError("no"), SystemExit(3), KeyboardInterrupt()])
def test_what_the_work_raises_is_raised_here(error: BaseException) -> None:
    def fail() -> None:
        raise error

    with pytest.raises(type(error)) as caught:
        yielding(fail)
    assert caught.value is error


def test_it_waits_for_the_work_and_leaves_no_thread() -> None:
    threads = threading.active_count()
    done: list[bool] = []
    yielding(lambda: done.append(True))
    assert done
    assert threading.active_count() == threads
