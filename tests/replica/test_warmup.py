from __future__ import annotations

import json
import math
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from preheat.core.errors import ProofError
from preheat.core.spec.schema import KnownAnswer
from preheat.replica.engines.plan import LaunchPlan
from preheat.replica.warmup import (
    EMBEDDING_STEPS,
    Answer,
    Step,
    answer_from,
    answer_key,
    difference,
    disagrees_with_spec,
    gauge_sum,
    request_for,
    require_success,
)

LAUNCH = LaunchPlan(
    argv=("/x",), endpoint="/e", capabilities=("completions",), max_connections=1, build="b 1"
)
EMBEDDING = msgspec.structs.replace(LAUNCH, capabilities=("embeddings",))

logprobs = st.floats(-20.0, 0.0)
answers = st.lists(st.builds(Step, st.sampled_from(["a", "b", "c"]), logprobs), min_size=1).map(
    tuple
)
tolerances = st.floats(0.001, 3.0)


def completion(*steps: tuple[str, float]) -> bytes:
    content = [{"token": text, "logprob": value} for text, value in steps]
    return json.dumps({"choices": [{"logprobs": {"content": content}}]}).encode()


def embedding(*components: float) -> bytes:
    return json.dumps({"data": [{"embedding": list(components)}]}).encode()


# ── asking and reading ──


def test_a_prompt_is_completed_greedily_without_a_cached_prefix() -> None:
    path, body = request_for(LAUNCH, "m", "Hello", 4)
    assert path == "/v1/completions"
    assert body["temperature"] == 0
    assert body["cache_prompt"] is False
    assert (body["model"], body["prompt"], body["max_tokens"]) == ("m", "Hello", 4)


def test_an_embedding_model_is_asked_for_a_vector() -> None:
    assert request_for(EMBEDDING, "m", "Hello", 4) == (
        "/v1/embeddings",
        {"model": "m", "input": "Hello"},
    )


def test_tokens_and_their_log_probabilities_are_the_answer() -> None:
    assert answer_from(200, completion((" Paris", -0.5), (".", -1.0))) == (
        Step(" Paris", -0.5),
        Step(".", -1.0),
    )


@given(st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=40), st.floats(0.01, 1e3))
def test_a_vector_is_compared_by_its_direction_whatever_its_length(
    components: list[float], scale: float
) -> None:
    if max(map(abs, components)) < 1e-3:
        return
    one = answer_from(200, embedding(*components))
    other = answer_from(200, embedding(*(scale * c for c in components)))
    assert len(one) == min(len(components), EMBEDDING_STEPS)
    assert difference(one, other, 1e-6) is None


@pytest.mark.parametrize(
    ("status", "body"),
    [
        (500, b"no"),
        (200, b""),
        (200, b"{}"),
        (200, b"[]"),
        (200, b"null"),
        (200, b"\xff"),
        (200, completion()),
        (200, completion(("a", math.nan))),
        (200, completion(("a", -math.inf))),
        (200, b'{"choices": [{"logprobs": null}]}'),
        (200, b'{"choices": []}'),
        (200, embedding()),
        (200, embedding(0.0, 0.0)),
        (200, b'{"data": [{"embedding": [[1.0]]}]}'),
        (200, b'{"data": []}'),
    ],
)
def test_what_cannot_be_compared_is_no_answer(status: int, body: bytes) -> None:
    with pytest.raises(ProofError):
        answer_from(status, body)


json_values = st.recursive(
    st.none() | st.booleans() | st.floats() | st.text(max_size=5),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(["data", "choices", "logprobs", "content", "embedding", "token"]),
            inner,
            max_size=3,
        )
    ),
    max_leaves=12,
)


@given(json_values)
def test_whatever_an_engine_sends_is_an_answer_or_a_proof_error(value: Any) -> None:
    try:
        assert answer_from(200, json.dumps(value).encode())
    except ProofError:
        return


def test_an_empty_answer_will_do_for_a_warmup_prompt_and_an_error_will_not() -> None:
    require_success(200, completion())
    with pytest.raises(ProofError, match="answered 503: busy"):
        require_success(503, b"busy")


# ── agreeing ──


@given(answers, tolerances)
def test_an_answer_agrees_with_itself(answer: Answer, tolerance: float) -> None:
    assert difference(answer, answer, tolerance) is None


@given(answers, answers, tolerances)
def test_agreement_is_mutual(one: Answer, other: Answer, tolerance: float) -> None:
    assert (difference(one, other, tolerance) is None) == (
        difference(other, one, tolerance) is None
    )


