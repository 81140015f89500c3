"""An agent's way up: what it takes to be ready, and what becomes of it when something is wrong."""

from __future__ import annotations

import hashlib
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
from tests.replica.starts import KNOWN, SOURCES, Start, eventually

from preheat.core.coldstart import ColdStart, Phase, problems
from preheat.core.spec.schema import KnownAnswer, Warmup

Launch = Callable[..., Start]

WAY_UP = [
    ("spawned", "loading"),
    ("weights verified", "warm"),
    ("heat ordered", "starting"),
    ("engine up", "heating"),
    ("warmed up", "proving"),
    ("proven", "ready"),
]


def names(events: list[dict[str, Any]]) -> list[tuple[str, str]]:
    return [(event["event"], event["state"]) for event in events]


def asking(**fields: Any) -> dict[str, Any]:
    """Plan fields for a warm-up of this kind."""
    known = KnownAnswer(prompt=KNOWN, **fields.pop("known", {}))
    return {"warmup": Warmup(**{"prompts": ("Hello!",), **fields}, known_answer=known)}


def failure(start: Start) -> dict[str, Any]:
    """The event with which the start failed, and that it was the last but one."""
    events = start.finish()
    assert start.process.returncode == 4, (names(events), start.log.read_text())
    assert events[-1]["event"] == "ended"
    assert events[-1]["state"] == "failed"
    assert events[-2]["state"] == "failed"
    assert events[-2]["reason"] == events[-1]["reason"] != ""
    return events[-2]


# ── the way up ──


def test_a_start_passes_through_every_state_in_order(launch: Launch) -> None:
    start = launch()
    start.until("ready")
    start.signal(signal.SIGTERM)
    assert names(start.finish()) == [
        *WAY_UP,
        ("drain ordered", "draining"),
        ("drained", "stopped"),
        ("ended", "stopped"),
    ]
    assert start.process.returncode == 0
    assert start.log.read_text() == ""


def test_events_are_numbered_and_name_replica_and_start(launch: Launch) -> None:
    start = launch()
    start.until("ready")
    start.post("/stop")
    events = start.finish()
    assert [event["n"] for event in events] == list(range(1, len(events) + 1))
    assert {(event["replica"], event["start_id"]) for event in events} == {("m-0", "m-0@1")}
    times = [event["monotonic_s"] for event in events]
    assert times == sorted(times)


def test_the_engine_reads_the_bytes_that_were_hashed(launch: Launch) -> None:
    start = launch()
    verified = start.until("warm")
    start.until("ready")
    assert start.seen.read_bytes() == start.weights_bytes[:64]
    assert verified["sha256"] == hashlib.sha256(start.weights_bytes).hexdigest()
    assert verified["bytes_read"] == len(start.weights_bytes)


def test_the_proof_says_where_the_time_went(launch: Launch) -> None:
    event = launch().until("ready")
    phases = msgspec.convert(event["phases"], tuple[Phase, ...])
    assert {"weights", "weights.hash", "engine", "engine.load", "warmup", "proof"} <= {
        phase.name for phase in phases
    }
    spawned_s = min(phase.start_s for phase in phases)
    record = ColdStart(
        start_id="m-0@1",
        model="m",
        version="v1",
        engine="fake",
        unix_time_s=0.0,
        spawned_s=spawned_s,
        phases=phases,
    )
    assert problems(record) == []
    assert event["answer"] == [[" Paris", -0.1], [".", -0.2]]


def test_weights_without_a_promised_hash_are_hashed_and_served(launch: Launch) -> None:
    start = launch(plan={"weights_sha256": None})
    assert start.until("warm")["sha256"] == hashlib.sha256(start.weights_bytes).hexdigest()
    start.until("ready")


def test_a_start_waits_for_a_gateway_that_comes_late(launch: Launch) -> None:
    start = launch(plan={"gateway": False})
    start.until("proving")
    eventually(lambda: "gateway" in start.get("/status")[1]["missing"])
    start.open_gateway()
    start.until("ready")
    assert start.get("/ready") == (200, {"ready": True, "missing": ""})


def test_a_gateway_that_does_not_route_yet_is_asked_again(launch: Launch) -> None:
    """As Envoy's answer is before its health check of the endpoint has passed."""
    launch(raw={"known 2": [503, "no healthy upstream"]}).until("ready")


def test_an_empty_answer_to_a_warmup_prompt_is_an_answer(launch: Launch) -> None:
    launch(answers={"prompt": []}).until("ready")


def test_a_plan_without_warmup_prompts_goes_on_to_the_proof(launch: Launch) -> None:
    launch(plan=asking(prompts=())).until("ready")


