"""The control plane's process: what the supervisor forks."""

from __future__ import annotations

import signal
import time

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any


def main(**orders: Any) -> int:
    """``orders`` are the fields of ``boot.Orders``. Its exit code is that of ``preheat serve``."""
    started_s = time.monotonic()
    # The terminal's Ctrl-C is for the supervisor, and output from the background must not stop us.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTTOU, signal.SIG_IGN)
    from preheat.controlplane.boot import Orders, boot, import_the_rest
    from preheat.core.errors import PreheatError

    try:
        begun = boot(Orders(**orders), started_s)
        # Only now: the agents are on their way, and these imports take as long as theirs.
        import_the_rest(begun)
        from preheat.controlplane.runtime import ControlPlane, run

        return run(ControlPlane(begun))
    except PreheatError as error:
        failure = error
    except OSError as error:
        failure = PreheatError(f"the machine refuses what is needed: {error}")
    from preheat.controlplane.notices import say_failure

    say_failure(failure, as_json=orders["log_json"])
    return failure.exit_code
