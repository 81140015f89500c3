"""The numbered examples run."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from tests.system.served import MODEL, Served

EXAMPLES = Path(__file__).parents[2] / "examples"


def test_the_openai_client_example_prints_an_answer_and_its_usage(preheat: Served) -> None:
    ran = subprocess.run(
        [sys.executable, str(EXAMPLES / "04-openai-client" / "chat.py")],
        env={**os.environ, "BASE_URL": f"http://127.0.0.1:{preheat.port}/v1"},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert ran.returncode == 0, ran.stderr
    assert f"[{MODEL}: " in ran.stdout


def test_the_default_example_serves() -> None:
    with Served(EXAMPLES / "01-default" / "preheat.yaml") as running:
        assert running.chat()[0] == 200
