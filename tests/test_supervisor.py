"""A real supervisor over tiny Python programs, seen from outside."""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from preheat.supervisor import DEATHS_MAX, MESSAGE_MAX_BYTES

SUPERVISOR = """
import json, os, sys
from preheat.supervisor import Supervisor
program = sys.argv[1:]

def control_plane(fd, running):
    if "crash" in program and running is None:
        raise RuntimeError("a defect")
    os.set_inheritable(fd, True)
    os.environ["RUNNING"] = json.dumps(running)
    os.execv(sys.executable, [sys.executable, "-c", program[0], str(fd), *program[1:]])

sys.exit(Supervisor(hang_s=float(os.environ.get("HANG_S", "60"))).run(control_plane))
"""
# A control plane: passes lines of its standard input on as messages, and messages on as lines.
RELAY = """
import json, os, select, signal, socket, sys
link = socket.socket(fileno=int(sys.argv[1]))
told = {"control plane": os.getpid(), "running": json.loads(os.environ["RUNNING"])}
print(json.dumps(told), flush=True)
rest = b""
while True:
    for ready in select.select([link, 0], [], [])[0]:
        if ready is link:
            packet = link.recv(1 << 20)
            print(packet.decode(), flush=True)
            if b'"order"' in packet and "obey" in sys.argv:
                sys.exit(0)
            if b'"question"' in packet and "answer" in sys.argv:
                link.send(b'{"alive": true}')
            continue
        *lines, rest = (rest + os.read(0, 1 << 20)).split(b"\\n")
        for line in lines:
            message = json.loads(line)
            if "exit" in message:
                sys.exit(message["exit"])
            link.send(line)
            if "repeat" in message:
                for _ in range(message["repeat"]):
                    link.send(line)
                print(json.dumps("repeated"), flush=True)
                os.kill(os.getpid(), signal.SIGSTOP)
"""
SLEEPER = "import time; time.sleep(1000)"
STUBBORN = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(1000)"
# Leaves a grandchild in a group and session of its own.
PARENT = """
import subprocess, sys, time
sleeps = "import time; time.sleep(1000)"
child = subprocess.Popen([sys.executable, "-c", sleeps], start_new_session=True)
print(child.pid, flush=True)
time.sleep(float(sys.argv[1]))
"""
PATIENCE_S = 20.0


def eventually(condition: Callable[[], Any], what: str) -> Any:
    end_s = time.monotonic() + PATIENCE_S
    while not (value := condition()):
        assert time.monotonic() < end_s, what
        time.sleep(0.002)
    return value


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


class Run:
    """A supervisor whose control plane does what the test says."""

    def __init__(self, log: Path, *arguments: str, ignore_hangup: bool = False) -> None:
        self.log = log
        self.process = subprocess.Popen(
            [sys.executable, "-c", SUPERVISOR, RELAY, *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            bufsize=0,
            preexec_fn=(lambda: signal.signal(signal.SIGHUP, signal.SIG_IGN) and None)
            if ignore_hangup
            else None,
        )
        self._rest = b""
        self.pids: list[int] = []
        self.running: list[str] | None = None
        """What the control plane was told that the one before it had left."""
        self.hear_control_plane()

    def say(self, message: dict[str, Any]) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(message).encode() + b"\n")

    def hear(self) -> Any:
        """The next message that the supervisor sent."""
        assert self.process.stdout is not None
        while b"\n" not in self._rest:
            assert select.select([self.process.stdout], [], [], PATIENCE_S)[0], "no message came"
            chunk = os.read(self.process.stdout.fileno(), 1 << 20)
            assert chunk, "it has ended"
            self._rest += chunk
        line, _, self._rest = self._rest.partition(b"\n")
        return json.loads(line)

    def hear_control_plane(self) -> None:
        """A control plane has begun."""
        told = self.hear()
        self.control_plane: int = told["control plane"]
        self.running = told["running"]
        self.pids.append(self.control_plane)

    def spawn(self, name: str, program: str, *arguments: str, **more: Any) -> int:
        argv = [sys.executable, "-c", program, *arguments]
        self.say(
            {"spawn": name, "argv": argv, "env": {}, "unset": [], "log": str(self.log), **more}
        )
        answer = self.hear()
        assert answer["spawned"] == name
        self.pids.append(answer["pid"])
        return int(answer["pid"])

    def grandchild(self) -> int:
        """The process whose number a child has logged."""
        text = eventually(
            lambda: self.log.exists() and self.log.read_text().strip(), "the grandchild started"
        )
        self.pids.append(int(text))
        return int(text)

    def ends(self) -> tuple[int, str]:
        """Its exit code and what it said on standard error; nothing of it lives then."""
        code = self.process.wait(PATIENCE_S)
        assert self.process.stderr is not None
        said = self.process.stderr.read().decode()
        assert [pid for pid in self.pids if alive(pid)] == []
        return code, said


@pytest.fixture
def run(tmp_path: Path) -> Iterator[Callable[..., Run]]:
    made: list[Run] = []

    def make(*arguments: str, **options: Any) -> Run:
        made.append(Run(tmp_path / "log", *arguments, **options))
        return made[-1]

    yield make
    for one in made:
        one.process.kill()
        one.process.wait()
        for pid in one.pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        for stream in (one.process.stdin, one.process.stdout, one.process.stderr):
            assert stream is not None
            stream.close()


