from __future__ import annotations

import errno
import fcntl
import os
import random
import signal
import subprocess
import sys
import threading
from typing import TYPE_CHECKING

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.acceleration.weights import samples

from preheat.acceleration.weights import memory, sealed
from preheat.core.errors import IntegrityError, SourceError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from pathlib import Path

SIZE_BYTES = 3 * sealed.CHUNK_BYTES + 12_345
DATA = random.Random(1).randbytes(SIZE_BYTES)
SHA256 = samples.sha256(DATA)

in_one_directory = settings(
    suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None, max_examples=30
)


@pytest.fixture
def model(tmp_path: Path) -> Path:
    file = tmp_path / "model.gguf"
    file.write_bytes(DATA)
    return file


@pytest.fixture(autouse=True)
def nothing_is_left() -> Iterator[None]:
    before = descriptors()
    yield
    assert descriptors() == before
    assert not [thread for thread in threading.enumerate() if thread.name == "weights"]


def descriptors() -> dict[str, str]:
    """Open files and sealed memory; not the sockets and pipes that others may hold."""
    found = {}
    for number in os.listdir("/proc/self/fd"):  # noqa: PTH208 - Path hides the numbers' race
        try:
            target = os.readlink(f"/proc/self/fd/{number}")  # noqa: PTH115
        except FileNotFoundError:
            continue
        if "model.gguf" in target:
            found[number] = target
    return found


