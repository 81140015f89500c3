"""preheat's gateway, a direct connection, vllm-router and litellm, before the same stub upstream.

Each round puts three loads on each subject, in rotated order: 64 unary connections, 200 streams
that stay open, 1,000 requests at once. Subjects are started anew every second round. What is
compared are rounds, paired; the direct connection is the physical limit. Everything runs on the
loopback address of one machine, so client, gateway and upstream share its cores: ratios mean
something, absolute numbers only here.
"""

from __future__ import annotations

import asyncio
import json
import os
import secrets
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

import peers
from common import Interval, format_table, median_interval, median_of_ratios, options, write_result
from native_tools import Load, Stub, run_load, start_stub
from processes import BenchError, Process, answers, free_port, settled_cpu_s, usage, wait_until

STREAM_CHUNKS = 20
STREAM_INTERVAL_MS = 20
STREAM_LENGTH_MS = STREAM_CHUNKS * STREAM_INTERVAL_MS
UNARY_CONNECTIONS = 64
STREAMS = 200
PARALLEL = 1000
TIMEOUT_MS = 120_000
SLOW_UNARY_REQUESTS = 192
SLOW_EVERY_ROUNDS = 4
# Two processes of the same program differ by up to a fifth, for as long as they live (where their
# memory lies): so each is started anew after so many rounds.
INSTANCE_ROUNDS = 2
RECORDS_LOG = "records.log"
CONSUMER = Path(__file__).resolve().with_name("records_consumer.py")


@dataclass(frozen=True, slots=True)
class Subject:
    """Something that stands before the upstream (or nothing, for the direct connection)."""

    name: str
    port: int
    processes: tuple[Process, ...]
    key: str = "none"
    """API key that requests carry; only litellm insists on one."""
    slow: bool = False
    """Gets a number of requests in proportion to its speed, and not in every round."""

    @property
    def pids(self) -> list[int]:
        return [process.pid for process in self.processes]


@dataclass(frozen=True, slots=True)
class Measurement:
    """One load on one subject in one round."""

    subject: str
    load: str
    round: int
    requests_per_s: float
    ttfb_p50_ms: float
    ttfb_p99_ms: float
    cpu_us_per_request: float
    """Of all processes of the subject, records included; 0 for the direct connection."""
    rss_bytes: int
    errors: int
    errors_by_kind: dict[str, int]
    completed: int


# ── subjects ────────────────────────────────────────────────────────────────────────────────────


def preheat_gateway(directory: Path, upstream: Stub) -> Subject:
    """preheat's own Envoy with its own configuration and records, before the stub's Unix socket."""
    from preheat.controlplane.gateway import RECORDS_FLUSH_MS
    from preheat.core.paths import Paths
    from preheat.dataplane.envoy.binary import environment, envoy_binary
    from preheat.dataplane.envoy.publish import Publisher, write_initial
    from preheat.dataplane.envoy.resources import bootstrap, resources
    from preheat.dataplane.envoy.routing import (
        Endpoint,
        Listener,
        ModelRoute,
        RoutingTable,
        VersionRoute,
    )

    paths = Paths(directory / "r", directory / "s", directory / "c")
    paths.create()
    write_initial(paths)
    config = directory / "bootstrap.json"
    config.write_text(json.dumps(bootstrap(paths, max_connections=9_900)))
    port = free_port()
    stub = Endpoint("bench@1", upstream.socket, upstream.socket, serving=True)
    version = VersionRoute("v1", 100, (stub,), max_connections=4096)
    table = RoutingTable(Listener("127.0.0.1", port), (ModelRoute("bench", (version,)),))
    argv = [str(envoy_binary()), "-c", str(config), "--use-dynamic-base-id"]
    argv += ["--reject-unknown-dynamic-fields", "--log-level", "warning"]
    argv += ["--concurrency", str(len(os.sched_getaffinity(0)))]
    argv += ["--file-flush-interval-msec", str(RECORDS_FLUSH_MS)]
    argv = [sys.executable, str(CONSUMER), str(paths.records_pipe), *argv]
    gateway = Process(argv, log=directory / RECORDS_LOG, env=environment())
    subject = Subject("preheat", port, (gateway,))
    try:
        asyncio.run(Publisher(paths).publish(resources(table, paths)))
        wait_until(lambda: answers(port, peers.PROBE), "Envoy", process=gateway, limit_s=30)
    except BaseException:
        _stop(subject)
        raise
    return subject


def _stop(subject: Subject) -> None:
    for process in subject.processes:
        process.stop()


@contextmanager
def running_subjects(
    directory: Path, stub: Stub, *, started: Sequence[Subject] = ()
) -> Iterator[list[Subject]]:
    """All subjects, started (unless they run already) and answering; stopped at the end."""
    with ExitStack() as stack:
        subjects = [Subject("direct", stub.port, ()), *started]

        def add(subject: Subject) -> None:
            stack.callback(_stop, subject)
            subjects.append(subject)

        add(preheat_gateway(directory, stub))
        process, port = peers.start_vllm_router(directory, stub.port)
        add(Subject("vllm-router", port, (process,)))
        yield subjects


