"""Stands for ``preheat serve``: leaves a cold-start record, then waits to be interrupted.

``--behave`` chooses what goes wrong; each start appends a line to ``--journal``.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
import time
from pathlib import Path

import msgspec

from preheat.core.coldstart import ColdStart, Phase
from preheat.core.traces.store import write_record


def main() -> int:
    launched_s = time.monotonic()
    # Blocked, not handled: an interrupt that comes early is still there to be waited for.
    inherited = signal.getsignal(signal.SIGINT)
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    parser = argparse.ArgumentParser()
    parser.add_argument("--behave", default="well")
    parser.add_argument("--journal", type=Path)
    parser.add_argument("--takes-s", default="1.0")
    parser.add_argument("--cached", type=float, default=1.0)
    parser.add_argument("target", nargs="?")
    parser.add_argument("--port", type=int, required=True)
    args = parser.parse_args()

    entry = {
        "pid": os.getpid(),
        "target": args.target,
        "port": args.port,
        "runtime": os.environ["PREHEAT_RUNTIME_DIR"],
        "state": os.environ["PREHEAT_STATE_DIR"],
        "cache": os.environ["PREHEAT_CACHE_DIR"],
    }
    with args.journal.open("a") as journal:
        journal.write(json.dumps(entry) + "\n")
    number = len(args.journal.read_text().splitlines())
    times_s = [float(text) for text in args.takes_s.split(",")]
    took_s = times_s[(number - 1) % len(times_s)]
    Path(entry["runtime"]).mkdir(parents=True)

    if args.behave == "exit":
        print("error: the model is broken")
        return 3
    if args.behave != "hang":
        leave_record(Path(entry["state"]), number, launched_s, took_s, args)
    if args.behave == "stay":
        time.sleep(600)
    if args.behave == "default-interrupt":
        if inherited is not signal.SIG_IGN:
            signal.signal(signal.SIGINT, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
        signal.pause()
    signal.sigwait({signal.SIGINT})
    return 9 if args.behave == "dirty" else 0


def leave_record(
    state: Path, number: int, launched_s: float, took_s: float, args: argparse.Namespace
) -> None:
    middle_s = launched_s + took_s * 0.75
    record = ColdStart(
        start_id=f"chat-v1-0@{number}",
        model="chat",
        version="v1",
        engine="fake",
        unix_time_s=time.time(),
        spawned_s=launched_s,
        ready_s=launched_s + took_s,
        first_token_s=launched_s + took_s,
        bytes_read=98_362_432,
        page_cache_share=args.cached,
        phases=(
            Phase(name="weights", start_s=launched_s, end_s=middle_s),
            Phase(name="engine", start_s=middle_s, end_s=launched_s + took_s),
        ),
    )
    if args.behave == "failed":
        record = msgspec.structs.replace(record, first_token_s=None, outcome="killed by signal 9")
    if args.behave == "tokenless":
        record = msgspec.structs.replace(record, first_token_s=None)
    write_record(record, state / "coldstarts")


if __name__ == "__main__":
    sys.exit(main())