# ── weights that are not what was promised ──


def test_one_flipped_bit_stops_the_start_and_the_engine_sees_no_byte(
    prepare: Callable[..., Start],
) -> None:
    start = prepare()
    plan = start.plan()
    damaged = bytearray(start.weights_bytes)
    damaged[12345] ^= 0x10
    start.weights.write_bytes(damaged)
    event = failure(start.launch(plan))
    assert event["event"] == "weights bad"
    for part in (start.weights, plan.weights.sha256, hashlib.sha256(damaged).hexdigest()):
        assert str(part) in event["reason"]
    assert "fetch it again" in event["advice"]
    assert not start.seen.exists()


@pytest.mark.parametrize(
    ("spoil", "named"),
    [
        (lambda file: file.write_bytes(b"short"), "5 bytes"),
        (lambda file: file.unlink(), "No such file"),
        (lambda file: file.write_bytes(b""), "is empty"),
    ],
)
def test_a_file_that_is_not_the_planned_one_stops_the_start(
    prepare: Callable[..., Start], spoil: Callable[[Path], None], named: str
) -> None:
    start = prepare()
    plan = start.plan()
    spoil(start.weights)
    event = failure(start.launch(plan))
    assert event["event"] == "weights bad"
    assert named in event["reason"]
    assert str(start.weights) in event["reason"]
    assert not start.seen.exists()


def test_a_defect_in_the_weights_thread_fails_the_start_instead_of_hanging_it(
    prepare: Callable[..., Start], short_dir: Path
) -> None:
    (short_dir / "sitecustomize.py").write_text(
        "import preheat.acceleration.weights.sealed as sealed\n"
        "def seal(*_, **__): raise KeyError('a defect')\n"
        "sealed.seal = seal\n"
    )
    start = prepare()
    start.environment = {"PYTHONPATH": f"{short_dir}:{SOURCES}"}
    event = failure(start.launch())
    assert event["event"] == "weights bad"
    assert "the thread that reads them died" in event["reason"]
    assert "a defect" in start.log.read_text()


# ── engines that go away ──


@pytest.mark.parametrize(
    ("place", "last_state"),
    [
        ("start", "loading"),
        ("weights", "starting"),
        ("health", "starting"),
        ("prompt", "heating"),
        ("known 1", "proving"),
        ("known 2", "proving"),
    ],
)
def test_an_engine_that_dies_on_the_way_up_fails_the_start(
    launch: Launch, place: str, last_state: str
) -> None:
    start = launch(die_at=place, code=9, say=["error: the fan is gone"])
    event = failure(start)
    assert event["event"] == "engine exited"
    assert "exit code 9" in event["reason"]
    assert "the fan is gone" in event["reason"]
    # While it still imports, the weights may or may not have been verified.
    before = start.recorded()[-3]["state"]
    assert before in {last_state, "starting" if last_state == "loading" else last_state}


def test_an_engine_that_dies_when_ready_fails_the_start_at_once(launch: Launch) -> None:
    start = launch()
    start.until("ready")
    os.kill(start.engine_pid(), signal.SIGSEGV)
    event = failure(start)
    assert event["event"] == "engine exited"
    assert "SIGSEGV" in event["reason"]
    assert start.recorded()[-3]["state"] == "ready"


@pytest.mark.parametrize(
    ("number", "explained"),
    [(signal.SIGABRT, "crashed (SIGABRT"), (signal.SIGKILL, "somebody killed it (SIGKILL)")],
)
def test_the_signal_that_ended_an_engine_is_named(
    launch: Launch, number: int, explained: str
) -> None:
    assert explained in failure(launch(die_at="prompt", signal=number))["reason"]


def test_a_model_that_cannot_be_loaded_is_said_with_the_first_complaint(launch: Launch) -> None:
    said = ["0.1 I loading", "0.2 E tensor 7 is cut off", "0.3 E failed to load model"]
    reason = failure(launch(die_at="weights", code=3, say=said))["reason"]
    assert "could not load the model" in reason
    assert "tensor 7 is cut off" in reason


def test_a_program_that_cannot_be_run_fails_the_start(launch: Launch) -> None:
    event = failure(launch(plan={"argv": ("/nonexistent/engine",)}))
    assert event["event"] == "engine exited"
    assert "/nonexistent/engine" in event["reason"]
    assert "could not be started" in event["reason"]


def test_the_last_words_of_an_engine_that_says_much_are_waited_for(launch: Launch) -> None:
    start = launch(flood_bytes=900_000, die_at="flooded")
    assert "these were the last words" in failure(start)["reason"]


