"""The process in which llama.cpp serves: ``python -m … JSON``, weights' path on standard input.

It imports while the weights are still being hashed, waits for the path of the verified bytes, and
then serves until its standard input is closed or it is told to end. Imports as little as it can.
"""

from __future__ import annotations

import json
import os
import sys
import time

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

BAD_FILE_EXIT = 3
"""As in ``exits.py``, which would be too much to import."""

CPU_BATCH_TOKENS = 256
"""Tokens computed at once. A batch cannot be left: while one with 2048 tokens of a long prompt is
computed, other streams stand still for 4 s on two cores, and a client that has left is not noticed.
With 256 that is 0.9 s, and prompts are computed as fast."""

HEADER_BYTES = 1 << 20
"""How far into a file the keys of its architecture are looked for; vocabularies come after them."""

FLASH_ATTENTION = {
    "auto": "LLAMA_FLASH_ATTN_TYPE_AUTO",
    "on": "LLAMA_FLASH_ATTN_TYPE_ENABLED",
    "off": "LLAMA_FLASH_ATTN_TYPE_DISABLED",
}


def main() -> int:
    started_s = time.monotonic()
    options = json.loads(sys.argv[1])
    import xllamacpp

    _say({"imported": [started_s, time.monotonic()]})
    path = sys.stdin.readline().rstrip("\n")
    if not path:
        return 0
    begun_s = time.monotonic()
    # The socket is for this user alone.
    os.umask(0o177)
    # The constructor returns when the model is loaded and raises when it cannot be.
    try:
        server = xllamacpp.Server(_parameters(xllamacpp, options, path))
    except RuntimeError as error:
        print(f"the model could not be loaded: {error}", file=sys.stderr, flush=True)
        return BAD_FILE_EXIT
    _say({"serving": [begun_s, time.monotonic()]})
    sys.stdin.read()
    del server
    return 0


def _say(message: dict[str, list[float]]) -> None:
    """Marks for the agent, among the engine's own output."""
    print("\x1epreheat " + json.dumps(message), flush=True)


def _parameters(xllamacpp: Any, options: dict[str, Any], path: str) -> Any:
    parameters = xllamacpp.CommonParams()
    parameters.model.path = path
    parameters.model_alias = [options["model"]]
    parameters.hostnames = [options["socket"]]
    parameters.n_threads_http = options["http_threads"]
    parameters.endpoint_metrics = True
    parameters.ui = False
    parameters.n_parallel = options["max_batch_size"]
    parameters.n_ctx = options["context_length"] * options["max_batch_size"]
    parameters.cpuparams.n_threads = options["threads"]
    parameters.cpuparams_batch.n_threads = options["threads"]
    parameters.n_gpu_layers = options["gpu_layers"]
    if options["gpu_layers"] == 0:
        parameters.n_batch = parameters.n_ubatch = CPU_BATCH_TOKENS
    parameters.cache_prompt = options["prefix_caching"]
    parameters.cache_ram_mib = 0
    if options["embeddings"]:
        _embed(xllamacpp, parameters, options["context_length"], path)
    parameters.flash_attn_type = getattr(
        xllamacpp.llama_flash_attn_type, FLASH_ATTENTION[options["flash_attention"]]
    )
    cache_type = getattr(xllamacpp.ggml_type, "GGML_TYPE_" + options["kv_cache_type"].upper())
    parameters.cache_type_k = cache_type
    parameters.cache_type_v = cache_type
    # preheat runs its own warm-up prompts, timed and named.
    parameters.warmup = False
    # It would load the model once more to see what fits; what is used is said here.
    parameters.fit_params = False
    return parameters


def _embed(xllamacpp: Any, parameters: Any, context_length: int, path: str) -> None:
    parameters.embedding = True
    # A text is pooled as a whole, so that it must fit into one batch.
    parameters.n_batch = parameters.n_ubatch = context_length
    if not _names_a_pooling(path):
        # A model made for generating names none, and without one there is no vector of a text.
        parameters.pooling_type = xllamacpp.llama_pooling_type.LLAMA_POOLING_TYPE_MEAN


def _names_a_pooling(path: str) -> bool:
    """Whether the file's metadata says how the vectors of a text's tokens become one."""
    with open(path, "rb") as file:  # noqa: PTH123 — no pathlib here
        return b".pooling_type" in file.read(HEADER_BYTES)


if __name__ == "__main__":
    sys.exit(main())
