"""Start → first token: preheat beside bare xllamacpp that runs the same warm-up and the same proof.

Paired and interleaved, a new process each time, with the model file in the page cache and dropped
from it. A client outside both sends the first request as soon as it may; its clock counts.
preheat also verifies the weights, starts a gateway and proves itself through it: its record says
where each millisecond above went.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from common import format_table, median_interval, options, ratio_of_medians, write_result
from preheat.acceleration.weights.sources import resolve
from preheat.core.paths import default_paths
from preheat.core.spec.load import default_spec
from preheat.core.spec.schema import Version
from preheat.replica import warmup
from preheat.replica.engines import llamacpp
from preheat.replica.engines.plan import local_hardware
from processes import BenchError, free_port

STARTS = 20
QUICK_STARTS = 3
PATIENCE_S = 60.0
POLL_S = 0.004
BARE = Path(__file__).with_name("bare_start.py")


@dataclass(frozen=True, slots=True)
class Work:
    """What both sides do."""

    model: str
    file: Path
    options: dict[str, Any]
    requests: list[tuple[str, dict[str, Any]]]


def the_work() -> Work:
    """The default model with its default warm-up and known answer."""
    model = default_spec().models[0]
    version = model.versions[0]
    file = resolve(version.source, default_paths().cache).path
    return Work(
        model.name, file, _plan(model.name, version).options, _requests(model.name, version)
    )


def _plan(model: str, version: Version) -> Any:
    return llamacpp.plan(version.engine, local_hardware(), model=model, socket=Path("/unused"))


def _requests(model: str, version: Version) -> list[tuple[str, dict[str, Any]]]:
    """Warm-up prompts, then the known answer twice, as preheat asks: directly and through Envoy."""
    launch, asked = _plan(model, version), version.warmup
    known = asked.known_answer
    prompts = [(p, asked.max_tokens) for p in asked.prompts] + [
        (known.prompt, known.max_tokens)
    ] * 2
    return [warmup.request_for(launch, model, text, tokens) for text, tokens in prompts]


def first_token_s(port: int, model: str) -> float:
    """Sends the first request; when the first byte of its streamed body came (CLOCK_MONOTONIC)."""
    body = {"model": model, "prompt": "Hi", "max_tokens": 1, "stream": True}
    data = json.dumps(body).encode()
    head = (
        "POST /v1/completions HTTP/1.1\r\nHost: bench\r\nContent-Type: application/json\r\n"
        f"Content-Length: {len(data)}\r\n\r\n"
    )
    with socket.create_connection(("127.0.0.1", port), timeout=PATIENCE_S) as connection:
        connection.sendall(head.encode() + data)
        answer = b""
        while b"data:" not in answer:
            part = connection.recv(65536)
            if not part:
                raise BenchError(f"no first token: {answer[:300]!r}")
            answer += part
    return time.monotonic()


def start_bare(work: Work) -> float:
    """Seconds from spawn to first token."""
    port = free_port()
    order = {
        "model": str(work.file),
        "port": port,
        "options": work.options,
        "requests": work.requests,
    }
    began_s = time.monotonic()
    with subprocess.Popen(
        [sys.executable, str(BARE), json.dumps(order)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
    ) as process:
        assert process.stdout is not None
        try:
            if process.stdout.readline() != b"ready\n":
                raise BenchError("bare xllamacpp did not come up")
            return first_token_s(port, work.model) - began_s
        finally:
            process.kill()


def start_preheat(work: Work, root: Path) -> tuple[float, dict[str, Any]]:
    """Seconds from spawn to first token, and preheat's own record of the start."""
    port = free_port()
    environment = {
        **os.environ,
        "PREHEAT_RUNTIME_DIR": str(root / "run"),
        "PREHEAT_STATE_DIR": str(root / "state"),
        "PREHEAT_CACHE_DIR": str(default_paths().cache),
    }
    began_s = time.monotonic()
    with (
        (root / "log").open("ab") as log,
        subprocess.Popen(
            [*_preheat(), "serve", "--port", str(port)],
            env=environment,
            cwd=root,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
        ) as process,
    ):
        try:
            _wait_ready(process, port, root)
            took_s = first_token_s(port, work.model) - began_s
            return took_s, _record(root)
        finally:
            process.send_signal(signal.SIGINT)


def _preheat() -> list[str]:
    """The installed command, as users run it; the module where it is not installed."""
    command = Path(sys.executable).with_name("preheat")
    return [str(command)] if command.exists() else [sys.executable, "-m", "preheat"]


