"""``preheat coldstart``: recorded starts as a list, a waterfall, or a trace for other tools; and
starts made to be measured.

Nothing heavy is imported until a subcommand runs. What does not belong here: arithmetic on records
(``core.coldstart``), drawing (``waterfall.py``), running starts (``coldstart_run.py``).
"""

from __future__ import annotations

import argparse
import shutil
import sys
from math import isfinite
from pathlib import Path
from typing import TYPE_CHECKING, Any

from preheat.core.errors import SpecError
from preheat.core.paths import default_paths

if TYPE_CHECKING:
    from collections.abc import Sequence

    from preheat.cli.waterfall import Line
    from preheat.core.coldstart import ColdStart
    from preheat.core.traces.store import StoredRecord

LATEST = "latest"
PIPE_COLUMNS = 100
"""Width of pictures that go to no terminal, unless COLUMNS says otherwise."""

SERVE = (sys.executable, "-m", "preheat", "serve")
"""What `coldstart run` starts; TARGET and the port follow."""

START_TIMEOUT_S = 300.0

ID_HELP = "id (or beginning of an id) from the list, REPLICA@NUMBER, or latest (the default)"


def register(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Adds ``coldstart`` and its own subcommands."""
    parser = subparsers.add_parser(
        "coldstart",
        help="show where the time of a start went",
        description="Show where the time of a start went, or measure starts against an SLA.",
    )
    actions = parser.add_subparsers(metavar="ACTION", dest="action", required=True)

    listing = actions.add_parser("list", help="list the recorded starts, newest first")
    listing.add_argument("--json", action="store_true", help="print JSON")
    listing.set_defaults(func=list_starts)

    show = actions.add_parser("show", help="draw one start as a waterfall")
    show.add_argument("id", metavar="ID", nargs="?", default=LATEST, help=ID_HELP)
    show.add_argument("--json", action="store_true", help="print JSON")
    show.set_defaults(func=show_start)

    export = actions.add_parser("export", help="hand one start to other tools")
    export.add_argument("id", metavar="ID", nargs="?", default=LATEST, help=ID_HELP)
    export.add_argument(
        "--chrome",
        type=Path,
        metavar="FILE",
        help="write a trace file for ui.perfetto.dev or chrome://tracing",
    )
    export.add_argument(
        "--otlp",
        nargs="?",
        const="",
        metavar="ENDPOINT",
        help="send OpenTelemetry spans over OTLP/HTTP, e.g. to http://localhost:4318; without "
        "ENDPOINT to what OTEL_EXPORTER_OTLP_ENDPOINT says",
    )
    export.set_defaults(func=export_start)
    _register_run(actions)


def _register_run(actions: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    run = actions.add_parser(
        "run",
        help="start a model many times and hold the times against an SLA",
        description="Start `preheat serve TARGET` again and again, each time with directories of "
        "its own and a free port, and report the times from spawn to first token. One start, "
        "which may fetch the model, comes first and is not counted.",
        epilog="exit codes: 0 the SLA is met (or none was given), 1 P95 misses it, 4 a start "
        "failed",
    )
    run.add_argument(
        "target", metavar="TARGET", nargs="?", help="as for `preheat serve`: .gguf, directory, spec"
    )
    run.add_argument("--starts", type=_count, default=20, metavar="N", help="default: 20")
    cache = run.add_mutually_exclusive_group(required=True)
    cache.add_argument(
        "--cold",
        action="store_true",
        help="drop the weights (and only these, not the programs) from the page cache before each "
        "start",
    )
    cache.add_argument("--warm", action="store_true", help="leave the page cache as it is")
    run.add_argument(
        "--sla", type=parse_duration_s, metavar="TIME", help="what P95 may be: 1.2s, 1200ms or 1.2"
    )
    run.add_argument(
        "--timeout",
        type=parse_duration_s,
        default=START_TIMEOUT_S,
        metavar="TIME",
        help=f"a start that takes longer has failed; default: {START_TIMEOUT_S:.0f}s",
    )
    run.add_argument("--json", type=Path, metavar="FILE", help="also write all results to FILE")
    run.set_defaults(func=run_starts, serve_argv=SERVE)


def parse_duration_s(text: str) -> float:
    """``1.2s``, ``1200ms`` or ``1.2`` in seconds. Raises ArgumentTypeError."""
    number, factor = text.strip(), 1.0
    if number.endswith("ms"):
        number, factor = number[:-2], 1e-3
    elif number.endswith("s"):
        number = number[:-1]
    try:
        value_s = float(number) * factor
    except ValueError:
        value_s = 0.0
    if not isfinite(value_s) or value_s <= 0:
        raise argparse.ArgumentTypeError(f"{text!r} is no time such as 1.2s, 1200ms or 1.2")
    return value_s


def _count(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is no number of starts")
    return int(text)


# --- list, show, export ---------------------------------------------------------------------------


def list_starts(args: argparse.Namespace) -> int:
    stored = _recorded()
    if args.json:
        _print_json([_summary(one) for one in stored])
    elif not stored:
        print(f"no start is recorded yet in {default_paths().coldstarts}")
    else:
        from preheat.cli.coldstart_report import list_lines

        print("\n".join(list_lines(stored)))
    return 0


def show_start(args: argparse.Namespace) -> int:
    from preheat.cli.waterfall import ASCII, UNICODE, waterfall
    from preheat.core.baseline import slower_than_baseline

    stored = _recorded()
    chosen = find_record(stored, args.id)
    note = slower_than_baseline(chosen.record, [one.record for one in stored])
    if args.json:
        _print_json({**_summary(chosen), "slower_than_baseline": note, "record": chosen.record})
        return 0
    encoding = (sys.stdout.encoding or "").lower().replace("-", "")
    glyphs = UNICODE if encoding == "utf8" else ASCII
    width = shutil.get_terminal_size((PIPE_COLUMNS, 24)).columns
    _print_lines(waterfall(chosen.record, width, glyphs=glyphs, note=note), width)
    return 0


def export_start(args: argparse.Namespace) -> int:
    if args.chrome is None and args.otlp is None:
        raise SpecError(
            "nothing says where to export the start to", advice="give --chrome FILE or --otlp"
        )
    chosen = find_record(_recorded(), args.id)
    if args.chrome is not None:
        from preheat.core.traces.chrome import write_chrome_trace

        try:
            write_chrome_trace(chosen.record, args.chrome)
        except OSError as error:
            raise SpecError(f"{args.chrome} cannot be written: {error.strerror}") from error
        print(f"{chosen.id}: written to {args.chrome} (open it at https://ui.perfetto.dev)")
    if args.otlp is not None:
        from preheat.core.traces.otel import export_otlp

        count = export_otlp(chosen.record, args.otlp or None)
        print(f"{chosen.id}: {count} OpenTelemetry spans sent")
    return 0


def run_starts(args: argparse.Namespace) -> int:
    from preheat.cli.coldstart_run import Run, run_and_report

    return run_and_report(
        Run(
            target=args.target,
            starts=args.starts,
            cold=args.cold,
            timeout_s=args.timeout,
            serve=tuple(args.serve_argv),
        ),
        sla_s=args.sla,
        json_file=args.json,
    )


def find_record(stored: Sequence[StoredRecord], wanted: str) -> StoredRecord:
    """The newest record that ``wanted`` names: ``latest``, an id or its beginning, or a start id.
    Raises SpecError."""
    if not stored:
        raise SpecError(
            f"no start is recorded yet in {default_paths().coldstarts}",
            advice="`preheat serve` records each start once it is ready",
        )
    for one in stored:
        if wanted in (LATEST, one.id, one.record.start_id):
            return one
    beginning = [one for one in stored if wanted and one.id.startswith(wanted)]
    if len(beginning) == 1:
        return beginning[0]
    raise SpecError(
        f"{len(beginning)} recorded starts begin with {wanted!r}"
        if beginning
        else f"there is no recorded start {wanted!r}",
        advice="`preheat coldstart list` shows them",
    )


def _recorded() -> list[StoredRecord]:
    from preheat.core.traces.store import read_records

    stored, warnings = read_records(default_paths().coldstarts)
    for warning in warnings:
        print(f"preheat: {warning}", file=sys.stderr)
    return stored


def _summary(stored: StoredRecord) -> dict[str, Any]:
    from preheat.core.coldstart import coverage, problems

    record = stored.record
    return {
        "id": stored.id,
        "start_id": record.start_id,
        "model": record.model,
        "version": record.version,
        "engine": record.engine,
        "outcome": record.outcome,
        "unix_time_s": record.unix_time_s,
        "time_to_ready_s": None if record.ready_s is None else record.ready_s - record.spawned_s,
        "time_to_first_token_s": record.time_to_first_token_s,
        "bytes_read": record.bytes_read,
        "page_cache_share": record.page_cache_share,
        "coverage": coverage(record),
        "problems": problems(record),
        "dominating": _dominating_summary(record),
    }


def _dominating_summary(record: ColdStart) -> dict[str, Any] | None:
    from preheat.core.coldstart import heaviest

    worst = heaviest(record)
    if worst is None:
        return None
    return {"name": worst[0].name, "self_s": worst[1], "duration_s": worst[0].duration_s}


def _print_json(value: object) -> None:
    import msgspec

    print(msgspec.json.format(msgspec.json.encode(value), indent=2).decode())


def _print_lines(lines: Sequence[Line], width: int) -> None:
    from rich.console import Console
    from rich.text import Text

    console = Console(width=width, highlight=False)
    for line in lines:
        text = Text.assemble(*line)
        text.rstrip()
        console.print(text, no_wrap=True, overflow="crop", crop=True)
