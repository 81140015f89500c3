"""Receives the records of preheat's Envoy, as the control plane does, in a process of its own.

Stands beside Envoy in ``gateway.py``, so that what records cost is counted with the gateway.
Prints how many records it received when it is ended.
usage: records_consumer.py SOCKET
"""

from __future__ import annotations

import asyncio
import contextlib
import signal
import sys
from pathlib import Path

from preheat.dataplane.envoy.records import RecordPipe, RecordStream

TAKE_EVERY_S = 0.25


async def consume(path: Path) -> None:
    stream = RecordStream()
    ended = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, ended.set)
    pipe = RecordPipe(path, stream)
    while not ended.is_set():
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(ended.wait(), TAKE_EVERY_S)
        stream.take()
    pipe.close()
    print(stream.received)


if __name__ == "__main__":
    asyncio.run(consume(Path(sys.argv[1])))