@given(answers, st.data(), tolerances)
def test_values_within_the_tolerance_agree_and_one_beyond_it_does_not(
    answer: Answer, data: st.DataObject, tolerance: float
) -> None:
    shift = data.draw(st.floats(0.0, tolerance * 0.99))
    near = tuple(Step(step.text, step.value - shift) for step in answer)
    assert difference(answer, near, tolerance) is None
    at = data.draw(st.integers(0, len(answer) - 1))
    far = list(answer)
    far[at] = Step(answer[at].text, answer[at].value - tolerance * 1.01 - 1e-6)
    found = difference(answer, tuple(far), tolerance)
    assert found is not None
    assert f"step {at + 1} " in found


@given(st.floats(0.0, 1.0, exclude_min=True), st.floats(0.05, 0.5), st.data())
def test_a_choice_may_change_only_where_the_shift_can_explain_it(
    before: float, tolerance: float, data: st.DataObject
) -> None:
    """Two computations whose probabilities differ by a factor within e^±tolerance, each greedy."""
    second = data.draw(st.floats(0.0, min(before, 1.0 - before)))
    factor = data.draw(st.floats(math.exp(-tolerance), math.exp(tolerance)))
    after_second, after_first = second * factor, before * math.exp(-tolerance)
    if after_second < after_first or after_second + after_first > 1.0 or second == 0.0:
        return
    expected = (Step("a", math.log(before)),)
    got = (Step("b", math.log(min(1.0, after_second))),)
    if abs(expected[0].value - got[0].value) <= tolerance - 1e-9:
        assert difference(expected, got, tolerance + 1e-9) is None


@pytest.mark.parametrize("tolerance", [0.05, 0.25, 0.6])
def test_two_sure_and_different_answers_are_no_near_tie(tolerance: float) -> None:
    sure = math.log(0.9)
    assert difference((Step("a", sure),), (Step("b", sure),), tolerance) is not None


def test_after_a_near_tie_nothing_more_is_compared() -> None:
    half = math.log(0.45)
    one = (Step("a", half), Step("x", -0.1))
    other = (Step("b", half), Step("y", -9.0), Step("z", -9.0))
    assert difference(one, other, 0.25) is None


@pytest.mark.parametrize(("probability", "differs"), [(0.95, True), (0.3, False)])
def test_an_answer_that_ends_early_differs_unless_the_end_was_a_near_tie(
    probability: float, differs: bool
) -> None:
    long = (Step("a", -0.1), Step("b", math.log(probability)))
    short = long[:1]
    assert (difference(long, short, 0.25) is not None) is differs
    assert (difference(short, long, 0.25) is not None) is differs


def test_an_empty_answer_agrees_with_nothing() -> None:
    assert difference((Step("a", -0.1),), (), 0.25) == "the answer is empty"


# ── the spec ──


@pytest.mark.parametrize(
    ("known", "named"),
    [
        (KnownAnswer(), None),
        (KnownAnswer(expect=" Par"), None),
        (KnownAnswer(expect=" Paris."), None),
        (KnownAnswer(expect="Paris"), "expected 'Paris'"),
        (KnownAnswer(expect=" Paris. It"), "expected ' Paris. It'"),
        (KnownAnswer(logprob=-0.7), None),
        (KnownAnswer(logprob=-0.8, tolerance=0.2), "log-probability -0.5000"),
    ],
)
def test_the_spec_is_asked_first(known: KnownAnswer, named: str | None) -> None:
    found = disagrees_with_spec(known, (Step(" Paris", -0.5), Step(".", -1.0)))
    assert (found is None) if named is None else (found is not None and named in found)


def test_an_answer_is_recorded_under_everything_that_shapes_it() -> None:
    known = KnownAnswer()
    replace = msgspec.structs.replace
    keys = [
        answer_key(LAUNCH, "aa", "cpu", known),
        answer_key(LAUNCH, "bb", "cpu", known),
        answer_key(LAUNCH, "aa", "other cpu", known),
        answer_key(replace(LAUNCH, build="b 2"), "aa", "cpu", known),
        answer_key(replace(LAUNCH, options={"threads": 3}), "aa", "cpu", known),
        answer_key(LAUNCH, "aa", "cpu", replace(known, prompt="?")),
        answer_key(LAUNCH, "aa", "cpu", replace(known, max_tokens=5)),
    ]
    assert len(set(keys)) == len(keys)
    # Where it runs, and what is expected of it, changes nothing of what it computes.
    moved = replace(LAUNCH, endpoint="/other", argv=("/y",))
    lenient = replace(known, tolerance=1.0, expect="x")
    assert answer_key(moved, "aa", "cpu", lenient) == keys[0]


# ── gauges ──


def test_gauges_are_summed_when_all_are_there() -> None:
    text = "# HELP a x\na 2\nab 50\nb 3.0\n"
    assert gauge_sum(text, ("a", "b")) == 5
    assert gauge_sum(text, ("a", "missing")) is None
    assert gauge_sum("no", ("a",)) is None
