"""The control plane's process, run by the supervisor: ``python -m preheat.controlplane JSON``."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import time

STARTED_S = time.monotonic()


def main() -> int:
    """Its exit code is that of ``preheat serve``."""
    # The terminal's Ctrl-C is for the supervisor, and output from the background must not stop us.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTTOU, signal.SIG_IGN)
    import msgspec

    from preheat.controlplane.boot import Orders, boot
    from preheat.core.errors import PreheatError

    orders = msgspec.json.decode(sys.argv[1], type=Orders)
    try:
        begun = boot(orders, STARTED_S)
        # Only now: the agent and Envoy are on their way, and these imports take as long as theirs.
        from preheat.controlplane.runtime import ControlPlane, run

        return run(ControlPlane(begun))
    except PreheatError as error:
        failure = error
    except OSError as error:
        failure = PreheatError(f"the machine refuses what is needed: {error}")
    from preheat.controlplane.notices import say_failure

    say_failure(failure, as_json=orders.log_json)
    return failure.exit_code


if __name__ == "__main__":
    code = main()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            stream.flush()
    # Threads that wait for a disk or a name server must not hold the end; what counts is written.
    os._exit(code)
