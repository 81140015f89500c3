"""What an agent begins before it has imported anything heavy: its engine's process and the hash.

Threads report here through plain attributes and ``wake_fd``; the agent reads them in its loop.
Imports next to nothing: each millisecond here is one more until the weights are read. What does not
belong here: waiting, decisions, anything that needs the plan typed.
"""

from __future__ import annotations

import collections
import fcntl
import os
import threading
import time

from preheat.core.spawn import spawn
from preheat.replica.logring import LogRing, drain

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    from preheat.acceleration.weights.sealed import SealedWeights

MARKS_MAX = 32
# Room for what an engine says while its agent has no processor; the usual 64 KiB are soon full.
PIPE_BYTES = 1 << 20


class Begun:
    """What runs already when the agent proper starts."""

    def __init__(self, plan: dict[str, Any], orders: list[int]) -> None:
        """``plan`` is a ReplicaPlan, untyped; ``orders`` are the signals received so far."""
        self.orders = orders
        self.wake_fd = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        """Readable when something below may have changed."""
        self.ring = LogRing()
        self.marks: collections.deque[bytes] = collections.deque(maxlen=MARKS_MAX)
        self.engine_pid = 0
        self.engine_stdin = -1
        self.engine_error: OSError | None = None
        """Why the engine's process could not be started."""
        self.output_ended = False
        """Whether everything that the engine said is in the ring."""
        self.cancel = threading.Event()
        self.sealed: SealedWeights | None = None
        self.weights_error: BaseException | None = None
        self._weights_done = threading.Event()
        self.told_s = 0.0
        """When the engine was told where its weights are (CLOCK_MONOTONIC); 0 before."""
        self._stdin_lock = threading.Lock()
        self._plan = plan
        # The fork comes first: no thread runs yet.
        if plan["hold_at"] == "hot":
            self.launch_engine()
        # A daemon: a read that hangs in the kernel must not hold the agent's end.
        threading.Thread(target=self._seal, name="weights", daemon=True).start()

    def launch_engine(self) -> None:
        """Starts the engine's process; it serves once it is told where the verified weights are.

        A program that cannot be run is noted in ``engine_error``.
        """
        launch = self._plan["launch"]
        stdin_r, stdin_w = os.pipe()
        output_r, output_w = os.pipe()
        try:
            self.engine_pid = spawn(
                launch["argv"],
                env={**os.environ, **launch["environment"]},
                stdin=stdin_r,
                stdout=output_w,
                stderr=output_w,
            )
        except OSError as error:
            self.engine_error = error
            os.close(stdin_w)
            os.close(output_r)
            return
        finally:
            os.close(stdin_r)
            os.close(output_w)
        self.engine_stdin = stdin_w
        _widen(output_r)
        drain(output_r, self.ring, self._mark, self._output_end)

    @property
    def weights_done(self) -> bool:
        """Whether there are verified weights, or an error."""
        return self._weights_done.is_set()

    def wait_for_weights(self, timeout_s: float) -> None:
        self._weights_done.wait(timeout_s)

    def tell_engine(self) -> None:
        """Says where the verified weights are, once. An engine that is gone already is found by
        who collects it."""
        assert self.sealed is not None
        line = f"/proc/{os.getpid()}/fd/{self.sealed.fd}\n"
        with self._stdin_lock:
            if self.told_s or self.engine_stdin < 0:
                return
            self.told_s = time.monotonic()
            try:
                os.write(self.engine_stdin, line.encode())
            except BrokenPipeError:
                return

    def close_engine_stdin(self) -> None:
        with self._stdin_lock:
            if self.engine_stdin >= 0:
                os.close(self.engine_stdin)
                self.engine_stdin = -1

    def _mark(self, mark: bytes) -> None:
        self.marks.append(mark)
        self._wake()

    def _output_end(self) -> None:
        self.output_ended = False
        self._wake()

    def _seal(self) -> None:
        from preheat.acceleration.weights.sealed import seal
        from preheat.core.errors import PreheatError

        weights = self._plan["weights"]
        try:
            self.sealed = seal(
                # It only makes a text of it, and importing pathlib would hold up the read by 4 ms.
                weights["path"],
                expected_sha256=weights["sha256"],
                size_bytes=weights["size_bytes"],
                cancel=self.cancel,
            )
            # At once: the agent's own imports can go on while the engine loads.
            if self._plan["hold_at"] == "hot":
                self.tell_engine()
        except (PreheatError, OSError, MemoryError) as error:
            self.weights_error = error
        finally:
            # Whatever happened, nobody must wait for ever.
            self._weights_done.set()
            self._wake()

    def _wake(self) -> None:
        os.eventfd_write(self.wake_fd, 1)


def _widen(pipe: int) -> None:
    try:
        fcntl.fcntl(pipe, fcntl.F_SETPIPE_SZ, PIPE_BYTES)
    except OSError:  # this user's share of pipe buffers is used up; the usual size does
        return
