from __future__ import annotations

import http.client
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

import processes
from native_tools import Stub, run_load, start_stub
from processes import BenchError, Process, free_port, parse_stat, settled_cpu_s, usage, wait_until

CHUNKS = 3


@pytest.fixture(scope="module")
def stub(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stub]:
    directory = tmp_path_factory.mktemp("b")
    started = start_stub(directory, chunks=CHUNKS, interval_ms=2)
    with started.process:
        yield started


@pytest.mark.parametrize("over", ["tcp", "unix"])
def test_unary_requests_all_succeed_over_tcp_and_unix_sockets(stub: Stub, over: str) -> None:
    to = str(stub.port) if over == "tcp" else f"unix:{stub.socket}"
    seen = run_load(to, connections=8, requests=200)
    assert (seen["issued"], seen["completed"], seen["errors"]) == (200, 200, 0)
    assert seen["ttfb_us"] is not None
    assert 0 < seen["ttfb_us"]["p50"] <= seen["ttfb_us"]["p99"] <= seen["ttfb_us"]["max"]


def test_streams_arrive_whole_with_every_event(stub: Stub) -> None:
    seen = run_load(str(stub.port), stream=1, connections=5, requests=20, expect_events=stub.events)
    assert (seen["completed"], seen["errors"]) == (20, 0)
    assert seen["events"] == 20 * (CHUNKS + 2)
    assert seen["ttfb_us"] is not None
    assert seen["total_us"] is not None
    assert seen["total_us"]["p50"] > seen["ttfb_us"]["p50"]


def test_a_stream_with_fewer_events_than_expected_is_an_error(stub: Stub) -> None:
    seen = run_load(
        str(stub.port), stream=1, connections=1, requests=2, expect_events=stub.events + 1
    )
    assert seen["errors_by_kind"] == {"incomplete": 2}


def test_a_duration_ends_the_load_and_leaves_the_warmup_out(stub: Stub) -> None:
    seen = run_load(str(stub.port), connections=2, duration_ms=60, warmup_ms=40)
    assert 0 < seen["measured"] < seen["completed"] == seen["issued"]


def test_a_closed_port_is_a_connect_error() -> None:
    seen = run_load(str(free_port()), connections=3, requests=3)
    assert seen["errors_by_kind"] == {"connect": 3}
    assert seen["ttfb_us"] is None


ANSWERS = {
    "status_5xx": b"HTTP/1.1 503 x\r\ncontent-length: 2\r\n\r\nno",
    "status_4xx": b"HTTP/1.1 429 x\r\ncontent-length: 0\r\n\r\n",
    "malformed": b"nonsense that is no HTTP at all\r\n\r\n",
    "closed": b"HTTP/1.1 200 x\r\ncontent-length: 9\r\n\r\nhalf",
    "timeout": b"",
}


@pytest.mark.parametrize("kind", ANSWERS)
def test_each_kind_of_bad_answer_is_counted_under_its_name(kind: str) -> None:
    ended = threading.Event()
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def answer_once() -> None:
            connection, _ = listener.accept()
            with connection:
                connection.recv(65536)
                connection.sendall(ANSWERS[kind])
                if kind == "timeout":
                    ended.wait(10)

        thread = threading.Thread(target=answer_once)
        thread.start()
        seen = run_load(str(listener.getsockname()[1]), connections=1, requests=1, timeout_ms=200)
        ended.set()
        thread.join()
    assert seen["errors_by_kind"] == {kind: 1}


def test_the_stub_streams_usage_only_when_asked(stub: Stub) -> None:
    def stream(extra: str) -> str:
        connection = http.client.HTTPConnection("127.0.0.1", stub.port, timeout=5)
        body = '{"model":"bench","messages":[],"stream": true' + extra + "}"
        connection.request("POST", "/v1/chat/completions", body)
        text = connection.getresponse().read().decode()
        connection.close()
        return text

    plain, asked = stream(""), stream(',"stream_options":{"include_usage":true}')
    assert plain.endswith("data: [DONE]\n\n")
    assert plain.count("data: ") == CHUNKS + 2
    assert '"usage"' not in plain
    assert '"choices":[],"usage"' in asked


