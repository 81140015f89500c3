"""What can only be found out by trying it on this machine. Leaves nothing behind.

What does not belong here: what a file of the kernel says (``machine.py``), any opinion.
"""

from __future__ import annotations

import ctypes
import fcntl
import mmap
import os
import subprocess
import tempfile
from pathlib import Path

PAGE_BYTES = 4096
# The same number on all architectures; Linux has it since 6.5.
CACHESTAT_SYSCALL = 451
COMPONENT_TIMEOUT_S = 20.0


def try_o_direct(directory: Path) -> str:
    """Write and read one page past the page cache in ``directory``; why not, or an empty text."""
    try:
        with (
            tempfile.NamedTemporaryFile(prefix=".preheat-o-direct-", dir=directory) as file,
            # Anonymous memory is aligned to a page, as O_DIRECT asks for.
            mmap.mmap(-1, PAGE_BYTES) as page,
        ):
            handle = os.open(file.name, os.O_RDWR | os.O_DIRECT)
            try:
                os.pwrite(handle, page, 0)
                return "" if os.preadv(handle, [page], 0) == PAGE_BYTES else "a read fell short"
            finally:
                os.close(handle)
    except OSError as error:
        return error.strerror or str(error)


def try_memfd_sealing() -> str:
    """Seal a memory file as the weights are; why not, or an empty text."""
    try:
        handle = os.memfd_create("preheat-doctor", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    except OSError as error:
        return error.strerror or str(error)
    try:
        fcntl.fcntl(handle, fcntl.F_ADD_SEALS, fcntl.F_SEAL_WRITE | fcntl.F_SEAL_SHRINK)
        os.write(handle, b"x")
    except PermissionError:
        return ""
    except OSError as error:
        return error.strerror or str(error)
    else:
        return "a sealed memory file could still be written"
    finally:
        os.close(handle)


def try_cachestat() -> bool:
    """Whether the kernel has ``cachestat`` (and lets this process call it)."""
    libc = ctypes.CDLL(None, use_errno=True)
    with tempfile.TemporaryFile() as file:
        whole, statistics = (ctypes.c_uint64 * 2)(0, 0), (ctypes.c_uint64 * 5)()
        result: int = libc.syscall(
            ctypes.c_long(CACHESTAT_SYSCALL),
            ctypes.c_uint(file.fileno()),
            ctypes.byref(whole),
            ctypes.byref(statistics),
            ctypes.c_uint(0),
        )
    return result == 0


def try_program(argv: list[str]) -> tuple[str, str]:
    """(first line it prints, why it does not work) of a program that should print its version.

    Libraries are tried this way too: one built for another processor kills its process.
    """
    try:
        done = subprocess.run(
            argv, capture_output=True, text=True, timeout=COMPONENT_TIMEOUT_S, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return "", str(error)
    lines = (done.stdout.strip() or done.stderr.strip()).splitlines()
    if done.returncode != 0:
        last = (done.stderr.strip().splitlines() or ["no message"])[-1]
        return "", f"exit code {done.returncode}: {last}"
    return (lines[0].strip() if lines else ""), ""
