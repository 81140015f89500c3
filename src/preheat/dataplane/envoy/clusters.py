"""Versions of models → Envoy's clusters and endpoints. Pure.

What does not belong here: which request goes to which cluster (``routes.py``).
"""

from __future__ import annotations

from preheat.core.paths import Paths
from preheat.dataplane.envoy.parts import METADATA, TYPE, Json, pipe, watched
from preheat.dataplane.envoy.routing import Endpoint, Listener, VersionRoute

# With fewer than this per cent of hosts healthy Envoy sends traffic to unhealthy ones too. Its
# default is 50; at 0 a cluster without a healthy host answers 503 instead.
PANIC_THRESHOLD_PERCENT = 0
HEALTH_INTERVAL_S = 0.25
# llama.cpp's HTTP server closes a connection after 100 requests or 5 s of idleness; the gateway
# must be the one that closes, or requests race with the close.
UPSTREAM_IDLE_S = 4.0
UPSTREAM_REQUESTS_PER_CONNECTION = 99
# More retries at once than this share of a cluster's requests make an outage worse.
RETRY_BUDGET_PERCENT = 20.0
RETRIES_ALWAYS_ALLOWED = 16


def cluster(name: str, version: VersionRoute, listener: Listener, paths: Paths) -> Json:
    """One version of one model."""
    return {
        "@type": TYPE + "envoy.config.cluster.v3.Cluster",
        "name": name,
        "type": "EDS",
        "eds_cluster_config": {"eds_config": watched(paths, f"eds-{name}"), "service_name": name},
        "connect_timeout": "2s",
        "lb_policy": "LEAST_REQUEST",
        "common_lb_config": {
            "healthy_panic_threshold": {"value": PANIC_THRESHOLD_PERCENT},
            # Its default holds changes of health and metadata back for up to a second, and with
            # them a start that has just been proven, or has just been found unhealthy.
            "update_merge_window": "0s",
        },
        "lb_subset_config": {
            "fallback_policy": "NO_FALLBACK",
            "subset_selectors": [{"keys": ["serving"]}, {"keys": ["start"]}],
        },
        # A start that is taken out must stop getting traffic at once, healthy or not.
        "ignore_health_on_host_removal": True,
        "health_checks": [_health_check()],
        "circuit_breakers": {"thresholds": [_threshold(version, listener)]},
        "typed_extension_protocol_options": _http_options(
            {
                "common_http_protocol_options": {
                    "idle_timeout": f"{UPSTREAM_IDLE_S}s",
                    "max_requests_per_connection": UPSTREAM_REQUESTS_PER_CONNECTION,
                },
                "explicit_http_config": {"http_protocol_options": {}},
            }
        ),
    }


def _health_check() -> Json:
    return {
        "timeout": "1s",
        "interval": f"{HEALTH_INTERVAL_S}s",
        "no_traffic_interval": f"{HEALTH_INTERVAL_S}s",
        "unhealthy_threshold": 2,
        "healthy_threshold": 1,
        "http_health_check": {"path": "/routable"},
    }


def _threshold(version: VersionRoute, listener: Listener) -> Json:
    return {
        "max_connections": version.max_connections,
        "max_pending_requests": listener.max_requests_waiting,
        "max_requests": listener.max_requests_waiting + version.max_connections,
        "retry_budget": {
            "budget_percent": {"value": RETRY_BUDGET_PERCENT},
            "min_retry_concurrency": RETRIES_ALWAYS_ALLOWED,
        },
    }


def assignment(name: str, version: VersionRoute) -> Json:
    """The starts of one version; subsets of the cluster are chosen by ``envoy.lb`` metadata."""
    hosts = [_host(endpoint, version) for endpoint in version.endpoints]
    return {
        "@type": TYPE + "envoy.config.endpoint.v3.ClusterLoadAssignment",
        "cluster_name": name,
        "endpoints": [{"lb_endpoints": hosts}] if hosts else [],
    }


def _host(endpoint: Endpoint, version: VersionRoute) -> Json:
    return {
        "endpoint": {
            "address": pipe(str(endpoint.engine_socket)),
            "health_check_config": {"address": pipe(str(endpoint.health_socket))},
        },
        "metadata": {
            "filter_metadata": {
                "envoy.lb": {
                    "serving": "yes" if endpoint.serving else "no",
                    "start": endpoint.start_id,
                },
                METADATA: {"replica": endpoint.start_id, "version": version.name},
            }
        },
    }


def widened(new: Json, old: Json) -> Json:
    """The assignment ``new`` and all that ``old`` serves with.

    Stands while routes change over, so that no route meets a start that was already taken away. It
    never serves with a start that neither of the two serves with.
    """
    hosts = {_address(host): host for host in _hosts(new)}
    for host in _hosts(old):
        if _address(host) not in hosts or _serves(host):
            hosts[_address(host)] = host
    return {**new, "endpoints": [{"lb_endpoints": list(hosts.values())}] if hosts else []}


def _hosts(some_assignment: Json) -> list[Json]:
    return [host for locality in some_assignment["endpoints"] for host in locality["lb_endpoints"]]


def _address(host: Json) -> str:
    return str(host["endpoint"]["address"]["pipe"]["path"])


def _serves(host: Json) -> bool:
    return bool(host["metadata"]["filter_metadata"]["envoy.lb"]["serving"] == "yes")


def local_cluster(name: str, path: str) -> Json:
    """One of preheat's own servers on a Unix socket."""
    protocol: Json = {"http_protocol_options": {}}
    host = {"endpoint": {"address": pipe(path)}}
    return {
        "name": name,
        "type": "STATIC",
        "connect_timeout": "1s",
        # A server that stands still must not fill Envoy's memory: more than these fail at once.
        "circuit_breakers": {"thresholds": [{"max_requests": 64, "max_pending_requests": 64}]},
        "load_assignment": {"cluster_name": name, "endpoints": [{"lb_endpoints": [host]}]},
        "typed_extension_protocol_options": _http_options({"explicit_http_config": protocol}),
    }


def _http_options(options: Json) -> Json:
    kind = "envoy.extensions.upstreams.http.v3.HttpProtocolOptions"
    return {kind: {"@type": TYPE + kind, **options}}
