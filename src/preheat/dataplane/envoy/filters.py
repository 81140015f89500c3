"""Envoy's HTTP filters: keys, the body's model. Pure.

Bodies pass untouched; they are only looked into. Answers are not held.
What does not belong here: what a request's model leads to (``routes.py``), token counts
(``usage.py``).
"""

from __future__ import annotations

from preheat.dataplane.envoy.answers import NO_MODEL
from preheat.dataplane.envoy.parts import CLIENT_HEADER, METADATA, TYPE, Json
from preheat.dataplane.envoy.routing import Listener
from preheat.dataplane.envoy.usage import ASKED_KEY, usage_filter

_FILTERS = TYPE + "envoy.extensions.filters.http."


def public_filters(listener: Listener) -> list[Json]:
    """In order. Keys come first: a stranger's body is not read."""
    keys = [_api_keys(listener)] if listener.keys else []
    return [*keys, _model_metadata(), usage_filter(), router()]


def _api_keys(listener: Listener) -> Json:
    return {
        "name": "envoy.filters.http.api_key_auth",
        "typed_config": {
            "@type": _FILTERS + "api_key_auth.v3.ApiKeyAuth",
            "credentials": [{"key": key.secret, "client": key.owner} for key in listener.keys],
            "key_sources": [{"header": "authorization"}],
            # The engine has no business with the key; records name the owner.
            "forwarding": {"header": CLIENT_HEADER, "hide_credentials": True},
        },
    }


def _model_metadata() -> Json:
    """Holds a request until its end; above the listener's buffer limit that is answered 413."""
    model = {"metadata_namespace": METADATA, "key": "model"}
    return {
        "name": "envoy.filters.http.json_to_metadata",
        "typed_config": {
            "@type": _FILTERS + "json_to_metadata.v3.JsonToMetadata",
            "request_rules": {
                "rules": [
                    {
                        "selectors": [{"key": "model"}],
                        "on_present": {**model, "type": "STRING"},
                        "on_missing": {**model, "value": NO_MODEL},
                    },
                    {
                        "selectors": [{"key": "stream_options"}, {"key": "include_usage"}],
                        "on_present": {"metadata_namespace": METADATA, "key": ASKED_KEY},
                    },
                ],
                # curl -d says form-urlencoded; what the body is decides.
                "allow_content_types_regex": {"regex": ".*"},
                "allow_empty_content_type": True,
            },
        },
    }


def router() -> Json:
    return {
        "name": "envoy.filters.http.router",
        "typed_config": {
            "@type": _FILTERS + "router.v3.Router",
            "suppress_envoy_headers": True,
            # Counters for each status, which nobody reads; records have them.
            "dynamic_stats": False,
        },
    }
