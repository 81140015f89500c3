"""Routing table → Envoy's two route configurations: the public one and the pinned one. Pure.

What does not belong here: what the gateway answers itself (``answers.py``), the filters that find
out a request's model (``filters.py``).
"""

from __future__ import annotations

from preheat.dataplane.envoy.answers import (
    EMBEDDING_PATHS,
    MODEL_PATHS,
    health,
    is_model,
    listing,
    nothing_here,
    paths_of,
    refusals,
)
from preheat.dataplane.envoy.parts import PIN_HEADER, REPLICA_HEADER, TYPE, Json, exact, header
from preheat.dataplane.envoy.replies import RETRY_AFTER_S, SERVER, error
from preheat.dataplane.envoy.routing import (
    Endpoint,
    Listener,
    ModelRoute,
    RoutingTable,
    VersionRoute,
    cluster_name,
    serving,
)


def public_routes(table: RoutingTable) -> Json:
    """What clients reach. The first route that matches is taken."""
    routes: list[Json] = []
    for model in table.models:
        routes += [_model_route(path, model, table.listener) for path in paths_of(model)]
    for path in MODEL_PATHS + EMBEDDING_PATHS:
        routes += refusals(path, table)
    routes += listing(table) + health(table)
    routes.append(
        {"match": {"path": "/metrics"}, "route": {"cluster": "controlplane", "timeout": "5s"}}
    )
    routes.append(nothing_here())
    direct = [route for route in routes if "direct_response" in route]
    for route in direct:
        added = route.setdefault("response_headers_to_add", [])
        added.append(header("content-type", "application/json"))
    bodies = [route["direct_response"]["body"]["inline_string"] for route in direct]
    return {
        "@type": TYPE + "envoy.config.route.v3.RouteConfiguration",
        "name": "public",
        "max_direct_response_body_size_bytes": max(4096, *(len(b.encode()) for b in bodies)),
        "virtual_hosts": [{"name": "public", "domains": ["*"], "routes": routes}],
    }


def probe_routes(table: RoutingTable) -> Json:
    """Pinned routes: one start each, whether it serves or not. On a private socket only."""
    routes = [
        _pinned_route(cluster_name(model.name, version.name), endpoint)
        for model in table.models
        for version in model.versions
        for endpoint in version.endpoints
    ]
    return {
        "@type": TYPE + "envoy.config.route.v3.RouteConfiguration",
        "name": "probe",
        "virtual_hosts": [{"name": "probe", "domains": ["*"], "routes": routes}],
    }


def _pinned_route(cluster: str, endpoint: Endpoint) -> Json:
    return {
        "match": {"prefix": "/", "headers": [exact(PIN_HEADER, endpoint.start_id)]},
        "route": {
            "cluster": cluster,
            "timeout": "0s",
            "metadata_match": {"filter_metadata": {"envoy.lb": {"start": endpoint.start_id}}},
        },
        "request_headers_to_remove": [PIN_HEADER],
        "response_headers_to_add": [_replica_header()],
    }


def _model_route(path: str, model: ModelRoute, listener: Listener) -> Json:
    route: Json = {
        "name": model.name,
        "match": {
            "path": path,
            "headers": [exact(":method", "POST")],
            "dynamic_metadata": [is_model(model.name)],
        },
    }
    versions = _taking_traffic(model)
    if not versions:
        message = f"No version of '{model.name}' takes traffic."
        return {
            **route,
            "direct_response": error(503, message, "no_capacity", kind=SERVER),
            "response_headers_to_add": [header("retry-after", str(RETRY_AFTER_S))],
        }
    action = {**_destination(model, versions), "timeout": "0s", "retry_policy": _retries(listener)}
    return {**route, "route": action, "response_headers_to_add": [_replica_header()]}


def _taking_traffic(model: ModelRoute) -> list[VersionRoute]:
    """Versions with a share. One that nothing serves loses it to the others; a share of 0 is left
    out, for Envoy would still start picking at it."""
    shared = [version for version in model.versions if version.share > 0]
    return [version for version in shared if serving(version)] or shared


def _destination(model: ModelRoute, versions: list[VersionRoute]) -> Json:
    match = {"filter_metadata": {"envoy.lb": {"serving": "yes"}}}
    named = [(cluster_name(model.name, version.name), version.share) for version in versions]
    if len(named) == 1:
        return {"cluster": named[0][0], "metadata_match": match}
    weighted = [{"name": name, "weight": share, "metadata_match": match} for name, share in named]
    return {"weighted_clusters": {"clusters": weighted}}


def _retries(listener: Listener) -> Json:
    """Only what happens before a byte of the answer came is tried again, on another start."""
    predicate = "envoy.extensions.retry.host.previous_hosts.v3.PreviousHostsPredicate"
    return {
        "retry_on": "reset",
        "num_retries": listener.retries,
        "retry_host_predicate": [
            {
                "name": "envoy.retry_host_predicates.previous_hosts",
                "typed_config": {"@type": TYPE + predicate},
            }
        ],
        # Picks are random: so many are enough to find the other one of two.
        "host_selection_retry_max_attempts": 16,
        "retry_back_off": {"base_interval": "0.010s", "max_interval": "0.100s"},
    }


def _replica_header() -> Json:
    return header(REPLICA_HEADER, "%UPSTREAM_METADATA(preheat:replica)%")
