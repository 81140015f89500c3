"""RequestRecords: one value per request, from Envoy's access log over gRPC, after the response.

Envoy sends batches over a Unix socket (OpenTelemetry's log service, a record is one line of text;
Envoy's own access log messages, of forty fields, took eight times the CPU to read). They are
decoded into one bounded stream; a consumer that stalls costs records (counted), never requests. No
text of a prompt or an answer passes.

Definitions: ``ttft_s`` is the time from the first byte of the request to the first byte of a
streamed body (for llama.cpp headers come long before; its first body byte is sent with the first
token). ``time_per_output_token_s`` is the time between the first and the last body byte divided by
tokens − 1 for streams, and the engine's own decoding time divided by tokens for whole answers.
What does not belong here: metrics and decisions made from records.
"""

from __future__ import annotations

import collections
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from msgspec import Struct

from preheat.dataplane.envoy.parts import CLIENT_HEADER, METADATA
from preheat.dataplane.envoy.usage import COUNTS, COUNTS_KEY

if TYPE_CHECKING:
    import grpc.aio

Outcome = Literal["ok", "refused", "no_capacity", "upstream_failed", "client_left", "error"]
_SERVICE = "opentelemetry.proto.collector.logs.v1.LogsService"
_NOTHING = "-"
"""What Envoy writes for a value that there is not."""
_NO_COUNTS = " " * (len(COUNTS) - 1)
_CLIENT_LEFT = frozenset({"DC", "DR"})
_NO_CAPACITY = frozenset({"UO", "UH", "NC"})
_UPSTREAM_FAILED = frozenset({"UC", "UR", "UF", "UPE"})

# One value each, in this order, tabs between. None but the last can hold a tab: paths and headers
# may not, and owners of keys are names of the spec. The model is whatever a client wrote.
_LINE = (
    "%START_TIME(%s.%6f)%",
    "%ACCESS_LOG_TYPE%",
    "%RESPONSE_CODE%",
    "%RESPONSE_FLAGS%",
    "%UPSTREAM_METADATA(preheat:replica)%",
    "%UPSTREAM_METADATA(preheat:version)%",
    f"%REQ({CLIENT_HEADER})%",
    "%RESP(content-type)%",
    "%UPSTREAM_REQUEST_ATTEMPT_COUNT%",
    "%DURATION%",
    "%COMMON_DURATION(DS_RX_BEG:DS_TX_END:us)%",
    # To the first byte of a body (headers come long before the first token), and to its last.
    "%COMMON_DURATION(DS_RX_BEG:US_RX_BODY_BEG:us)%",
    "%COMMON_DURATION(US_RX_BODY_BEG:US_RX_END:us)%",
    "%BYTES_RECEIVED%",
    "%BYTES_SENT%",
    f"%DYNAMIC_METADATA({METADATA}:{COUNTS_KEY})%",
    "%REQ(:PATH)%",
    f"%DYNAMIC_METADATA({METADATA}:model)%",
)
LINE_FORMAT = "\t".join(_LINE)
"""Envoy's format string of one record."""


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


def decode(line: str) -> RequestRecord:
    """A line of ``LINE_FORMAT`` → a record."""
    (
        began,
        kind,
        code,
        flags,
        replica,
        version,
        client,
        content_type,
        attempts,
        lasted_ms,
        lasted_us,
        first_us,
        body_us,
        received,
        sent,
        counts,
        path,
        model,
    ) = line.split("\t", len(_LINE) - 1)
    status = int(code)
    streamed = content_type.startswith("text/event-stream")
    told, completion, computed, cached, decoded, decoding_ms = (
        _NO_COUNTS if counts == _NOTHING else counts
    ).split(" ")
    # Usage where there is one, else what llama.cpp says of its own work.
    tokens = _number(completion or decoded)
    replica = _text(replica)
    return RequestRecord(
        start_unix_s=float(began),
        # Names that begin so are preheat's own, for bodies without a model.
        model="" if model.startswith("\x00") else _text(model),
        path=path.partition("?")[0],
        status=status,
        outcome=outcome(status, flags, upstream=bool(replica)),
        final=kind != "DownstreamPeriodic",
        replica=replica,
        version=_text(version),
        client=_text(client),
        streamed=streamed,
        attempts=_count(attempts),
        duration_s=int(lasted_us) * 1e-6 if lasted_us != _NOTHING else _count(lasted_ms) * 1e-3,
        ttft_s=int(first_us) * 1e-6 if streamed and first_us != _NOTHING else None,
        time_per_output_token_s=(
            _per_token(tokens, body_us) if streamed else _decoding(_number(decoded), decoding_ms)
        ),
        prompt_tokens=_number(told) if told or not computed else _sum(computed, cached),
        completion_tokens=tokens,
        request_bytes=_count(received),
        response_bytes=_count(sent),
    )


