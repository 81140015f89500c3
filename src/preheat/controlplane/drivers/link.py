"""The control plane's end of the supervisor's socket: asks for processes, hears of their ends."""

from __future__ import annotations

import errno
import json
import socket
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

MESSAGE_MAX_BYTES = 256 << 10
"""As in ``supervisor.py``: longer packets would be cut there."""


class SupervisorLink:
    def __init__(self, descriptor: int, *, withheld: Sequence[str] = ()) -> None:
        """``withheld`` are environment variables that no process gets: they hold secrets."""
        self._socket = socket.socket(fileno=descriptor)
        self._withheld = list(withheld)

    def fileno(self) -> int:
        return self._socket.fileno()

    def spawn(
        self,
        name: str,
        argv: Sequence[str],
        *,
        log: Path,
        stdin: Path | None = None,
        env: Mapping[str, str] | None = None,
    ) -> None:
        """Asks for a process; ``spawned`` or ``failed`` comes as a message. ``stdin`` is opened for
        reading and writing.

        Raises OSError if that cannot be asked for.
        """
        self._send(
            {
                "spawn": name,
                "argv": list(argv),
                "env": dict(env or {}),
                "unset": self._withheld,
                "log": str(log),
                **({"stdin": str(stdin)} if stdin else {}),
            }
        )

    def kill(self, name: str, number: int) -> None:
        """Signals the process's group; one that has ended is no error."""
        self._send({"kill": name, "signal": int(number)})

    def say_alive(self) -> None:
        """From the first time on the supervisor expects answers. Raises OSError."""
        self._send({"alive": True})

    def receive(self) -> list[dict[str, Any]]:
        """The messages that wait. Raises ConnectionError when the supervisor is gone."""
        messages: list[dict[str, Any]] = []
        while True:
            try:
                packet = self._socket.recv(MESSAGE_MAX_BYTES, socket.MSG_DONTWAIT)
            except BlockingIOError:
                return messages
            if not packet:
                raise ConnectionError("the supervisor is gone")
            messages.append(json.loads(packet))

    def _send(self, message: dict[str, Any]) -> None:
        packet = json.dumps(message).encode()
        if len(packet) > MESSAGE_MAX_BYTES:
            raise OSError(
                errno.E2BIG, f"a message of {len(packet)} bytes is too long for the supervisor"
            )
        # It may wait: the supervisor always reads, whatever becomes of its own messages.
        self._socket.send(packet)
