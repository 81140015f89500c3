"""A cold start as a Chrome trace-event file, which Perfetto (ui.perfetto.dev) opens as well.

Format: "Trace Event Format", the JSON object form with ``X`` (complete), ``i`` (instant) and ``M``
(metadata) events. Times are microseconds from the earliest moment of the record.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec

from preheat.core.coldstart import MAIN, coverage

if TYPE_CHECKING:
    from pathlib import Path

    from preheat.core.coldstart import ColdStart, Phase

PROCESS_ID = 1


def write_chrome_trace(record: ColdStart, path: Path) -> None:
    """Writes the trace to a file (or device) of the user's. Raises OSError."""
    path.write_bytes(msgspec.json.encode(chrome_trace(record)))


def chrome_trace(record: ColdStart) -> dict[str, Any]:
    """The JSON object: one thread for each track, one complete event for each phase."""
    origin_s = min([record.spawned_s, *(phase.start_s for phase in record.phases)])
    threads = {track: number for number, track in enumerate(_tracks(record), start=1)}
    events = _metadata(record, threads)
    events += [_complete(phase, threads[phase.track], origin_s) for phase in record.phases]
    events += _instants(record, threads[MAIN], origin_s)
    return {
        "traceEvents": events,
        "displayTimeUnit": "ms",
        "otherData": {
            "start_id": record.start_id,
            "model": record.model,
            "version": record.version,
            "engine": record.engine,
            "outcome": record.outcome,
            "unix_time_s": record.unix_time_s,
            "bytes_read": record.bytes_read,
            "page_cache_share": record.page_cache_share,
            "coverage": coverage(record),
        },
    }


def _tracks(record: ColdStart) -> list[str]:
    return list(dict.fromkeys([MAIN, *(phase.track for phase in record.phases)]))


def _metadata(record: ColdStart, threads: dict[str, int]) -> list[dict[str, Any]]:
    def event(kind: str, thread: int, arguments: dict[str, Any]) -> dict[str, Any]:
        return {"ph": "M", "name": kind, "pid": PROCESS_ID, "tid": thread, "args": arguments}

    events = [event("process_name", threads[MAIN], {"name": f"cold start {record.start_id}"})]
    for track, thread in threads.items():
        events.append(event("thread_name", thread, {"name": track}))
        events.append(event("thread_sort_index", thread, {"sort_index": thread}))
    return events


def _complete(phase: Phase, thread: int, origin_s: float) -> dict[str, Any]:
    # Start and end are rounded to whole nanoseconds each, so that what nests still nests.
    start_ns = round((phase.start_s - origin_s) * 1e9)
    end_ns = round((phase.end_s - origin_s) * 1e9)
    return {
        "ph": "X",
        "name": phase.name,
        "cat": phase.name.partition(".")[0],
        "pid": PROCESS_ID,
        "tid": thread,
        "ts": start_ns / 1e3,
        "dur": (end_ns - start_ns) / 1e3,
        "args": phase.attributes,
    }


def _instants(record: ColdStart, thread: int, origin_s: float) -> list[dict[str, Any]]:
    moments = (("ready", record.ready_s), ("first token", record.first_token_s))
    return [
        {
            "ph": "i",
            "s": "p",
            "name": name,
            "pid": PROCESS_ID,
            "tid": thread,
            "ts": round((at_s - origin_s) * 1e9) / 1e3,
        }
        for name, at_s in moments
        if at_s is not None
    ]