def _text(value: str) -> str:
    return "" if value == _NOTHING else value


def _count(value: str) -> int:
    return 0 if value == _NOTHING else int(value)


def _number(count: str) -> int | None:
    return int(float(count)) if count else None


def _sum(computed: str, cached: str) -> int:
    """A prompt's tokens: those that were computed and those that were there already."""
    return int(float(computed)) + int(float(cached or 0))


def _per_token(tokens: int | None, body_us: str) -> float | None:
    if tokens is None or tokens < 2 or body_us == _NOTHING:
        return None
    return int(body_us) * 1e-6 / (tokens - 1)


def _decoding(tokens: int | None, decoding_ms: str) -> float | None:
    return float(decoding_ms) * 1e-3 / tokens if tokens and decoding_ms else None


def _batch_type() -> Any:
    """The type of a batch: of OpenTelemetry's ExportLogsServiceRequest the path to a record's text.

    Declared here, because several packages bring these messages, under one name and in versions
    that do not agree; fields that are not declared are passed over. Numbers of fields from
    opentelemetry/proto/logs/v1/logs.proto, 1.0 and later.
    """
    from google.protobuf import descriptor_pb2, descriptor_pool, message_factory

    nested = (
        ("Batch", "resources", 1, "Resource"),
        ("Resource", "scopes", 2, "Scope"),
        ("Scope", "records", 2, "Record"),
        ("Record", "body", 5, "Body"),
    )
    field = descriptor_pb2.FieldDescriptorProto
    file = descriptor_pb2.FileDescriptorProto(
        name="preheat/records.proto", package="preheat.records", syntax="proto3"
    )
    for message, name, number, kind in nested:
        file.message_type.add(name=message).field.add(
            name=name,
            number=number,
            type=field.TYPE_MESSAGE,
            type_name=f".preheat.records.{kind}",
            label=field.LABEL_OPTIONAL if name == "body" else field.LABEL_REPEATED,
        )
    file.message_type.add(name="Body").field.add(
        name="text", number=1, type=field.TYPE_STRING, label=field.LABEL_OPTIONAL
    )
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    return message_factory.GetMessageClass(pool.FindMessageTypeByName("preheat.records.Batch"))


async def serve(socket: Path, put: Callable[[RequestRecord], None]) -> grpc.aio.Server:
    """Listens for Envoy on ``socket`` (mode 0600) and calls ``put`` for each record."""
    import os

    import grpc
    import grpc.aio

    async def receive(batch: Any, _: Any) -> bytes:
        for resource in batch.resources:
            for scope in resource.scopes:
                for record in scope.records:
                    put(decode(record.body.text))
        # An empty ExportLogsServiceResponse: everything was taken.
        return b""

    handler: Any = grpc.unary_unary_rpc_method_handler(
        receive, request_deserializer=_batch_type().FromString
    )
    server = grpc.aio.server()
    server.add_generic_rpc_handlers(
        (grpc.method_handlers_generic_handler(_SERVICE, {"Export": handler}),)
    )
    socket.unlink(missing_ok=True)
    previous = os.umask(0o177)
    try:
        server.add_insecure_port(f"unix:{socket}")
        await server.start()
    finally:
        os.umask(previous)
    return server
