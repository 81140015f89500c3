"""Peers: their environments, made here and never among preheat's dependencies, and their starts.

Each peer's packages are pinned by version and hash in ``peers/NAME.lock``. What does not belong
here: what is measured on them.
"""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

from processes import BenchError, Process, answers, cache_dir, free_port, wait_until

LOCKS = Path(__file__).resolve().parent / "peers"
COMPLETE = "complete.lock"
PROBE = json.dumps({"model": "bench", "messages": [{"role": "user", "content": "x"}]})


def is_cached(name: str) -> bool:
    """Whether the peer's environment exists and is the one its lock asks for."""
    made_from = cache_dir() / "venvs" / name / COMPLETE
    return made_from.exists() and made_from.read_bytes() == (LOCKS / f"{name}.lock").read_bytes()


def environment(name: str) -> Path:
    """The directory of the peer's environment, made if needed. Safe for two benchmarks at once."""
    directory = cache_dir() / "venvs" / name
    directory.parent.mkdir(parents=True, exist_ok=True)
    with (directory.parent / f"{name}.busy").open("w") as busy:
        fcntl.flock(busy, fcntl.LOCK_EX)
        if is_cached(name):
            return directory
        print(f"making the environment of {name} (once) …", file=sys.stderr, flush=True)
        shutil.rmtree(directory, ignore_errors=True)
        lock = LOCKS / f"{name}.lock"
        python = str(directory / "bin" / "python")
        pip = [python, "-m", "pip", "install", "--quiet", "--only-binary=:all:", "--no-deps"]
        _run([sys.executable, "-m", "venv", str(directory)])
        _run([*pip, "--require-hashes", "-r", str(lock)])
        # Written last: an interrupted installation is made anew.
        shutil.copyfile(lock, directory / COMPLETE)
    return directory


def _run(argv: list[str]) -> None:
    # A virtual environment's own variables would lead pip astray.
    env = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    done = subprocess.run(argv, capture_output=True, text=True, env=env)
    if done.returncode:
        raise BenchError(f"{' '.join(argv[:5])} … failed:\n{done.stderr[-2000:]}")


def start_vllm_router(directory: Path, upstream_port: int) -> tuple[Process, int]:
    """vllm-router (Rust) with its concurrency limit out of the way and no log of requests."""
    port = free_port()
    argv = [
        str(environment("vllm-router") / "bin" / "vllm-router"),
        *("--host", "127.0.0.1", "--port", str(port)),
        *("--worker-urls", f"http://127.0.0.1:{upstream_port}", "--policy", "round_robin"),
        *("--prometheus-host", "127.0.0.1", "--prometheus-port", str(free_port())),
        *("--max-concurrent-requests", "65536", "--log-level", "error"),
    ]
    process = Process(argv, log=directory / "vllm-router.log", env={"PYTHONPATH": ""})
    return _ready(process, port, limit_s=60)


def start_litellm(directory: Path, upstream_port: int, *, key: str) -> tuple[Process, int]:
    """litellm's proxy with one worker, no database, no callbacks, errors only in its log.

    It refuses to start without a master key, so it gets one for this run.
    """
    port = free_port()
    config = directory / "litellm.yaml"
    # JSON is YAML.
    model = {
        "model_name": "bench",
        "litellm_params": {
            "model": "openai/bench",
            "api_base": f"http://127.0.0.1:{upstream_port}/v1",
            "api_key": "none",
        },
    }
    config.write_text(json.dumps({"model_list": [model]}))
    argv = [
        str(environment("litellm") / "bin" / "litellm"),
        *("--host", "127.0.0.1", "--port", str(port)),
        *("--config", str(config), "--num_workers", "1"),
    ]
    quiet = {
        "PYTHONPATH": "",
        "LITELLM_MASTER_KEY": key,
        "LITELLM_LOG": "ERROR",
        # Otherwise its start waits for a price list from the internet.
        "LITELLM_LOCAL_MODEL_COST_MAP": "True",
        "LITELLM_TELEMETRY": "False",
    }
    process = Process(argv, log=directory / "litellm.log", env=quiet)
    return _ready(process, port, limit_s=180, key=key)


def _ready(
    process: Process, port: int, *, limit_s: float, key: str = "none"
) -> tuple[Process, int]:
    def ready() -> bool:
        return answers(port, PROBE, key=key)

    try:
        wait_until(ready, process.name, process=process, limit_s=limit_s)
    except BaseException:
        process.stop()
        raise
    return process, port
