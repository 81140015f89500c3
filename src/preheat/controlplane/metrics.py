"""Prometheus metrics: traffic from RequestRecords alone, state from the fleet.

Names and buckets follow OpenTelemetry's ``gen_ai`` conventions where there is one. Labels are
bounded: a model that is not served counts as ``(unknown)``. What does not belong here: traces.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

if TYPE_CHECKING:
    from preheat.controlplane.fleet import Fleet
    from preheat.core.coldstart import ColdStart
    from preheat.dataplane.envoy.records import RecordStream, RequestRecord

TTFT_BUCKETS_S = (
    0.001,
    0.005,
    0.01,
    0.02,
    0.04,
    0.06,
    0.08,
    0.1,
    0.25,
    0.5,
    0.75,
    1,
    2.5,
    5,
    7.5,
    10,
)
TPOT_BUCKETS_S = (0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1, 2.5)
DURATION_BUCKETS_S = (
    0.01,
    0.02,
    0.04,
    0.08,
    0.16,
    0.32,
    0.64,
    1.28,
    2.56,
    5.12,
    10.24,
    20.48,
    40.96,
    81.92,
)
UNKNOWN = "(unknown)"


class Metrics:
    def __init__(self, fleet: Fleet, stream: RecordStream) -> None:
        self._fleet = fleet
        self._stream = stream
        self._known = {(m.name, v.name) for m in fleet.spec.models for v in m.versions}
        self._models = {m.name for m in fleet.spec.models}
        self.registry = registry = CollectorRegistry()
        labels = ("model", "version")
        self._requests = Counter(
            "preheat_requests",
            "Requests that ended",
            (*labels, "outcome", "status"),
            registry=registry,
        )
        self._ttft = Histogram(
            "gen_ai_server_time_to_first_token_seconds",
            "First byte of a streamed request to the first byte of its body",
            labels,
            buckets=TTFT_BUCKETS_S,
            registry=registry,
        )
        self._tpot = Histogram(
            "gen_ai_server_time_per_output_token_seconds",
            "Time for each token after the first",
            labels,
            buckets=TPOT_BUCKETS_S,
            registry=registry,
        )
        self._duration = Histogram(
            "gen_ai_server_request_duration_seconds",
            "First byte of a request to the last of its answer",
            labels,
            buckets=DURATION_BUCKETS_S,
            registry=registry,
        )
        self._tokens = Counter(
            "preheat_tokens",
            "Tokens, by kind: prompt, completion",
            (*labels, "kind"),
            registry=registry,
        )
        self._replicas = Gauge(
            "preheat_replicas",
            "Replicas, by state",
            ("model", "version", "state"),
            registry=registry,
        )
        self._ready = Gauge(
            "preheat_ready", "1 when every model has a proven replica", registry=registry
        )
        self._cold_starts = Histogram(
            "preheat_cold_start_seconds",
            "Spawn to first token of a replica's start",
            labels,
            buckets=(0.25, 0.5, 0.75, 1, 1.5, 2, 3, 5, 8, 13, 21, 34, 55, 89),
            registry=registry,
        )
        self._received = Gauge(
            "preheat_records_received", "RequestRecords received", registry=registry
        )
        self._dropped = Gauge(
            "preheat_records_dropped", "RequestRecords dropped", registry=registry
        )

    def count(self, record: RequestRecord) -> None:
        if not record.final:
            return
        labels = self._labels(record)
        self._requests.labels(*labels, record.outcome, str(record.status)).inc()
        if record.outcome != "ok" or not record.replica:
            return
        self._duration.labels(*labels).observe(record.duration_s)
        if record.ttft_s is not None:
            self._ttft.labels(*labels).observe(record.ttft_s)
        if record.time_per_output_token_s is not None:
            self._tpot.labels(*labels).observe(record.time_per_output_token_s)
        for kind, tokens in (
            ("prompt", record.prompt_tokens),
            ("completion", record.completion_tokens),
        ):
            if tokens:
                self._tokens.labels(*labels, kind).inc(tokens)

    def _labels(self, record: RequestRecord) -> tuple[str, str]:
        """Model and version; one that is not served must not make a series of its own."""
        if (record.model, record.version) in self._known:
            return record.model, record.version
        return (record.model if record.model in self._models else UNKNOWN), ""

    def cold_start(self, record: ColdStart) -> None:
        if record.first_token_s is not None:
            seconds = record.first_token_s - record.spawned_s
            self._cold_starts.labels(record.model, record.version).observe(seconds)

    def render(self) -> bytes:
        """The text that Prometheus scrapes."""
        counts: dict[tuple[str, str, str], int] = {}
        for place in self._fleet.replicas.values():
            state = str(place.start.state) if place.start else "none"
            # An explicit 0 for ready, so that a model without replicas has a series.
            counts.setdefault((place.model.name, place.version.name, "ready"), 0)
            key = (place.model.name, place.version.name, state)
            counts[key] = counts.get(key, 0) + 1
        self._replicas.clear()
        for key, count in counts.items():
            self._replicas.labels(*key).set(count)
        self._ready.set(0 if self._fleet.routing_table().missing else 1)
        self._received.set(self._stream.received)
        self._dropped.set(self._stream.dropped)
        return generate_latest(self.registry)
