"""Envoy's two listeners: the public one and the private one for probes. Pure.

What does not belong here: the filters that look into requests (``filters.py``).
"""

from __future__ import annotations

import base64

from preheat.core.paths import Paths
from preheat.dataplane.envoy.filters import public_filters, router
from preheat.dataplane.envoy.parts import (
    CLIENT_HEADER,
    PIN_HEADER,
    REPLICA_HEADER,
    TYPE,
    Json,
    pipe,
    watched,
)
from preheat.dataplane.envoy.records import LINE_FORMAT
from preheat.dataplane.envoy.replies import local_replies
from preheat.dataplane.envoy.routing import Listener

TCP_BACKLOG = 4096
FAST_OPEN_QUEUE = 256
RECORDS_PERIOD_S = 10

_MANAGER = "envoy.filters.network.http_connection_manager"


def public_listener(listener: Listener, paths: Paths) -> Json:
    limit = {
        "name": "envoy.filters.network.connection_limit",
        "typed_config": {
            "@type": TYPE + "envoy.extensions.filters.network.connection_limit.v3.ConnectionLimit",
            "stat_prefix": "public",
            "max_connections": listener.max_connections,
        },
    }
    manager: Json = {
        **_http_manager("public", paths, public_filters(listener)),
        "access_log": [_records_log(paths)],
        "access_log_options": {"access_log_flush_interval": f"{RECORDS_PERIOD_S}s"},
        "local_reply_config": local_replies(),
        "early_header_mutation_extensions": [_without_internal_headers()],
        # The time a client may take to send its request, body included.
        "request_timeout": "300s",
    }
    chain: Json = {"filters": [limit, {"name": _MANAGER, "typed_config": manager}]}
    if listener.certificate_pem:
        chain["transport_socket"] = _tls(listener)
    return {
        "@type": TYPE + "envoy.config.listener.v3.Listener",
        "name": "public",
        "address": {"socket_address": {"address": listener.host, "port_value": listener.port}},
        "enable_reuse_port": True,
        # The kernel spreads connections by a hash, and clients keep few, long ones: without this a
        # worker gets more than its share, and its requests wait.
        "connection_balance_config": {"exact_balance": {}},
        "tcp_fast_open_queue_length": FAST_OPEN_QUEUE,
        "tcp_backlog_size": TCP_BACKLOG,
        # What is held of a request, and so the largest body.
        "per_connection_buffer_limit_bytes": listener.max_body_bytes,
        "filter_chains": [chain],
    }


def probe_listener(paths: Paths) -> Json:
    manager = _http_manager("probe", paths, [router()])
    return {
        "@type": TYPE + "envoy.config.listener.v3.Listener",
        "name": "probe",
        "address": pipe(str(paths.probe_socket), mode=0o600),
        # Spreads a probe's connections evenly, so that every worker opens its own upstream ones.
        "connection_balance_config": {"exact_balance": {}},
        "filter_chains": [{"filters": [{"name": _MANAGER, "typed_config": manager}]}],
    }


def _http_manager(name: str, paths: Paths, http_filters: list[Json]) -> Json:
    kind = "envoy.extensions.filters.network.http_connection_manager.v3.HttpConnectionManager"
    return {
        "@type": TYPE + kind,
        "stat_prefix": name,
        "rds": {"route_config_name": name, "config_source": watched(paths, f"rds-{name}")},
        "http_filters": http_filters,
        # A stream may pause for as long as its engine thinks.
        "stream_idle_timeout": "0s",
        "request_headers_timeout": "30s",
        "common_http_protocol_options": {"idle_timeout": "3600s"},
        "generate_request_id": True,
        "preserve_external_request_id": True,
        "always_set_request_id_in_response": True,
        "server_name": "preheat",
        "use_remote_address": True,
        "xff_num_trusted_hops": 0,
        # Engines have no use for clients' addresses.
        "skip_xff_append": True,
    }


def _without_internal_headers() -> Json:
    """A client's own ``x-preheat-*`` must not be believed or passed on."""
    kind = "envoy.extensions.http.early_header_mutation.header_mutation.v3.HeaderMutation"
    internal = (PIN_HEADER, REPLICA_HEADER, CLIENT_HEADER)
    return {
        "name": "envoy.http.early_header_mutation.header_mutation",
        "typed_config": {
            "@type": TYPE + kind,
            "mutations": [{"remove": name} for name in internal],
        },
    }


def _tls(listener: Listener) -> Json:
    certificate = {
        "certificate_chain": {"inline_string": listener.certificate_pem},
        "private_key": {"inline_string": listener.key_pem},
    }
    return {
        "name": "envoy.transport_sockets.tls",
        "typed_config": {
            "@type": TYPE + "envoy.extensions.transport_sockets.tls.v3.DownstreamTlsContext",
            "common_tls_context": {
                "alpn_protocols": ["h2", "http/1.1"],
                "tls_params": {"tls_minimum_protocol_version": "TLSv1_2"},
                "tls_certificates": [certificate],
            },
        },
    }


def _records_log(paths: Paths) -> Json:
    """One line for each request to ``records.py``."""
    line = base64.b64encode(LINE_FORMAT).decode()
    return {
        "name": "envoy.access_loggers.file",
        "typed_config": {
            "@type": TYPE + "envoy.extensions.access_loggers.file.v3.FileAccessLog",
            "path": str(paths.records_pipe),
            "log_format": {"text_format_source": {"inline_bytes": line}},
        },
    }
