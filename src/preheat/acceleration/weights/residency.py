"""How much of a file the page cache holds, asked without touching the file's pages.

What does not belong here: reading. Imports only ``ctypes``, ``mmap`` and ``os``.
"""

from __future__ import annotations

import ctypes
import mmap
import os

_SYS_CACHESTAT = 451  # the same number on every architecture; Linux 6.5 and later
_NOT_RESIDENT = bytes(range(0, 256, 2))  # bit 0 of a page's byte says that it is resident


class _Range(ctypes.Structure):
    _fields_ = (("offset", ctypes.c_uint64), ("length", ctypes.c_uint64))


class _Statistics(ctypes.Structure):
    _fields_ = (
        ("cached", ctypes.c_uint64),
        ("dirty", ctypes.c_uint64),
        ("writeback", ctypes.c_uint64),
        ("evicted", ctypes.c_uint64),
        ("recently_evicted", ctypes.c_uint64),
    )


def page_cache_share(fd: int, size_bytes: int) -> float | None:
    """Share of the file's pages that are cached, 0 to 1; None where the kernel does not say."""
    pages = -(-size_bytes // mmap.PAGESIZE)
    if pages == 0:
        return None
    cached = _cachestat(fd, size_bytes)
    if cached is None:
        cached = _mincore(fd, size_bytes, pages)
    return None if cached is None else min(1.0, cached / pages)


def _cachestat(fd: int, size_bytes: int) -> int | None:
    libc = ctypes.CDLL(None)
    span = _Range(0, size_bytes)
    statistics = _Statistics()
    result = libc.syscall(
        ctypes.c_long(_SYS_CACHESTAT),
        ctypes.c_uint(fd),
        ctypes.byref(span),
        ctypes.byref(statistics),
        ctypes.c_uint(0),
    )
    return int(statistics.cached) if result == 0 else None


def _mincore(fd: int, size_bytes: int, pages: int) -> int | None:
    # For files that the caller could not write, mincore claims that everything is resident.
    if os.geteuid() not in (0, os.fstat(fd).st_uid):
        return None
    try:
        # A private mapping that is never written: the only kind whose address ctypes takes.
        mapped = mmap.mmap(fd, size_bytes, access=mmap.ACCESS_COPY)
    except OSError:
        return None
    with mapped:
        first = ctypes.c_char.from_buffer(mapped)
        residents = (ctypes.c_ubyte * pages)()
        result = ctypes.CDLL(None).mincore(
            ctypes.c_void_p(ctypes.addressof(first)), ctypes.c_size_t(size_bytes), residents
        )
        del first  # the mapping cannot be closed while its address is held
    if result != 0:
        return None
    return len(bytes(residents).translate(None, _NOT_RESIDENT))
