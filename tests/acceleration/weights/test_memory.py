from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from preheat.acceleration.weights import memory
from preheat.core.errors import SourceError

if TYPE_CHECKING:
    from pathlib import Path

FILES = {
    2: ("memory.max", "memory.current", "inactive_file", "active_file"),
    1: (
        "memory.limit_in_bytes",
        "memory.usage_in_bytes",
        "total_inactive_file",
        "total_active_file",
    ),
}


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "self").mkdir()
    monkeypatch.setattr(memory, "PROC", str(tmp_path))
    monkeypatch.setattr(memory, "CGROUP_ROOT", str(tmp_path / "cgroup"))
    return tmp_path


def group(
    machine: Path, version: int, path: str, limit: str, used: int, caches: tuple[int, int]
) -> None:
    prefix = "0::" if version == 2 else "4:cpu,memory:"
    (machine / "self/cgroup").write_text(f"7:pids:/elsewhere\n{prefix}/outer/inner\n")
    directory = machine / "cgroup" / ("" if version == 2 else "memory") / path
    directory.mkdir(parents=True, exist_ok=True)
    limit_name, usage_name, inactive, active = FILES[version]
    (directory / limit_name).write_text(f"{limit}\n")
    (directory / usage_name).write_text(f"{used}\n")
    (directory / "memory.stat").write_text(
        f"anon 5\n{inactive} {caches[0]}\n{active} {caches[1]}\nother x\n"
    )


def test_the_machine_says_what_can_be_had_without_swapping(machine: Path) -> None:
    (machine / "meminfo").write_text("MemTotal: 9000 kB\nMemAvailable: 2048 kB\n")
    assert memory.machine_available_bytes() == 2 << 20


@pytest.mark.parametrize("version", [1, 2])
def test_a_control_group_s_file_caches_count_as_free(machine: Path, version: int) -> None:
    group(machine, version, "outer/inner", "1000", 900, (300, 200))
    assert memory.cgroup_available_bytes() == 600


@pytest.mark.parametrize("version", [1, 2])
def test_the_tightest_group_around_the_process_decides(machine: Path, version: int) -> None:
    group(machine, version, "outer/inner", "1000", 0, (0, 0))
    group(machine, version, "outer", "500", 100, (0, 0))
    assert memory.cgroup_available_bytes() == 400
    group(machine, version, "outer/inner", "300", 0, (0, 0))
    assert memory.cgroup_available_bytes() == 300


@pytest.mark.parametrize("version", [1, 2])
def test_in_a_container_the_root_is_its_own_group(machine: Path, version: int) -> None:
    group(machine, version, ".", "700", 0, (0, 0))
    assert memory.cgroup_available_bytes() == 700


def test_no_limit_is_no_figure(machine: Path) -> None:
    assert memory.cgroup_available_bytes() is None
    group(machine, 2, "outer/inner", "max", 900, (0, 0))
    assert memory.cgroup_available_bytes() is None
    memory.require(1 << 60, "m.gguf")  # no meminfo here either: nothing is known, nothing refused


def test_a_group_over_its_limit_leaves_nothing(machine: Path) -> None:
    group(machine, 2, "outer/inner", "100", 900, (0, 0))
    assert memory.cgroup_available_bytes() == 0


def test_the_refusal_names_the_limit_and_both_sizes(machine: Path) -> None:
    group(machine, 2, "outer/inner", "1000", 0, (0, 0))
    memory.require(999, "m.gguf")
    with pytest.raises(SourceError, match=r"m\.gguf needs 1,000 bytes.*cgroup.*only 1,000 left"):
        memory.require(1000, "m.gguf")


def test_this_machine_is_understood() -> None:
    available = memory.machine_available_bytes()
    assert available is not None
    assert available > 1 << 20
    limit = memory.cgroup_available_bytes()
    assert limit is None or limit > 0
