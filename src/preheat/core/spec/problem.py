"""What is wrong with a spec, as values, and the one error that reports them all.

What does not belong here: finding problems (``tree.py``, ``typed.py``, ``check.py``).
"""

from __future__ import annotations

from collections.abc import Sequence

from msgspec import Struct

from preheat.core.errors import SpecError

# More would scroll the first ones, which often cause the rest, out of sight.
SHOWN_MAX = 20

FieldPath = tuple[str | int, ...]
"""Steps from the root of a spec: ``("models", 0, "name")``."""


class Mark(Struct, frozen=True):
    """A place in a file; lines and columns count from 1."""

    line: int
    column: int


class Problem(Struct, frozen=True, kw_only=True):
    """One thing that is wrong: where in the spec, what, and what to do about it."""

    what: str
    path: FieldPath = ()
    advice: str = ""
    mark: Mark | None = None
    """Where in the file; None if only ``path`` is known."""


def path_text(path: FieldPath) -> str:
    """``("models", 0, "name")`` as ``models[0].name``."""
    steps = (f"[{step}]" if isinstance(step, int) else f".{step}" for step in path)
    return "".join(steps).removeprefix(".")


def nearest(word: str, valid: Sequence[str]) -> str | None:
    """The valid name that was probably meant, or None if none comes close."""
    from difflib import get_close_matches  # only on the way to an error

    by_plain = {_plain(name): name for name in valid}
    found = get_close_matches(_plain(word), by_plain, n=1, cutoff=0.6)
    return by_plain[found[0]] if found else None


def quoted(text: str, *, limit: int = 60) -> str:
    """Text for a message: in quotes, on one line, shortened."""
    shown = text if len(text) <= limit else text[: limit - 1] + "…"
    escaped = "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in shown)
    return f'"{escaped}"'


def spec_error(file: str, problems: Sequence[Problem]) -> SpecError:
    """One error that names every problem, one line each, in the order of the file."""
    ordered = sorted(problems, key=lambda p: (p.mark.line, p.mark.column) if p.mark else (0, 0))
    if len(ordered) == 1:
        return SpecError(_line(file, ordered[0]), advice=ordered[0].advice)
    lines = [
        _line(file, problem) + (f"; {problem.advice}" if problem.advice else "")
        for problem in ordered[:SHOWN_MAX]
    ]
    if len(ordered) > SHOWN_MAX:
        lines.append(f"and {len(ordered) - SHOWN_MAX} more")
    return SpecError(f"{len(ordered)} problems in {file}:\n  " + "\n  ".join(lines))


def _line(file: str, problem: Problem) -> str:
    place = f"{file}:{problem.mark.line}:{problem.mark.column}" if problem.mark else file
    path = path_text(problem.path)
    return f"{place}: {path}: {problem.what}" if path else f"{place}: {problem.what}"


def _plain(name: str) -> str:
    return name.lower().replace("-", "_")
