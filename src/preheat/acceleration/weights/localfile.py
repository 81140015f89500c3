"""Finds the one GGUF file that a local path means, and says early why it cannot be a model.

What does not belong here: hashing, and whether an engine can run the model.
"""

from __future__ import annotations

import os
import stat
from typing import TYPE_CHECKING

from preheat.acceleration.weights import gguf
from preheat.acceleration.weights.located import UnusableSourceError
from preheat.core.errors import IntegrityError, SourceError

if TYPE_CHECKING:
    from pathlib import Path

_LFS = b"version https://git-lfs"
_LISTED = 8
_BEGINNINGS = {
    b"<!": "an HTML page, perhaps a failed download",
    b"<h": "an HTML page, perhaps a failed download",
    b"PK": "a ZIP archive or a PyTorch checkpoint",
    b"gg": "in the older GGML format",
    b"tj": "in the older GGML format",
    b"lm": "in the older GGML format",
    b"\0\0": "filled with zeros, perhaps still downloading",
}


def find(path: Path) -> Path:
    """``path`` itself, or the only GGUF file in the directory ``path``; absolute, links kept."""
    try:
        path = path.expanduser().absolute()
    except RuntimeError as error:
        raise UnusableSourceError(f"cannot expand {path}: {error}") from error
    if "\0" in str(path):
        raise UnusableSourceError(f"{str(path)!r} is not a path: it holds a zero byte")
    try:
        mode = path.stat().st_mode
    except OSError as error:
        raise _no_access(path, error) from error
    if not stat.S_ISDIR(mode):
        return path
    try:
        found = sorted(
            entry
            for entry in path.iterdir()
            if entry.suffix.lower() == ".gguf"
            and not entry.name.startswith(".")
            and not entry.is_dir()
        )
    except OSError as error:
        raise _no_access(path, error) from error
    if not found:
        raise UnusableSourceError(
            f"the directory {path} holds no .gguf file", advice="give the path of the model's file"
        )
    if len(found) > 1:
        names = ", ".join(entry.name for entry in found[:_LISTED])
        more = f" and {len(found) - _LISTED} more" if len(found) > _LISTED else ""
        raise UnusableSourceError(
            f"the directory {path} holds {len(found)} .gguf files: {names}{more}",
            advice="give the path of one of them",
        )
    return found[0]


def check(path: Path, *, whole_header: bool) -> int:
    """Size of the GGUF file at ``path`` in bytes, once its beginning has been looked at.

    ``whole_header`` also holds the file's size against its tensor table, which takes some 10 ms.
    Raises IntegrityError, UnusableSourceError.
    """
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except OSError as error:
        raise _no_access(path, error) from error
    try:
        status = os.fstat(fd)
        if not stat.S_ISREG(status.st_mode):
            raise UnusableSourceError(f"{path} is not a regular file")
        _check_beginning(path, os.pread(fd, 256, 0), status.st_size)
        if whole_header:
            info = gguf.read_info_fd(fd, str(path))
            if info.split_count > 1:
                raise UnusableSourceError(
                    f"{path} is one of {info.split_count} files that the model is split over",
                    advice="merge them first: llama-gguf-split --merge FIRST OUTPUT",
                )
        return status.st_size
    except OSError as error:
        raise SourceError(f"cannot read {path}: {error.strerror}") from error
    finally:
        os.close(fd)


def _check_beginning(path: Path, beginning: bytes, size_bytes: int) -> None:
    if size_bytes == 0:
        raise IntegrityError(f"{path} is empty", advice="fetch the file again")
    if beginning.startswith(_LFS):
        raise IntegrityError(
            f"{path} is a Git LFS pointer of {size_bytes} bytes, not the model",
            advice="fetch the file it points to: git lfs pull",
        )
    if not beginning.startswith(gguf.MAGIC):
        if gguf.MAGIC.startswith(beginning):
            raise gguf.truncated(str(path), size_bytes, gguf.SMALLEST_BYTES, "a GGUF header")
        likely = _BEGINNINGS.get(beginning[:2])
        raise IntegrityError(
            f"{path} is not a GGUF file: it begins with {beginning[:4]!r}"
            + (f" (it looks like it is {likely})" if likely else ""),
            advice="fetch the model again, or convert it to GGUF",
        )
    if size_bytes < gguf.SMALLEST_BYTES:
        raise gguf.truncated(str(path), size_bytes, gguf.SMALLEST_BYTES, "a GGUF header")


def _no_access(path: Path, error: OSError) -> UnusableSourceError:
    if isinstance(error, FileNotFoundError) and path.is_symlink():
        return UnusableSourceError(f"{path} is a link to {path.readlink()}, which does not exist")
    if isinstance(error, FileNotFoundError):
        return UnusableSourceError(f"{path} does not exist", advice="check the path in `source`")
    return UnusableSourceError(
        f"cannot read {path}: {error.strerror}", advice="check its owner and permissions"
    )
