from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from preheat.core.spawn import kill_group, spawn

SOURCES = Path(__file__).parents[2] / "src"

REPORT = """
import json, os, signal, sys
print(json.dumps({
    "argv": sys.argv[1:],
    "environment": dict(os.environ),
    "group": os.getpgid(0),
    "pid": os.getpid(),
    "descriptors": sorted(int(fd) for fd in os.listdir("/proc/self/fd")),
    "blocked": sorted(signal.pthread_sigmask(signal.SIG_BLOCK, ())),
    "ignored": [n for n in (1, 2, 15, 17) if signal.getsignal(n) is signal.SIG_IGN],
    "status": open("/proc/self/status").read(),
}))
"""


def run(code: str, *arguments: str, **kwargs: Any) -> tuple[int, bytes]:
    """Status and output of a spawned Python."""
    read_end, write_end = os.pipe()
    with open(os.devnull) as nothing:  # noqa: PTH123
        pid = spawn(
            [sys.executable, "-IS", "-c", code, *arguments],
            **{
                "env": {"A": "1"},
                "stdin": nothing.fileno(),
                "stdout": write_end,
                "stderr": write_end,
                **kwargs,
            },
        )
    os.close(write_end)
    with os.fdopen(read_end, "rb") as pipe:
        output = pipe.read()
    return os.waitpid(pid, 0)[1], output


def report(*arguments: str, **kwargs: Any) -> dict[str, Any]:
    status, output = run(REPORT, *arguments, **kwargs)
    assert status == 0, output
    found: dict[str, Any] = json.loads(output)
    return found


def test_a_child_has_the_arguments_the_environment_and_a_group_of_its_own() -> None:
    child = report("x y", "✅")
    assert child["argv"] == ["x y", "✅"]
    assert child["environment"].items() >= {"A": "1"}.items()
    assert "PATH" not in child["environment"]
    assert child["group"] == child["pid"] != os.getpgid(0)


def test_a_child_gets_the_descriptors_it_was_given_and_no_other() -> None:
    read_end, write_end = os.pipe()
    other_r, other_w = os.pipe()
    os.set_inheritable(other_w, True)
    try:
        # One more: the listing itself holds the directory open.
        listed = report()["descriptors"]
        assert listed == [0, 1, 2, 3]
        with_one = report(pass_fds=(write_end,))["descriptors"]
        assert set(with_one) - {0, 1, 2} >= {write_end}
        assert other_w not in with_one
        assert len(with_one) == 5
        assert not os.get_inheritable(write_end)
    finally:
        for fd in (read_end, write_end, other_r, other_w):
            os.close(fd)


def test_a_child_has_default_signals_and_an_empty_mask() -> None:
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGUSR1})
    handler = signal.signal(signal.SIGTERM, signal.SIG_IGN)
    try:
        child = report()
    finally:
        signal.signal(signal.SIGTERM, handler)
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
    assert child["blocked"] == []
    assert child["ignored"] == []


def test_the_callers_mask_is_as_it_was() -> None:
    before = signal.pthread_sigmask(signal.SIG_BLOCK, ())
    report()
    with pytest.raises(FileNotFoundError):
        spawn(["/nonexistent"], env={}, stdin=0, stdout=1, stderr=2)
    assert signal.pthread_sigmask(signal.SIG_BLOCK, ()) == before


@pytest.mark.parametrize(
    ("argv", "error"),
    [
        (["/nonexistent/program"], FileNotFoundError),
        (["/etc"], PermissionError),
        (["/etc/passwd"], PermissionError),
        ([sys.executable, "null\0byte"], OSError),
    ],
)
def test_what_cannot_be_run_is_an_error_that_leaves_nothing(
    argv: list[str], error: type[OSError]
) -> None:
    children = Path(f"/proc/self/task/{os.getpid()}/children")
    before = len(os.listdir("/proc/self/fd")), children.read_text()  # noqa: PTH208
    with pytest.raises(error) as caught:
        spawn(argv, env={}, stdin=0, stdout=1, stderr=2)
    assert caught.value.filename == argv[0]
    assert (len(os.listdir("/proc/self/fd")), children.read_text()) == before  # noqa: PTH208


def test_standard_descriptors_may_be_swapped() -> None:
    """As when the output goes where the parent's input was."""
    code = (
        "import os, sys\n"
        "sys.path.insert(0, sys.argv[1])\n"
        "from preheat.core.spawn import spawn\n"
        "r, w = os.pipe(); os.dup2(w, 0); os.dup2(1, 2)\n"
        "pid = spawn(['/bin/sh', '-c', 'echo out; echo err >&2'], env={},"
        " stdin=1, stdout=2, stderr=0)\n"
        "os.waitpid(pid, 0); os.write(1, b'[' + os.read(r, 100) + b']')\n"
    )
    output = subprocess.check_output([sys.executable, "-c", code, str(SOURCES)])
    assert output == b"out\n[err\n]"


def test_a_parent_without_standard_descriptors_can_spawn() -> None:
    code = (
        "import os, sys\n"
        "sys.path.insert(0, sys.argv[1])\n"
        "from preheat.core.spawn import spawn\n"
        "out = os.dup(1)\n"
        "for fd in (0, 1, 2): os.close(fd)\n"
        "try: spawn(['/nonexistent'], env={}, stdin=out, stdout=out, stderr=out)\n"
        "except FileNotFoundError: os.write(out, b'told ')\n"
        "pid = spawn(['/bin/echo', 'fine'], env={}, stdin=out, stdout=out, stderr=out)\n"
        "os.waitpid(pid, 0)\n"
    )
    output = subprocess.check_output([sys.executable, "-c", code, str(SOURCES)])
    assert output == b"told fine\n"


def test_a_child_dies_with_its_parent_however_that_dies() -> None:
    code = (
        "import os, sys\n"
        "sys.path.insert(0, sys.argv[1])\n"
        "from preheat.core.spawn import spawn\n"
        "spawn(['/bin/sleep', '1000'], env={}, stdin=0, stdout=1, stderr=2)\n"
        "os.kill(os.getpid(), 9)\n"
    )
    # The child holds the output open: this returns once it is gone too.
    parent = subprocess.run(
        [sys.executable, "-c", code, str(SOURCES)], capture_output=True, check=False, timeout=60
    )
    assert parent.returncode == -9


def test_a_group_is_signalled_whole_and_one_that_is_gone_is_no_error() -> None:
    read_end, write_end = os.pipe()
    pid = spawn(
        ["/bin/sh", "-c", "sleep 1000 & echo up; wait"],
        env={},
        stdin=0,
        stdout=write_end,
        stderr=2,
    )
    os.close(write_end)
    with os.fdopen(read_end, "rb") as pipe:
        assert pipe.readline() == b"up\n"
        kill_group(pid, signal.SIGKILL)
        assert pipe.read() == b""  # both are gone
    os.waitpid(pid, 0)
    kill_group(pid, signal.SIGKILL)


def test_orphans_come_to_a_subreaper() -> None:
    code = (
        "import os, sys\n"
        "sys.path.insert(0, sys.argv[1])\n"
        "from preheat.core.spawn import become_subreaper, spawn\n"
        "become_subreaper()\n"
        "pid = spawn(['/bin/sh', '-c', 'sleep 0 & exit 0'], env={}, stdin=0, stdout=1, stderr=2)\n"
        "collected = {os.wait()[0], os.wait()[0]}\n"
        "print(len(collected), pid in collected)\n"
    )
    output = subprocess.check_output([sys.executable, "-c", code, str(SOURCES)])
    assert output == b"2 True\n"
