"""``preheat doctor``: checks the machine and prints what was found and what to change.

What does not belong here: reading the machine (``machine.py``) and judging it (``checks.py``).
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

import msgspec

from preheat.cli.checks import Finding, diagnose
from preheat.cli.machine import take_snapshot

COLOURS = {"ok": "green", "note": "cyan", "warn": "yellow", "fail": "bold red"}


def register(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = subparsers.add_parser(
        "doctor",
        help="check this machine and say what to change",
        description="Check this machine and say what to change. Changes nothing. "
        "Exit code 1 when preheat cannot serve here.",
    )
    parser.add_argument("--json", action="store_true", help="print the findings as JSON")
    parser.set_defaults(func=run)


def run(args: argparse.Namespace) -> int:
    findings = diagnose(take_snapshot())
    if args.json:
        sys.stdout.write(as_json(findings))
    elif sys.stdout.isatty():
        print_table(findings)
    else:
        sys.stdout.write(as_text(findings))
    return exit_code(findings)


def exit_code(findings: Sequence[Finding]) -> int:
    return int(any(finding.level == "fail" for finding in findings))


def as_json(findings: Sequence[Finding]) -> str:
    """``{"ok": bool, "findings": [{"name", "level", "value", "advice"}, …]}``, indented."""
    document = {"ok": exit_code(findings) == 0, "findings": list(findings)}
    return msgspec.json.format(msgspec.json.encode(document), indent=2).decode() + "\n"


def as_text(findings: Sequence[Finding]) -> str:
    """One line for each finding and one for each advice, for pipes and logs."""
    width = max((len(finding.name) for finding in findings), default=0)
    lines = []
    for finding in findings:
        lines.append(f"{finding.level:4}  {finding.name:{width}}  {finding.value}\n")
        if finding.advice:
            lines.append(f"{'':4}  {'':{width}}  → {finding.advice}\n")
    return "".join(lines)


def print_table(findings: Sequence[Finding]) -> None:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, pad_edge=False, header_style="dim")
    for heading in ("", "what", "found", "advice"):
        table.add_column(heading, overflow="fold")
    for finding in findings:
        # Text, not markup: values come from the machine and may hold brackets.
        table.add_row(
            Text(finding.level, style=COLOURS[finding.level]),
            Text(finding.name),
            Text(finding.value),
            Text(finding.advice),
        )
    Console().print(table)