def test_an_engine_that_hears_nothing_fails_at_the_deadline(launch: Launch) -> None:
    event = failure(launch(plan=asking(deadline_s=0.4), deaf=True))
    assert event["event"] == "deadline passed"


def test_an_engine_that_breaks_a_connection_and_lives_fails_its_proof(launch: Launch) -> None:
    event = failure(launch(break_at="prompt"))
    assert event["event"] == "proof failed"
    assert "broke a connection" in event["reason"]


# ── the deadline ──


@pytest.mark.parametrize(
    ("place", "phase"),
    [
        ("weights", "the engine is loading the model"),
        ("health", "the engine is loading the model"),
        ("prompt", "the warm-up prompts are running"),
        ("known 1", "the known answer is being checked"),
    ],
)
def test_a_start_that_is_too_slow_fails_and_names_the_phase(
    launch: Launch, place: str, phase: str
) -> None:
    event = failure(launch(plan=asking(deadline_s=0.4), hang_at=place))
    assert event["event"] == "deadline passed"
    assert phase in event["reason"]
    assert "warmup.deadline_s" in event["advice"]


def test_a_gateway_that_never_comes_is_named_when_the_deadline_passes(launch: Launch) -> None:
    start = launch(plan={**asking(deadline_s=0.4), "gateway": False})
    event = failure(start)
    assert event["event"] == "deadline passed"
    assert str(start.probe_socket) in event["reason"]


# ── the proof ──


@pytest.mark.parametrize(
    ("known", "named"),
    [({"expect": " Rome"}, "expected ' Rome'"), ({"logprob": -3.0}, "log-probability -0.1")],
)
def test_an_answer_that_the_spec_does_not_expect_fails_the_proof(
    launch: Launch, known: dict[str, Any], named: str
) -> None:
    event = failure(launch(plan=asking(known=known)))
    assert event["event"] == "proof failed"
    assert named in event["reason"]


@pytest.mark.parametrize(
    ("raw", "named"),
    [
        ([500, "out of slots"], "answered 500: out of slots"),
        ([200, "[]"], "another shape"),
        ([200, "not JSON"], "another shape"),
        ([200, '{"choices": [{"logprobs": {"content": []}}]}'], "is empty"),
        (
            [200, '{"choices": [{"logprobs": {"content": [{"token": "x", "logprob": NaN}]}}]}'],
            "not finite",
        ),
    ],
)
def test_what_is_no_answer_fails_the_proof(launch: Launch, raw: list[Any], named: str) -> None:
    event = failure(launch(raw={"known 1": raw}))
    assert event["event"] == "proof failed"
    assert named in event["reason"]


def test_another_answer_through_the_gateway_fails_the_proof(launch: Launch) -> None:
    event = failure(launch(answers={"known 2": [[" Rome", -0.1]]}))
    assert event["event"] == "proof failed"
    assert "through the gateway" in event["reason"]


def test_an_answer_other_than_that_of_the_first_proven_start_fails_the_proof(
    launch: Launch,
) -> None:
    first = launch()
    first.until("ready")
    first.post("/stop")
    first.finish()
    other = [[" Paris", -0.9], [".", -0.2]]
    event = failure(launch(answers={"known 1": other, "known 2": other}))
    assert event["event"] == "proof failed"
    assert "otherwise than before" in event["reason"]
    (record,) = (first.directory / "answers").iterdir()
    assert str(record) in event["advice"]


def test_an_answer_is_recorded_only_once_the_gateway_has_given_it_too(launch: Launch) -> None:
    start = launch(plan={**asking(deadline_s=0.4), "gateway": False})
    failure(start)
    assert not (start.directory / "answers").exists()


def test_a_replica_serves_although_its_answer_cannot_be_recorded(
    prepare: Callable[..., Start],
) -> None:
    start = prepare()
    plan = msgspec.structs.replace(start.plan(), answers="/proc/self/answers")
    event = start.launch(plan).until("ready")
    assert "/proc/self/answers" in event["answer_not_recorded"]


def test_a_recorded_answer_that_cannot_be_read_fails_the_proof(
    prepare: Callable[..., Start],
) -> None:
    start = prepare()
    (start.directory / "answers").write_text("not a directory")
    event = failure(start.launch())
    assert event["event"] == "proof failed"
    assert "cannot be read" in event["reason"]


# ── holding at warm ──


