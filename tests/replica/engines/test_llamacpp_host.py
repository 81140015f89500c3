"""The real engine with the default model: options do what they say, and the API is OpenAI's."""

from __future__ import annotations

import json
import shutil
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.replica.engines.engine import NAME, RunningEngine, events, running
from tests.replica.starts import UnixConnection, eventually

from preheat.replica.warmup import gauge_sum

CHAT = "/v1/chat/completions"
FOX = "The quick brown fox jumps over the lazy dog and runs away into the woods"
TOOL = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
    },
}


@pytest.fixture(scope="module")
def sockets() -> Iterator[Path]:
    made = Path(tempfile.mkdtemp(prefix="ph-", dir="/tmp"))
    yield made
    shutil.rmtree(made)


@pytest.fixture(scope="module")
def engine(model_file: Path, sockets: Path) -> Iterator[RunningEngine]:
    """One slot fewer than the default and a short context, so that limits are met soon."""
    with running(model_file, sockets, max_batch_size=2, context_length=512) as started:
        yield started


@pytest.fixture(scope="module")
def other(model_file: Path, sockets: Path) -> Iterator[RunningEngine]:
    """Every option of the first one otherwise."""
    options = {"prefix_caching": False, "threads": 1, "flash_attention": "off"}
    with running(
        model_file, sockets, max_batch_size=1, context_length=1024, kv_cache_type="f32", **options
    ) as started:
        yield started


