from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from preheat.core.errors import SpecError
from preheat.core.spec.load import parse

# A sound spec around the lines that a test is about; what is added begins in line 5.
HEAD = """\
models:
  - name: m
    versions:
      - source: {uri: /m.gguf}
"""


@pytest.fixture
def refused() -> Callable[[str], str]:
    """What the user is told about a text that is not a sound spec."""

    def message(text: str) -> str:
        with pytest.raises(SpecError) as caught:
            parse(text, file="s.yaml", base=Path("/base"))
        return str(caught.value)

    return message


@pytest.fixture
def refused_after_head(refused: Callable[[str], str]) -> Callable[[str], str]:
    """The same for lines that stand after a sound version."""
    return lambda lines: refused(HEAD + lines)
