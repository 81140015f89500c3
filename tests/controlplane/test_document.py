from __future__ import annotations

from preheat.controlplane import failures
from preheat.controlplane.document import outputs, page


def test_the_committed_page_is_true() -> None:
    for path, text in outputs().items():
        assert path.read_text(encoding="utf-8") == text, (
            "run python -m preheat.controlplane.document"
        )


def test_every_failure_has_its_row() -> None:
    assert all(f"| {kind} |" in page() for kind in failures.Kind)
