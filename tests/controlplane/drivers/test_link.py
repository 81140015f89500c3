from __future__ import annotations

import errno
import json
import os
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from preheat import supervisor
from preheat.controlplane.drivers.link import MESSAGE_MAX_BYTES, SupervisorLink

LOG = Path("/log")


@pytest.fixture
def ends() -> Iterator[tuple[SupervisorLink, socket.socket]]:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    # As the supervisor does.
    theirs.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4 * MESSAGE_MAX_BYTES)
    link = SupervisorLink(os.dup(theirs.fileno()), withheld=["A_KEY"])
    theirs.close()
    with ours:
        yield link, ours
    link._socket.close()


def test_both_ends_agree_on_the_longest_message() -> None:
    assert MESSAGE_MAX_BYTES == supervisor.MESSAGE_MAX_BYTES


def test_it_asks_for_processes_without_the_secrets(
    ends: tuple[SupervisorLink, socket.socket],
) -> None:
    link, supervisor_end = ends
    link.spawn("a@1", ("/bin/true", "x"), log=LOG, env={"B": "b"})
    assert json.loads(supervisor_end.recv(MESSAGE_MAX_BYTES)) == {
        "spawn": "a@1",
        "argv": ["/bin/true", "x"],
        "env": {"B": "b"},
        "unset": ["A_KEY"],
        "log": "/log",
    }


def test_a_process_has_no_input_unless_it_is_asked_for(
    ends: tuple[SupervisorLink, socket.socket],
) -> None:
    link, supervisor_end = ends
    link.spawn("a", ("/bin/true",), log=LOG)
    assert "stdin" not in json.loads(supervisor_end.recv(MESSAGE_MAX_BYTES))
    link.spawn("a", ("/bin/true",), log=LOG, stdin=Path("/pipe"))
    assert json.loads(supervisor_end.recv(MESSAGE_MAX_BYTES))["stdin"] == "/pipe"


def test_it_says_that_it_answers(ends: tuple[SupervisorLink, socket.socket]) -> None:
    link, supervisor_end = ends
    link.say_alive()
    assert json.loads(supervisor_end.recv(MESSAGE_MAX_BYTES)) == {"alive": True}


def test_it_hears_all_messages_that_wait(ends: tuple[SupervisorLink, socket.socket]) -> None:
    link, supervisor_end = ends
    assert link.receive() == []
    supervisor_end.send(b'{"spawned": "a", "pid": 1}')
    supervisor_end.send(b'{"order": "stop"}')
    assert link.receive() == [{"spawned": "a", "pid": 1}, {"order": "stop"}]


def test_what_the_supervisor_could_not_read_whole_is_not_sent(
    ends: tuple[SupervisorLink, socket.socket],
) -> None:
    link, supervisor_end = ends
    with pytest.raises(OSError, match="too long") as caught:
        link.spawn("a@1", ("/bin/true", "x" * MESSAGE_MAX_BYTES), log=LOG)
    assert caught.value.errno == errno.E2BIG
    with pytest.raises(BlockingIOError):
        supervisor_end.recv(1, socket.MSG_DONTWAIT)


def test_the_longest_message_fits(ends: tuple[SupervisorLink, socket.socket]) -> None:
    link, supervisor_end = ends
    link.kill("", 9)
    overhead = len(supervisor_end.recv(MESSAGE_MAX_BYTES))
    link.kill("x" * (MESSAGE_MAX_BYTES - overhead), 9)
    assert len(supervisor_end.recv(2 * MESSAGE_MAX_BYTES)) == MESSAGE_MAX_BYTES


def test_a_supervisor_that_is_gone_is_an_error(ends: tuple[SupervisorLink, socket.socket]) -> None:
    link, supervisor_end = ends
    supervisor_end.close()
    with pytest.raises(ConnectionError):
        link.receive()