def _wait_ready(process: subprocess.Popen[bytes], port: int, root: Path) -> None:
    """Asks on one connection: to open one for each question took a tenth of both cores from what is
    measured."""
    address = ("127.0.0.1", port)
    deadline_s = time.monotonic() + PATIENCE_S
    while time.monotonic() < deadline_s:
        if process.poll() is not None:
            raise BenchError(f"preheat ended:\n{(root / 'log').read_text()[-2000:]}")
        with contextlib.suppress(ConnectionError), socket.create_connection(address) as connection:
            while time.monotonic() < deadline_s:
                connection.sendall(b"GET /ready HTTP/1.1\r\nHost: bench\r\n\r\n")
                if connection.recv(4096).startswith(b"HTTP/1.1 200"):
                    return
                time.sleep(POLL_S)
        time.sleep(POLL_S)
    raise BenchError("preheat was not ready in time")


def _record(root: Path) -> dict[str, Any]:
    """The newest record; it is written a moment after the first token."""
    deadline_s = time.monotonic() + PATIENCE_S
    before = set((root / "seen").read_text().split()) if (root / "seen").exists() else set()
    while time.monotonic() < deadline_s:
        files = {f.name for f in (root / "state" / "coldstarts").glob("*.json")} - before
        if files:
            name = files.pop()
            (root / "seen").write_text(" ".join([*before, name]))
            record: dict[str, Any] = json.loads((root / "state" / "coldstarts" / name).read_text())
            return record
        time.sleep(POLL_S)
    raise BenchError("preheat left no record of its start")


def drop_from_page_cache(file: Path) -> None:
    descriptor = os.open(file, os.O_RDONLY)
    os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
    os.close(descriptor)


def measure(work: Work, starts: int, root: Path, *, cold: bool) -> dict[str, Any]:
    """Paired rounds; which side begins alternates."""
    bare: list[float] = []
    ours: list[float] = []
    records = []
    for number in range(starts):
        for side in ("bare", "preheat") if number % 2 else ("preheat", "bare"):
            if cold:
                drop_from_page_cache(work.file)
            if side == "bare":
                bare.append(start_bare(work))
            else:
                took_s, record = start_preheat(work, root)
                ours.append(took_s)
                records.append(record)
            print(".", end="", flush=True, file=sys.stderr)
    return {"bare_s": bare, "preheat_s": ours, "phases_s": _median_phases(records)}


def _median_phases(records: list[dict[str, Any]]) -> dict[str, float]:
    """Medians of the top-level phases of the critical path, in the order they come."""
    found: dict[str, list[float]] = {}
    for record in records:
        for phase in record["phases"]:
            if phase.get("track", "main") == "main" and "." not in phase["name"]:
                found.setdefault(phase["name"], []).append(phase["end_s"] - phase["start_s"])
    return {name: median_interval(values).value for name, values in found.items()}


def main() -> None:
    parser = options(__doc__ or "")
    parser.add_argument("--starts", type=int, help=f"paired starts of each kind (default {STARTS})")
    args = parser.parse_args()
    starts = args.starts or (QUICK_STARTS if args.quick else STARTS)
    work = the_work()
    root = Path(tempfile.mkdtemp(prefix="ph-", dir="/tmp"))
    try:
        # One of each first: compiled bytecode, recorded answer.
        start_bare(work)
        start_preheat(work, root)
        runs = {kind: measure(work, starts, root, cold=kind == "cold") for kind in ("warm", "cold")}
    finally:
        shutil.rmtree(root, ignore_errors=True)
    ratios = {
        f"{kind}_start_vs_bare": ratio_of_medians(run["preheat_s"], run["bare_s"])
        for kind, run in runs.items()
    }
    print(_report(runs, starts))
    for name, ratio in ratios.items():
        print(f"{name}: {ratio}")
    write_result(args.json, ratios=ratios, runs=runs)


def _report(runs: dict[str, dict[str, Any]], starts: int) -> str:
    rows = [
        (
            kind,
            *(f"{median_interval(run[side]).value * 1e3:.0f}" for side in ("bare_s", "preheat_s")),
        )
        for kind, run in runs.items()
    ]
    table = format_table(
        f"start to first token, ms, medians of {starts}", ("cache", "bare", "preheat"), rows
    )
    names = list(dict.fromkeys(name for run in runs.values() for name in run["phases_s"]))
    phases = [
        (name, *(f"{run['phases_s'].get(name, 0) * 1e3:.1f}" for run in runs.values()))
        for name in names
    ]
    return table + "\n" + format_table("where preheat's time goes, ms", ("phase", *runs), phases)


if __name__ == "__main__":
    main()