@pytest.mark.parametrize("code", [0, 3, 7])
def test_its_exit_code_is_the_control_planes(run: Callable[..., Run], code: int) -> None:
    one = run()
    one.say({"exit": code})
    assert one.ends() == (code, "")


def test_the_end_of_a_process_is_reported_with_its_status(run: Callable[..., Run]) -> None:
    one = run()
    one.spawn("quick", "raise SystemExit(5)")
    ended = one.hear()
    assert ended["exited"] == "quick"
    assert os.waitstatus_to_exitcode(ended["status"]) == 5


def test_what_a_process_says_goes_to_its_log(run: Callable[..., Run]) -> None:
    one = run()
    one.log.write_text("before\n")
    one.spawn("speaks", "import sys; print('out', flush=True); sys.stderr.write('err\\n')")
    one.hear()
    assert one.log.read_text() == "before\nout\nerr\n"


def test_a_process_has_the_input_it_was_given_for_both_ways(
    run: Callable[..., Run], tmp_path: Path
) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    one = run()
    one.spawn("talks", "import os; os.write(0, b'own'); print(os.read(0, 9))", stdin=str(pipe))
    one.hear()
    assert one.log.read_text() == "b'own'\n"


def test_a_process_is_signalled_by_name(run: Callable[..., Run]) -> None:
    one = run()
    one.spawn("sleeps", SLEEPER)
    one.say({"kill": "somebody else", "signal": int(signal.SIGKILL)})
    one.say({"kill": "sleeps", "signal": int(signal.SIGTERM)})
    assert one.hear() == {"exited": "sleeps", "status": int(signal.SIGTERM)}


def test_a_program_that_cannot_be_run_is_reported(run: Callable[..., Run]) -> None:
    one = run()
    message = {"spawn": "none", "argv": ["/does/not/exist"], "env": {}, "unset": []}
    one.say({**message, "log": str(one.log)})
    assert "/does/not/exist" in one.hear()["error"]
    one.say({**message, "argv": [sys.executable], "log": "/does/not/exist.log"})
    assert one.hear()["failed"] == "none"


