"""`preheat serve` from outside: what a user who types it sees."""

from __future__ import annotations

import hashlib
import json
import os
import signal
from pathlib import Path

import pytest
from tests.system.served import MODEL, Served, free_port, wait_until


def test_the_default_model_answers_and_the_answer_names_its_start(preheat: Served) -> None:
    status, headers, answer = preheat.chat()
    assert status == 200
    assert answer["model"] == MODEL
    assert headers["x-preheat-replica"] == preheat.replica()["start_id"]


def test_status_says_ready_in_its_exit_code_and_its_table(preheat: Served) -> None:
    shown = preheat.cli("status")
    assert shown.returncode == 0
    assert "ready" in shown.stdout
    assert MODEL in shown.stdout


def test_models_lists_the_model(preheat: Served) -> None:
    assert f"{MODEL}  ready" in preheat.cli("models").stdout
    assert json.loads(preheat.cli("models", "list", "--json").stdout)[0]["name"] == MODEL


def test_heating_an_unknown_model_names_the_known(preheat: Served) -> None:
    answer = preheat.cli("models", "heat", "nope")
    assert answer.returncode == 1
    assert MODEL in answer.stderr


def test_a_second_preheat_in_the_same_directory_is_refused(preheat: Served) -> None:
    second = preheat.cli("serve", "--port", str(free_port()))
    assert second.returncode == 7
    assert "another preheat" in second.stderr
    assert preheat.chat()[0] == 200


def test_a_port_in_use_is_refused_before_anything_starts(preheat: Served) -> None:
    other = Served()
    other._argv[-1] = str(preheat.port)
    assert other.start().ended() == 7
    assert f"port {preheat.port}" in other.text()
    assert not (other.state / "logs" / "envoy.log").exists()
    other.clean()


def test_the_sockets_are_the_users_alone(preheat: Served) -> None:
    sockets = [p for p in preheat.runtime.rglob("*") if p.is_socket()]
    assert {p.name for p in sockets} >= {"admin.sock", "agent.sock", "engine.sock", "probe.sock"}
    assert {oct(p.stat().st_mode & 0o777) for p in sockets} == {"0o600"} | (
        # Envoy makes its admin socket itself; the directory around it is 0700.
        {oct((preheat.runtime / "envoy-admin.sock").stat().st_mode & 0o777)}
    )
    assert oct(preheat.runtime.stat().st_mode & 0o777) == "0o700"


def test_only_the_gateways_port_is_open(preheat: Served) -> None:
    inodes = {
        str(link.readlink())
        for pid in preheat.descendants()
        for link in Path(f"/proc/{pid}/fd").iterdir()
    }
    listening = set()
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/net/{table}").read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == "0A" and f"socket:[{fields[9]}]" in inodes:
                listening.add(fields[1])
    assert listening == {f"0100007F:{preheat.port:04X}"}


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_one_signal_drains_and_leaves_nothing_behind(number: int) -> None:
    preheat = Served().start().wait_ready()
    assert preheat.stop(number) == 0
    assert preheat.descendants() == []
    assert [p.name for p in preheat.runtime.iterdir()] == ["lock"]
    assert "Traceback" not in preheat.text()
    preheat.clean()


def test_a_signal_while_it_comes_up_stops_it_cleanly() -> None:
    preheat = Served().start()
    wait_until(lambda: "bringing" in preheat.text(), "first line")
    assert preheat.stop(signal.SIGINT) == 0
    assert preheat.descendants() == []
    assert "Traceback" not in preheat.text()
    preheat.clean()


def test_a_second_signal_stops_at_once() -> None:
    preheat = Served().start().wait_ready()
    assert preheat.process is not None
    # An engine that cannot be drained: it does not run any more.
    os.kill(preheat.pid_of("llamacpp_host"), signal.SIGSTOP)
    os.kill(preheat.pid_of("preheat-control:"), signal.SIGSTOP)
    preheat.process.send_signal(signal.SIGINT)
    preheat.process.send_signal(signal.SIGTERM)
    assert preheat.process.wait(timeout=10) == 130
    assert preheat.descendants() == []
    preheat.clean()


def test_a_killed_supervisor_takes_everything_with_it() -> None:
    preheat = Served().start().wait_ready()
    assert preheat.process is not None
    preheat.process.kill()
    preheat.process.wait()
    wait_until(lambda: preheat.descendants() == [], "nothing lives", timeout_s=5)
    # What it left on disk does not hinder the next one.
    preheat.start().wait_ready()
    assert preheat.chat()[0] == 200
    assert preheat.stop() == 0
    preheat.clean()


def test_a_killed_engine_comes_back_as_another_start() -> None:
    with Served() as preheat:
        first = preheat.replica()
        os.kill(preheat.pid_of("llamacpp_host"), signal.SIGKILL)
        wait_until(
            lambda: preheat.replica()["start_id"] not in (None, first["start_id"]), "another start"
        )
        wait_until(lambda: preheat.get("/ready")[0] == 200, "ready again")
        assert preheat.chat()[0] == 200
        assert "SIGKILL" in preheat.replica()["last_reason"]


def test_a_killed_envoy_is_started_again() -> None:
    with Served() as preheat:
        os.kill(preheat.pid_of("_bin/envoy"), signal.SIGKILL)
        wait_until(
            lambda: preheat.get("/ready")[0] == 200 and preheat.chat()[0] == 200, "serving again"
        )
        assert preheat.status()["gateway"]["restarts"] == 1


def test_a_flipped_bit_stops_the_start_with_the_files_name(
    tmp_path: Path, model_file: Path
) -> None:
    damaged = tmp_path / "model.gguf"
    data = bytearray(model_file.read_bytes())
    data[len(data) // 2] ^= 1
    damaged.write_bytes(data)
    spec = tmp_path / "preheat.yaml"
    good = hashlib.sha256(model_file.read_bytes()).hexdigest()
    source = f"{{uri: {damaged}, sha256: {good}}}"
    spec.write_text(f"models:\n  - name: m\n    versions:\n      - source: {source}\n")
    preheat = Served(spec).start()
    assert preheat.ended() == 3
    assert str(damaged) in preheat.text()
    assert good in preheat.text()
    assert not any(e["state"] == "starting" for e in preheat.events())
    preheat.clean()


def test_a_spec_with_an_error_changes_nothing_and_says_where(tmp_path: Path) -> None:
    spec = tmp_path / "preheat.yaml"
    spec.write_text("models:\n  - name: m\n    versions:\n      - sauce: {uri: x}\n")
    preheat = Served(spec).start()
    assert preheat.ended() == 2
    assert f"{spec}:4" in preheat.text()
    assert "source" in preheat.text()
    assert not (preheat.state / "logs" / "envoy.log").exists()
    preheat.clean()


def test_listening_beyond_loopback_needs_keys_and_tls_or_the_flag(
    tmp_path: Path, model_file: Path
) -> None:
    spec = tmp_path / "preheat.yaml"
    models = f"models:\n  - name: m\n    versions:\n      - source: {{uri: {model_file}}}\n"
    spec.write_text(f"listen: {{host: 0.0.0.0}}\n{models}")
    preheat = Served(spec).start()
    assert preheat.ended() == 2
    assert "--insecure-listen" in preheat.text()
    preheat.clean()