def seal(
    file: Path,
    sha256: str | None = SHA256,
    size_bytes: int = SIZE_BYTES,
    cancel: threading.Event | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> sealed.SealedWeights:
    return sealed.seal(
        file, expected_sha256=sha256, size_bytes=size_bytes, cancel=cancel, progress=progress
    )


def reading(
    monkeypatch: pytest.MonkeyPatch, file: Path, before_chunk: Callable[[int], None]
) -> None:
    """Have ``before_chunk`` called with the position before each read of ``file``."""
    preadv = os.preadv
    inode = file.stat().st_ino

    def hooked(fd: int, buffers: Sequence[memoryview], position: int) -> int:
        if os.fstat(fd).st_ino == inode:
            before_chunk(position)
        return preadv(fd, buffers, position)

    monkeypatch.setattr(os, "preadv", hooked)


def test_the_memory_holds_the_file_and_its_hash(model: Path) -> None:
    with seal(model) as weights:
        assert os.pread(weights.fd, SIZE_BYTES + 1, 0) == DATA
        assert (weights.sha256, weights.size_bytes) == (SHA256, SIZE_BYTES)


def test_sealed_memory_can_never_change_again(model: Path) -> None:
    with seal(model) as weights:
        for change in (
            lambda: os.pwrite(weights.fd, b"x", 0),
            lambda: os.ftruncate(weights.fd, 1),
            lambda: os.ftruncate(weights.fd, SIZE_BYTES + 1),
            lambda: fcntl.fcntl(weights.fd, fcntl.F_ADD_SEALS, 0),
        ):
            with pytest.raises(PermissionError) as raised:
                change()
            assert raised.value.errno == errno.EPERM


def test_a_change_of_the_file_does_not_reach_memory_that_is_sealed(model: Path) -> None:
    with seal(model) as weights:
        model.write_bytes(b"rewritten in place")
        assert os.pread(weights.fd, SIZE_BYTES, 0) == DATA


def test_a_child_opens_the_memory_by_its_path_only_if_it_was_passed(model: Path) -> None:
    program = "import hashlib,sys;print(hashlib.sha256(open(sys.argv[1],'rb').read()).hexdigest())"
    with seal(model) as weights:
        command = [sys.executable, "-c", program, weights.path_for_child()]
        passed = subprocess.run(
            command, pass_fds=[weights.fd], capture_output=True, text=True, check=True
        )
        assert passed.stdout.strip() == SHA256
        assert subprocess.run(command, close_fds=False, capture_output=True, check=False).returncode
    assert weights.path_for_child(7) == "/proc/self/fd/7"


def test_closing_twice_closes_nothing_else(model: Path) -> None:
    weights = seal(model)
    weights.close()
    other = os.open(model, os.O_RDONLY)
    weights.close()
    os.close(other)


def test_the_record_says_when_each_part_ran_and_what_was_read(model: Path) -> None:
    with seal(model) as weights:
        assert weights.read_start_s == weights.hash_start_s
        assert weights.read_start_s < weights.read_end_s
        assert weights.hash_start_s < weights.hash_end_s
        assert weights.read_s == weights.read_end_s - weights.read_start_s
        assert weights.hash_s == weights.hash_end_s - weights.hash_start_s
        assert weights.bytes_read == SIZE_BYTES
        assert weights.page_cache_share == 1.0  # just written


def test_progress_counts_verified_bytes_up_to_all(model: Path) -> None:
    seen: list[tuple[int, int]] = []
    seal(model, progress=lambda done, total: seen.append((done, total))).close()
    assert seen == sorted(seen)
    assert seen[-1] == (SIZE_BYTES, SIZE_BYTES)


def test_a_hash_that_nobody_promised_is_reported(model: Path) -> None:
    with seal(model, sha256=None) as weights:
        assert weights.sha256 == SHA256


def test_a_hash_may_be_promised_in_capitals(model: Path) -> None:
    seal(model, sha256=SHA256.upper()).close()


@given(position=st.integers(0, SIZE_BYTES - 1), bit=st.integers(0, 7))
@in_one_directory
def test_one_flipped_bit_anywhere_is_found(model: Path, position: int, bit: int) -> None:
    with model.open("r+b") as file:
        file.seek(position)
        file.write(bytes([DATA[position] ^ (1 << bit)]))
    try:
        with pytest.raises(IntegrityError) as raised:
            seal(model)
        for part in (str(model), SHA256, samples.sha256(model.read_bytes())):
            assert part in str(raised.value)
        assert not raised.value.retryable
    finally:
        with model.open("r+b") as file:
            file.seek(position)
            file.write(DATA[position : position + 1])


@pytest.mark.parametrize("size_bytes", [1, 4095, 4097, sealed.CHUNK_BYTES])
def test_sizes_at_the_edges_are_whole(tmp_path: Path, size_bytes: int) -> None:
    file = tmp_path / "model.gguf"
    file.write_bytes(DATA[:size_bytes])
    with seal(file, samples.sha256(DATA[:size_bytes]), size_bytes) as weights:
        assert os.pread(weights.fd, SIZE_BYTES, 0) == DATA[:size_bytes]


@pytest.mark.parametrize("left_bytes", [0, 1, SIZE_BYTES - 1])
def test_a_file_cut_short_under_the_copy_is_an_error_and_no_signal(
    model: Path, monkeypatch: pytest.MonkeyPatch, left_bytes: int
) -> None:
    def cut(position: int) -> None:
        if position == 2 * sealed.CHUNK_BYTES:
            os.truncate(model, left_bytes)

    reading(monkeypatch, model, cut)
    with pytest.raises(IntegrityError, match="cut short while it was read"):
        seal(model)


def test_a_file_rewritten_under_the_copy_is_an_error_though_its_size_stays(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def rewrite(position: int) -> None:
        if position == sealed.CHUNK_BYTES:
            with model.open("r+b") as file:
                file.write(b"another head")
            os.utime(model, ns=(0, model.stat().st_mtime_ns + 1))  # clocks tick coarsely

    reading(monkeypatch, model, rewrite)
    with pytest.raises(IntegrityError, match="was changed while it was read"):
        seal(model, sha256=None)


def test_a_file_that_grows_under_the_copy_is_an_error(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    reading(monkeypatch, model, lambda position: os.truncate(model, SIZE_BYTES + 1))
    with pytest.raises(IntegrityError, match="was changed while it was read"):
        seal(model)


@pytest.mark.parametrize("chunk", [0, 1, 2, 3])
def test_a_copy_can_be_cancelled_at_every_chunk(
    model: Path, monkeypatch: pytest.MonkeyPatch, chunk: int
) -> None:
    cancel = threading.Event()

    def maybe(position: int) -> None:
        if position == chunk * sealed.CHUNK_BYTES:
            cancel.set()

    reading(monkeypatch, model, maybe)
    with pytest.raises(sealed.LoadCancelledError):
        seal(model, cancel=cancel)


def test_what_progress_raises_ends_the_copy(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class StopError(Exception):
        pass

    def stop(done: int, total: int) -> None:
        raise StopError

    size_bytes = 512 << 20
    os.truncate(model, size_bytes)  # a hole, long enough to be stopped in
    positions: list[int] = []
    reading(monkeypatch, model, positions.append)
    with pytest.raises(StopError):
        seal(model, size_bytes=size_bytes, progress=stop)
    assert max(positions) < size_bytes - sealed.CHUNK_BYTES


@pytest.mark.parametrize("cancelled", [False, True])
def test_a_read_that_hangs_is_given_up_and_gives_everything_back_later(
    model: Path, monkeypatch: pytest.MonkeyPatch, cancelled: bool
) -> None:
    disk_is_back = threading.Event()
    cancel = threading.Event()

    def hang(position: int) -> None:
        if position == sealed.CHUNK_BYTES:
            if cancelled:
                cancel.set()
            disk_is_back.wait()

    reading(monkeypatch, model, hang)
    monkeypatch.setattr(sealed, "STALL_S", 0.2)
    says = "cancelled" if cancelled else f"stalled.*{sealed.CHUNK_BYTES:,} of {SIZE_BYTES:,}"
    with pytest.raises(SourceError, match=says):
        seal(model, cancel=cancel)
    readers = [thread for thread in threading.enumerate() if thread.name == "weights"]
    disk_is_back.set()
    for reader in readers:
        reader.join()
    assert len(readers) == 1


def test_a_slow_read_that_makes_progress_is_not_given_up(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sealed, "STALL_S", 0.4)
    never = threading.Event()

    def dawdle(position: int) -> None:
        never.wait(0.15)  # .6 s in all

    reading(monkeypatch, model, dawdle)
    seal(model).close()


def test_a_failing_disk_is_a_source_error(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(position: int) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    reading(monkeypatch, model, fail)
    with pytest.raises(SourceError, match="Input/output error"):
        seal(model)


def test_what_cannot_fit_is_refused_before_anything_is_read(
    model: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "meminfo").write_text(f"MemAvailable: {SIZE_BYTES // 1024} kB\n")
    monkeypatch.setattr(memory, "PROC", str(tmp_path))
    reading(monkeypatch, model, lambda position: pytest.fail("it was read"))
    with pytest.raises(SourceError, match=f"needs {SIZE_BYTES:,} bytes of memory"):
        seal(model)


def test_what_is_no_file_of_the_right_size_is_refused(model: Path, tmp_path: Path) -> None:
    with pytest.raises(IntegrityError, match=f"has {SIZE_BYTES:,} bytes, but 5 were expected"):
        seal(model, size_bytes=5)
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)
    for path, says in (
        (fifo, "not a regular file"),
        (tmp_path, "not a regular file"),
        (tmp_path / "none", "No such file"),
    ):
        with pytest.raises(SourceError, match=says):
            seal(path)
    model.write_bytes(b"")
    with pytest.raises(IntegrityError, match="empty"):
        seal(model, size_bytes=0)


def test_ctrl_c_ends_the_copy(tmp_path: Path) -> None:
    file = tmp_path / "model.gguf"
    with file.open("wb") as output:
        output.truncate(256 << 20)  # a hole; the child below is slow enough for it
    program = """
import sys, time
from pathlib import Path
from preheat.acceleration.weights.sealed import seal
def progress(done, total):
    print(done, flush=True)
    time.sleep(0.05)
seal(Path(sys.argv[1]), expected_sha256=None, size_bytes=256 << 20, cancel=None, progress=progress)
"""
    child = subprocess.Popen(
        [sys.executable, "-c", program, str(file)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert child.stdout is not None
    child.stdout.readline()
    child.send_signal(signal.SIGINT)
    _, errors = child.communicate()
    assert child.returncode == -signal.SIGINT
    assert "KeyboardInterrupt" in errors


def test_importing_it_imports_nothing_heavy() -> None:
    program = """
import sys
before = set(sys.modules)
import preheat.acceleration.weights.sealed
print(*(set(sys.modules) - before))
"""
    loaded = subprocess.run(
        [sys.executable, "-S", "-c", program],
        env={"PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True,
        text=True,
        check=True,
    ).stdout.split()
    heavy = {"asyncio", "dataclasses", "inspect", "json", "msgspec", "pathlib", "subprocess"}
    assert not heavy & set(loaded)
    assert "typing" not in loaded
