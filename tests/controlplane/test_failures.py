from __future__ import annotations

import pytest

from preheat.acceleration.weights.located import UnusableSourceError
from preheat.controlplane.failures import TABLE, Failure, Kind, kind_of, launch_failure
from preheat.core.errors import IntegrityError, PreheatError, SourceError, SpecError
from preheat.replica.lifecycle import TABLE as LIFE
from preheat.replica.lifecycle import State


def test_every_kind_has_its_consequence() -> None:
    assert set(TABLE) == set(Kind)


def test_every_event_that_fails_a_start_is_a_kind() -> None:
    failing = {e for row in LIFE.values() for e, state in row.items() if state is State.FAILED}
    assert {kind_of(event) for event in failing} == {Kind(str(event)) for event in failing}


@pytest.mark.parametrize(
    ("kind", "code"),
    [
        (Kind.WEIGHTS_BAD, 3),
        (Kind.SOURCE_MISSING, 3),
        (Kind.SOURCE_FAILED, 3),
        (Kind.PROOF_FAILED, 4),
        (Kind.ENGINE_EXITED, 4),
        (Kind.DEADLINE, 4),
        (Kind.AGENT_GONE, 4),
        (Kind.PRELOAD_EXPIRED, 4),
        (Kind.SPEC_WRONG, 2),
    ],
)
def test_the_exit_code_is_that_of_its_kind(kind: Kind, code: int) -> None:
    error = Failure(kind, "it broke", "mend it").error("chat")
    assert error.exit_code == code
    assert str(error) == "chat could not be brought up: it broke\n  → mend it"


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (SourceError("x"), Kind.SOURCE_FAILED),
        (IntegrityError("x"), Kind.SOURCE_MISSING),
        (UnusableSourceError("x"), Kind.SOURCE_MISSING),
        (SpecError("x"), Kind.SPEC_WRONG),
        (PreheatError("x"), Kind.LAUNCH_FAILED),
        (OSError(28, "full"), Kind.LAUNCH_FAILED),
    ],
)
def test_a_launch_fails_as_what_its_error_is(error: PreheatError | OSError, kind: Kind) -> None:
    assert launch_failure(error).kind is kind


def test_an_event_that_nobody_knows_is_a_broken_agent() -> None:
    assert kind_of("never heard of") is Kind.AGENT_BROKEN