def user(text: str, **fields: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": text}], "temperature": 0, **fields}


def contents(stream: bytes) -> str:
    deltas = [event["choices"][0]["delta"] for event in events(stream) if event["choices"]]
    return "".join(delta.get("content") or "" for delta in deltas)


# ── options ──


def test_its_socket_is_for_its_user_alone(engine: RunningEngine) -> None:
    assert engine.socket.stat().st_mode & 0o777 == 0o600


def test_it_has_the_slots_and_the_context_that_it_was_told(
    engine: RunningEngine, other: RunningEngine
) -> None:
    assert [slot["n_ctx"] for slot in engine.get("/slots")[1]] == [512, 512]
    assert [slot["n_ctx"] for slot in other.get("/slots")[1]] == [1024]


def test_a_prompt_over_the_context_is_refused_with_the_reason(engine: RunningEngine) -> None:
    status, answer = engine.post("/v1/completions", {"prompt": "word " * 600, "max_tokens": 1})
    assert status == 400
    assert answer["error"]["type"] == "exceed_context_size_error"
    assert "512 tokens" in answer["error"]["message"]


def test_an_answer_ends_where_the_context_does_and_says_so(engine: RunningEngine) -> None:
    answer = engine.complete("word " * 450, max_tokens=200, ignore_eos=True)
    assert answer["choices"][0]["finish_reason"] == "length"
    assert answer["usage"]["total_tokens"] == 512


def test_prefixes_are_reused_only_where_that_is_on(
    engine: RunningEngine, other: RunningEngine
) -> None:
    for started, reused in ((engine, True), (other, False)):
        started.complete(FOX, max_tokens=1)
        cached = started.complete(FOX, max_tokens=1)["usage"]["prompt_tokens_details"]
        assert (cached["cached_tokens"] > 0) is reused


def test_it_computes_with_the_threads_it_was_told(other: RunningEngine) -> None:
    assert other.said("threadpool init, n_threads = 1")


@pytest.mark.parametrize(
    "options",
    [
        {"kv_cache_type": "q8_0", "flash_attention": "on"},
        {"kv_cache_type": "f16", "flash_attention": "off"},
    ],
)
def test_other_kinds_of_cache_and_attention_answer_too(
    model_file: Path, sockets: Path, options: dict[str, Any]
) -> None:
    with running(model_file, sockets, max_batch_size=1, context_length=128, **options) as started:
        text = started.complete("The capital of France is")["choices"][0]["text"]
        assert text.startswith(" Paris")


def test_a_smaller_cache_type_takes_less_memory(model_file: Path, sockets: Path) -> None:
    resident = {}
    for kind in ("q8_0", "f32"):
        with running(model_file, sockets, max_batch_size=1, kv_cache_type=kind) as started:
            status = Path(f"/proc/{started.process.pid}/status").read_text()
            resident[kind] = int(status.partition("RssAnon:")[2].split()[0])
    # 2048 tokens of 30 layers, 192 keys and 192 values each, 4 bytes against 8.5 bits.
    assert resident["f32"] - resident["q8_0"] > 2048 * 30 * 384 * 2 // 1024


def test_a_cache_type_that_needs_flash_attention_says_so(model_file: Path, sockets: Path) -> None:
    options = {"kv_cache_type": "q8_0", "flash_attention": "off"}
    with running(model_file, sockets, **options) as started:
        assert started.process.wait(timeout=60) == 3
        assert any("requires flash_attn" in line for line in started.log)


def test_a_model_that_is_cut_short_is_refused_with_the_reason(
    model_file: Path, sockets: Path, tmp_path: Path
) -> None:
    cut = tmp_path / "cut.gguf"
    cut.write_bytes(model_file.read_bytes()[:50_000_000])
    with running(cut, sockets) as started:
        assert started.process.wait(timeout=60) == 3
        assert any("not within the file bounds" in line for line in started.log)


# ── embeddings ──


@pytest.fixture(scope="module")
def embedder(model_file: Path, sockets: Path) -> Iterator[RunningEngine]:
    with running(
        model_file, sockets, embeddings=True, max_batch_size=2, context_length=512
    ) as started:
        yield started


def test_embeddings_are_vectors_of_length_one_with_usage(embedder: RunningEngine) -> None:
    status, answer = embedder.post("/v1/embeddings", {"model": "x", "input": ["hello", "bye"]})
    assert status == 200, answer
    first, second = (item["embedding"] for item in answer["data"])
    assert len(first) == len(second) == 576
    assert sum(x * x for x in first) == pytest.approx(1.0, abs=1e-3)
    assert first != second
    assert answer["usage"]["prompt_tokens"] > 0


def test_a_text_as_long_as_the_context_is_embedded(embedder: RunningEngine) -> None:
    status, answer = embedder.post("/v1/embeddings", {"input": "word " * 500})
    assert status == 200, answer
    assert answer["usage"]["prompt_tokens"] > 500


def test_an_engine_for_embeddings_counts_what_is_in_flight(embedder: RunningEngine) -> None:
    assert embedder.in_flight() == 0


# ── answers ──


def test_answers_carry_the_models_name(engine: RunningEngine) -> None:
    _, answer = engine.post(CHAT, user("Hi", max_tokens=1, model="whatever"))
    assert answer["model"] == NAME
    assert engine.get("/v1/models")[1]["data"][0]["id"] == NAME


@pytest.mark.parametrize("seed", range(3))
def test_streaming_and_not_streaming_agree(other: RunningEngine, seed: int) -> None:
    body = user(f"Tell me {seed + 2} facts about the sea.", max_tokens=24)
    _, whole = other.post(CHAT, body)
    stream = other.stream(CHAT, body)
    assert contents(stream) == whole["choices"][0]["message"]["content"] != ""
    reasons = [e["choices"][0]["finish_reason"] for e in events(stream) if e["choices"]]
    assert [reason for reason in reasons if reason] == [whole["choices"][0]["finish_reason"]]


def test_usage_is_in_a_stream_only_when_it_is_asked_for(engine: RunningEngine) -> None:
    body = user("Hi", max_tokens=3)
    assert not any(event.get("usage") for event in events(engine.stream(CHAT, body)))
    asked = events(engine.stream(CHAT, {**body, "stream_options": {"include_usage": True}}))
    assert [bool(event.get("usage")) for event in asked] == [False] * (len(asked) - 1) + [True]
    assert asked[-1]["choices"] == []
    assert asked[-1]["usage"]["completion_tokens"] == 3


def test_characters_of_several_tokens_stay_whole_in_a_stream(engine: RunningEngine) -> None:
    text = contents(engine.stream(CHAT, user("Repeat exactly: ✅✅✅ 🎉🎉", max_tokens=40)))
    assert "✅" in text
    assert "\ufffd" not in text


def test_a_schema_for_the_answer_is_kept(engine: RunningEngine) -> None:
    schema = {
        "type": "object",
        "properties": {
            "name": {"type": "string", "maxLength": 8},
            "age": {"type": "integer", "minimum": 0, "maximum": 99},
        },
        "required": ["name", "age"],
    }
    wanted = {"type": "json_schema", "json_schema": {"name": "person", "schema": schema}}
    body = user("Invent a person", max_tokens=80, response_format=wanted)
    _, answer = engine.post(CHAT, body)
    person = json.loads(answer["choices"][0]["message"]["content"])
    assert set(person) == {"name", "age"}
    assert 0 <= person["age"] <= 99


def test_tools_are_accepted_and_a_cut_answer_says_length(engine: RunningEngine) -> None:
    """The default model's template knows no tools, so that no call can be provoked."""
    body = user("Weather in Paris?", tools=[TOOL], tool_choice="auto", max_tokens=5)
    status, answer = engine.post(CHAT, body)
    assert status == 200, answer
    assert answer["choices"][0]["finish_reason"] == "length"


@pytest.mark.parametrize(
    "body", [{"messages": "x"}, {"prompt": 5}, {"messages": [{"role": "user"}], "max_tokens": "x"}]
)
def test_a_request_that_is_wrong_is_refused_and_harms_nothing(
    engine: RunningEngine, body: dict[str, Any]
) -> None:
    status, answer = engine.post(CHAT, body)
    assert 400 <= status < 600
    assert answer["error"]["message"]
    assert engine.get("/health")[0] == 200


# ── clients that leave, and many of them ──


def long_request(engine: RunningEngine, **fields: Any) -> UnixConnection:
    """A generation that takes far longer than the test, asked for and not read."""
    connection = UnixConnection(engine.socket)
    body = {"prompt": FOX, "max_tokens": 230, "ignore_eos": True, "stream": True, **fields}
    connection.request(
        "POST", "/v1/completions", json.dumps(body), {"content-type": "application/json"}
    )
    return connection


@pytest.mark.parametrize("tokens_read", [0, 1, 5])
def test_a_client_that_leaves_its_stream_stops_the_generation(
    other: RunningEngine, tokens_read: int
) -> None:
    before = generated(other)
    connection = long_request(other, max_tokens=900)
    eventually(lambda: other.in_flight() == 1)
    answer = connection.getresponse()
    for _ in range(2 * tokens_read):
        answer.readline()
    answer.close()
    connection.close()
    eventually(lambda: other.in_flight() == 0)
    assert generated(other) - before < 450
    # Its slot, the only one, is free.
    assert other.complete(FOX, max_tokens=1)["choices"][0]["finish_reason"] == "length"


def test_a_client_that_leaves_without_a_stream_stops_the_generation(other: RunningEngine) -> None:
    """The engine looks once a second in which no other request got anything, so nothing is asked
    meanwhile: its log tells."""
    cancelled, before = other.said("cancel task"), generated(other)
    connection = long_request(other, stream=False, max_tokens=900)
    eventually(lambda: other.in_flight() == 1)
    connection.close()
    eventually(lambda: other.said("cancel task") > cancelled)
    eventually(lambda: other.in_flight() == 0)
    assert generated(other) - before < 900


def test_a_client_that_leaves_while_its_prompt_is_read_stops_that(other: RunningEngine) -> None:
    counted = ("llamacpp:prompt_tokens_total",)
    before = gauge_sum(other.get("/metrics")[1], counted)
    cancelled = other.said("cancel task")
    connection = long_request(other, prompt="word " * 1000, max_tokens=5)
    connection.close()
    eventually(lambda: other.said("cancel task") > cancelled)
    eventually(lambda: other.in_flight() == 0)
    after = gauge_sum(other.get("/metrics")[1], counted)
    assert before is not None
    assert after is not None
    assert after - before < 1000


def generated(engine: RunningEngine) -> int:
    total = gauge_sum(engine.get("/metrics")[1], ("llamacpp:tokens_predicted_total",))
    assert total is not None
    return total


def test_a_client_that_leaves_the_queue_is_never_computed(other: RunningEngine) -> None:
    running_one = long_request(other, max_tokens=100)
    eventually(lambda: other.in_flight() == 1)
    queued = long_request(other, max_tokens=100)
    eventually(lambda: other.in_flight() == 2)
    queued.close()
    running_one.close()
    eventually(lambda: other.in_flight() == 0)


def test_the_agent_is_answered_while_every_connection_is_open_and_busy(
    engine: RunningEngine,
) -> None:
    connections = [
        long_request(engine, max_tokens=8, prompt=f"{n} {FOX}")
        for n in range(engine.launch.max_connections)
    ]
    answers: list[bytes] = []
    threads = [
        threading.Thread(target=lambda c=c: answers.append(c.getresponse().read()))
        for c in connections
    ]
    for thread in threads:
        thread.start()
    eventually(lambda: (engine.in_flight() or 0) > 2)
    assert engine.get("/health")[0] == 200
    for thread in threads:
        thread.join()
    for connection in connections:
        connection.close()
    assert len(answers) == engine.launch.max_connections
    assert all(answer.endswith(b"data: [DONE]\n\n") for answer in answers)
    assert engine.in_flight() == 0
