"""A control plane's admin socket that tests play, in a thread."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any

from preheat.core import localhttp


def replica(**changes: Any) -> dict[str, Any]:
    values: dict[str, Any] = {
        "name": "chat-v1-0",
        "version": "v1",
        "engine": "llama.cpp",
        "traffic_share": 100,
        "start_id": "chat-v1-0@7",
        "state": "ready",
        "waiting_for": "",
        "failures": 0,
        "last_reason": "",
        "given_up": False,
        "last_cold_start_s": 1.234,
        "agent_socket": "/run/agent.sock",
    }
    return {**values, **changes}


def status(*replicas: dict[str, Any], missing: tuple[str, ...] = ()) -> dict[str, Any]:
    return {
        "ready": not missing,
        "missing": list(missing),
        "url": "http://127.0.0.1:8080",
        "gateway": {"alive": True, "restarts": 0},
        "models": [
            {
                "name": "chat",
                "state": "loading" if missing else "ready",
                "replicas": list(replicas or (replica(),)),
            }
        ],
    }


class Running:
    """Answers with what ``answer(method, target)`` gives, as JSON; None breaks the connection."""

    def __init__(self, socket: Path, answer: Callable[[str, str], tuple[int, Any] | None]) -> None:
        self.socket = socket
        self.asked: list[tuple[str, str]] = []
        self._answer = answer
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever)

    async def _handle(self, request: localhttp.Request) -> localhttp.Response:
        target = request.path + "".join(f"?{k}={v}" for k, v in request.query.items())
        self.asked.append((request.method, target))
        answered = self._answer(request.method, target)
        if answered is None:
            raise ConnectionResetError
        return localhttp.json_response(answered[1], answered[0])

    def __enter__(self) -> Running:
        self.socket.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._server = self._loop.run_until_complete(localhttp.serve(self.socket, self._handle))
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._server.close()
        for task in asyncio.all_tasks(self._loop):
            task.cancel()
        self._loop.run_until_complete(asyncio.sleep(0.0))
        self._loop.close()
