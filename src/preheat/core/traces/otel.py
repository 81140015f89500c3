"""A cold start as OpenTelemetry spans, over OTLP/HTTP or to any span exporter.

Needs the extra ``otel``; the SDK takes about 50 ms to import and is only imported when spans are
made. What does not belong here: metrics, and traces of requests.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from preheat.core.coldstart import MAIN, coverage, parents
from preheat.core.errors import PreheatError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from opentelemetry.sdk.trace import ReadableSpan
    from opentelemetry.sdk.trace.export import SpanExporter
    from opentelemetry.trace import Span, Tracer

    from preheat.core.coldstart import Attribute, ColdStart

SERVICE_NAME = "preheat"
TIMEOUT_S = 5.0
"""Seconds an export over OTLP may take, repeated attempts included."""

ENDPOINT_VARIABLES = ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT")


def otlp_configured(environment: Mapping[str, str] = os.environ) -> bool:
    """Whether the environment names a place for spans. Imports nothing."""
    return any(environment.get(name) for name in ENDPOINT_VARIABLES)


def export_otlp(record: ColdStart, endpoint: str | None = None) -> int:
    """Sends the record's spans over OTLP/HTTP and returns how many they were.

    ``endpoint`` is a collector's base URL (``/v1/traces`` is appended, as to
    ``OTEL_EXPORTER_OTLP_ENDPOINT``, which counts when it is None). Raises PreheatError if the extra
    is missing, there is no endpoint, or the collector does not take the spans.
    """
    if endpoint is None and not otlp_configured():
        raise PreheatError(
            "no endpoint for OpenTelemetry spans is known",
            advice="give one, or set OTEL_EXPORTER_OTLP_ENDPOINT, e.g. http://localhost:4318",
        )
    try:
        from opentelemetry.exporter.otlp.json.http.trace_exporter import OTLPSpanExporter
    except ImportError as error:
        raise _missing(error) from error
    traces_url = None if endpoint is None else endpoint.rstrip("/") + "/v1/traces"
    return emit_spans(record, OTLPSpanExporter(endpoint=traces_url, timeout=TIMEOUT_S))


def emit_spans(record: ColdStart, exporter: SpanExporter) -> int:
    """Hands one span for the start and a nested one for each phase to the exporter, in one call,
    and shuts it down. Returns how many. Raises PreheatError if the exporter did not take them."""
    try:
        from opentelemetry.sdk.trace.export import SpanExportResult
    except ImportError as error:
        raise _missing(error) from error
    spans = _spans(record)
    try:
        result = exporter.export(spans)
    finally:
        exporter.shutdown()
    if result is not SpanExportResult.SUCCESS:
        raise PreheatError(
            f"the {len(spans)} spans of the start {record.start_id} were not taken",
            advice="is the collector running, and does it listen for OTLP over HTTP there?",
        )
    return len(spans)


def _missing(error: ImportError) -> PreheatError:
    return PreheatError(
        f"OpenTelemetry is not installed ({error.name})", advice="pip install 'preheat[otel]'"
    )


def _spans(record: ColdStart) -> Sequence[ReadableSpan]:
    from opentelemetry.sdk.resources import Resource
    from opentelemetry.sdk.trace import SpanProcessor, TracerProvider
    from opentelemetry.sdk.trace.sampling import ALWAYS_ON

    finished: list[ReadableSpan] = []

    class Collect(SpanProcessor):
        def on_end(self, span: ReadableSpan) -> None:
            finished.append(span)

    provider = TracerProvider(
        # Every start is kept: they are few, and the slow ones are what one looks for.
        sampler=ALWAYS_ON,
        resource=Resource.create({"service.name": SERVICE_NAME}),
        shutdown_on_exit=False,
    )
    provider.add_span_processor(Collect())
    tracer = provider.get_tracer("preheat.coldstart")
    _emit(record, tracer)
    provider.shutdown()
    return finished


def _emit(record: ColdStart, tracer: Tracer) -> None:
    from opentelemetry.context import Context
    from opentelemetry.trace import Status, StatusCode, set_span_in_context

    def unix_ns(at_s: float) -> int:
        return round(record.unix_time_s * 1e9) + round((at_s - record.spawned_s) * 1e9)

    ends_s = [phase.end_s for phase in record.phases if phase.track == MAIN]
    moments = {"ready": record.ready_s, "first_token": record.first_token_s}
    reached = {name: at_s for name, at_s in moments.items() if at_s is not None}
    # An empty context: the caller's own current span is no part of this trace.
    root = tracer.start_span(
        "coldstart",
        context=Context(),
        start_time=unix_ns(record.spawned_s),
        attributes=_root_attributes(record),
    )
    for name, at_s in reached.items():
        root.add_event(name, timestamp=unix_ns(at_s))
    if record.outcome != "ready":
        root.set_status(Status(StatusCode.ERROR, record.outcome))

    opened: dict[int, Span] = {}
    above = parents(record.phases)
    # Outer phases have to be opened before what lies in them.
    for index in sorted(range(len(above)), key=lambda i: _depth(i, above)):
        phase, parent = record.phases[index], above[index]
        opened[index] = tracer.start_span(
            phase.name,
            context=set_span_in_context(root if parent is None else opened[parent], Context()),
            start_time=unix_ns(phase.start_s),
            attributes={
                "preheat.track": phase.track,
                **{f"preheat.{key}": value for key, value in phase.attributes.items()},
            },
        )
    for index, span in opened.items():
        span.end(end_time=unix_ns(record.phases[index].end_s))
    root.end(end_time=unix_ns(max([record.spawned_s, *ends_s, *reached.values()])))


def _depth(index: int, above: Sequence[int | None]) -> int:
    depth, parent = 0, above[index]
    while parent is not None:
        depth, parent = depth + 1, above[parent]
    return depth


def _root_attributes(record: ColdStart) -> dict[str, Attribute]:
    attributes: dict[str, Attribute] = {
        "preheat.start_id": record.start_id,
        "preheat.model": record.model,
        "preheat.version": record.version,
        "preheat.engine": record.engine,
        "preheat.outcome": record.outcome,
        "preheat.bytes_read": record.bytes_read,
        "preheat.coverage": coverage(record),
    }
    if record.page_cache_share is not None:
        attributes["preheat.page_cache_share"] = record.page_cache_share
    return attributes
