"""The process that ``preheat serve`` is: starts the others, and lets none of them outlive it.

Small on purpose. It decides nothing: the control plane, its first child, asks over a socket for
processes to be started or signalled and is told when one ends. Every child has a process group of
its own and dies with the supervisor (parent-death signal); orphans below come to it (subreaper).

A control plane that dies is started again at once, and told what runs: agents and Envoy go on
meanwhile, for they need it for changes only. One that dies again and again ends everything. One
that does not answer for a minute is killed: Envoy keeps records in its memory while nobody reads
them.

Messages (JSON, one per packet), from the control plane:
    {"spawn": NAME, "argv": […], "env": {…}, "unset": […], "log": FILE,
     "stdin": FILE, for reading and writing; none if left out}
    {"kill": NAME, "signal": N}
    {"alive": true}, once its loop runs and for each question
to it:
    {"spawned": NAME, "pid": N}   {"failed": NAME, "error": TEXT}   {"exited": NAME, "status": N}
    {"order": "stop"}   {"question": "alive"}
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import socket
import sys
import time

from preheat.core.spawn import CRASHED, become_subreaper, fork, kill_group, spawn

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

    ControlPlane = Callable[[int, tuple[str, ...] | None], int]

CONTROL_PLANE = "preheat-control"
MESSAGE_MAX_BYTES = 256 << 10
EXIT_SECOND_SIGNAL = 130
EXIT_CONTROL_PLANE_DIED = 70
DEATHS_MAX = 5
FIRST_PAUSE_S = 0.1
# A control plane that lived so long was sound: its end begins no series.
SOUND_S = 60.0
# So that one that hangs now and then has been sound each time.
HANG_S = 60.0
QUESTIONS_BEFORE_IT_HANGS = 4
_STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM)


class Supervisor:
    def __init__(self, *, hang_s: float = HANG_S) -> None:
        self._hang_s = hang_s
        self._heard_s: float | None = None
        """When the control plane was last heard; None before it has said that it answers."""
        self._names: dict[int, str] = {}
        self._stops = 0
        self._unsent: list[bytes] = []
        self._wake_r, self._wake_w = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        self._ours: socket.socket | None = None
        """Our end of the socket to the control plane that lives now."""

    def run(self, control_plane: ControlPlane) -> int:
        """Forks and runs ``control_plane(descriptor of its end of the socket, names of what the one
        before left running)`` until it ends, and again when it dies; for the first there are none.

        It is a fork, not another program, because the first token waits for it: that saves an
        interpreter's start and what is imported here already. Returns its exit code; 130 when a
        second stop signal ended everything at once; 70 when it died too often. Nothing of it lives
        then.
        """
        become_subreaper()
        self._listen_to_signals()
        deaths = 0
        running: tuple[str, ...] | None = None
        try:
            while True:
                began_s = time.monotonic()
                status = self._live(control_plane, running)
                if status is None:
                    return EXIT_SECOND_SIGNAL
                code = os.waitstatus_to_exitcode(status)
                if 0 <= code != CRASHED:
                    return code
                deaths = 1 if time.monotonic() - began_s >= SOUND_S else deaths + 1
                if self._stops or deaths >= DEATHS_MAX:
                    _say(f"died ({_how(code)}{_times(deaths)}; all was stopped")
                    return EXIT_CONTROL_PLANE_DIED
                _say(f"died ({_how(code)}; it is started again, what serves goes on serving")
                if deaths > 1 and not self._pause(FIRST_PAUSE_S * 2**deaths):
                    return EXIT_CONTROL_PLANE_DIED
                running = tuple(self._names.values())
        finally:
            self._end_all()

    def _live(self, control_plane: ControlPlane, running: tuple[str, ...] | None) -> int | None:
        """A control plane's life; its status, or None when a second stop signal came."""
        # A packet keeps its bounds, so no framing is needed.
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        for side in (ours, theirs):
            side.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4 * MESSAGE_MAX_BYTES)

        def main() -> int:
            """In the fork: it keeps nothing of ours but its end of the socket."""
            ours.close()
            os.close(self._wake_r)
            os.close(self._wake_w)
            return control_plane(theirs.detach(), running)

        pid = fork(main, name=CONTROL_PLANE)
        self._names[pid] = CONTROL_PLANE
        theirs.close()
        self._ours = ours
        self._unsent.clear()
        self._heard_s = None
        try:
            return self._loop(pid, ours)
        finally:
            self._ours = None
            ours.close()

    def _pause(self, pause_s: float) -> bool:
        """Waits, and goes on collecting what ends; False when a stop signal came."""
        end_s = time.monotonic() + pause_s
        poll = select.poll()
        poll.register(self._wake_r, select.POLLIN)
        while (left_s := end_s - time.monotonic()) > 0 and not self._stops:
            if poll.poll(left_s * 1000):
                self._drain_wakeups()
            self._reap(0)
        return not self._stops

    def _listen_to_signals(self) -> None:
        signal.set_wakeup_fd(self._wake_w, warn_on_full_buffer=False)
        for number in (*_STOP_SIGNALS, signal.SIGCHLD):
            signal.signal(number, self._count)
        # Whoever says nohup wants it to live on.
        if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:
            signal.signal(signal.SIGHUP, self._count)

    def _count(self, number: int, _: object) -> None:
        if number in _STOP_SIGNALS:
            self._stops += 1
        elif number == signal.SIGHUP:
            # The kernel and the shell both send it when a terminal goes: never a second order.
            self._stops = max(1, self._stops)

    def _drain_wakeups(self) -> None:
        with contextlib.suppress(BlockingIOError):
            os.read(self._wake_r, 4096)

    def _loop(self, control_plane: int, ours: socket.socket) -> int | None:
        poll = select.poll()
        poll.register(self._wake_r, select.POLLIN)
        connected = True
        told = 0
        while True:
            if self._stops > 1:
                return None
            if self._stops > told:
                told = self._stops
                self._tell({"order": "stop"})
            if connected:
                writing = select.POLLOUT if self._unsent else 0
                poll.register(ours, select.POLLIN | writing)
            ready = {fd for fd, _ in poll.poll(self._hang_s * 1000 / QUESTIONS_BEFORE_IT_HANGS)}
            if self._wake_r in ready:
                self._drain_wakeups()
            if not ready:
                self._ask_or_kill(control_plane)
            if ours.fileno() in ready:
                self._flush()
                connected = self._hear(ours)
                if not connected:
                    # It is ending, and SIGCHLD comes.
                    poll.unregister(ours)
            status = self._reap(control_plane)
            if status is not None:
                return status

    def _ask_or_kill(self, control_plane: int) -> None:
        """Nothing has happened for a while."""
        if self._heard_s is None:
            return
        if time.monotonic() - self._heard_s >= self._hang_s:
            _say(f"did not answer for {self._hang_s:g} s and is killed")
            kill_group(control_plane, signal.SIGKILL)
        elif not self._unsent:
            self._tell({"question": "alive"})

    # ── the control plane ──

    def _hear(self, ours: socket.socket) -> bool:
        """Obeys the next message, if there is one; False when the other end is closed."""
        try:
            packet = ours.recv(MESSAGE_MAX_BYTES, socket.MSG_DONTWAIT)
        except BlockingIOError:
            return True
        except ConnectionResetError:
            # It ended with messages of ours unread.
            return False
        if packet:
            self._obey(json.loads(packet))
        return bool(packet)

    def _tell(self, message: dict[str, Any]) -> None:
        """Never waits: a control plane that stands still must not keep us from ending it."""
        self._unsent.append(json.dumps(message).encode())
        self._flush()

    def _flush(self) -> None:
        while self._unsent and self._ours is not None:
            try:
                self._ours.send(self._unsent[0], socket.MSG_DONTWAIT)
            except BlockingIOError:
                return
            except (BrokenPipeError, ConnectionResetError):
                self._unsent.clear()
                return
            del self._unsent[0]

    def _obey(self, message: dict[str, Any]) -> None:
        self._heard_s = self._heard_s and time.monotonic()
        if "alive" in message:
            self._heard_s = time.monotonic()
        elif "spawn" in message:
            self._spawn(message)
        elif "kill" in message:
            for pid, name in self._names.items():
                if name == message["kill"]:
                    kill_group(pid, message["signal"])

    def _spawn(self, message: dict[str, Any]) -> None:
        name = message["spawn"]
        environment = {**os.environ, **message["env"]}
        for variable in message["unset"]:
            environment.pop(variable, None)
        stdin_path = message.get("stdin", os.devnull)
        flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC
        try:
            with (
                # pathlib takes 4 ms to import
                open(os.open(stdin_path, os.O_RDWR | os.O_CLOEXEC)) as stdin,  # noqa: PTH123
                open(os.open(message["log"], flags, 0o600), "wb") as log,  # noqa: PTH123
            ):
                pid = spawn(
                    message["argv"],
                    env=environment,
                    stdin=stdin.fileno(),
                    stdout=log.fileno(),
                    stderr=log.fileno(),
                )
        except OSError as error:
            self._tell({"failed": name, "error": str(error)})
            return
        self._names[pid] = name
        self._tell({"spawned": name, "pid": pid})

    # ── the others ──

    def _reap(self, control_plane: int) -> int | None:
        """Collects what ended; returns the control plane's status when it is among them."""
        with contextlib.suppress(ChildProcessError):
            look = os.WEXITED | os.WNOHANG | os.WNOWAIT
            while (dead := os.waitid(os.P_ALL, 0, look)) is not None:
                name = self._names.pop(dead.si_pid, "")
                if name:
                    # Whatever it left in its group goes with it; until the leader is collected,
                    # nobody else can be given the group's number.
                    kill_group(dead.si_pid, signal.SIGKILL)
                _, status = os.waitpid(dead.si_pid, 0)
                if dead.si_pid == control_plane:
                    return status
                if name:
                    self._tell({"exited": name, "status": status})
        return None

    def _end_all(self) -> None:
        """Kills every group below and waits until none is left, orphans that came to us
        included."""
        for pid in self._names:
            kill_group(pid, signal.SIGKILL)
        while True:
            for pid in _children():
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            try:
                os.waitpid(-1, 0)
            except ChildProcessError:
                return


def _children() -> list[int]:
    with open(f"/proc/self/task/{os.getpid()}/children") as file:  # noqa: PTH123
        return [int(pid) for pid in file.read().split()]


def _say(text: str) -> None:
    with contextlib.suppress(OSError):
        print(f"preheat: the control plane {text}", file=sys.stderr, flush=True)


def _how(code: int) -> str:
    if code >= 0:
        return "a defect, see above)"
    return f"{signal.Signals(-code).name if -code in set(signal.Signals) else f'signal {-code}'})"


def _times(deaths: int) -> str:
    return f", {deaths} times in a row" if deaths > 1 else ""