def test_variables_that_hold_secrets_are_withheld(
    run: Callable[..., Run], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TEST_SECRET", "s3cret")
    one = run()
    program = "import os; print(os.environ.get('TEST_SECRET'), os.environ['MORE'], flush=True)"
    one.spawn("looks", program, unset=["TEST_SECRET"], env={"MORE": "more"})
    one.hear()
    assert one.log.read_text() == "None more\n"


def test_what_a_dead_process_leaves_in_its_group_goes_with_it(run: Callable[..., Run]) -> None:
    one = run()
    program = PARENT.replace(", start_new_session=True", "")
    one.spawn("parent", program, "0")
    left = one.grandchild()
    assert one.hear()["exited"] == "parent"
    eventually(lambda: not alive(left), "the rest of the group is gone")


def test_everything_below_ends_with_it_orphans_too(run: Callable[..., Run]) -> None:
    one = run()
    one.spawn("stubborn", STUBBORN)
    one.spawn("parent", PARENT, "0")
    one.grandchild()
    assert one.hear()["exited"] == "parent"
    one.say({"exit": 0})
    assert one.ends() == (0, "")


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_the_first_signal_is_an_order_to_stop(run: Callable[..., Run], number: int) -> None:
    one = run("obey")
    one.process.send_signal(number)
    assert one.hear() == {"order": "stop"}
    assert one.ends() == (0, "")


def test_the_second_signal_ends_everything_at_once(run: Callable[..., Run]) -> None:
    one = run()
    one.spawn("stubborn", STUBBORN)
    one.process.send_signal(signal.SIGINT)
    assert one.hear() == {"order": "stop"}
    one.process.send_signal(signal.SIGTERM)
    assert one.ends() == (130, "")


def test_a_closing_terminal_that_says_so_twice_is_one_order(run: Callable[..., Run]) -> None:
    one = run()
    one.process.send_signal(signal.SIGHUP)
    assert one.hear() == {"order": "stop"}
    one.process.send_signal(signal.SIGHUP)
    # It still obeys.
    one.spawn("quick", "")
    one.hear()
    one.say({"exit": 0})
    assert one.ends() == (0, "")


def test_a_closing_terminal_does_not_end_what_was_started_with_nohup(
    run: Callable[..., Run],
) -> None:
    one = run(ignore_hangup=True)
    one.process.send_signal(signal.SIGHUP)
    one.spawn("quick", "")
    assert "exited" in one.hear()


def test_a_control_plane_that_is_killed_is_followed_by_one_that_is_told_what_runs(
    run: Callable[..., Run],
) -> None:
    one = run()
    first = one.running
    assert first is None
    pids = [one.spawn(name, SLEEPER) for name in ("a", "b")]
    one.spawn("over", "")
    assert one.hear()["exited"] == "over"
    for _ in range(3):
        os.kill(one.control_plane, signal.SIGKILL)
        one.hear_control_plane()
        assert one.running == ["a", "b"]
        assert all(alive(pid) for pid in pids)
    one.say({"kill": "a", "signal": signal.SIGKILL})
    assert one.hear() == {"exited": "a", "status": signal.SIGKILL}
    one.say({"exit": 0})
    code, said = one.ends()
    assert code == 0
    assert said.count("the control plane died (SIGKILL); it is started again") == 3


def test_one_that_dies_again_and_again_ends_everything(run: Callable[..., Run]) -> None:
    one = run()
    one.spawn("sleeps", SLEEPER)
    for _ in range(DEATHS_MAX - 1):
        os.kill(one.control_plane, signal.SIGKILL)
        one.hear_control_plane()
    os.kill(one.control_plane, signal.SIGKILL)
    code, said = one.ends()
    assert code == 70
    assert said.endswith(f"died (SIGKILL), {DEATHS_MAX} times in a row; all was stopped\n")


def test_a_defect_is_shown_and_followed_by_another_control_plane(run: Callable[..., Run]) -> None:
    one = run("crash")
    assert one.running == []
    one.say({"exit": 3})
    code, said = one.ends()
    assert code == 3
    assert "RuntimeError: a defect" in said
    assert "(a defect, see above); it is started again" in said


def test_an_order_to_stop_reaches_the_next_control_plane_too(run: Callable[..., Run]) -> None:
    one = run("obey")
    os.kill(one.control_plane, signal.SIGSTOP)
    one.process.send_signal(signal.SIGTERM)
    os.kill(one.control_plane, signal.SIGKILL)
    code, said = one.ends()
    assert (code, said.endswith("all was stopped\n")) == (70, True)
    other = run("obey")
    os.kill(other.control_plane, signal.SIGKILL)
    other.hear_control_plane()
    other.process.send_signal(signal.SIGTERM)
    assert other.hear() == {"order": "stop"}
    assert other.ends()[0] == 0


def test_one_that_hangs_is_killed_once_it_has_said_that_it_answers(
    run: Callable[..., Run], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HANG_S", "0.4")
    one = run()
    pid = one.spawn("sleeps", SLEEPER)
    one.say({"alive": True})
    assert one.hear() == {"question": "alive"}
    hung = one.control_plane
    os.kill(hung, signal.SIGSTOP)
    while one.control_plane == hung:
        with contextlib.suppress(KeyError):
            one.hear_control_plane()
    assert one.running == ["sleeps"]
    assert alive(pid)
    # The next one has not said so yet, and may take its time.
    os.kill(one.control_plane, signal.SIGSTOP)
    assert one.process.stdout is not None
    assert not select.select([one.process.stdout], [], [], 1.0)[0]
    os.kill(one.control_plane, signal.SIGCONT)
    one.say({"exit": 0})
    code, said = one.ends()
    assert code == 0
    assert "did not answer for 0.4 s and is killed" in said


def test_one_that_answers_is_asked_again_and_lives(
    run: Callable[..., Run], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HANG_S", "0.4")
    one = run("answer")
    one.say({"alive": True})
    assert [one.hear() for _ in range(8)] == [{"question": "alive"}] * 8
    one.say({"exit": 0})
    assert one.ends() == (0, "")


def test_a_killed_supervisor_takes_everything_with_it(run: Callable[..., Run]) -> None:
    one = run()
    one.spawn("stubborn", STUBBORN)
    one.process.kill()
    one.process.wait()
    eventually(lambda: not any(alive(pid) for pid in one.pids), "nothing lives")


def test_a_control_plane_that_stands_still_can_be_ended(run: Callable[..., Run]) -> None:
    """Its socket is full: what it cannot be told must not hold up the supervisor."""
    one = run()
    one.say(
        {
            "spawn": "none",
            "argv": [sys.executable],
            "env": {},
            "unset": [],
            "log": "/does/not/exist.log",
            "repeat": 10_000,
        }
    )
    while one.hear() != "repeated":
        pass
    one.process.send_signal(signal.SIGTERM)
    one.process.send_signal(signal.SIGINT)
    assert one.ends()[0] == 130


def test_many_messages_in_both_directions_lose_none(run: Callable[..., Run]) -> None:
    one = run()
    for number in range(40):
        one.say(
            {
                "spawn": f"p{number}",
                "argv": [sys.executable, "-S", "-c", ""],
                "env": {},
                "unset": [],
                "log": str(one.log),
            }
        )
    heard = [one.hear() for _ in range(80)]
    assert {m["exited"] for m in heard if "exited" in m} == {f"p{n}" for n in range(40)}


def test_a_long_message_arrives_whole(run: Callable[..., Run]) -> None:
    one = run()
    text = "x" * (MESSAGE_MAX_BYTES // 2 - 4096)
    # Arguments may each be 128 KiB.
    parts = [text[: 100 << 10], text[100 << 10 :]]
    one.spawn("long", "import sys; print(sum(map(len, sys.argv[1:])), flush=True)", *parts)
    one.hear()
    assert one.log.read_text().strip() == str(len(text))
