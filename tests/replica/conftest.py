from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.replica.starts import Start


@pytest.fixture
def prepare(short_dir: Path) -> Iterator[Callable[..., Start]]:
    """Makes starts that are not launched yet; each gets the next number."""
    made: list[Start] = []

    def prepared(**fields: Any) -> Start:
        made.append(Start(short_dir, number=len(made) + 1, **fields))
        return made[-1]

    yield prepared
    for start in made:
        start.close()


@pytest.fixture
def launch(prepare: Callable[..., Start]) -> Callable[..., Start]:
    """Makes and launches starts: ``launch(die_at="start")``; plan fields as ``plan={…}``."""

    def launched(plan: dict[str, Any] | None = None, **behaviour: Any) -> Start:
        return prepare(behaviour=behaviour, **(plan or {})).launch()

    return launched
