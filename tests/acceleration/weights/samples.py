"""Small GGUF files and wheels for tests, and a package index on loopback that can be held up."""

from __future__ import annotations

import contextlib
import hashlib
import struct
import threading
import zipfile
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import TYPE_CHECKING

from preheat.core.spec.schema import Source

if TYPE_CHECKING:
    from collections.abc import Iterator

    import pytest

PACKAGE = "tiny-model"
VERSION = "1.0"
MEMBER = "tiny_model/tiny.gguf"
WHEEL = "tiny_model-1.0-py3-none-any.whl"

STRING, ARRAY, U32, BOOL = 8, 9, 4, 7


def text(value: str | bytes) -> bytes:
    data = value.encode() if isinstance(value, str) else value
    return struct.pack("<Q", len(data)) + data


def key(name: str, kind: int, value: bytes) -> bytes:
    return text(name) + struct.pack("<I", kind) + value


def u32(name: str, value: int) -> bytes:
    return key(name, U32, struct.pack("<I", value))


def string(name: str, value: str) -> bytes:
    return key(name, STRING, text(value))


def strings(name: str, values: list[str]) -> bytes:
    return key(name, ARRAY, struct.pack("<IQ", STRING, len(values)) + b"".join(map(text, values)))


def tensor(name: str, dims: tuple[int, ...], kind: int, offset: int) -> bytes:
    return (
        text(name)
        + struct.pack("<I", len(dims))
        + b"".join(struct.pack("<Q", dim) for dim in dims)
        + struct.pack("<IQ", kind, offset)
    )


KEYS = [
    string("general.architecture", "llama"),
    string("general.name", "Tiny"),
    strings("tokenizer.ggml.tokens", [f"token {number}" for number in range(500)]),
    key("tokenizer.ggml.scores", ARRAY, struct.pack("<IQ", 6, 500) + bytes(2000)),
    u32("llama.context_length", 4096),
    u32("general.file_type", 3),
]
TENSORS = [tensor("token_embd.weight", (64, 32), 0, 0), tensor("norm", (32, 4), 3, 8192)]
DATA_BYTES = 8192 + 80
"""64 × 32 values of F32, 32 × 4 of Q4_1."""


def gguf(
    keys: list[bytes] | None = None,
    tensors: list[bytes] | None = None,
    data_bytes: int = DATA_BYTES,
    version: int = 3,
    alignment: int = 32,
) -> bytes:
    keys = KEYS if keys is None else keys
    tensors = TENSORS if tensors is None else tensors
    header = b"GGUF" + struct.pack("<IQQ", version, len(tensors), len(keys))
    header += b"".join(keys) + b"".join(tensors)
    data = (b"weights!" * (data_bytes // 8 + 1))[:data_bytes]
    return header + bytes(-len(header) % alignment) + data


def sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def make_wheel(directory: Path, data: bytes, member: str = MEMBER) -> Path:
    directory.mkdir(parents=True, exist_ok=True)
    path = directory / WHEEL
    info = "tiny_model-1.0.dist-info"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as wheel:
        wheel.writestr(member, data)
        wheel.writestr(
            f"{info}/METADATA", "Metadata-Version: 2.1\nName: tiny-model\nVersion: 1.0\n"
        )
        wheel.writestr(
            f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        )
        wheel.writestr(f"{info}/RECORD", "")
    return path


def wheel_source(data: bytes, member: str = MEMBER) -> Source:
    return Source(uri=f"pypi:{PACKAGE}=={VERSION}/{member}", sha256=sha256(data))


def pip_only_from(monkeypatch: pytest.MonkeyPatch, find_links: str) -> None:
    """Point pip's own settings at ``find_links`` and nothing else."""
    import os

    for name in list(os.environ):
        if name.startswith("PIP_"):
            monkeypatch.delenv(name)
    monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", find_links)
    monkeypatch.setenv("PIP_RETRIES", "0")
    monkeypatch.setenv("PIP_DEFAULT_TIMEOUT", "600")  # nothing ends by pip's own timeout
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")


class Index:
    """One wheel behind HTTP on loopback; ``gate`` holds back its second half."""

    def __init__(self, wheel: Path) -> None:
        self.gate = threading.Event()
        self.downloads = 0
        body = wheel.read_bytes()
        index = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                page = not self.path.endswith(".whl")
                answer = f'<a href="{wheel.name}">{wheel.name}</a>'.encode() if page else body
                self.send_response(200)
                kind = "text/html" if page else "application/octet-stream"
                self.send_header("Content-Type", kind)
                self.send_header("Content-Length", str(len(answer)))
                self.end_headers()
                with contextlib.suppress(OSError):  # a pip that was killed
                    if page:
                        self.wfile.write(answer)
                        return
                    index.downloads += 1
                    self.wfile.write(answer[: len(answer) // 2])
                    self.wfile.flush()
                    index.gate.wait()
                    self.wfile.write(answer[len(answer) // 2 :])

            def log_message(self, format: str, *args: object) -> None:  # noqa: A002
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}/"

    @contextlib.contextmanager
    def serving(self) -> Iterator[Index]:
        thread = threading.Thread(target=self._server.serve_forever, args=(0.02,))
        thread.start()
        try:
            yield self
        finally:
            self.gate.set()
            self._server.shutdown()
            thread.join()
            self._server.server_close()


def processes_about(path: Path) -> list[str]:
    """Command lines of all processes that name ``path``."""
    found = []
    for entry in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):
            line = entry.read_bytes().replace(b"\0", b" ").decode(errors="replace")
            if str(path) in line:
                found.append(line)
    return found


def files_below(path: Path) -> list[str]:
    return sorted(str(file.relative_to(path)) for file in path.rglob("*")) if path.exists() else []
