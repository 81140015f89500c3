"""Why a start failed or could not begin, as a table: what error it is and whether to try again.

Pure. What does not belong here: counting attempts (``fleet.py``), saying it (``notices.py``).
"""

from __future__ import annotations

from enum import StrEnum

from msgspec import Struct

from preheat.core.errors import (
    EngineError,
    EngineExited,
    IntegrityError,
    PreheatError,
    ProofError,
    SourceError,
    SpecError,
)
from preheat.replica.lifecycle import Event


class Kind(StrEnum):
    """The first ones are an agent's last events, the others happen around it."""

    WEIGHTS_BAD = str(Event.WEIGHTS_BAD)
    PROOF_FAILED = str(Event.PROOF_FAILED)
    ENGINE_EXITED = str(Event.ENGINE_EXITED)
    DEADLINE = str(Event.DEADLINE)
    AGENT_BROKEN = str(Event.AGENT_BROKEN)
    AGENT_GONE = "agent gone"
    """Its process ended without a word."""
    SPEC_WRONG = "spec wrong"
    """The spec names something that is not there to be had."""
    SOURCE_MISSING = "source missing"
    """The weights cannot be had, and will not be as long as nobody changes something."""
    SOURCE_FAILED = "source failed"
    """The weights could not be had this time."""
    LAUNCH_FAILED = "launch failed"
    """The agent could not be started."""
    PRELOAD_EXPIRED = "preload expired"
    """The gate did not open before the preload's deadline."""


class Consequence(Struct, frozen=True):
    error: type[PreheatError]
    """Its exit code is preheat's when nothing can be brought up."""
    hopeless: bool
    """Whether another attempt, unchanged, must fail too."""


TABLE: dict[Kind, Consequence] = {
    Kind.WEIGHTS_BAD: Consequence(IntegrityError, hopeless=True),
    Kind.PROOF_FAILED: Consequence(ProofError, hopeless=True),
    Kind.ENGINE_EXITED: Consequence(EngineExited, hopeless=False),
    Kind.DEADLINE: Consequence(EngineError, hopeless=False),
    Kind.AGENT_BROKEN: Consequence(EngineError, hopeless=False),
    Kind.AGENT_GONE: Consequence(EngineError, hopeless=False),
    Kind.SPEC_WRONG: Consequence(SpecError, hopeless=True),
    Kind.SOURCE_MISSING: Consequence(SourceError, hopeless=True),
    Kind.SOURCE_FAILED: Consequence(SourceError, hopeless=False),
    Kind.LAUNCH_FAILED: Consequence(EngineError, hopeless=False),
    Kind.PRELOAD_EXPIRED: Consequence(EngineError, hopeless=True),
}


class Failure(Struct, frozen=True):
    kind: Kind
    reason: str
    """What is wrong and where, in words."""
    advice: str = ""

    @property
    def hopeless(self) -> bool:
        return TABLE[self.kind].hopeless

    def error(self, model: str) -> PreheatError:
        """As the error with which preheat ends."""
        text = f"{model} could not be brought up: {self.reason}"
        return TABLE[self.kind].error(text, advice=self.advice)


def kind_of(event: str) -> Kind:
    """The kind of a failure that an agent's event tells of."""
    return Kind(event) if event in set(Kind) else Kind.AGENT_BROKEN


def launch_failure(error: PreheatError | OSError) -> Failure:
    """A launch that ended with this error."""
    if isinstance(error, SpecError):
        return Failure(Kind.SPEC_WRONG, error.what, error.advice)
    if isinstance(error, SourceError):
        kind = Kind.SOURCE_FAILED if error.retryable else Kind.SOURCE_MISSING
        return Failure(kind, error.what, error.advice)
    if isinstance(error, PreheatError):
        return Failure(Kind.LAUNCH_FAILED, error.what, error.advice)
    return Failure(Kind.LAUNCH_FAILED, f"no agent could be started: {error}")