@pytest.mark.parametrize(
    ("path", "status"), [("/health", 200), ("/v1/models", 200), ("/nothing", 404)]
)
def test_the_stub_answers_what_gateways_ask_upstreams(stub: Stub, path: str, status: int) -> None:
    connection = http.client.HTTPConnection("127.0.0.1", stub.port, timeout=5)
    connection.request("GET", path)
    response = connection.getresponse()
    response.read()
    connection.close()
    assert response.status == status


def test_a_process_name_with_spaces_and_parentheses_does_not_shift_its_figures() -> None:
    rest = "S 7 " + " ".join(str(n) for n in range(5, 53))
    assert parse_stat(f"42 (a) b (c) {rest}") == parse_stat(f"42 (plain) {rest}") == (7, 62, 24)


def test_cpu_and_memory_of_grandchildren_count(tmp_path: Path) -> None:
    burn = "import time\nwhile time.process_time() < .15: pass\nprint('burnt', flush=True); input()"
    code = (
        f"import subprocess, sys\nchild = subprocess.Popen([sys.executable, '-c', {burn!r}], "
        "stdin=subprocess.PIPE)\nchild.wait()"
    )
    with Process([sys.executable, "-c", code], log=tmp_path / "log") as process:
        wait_until(
            lambda: "burnt" in process.log.read_text(), "burner", process=process, limit_s=30
        )
        assert settled_cpu_s([process.pid], quiet_s=0.01) >= 0.15
        _, family_bytes = usage([process.pid])
        own_bytes = (
            parse_stat(Path(f"/proc/{process.pid}/stat").read_text())[2] * processes.PAGE_BYTES
        )
        assert family_bytes > own_bytes


def test_stopping_a_process_ends_its_whole_group_even_what_ignores_sigterm(tmp_path: Path) -> None:
    stubborn = "trap '' TERM; echo $$; exec sleep 600"
    code = f"import subprocess, time\nsubprocess.Popen(['sh', '-c', {stubborn!r}])\ntime.sleep(600)"
    process = Process([sys.executable, "-c", code], log=tmp_path / "log")
    wait_until(lambda: process.log.read_text().strip() != "", "child", process=process, limit_s=30)
    child = int(process.log.read_text())
    process.stop()
    assert _is_gone(child, tmp_path)


def test_a_process_dies_with_its_starter(tmp_path: Path) -> None:
    bench = str(Path(processes.__file__).parent)
    code = (
        f"import sys, os; sys.path.insert(0, {bench!r})\nfrom pathlib import Path\n"
        "from processes import Process\n"
        f"p = Process(['sleep', '600'], log=Path({str(tmp_path / 'log')!r}))\n"
        "print(p.pid, flush=True)\nos.kill(os.getpid(), 9)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    child = int(done.stdout)
    assert _is_gone(child, tmp_path)


def test_a_process_that_ended_is_reported_with_its_last_words(tmp_path: Path) -> None:
    process = Process(["sh", "-c", "echo why it failed >&2; exit 3"], log=tmp_path / "log")
    with pytest.raises(BenchError, match=r"ended with 3:\nwhy it failed"):
        wait_until(lambda: False, "nothing", process=process, limit_s=10)


def _is_gone(pid: int, directory: Path) -> bool:
    """Waits a while: a killed process takes a moment to go."""
    with Process(["sleep", "600"], log=directory / "witness") as witness:
        wait_until(lambda: not _runs(pid), f"the end of {pid}", process=witness, limit_s=10)
    return True


def _runs(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] not in "ZX"
    except (FileNotFoundError, ProcessLookupError):
        return False
