"""Warm-up prompts and the known answer: what is asked, and whether the answer agrees. Pure.

An answer is a sequence of steps, each a text and a number: a token and its log-probability, or for
an embedding model a component's name and its value. Hashes detect damage to the weights; the known
answer shows that the engine computes what it computed before.
What does not belong here: sending anything (``asking.py``), files (``answers.py``).
"""

from __future__ import annotations

import hashlib
import json
import math
from typing import TYPE_CHECKING, Any

from msgspec import Struct

from preheat.core.errors import ProofError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from preheat.core.spec.schema import KnownAnswer
    from preheat.replica.engines.plan import LaunchPlan

EMBEDDING_STEPS = 16
SHOWN_BYTES = 300


class Step(Struct, frozen=True):
    text: str
    value: float
    """Natural log-probability of the token; or the vector's component, in units of the root mean
    square of all, so that one tolerance suits vectors of any length."""


Answer = tuple[Step, ...]


def request_for(
    launch: LaunchPlan, model: str, prompt: str, max_tokens: int
) -> tuple[str, dict[str, Any]]:
    """Path and body that run ``prompt`` through the engine, greedily."""
    if "embeddings" in launch.capabilities:
        return "/v1/embeddings", {"model": model, "input": prompt}
    return "/v1/completions", {
        "model": model,
        "prompt": prompt,
        "max_tokens": max_tokens,
        "temperature": 0,
        "logprobs": 1,
        # A cached prefix would leave the kernels of the prompt unused.
        "cache_prompt": False,
    }


def require_success(status: int, body: bytes) -> None:
    """Raises ProofError for a status other than 200; an empty answer is one."""
    if status != 200:
        raise ProofError(f"the engine answered {status}: {_shown(body)}")


def answer_from(status: int, body: bytes) -> Answer:
    """Raises ProofError for anything that is not an answer that can be compared."""
    require_success(status, body)
    try:
        parsed = json.loads(body)
        if "data" in parsed:
            steps = _embedding_steps(parsed["data"][0]["embedding"])
        else:
            content = parsed["choices"][0]["logprobs"]["content"]
            steps = tuple(Step(str(item["token"]), float(item["logprob"])) for item in content)
    except (LookupError, TypeError, ValueError, ArithmeticError) as error:
        raise ProofError(
            f"the engine's answer has another shape than expected: {_shown(body)}"
        ) from error
    if not steps:
        raise ProofError(
            "the engine's answer to the known question is empty",
            advice="choose a warmup.known_answer.prompt that the model goes on from",
        )
    if not all(math.isfinite(step.value) for step in steps):
        raise ProofError(
            f"the engine's answer holds numbers that are not finite: {_shown(body)}",
            advice="the weights are damaged, or the engine does not compute this model correctly",
        )
    return steps


def _embedding_steps(vector: Sequence[Any]) -> Answer:
    """Raises ZeroDivisionError for a vector of zeros, which is no embedding."""
    numbers = [float(component) for component in vector]
    unit = math.sqrt(math.fsum(n * n for n in numbers) / len(numbers))
    return tuple(Step(f"component {i}", n / unit) for i, n in enumerate(numbers[:EMBEDDING_STEPS]))


def _shown(body: bytes) -> str:
    return body[:SHOWN_BYTES].decode(errors="replace")


def difference(expected: Answer, got: Answer, tolerance: float) -> str | None:
    """None when ``got`` agrees with ``expected``, else what differs.

    Steps are compared in order. Where the texts part, or one ends, the two choices must have been
    a near tie: what follows cannot be compared any more.
    """
    if not got:
        return "the answer is empty"
    for number, (want, have) in enumerate(zip(expected, got, strict=False), 1):
        same = want.text == have.text
        if abs(want.value - have.value) > tolerance or not (
            same or _near_tie(want.value, have.value, tolerance)
        ):
            return (
                f"step {number} is {have.text!r} at {have.value:.4f}, expected {want.text!r} at "
                f"{want.value:.4f} (tolerance {tolerance})"
            )
        if not same:
            return None
    if len(got) == len(expected):
        return None
    longer, number = max(expected, got, key=len), min(len(expected), len(got))
    if _near_tie(longer[number].value, longer[number].value, tolerance):
        return None
    return f"it has {len(got)} steps, expected {len(expected)}"


def _near_tie(one: float, other: float, tolerance: float) -> bool:
    """Whether a shift of log-probabilities by at most ``tolerance`` can explain that a greedy
    choice was ``one`` before and is ``other`` now.

    Each had at least the other's probability within the shift, and both sum to one at most: two
    different tokens at 90 % are no tie, however equal the figures.
    """
    shift = math.exp(-tolerance)
    high, low = (math.exp(min(0.0, v)) for v in (max(one, other), min(one, other)))
    return high * shift + low <= 1.0 and low * shift + high <= 1.0


def disagrees_with_spec(known: KnownAnswer, got: Answer) -> str | None:
    """None when ``got`` is what the spec expects, else what differs."""
    text = "".join(step.text for step in got)
    if known.expect is not None and not text.startswith(known.expect):
        return f"{known.prompt!r} was answered {text!r}, expected {known.expect!r}"
    if known.logprob is not None and abs(got[0].value - known.logprob) > known.tolerance:
        return (
            f"the first token has the log-probability {got[0].value:.4f}, expected {known.logprob} "
            f"(tolerance {known.tolerance})"
        )
    return None


def answer_key(launch: LaunchPlan, sha256: str, cpu: str, known: KnownAnswer) -> str:
    """Under what an answer is recorded: model, engine build, CPU, options and question."""
    parts = (sha256, launch.build, cpu, launch.options, known.prompt, known.max_tokens)
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()[:32]


def gauge_sum(metrics: str, names: Sequence[str]) -> int | None:
    """Sum of gauges without labels in Prometheus' text format; None unless all are there."""
    found: dict[str, float] = {}
    for line in metrics.splitlines():
        name, _, value = line.partition(" ")
        if name in names:
            found[name] = float(value)
    return int(sum(found.values())) if len(found) == len(names) else None
