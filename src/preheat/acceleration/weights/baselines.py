"""What local model files hashed to when they were first used: trust on first use.

For a file whose source promises no hash, the first start records it and every later one compares.
One small JSON file for each path, below ``baselines`` in the state directory. A record stands for
the absolute path as it was written: a link that is turned to another file counts as a change.
What does not belong here: files whose hash the spec promises, and hashing on the start path.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import secrets
import time
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING

from preheat.acceleration.weights import localfile
from preheat.core.errors import IntegrityError, SourceError

if TYPE_CHECKING:
    from pathlib import Path


@dataclass(frozen=True, slots=True)
class Baseline:
    """The hash of one file."""

    path: str
    sha256: str
    size_bytes: int
    unix_time_s: float
    """When it was recorded."""


class Baselines:
    """All records below one state directory. Safe for several processes."""

    def __init__(self, state: Path) -> None:
        self._directory = state / "baselines"

    def get(self, path: Path) -> Baseline | None:
        """The record of ``path``. Raises IntegrityError if it cannot be read."""
        path = path.absolute()
        file = self._file(path)
        try:
            baseline = _decoded(file.read_bytes())
        except FileNotFoundError:
            return None
        except OSError as error:
            raise SourceError(f"cannot read {file}: {error.strerror}") from error
        if baseline is None or baseline.path != str(path):
            raise IntegrityError(
                f"the recorded hash of {path} in {file} cannot be read",
                advice=f"record it anew: preheat models trust {path}",
            )
        return baseline

    def put(self, path: Path, sha256: str, size_bytes: int) -> Baseline:
        """Record the hash, in place of an earlier one."""
        baseline = Baseline(str(path.absolute()), sha256, size_bytes, time.time())
        self._write(baseline, replace=True)
        return baseline

    def forget(self, path: Path) -> bool:
        """Drop the record; whether there was one."""
        try:
            self._file(path.absolute()).unlink()
        except FileNotFoundError:
            return False
        return True

    def compare_or_record(self, path: Path, sha256: str, size_bytes: int) -> bool:
        """True if this was the first time and the hash was recorded, False if it is the recorded
        one. Raises IntegrityError if it is another."""
        path = path.absolute()
        recorded = self.get(path)
        if recorded is None:
            baseline = Baseline(str(path), sha256, size_bytes, time.time())
            if self._write(baseline, replace=False):
                return True
            recorded = self.get(path)  # another process was first
        if recorded is not None and recorded.sha256 != sha256:
            raise IntegrityError(
                f"{path} is not the file that was used before: its SHA-256 is {sha256} "
                f"({size_bytes:,} bytes), recorded was {recorded.sha256} "
                f"({recorded.size_bytes:,} bytes)",
                advice=f"if the change is wanted, accept it: preheat models trust {path}",
            )
        return False

    def _file(self, path: Path) -> Path:
        return self._directory / f"{hashlib.sha256(os.fsencode(path)).hexdigest()}.json"

    def _write(self, baseline: Baseline, *, replace: bool) -> bool:
        """Whether it was written; without ``replace``, only where nothing was recorded yet."""
        file = self._file(self._directory / baseline.path)
        temporary = file.with_name(f".{file.name}.{secrets.token_hex(8)}")
        try:
            self._directory.mkdir(mode=0o700, parents=True, exist_ok=True)
            try:
                with temporary.open("x", encoding="utf-8") as output:
                    json.dump(asdict(baseline), output)
                    output.flush()
                    os.fsync(output.fileno())
                if replace:
                    temporary.replace(file)
                    return True
                with contextlib.suppress(FileExistsError):
                    file.hardlink_to(temporary)
                    return True
                return False
            finally:
                temporary.unlink(missing_ok=True)
        except OSError as error:
            raise SourceError(
                f"cannot record the hash of {baseline.path}: {error.strerror}",
                advice="make the state directory writable, or set PREHEAT_STATE_DIR",
            ) from error


def trust(path: Path, state: Path) -> Baseline:
    """Hash the file (or the only one in the directory) at ``path`` and accept it from now on."""
    file = localfile.find(path)
    localfile.check(file, whole_header=True)
    digest = hashlib.sha256()
    size_bytes = 0
    try:
        with file.open("rb", buffering=0) as source:
            while chunk := source.read(4 << 20):
                digest.update(chunk)
                size_bytes += len(chunk)
    except OSError as error:
        raise SourceError(f"cannot read {file}: {error.strerror}") from error
    return Baselines(state).put(file, digest.hexdigest(), size_bytes)


def recorded_sha256(path: Path, state: Path) -> str | None:
    """The recorded hash of ``path``, hex."""
    baseline = Baselines(state).get(path)
    return None if baseline is None else baseline.sha256


def record_sha256(path: Path, sha256: str, size_bytes: int, state: Path) -> None:
    """Record the hash, in place of an earlier one."""
    Baselines(state).put(path, sha256, size_bytes)


def _decoded(data: bytes) -> Baseline | None:
    try:
        match json.loads(data):
            case {
                "path": str(path),
                "sha256": str(sha256),
                "size_bytes": int(size_bytes),
                "unix_time_s": int() | float() as unix_time_s,
            }:
                return Baseline(path, sha256, size_bytes, unix_time_s)
    except ValueError:
        pass
    return None
