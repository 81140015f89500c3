"""Token counts from passing answers: the HTTP filter of ``native/usage.c`` for Envoy. Pure.

Envoy's own filters were tried first: ``sse_to_metadata`` of 1.40 crashes on an event whose data is
a JSON scalar, ``json_to_metadata`` holds whole answers and refuses those above a buffer's limit.
Then Lua: correct, and a fifth of all that a request costs.
What does not belong here: the meaning of the counts (``records.py``).
"""

from __future__ import annotations

from preheat.dataplane.envoy.parts import TYPE, Json

COUNTS_KEY = "counts"
"""In the request's metadata: the numbers of ``COUNTS`` as the engine wrote them, a space between
each, empty where there was none. One text is cheaper for Envoy to keep than a value for each."""

COUNTS = (
    "prompt_tokens",
    "completion_tokens",
    "prompt_n",
    "cache_n",
    "predicted_n",
    "predicted_ms",
)
"""The first two from OpenAI's ``usage``, the others from llama.cpp's ``timings``."""

ASKED_KEY = "include_usage"
"""In the request's metadata: whether usage in its stream was asked for. Where it was not, what an
engine sends all the same is overwritten with spaces."""

OBJECT_MAX_BYTES = 4096
"""Longest such object that is read."""

_LIBRARY = "preheat_usage"


def usage_filter() -> Json:
    module = TYPE + "envoy.extensions.filters.http.dynamic_modules.v3.DynamicModuleFilter"
    return {
        "name": "envoy.filters.http.dynamic_modules",
        "typed_config": {
            "@type": module,
            # Found where ``binary.environment`` says.
            "dynamic_module_config": {"name": _LIBRARY},
            "filter_name": "usage",
        },
    }
