from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
from tests.controlplane.rooms import House, play_in


@pytest.fixture
def play(short_dir: Path) -> Callable[..., House]:
    """``play(scenario, **options)``, as ``play_in``."""
    return partial(play_in, short_dir)
