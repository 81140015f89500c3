"""How starts end: orders and signals in every state, drains, orphans, and who reads too slowly."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace
from tests.replica.starts import Start, UnixConnection, eventually, is_alive

Launch = Callable[..., Start]

HANGS = {
    "starting": {"hang_at": "health"},
    "heating": {"hang_at": "prompt"},
    "proving": {"hang_at": "known 1"},
    "ready": {},
}


@pytest.fixture
def orphans(short_dir: Path) -> Iterator[Callable[[], list[int]]]:
    """Pids of what the engine started; killed at the end if the agent did not."""

    def pids() -> list[int]:
        return [int(line) for line in (short_dir / "orphans").read_text().split()]

    yield pids
    for pid in pids():
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def stopped(start: Start) -> list[dict[str, Any]]:
    """The events of a start that ended as ordered."""
    events = start.finish()
    assert start.process.returncode == 0, start.log.read_text()
    assert (events[-1]["event"], events[-1]["state"]) == ("ended", "stopped")
    return events


# ── orders ──


@pytest.mark.parametrize("state", HANGS)
@pytest.mark.parametrize(
    ("number", "order"), [(signal.SIGTERM, "drain ordered"), (signal.SIGINT, "stop ordered")]
)
def test_a_signal_ends_the_start_in_any_state(
    launch: Launch, state: str, number: int, order: str
) -> None:
    start = launch(**HANGS[state])
    start.until(state)
    engine = start.engine_pid()
    start.signal(number)
    assert order in [event["event"] for event in stopped(start)]
    assert not is_alive(engine)


def test_a_signal_ends_a_start_that_is_held_at_warm(launch: Launch) -> None:
    start = launch(plan={"hold_at": "warm"})
    start.until("warm")
    start.signal(signal.SIGTERM)
    assert stopped(start)[-2]["event"] == "drain ordered"


def test_a_signal_ends_a_start_whose_weights_are_being_hashed(launch: Launch) -> None:
    start = launch(plan={"weights_bytes": b"w" * (768 << 20), "weights_sha256": None})
    start.until("loading")
    start.signal(signal.SIGTERM)
    events = stopped(start)
    assert [event["event"] for event in events] == ["spawned", "drain ordered", "ended"]
    assert not start.seen.exists()


def test_a_signal_before_the_loop_runs_is_obeyed_once_it_does(launch: Launch) -> None:
    start = launch()
    # Its engine is forked before it imports what the loop is made of.
    eventually(lambda: bool(children(start.process.pid)))
    start.signal(signal.SIGTERM)
    assert stopped(start)[-2]["event"] == "drain ordered"


def test_an_engine_that_ignores_sigterm_is_killed(launch: Launch) -> None:
    start = launch(ignore_sigterm=True)
    start.until("ready")
    engine = start.engine_pid()
    start.post("/stop")
    stopped(start)
    assert not is_alive(engine)


# ── what the engine leaves behind ──


def test_what_the_engine_started_ends_with_a_stop(
    launch: Launch, short_dir: Path, orphans: Callable[[], list[int]]
) -> None:
    start = launch(orphans=str(short_dir / "orphans"))
    start.until("ready")
    assert all(map(is_alive, orphans()))
    start.post("/stop")
    stopped(start)
    assert not any(map(is_alive, orphans()))


def test_what_the_engine_started_ends_when_the_engine_dies(
    launch: Launch, short_dir: Path, orphans: Callable[[], list[int]]
) -> None:
    start = launch(orphans=str(short_dir / "orphans"), die_at="prompt")
    start.finish()
    assert start.process.returncode == 4
    assert len(orphans()) == 2
    assert not any(map(is_alive, orphans()))


def test_what_the_engine_started_ends_when_it_dies_before_the_agent_listens(
    launch: Launch, short_dir: Path, orphans: Callable[[], list[int]]
) -> None:
    start = launch(orphans=str(short_dir / "orphans"), die_at="start")
    start.finish()
    assert not any(map(is_alive, orphans()))


def test_the_engine_dies_with_an_agent_that_is_killed(launch: Launch) -> None:
    start = launch()
    start.until("ready")
    engine = start.engine_pid()
    start.signal(signal.SIGKILL)
    start.process.wait()
    eventually(lambda: not is_alive(engine))


def test_an_engine_dies_with_an_agent_that_is_killed_while_it_imports(launch: Launch) -> None:
    start = launch(hang_at="start")
    eventually(lambda: bool(children(start.process.pid)))
    (engine,) = children(start.process.pid)
    start.signal(signal.SIGKILL)
    start.process.wait()
    eventually(lambda: not is_alive(engine))


def children(pid: int) -> list[int]:
    with contextlib.suppress(OSError):
        return [int(p) for p in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    return []


def test_the_engine_gets_no_descriptor_but_its_own(launch: Launch) -> None:
    """Not even one that whoever started the agent left inheritable, as shells and make do."""
    read_end, write_end = os.pipe()
    try:
        start = launch(plan={"pass_fds": (write_end,)}, hang_at="start")
        start.until("warm")
        engine = start.engine_pid()
        held = {entry.name: str(entry.readlink()) for entry in Path(f"/proc/{engine}/fd").iterdir()}
        assert set(held) == {"0", "1", "2"}
        assert all(target.startswith("pipe:") for target in held.values())
        assert held["1"] == held["2"] != held["0"]
    finally:
        os.close(read_end)
        os.close(write_end)


def test_the_engine_has_the_agents_environment_and_its_own(prepare: Callable[..., Start]) -> None:
    start = prepare(behaviour={"hang_at": "start"})
    start.environment = {"OF_THE_AGENT": "1", "OF_BOTH": "agent"}
    plan = start.plan()
    launch_plan = replace(plan.launch, environment={"OF_THE_ENGINE": "2", "OF_BOTH": "engine"})
    start.launch(replace(plan, launch=launch_plan)).until("warm")
    environment = Path(f"/proc/{start.engine_pid()}/environ").read_bytes().split(b"\0")
    assert {b"OF_THE_AGENT=1", b"OF_THE_ENGINE=2", b"OF_BOTH=engine"} <= set(environment)


# ── drains ──


@pytest.fixture
def busy(short_dir: Path) -> Path:
    """The file that says how many requests the engine has in flight."""
    file = short_dir / "busy"
    file.write_text("1")
    return file


def draining(launch: Launch, busy: Path, **plan: Any) -> Start:
    start = launch(plan=plan, busy=str(busy))
    start.until("ready")
    start.post("/drain")
    start.until("draining")
    return start


def test_a_drain_waits_for_what_is_in_flight(launch: Launch, busy: Path) -> None:
    start = draining(launch, busy)
    asked = int(start.get("/status")[1]["engine_pid"])
    assert start.get("/ready")[0] == 503
    assert start.get("/routable")[0] == 503
    assert is_alive(asked)
    busy.write_text("0")
    event = stopped(start)[-2]
    assert event["event"] == "drained"
    assert event["in_time"] is True


def test_a_drain_ends_with_its_time(launch: Launch, busy: Path) -> None:
    event = stopped(draining(launch, busy, drain_timeout_s=0.2))[-2]
    assert event["event"] == "drained"
    assert event["in_time"] is False
    assert event["waited_s"] >= 0.2


@pytest.mark.parametrize("how", ["broken", "silent"])
def test_an_engine_too_busy_to_say_what_is_in_flight_is_not_taken_for_idle(
    launch: Launch, busy: Path, how: str
) -> None:
    busy.write_text(how)
    event = stopped(draining(launch, busy, drain_timeout_s=0.3))[-2]
    assert event["in_time"] is False


def test_an_engine_that_does_not_count_its_requests_gets_all_of_the_drains_time(
    prepare: Callable[..., Start],
) -> None:
    start = prepare(drain_timeout_s=0.3)
    plan = start.plan()
    start.launch(replace(plan, launch=replace(plan.launch, in_flight_gauges=())))
    start.until("ready")
    start.post("/drain")
    event = stopped(start)[-2]
    assert event["in_time"] is False
    assert event["waited_s"] >= 0.3


def test_an_order_to_stop_ends_a_drain(launch: Launch, busy: Path) -> None:
    start = draining(launch, busy)
    start.post("/drain")
    start.signal(signal.SIGTERM)
    start.post("/stop")
    assert [event["event"] for event in stopped(start)][-3:] == [
        "drain ordered",
        "stop ordered",
        "ended",
    ]


def test_an_engine_that_dies_while_it_drains_fails_the_start(launch: Launch, busy: Path) -> None:
    start = draining(launch, busy)
    os.kill(start.engine_pid(), signal.SIGKILL)
    events = start.finish()
    assert (events[-2]["event"], events[-2]["state"]) == ("engine exited", "failed")
    assert start.process.returncode == 4


# ── slow readers ──


def test_readers_that_never_read_hold_neither_the_engine_nor_the_end(launch: Launch) -> None:
    start = launch(flood_bytes=8 << 20)
    stalled = []
    for target in ("/events", "/logs"):
        connection = start.connected()
        connection.request("GET", target)
        stalled.append(connection)
    start.until("ready")
    for target in ("/logs",) * 20:
        connection = UnixConnection(start.agent_socket)
        connection.request("GET", target)
        stalled.append(connection)
    status, log = start.get("/logs")
    assert status == 200
    assert len(log) <= 256 << 10
    assert max(map(len, log.splitlines())) <= 8192
    assert start.get("/status")[1]["log_lines_dropped"] > 8 << 20 >> 10
    start.post("/stop")
    stopped(start)
    for connection in stalled:
        connection.close()


def test_an_agent_ends_with_the_log_of_its_engine_kept_to_the_last_line(launch: Launch) -> None:
    start = launch(say=["one", "", "two ✅ \x1b[31m"], die_at="weights", code=5)
    events = start.finish()
    assert "two ✅" in events[-1]["reason"]
