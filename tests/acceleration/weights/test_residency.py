from __future__ import annotations

import mmap
import os
from typing import TYPE_CHECKING

import pytest

from preheat.acceleration.weights import residency

if TYPE_CHECKING:
    from pathlib import Path

PAGES = 64
SIZE_BYTES = PAGES * mmap.PAGESIZE - 100


def test_a_file_just_written_is_in_the_page_cache_until_it_is_dropped(tmp_path: Path) -> None:
    file = tmp_path / "model.gguf"
    file.write_bytes(os.urandom(SIZE_BYTES))
    fd = os.open(file, os.O_RDONLY)
    try:
        assert residency.page_cache_share(fd, SIZE_BYTES) == 1.0
        os.fsync(fd)
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        dropped = residency.page_cache_share(fd, SIZE_BYTES)
        if dropped == 1.0:
            pytest.skip("files here live in memory only")
        assert dropped == 0.0
    finally:
        os.close(fd)


def test_both_ways_to_ask_agree(tmp_path: Path) -> None:
    file = tmp_path / "model.gguf"
    with file.open("wb") as output:
        output.write(os.urandom(SIZE_BYTES // 2))
        output.truncate(SIZE_BYTES)  # the rest is a hole, which no cache holds
    fd = os.open(file, os.O_RDONLY)
    try:
        asked = residency._cachestat(fd, SIZE_BYTES)
        if asked is None:
            pytest.skip("this kernel has no cachestat")
        assert 0 < asked < PAGES
        assert residency._mincore(fd, SIZE_BYTES, PAGES) == asked
    finally:
        os.close(fd)


def test_an_older_kernel_is_asked_by_mincore(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(residency, "_SYS_CACHESTAT", 100_000)
    file = tmp_path / "model.gguf"
    file.write_bytes(os.urandom(SIZE_BYTES))
    fd = os.open(file, os.O_RDONLY)
    try:
        assert residency.page_cache_share(fd, SIZE_BYTES) == 1.0
        monkeypatch.setattr(os, "geteuid", lambda: 4321)  # of strangers' files mincore tells lies
        assert residency.page_cache_share(fd, SIZE_BYTES) is None
    finally:
        os.close(fd)


def test_an_empty_file_has_no_share(tmp_path: Path) -> None:
    file = tmp_path / "empty"
    file.touch()
    fd = os.open(file, os.O_RDONLY)
    try:
        assert residency.page_cache_share(fd, 0) is None
    finally:
        os.close(fd)
