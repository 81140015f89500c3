"""RequestRecords: one value per request, from Envoy's access log, after the response.

Envoy writes a line of text for each request into a named pipe; no request waits for it. (Its log
services over gRPC were tried first: with them a request took 7 to 16 % more CPU, and the slowest
per cent of first bytes came a fifth later.) Lines are decoded into one bounded stream; a consumer
that stalls costs records (counted), never requests. No text of a prompt or an answer passes.

Definitions: ``ttft_s`` is the time from the first byte of the request to the first byte of a
streamed body (for llama.cpp headers come long before; its first body byte is sent with the first
token). ``time_per_output_token_s`` is the time between the first and the last body byte divided by
tokens − 1 for streams, and the engine's own decoding time divided by tokens for whole answers.
What does not belong here: metrics and decisions made from records.
"""

from __future__ import annotations

import collections
import contextlib
import fcntl
import functools
import os
import select
import threading
from pathlib import Path
from typing import Literal

from msgspec import Struct

from preheat.dataplane.envoy.parts import CLIENT_HEADER, METADATA
from preheat.dataplane.envoy.usage import COUNTS, COUNTS_KEY

Outcome = Literal["ok", "refused", "no_capacity", "upstream_failed", "client_left", "error"]
_NOTHING = "-"
"""What Envoy writes for a value that there is not."""
_NO_COUNTS = " " * (len(COUNTS) - 1)
_CLIENT_LEFT = frozenset({"DC", "DR"})
_NO_CAPACITY = frozenset({"UO", "UH", "NC"})
_UPSTREAM_FAILED = frozenset({"UC", "UR", "UF", "UPE"})

TEXT_MAX_BYTES = 512
"""Of what clients choose, paths and names of models; the rest is cut off."""
# One value each, in this order, tabs between. None but the last can hold a tab: paths and headers
# may not, and owners of keys are names of the spec. The model is whatever a client wrote. What
# differs from one request to the next stands first, so that the rest is read once for many.
_OWN = (
    "%START_TIME(%s.%6f)%",
    "%DURATION%",
    "%COMMON_DURATION(DS_RX_BEG:DS_TX_END:us)%",
    # To the first byte of a body (headers come long before the first token), and to its last.
    "%COMMON_DURATION(DS_RX_BEG:US_RX_BODY_BEG:us)%",
    "%COMMON_DURATION(US_RX_BODY_BEG:US_RX_END:us)%",
    "%BYTES_RECEIVED%",
    "%BYTES_SENT%",
    f"%DYNAMIC_METADATA({METADATA}:{COUNTS_KEY})%",
)
_COMMON = (
    "%ACCESS_LOG_TYPE%",
    "%RESPONSE_CODE%",
    "%RESPONSE_FLAGS%",
    "%UPSTREAM_METADATA(preheat:replica)%",
    "%UPSTREAM_METADATA(preheat:version)%",
    f"%REQ({CLIENT_HEADER})%",
    "%RESP(content-type)%",
    "%UPSTREAM_REQUEST_ATTEMPT_COUNT%",
    f"%REQ(:PATH):{TEXT_MAX_BYTES}%",
    f"%DYNAMIC_METADATA({METADATA}:model):{TEXT_MAX_BYTES}%",
)
LINE_END = b"\xff"
"""Text in UTF-8 never has this byte, so no model's name can end a line and begin another."""
LINE_FORMAT = "\t".join(_OWN + _COMMON).encode() + LINE_END
"""Envoy's format string of one record."""
LINE_MAX_BYTES = 65_536
READER_NICENESS = 10
"""Still a tenth of a core beside one busy thread; a gateway at its limit leaves it half of that to
do."""
READ_BYTES = 65_536
PIPE_BYTES = 1 << 20
"""What Envoy can write while nobody reads before it keeps the rest itself; the most that the kernel
gives without privileges."""


class RequestRecord(Struct, frozen=True, kw_only=True):
    """One request, or with ``final=False`` the state of one that still runs (every 10 s)."""

    start_unix_s: float
    model: str
    """As the client named it; empty when the body named none."""
    path: str
    status: int
    outcome: Outcome
    final: bool = True
    replica: str = ""
    """``x-preheat-replica``: the start that served it, or was to."""
    version: str = ""
    client: str = ""
    """Owner of the API key."""
    streamed: bool = False
    attempts: int = 0
    duration_s: float = 0.0
    ttft_s: float | None = None
    time_per_output_token_s: float | None = None
    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    request_bytes: int = 0
    response_bytes: int = 0


class RecordStream:
    """A bounded stream of records; the oldest are dropped first, and counted."""

    def __init__(self, capacity: int = 65_536) -> None:
        self._records: collections.deque[RequestRecord] = collections.deque(maxlen=capacity)
        self.received = 0
        self.dropped = 0

    def put(self, record: RequestRecord) -> None:
        self.received += 1
        self.dropped += len(self._records) == self._records.maxlen
        self._records.append(record)

    def lose(self) -> None:
        """Counts a record that came damaged."""
        self.received += 1
        self.dropped += 1

    def take(self) -> list[RequestRecord]:
        """All records that wait, oldest first."""
        # One by one: a thread may be putting more.
        taken = []
        while self._records:
            taken.append(self._records.popleft())
        return taken


def outcome(status: int, flags: str, *, upstream: bool) -> Outcome:
    """What became of a request.

    ``flags`` are Envoy's response flags in short, with commas between, ``-`` if there are none;
    ``upstream``: a start was chosen.
    """
    if flags != _NOTHING:
        seen = set(flags.split(","))
        if seen & _CLIENT_LEFT:
            return "client_left"
        if seen & _NO_CAPACITY:
            return "no_capacity"
        if seen & _UPSTREAM_FAILED:
            return "upstream_failed"
    if 0 < status < 400:
        return "ok"
    if status == 503 and not upstream:
        return "no_capacity"
    return "error" if status >= 500 or status == 0 else "refused"


