"""Every error preheat raises on purpose, as one tree.

PreheatError
├── SpecError               what the user wrote is wrong; nothing was changed        exit 2
├── SourceError             a model could not be fetched or found                    exit 3
│   └── IntegrityError      bytes are not the bytes that were promised               exit 3
├── EngineError             an engine could not be started or went away              exit 4
│   ├── EngineExited        its process ended; says why (signal, memory, bad file)
│   └── ProofError          it runs, but did not prove itself hot
├── GatewayError            Envoy is missing, died or refused what was published     exit 5
├── LifecycleError          an event that the state does not allow (a defect)        exit 70
├── NotRunning              no preheat answers in the runtime directory              exit 6
└── Busy                    another preheat holds the directory or port              exit 7

Retryability is in the type: ``retryable`` is True where trying again, unchanged, can help.
What does not belong here: errors of the Python API of one module only.
"""

from __future__ import annotations


class PreheatError(Exception):
    """Base of all errors. ``str(error)`` says what is wrong and where; ``advice`` what to do."""

    exit_code = 1
    retryable = False

    def __init__(self, what: str, *, advice: str = "") -> None:
        super().__init__(what)
        self.what = what
        self.advice = advice

    def __str__(self) -> str:
        return f"{self.what}\n  → {self.advice}" if self.advice else self.what


class SpecError(PreheatError):
    exit_code = 2


class SourceError(PreheatError):
    exit_code = 3
    retryable = True


class IntegrityError(SourceError):
    retryable = False


class EngineError(PreheatError):
    exit_code = 4
    retryable = True


class EngineExited(EngineError):
    pass


class ProofError(EngineError):
    pass


class GatewayError(PreheatError):
    exit_code = 5
    retryable = True


class LifecycleError(PreheatError):
    exit_code = 70


class NotRunning(PreheatError):
    exit_code = 6


class Busy(PreheatError):
    exit_code = 7
