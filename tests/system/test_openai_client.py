"""The official OpenAI client, unmodified, against the real thing."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import openai
import pytest
from tests.system.served import MODEL, Served, wait_until


@pytest.fixture(scope="module")
def client(preheat: Served) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(
        base_url=f"http://127.0.0.1:{preheat.port}/v1", api_key="none", max_retries=0
    ) as made:
        yield made


FORMAT: Any = {
    "type": "json_schema",
    "json_schema": {
        "name": "answer",
        "strict": True,
        "schema": {
            "type": "object",
            "properties": {"capital": {"type": "string", "maxLength": 12}},
            "required": ["capital"],
        },
    },
}
MESSAGES: Any = [{"role": "user", "content": "What is the capital of France?"}]


def test_streamed_and_whole_answers_agree(client: openai.OpenAI) -> None:
    whole = client.chat.completions.create(
        model=MODEL, messages=MESSAGES, max_tokens=24, temperature=0, seed=1
    )
    chunks = client.chat.completions.create(
        model=MODEL, messages=MESSAGES, max_tokens=24, temperature=0, seed=1, stream=True
    )
    streamed = "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)
    assert streamed == whole.choices[0].message.content


def test_usage_is_in_the_stream_only_when_it_is_asked_for(client: openai.OpenAI) -> None:
    def usages(**more: Any) -> list[Any]:
        chunks = client.chat.completions.create(
            model=MODEL, messages=MESSAGES, max_tokens=3, stream=True, **more
        )
        return [chunk.usage for chunk in chunks if chunk.usage is not None]

    assert usages() == []
    (usage,) = usages(stream_options={"include_usage": True})
    assert usage.completion_tokens == 3


def test_so_it_is_in_a_stream_of_completions(client: openai.OpenAI) -> None:
    def usages(**more: Any) -> list[Any]:
        chunks = client.completions.create(
            model=MODEL, prompt="The capital of France is", max_tokens=3, stream=True, **more
        )
        return [chunk.usage for chunk in chunks if chunk.usage is not None]

    assert usages() == []
    (usage,) = usages(stream_options={"include_usage": True})
    assert usage.completion_tokens == 3


def test_completions_and_models_work(client: openai.OpenAI) -> None:
    answer = client.completions.create(
        model=MODEL, prompt="The capital of France is", max_tokens=2, temperature=0
    )
    assert answer.choices[0].text.startswith(" Paris")
    assert [m.id for m in client.models.list()] == [MODEL]
    assert client.models.retrieve(MODEL).id == MODEL


def test_an_unknown_model_is_not_found_and_the_known_are_named(client: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError) as raised:
        client.chat.completions.create(model="nope", messages=MESSAGES)
    assert MODEL in raised.value.message
    assert raised.value.code == "model_not_found"


def test_a_bad_request_of_the_engine_reaches_the_client(client: openai.OpenAI) -> None:
    """A prompt beyond the context is refused by the engine, not cut in silence."""
    with pytest.raises(openai.BadRequestError) as raised:
        client.completions.create(model=MODEL, prompt="word " * 5000, max_tokens=1)
    assert "context" in raised.value.message


def test_structured_output_passes_through(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(
        model=MODEL,
        messages=MESSAGES,
        max_tokens=48,
        response_format=FORMAT,
    )
    content = answer.choices[0].message.content
    assert content is not None
    assert set(json.loads(content)) == {"capital"}


def test_a_client_that_leaves_stops_the_generation(client: openai.OpenAI, preheat: Served) -> None:
    before = _generated(preheat)
    stream: Any = client.chat.completions.create(
        model=MODEL, messages=MESSAGES, max_tokens=1500, stream=True
    )
    next(iter(stream))
    stream.close()
    wait_until(lambda: _in_flight(preheat) == 0, "the engine is idle")
    assert _generated(preheat) - before < 700


def _engine_metrics(preheat: Served) -> dict[str, float]:
    import asyncio
    from pathlib import Path

    from preheat.core import localhttp

    socket = Path(preheat.replica()["agent_socket"]).with_name("engine.sock")
    text = asyncio.run(localhttp.request(socket, "GET", "/metrics")).body.decode()
    lines = [line.split() for line in text.splitlines() if not line.startswith("#")]
    return {name: float(value) for name, value in lines}


def _in_flight(preheat: Served) -> float:
    metrics = _engine_metrics(preheat)
    return metrics["llamacpp:requests_processing"] + metrics["llamacpp:requests_deferred"]


def _generated(preheat: Served) -> float:
    return _engine_metrics(preheat)["llamacpp:tokens_predicted_total"]