class _Common(Struct, frozen=True):
    """What many requests have in common: the part of a line that is read once for them."""

    model: str
    path: str
    status: int
    outcome: Outcome
    final: bool
    replica: str
    version: str
    client: str
    streamed: bool
    attempts: int


@functools.lru_cache(maxsize=1024)
def _common(values: str) -> _Common:
    kind, code, flags, replica, version, client, content_type, attempts, path, model = values.split(
        "\t", len(_COMMON) - 1
    )
    status = int(code)
    replica = _text(replica)
    return _Common(
        # Names that begin so are preheat's own, for bodies without a model.
        model="" if model.startswith("\x00") else _text(model),
        path=path.partition("?")[0],
        status=status,
        outcome=outcome(status, flags, upstream=bool(replica)),
        final=kind != "DownstreamPeriodic",
        replica=replica,
        version=_text(version),
        client=_text(client),
        streamed=content_type.startswith("text/event-stream"),
        attempts=_count(attempts),
    )


def decode(line: str) -> RequestRecord:
    """A line of ``LINE_FORMAT`` → a record."""
    began, lasted_ms, lasted_us, first_us, body_us, received, sent, counts, values = line.split(
        "\t", len(_OWN)
    )
    common = _common(values)
    told, completion, computed, cached, decoded, decoding_ms = (
        _NO_COUNTS if counts == _NOTHING else counts
    ).split(" ")
    # Usage where there is one, else what llama.cpp says of its own work.
    tokens = _tokens(completion or decoded)
    streamed = common.streamed
    return RequestRecord(
        start_unix_s=float(began),
        model=common.model,
        path=common.path,
        status=common.status,
        outcome=common.outcome,
        final=common.final,
        replica=common.replica,
        version=common.version,
        client=common.client,
        streamed=streamed,
        attempts=common.attempts,
        duration_s=int(lasted_us) * 1e-6 if lasted_us != _NOTHING else _count(lasted_ms) * 1e-3,
        ttft_s=int(first_us) * 1e-6 if streamed and first_us != _NOTHING else None,
        time_per_output_token_s=(
            _per_token(tokens, body_us) if streamed else _decoding(decoded, decoding_ms)
        ),
        prompt_tokens=_tokens(told) if told or not computed else _sum(computed, cached),
        completion_tokens=tokens,
        request_bytes=_count(received),
        response_bytes=_count(sent),
    )


def _text(value: str) -> str:
    return "" if value == _NOTHING else value


def _count(value: str) -> int:
    return 0 if value == _NOTHING else int(value)


def _number(text: str) -> float | None:
    """A number as an engine wrote it; None if it is none, or no count."""
    try:
        number = float(text)
    except ValueError:
        return None
    return number if 0 <= number < 1e12 else None


def _tokens(text: str) -> int | None:
    number = _number(text)
    return None if number is None else int(number)


def _sum(computed: str, cached: str) -> int | None:
    """A prompt's tokens: those that were computed and those that were there already."""
    tokens = _tokens(computed)
    return None if tokens is None else tokens + (_tokens(cached) or 0)


def _per_token(tokens: int | None, body_us: str) -> float | None:
    if tokens is None or tokens < 2 or body_us == _NOTHING:
        return None
    return int(body_us) * 1e-6 / (tokens - 1)


def _decoding(decoded: str, decoding_ms: str) -> float | None:
    tokens, lasted_ms = _number(decoded), _number(decoding_ms)
    return lasted_ms * 1e-3 / tokens if tokens and lasted_ms is not None else None


class RecordPipe:
    """Envoy's lines from a named pipe, decoded into a stream by a thread.

    The thread has a low priority: hundreds of lines come at once, and to decode them at once on a
    busy machine would hold up the requests behind them. Envoy has the pipe open for reading too
    (its standard input): it never waits for a reader, and what it wrote while there was none is
    read by the next one.
    """

    def __init__(self, path: Path, stream: RecordStream) -> None:
        """Raises OSError if the pipe cannot be opened."""
        # Open for writing too: so it has no end when Envoy's process ends.
        self._fd = os.open(path, os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC)
        self._stop_fd = os.eventfd(0, os.EFD_CLOEXEC)
        with contextlib.suppress(PermissionError):
            fcntl.fcntl(self._fd, fcntl.F_SETPIPE_SZ, PIPE_BYTES)
        self._stream = stream
        self._rest = b""
        self._thread = threading.Thread(target=self._run, name="records", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), READER_NICENESS)
        poll = select.poll()
        for fd in (self._fd, self._stop_fd):
            poll.register(fd, select.POLLIN)
        while self._stop_fd not in {fd for fd, _ in poll.poll()}:
            self._read()

    def _read(self) -> None:
        try:
            data = os.read(self._fd, READ_BYTES)
        except BlockingIOError:  # Envoy's process, which holds it too, does not read; be safe
            return
        *lines, rest = (self._rest + data).split(LINE_END)
        self._rest = rest if len(rest) <= LINE_MAX_BYTES else b""
        for line in lines:
            try:
                record = decode(line.decode(errors="replace"))
            except ValueError:
                # The end of what an Envoy that was killed had begun.
                self._stream.lose()
            else:
                self._stream.put(record)

    def close(self) -> None:
        """What is in the pipe by now stays there."""
        os.eventfd_write(self._stop_fd, 1)
        self._thread.join()
        os.close(self._fd)
        os.close(self._stop_fd)
