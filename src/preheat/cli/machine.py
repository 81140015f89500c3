"""A snapshot of the machine as far as serving depends on it: values, and readers that fill them.

Readers take the root of the file system, so that tests can plant ``/proc`` and ``/sys``.
What does not belong here: trying things out (``trials.py``), any opinion on what was read
(``checks.py``).
"""

from __future__ import annotations

import os
import platform
import resource
import sys
from dataclasses import dataclass
from pathlib import Path

from preheat.acceleration.weights.memory import cgroup_available_bytes
from preheat.cli.trials import try_cachestat, try_memfd_sealing, try_o_direct, try_program
from preheat.core.errors import GatewayError, SpecError
from preheat.core.paths import default_paths
from preheat.dataplane.envoy.binary import envoy_binary


@dataclass(frozen=True, slots=True)
class NumaNode:
    number: int
    cpus: str
    """As the kernel lists them: ``0-3,8``."""
    memory_bytes: int


@dataclass(frozen=True, slots=True)
class Component:
    """A program or library that preheat cannot do without."""

    version: str
    problem: str = ""
    """Why it does not work; empty when it does."""


@dataclass(frozen=True, slots=True)
class Directory:
    path: str
    """Where it is or would be; empty when it could not be determined."""
    problem: str = ""
    exists: bool = False
    mode: int = 0
    """Permission bits."""
    own: bool = True
    """Whether it belongs to this user."""
    writable: bool = True
    """Whether files can be made there (or, while it does not exist, the directory itself)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """What was read. None stands for "not known" unless said otherwise."""

    architecture: str
    kernel: str
    cpu_flags: frozenset[str]
    cores_online: int
    cores_affinity: int
    cores_quota: float | None
    """CPU quota of the cgroup in cores; None without one."""
    memory_total_bytes: int
    memory_available_bytes: int
    memory_group_left_bytes: int | None
    """What the limits of the cgroup and those above it leave; None without one."""
    memlock_bytes: int | None
    """None is unlimited."""
    nofile_hard: int | None
    """None is unlimited."""
    huge_pages_reserved: int
    huge_page_bytes: int
    transparent_huge_pages: str
    """``always``, ``madvise`` or ``never``; empty when not known."""
    numa_nodes: tuple[NumaNode, ...]
    tcp_fastopen: int | None
    somaxconn: int | None
    memfd_sealing_problem: str
    cachestat: bool
    shm_total_bytes: int | None
    """Size of ``/dev/shm``; None when it is missing."""
    cache: Directory
    cache_free_bytes: int | None
    o_direct_problem: str
    runtime: Directory
    envoy: Component
    xllamacpp: Component


def read_text(path: Path) -> str | None:
    """The stripped text of a small file of the kernel; None when it cannot be read."""
    try:
        return path.read_text(encoding="utf-8", errors="replace").strip()
    except OSError:
        return None


def read_int(path: Path) -> int | None:
    text = read_text(path)
    return int(text) if text is not None and text.lstrip("-").isdigit() else None


def parse_meminfo(text: str) -> dict[str, int]:
    """``/proc/meminfo`` as name → bytes (or a count, where the line has no unit)."""
    values = {}
    for line in text.splitlines():
        name, _, rest = line.partition(":")
        words = rest.split()
        if words and words[0].isdigit():
            values[name] = int(words[0]) * (1024 if words[1:] == ["kB"] else 1)
    return values


def parse_cpu_flags(cpuinfo: str) -> frozenset[str]:
    """The flags that the first processor of ``/proc/cpuinfo`` lists (x86 and Arm)."""
    for line in cpuinfo.splitlines():
        name, _, rest = line.partition(":")
        if name.strip() in ("flags", "Features"):
            return frozenset(rest.split())
    return frozenset()


def bracketed(text: str | None) -> str:
    """``always [madvise] never`` → ``madvise``."""
    _, _, rest = (text or "").partition("[")
    return rest.partition("]")[0]


def cgroup_directories(root: Path, controller: str) -> list[Path]:
    """Directories whose limits of ``controller`` bind this process, innermost first (v1 and v2)."""
    found: list[Path] = []
    for line in (read_text(root / "proc/self/cgroup") or "").splitlines():
        _, names, inner = line.split(":", 2)
        mounts = [controller] if controller in names.split(",") else []
        mounts += ["", "unified"] if names == "" else []
        for mount in mounts:
            base = root / "sys/fs/cgroup" / mount
            directory = base / inner.lstrip("/")
            # Inside a container the path is often one that only the host can see.
            while directory != base and base in directory.parents:
                found.append(directory)
                directory = directory.parent
            found.append(base)
    return [directory for directory in found if directory.is_dir()]


def read_cpu_quota(root: Path) -> float | None:
    """The smallest CPU quota in cores."""
    quotas = []
    for directory in cgroup_directories(root, "cpu"):
        words = (read_text(directory / "cpu.max") or "").split()
        if len(words) == 2 and words[0].isdigit():
            quotas.append(int(words[0]) / int(words[1]))
        quota_us = read_int(directory / "cpu.cfs_quota_us")
        period_us = read_int(directory / "cpu.cfs_period_us")
        if quota_us is not None and quota_us > 0 and period_us:
            quotas.append(quota_us / period_us)
    return min(quotas, default=None)


def read_numa_nodes(root: Path) -> tuple[NumaNode, ...]:
    nodes = []
    for directory in (root / "sys/devices/system/node").glob("node[0-9]*"):
        # Each line begins with "Node N ".
        lines = (read_text(directory / "meminfo") or "").splitlines()
        memory = parse_meminfo("\n".join(" ".join(line.split()[2:]) for line in lines))
        nodes.append(
            NumaNode(
                number=int(directory.name.removeprefix("node")),
                cpus=read_text(directory / "cpulist") or "",
                memory_bytes=memory.get("MemTotal", 0),
            )
        )
    return tuple(sorted(nodes, key=lambda node: node.number))


def nearest_existing(path: Path) -> Path:
    return next(parent for parent in (path, *path.parents) if parent.exists())


def inspect_directory(path: Path) -> Directory:
    existing = nearest_existing(path)
    status = existing.stat()
    exists = existing == path
    return Directory(
        path=str(path),
        exists=exists,
        mode=status.st_mode & 0o7777 if exists else 0,
        own=status.st_uid == os.getuid() if exists else True,
        writable=existing.is_dir() and os.access(existing, os.W_OK | os.X_OK),
    )


def _space(path: Path) -> tuple[int, int] | None:
    """(total, free) bytes of the file system that holds ``path``."""
    try:
        status = os.statvfs(path)
    except OSError:
        return None
    return status.f_blocks * status.f_frsize, status.f_bavail * status.f_frsize


def _hard_limit(kind: int) -> int | None:
    hard = resource.getrlimit(kind)[1]
    return None if hard == resource.RLIM_INFINITY else hard


def _directories() -> tuple[Directory, Directory]:
    """(cache, runtime)"""
    try:
        paths = default_paths()
    except SpecError as error:
        unknown = Directory(path="", problem=str(error))
        return unknown, unknown
    return inspect_directory(paths.cache), inspect_directory(paths.runtime)


def parse_envoy_version(line: str) -> str:
    """``…  version: COMMIT/1.40.0/Clean/RELEASE/BoringSSL`` → ``1.40.0``."""
    parts = line.rpartition("version:")[2].strip().split("/")
    return parts[1] if len(parts) > 1 else line


def _envoy() -> Component:
    try:
        binary = envoy_binary()
    except GatewayError as error:
        return Component(version="", problem=str(error))
    line, problem = try_program([str(binary), "--version"])
    return Component(parse_envoy_version(line), problem)


def _xllamacpp() -> Component:
    program = "import importlib.metadata as m, xllamacpp; print(m.version('xllamacpp'))"
    return Component(*try_program([sys.executable, "-c", program]))


def take_snapshot(root: Path = Path("/")) -> Machine:
    """Read this machine; ``root`` moves the files that are read, not what is tried or asked."""
    meminfo = parse_meminfo(read_text(root / "proc/meminfo") or "")
    shm = _space(root / "dev/shm")
    cache, runtime = _directories()
    cache_parent = nearest_existing(Path(cache.path or "/"))
    space = _space(cache_parent)
    return Machine(
        architecture=platform.machine(),
        kernel=platform.release(),
        cpu_flags=parse_cpu_flags(read_text(root / "proc/cpuinfo") or ""),
        cores_online=os.cpu_count() or 1,
        cores_affinity=len(os.sched_getaffinity(0)),
        cores_quota=read_cpu_quota(root),
        memory_total_bytes=meminfo.get("MemTotal", 0),
        memory_available_bytes=meminfo.get("MemAvailable", 0),
        memory_group_left_bytes=cgroup_available_bytes(),
        memlock_bytes=_hard_limit(resource.RLIMIT_MEMLOCK),
        nofile_hard=_hard_limit(resource.RLIMIT_NOFILE),
        huge_pages_reserved=meminfo.get("HugePages_Total", 0),
        huge_page_bytes=meminfo.get("Hugepagesize", 0),
        transparent_huge_pages=bracketed(
            read_text(root / "sys/kernel/mm/transparent_hugepage/enabled")
        ),
        numa_nodes=read_numa_nodes(root),
        tcp_fastopen=read_int(root / "proc/sys/net/ipv4/tcp_fastopen"),
        somaxconn=read_int(root / "proc/sys/net/core/somaxconn"),
        memfd_sealing_problem=try_memfd_sealing(),
        cachestat=try_cachestat(),
        shm_total_bytes=shm[0] if shm else None,
        cache=cache,
        cache_free_bytes=space[1] if space else None,
        o_direct_problem=try_o_direct(cache_parent),
        runtime=runtime,
        envoy=_envoy(),
        xllamacpp=_xllamacpp(),
    )