def test_a_warm_start_keeps_its_weights_and_no_engine_until_it_is_told(launch: Launch) -> None:
    start = launch(plan={"hold_at": "warm"})
    start.until("warm")
    assert start.get("/ready") == (
        503,
        {"ready": False, "missing": "the weights are resident; the engine is not started"},
    )
    assert start.engine_pid() == 0
    assert start.get("/routable")[0] == 503
    # A later change of the file does not matter any more.
    start.weights.write_bytes(b"something else")
    assert start.post("/heat")[0] == 202
    start.until("ready")
    assert start.seen.read_bytes() == start.weights_bytes[:64]
    held = [p for p in start.recorded()[-1]["phases"] if p["name"] == "held"]
    assert len(held) == 1


def test_a_warm_start_that_is_told_early_goes_on_by_itself(launch: Launch) -> None:
    start = launch(plan={"hold_at": "warm", "weights_bytes": b"w" * (96 << 20)})
    start.until("loading")
    start.post("/heat")
    start.until("ready")
    assert names(start.recorded()) == WAY_UP


def test_a_warm_start_whose_engine_cannot_be_run_fails_when_heated(launch: Launch) -> None:
    start = launch(plan={"hold_at": "warm", "argv": ("/nonexistent/engine",)})
    start.until("warm")
    start.post("/heat")
    assert "could not be started" in failure(start)["reason"]


# ── the API ──


def test_the_agent_lives_and_says_what_is_missing_in_every_state(launch: Launch) -> None:
    # So large that its hash takes longer than the agent waits for it before it answers.
    start = launch(
        plan={"weights_bytes": b"w" * (768 << 20), "weights_sha256": None}, hang_at="prompt"
    )
    start.until("loading")
    loading = []
    while (status := start.get("/status")[1])["state"] == "loading":
        assert start.get("/live") == (200, {"status": "live"})
        loading.append(status["missing"])
    assert set(loading) == {"the weights are being verified"}
    start.until("heating")
    assert start.get("/live")[0] == 200
    code, ready = start.get("/ready")
    assert (code, ready["missing"]) == (503, "the warm-up prompts are running")
    assert start.get("/routable")[0] == 200


def test_unknown_paths_and_wrong_arguments_are_answered(launch: Launch) -> None:
    start = launch(plan={"hold_at": "warm"})
    start.until("warm")
    assert start.get("/nowhere")[0] == 404
    assert start.post("/nowhere")[0] == 404
    assert start.get("/events?after=x")[0] == 400
    assert start.get("/events?after=" + "9" * 5000)[0] == 400
    assert start.get("/live")[0] == 200


def test_events_can_be_followed_from_any_number(launch: Launch) -> None:
    start = launch()
    start.until("ready")
    following = start.follow(after=4)
    assert next(following)["n"] == 5
    start.post("/stop")
    assert [event["n"] for event in following] == [6, 7, 8]


def test_sockets_are_for_their_user_alone_and_gone_at_the_end(launch: Launch) -> None:
    start = launch()
    start.until("ready")
    assert start.agent_socket.stat().st_mode & 0o777 == 0o600
    assert start.events_file.stat().st_mode & 0o777 == 0o600
    start.post("/stop")
    start.finish()
    assert not start.agent_socket.exists()
    assert not start.engine_socket.exists()


def test_an_agent_that_cannot_have_its_socket_says_so(prepare: Callable[..., Start]) -> None:
    start = prepare()
    plan = msgspec.structs.replace(start.plan(), agent_socket="/nonexistent/a.sock")
    event = failure(start.launch(plan))
    assert event["event"] == "agent broken"
    assert "/nonexistent/a.sock" in event["reason"] or "No such file" in event["reason"]


def test_an_agent_that_cannot_write_its_events_says_so_and_leaves_nothing(
    prepare: Callable[..., Start],
) -> None:
    start = prepare()
    plan = msgspec.structs.replace(start.plan(), events="/proc/nowhere/events")
    start.launch(plan).finish()
    assert start.process.returncode == 4
    assert "cannot write its events" in start.log.read_text()


def test_the_import_of_the_agents_head_stays_light() -> None:
    """Before the weights are read, nothing heavy is imported."""
    code = "import sys, preheat.replica.begun; print(*sys.modules)"
    environment = {"PYTHONPATH": str(SOURCES)}
    loaded = subprocess.check_output([sys.executable, "-c", code], env=environment, text=True)
    heavy = {"asyncio", "msgspec", "h11", "ssl", "pathlib", "typing", "subprocess", "logging"}
    plain = subprocess.check_output(
        [sys.executable, "-c", "import sys; print(*sys.modules)"], env=environment, text=True
    )
    assert heavy & (set(loaded.split()) - set(plain.split())) == set()
