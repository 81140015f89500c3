"""Bare xllamacpp: loads the model, runs the given requests, says that it is ready, serves.

The other side of ``start.py``: what a start costs without preheat. No hash, no gateway, no records.
usage: bare_start.py JSON, with ``model``, ``port``, ``options`` and ``requests`` (path, body)
"""

from __future__ import annotations

import json
import socket
import sys
from typing import Any

import xllamacpp


def parameters(model: str, port: int, options: dict[str, Any]) -> Any:
    chosen = xllamacpp.CommonParams()
    chosen.model.path = model
    chosen.hostnames = ["127.0.0.1"]
    chosen.port = port
    chosen.n_parallel = options["max_batch_size"]
    chosen.n_ctx = options["context_length"] * options["max_batch_size"]
    chosen.cpuparams.n_threads = options["threads"]
    chosen.cpuparams_batch.n_threads = options["threads"]
    chosen.n_threads_http = 16
    chosen.cache_ram_mib = 0
    chosen.warmup = False
    chosen.ui = False
    return chosen


def post(port: int, path: str, body: dict[str, Any]) -> bytes:
    data = json.dumps(body).encode()
    head = (
        f"POST {path} HTTP/1.1\r\nHost: bare\r\nConnection: close\r\n"
        f"Content-Type: application/json\r\nContent-Length: {len(data)}\r\n\r\n"
    )
    with socket.create_connection(("127.0.0.1", port)) as connection:
        connection.sendall(head.encode() + data)
        answer = b""
        while part := connection.recv(65536):
            answer += part
    return answer


def main() -> None:
    order = json.loads(sys.argv[1])
    server = xllamacpp.Server(parameters(order["model"], order["port"], order["options"]))
    for path, body in order["requests"]:
        if not post(order["port"], path, body).startswith(b"HTTP/1.1 200"):
            sys.exit("a warm-up request failed")
    print("ready", flush=True)
    sys.stdin.read()
    del server


if __name__ == "__main__":
    main()
