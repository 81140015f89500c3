"""Runs preheat's Envoy and receives its records beside it, as the control plane does.

Both are in one session, as under preheat: only there do priorities between them count. So what
records cost is counted with the gateway. Prints how many records it received when it is ended.
usage: records_consumer.py PIPE ENVOY ARGUMENT…
"""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

from preheat.dataplane.envoy.records import RecordPipe, RecordStream

TAKE_EVERY_S = 0.25


def main() -> None:
    path, *argv = sys.argv[1:]
    signal.pthread_sigmask(signal.SIG_BLOCK, (signal.SIGTERM,))
    stream = RecordStream()
    pipe = RecordPipe(Path(path), stream)
    with (
        Path(path).open("r+b", buffering=0) as stdin,
        subprocess.Popen(argv, stdin=stdin, restore_signals=True) as envoy,
    ):
        while signal.sigtimedwait((signal.SIGTERM,), TAKE_EVERY_S) is None:
            stream.take()
        envoy.kill()
    pipe.close()
    print(stream.received)


if __name__ == "__main__":
    main()
