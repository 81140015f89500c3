"""The reference page of a replica's life, made from the transition table and the text in its enums.

``python -m preheat.replica.document`` writes it; with ``--check`` it only says, by its exit code,
whether it is true. A tool for development: nothing that serves imports it. Other planes document
their tables with ``section`` and ``main``, in pages of their own.
What does not belong here: what a state means (``lifecycle.py``).
"""

from __future__ import annotations

import argparse
import ast
import inspect
import sys
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from preheat.replica import lifecycle

if TYPE_CHECKING:
    from collections.abc import Mapping

S = TypeVar("S", bound=StrEnum)
E = TypeVar("E", bound=StrEnum)

REFERENCE = Path(__file__).parents[3] / "docs" / "reference"

PREFACE = """\
# The life of a replica

<!-- Written by `python -m preheat.replica.document`; edit src/preheat/replica/lifecycle.py. -->

Each start of a replica runs through these states once; what failed or stopped is followed by
another start with its own number. `/status` of the agent, `preheat status` and the event log use
the names below.
"""


def section(title: str, table: Mapping[S, Mapping[E, S]], initial: S) -> str:
    """Diagram and tables of one transition table, as Markdown. Every state has a row in it."""
    states, events = type(initial), type(next(event for row in table.values() for event in row))
    lines = [
        f"## {title}",
        "",
        "```mermaid",
        mermaid(table, initial).rstrip(),
        "```",
        "",
        "| state | what it means | events that it takes |",
        "|---|---|---|",
    ]
    lines += [
        f"| `{state}` | {_docs(states)[state.name]} | {_outcomes(row)} |"
        for state, row in table.items()
    ]
    lines += ["", "| event | what it means |", "|---|---|"]
    lines += [f"| {event} | {_docs(events)[event.name]} |" for event in events]
    return "\n".join(lines) + "\n"


def mermaid(table: Mapping[S, Mapping[E, S]], initial: S) -> str:
    """The table as a Mermaid state diagram."""
    lines = ["stateDiagram-v2", f"    [*] --> {initial}"]
    for state, row in table.items():
        by_target: dict[S, list[str]] = {}
        for event, target in row.items():
            by_target.setdefault(target, []).append(event)
        lines += [
            f"    {state} --> {target}: {', '.join(events)}" for target, events in by_target.items()
        ]
        if not row:
            lines.append(f"    {state} --> [*]")
    return "\n".join(lines) + "\n"


def _outcomes(row: Mapping[E, S]) -> str:
    return "; ".join(f"{event} → `{target}`" for event, target in row.items()) or "none, it is over"


def _docs(enum: type[StrEnum]) -> dict[str, str]:
    """The text after each member. Raises KeyError at the caller for one that has none."""
    (node,) = ast.parse(inspect.getsource(enum)).body
    assert isinstance(node, ast.ClassDef)
    found = {}
    for member, after in zip(node.body, node.body[1:], strict=False):
        match member, after:
            case (
                ast.Assign(targets=[ast.Name(id=name)]),
                ast.Expr(value=ast.Constant(value=str(text))),
            ):
                found[name] = " ".join(text.split()).replace("``", "`")
    return found


def outputs() -> dict[Path, str]:
    """What is committed: each file and its true content."""
    life = section("States and events", lifecycle.TABLE, lifecycle.INITIAL)
    return {REFERENCE / "lifecycle.md": f"{PREFACE}\n{life}"}


def main(
    texts: Mapping[Path, str], arguments: list[str] | None = None, *, module: str = __spec__.name
) -> int:
    """Writes what is missing or stale among ``texts``; with ``--check`` only names it, exit 1."""
    parser = argparse.ArgumentParser(description="Write a reference page from its tables.")
    parser.add_argument("--check", action="store_true", help="write nothing; exit 1 if stale")
    check = parser.parse_args(arguments).check
    stale = [path for path, text in texts.items() if _content(path) != text]
    for path in stale:
        if check:
            print(f"{path} is not what the tables say; run python -m {module}")
        else:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(texts[path], encoding="utf-8")
            print(f"wrote {path}")
    return 1 if check and stale else 0


def _content(path: Path) -> str | None:
    return path.read_text(encoding="utf-8") if path.exists() else None


if __name__ == "__main__":
    sys.exit(main(outputs()))