@contextmanager
def running_litellm(directory: Path, stub: Stub) -> Iterator[list[Subject]]:
    """It takes many seconds to start, and what it differs by is far beyond what luck does."""
    key = f"sk-{secrets.token_hex(16)}"
    process, port = peers.start_litellm(directory, stub.port, key=key)
    subject = Subject("litellm", port, (process,), key=key, slow=True)
    try:
        yield [subject]
    finally:
        _stop(subject)


# ── loads ───────────────────────────────────────────────────────────────────────────────────────


def _unary(subject: Subject, _: Stub, duration_ms: int) -> Load:
    common: dict[str, int | str] = {"connections": UNARY_CONNECTIONS, "key": subject.key}
    if subject.slow:
        return run_load(str(subject.port), requests=SLOW_UNARY_REQUESTS, **common)
    warmup_ms = duration_ms // 5
    return run_load(str(subject.port), duration_ms=duration_ms, warmup_ms=warmup_ms, **common)


def _streams(subject: Subject, stub: Stub, duration_ms: int) -> Load:
    """200 streams open at all times. Their starts are spread over one stream's length: a stream
    then starts every 2 ms on average, at random."""
    common: dict[str, int | str] = {
        "stream": 1,
        "connections": STREAMS,
        "expect_events": stub.events,
        "stagger_ms": STREAM_LENGTH_MS,
        "timeout_ms": TIMEOUT_MS,
        "key": subject.key,
    }
    if subject.slow:
        return run_load(str(subject.port), requests=STREAMS, **common)
    warmup_ms = STREAM_LENGTH_MS + 50
    return run_load(str(subject.port), duration_ms=duration_ms, warmup_ms=warmup_ms, **common)


def _parallel(subject: Subject, _: Stub, __: int) -> Load:
    """1,000 new connections at once, a request on each."""
    return run_load(
        str(subject.port), connections=PARALLEL, requests=PARALLEL, timeout_ms=TIMEOUT_MS
    )


LOADS: dict[str, Callable[[Subject, Stub, int], Load]] = {
    "unary": _unary,
    "streams": _streams,
    "parallel": _parallel,
}


def measure(
    subject: Subject, load: str, stub: Stub, *, number: int, duration_ms: int
) -> Measurement:
    before_s, _ = usage(subject.pids)
    seen = LOADS[load](subject, stub, duration_ms)
    after_s = settled_cpu_s(subject.pids) if subject.processes else before_s
    for process in subject.processes:
        process.check()
    _, rss_bytes = usage(subject.pids)
    ttfb = seen["ttfb_us"]
    return Measurement(
        subject=subject.name,
        load=load,
        round=number,
        requests_per_s=seen["measured"] / seen["duration_s"] if seen["duration_s"] else 0.0,
        ttfb_p50_ms=ttfb["p50"] / 1e3 if ttfb else 0.0,
        ttfb_p99_ms=ttfb["p99"] / 1e3 if ttfb else 0.0,
        cpu_us_per_request=(after_s - before_s) * 1e6 / max(seen["completed"], 1),
        rss_bytes=rss_bytes,
        errors=seen["errors"],
        errors_by_kind=seen["errors_by_kind"],
        completed=seen["completed"],
    )


def run_rounds(
    subjects: Sequence[Subject], stub: Stub, *, numbers: range, rounds: int, duration_ms: int
) -> list[Measurement]:
    """All loads on all subjects, round by round; the order rotates, so none is always first."""
    measurements = []
    for number in numbers:
        shift = number % len(subjects)
        for load in LOADS:
            for subject in (*subjects[shift:], *subjects[:shift]):
                if subject.slow and (load == "parallel" or number % SLOW_EVERY_ROUNDS):
                    continue
                print(f"round {number + 1}/{rounds}: {load} on {subject.name}", file=sys.stderr)
                measurements.append(
                    measure(subject, load, stub, number=number, duration_ms=duration_ms)
                )
    return measurements


# ── results ─────────────────────────────────────────────────────────────────────────────────────


def check_records(directory: Path, measurements: Sequence[Measurement]) -> None:
    """Raises BenchError unless each of preheat's requests left a record: their cost must count."""
    received = int((directory / RECORDS_LOG).read_text().split()[-1])
    requests = sum(m.completed for m in measurements if m.subject == "preheat")
    if received < requests:
        raise BenchError(f"{requests} requests went through preheat, but left {received} records")


def _by_round(
    measurements: Sequence[Measurement], subject: str, load: str, what: str
) -> dict[int, float]:
    return {
        m.round: float(getattr(m, what))
        for m in measurements
        if m.subject == subject and m.load == load
    }


