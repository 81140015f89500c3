from __future__ import annotations

import gzip
import json
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest
from hypothesis import given, settings
from tests.core.records import SPAWNED_S, example, record, sound_records

from preheat.core.coldstart import ColdStart, parents
from preheat.core.errors import PreheatError
from preheat.core.traces.otel import emit_spans, export_otlp, otlp_configured

pytest.importorskip("opentelemetry.sdk")
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import SpanExporter, SpanExportResult
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import StatusCode


def spans_of(start: ColdStart) -> tuple[ReadableSpan, ...]:
    memory = InMemorySpanExporter()
    assert emit_spans(start, memory) == len(start.phases) + 1
    return memory.get_finished_spans()


def unix_ns(start: ColdStart, at_s: float) -> int:
    return round(start.unix_time_s * 1e9) + round((at_s - SPAWNED_S) * 1e9)


def test_the_start_is_one_trace_whose_spans_nest_as_the_phases() -> None:
    spans = spans_of(example())
    by_id = {span.context.span_id: span.name for span in spans if span.context}
    above = {(span.name, span.parent and by_id[span.parent.span_id]) for span in spans}
    assert above == {
        ("coldstart", None),
        ("process", "coldstart"),
        ("weights", "coldstart"),
        ("weights.read", "weights"),
        ("weights.hash", "weights"),
        ("warmup", "coldstart"),
        ("warmup.prompt", "warmup"),
        ("publish", "coldstart"),
        ("start", "coldstart"),
        ("start.listen", "start"),
    }
    assert len({span.context.trace_id for span in spans if span.context}) == 1


@settings(max_examples=20)
@given(sound_records())
def test_every_phase_becomes_a_span_with_its_own_times(sound: ColdStart) -> None:
    found = sorted(
        (span.name, span.start_time, span.end_time, (span.attributes or {})["preheat.track"])
        for span in spans_of(sound)
        if span.parent is not None
    )
    assert found == sorted(
        (one.name, unix_ns(sound, one.start_s), unix_ns(sound, one.end_s), one.track)
        for one in sound.phases
    )
    assert len(parents(sound.phases)) == len(found)


def test_the_root_span_carries_the_facts_and_the_moments() -> None:
    (root,) = [span for span in spans_of(example()) if span.parent is None]
    assert root.resource.attributes["service.name"] == "preheat"
    assert dict(root.attributes or {}) == {
        "preheat.start_id": "chat-v1-0@1",
        "preheat.model": "chat",
        "preheat.version": "v1",
        "preheat.engine": "llama.cpp",
        "preheat.outcome": "ready",
        "preheat.bytes_read": 98_362_432,
        "preheat.coverage": pytest.approx(0.99),
        "preheat.page_cache_share": 1.0,
    }
    end_ns = unix_ns(example(), SPAWNED_S + 1)
    assert (root.start_time, root.end_time) == (unix_ns(example(), SPAWNED_S), end_ns)
    assert [(event.name, event.timestamp) for event in root.events] == [
        ("ready", end_ns),
        ("first_token", end_ns),
    ]
    assert root.status.status_code is StatusCode.UNSET


def test_attributes_of_phases_are_prefixed() -> None:
    (hashing,) = [span for span in spans_of(example()) if span.name == "weights.hash"]
    assert dict(hashing.attributes or {}) == {"preheat.track": "main", "preheat.threads": 2}


def test_a_failed_start_is_an_error_span() -> None:
    (root,) = spans_of(record(first_token_s=None, outcome="killed by signal 9"))
    assert root.status.status_code is StatusCode.ERROR
    assert root.status.description == "killed by signal 9"


def test_spans_that_are_not_taken_are_an_error() -> None:
    class Refuse(SpanExporter):
        closed = False

        def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
            return SpanExportResult.FAILURE

        def shutdown(self) -> None:
            self.closed = True

    exporter = Refuse()
    with pytest.raises(PreheatError, match="chat-v1-0@1 were not taken"):
        emit_spans(example(), exporter)
    assert exporter.closed


# --- over OTLP/HTTP -------------------------------------------------------------------------------

Received = list[tuple[str, bytes]]


@contextmanager
def collector(status: int = 200) -> Iterator[tuple[str, Received]]:
    """A real HTTP server on loopback: (base URL, what was posted to it)."""
    received: Received = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            if self.headers.get("Content-Encoding") == "gzip":
                body = gzip.decompress(body)
            received.append((self.path, body))
            self.send_response(status)
            self.send_header("Content-Length", "0")
            self.end_headers()

        def log_message(self, format: str, *args: object) -> None:  # noqa: A002 — the base's name
            pass

    with HTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}", received
        finally:
            server.shutdown()
            thread.join()


def names_in(body: bytes) -> list[str]:
    return [
        span["name"]
        for resource in json.loads(body)["resourceSpans"]
        for scope in resource["scopeSpans"]
        for span in scope["spans"]
    ]


@pytest.mark.parametrize("through_environment", [False, True])
def test_a_collector_receives_all_spans_in_one_request(
    through_environment: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("opentelemetry.exporter.otlp.json.http")
    with collector() as (url, received):
        monkeypatch.delenv("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", raising=False)
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", url if through_environment else "")
        assert otlp_configured() == through_environment
        count = export_otlp(example(), None if through_environment else url)
    ((path, body),) = received
    assert path == "/v1/traces"
    assert count == 11
    assert sorted(names_in(body)) == sorted(["coldstart", *(one.name for one in example().phases)])


def test_a_collector_that_refuses_is_an_error() -> None:
    pytest.importorskip("opentelemetry.exporter.otlp.json.http")
    with collector(status=400) as (url, received), pytest.raises(PreheatError, match="not taken"):
        export_otlp(example(), url)
    assert len(received) == 1


def test_without_an_endpoint_nothing_is_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", raising=False)
    monkeypatch.delenv("OTEL_EXPORTER_OTLP_ENDPOINT", raising=False)
    with pytest.raises(PreheatError, match="no endpoint"):
        export_otlp(example())


def test_a_missing_extra_is_told_with_the_command_that_helps() -> None:
    script = (
        "import sys; sys.modules['opentelemetry'] = None\n"
        "from preheat.core.traces.otel import export_otlp\n"
        "from preheat.core.errors import PreheatError\n"
        "from tests.core.records import example\n"
        "try: export_otlp(example(), 'http://127.0.0.1:1')\n"
        "except PreheatError as error: print(error)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script],
        capture_output=True,
        text=True,
        check=True,
        cwd=Path(__file__).parents[3],
    )
    assert "pip install 'preheat[otel]'" in done.stdout


def test_the_sdk_is_not_imported_before_it_is_needed() -> None:
    script = (
        "import sys; import preheat.core.traces.otel; "
        "print(any(name.startswith('opentelemetry') for name in sys.modules))"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == "False"
