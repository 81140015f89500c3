"""``preheat status``: what runs, how hot it is, what is missing.

What does not belong here: finding any of it out (the control plane's).
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NoReturn

from preheat.cli.client import ask

if TYPE_CHECKING:
    from rich.console import Console

WATCH_S = 0.5
PIPE_COLUMNS = 400

EXAMPLES = """\
examples:
  preheat status           a table
  preheat status --watch   the table, as it changes (Ctrl-C ends it)
  preheat status --json    for programs; `.ready` is what /ready says

exit code: 0 ready, 1 not ready, 6 nothing runs
"""


def register(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = subparsers.add_parser(
        "status",
        help="say what runs, how hot it is and what is missing",
        description="Says what runs, how hot it is and what is missing.",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument("--watch", action="store_true", help="show it again as it changes")
    parser.set_defaults(func=run)


def run(args: argparse.Namespace) -> int:
    status = ask("GET", "/status")
    if args.watch:
        _watch(status, as_json=args.json)
    if args.json:
        print(json.dumps(status, indent=2))
    else:
        _console().print(table(status))
    return 0 if status["ready"] else 1


def _watch(status: dict[str, Any], *, as_json: bool) -> NoReturn:
    """Until it is interrupted, or nothing runs any more (raises NotRunning)."""
    if as_json:
        _each_change(status, lambda changed: print(json.dumps(changed), flush=True))
    from rich.live import Live

    console = _console()
    if not console.is_terminal:
        _each_change(status, lambda changed: console.print(table(changed)))
    with Live(table(status), console=console, auto_refresh=False) as live:
        _each_change(status, lambda changed: live.update(table(changed), refresh=True))


def _each_change(status: dict[str, Any], show: Callable[[dict[str, Any]], object]) -> NoReturn:
    shown = None
    while True:
        if status != shown:
            show(status)
            shown = status
        time.sleep(WATCH_S)
        status = ask("GET", "/status")


def _console() -> Console:
    from rich.console import Console

    console = Console(highlight=False)
    # Where nobody looks at a screen, names are not cut to fit one.
    return console if console.is_terminal else Console(highlight=False, width=PIPE_COLUMNS)


def table(status: dict[str, Any]) -> Any:
    """The status as a table with a line above and, where something is missing, lines below."""
    from rich.console import Group
    from rich.table import Table
    from rich.text import Text

    rows = Table(box=None, pad_edge=False, header_style="bold")
    for column in ("MODEL", "VERSION", "REPLICA", "STATE", "SHARE", "COLD START", "FAILURES"):
        right = column in ("SHARE", "COLD START", "FAILURES")
        rows.add_column(column, justify="right" if right else "left", overflow="fold")
    for model in status["models"]:
        for replica in model["replicas"]:
            took = replica["last_cold_start_s"]
            rows.add_row(
                Text(model["name"]),
                Text(replica["version"]),
                Text(replica["start_id"] or replica["name"]),
                Text(replica["state"], style="green" if replica["state"] == "ready" else "yellow"),
                f"{replica['traffic_share']} %",
                f"{took:.2f} s" if took is not None else "–",
                str(replica["failures"]),
            )
    head = Text(
        "ready" if status["ready"] else "not ready",
        style="bold green" if status["ready"] else "bold yellow",
    )
    head.append(f"  {status['url']}", style="not bold default")
    lines = [Text(f"missing: {text}") for text in status["missing"]]
    reasons = [
        Text(f"last failure of {r['name']}: {r['last_reason']}")
        for m in status["models"]
        for r in m["replicas"]
        if r["last_reason"]
    ]
    return Group(head, rows, *lines, *reasons)
