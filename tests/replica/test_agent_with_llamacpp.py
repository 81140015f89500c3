"""The agent over the real engine and the default model."""

from __future__ import annotations

import json
import os
import shutil
import signal
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace
from tests.replica.starts import KNOWN, Start, UnixConnection, call, is_alive

from preheat.core.spec.schema import KnownAnswer, Warmup

PARIS = Warmup(known_answer=KnownAnswer(prompt=KNOWN, expect=" Paris"))


@pytest.fixture
def start(prepare: Callable[..., Start], model_file: Path) -> Start:
    return prepare(model=model_file, warmup=PARIS)


def complete(start: Start, **fields: Any) -> UnixConnection:
    connection = UnixConnection(start.engine_socket)
    body = json.dumps({"prompt": "Once upon a time", "temperature": 0, **fields})
    connection.request("POST", "/v1/completions", body, {"content-type": "application/json"})
    return connection


def test_the_default_model_comes_up_and_answers_as_it_should(start: Start) -> None:
    live: list[int] = []
    start.launch().until("loading")
    stop = threading.Event()

    def ask() -> None:
        while not stop.wait(0.005):
            live.append(start.get("/live")[0])

    asking = threading.Thread(target=ask)
    asking.start()
    event = start.until("ready")
    stop.set()
    asking.join()
    assert event["answer"][0][0] == " Paris"
    assert set(live) == {200}
    _, answer = call(start.engine_socket, "POST", "/v1/completions", {"prompt": KNOWN, "n": 1})
    assert answer["model"] == "m"


def test_a_second_start_answers_as_the_first_did(
    prepare: Callable[..., Start], start: Start, model_file: Path
) -> None:
    answers = []
    for each in (start, prepare(model=model_file, warmup=PARIS)):
        answers.append(each.launch().until("ready")["answer"])
        each.post("/stop")
        each.finish()
    assert [step[0] for step in answers[0]] == [step[0] for step in answers[1]]
    assert len(list((start.directory / "answers").iterdir())) == 1


def test_a_drain_lets_a_long_stream_finish(start: Start) -> None:
    start.launch().until("ready")
    connection = complete(start, max_tokens=150, ignore_eos=True, stream=True)
    answer = connection.getresponse()
    answer.readline()
    start.signal(signal.SIGTERM)
    start.until("draining")
    assert start.get("/ready")[0] == 503
    text = answer.read()
    connection.close()
    assert text.endswith(b"data: [DONE]\n\n")
    assert text.count(b"data: {") >= 149
    assert start.finish()[-2]["in_time"] is True


def test_a_drain_is_cut_short_when_its_time_is_over(start: Start) -> None:
    start.drain_timeout_s = 0.3
    start.launch().until("ready")
    connection = complete(start, max_tokens=900, ignore_eos=True, stream=True)
    connection.getresponse().readline()
    start.post("/drain")
    assert start.finish()[-2]["in_time"] is False
    connection.close()


def test_a_flipped_bit_anywhere_stops_the_start_before_the_engine_loads(
    start: Start, model_file: Path, short_dir: Path
) -> None:
    damaged = short_dir / "damaged.gguf"
    shutil.copyfile(model_file, damaged)
    plan = start.plan()
    with damaged.open("r+b") as file:
        file.seek(-777_777, os.SEEK_END)
        byte = file.read(1)[0]
        file.seek(-1, os.SEEK_CUR)
        file.write(bytes([byte ^ 1]))
    event_plan = replace(plan, weights=replace(plan.weights, path=str(damaged)))
    events = start.launch(event_plan).finish()
    assert [event["event"] for event in events] == ["spawned", "weights bad", "ended"]
    assert str(damaged) in events[-1]["reason"]
    assert str(plan.weights.sha256) in events[-1]["reason"]
    assert not start.engine_socket.exists()


def test_a_file_that_is_no_model_is_explained_in_the_engines_words(
    prepare: Callable[..., Start], short_dir: Path
) -> None:
    nonsense = short_dir / "nonsense.gguf"
    nonsense.write_bytes(b"this is no model" * 100)
    start = prepare(model=nonsense).launch()
    reason = start.finish()[-1]["reason"]
    assert "could not load the model" in reason
    assert "invalid magic" in reason


def test_a_killed_engine_is_explained_and_nothing_is_left(start: Start) -> None:
    start.launch().until("ready")
    engine = start.engine_pid()
    os.kill(engine, signal.SIGKILL)
    events = start.finish()
    assert events[-2]["event"] == "engine exited"
    assert "SIGKILL" in events[-1]["reason"]
    assert not is_alive(engine)
    assert not start.engine_socket.exists()


def test_the_weights_may_go_once_they_are_verified(
    prepare: Callable[..., Start], model_file: Path, short_dir: Path
) -> None:
    copy = short_dir / "copy.gguf"
    shutil.copyfile(model_file, copy)
    start = prepare(model=copy, warmup=PARIS, hold_at="warm").launch()
    start.until("warm")
    copy.write_bytes(b"something else")
    copy.unlink()
    start.post("/heat")
    assert start.until("ready")["answer"][0][0] == " Paris"
