# ruff: noqa: PTH123
"""An engine in small: the marks, the weights' path on standard input, HTTP on a Unix socket.

``fake_engine.py JSON`` does what the JSON says. Run with ``-IS``,
so that it is up in milliseconds; imports what that needs and no more, thus no ``pathlib``.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import sys
import threading
import time

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any


class Engine:
    def __init__(self, behaviour: dict[str, Any]) -> None:
        self.does = behaviour
        self.asked = 0
        self.weights = ""

    def run(self) -> None:
        if self.does.get("ignore_sigterm"):
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
        self.leave_orphans()
        now = time.monotonic()
        print("\x1epreheat " + json.dumps({"imported": [now, now]}), flush=True)
        print("\x1epreheat [this is no mark", flush=True)
        for line in self.does.get("say", ()):
            print(line, flush=True)
        if self.does.get("deaf"):
            os.close(0)
            time.sleep(3600)
        self.at("start")
        self.weights = sys.stdin.readline().rstrip("\n")
        if not self.weights:
            return
        self.at("weights")
        with open(self.weights, "rb") as file:
            head = file.read(64)
        if "seen" in self.does:
            with open(self.does["seen"], "wb") as file:
                file.write(head)
        begun = time.monotonic()
        if self.does.get("flood_bytes"):
            self.flood(self.does["flood_bytes"])
            print("error: these were the last words", flush=True)
        self.at("flooded")
        listening = socket.socket(socket.AF_UNIX)
        listening.bind(self.does["socket"])
        listening.listen(64)
        threading.Thread(target=self.accept, args=(listening,), daemon=True).start()
        served = json.dumps({"serving": [begun, time.monotonic()]})
        print("half a line \x1epreheat " + served, flush=True)
        sys.stdin.read()
        if self.does.get("ignore_sigterm"):
            time.sleep(3600)

    def leave_orphans(self) -> None:
        """One in our group, one that left it; both outlive us unless somebody sees to it."""
        if "orphans" not in self.does:
            return
        for leave in (False, True):
            if os.fork() == 0:
                if leave:
                    os.setsid()
                signal.signal(signal.SIGTERM, signal.SIG_IGN)
                with open(self.does["orphans"], "a") as file:
                    file.write(f"{os.getpid()}\n")
                time.sleep(3600)
        while True:
            try:
                with open(self.does["orphans"]) as file:
                    if len(file.readlines()) == 2:
                        return
            except OSError:
                pass
            time.sleep(0.002)

    def at(self, place: str) -> None:
        """Ends or hangs where the behaviour says so."""
        if self.does.get("hang_at") == place:
            time.sleep(3600)
        if self.does.get("die_at") == place:
            sys.stdout.flush()
            if "signal" in self.does:
                os.kill(os.getpid(), self.does["signal"])
                time.sleep(3600)  # it comes to the main thread, a moment later
            os._exit(self.does.get("code", 1))

    def flood(self, size_bytes: int) -> None:
        lines = (b"x" * 199 + b"\n") * (size_bytes // 200)
        while lines:
            lines = lines[os.write(1, lines) :]
        os.write(1, b"y" * (1 << 20) + b"\n")

    def accept(self, listening: socket.socket) -> None:
        while True:
            connection, _ = listening.accept()
            threading.Thread(target=self.serve, args=(connection,), daemon=True).start()

    def serve(self, connection: socket.socket) -> None:
        data = b""
        while True:
            while b"\r\n\r\n" not in data:
                chunk = connection.recv(65536)
                if not chunk:
                    return
                data += chunk
            head, _, data = data.partition(b"\r\n\r\n")
            length = 0
            for line in head.lower().split(b"\r\n"):
                if line.startswith(b"content-length:"):
                    length = int(line.partition(b":")[2])
            while len(data) < length:
                data += connection.recv(65536)
            body, data = data[:length], data[length:]
            status, answer = self.answer(head.split(b" ")[1].decode(), body)
            if status == 0:
                connection.close()
                return
            payload = answer if isinstance(answer, bytes) else json.dumps(answer).encode()
            connection.sendall(
                b"HTTP/1.1 %d X\r\ncontent-length: %d\r\n\r\n%s" % (status, len(payload), payload)
            )

    def answer(self, path: str, body: bytes) -> tuple[int, Any]:
        if path == "/health":
            self.at("health")
            return 200, {}
        if path == "/metrics":
            return self.metrics()
        request = json.loads(body)
        known = request["prompt"] == self.does.get("known_prompt")
        self.asked += known
        place = f"known {self.asked}" if known else "prompt"
        self.at(place)
        if self.does.get("break_at") == place:
            return 0, b""
        if place in self.does.get("raw", {}):
            status, text = self.does["raw"][place]
            return status, text.encode()
        steps = self.does.get("answers", {}).get(place, [[" Paris", -0.1], [".", -0.2]])
        content = [{"token": text, "logprob": value} for text, value in steps]
        return 200, {"choices": [{"logprobs": {"content": content}}]}

    def metrics(self) -> tuple[int, bytes]:
        """The file ``busy`` says what is in flight; ``broken`` or ``silent`` that nobody knows."""
        text = "0"
        if "busy" in self.does:
            with open(self.does["busy"]) as file:
                text = file.read()
        if text == "broken":
            return 500, b"no"
        if text == "silent":
            return 0, b""
        return 200, b"# HELP busy requests\nbusy %s\nwaiting 0\n" % text.encode()


if __name__ == "__main__":
    Engine(json.loads(sys.argv[1])).run()
