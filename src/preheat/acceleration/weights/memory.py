"""How much memory this process may still take, and a refusal of what cannot fit.

Two limits are read: the machine's (``MemAvailable``) and those of the control groups it is in
(versions 1 and 2). Memory that only caches files counts as free, as the kernel gives it back.
What does not belong here: a budget over several models. Imports nothing but ``os``.
"""

from __future__ import annotations

import os

from preheat.core.errors import SourceError

PROC = "/proc"
CGROUP_ROOT = "/sys/fs/cgroup"


def require(size_bytes: int, name: str) -> None:
    """Raise SourceError unless ``size_bytes`` more can be had for the file ``name``."""
    for limit, available_bytes in (
        ("the machine", machine_available_bytes()),
        ("this process's memory limit (cgroup)", cgroup_available_bytes()),
    ):
        if available_bytes is not None and available_bytes <= size_bytes:
            raise SourceError(
                f"{name} needs {size_bytes:,} bytes of memory, but {limit} has only "
                f"{available_bytes:,} left",
                advice="free memory, raise the limit, or use a smaller model",
            )


def machine_available_bytes() -> int | None:
    """Memory that can be had without swapping; None where the kernel does not say."""
    for line in _read(f"{PROC}/meminfo").splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) << 10
    return None


def cgroup_available_bytes() -> int | None:
    """The least that any control group around this process leaves; None without a limit."""
    available: list[int] = []
    for line in _read(f"{PROC}/self/cgroup").splitlines():
        _, controllers, path = line.split(":", 2)
        if not controllers:
            files = ("memory.max", "memory.current", "inactive_file", "active_file")
            root = CGROUP_ROOT
        elif "memory" in controllers.split(","):
            files = (
                "memory.limit_in_bytes",
                "memory.usage_in_bytes",
                "total_inactive_file",
                "total_active_file",
            )
            root = f"{CGROUP_ROOT}/memory"
        else:
            continue
        for directory in _upwards(root, path):
            left = _left_bytes(directory, *files)
            if left is not None:
                available.append(left)
    return min(available, default=None)


def _upwards(root: str, path: str) -> list[str]:
    """Directories of a group and all groups around it. In a container the path may be the host's
    and exist nowhere; then the root, which is the container's own group, is what is left."""
    parts = [part for part in path.split("/") if part not in ("", "..")]
    return ["/".join([root, *parts[:count]]) for count in range(len(parts), -1, -1)]


def _left_bytes(directory: str, limit: str, usage: str, inactive: str, active: str) -> int | None:
    """None if there is no limit (``max``, an empty file) or no such group."""
    most, used = (_read(f"{directory}/{name}").strip() for name in (limit, usage))
    if not (most.isdecimal() and used.isdecimal()):
        return None
    caches = 0
    for line in _read(f"{directory}/memory.stat").splitlines():
        key, _, count = line.partition(" ")
        if key in (inactive, active) and count.isdecimal():
            caches += int(count)
    return max(0, int(most) - max(0, int(used) - caches))


def _read(path: str) -> str:
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return ""
    try:
        return os.read(fd, 1 << 16).decode(errors="replace")
    except OSError:
        return ""
    finally:
        os.close(fd)
