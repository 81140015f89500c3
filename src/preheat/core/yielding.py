"""Work that yields the processor: for imports that nobody waits for yet, beside what a start waits
for. Imports next to nothing, since it stands on the start path.
"""

from __future__ import annotations

import os
import threading

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable

LOWEST_PRIORITY = 19


def yielding(work: Callable[[], object]) -> None:
    """Runs ``work`` in a thread of the lowest priority and waits for it; raises what it raises.

    On Linux each thread has a niceness of its own, and none can take its own back without
    privileges: hence a thread, which ends with its work.
    """
    raised: list[BaseException] = []

    def run() -> None:
        try:
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), LOWEST_PRIORITY)
            work()
        except BaseException as error:  # noqa: BLE001 — passed on to who waits
            raised.append(error)

    thread = threading.Thread(target=run, name="yielding")
    thread.start()
    thread.join()
    if raised:
        raise raised[0]
