"""Values that pass between finding a model file and loading it.

What does not belong here: anything that does something.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Literal

from msgspec import Struct

from preheat.core.errors import SourceError

if TYPE_CHECKING:
    from collections.abc import Callable

Phase = Literal["waiting", "downloading", "extracting"]


class Located(Struct, frozen=True):
    """A model file that is there, not verified yet."""

    path: Path
    size_bytes: int
    sha256: str | None
    """What it must hash to, hex; None if the source does not say."""
    origin: str
    """Where it came from, for messages."""


class Progress(Struct, frozen=True):
    """How far a fetch has come."""

    phase: Phase
    """``waiting``: another process is fetching the same file, and these are its bytes."""
    done_bytes: int
    total_bytes: int | None
    """None if not known. While downloading it is pip's own figure, rounded to about 1 %."""


if TYPE_CHECKING:
    Report = Callable[[Progress], None]
    """Gets a Progress several times a second. What it raises ends the fetch, cleaned up."""


class UnusableSourceError(SourceError):
    """A source that will not work until somebody changes something."""

    retryable = False
