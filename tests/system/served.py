"""Runs the real ``preheat serve`` in directories of its own, for tests from outside."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import TracebackType
from typing import Any

MODEL = "smollm2-135m-instruct"
PATIENCE_S = 60.0


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def wait_until(condition: Callable[[], Any], what: str, *, timeout_s: float = PATIENCE_S) -> Any:
    """The first true value of ``condition``, or a failure that says what never happened."""
    deadline_s = time.monotonic() + timeout_s
    while time.monotonic() < deadline_s:
        if value := condition():
            return value
        time.sleep(0.005)
    raise AssertionError(f"{what}: not within {timeout_s:g} s")


class Served:
    """``with Served() as preheat: …``: started, ready, stopped at the end, nothing left behind."""

    def __init__(
        self,
        target: str | Path | None = None,
        *,
        options: tuple[str, ...] = (),
        environment: dict[str, str] | None = None,
        cwd: Path | None = None,
    ) -> None:
        # Unix socket paths are short; pytest's own directories are not.
        self.root = Path(tempfile.mkdtemp(prefix="ph-", dir="/tmp"))
        self.port = free_port()
        self.runtime, self.state = self.root / "run", self.root / "state"
        self.output = self.root / "output.txt"
        self.environment = {
            **os.environ,
            "PREHEAT_RUNTIME_DIR": str(self.runtime),
            "PREHEAT_STATE_DIR": str(self.state),
            **(environment or {}),
        }
        self._argv = [sys.executable, "-m", "preheat", "serve", *([str(target)] if target else [])]
        self._argv += ["--port", str(self.port), *options]
        self._cwd = cwd or self.root
        self.process: subprocess.Popen[bytes] | None = None

    # ── life ──

    def start(self) -> Served:
        with self.output.open("ab") as output:
            self.process = subprocess.Popen(
                self._argv,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                env=self.environment,
                cwd=self._cwd,
                start_new_session=True,
            )
        return self

    def wait_ready(self) -> Served:
        wait_until(self._is_ready, "ready")
        return self

    def _is_ready(self) -> bool:
        assert self.process is not None
        if self.process.poll() is not None:
            raise AssertionError(f"preheat ended with {self.process.returncode}:\n{self.text()}")
        return self.get("/ready")[0] == 200

    def stop(self, number: int = signal.SIGTERM) -> int:
        """Its exit code. What is still there after that is a failure."""
        assert self.process is not None
        if self.process.poll() is None:
            self.process.send_signal(number)
        return self.process.wait(timeout=PATIENCE_S)

    def ended(self) -> int:
        """Waits for it to end by itself; its exit code."""
        assert self.process is not None
        return self.process.wait(timeout=PATIENCE_S)

    def __enter__(self) -> Served:
        self.start()
        try:
            return self.wait_ready()
        except BaseException:
            self.clean()
            raise

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        try:
            code = self.stop()
            if error is None:
                assert code == 0, self.text()
                assert self.descendants() == []
        finally:
            self.clean()

    def clean(self) -> None:
        if self.process is not None and self.process.poll() is None:
            self.process.kill()
            self.process.wait()
        shutil.rmtree(self.root, ignore_errors=True)

    # ── looking at it ──

    def text(self) -> str:
        return self.output.read_text(errors="replace") if self.output.exists() else ""

    def request(
        self, method: str, path: str, body: Any = None, headers: dict[str, str] | None = None
    ) -> tuple[int, dict[str, str], bytes]:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=PATIENCE_S)
        with contextlib.closing(connection):
            data = body if isinstance(body, bytes | None) else json.dumps(body).encode()
            connection.request(
                method, path, data, {"content-type": "application/json", **(headers or {})}
            )
            answer = connection.getresponse()
            return answer.status, {k.lower(): v for k, v in answer.getheaders()}, answer.read()

    def get(self, path: str) -> tuple[int, bytes]:
        """Status and body; status 0 while nobody listens."""
        try:
            status, _, body = self.request("GET", path)
        except OSError:
            return 0, b""
        return status, body

    def chat(self, text: str = "Hi!", **more: Any) -> tuple[int, dict[str, str], Any]:
        body = {"model": MODEL, "messages": [{"role": "user", "content": text}], "max_tokens": 4}
        status, headers, data = self.request("POST", "/v1/chat/completions", {**body, **more})
        return status, headers, json.loads(data)

    def cli(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-m", "preheat", *arguments],
            env=self.environment,
            cwd=self._cwd,
            capture_output=True,
            text=True,
            timeout=PATIENCE_S,
            check=False,
        )

    def status(self) -> dict[str, Any]:
        answer: dict[str, Any] = json.loads(self.cli("status", "--json").stdout)
        return answer

    def replica(self) -> dict[str, Any]:
        """The first replica's status."""
        answer: dict[str, Any] = self.status()["models"][0]["replicas"][0]
        return answer

    def events(self) -> list[dict[str, Any]]:
        """The agents' own event logs, oldest first."""
        lines = [
            line
            for file in sorted((self.state / "logs").glob("*.events.jsonl"))
            for line in file.read_text().splitlines()
        ]
        return sorted((json.loads(line) for line in lines), key=lambda e: float(e["monotonic_s"]))

    def descendants(self) -> list[int]:
        """Processes that were started by this preheat, however deep, and still live."""
        return list(processes_with(f"PREHEAT_RUNTIME_DIR={self.runtime}"))

    def pid_of(self, fragment: str) -> int:
        """The one process of this preheat whose name and command line hold ``fragment``."""
        found = [pid for pid in self.descendants() if fragment in called(pid)]
        assert len(found) == 1, f"{fragment}: {found}"
        return found[0]


def called(pid: int) -> str:
    """The process's short name and its command line."""
    command = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode()
    return f"{Path(f'/proc/{pid}/comm').read_text().strip()}: {command}"


def processes_with(variable: str) -> Iterator[int]:
    """Live processes (no zombies) that have this environment variable."""
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        with contextlib.suppress(OSError):
            held = (entry / "environ").read_bytes().split(b"\0")
            alive = (entry / "stat").read_text().rpartition(")")[2].split()[0] != "Z"
            if variable.encode() in held and alive:
                yield int(entry.name)
