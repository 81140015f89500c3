"""The compiled stub upstream and load generator: building, starting, reading their output.

What does not belong here: which load is put on what (the benchmark's own).
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import TypedDict

from processes import BenchError, Process, cache_dir

SOURCES = Path(__file__).resolve().parent / "native"
LIMIT_S = 300.0
FLAGS = ("-O2", "-Wall", "-Wextra", "-Werror")


def build(name: str) -> Path:
    """The program ``native/NAME.c``, compiled unless this very source already was."""
    source = SOURCES / f"{name}.c"
    text = source.read_bytes() + (SOURCES / "net.h").read_bytes() + " ".join(FLAGS).encode()
    program = cache_dir() / "native" / f"{name}-{hashlib.sha256(text).hexdigest()[:16]}"
    if program.exists():
        return program
    compiler = shutil.which("cc")
    if compiler is None:
        raise BenchError("no C compiler: install gcc (the benchmark compiles its load generator)")
    program.parent.mkdir(parents=True, exist_ok=True)
    handle, unfinished = tempfile.mkstemp(dir=program.parent)
    os.close(handle)
    done = subprocess.run(
        [compiler, *FLAGS, "-o", unfinished, str(source)], capture_output=True, text=True
    )
    if done.returncode:
        Path(unfinished).unlink()
        raise BenchError(f"{source} does not compile:\n{done.stderr}")
    Path(unfinished).chmod(0o755)
    Path(unfinished).replace(program)
    return program


@dataclass(frozen=True, slots=True)
class Stub:
    """The running stub upstream, on a TCP port and a Unix socket at once."""

    process: Process
    port: int
    socket: Path
    events: int
    """Server-sent events of one streamed answer, ``[DONE]`` included."""


def start_stub(directory: Path, *, chunks: int, interval_ms: int) -> Stub:
    socket = directory / "stub.sock"
    argv = [str(build("stub")), "--chunks", str(chunks), "--interval-ms", str(interval_ms)]
    process = Process([*argv, "--unix", str(socket)], log=directory / "stub.log", pipe_stdout=True)
    assert process.popen.stdout is not None
    line = process.popen.stdout.readline()
    if not line:
        process.popen.wait()
        process.check()
    return Stub(process, int(line), socket, events=chunks + 2)


class Quantiles(TypedDict):
    """Microseconds."""

    p50: int
    p90: int
    p99: int
    max: int


class Load(TypedDict):
    """What the load generator saw."""

    issued: int
    completed: int
    measured: int
    """Completed ones that began after the warm-up; the quantiles are of these."""
    events: int
    body_bytes: int
    duration_s: float
    """From the end of the warm-up to the end of the last request."""
    errors: int
    errors_by_kind: dict[str, int]
    ttfb_us: Quantiles | None
    total_us: Quantiles | None


def run_load(to: str, **settings: int | str) -> Load:
    """Runs the load generator on ``to`` (a port or ``unix:PATH``); settings are its options."""
    argv = [str(build("load")), "--to", to]
    for name, value in settings.items():
        argv += [f"--{name.replace('_', '-')}", str(value)]
    try:
        done = subprocess.run(argv, capture_output=True, text=True, timeout=LIMIT_S)
    except subprocess.TimeoutExpired as error:
        raise BenchError(f"the load generator took longer than {LIMIT_S:g} s: {argv}") from error
    if done.returncode:
        raise BenchError(f"the load generator failed: {done.stderr}")
    load: Load = json.loads(done.stdout)
    return load
