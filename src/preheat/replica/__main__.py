"""The agent's process: ``python -m preheat.replica PLAN.json``.

Two things are begun before anything heavy is imported, since a start waits for both: the engine's
process, which starts and imports, and a thread that reads and hashes the weights. Then ``agent.py``
takes over. Until it does, orders by signal are only noted.
"""

from __future__ import annotations

import json
import signal
import sys
import time
from importlib import import_module

from preheat.core.spawn import become_subreaper
from preheat.core.yielding import yielding
from preheat.replica.begun import Begun

STARTED_S = time.monotonic()
HASH_PATIENCE_S = 0.2


def main() -> int:
    orders: list[int] = []
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda received, _: orders.append(received))
    # Before the engine exists: what it leaves behind must come to us, however early it dies.
    become_subreaper()
    plan_file = sys.argv[1]
    with open(plan_file, "rb") as file:  # noqa: PTH123 — pathlib costs 4 ms, and the weights wait
        begun = Begun(json.load(file), orders)
    # Hashing and the engine's imports want two cores; what comes now can go on while the engine
    # loads. Large weights are not waited for: the agent must answer meanwhile.
    begun.wait_for_weights(HASH_PATIENCE_S)
    # asyncio does without it, and nothing here speaks TLS: 6 ms and the mapping of OpenSSL.
    sys.modules["ssl"] = None  # type: ignore[assignment]
    yielding(lambda: import_module("preheat.replica.agent"))
    from preheat.replica.agent import run

    return run(plan_file, begun, STARTED_S)


if __name__ == "__main__":
    sys.exit(main())
