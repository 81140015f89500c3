"""The cache of model files, addressed by their SHA-256, safe for any number of processes.

    models/sha256/HEX/NAME           the file, mode 0400
    models/sha256/HEX/.size_bytes    its size; both appear at once, by renaming their directory
    models/partial/HEX/              work of the one process that holds the lock of HEX
    models/locks/HEX                 flock; never removed, for a lock on a removed file is no lock

Whoever holds a lock may delete what lies in its partial directory: its owner is dead. The kernel
gives a dead process's locks back, so no process id is ever compared.
What does not belong here: where files come from, and verifying them on every start.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import time
from pathlib import Path
from typing import TYPE_CHECKING

from preheat.acceleration.weights.located import Progress, UnusableSourceError
from preheat.core.errors import SourceError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from preheat.acceleration.weights.located import Report

SIZE_NAME = ".size_bytes"
_POLL_S = 0.05
_REMOVE_S = 2.0


class Store:
    """Entries below one cache directory."""

    def __init__(self, cache: Path) -> None:
        self._entries = cache / "models" / "sha256"
        self._partial = cache / "models" / "partial"
        self._locks = cache / "models" / "locks"

    def lookup(self, sha256: str) -> tuple[Path, int] | None:
        """Path and size of the entry, if it is there and has the size it was stored with."""
        directory = self._entries / sha256
        try:
            size_bytes = int((directory / SIZE_NAME).read_text())
            for file in directory.iterdir():
                if file.name != SIZE_NAME and file.stat().st_size == size_bytes:
                    return file, size_bytes
        except (OSError, ValueError):
            return None
        return None

    @contextlib.contextmanager
    def locked(self, sha256: str, report: Report | None) -> Iterator[Path]:
        """Hold the entry's lock; yields an empty directory for the work, gone afterwards."""
        partial = self._partial / sha256
        try:
            for directory in (self._entries, self._partial, self._locks):
                directory.mkdir(mode=0o700, parents=True, exist_ok=True)
            lock = os.open(self._locks / sha256, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise UnusableSourceError(
                f"cannot write to the cache: {error.filename}: {error.strerror}",
                advice="make it writable, or set PREHEAT_CACHE_DIR to a directory that is",
            ) from error
        try:
            while not _try_lock(lock):
                if report is not None:
                    report(Progress("waiting", largest_file_bytes(partial), None))
                time.sleep(_POLL_S)
            _remove(partial)
            # A new name: a pip whose parent was killed just now may live for a moment longer.
            work = partial / os.urandom(4).hex()
            work.mkdir(mode=0o700, parents=True)
            try:
                yield work
            finally:
                _remove(partial)
        finally:
            os.close(lock)

    def sweep(self) -> None:
        """Delete what fetches left behind whose processes were killed."""
        try:
            leftovers = [entry.name for entry in os.scandir(self._partial)]
        except OSError:
            return  # no cache yet, or one that cannot be read: nothing of ours to clean
        for sha256 in leftovers:
            # A cache that is read-only by now keeps its leftovers.
            with contextlib.suppress(OSError, SourceError):
                lock = os.open(self._locks / sha256, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
                try:
                    if _try_lock(lock):
                        _remove(self._partial / sha256)
                finally:
                    os.close(lock)

    def publish(self, sha256: str, prepared: Path, size_bytes: int) -> Path:
        """Make the verified file ``prepared``, alone in its directory within the partial one, the
        entry. Needs the lock. Durable when it returns."""
        directory = prepared.parent
        size = directory / SIZE_NAME
        size.write_text(str(size_bytes))
        _sync(size)
        prepared.chmod(0o400)
        _sync(prepared)
        _sync(directory)
        self.remove(sha256)
        entry = self._entries / sha256
        directory.rename(entry)
        _sync(self._entries)
        return entry / prepared.name

    def remove(self, sha256: str) -> bool:
        """Remove the entry; whether there was one. Needs the lock."""
        # By renaming, so that no moment shows half an entry; the partial directory goes later.
        try:
            (self._entries / sha256).rename(self._partial / sha256 / "removed")
        except FileNotFoundError:
            return False
        return True


def largest_file_bytes(directory: Path) -> int:
    """Size of the largest file below ``directory``, which others write and delete meanwhile."""
    largest = 0
    pending = [os.fspath(directory)]
    while pending:
        with contextlib.suppress(OSError), os.scandir(pending.pop()) as entries:
            for entry in entries:
                if entry.is_dir(follow_symlinks=False):
                    pending.append(entry.path)
                else:
                    with contextlib.suppress(FileNotFoundError):
                        largest = max(largest, entry.stat(follow_symlinks=False).st_size)
    return largest


def require_space(directory: Path, size_bytes: int, name: str) -> None:
    """Raise SourceError unless the disk of ``directory`` has room for ``size_bytes``."""
    status = os.statvfs(directory)
    free_bytes = status.f_bavail * status.f_frsize
    if free_bytes < size_bytes:
        raise SourceError(
            f"{name} needs {size_bytes:,} bytes of disk, but {directory} has only "
            f"{free_bytes:,} left",
            advice="free space, or set PREHEAT_CACHE_DIR to a larger disk",
        )


def _try_lock(lock: int) -> bool:
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _sync(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def _remove(directory: Path) -> None:
    deadline_s = time.monotonic() + _REMOVE_S
    while directory.exists():
        import shutil  # not needed, and not paid for, when the entry is there

        try:
            shutil.rmtree(directory)
        except OSError as error:
            # A pip that is being killed may still have put a file there, or taken one away.
            if error.errno not in (errno.ENOTEMPTY, errno.ENOENT) or time.monotonic() > deadline_s:
                raise SourceError(
                    f"cannot delete {error.filename}: {error.strerror}",
                    advice=f"delete {directory} by hand",
                ) from error
            time.sleep(_POLL_S)
