"""Names and small dicts that the modules of Envoy's configuration share.

What does not belong here: anything that knows a routing table.
"""

from __future__ import annotations

from typing import Any

from preheat.core.paths import Paths

Json = dict[str, Any]

TYPE = "type.googleapis.com/"
METADATA = "preheat"
"""The namespace of preheat's metadata on requests and endpoints."""
PIN_HEADER = "x-preheat-pin"
REPLICA_HEADER = "x-preheat-replica"
CLIENT_HEADER = "x-preheat-client"


def header(name: str, value: str) -> Json:
    return {"header": {"key": name, "value": value}, "append_action": "OVERWRITE_IF_EXISTS_OR_ADD"}


def exact(name: str, value: str) -> Json:
    return {"name": name, "string_match": {"exact": value}}


def pipe(path: str, mode: int | None = None) -> Json:
    return {"pipe": {"path": path, **({"mode": mode} if mode is not None else {})}}


def watched(paths: Paths, name: str) -> Json:
    """Where Envoy reads the resources of the file ``name``; it looks again after each rename."""
    return {
        "resource_api_version": "V3",
        "path_config_source": {"path": str(paths.xds / f"{name}.json")},
        "initial_fetch_timeout": "0s",
    }
