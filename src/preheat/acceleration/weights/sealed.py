"""Brings a file into sealed memory: the bytes that were hashed are the bytes an engine reads.

The file is copied into a memfd by one thread and hashed *from the memfd* by another, right behind
it; then writing, shrinking and growing are sealed off for good. An engine opens the memory by the
path ``/proc/self/fd/N``. Nothing is mapped here: a file that shrinks under the copy is an error
and never a SIGBUS, and a process forked meanwhile holds no mapping that would forbid sealing.
What does not belong here: where files come from (``sources.py``), what they must hash to when
nobody said so (``baselines.py``), and heavy imports: this module stands at the head of the start
path, before anything else is imported.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import os
import stat
import threading
import time

from preheat.acceleration.weights import memory, residency
from preheat.core.errors import IntegrityError, SourceError

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path
    from types import TracebackType
    from typing import Self

# Small enough to stay in a core's cache between the file and the memory. A copy straight into the
# mapped memory pays a page fault for each page and took 1.2 times as long; sendfile saved 1 %.
CHUNK_BYTES = 1 << 20
STALL_S = 3.0
"""A copy in which no chunk arrived for so long is given up."""

# Since Linux 6.3: memory that can never be executed. Kernels with vm.memfd_noexec=2 insist on it.
_MFD_NOEXEC_SEAL = 0x8
_SEALS = fcntl.F_SEAL_WRITE | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
# How often a waiting hasher looks whether it was cancelled, seconds.
_TICK_S = 0.1


class SealedWeights:
    """Immutable memory that holds a verified file. Closing it gives the memory back once the last
    process that has it open is gone."""

    __slots__ = (
        "bytes_read",
        "fd",
        "hash_end_s",
        "hash_start_s",
        "page_cache_share",
        "read_end_s",
        "read_start_s",
        "sha256",
        "size_bytes",
    )

    fd: int
    """Descriptor of the memory, closed on exec; hand it to a child with ``pass_fds``."""
    size_bytes: int
    sha256: str
    """Hash of the sealed bytes, hex."""
    read_start_s: float
    """Seconds on CLOCK_MONOTONIC, as the other three."""
    read_end_s: float
    hash_start_s: float
    hash_end_s: float
    bytes_read: int
    """Bytes read from the file."""
    page_cache_share: float | None
    """Share of the file found in the page cache before reading, 0 to 1; None if not known."""

    def __init__(self, copy: _Copy, page_cache_share: float | None) -> None:
        self.fd = copy.memory_fd
        self.size_bytes = copy.size_bytes
        self.sha256 = copy.sha256
        self.read_start_s, self.read_end_s = copy.read_start_s, copy.read_end_s
        self.hash_start_s, self.hash_end_s = copy.hash_start_s, copy.hash_end_s
        self.bytes_read = copy.bytes_read
        self.page_cache_share = page_cache_share

    @property
    def read_s(self) -> float:
        return self.read_end_s - self.read_start_s

    @property
    def hash_s(self) -> float:
        return self.hash_end_s - self.hash_start_s

    def path_for_child(self, fd: int | None = None) -> str:
        """The path under which a process that holds the memory as ``fd`` opens it. Default: the
        same number as here, which is what ``pass_fds`` keeps."""
        return f"/proc/self/fd/{self.fd if fd is None else fd}"

    def close(self) -> None:
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


class LoadCancelledError(SourceError):
    """Bringing weights up was given up because somebody asked for it."""


def seal(
    path: Path,
    *,
    expected_sha256: str | None,
    size_bytes: int,
    cancel: threading.Event | None,
    progress: Callable[[int, int], None] | None = None,
) -> SealedWeights:
    """Copy the file at ``path`` into sealed memory and verify it.

    ``size_bytes`` is the size the file must have, ``expected_sha256`` its hash (None: any, the
    caller compares). ``progress`` gets verified and total bytes, in the calling thread; what it
    raises ends the copy. Raises IntegrityError for bytes that are not the promised ones or that
    changed meanwhile, LoadCancelledError, and SourceError for the rest (unreadable, stalled, no
    memory).
    """
    name = str(path)
    source_fd, before = _open(name, size_bytes)
    memory_fd = -1
    started = False
    try:
        memory.require(size_bytes, name)
        share = residency.page_cache_share(source_fd, size_bytes)
        memory_fd = _create_memory(name.rpartition("/")[2], size_bytes)
        copy = _Copy(name, source_fd, before, memory_fd, cancel)
        started = True
        copy.run(progress)
        if expected_sha256 is not None and copy.sha256 != expected_sha256.lower():
            raise IntegrityError(
                f"{name} has the SHA-256 {copy.sha256}, but {expected_sha256} was promised",
                advice="the file is damaged or another one; fetch it again, or correct `sha256`",
            )
        _add_seals(memory_fd, name)
        return SealedWeights(copy, share)
    except BaseException:
        if not started:  # from then on the reader owns it
            os.close(source_fd)
        if memory_fd >= 0:
            os.close(memory_fd)
        raise


def _open(name: str, size_bytes: int) -> tuple[int, os.stat_result]:
    try:
        # O_NONBLOCK: a FIFO in the file's place must not hold us.
        fd = os.open(name, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except OSError as error:
        raise SourceError(f"cannot open {name}: {error.strerror}") from error
    status = os.fstat(fd)
    if stat.S_ISREG(status.st_mode) and status.st_size == size_bytes > 0:
        return fd, status
    os.close(fd)
    if not stat.S_ISREG(status.st_mode):
        raise SourceError(f"{name} is not a regular file")
    if status.st_size == 0:
        raise IntegrityError(f"{name} is empty", advice="fetch the file again")
    raise IntegrityError(
        f"{name} has {status.st_size:,} bytes, but {size_bytes:,} were expected",
        advice="the file is damaged, still being written, or another one; fetch it again",
    )


def _create_memory(name: str, size_bytes: int) -> int:
    label = f"preheat:{name}"[:200]
    flags = os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING
    try:
        fd = os.memfd_create(label, flags | _MFD_NOEXEC_SEAL)
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise SourceError(f"cannot create sealed memory: {error.strerror}") from error
        fd = os.memfd_create(label, flags)
    try:
        os.ftruncate(fd, size_bytes)
    except OSError as error:
        os.close(fd)
        raise SourceError(
            f"cannot have {size_bytes:,} bytes of sealed memory: {error.strerror}",
            advice="raise the limit of file sizes (ulimit -f)",
        ) from error
    return fd


def _add_seals(fd: int, name: str) -> None:
    try:
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, _SEALS)
    except OSError as error:
        raise SourceError(f"cannot seal the memory of {name}: {error.strerror}") from error


class _Copy:
    """One copy: a reader thread fills the memory, the calling thread hashes behind it."""

    def __init__(
        self,
        name: str,
        source_fd: int,
        before: os.stat_result,
        memory_fd: int,
        cancel: threading.Event | None,
    ) -> None:
        self.name = name
        self.size_bytes = before.st_size
        self.memory_fd = memory_fd
        self.bytes_read = 0
        self.sha256 = ""
        self.read_start_s = self.read_end_s = self.hash_start_s = self.hash_end_s = 0.0
        # Own descriptors: a reader that hangs may come back after everyone else has gone, and must
        # not then meet other files under its numbers.
        self._source_fd = source_fd
        self._target_fd = fcntl.fcntl(memory_fd, fcntl.F_DUPFD_CLOEXEC, 0)
        self._before = before
        self._cancel = cancel
        self._arrived = threading.Condition()
        self._idle_ticks = 0
        self._error: SourceError | None = None
        self._finished = False
        self._given_up = False

    def run(self, progress: Callable[[int, int], None] | None) -> None:
        """Copy and hash all of it."""
        # A daemon: a read that hangs in the kernel must hold up neither us nor our exit.
        reader = threading.Thread(target=self._read, name="weights", daemon=True)
        self.read_start_s = self.hash_start_s = time.monotonic()
        reader.start()
        try:
            self._hash(progress)
        finally:
            self._given_up = not self._finished
            # A living reader ends within a chunk; one that hangs ends when its disk comes back.
            reader.join(0.0 if self._stalled() else STALL_S)

    def _stalled(self) -> bool:
        # Ticks that were waited through, not time that passed: a process that was stopped, or got
        # no processor, must not take its own absence for a stalled disk.
        return self._idle_ticks * _TICK_S >= STALL_S

    def _hash(self, progress: Callable[[int, int], None] | None) -> None:
        digest = hashlib.sha256()
        buffer = memoryview(bytearray(min(CHUNK_BYTES, self.size_bytes)))
        position = 0
        while position < self.size_bytes:
            end = min(self._wait_beyond(position), position + CHUNK_BYTES)
            count = os.preadv(self.memory_fd, [buffer[: end - position]], position)
            digest.update(buffer[:count])
            position += count
            if progress is not None:
                progress(position, self.size_bytes)
        self.hash_end_s = time.monotonic()
        self._wait_finished()
        self.sha256 = digest.hexdigest()

    def _wait_beyond(self, position: int) -> int:
        """How many bytes have arrived, once they are more than ``position``."""
        with self._arrived:
            while self.bytes_read <= position:
                self._check()
                self._wait()
            self._check()
            return self.bytes_read

    def _wait_finished(self) -> None:
        with self._arrived:
            while not self._finished:
                self._check()
                self._wait()
            self._check()

    def _wait(self) -> None:
        if self._arrived.wait(_TICK_S):
            self._idle_ticks = 0
        else:
            self._idle_ticks += 1

    def _check(self) -> None:
        if self._error is not None:
            raise self._error
        if self._cancel is not None and self._cancel.is_set():
            raise LoadCancelledError(f"loading {self.name} was cancelled")
        if not self._finished and self._stalled():
            raise SourceError(
                f"reading {self.name} stalled: no byte came for {STALL_S:g} s after "
                f"{self.bytes_read:,} of {self.size_bytes:,}",
                advice="look at the disk or the network file system that holds it",
            )

    def _read(self) -> None:
        """Body of the reader thread; owns its two descriptors."""
        error: SourceError | None = None
        try:
            error = self._fill()
        except OSError as failure:
            error = _explained(failure, self.name)
        finally:
            os.close(self._source_fd)
            os.close(self._target_fd)
            with self._arrived:
                self.read_end_s = time.monotonic()
                self._error = error
                self._finished = True
                self._arrived.notify()

    def _fill(self) -> SourceError | None:
        buffer = memoryview(bytearray(min(CHUNK_BYTES, self.size_bytes)))
        position = 0
        while position < self.size_bytes:
            if self._given_up or (self._cancel is not None and self._cancel.is_set()):
                return LoadCancelledError(f"loading {self.name} was cancelled")
            wanted = min(CHUNK_BYTES, self.size_bytes - position)
            count = os.preadv(self._source_fd, [buffer[:wanted]], position)
            if count == 0:
                return IntegrityError(
                    f"{self.name} was cut short while it was read: it ended after {position:,} of "
                    f"{self.size_bytes:,} bytes",
                    advice="do not write to a model file that is being loaded",
                )
            position += os.write(self._target_fd, buffer[:count])
            with self._arrived:
                self.bytes_read = position
                self._arrived.notify()
        after = os.fstat(self._source_fd)
        if (after.st_size, after.st_mtime_ns) != (self._before.st_size, self._before.st_mtime_ns):
            return IntegrityError(
                f"{self.name} was changed while it was read",
                advice="do not write to a model file that is being loaded",
            )
        return None


def _explained(failure: OSError, name: str) -> SourceError:
    if failure.errno in (errno.ENOMEM, errno.ENOSPC):
        return SourceError(
            f"memory ran out while {name} was read", advice="free memory or use a smaller model"
        )
    return SourceError(
        f"cannot read {name}: {failure.strerror}", advice="look at the disk (dmesg) that holds it"
    )
