"""Routing table → Envoy's configuration as dicts. Pure; no file, socket or clock.

The same dicts serve the filesystem here and ADS in a cluster. Why each unusual value stands there
is said beside it, in ``clusters.py``, ``routes.py``, ``answers.py``, ``listeners.py``,
``filters.py`` and ``replies.py``; docs/decisions.md has the measurements.
What does not belong here: writing or acknowledging (``publish.py``), anything about processes.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from preheat.core.paths import Paths
from preheat.dataplane.envoy.clusters import assignment, cluster, local_cluster
from preheat.dataplane.envoy.listeners import probe_listener, public_listener
from preheat.dataplane.envoy.parts import TYPE, Json, pipe, watched
from preheat.dataplane.envoy.routes import probe_routes, public_routes
from preheat.dataplane.envoy.routing import RoutingTable, cluster_name

# Models' names are matched in any spelling, as regular expressions; the default refuses those of
# more than some 20 characters that are not ASCII.
_RUNTIME = {"re2.max_program_size.error_level": 65_536, "re2.max_program_size.warn_level": 65_536}


@dataclass(frozen=True, slots=True)
class Resources:
    """Everything Envoy is told, by resource kind and name."""

    clusters: dict[str, Json] = field(default_factory=dict)
    endpoints: dict[str, Json] = field(default_factory=dict)
    routes: dict[str, Json] = field(default_factory=dict)
    listeners: dict[str, Json] = field(default_factory=dict)


def resources(table: RoutingTable, paths: Paths) -> Resources:
    versions = {
        cluster_name(model.name, version.name): version
        for model in table.models
        for version in model.versions
    }
    return Resources(
        clusters={name: cluster(name, v, table.listener, paths) for name, v in versions.items()},
        endpoints={name: assignment(name, v) for name, v in versions.items()},
        routes={"public": public_routes(table), "probe": probe_routes(table)},
        listeners={
            "probe": probe_listener(paths),
            "public": public_listener(table.listener, paths),
        },
    )


def bootstrap(paths: Paths, *, max_connections: int) -> Json:
    """What Envoy starts with: admin socket, the control plane and where to watch for the rest.

    ``max_connections`` bounds all listeners together (descriptors: a proxied connection takes two).
    """
    kind = (
        "envoy.extensions.resource_monitors.downstream_connections.v3.DownstreamConnectionsConfig"
    )
    return {
        "node": {"id": "preheat", "cluster": "preheat"},
        # Its dump shows keys and certificates.
        "admin": {"address": pipe(str(paths.envoy_admin_socket), mode=0o600)},
        "dynamic_resources": {
            "lds_config": watched(paths, "lds"),
            "cds_config": watched(paths, "cds"),
        },
        "static_resources": {
            "clusters": [
                local_cluster("controlplane", str(paths.admin_socket)),
            ]
        },
        "layered_runtime": {"layers": [{"name": "preheat", "static_layer": _RUNTIME}]},
        "overload_manager": {
            "resource_monitors": [
                {
                    "name": "envoy.resource_monitors.global_downstream_max_connections",
                    "typed_config": {
                        "@type": TYPE + kind,
                        "max_active_downstream_connections": max_connections,
                    },
                }
            ]
        },
    }
