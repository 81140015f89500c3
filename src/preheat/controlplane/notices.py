"""What preheat says while it runs: lines for people on standard output, or JSON on request, and
always JSON lines in the log file, rotated. No secret and no text of a prompt ever passes here.

What does not belong here: when to say what.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import sys
import time
from pathlib import Path
from typing import Any, TextIO

from preheat.core.errors import PreheatError

FILE_MAX_BYTES = 8 << 20
FILES_KEPT = 3
_CLEAR_LINE = "\r\x1b[2K"


class Notices:
    def __init__(self, directory: Path, *, as_json: bool) -> None:
        self._path = directory / "preheat.jsonl"
        self._as_json = as_json
        self._progress_shown = False
        self.lost = 0
        """Lines that the log file would not take: a full disk must not end serving."""

    def say(self, text: str, *, event: str, **details: Any) -> None:
        """One notice: ``text`` for people, ``event`` and ``details`` for programs."""
        line = _encoded(text, event, details)
        self._append(line)
        self._end_progress()
        self._print(line if self._as_json else text)

    def fail(self, error: PreheatError) -> None:
        """The last notice: why preheat ends. People read it on standard error."""
        line = _encoded(error.what, "failed", _failure(error))
        self._append(line)
        self._end_progress()
        say_failure(error, as_json=self._as_json, line=line)

    def progress(self, text: str) -> None:
        """A line that the next one replaces, on a terminal only."""
        if self._as_json or not _is_terminal(sys.stdout):
            return
        width = shutil.get_terminal_size().columns - 1
        self._print(_CLEAR_LINE + text[:width], end="")
        self._progress_shown = True

    def _end_progress(self) -> None:
        if self._progress_shown:
            self._print(_CLEAR_LINE, end="")
            self._progress_shown = False

    @staticmethod
    def _print(text: str, end: str = "\n") -> None:
        try:
            print(text, end=end, flush=True)
        except (OSError, ValueError):
            # Whoever read our output has left; serving goes on, the file has it all.
            sys.stdout = open(os.devnull, "w")  # noqa: SIM115, PTH123 — for good

    def _append(self, line: str) -> None:
        try:
            if self._path.exists() and self._path.stat().st_size > FILE_MAX_BYTES:
                rotate(self._path)
            with open(self._path, "a", opener=_private) as file:
                file.write(line + "\n")
        except OSError:
            self.lost += 1


def say_failure(error: PreheatError, *, as_json: bool, line: str = "") -> None:
    """Prints why preheat ends: to people on standard error, else as a JSON line on standard
    output."""
    with contextlib.suppress(OSError, ValueError):
        if as_json:
            print(line or _encoded(error.what, "failed", _failure(error)), flush=True)
        else:
            print(f"preheat: {error}", file=sys.stderr, flush=True)


def _failure(error: PreheatError) -> dict[str, Any]:
    return {"advice": error.advice, "exit_code": error.exit_code}


def _encoded(text: str, event: str, details: dict[str, Any]) -> str:
    moment = {"unix_time_s": round(time.time(), 3), "event": event, "text": text.strip()}
    return json.dumps({**moment, **details}, default=str)


def _is_terminal(stream: TextIO | None) -> bool:
    try:
        return stream is not None and stream.isatty()
    except ValueError:
        return False


def _private(path: str, flags: int) -> int:
    return os.open(path, flags, 0o600)


def rotate(path: Path) -> None:
    """Shifts ``path`` to ``path.1``, and so on; the oldest goes."""
    for number in range(FILES_KEPT - 1, 0, -1):
        older = path.with_name(f"{path.name}.{number}")
        if older.exists():
            older.replace(path.with_name(f"{path.name}.{number + 1}"))
    path.replace(path.with_name(f"{path.name}.1"))


def trim_in_place(path: Path) -> None:
    """Keeps a log that another process appends to under the limit, without that process knowing.

    The end goes to ``path.1``; what is written while it is copied may be lost. Raises OSError.
    """
    try:
        if path.stat().st_size <= FILE_MAX_BYTES:
            return
    except FileNotFoundError:
        return
    kept = path.with_name(f"{path.name}.1")
    with path.open("r+b") as file, open(kept, "wb", opener=_private) as copy:
        file.seek(-FILE_MAX_BYTES, os.SEEK_END)
        shutil.copyfileobj(file, copy)
        # It was opened for appending there, so that its next line goes to the new end.
        file.truncate(0)


def bar(done: int, total: int | None, width: int = 24) -> str:
    """A progress bar; empty when the total is not known."""
    if not total:
        return ""
    filled = min(width, done * width // total)
    return "█" * filled + "░" * (width - filled)
