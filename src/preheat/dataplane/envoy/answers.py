"""Routes that the gateway answers itself: listings, health, refusals. Pure.

They are direct responses, made anew with each routing table, so that they cost no process and are
answered when nothing behind the gateway lives.
What does not belong here: routes to engines (``routes.py``).
"""

from __future__ import annotations

import re

from preheat.dataplane.envoy.parts import METADATA, TYPE, Json, exact, header
from preheat.dataplane.envoy.replies import RETRY_AFTER_S, answer, error
from preheat.dataplane.envoy.routing import ModelRoute, RoutingTable

MODEL_PATHS = ("/v1/chat/completions", "/v1/completions")
EMBEDDING_PATHS = ("/v1/embeddings",)
# What ``json_to_metadata`` notes instead of a model that is not there.
NO_MODEL = "\x00no-model"


def paths_of(model: ModelRoute) -> tuple[str, ...]:
    return EMBEDDING_PATHS if model.embeddings else MODEL_PATHS


def is_model(name: str) -> Json:
    """A matcher for requests whose body names this model."""
    value = {"string_match": {"exact": name}}
    return {"filter": METADATA, "path": [{"key": "model"}], "value": value}


def refusals(path: str, table: RoutingTable) -> list[Json]:
    """What answers a model path when no model route matched, most specific first."""
    names = ", ".join(m.name for m in table.models if path in paths_of(m)) or "none"
    return [
        _other_methods({"path": path}, "POST", error(405, f"{path} takes POST.", "wrong_method")),
        _refusal(
            path,
            is_model(NO_MODEL),
            400,
            f"The body has no 'model'. Models here: {names}.",
            "missing_model",
        ),
        *(
            _refusal(
                path,
                is_model(m.name),
                400,
                f"The model '{m.name}' does not serve {path}; it serves {', '.join(paths_of(m))}.",
                "unsupported_operation",
            )
            for m in table.models
            if path not in paths_of(m)
        ),
        _refusal(
            path,
            {"filter": METADATA, "path": [{"key": "model"}], "value": {"present_match": True}},
            404,
            f"The model does not exist. Models here: {names}.",
            "model_not_found",
        ),
        # Nothing was noted: the body could not be parsed (Envoy takes integers below 2^63 and 1,000
        # levels), or the name is empty.
        _refusal(
            path,
            None,
            400,
            "A JSON body with 'model' is needed. This one is not valid JSON, or a number or the "
            "nesting in it is out of range, or its 'model' is empty.",
            "invalid_json",
        ),
    ]


def _refusal(path: str, metadata: Json | None, status: int, message: str, code: str) -> Json:
    match: Json = {"path": path}
    if metadata is not None:
        match["dynamic_metadata"] = [metadata]
    return {"match": match, "direct_response": error(status, message, code)}


def _other_methods(match: Json, allowed: str, reply: Json) -> Json:
    """Refuses methods but one. Envoy tries each route's headers before its path, hence no regex."""
    return {
        "match": {**match, "headers": [{**exact(":method", allowed), "invert_match": True}]},
        "direct_response": reply,
        "response_headers_to_add": [header("allow", allowed)],
    }


def model_object(model: ModelRoute) -> Json:
    """OpenAI's model object and, beside it, what preheat knows."""
    return {
        "id": model.name,
        "object": "model",
        "created": model.created_unix_s,
        "owned_by": "preheat",
        "state": model.state,
        "versions": [
            {
                "name": v.name,
                "traffic_share": v.share,
                "replicas_serving": sum(e.serving for e in v.endpoints),
            }
            for v in model.versions
        ],
    }


def listing(table: RoutingTable) -> list[Json]:
    """``/v1/models`` and ``/v1/models/{id}``."""
    objects = {m.name: model_object(m) for m in table.models}
    refused = error(405, "Models are listed by GET.", "wrong_method")
    names = ", ".join(objects) or "none"
    unknown = error(404, f"The model does not exist. Models here: {names}.", "model_not_found")
    below: Json = {"prefix": "/v1/models/"}
    return [
        _other_methods({"path": "/v1/models"}, "GET", refused),
        _other_methods(below, "GET", refused),
        {
            "match": {"path": "/v1/models"},
            "direct_response": answer(200, {"object": "list", "data": list(objects.values())}),
        },
        *(
            {
                "match": {"safe_regex": {"regex": f"/v1/models/{any_spelling(name)}"}},
                "direct_response": answer(200, value),
            }
            for name, value in objects.items()
        ),
        {"match": below, "direct_response": unknown},
    ]


def any_spelling(name: str) -> str:
    """A regular expression for a name in a URL's path: clients differ in what they escape."""
    return "".join(_any_spelling(character) for character in name)


def _any_spelling(character: str) -> str:
    if character.isascii() and character.isalnum():
        return character
    escaped = "".join(f"%{byte:02x}" for byte in character.encode())
    return f"(?:{re.escape(character)}|(?i:{escaped}))"


def health(table: RoutingTable) -> list[Json]:
    """``/live``, ``/ready`` and ``/health``; no key is asked for, load balancers have none."""
    ready = not table.missing
    state = {"status": "ready" if ready else "not ready", "missing": list(table.missing)}
    routes: list[Json] = [
        {"match": {"path": "/live"}, "direct_response": answer(200, {"status": "live"})}
    ]
    for path in ("/ready", "/health"):
        route: Json = {
            "match": {"path": path},
            "direct_response": answer(200 if ready else 503, state),
        }
        if not ready:
            route["response_headers_to_add"] = [header("retry-after", str(RETRY_AFTER_S))]
        routes.append(route)
    if table.listener.keys:
        for route in routes:
            route["typed_per_filter_config"] = {"envoy.filters.http.api_key_auth": _off()}
    return routes


def _off() -> Json:
    return {"@type": TYPE + "envoy.config.route.v3.FilterConfig", "disabled": True, "config": {}}


def nothing_here() -> Json:
    """The last route."""
    return {
        "match": {"prefix": "/"},
        "direct_response": error(
            404,
            "There is nothing at this path. preheat serves "
            + ", ".join(MODEL_PATHS + EMBEDDING_PATHS)
            + ", /v1/models, /live, /ready, /health and /metrics.",
            "not_found",
        ),
    }