def _column(measurements: Sequence[Measurement], subject: str, load: str, what: str) -> list[float]:
    return list(_by_round(measurements, subject, load, what).values())


def ratios_of(measurements: Sequence[Measurement]) -> dict[str, float | Interval]:
    """The figures that are judged; those of a peer that did not run are left out."""

    def ratio(ours: str, theirs: str, load: str, what: str) -> Interval:
        a = _by_round(measurements, ours, load, what)
        b = _by_round(measurements, theirs, load, what)
        both = sorted(a.keys() & b.keys())
        return median_of_ratios([a[i] for i in both], [b[i] for i in both])

    peer = "vllm-router"
    ratios: dict[str, float | Interval] = {
        "p99_ttfb_unary_vs_vllm_router": ratio("preheat", peer, "unary", "ttfb_p99_ms"),
        "p99_ttfb_stream_vs_vllm_router": ratio("preheat", peer, "streams", "ttfb_p99_ms"),
        "cpu_per_request_vs_vllm_router": ratio("preheat", peer, "unary", "cpu_us_per_request"),
        "cpu_per_stream_vs_vllm_router": ratio("preheat", peer, "streams", "cpu_us_per_request"),
        "errors_parallel_1000": sum(_column(measurements, "preheat", "parallel", "errors")),
        "p99_ttfb_parallel_vs_vllm_router": ratio("preheat", peer, "parallel", "ttfb_p99_ms"),
    }
    if any(m.subject == "litellm" for m in measurements):
        ratios["litellm_cpu_over_preheat"] = ratio(
            "litellm", "preheat", "unary", "cpu_us_per_request"
        )
    return ratios


TITLES = {
    "unary": f"{UNARY_CONNECTIONS} unary connections",
    "streams": f"{STREAMS} streams of {STREAM_CHUNKS} chunks, one each {STREAM_INTERVAL_MS} ms",
    "parallel": f"{PARALLEL} requests at once, each on a new connection",
}
FIGURES = {
    "requests_per_s": "requests/s",
    "ttfb_p50_ms": "TTFB P50 ms",
    "ttfb_p99_ms": "TTFB P99 ms",
    "cpu_us_per_request": "CPU µs/request",
}


def _row(measurements: Sequence[Measurement], subject: str, load: str) -> list[str]:
    cells = [
        str(median_interval(_column(measurements, subject, load, figure))) for figure in FIGURES
    ]
    rss_mb = max(_column(measurements, subject, load, "rss_bytes")) / 1e6
    errors = sum(_column(measurements, subject, load, "errors"))
    return [subject, *cells, f"{rss_mb:.0f}", f"{errors:.0f}"]


def tables(measurements: Sequence[Measurement], ratios: Mapping[str, float | Interval]) -> str:
    columns = ("median [95 %]", *FIGURES.values(), "RSS MB", "errors")
    parts = []
    for load, title in TITLES.items():
        subjects = dict.fromkeys(m.subject for m in measurements if m.load == load)
        rows = [_row(measurements, subject, load) for subject in subjects]
        parts.append(format_table(title, columns, rows))
    summary = [(name, str(value)) for name, value in ratios.items()]
    parts.append(format_table("ratios (median over rounds)", ("name", "value [95 %]"), summary))
    return "\n".join(parts)


def main() -> None:
    parser = options("Compares preheat's gateway with its peers.")
    parser.add_argument("--rounds", type=int, help="rounds (default: 16; with --quick 2)")
    arguments = parser.parse_args()
    rounds = arguments.rounds or (2 if arguments.quick else 16)
    # Many short rounds: a machine's drift then falls on all subjects alike.
    duration_ms = 700 if arguments.quick else 1200
    # Its environment takes a minute to make: not for a quick look.
    litellm = not arguments.quick or peers.is_cached("litellm")
    with tempfile.TemporaryDirectory(prefix="preheat-bench-") as name:
        directory = Path(name)
        stub = start_stub(directory, chunks=STREAM_CHUNKS, interval_ms=STREAM_INTERVAL_MS)
        with stub.process, ExitStack() as stack:
            slow = stack.enter_context(running_litellm(directory, stub)) if litellm else []
            measurements = []
            for first in range(0, rounds, INSTANCE_ROUNDS):
                instance = directory / str(first)
                instance.mkdir()
                numbers = range(first, min(first + INSTANCE_ROUNDS, rounds))
                with running_subjects(instance, stub, started=slow) as subjects:
                    seen = run_rounds(
                        subjects, stub, numbers=numbers, rounds=rounds, duration_ms=duration_ms
                    )
                check_records(instance, seen)
                measurements += seen
    ratios = ratios_of(measurements)
    print(tables(measurements, ratios))
    write_result(arguments.json, ratios=ratios, runs=[asdict(m) for m in measurements])


if __name__ == "__main__":
    try:
        main()
    except BenchError as error:
        sys.exit(f"gateway: {error}")
