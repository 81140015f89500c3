"""A running preheat that read-only tests share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from tests.system.served import Served


@pytest.fixture(scope="session")
def preheat() -> Iterator[Served]:
    """The default model, ready. Tests that use it leave it as it was."""
    with Served() as running:
        yield running
