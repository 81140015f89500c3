"""RequestRecords: one value per request, from Envoy's gRPC access log service, after the response.

Envoy sends entries in batches over a Unix socket; they are decoded here into one bounded stream. A
consumer that stalls costs records (counted), never requests. No text of a prompt or an answer
passes. Definitions: ``ttft_s`` is the time from the first byte of the request to the first byte of
a streamed body (for llama.cpp headers come long before; its first body byte is sent with the first
token). ``time_per_output_token_s`` is the time between the first and the last body byte divided by
tokens − 1 for streams, and the engine's own decoding time divided by tokens for whole answers.
What does not belong here: metrics and decisions made from records.
"""

from __future__ import annotations

import collections
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from msgspec import Struct

from preheat.dataplane.envoy.parts import CLIENT_HEADER, METADATA, RECORD_TAG
from preheat.dataplane.envoy.usage import COUNTS, COUNTS_KEY

if TYPE_CHECKING:
    import grpc.aio

Outcome = Literal["ok", "refused", "no_capacity", "upstream_failed", "client_left", "error"]
_NO_COUNTS = " " * (len(COUNTS) - 1)
_PERIODIC = 5
"""AccessLogType.DownstreamPeriodic"""
_METHOD = "/envoy.service.accesslog.v3.AccessLogService/StreamAccessLogs"


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

    def take(self) -> list[RequestRecord]:
        """All records that wait, oldest first."""
        taken = list(self._records)
        self._records.clear()
        return taken


def outcome(status: int, flags: Any, *, upstream: bool) -> Outcome:
    """What became of a request.

    ``flags`` are Envoy's ResponseFlags, None if there are none; ``upstream``: a start was chosen.
    """
    if flags is not None:
        if flags.downstream_connection_termination or flags.downstream_remote_reset:
            return "client_left"
        if flags.upstream_overflow or flags.no_healthy_upstream or flags.no_cluster_found:
            return "no_capacity"
        if (
            flags.upstream_connection_termination
            or flags.upstream_remote_reset
            or flags.upstream_connection_failure
            or flags.upstream_protocol_error
        ):
            return "upstream_failed"
    if status < 400:
        return "ok"
    if status == 503 and not upstream:
        return "no_capacity"
    return "error" if status >= 500 else "refused"


def decode(entry: Any) -> RequestRecord:
    """An ``envoy.data.accesslog.v3.HTTPAccessLogEntry`` → a record.

    Each look into a message costs some 0.1 µs, which is most of the time: none is done twice.
    """
    common, request, response = entry.common_properties, entry.request, entry.response
    fields = common.metadata.filter_metadata[METADATA].fields
    first, body, replica, version = common.custom_tags[RECORD_TAG].split(" ")
    status = response.response_code.value
    streamed = response.response_headers["content-type"].startswith("text/event-stream")
    counts = fields[COUNTS_KEY].string_value if COUNTS_KEY in fields else _NO_COUNTS
    told, completion, computed, cached, decoded, decoding_ms = counts.split(" ")
    # Usage where there is one, else what llama.cpp says of its own work.
    tokens = _number(completion or decoded)
    name = fields["model"].string_value if "model" in fields else ""
    began, lasted = common.start_time, common.duration
    flags = common.response_flags if common.HasField("response_flags") else None
    return RequestRecord(
        start_unix_s=began.seconds + began.nanos * 1e-9,
        # Names that begin so are preheat's own, for bodies without a model.
        model="" if name.startswith("\x00") else name,
        path=request.path.partition("?")[0],
        status=status,
        outcome=outcome(status, flags, upstream=bool(replica)),
        final=common.access_log_type != _PERIODIC,
        replica=replica,
        version=version,
        client=request.request_headers[CLIENT_HEADER],
        streamed=streamed,
        attempts=common.upstream_request_attempt_count,
        duration_s=lasted.seconds + lasted.nanos * 1e-9,
        ttft_s=int(first) * 1e-6 if streamed and first else None,
        time_per_output_token_s=(
            _per_token(tokens, body) if streamed else _decoding(_number(decoded), decoding_ms)
        ),
        prompt_tokens=_number(told) if told or not computed else _sum(computed, cached),
        completion_tokens=tokens,
        request_bytes=request.request_body_bytes,
        response_bytes=response.response_body_bytes,
    )


def _number(count: str) -> int | None:
    return int(float(count)) if count else None


def _sum(computed: str, cached: str) -> int:
    """A prompt's tokens: those that were computed and those that were there already."""
    return int(float(computed)) + int(float(cached or 0))


def _per_token(tokens: int | None, body_us: str) -> float | None:
    if tokens is None or tokens < 2 or not body_us:
        return None
    return int(body_us) * 1e-6 / (tokens - 1)


def _decoding(tokens: int | None, decoding_ms: str) -> float | None:
    return float(decoding_ms) * 1e-3 / tokens if tokens and decoding_ms else None


async def serve(socket: Path, put: Callable[[RequestRecord], None]) -> grpc.aio.Server:
    """Listens for Envoy on ``socket`` (mode 0600) and calls ``put`` for each record."""
    import os

    import grpc
    import grpc.aio
    from envoy.service.accesslog.v3 import als_pb2

    async def receive(batches: AsyncIterator[Any], _: Any) -> Any:
        async for batch in batches:
            for entry in batch.http_logs.log_entry:
                put(decode(entry))
        return als_pb2.StreamAccessLogsResponse()

    service, _, method = _METHOD[1:].partition("/")
    handler = grpc.stream_unary_rpc_method_handler(
        receive,
        request_deserializer=als_pb2.StreamAccessLogsMessage.FromString,
        response_serializer=als_pb2.StreamAccessLogsResponse.SerializeToString,
    )
    server = grpc.aio.server()
    server.add_generic_rpc_handlers(
        (grpc.method_handlers_generic_handler(service, {method: handler}),)
    )
    socket.unlink(missing_ok=True)
    previous = os.umask(0o177)
    try:
        server.add_insecure_port(f"unix:{socket}")
        await server.start()
    finally:
        os.umask(previous)
    return server
