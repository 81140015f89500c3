"""Envoy's process as the control plane sees it: started through the supervisor, and started again.

What does not belong here: what it routes (``routing.py``).
"""

from __future__ import annotations

import json
import resource
import signal
import time
from typing import TYPE_CHECKING

from preheat.controlplane.drivers.link import SupervisorLink
from preheat.core.paths import Paths
from preheat.dataplane.envoy.binary import environment, envoy_binary
from preheat.dataplane.envoy.publish import write_initial
from preheat.dataplane.envoy.resources import bootstrap
from preheat.replica.engines.plan import usable_cores

if TYPE_CHECKING:
    from collections.abc import Callable

NAME = "envoy"
# Descriptors that are not clients' or their upstreams'.
RESERVED_DESCRIPTORS = 200
LEAST_CONNECTIONS = 64
# How long Envoy may keep records that do not fill a buffer.
RECORDS_FLUSH_MS = 250
FIRST_RESTART_S = 0.05
LONGEST_RESTART_S = 10.0
# An Envoy that lived so long was sound; its end is no reason to wait.
SOUND_S = 30.0


def restart_pause_s(deaths: int) -> float:
    """Seconds to wait before Envoy is started again after so many quick deaths in a row, one or
    more. The first is not waited for."""
    return 0.0 if deaths < 2 else min(LONGEST_RESTART_S, FIRST_RESTART_S * 2.0 ** min(deaths, 16))


class Gateway:
    def __init__(
        self, paths: Paths, link: SupervisorLink, *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._paths = paths
        self._link = link
        self._clock = clock
        self._started_s = 0.0
        self.alive = False
        """Whether there is a process, or one has been asked for."""
        self.restarts = 0
        self.deaths = 0
        """Quick ones in a row."""

    @property
    def log(self) -> str:
        return str(self._paths.logs / "envoy.log")

    def start(self) -> None:
        """Asks for the process. Its files are kept, so one that is started again routes at once.

        Raises GatewayError if there is no binary.
        """
        binary = envoy_binary()
        if not (self._paths.xds / "lds.json").exists():
            write_initial(self._paths)
        descriptors, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        # A proxied connection takes two.
        connections = max(LEAST_CONNECTIONS, (descriptors - RESERVED_DESCRIPTORS) // 2)
        config = self._paths.runtime / "envoy.json"
        config.write_text(json.dumps(bootstrap(self._paths, max_connections=connections)))
        flags = (
            "-c", str(config),
            "--concurrency", str(usable_cores()),
            "--disable-hot-restart",
            "--reject-unknown-dynamic-fields",
            "-l", "warning",
            # A client's own nonsense in a body is no error of the gateway's.
            "--component-log-level", "misc:error,dynamic_modules:off",
            "--file-flush-interval-msec", str(RECORDS_FLUSH_MS),
        )  # fmt: skip
        self._link.spawn(
            NAME,
            (str(binary), *flags),
            log=self._paths.logs / "envoy.log",
            env=environment(),
            # A pipe that nobody reads cannot be opened for writing alone: Envoy reads it too.
            stdin=self._paths.records_pipe,
        )
        self._started_s = self._clock()
        self.alive = True

    def adopt(self) -> None:
        """It runs already: another control plane had asked for it."""
        self._started_s = self._clock()
        self.alive = True

    def ended(self) -> float:
        """Its process is gone; returns the seconds to wait before it is started again."""
        sound = self.alive and self._clock() - self._started_s >= SOUND_S
        self.alive = False
        self.restarts += 1
        self.deaths = 1 if sound else self.deaths + 1
        return restart_pause_s(self.deaths)

    def stop(self) -> None:
        self._link.kill(NAME, signal.SIGTERM)
