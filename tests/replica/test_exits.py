from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from preheat.replica.engines import llamacpp_host
from preheat.replica.exits import BAD_FILE_EXIT, Surroundings, explain, oom_kill_count

QUIET = Surroundings(ordered=False, oom_kills=0, last_lines=())


def around(*lines: str, ordered: bool = False, oom_kills: int = 0) -> Surroundings:
    return Surroundings(ordered=ordered, oom_kills=oom_kills, last_lines=lines)


def status_of(code: str) -> int:
    """The wait status of a real process that ran this."""
    process = subprocess.Popen([sys.executable, "-IS", "-c", code])
    _, status = os.waitpid(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    return status


@pytest.mark.parametrize(
    ("code", "surroundings", "expected"),
    [
        ("import os; os._exit(7)", QUIET, "it ended by itself with exit code 7"),
        ("import os; os._exit(0)", QUIET, "it ended by itself with exit code 0"),
        (
            "import os; os._exit(1)",
            around("loading", "CUDA error: no device", "bye"),
            "it ended by itself with exit code 1; it said: CUDA error: no device",
        ),
        (
            "import os; os._exit(1)",
            around("so far so good", ""),
            "it ended by itself with exit code 1; it said: so far so good",
        ),
        (
            "import os; os._exit(3)",
            around("0.1 I begin", "0.2 E magic is wrong", "0.3 E failed to load"),
            "it could not load the model; it said: magic is wrong",
        ),
        (
            "import os; os._exit(3)",
            around("the model could not be loaded: no"),
            "it could not load the model; it said: the model could not be loaded: no",
        ),
        ("import os; os.kill(os.getpid(), 11)", QUIET, "it crashed (SIGSEGV, Segmentation fault)"),
        (
            "import os; os.abort()",
            around("terminate called: std::bad_alloc, out of memory"),
            "it crashed (SIGABRT, Aborted); it said: terminate called: std::bad_alloc, "
            "out of memory",
        ),
        (
            "import os; os.kill(os.getpid(), 9)",
            QUIET,
            "somebody killed it (SIGKILL); the kernel counted no kill for memory",
        ),
        (
            "import os; os.kill(os.getpid(), 9)",
            around(oom_kills=1),
            "the kernel killed it: out of memory (SIGKILL, and its count of such kills rose)",
        ),
        ("import os; os.kill(os.getpid(), 15)", around(ordered=True), "it was stopped (SIGTERM)"),
        ("import os; os.kill(os.getpid(), 9)", around(ordered=True), "it was stopped (SIGKILL)"),
        ("import os; os._exit(0)", around(ordered=True), "it was stopped (exit code 0)"),
    ],
)
def test_an_end_is_explained(code: str, surroundings: Surroundings, expected: str) -> None:
    assert explain(status_of(code), surroundings) == expected


@given(
    st.one_of(st.integers(0, 255).map(lambda code: code << 8), st.integers(1, signal.NSIG - 1)),
    st.booleans(),
    st.integers(0, 2),
    st.lists(st.text(max_size=20), max_size=3),
)
def test_every_status_has_an_explanation(
    status: int, ordered: bool, oom_kills: int, lines: list[str]
) -> None:
    assert explain(status, around(*lines, ordered=ordered, oom_kills=oom_kills)).startswith(
        ("it ", "the kernel ", "somebody ")
    )


def test_what_an_engine_said_is_cut() -> None:
    assert len(explain(1 << 8, around("error " + "x" * 10_000))) < 400


def test_the_host_says_bad_file_with_the_code_that_is_understood() -> None:
    assert llamacpp_host.BAD_FILE_EXIT == BAD_FILE_EXIT


# ── the kernel's count of kills for memory ──


def kernel(tmp_path: Path, membership: str, files: dict[str, str]) -> tuple[Path, Path]:
    """A machine whose ``/proc`` and control groups hold these files."""
    proc, cgroups = tmp_path / "proc", tmp_path / "cgroup"
    for file, text in {"proc/self/cgroup": membership, **files}.items():
        (tmp_path / file).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / file).write_text(text)
    return proc, cgroups


MACHINE_WIDE = {"proc/vmstat": "nr_free_pages 1\noom_kill 5\n"}
V2 = "low 0\nhigh 0\nmax 4\noom 2\noom_kill {}\noom_group_kill 9\n"
V1 = "oom_kill_disable 0\nunder_oom 0\noom_kill {}\n"


@pytest.mark.parametrize(
    ("membership", "files", "expected"),
    [
        ("0::/a/b\n", {"cgroup/a/b/memory.events": V2.format(2), **MACHINE_WIDE}, 2),
        ("0::/host/only\n", {"cgroup/memory.events": V2.format(3), **MACHINE_WIDE}, 3),
        (
            "5:cpu:/x\n4:memory,pids:/y\n",
            {"cgroup/memory/y/memory.oom_control": V1.format(7), **MACHINE_WIDE},
            7,
        ),
        ("4:memory:/y\n", {"cgroup/memory/memory.oom_control": V1.format(8)}, 8),
        ("0::/\n", MACHINE_WIDE, 5),
        ("", MACHINE_WIDE, 5),
        ("0::/\n", {}, 0),
    ],
)
def test_the_nearest_count_is_taken(
    tmp_path: Path, membership: str, files: dict[str, str], expected: int
) -> None:
    assert oom_kill_count(*kernel(tmp_path, membership, files)) == expected


def test_this_machine_counts() -> None:
    assert oom_kill_count() >= 0
