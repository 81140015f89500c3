"""What the gateway says itself: OpenAI-shaped errors, direct answers, Envoy's own replies. Pure.

What does not belong here: when which of them is given (``routes.py``, ``answers.py``).
"""

from __future__ import annotations

import json

from preheat.dataplane.envoy.parts import Json, header

REQUEST, SERVER = "invalid_request_error", "server_error"
RETRY_AFTER_S = 1

# Envoy's replies by the flag that says why. Its statuses alone would not do: a direct answer of 503
# is a local reply too, but has no flag.
_BY_FLAG: tuple[tuple[tuple[str, ...], int, str, str], ...] = (
    (("UO",), 429, "All replicas are busy and too many requests wait already.", "overloaded"),
    (("UC", "UR", "UPE"), 502, "The replica went away before it answered.", "replica_failed"),
    (("UH", "UF", "NC", "LH"), 503, "No replica is ready to take this request.", "no_capacity"),
)
_BY_STATUS: tuple[tuple[int, str, str, str], ...] = (
    (
        401,
        "A valid API key is needed: 'Authorization: Bearer KEY'.",
        "authentication_error",
        "invalid_api_key",
    ),
    (408, "The request did not arrive in time.", REQUEST, "request_timeout"),
    (413, "The body is larger than this gateway accepts.", REQUEST, "body_too_large"),
    (504, "The answer did not come in time.", SERVER, "timeout"),
)


def error_body(message: str, kind: str, code: str) -> Json:
    """OpenAI's error object."""
    return {"error": {"message": message, "type": kind, "param": None, "code": code}}


def error(status: int, message: str, code: str, *, kind: str = REQUEST) -> Json:
    """A direct response that is an error."""
    return answer(status, error_body(message, kind, code))


def answer(status: int, body: Json) -> Json:
    """A direct response in JSON."""
    return {"status": status, "body": {"inline_string": json.dumps(body, ensure_ascii=False)}}


def local_replies() -> Json:
    """Envoy's own errors in OpenAI's shape. The first mapper that matches is taken."""
    mappers = [
        {
            "filter": {"response_flag_filter": {"flags": list(flags)}},
            "status_code": status,
            **_body(error_body(message, SERVER, code)),
            "headers_to_add": [header("retry-after", str(RETRY_AFTER_S))],
        }
        for flags, status, message, code in _BY_FLAG
    ]
    mappers += [
        {"filter": _status_is(status), **_body(error_body(message, kind, code))}
        for status, message, kind, code in _BY_STATUS
    ]
    return {"mappers": mappers}


def _body(value: Json) -> Json:
    return {
        "body_format_override": {"json_format": value, "content_type": "application/json"},
    }


def _status_is(status: int) -> Json:
    value = {"default_value": status, "runtime_key": f"preheat.reply.{status}"}
    return {"status_code_filter": {"comparison": {"op": "EQ", "value": value}}}
