"""The directory of cold-start records: one JSON file for each start, newest first.

A file's name is ``<unix ms>-<start id>.json``; that name without its suffix is the record's id for
users. Nothing here decides when to write. What does not belong here: other formats.
"""

from __future__ import annotations

import os
import zlib
from dataclasses import dataclass
from pathlib import Path

import msgspec

from preheat.core.coldstart import ColdStart

KEEP = 200
SUFFIX = ".json"
UNFINISHED_SUFFIX = ".json.tmp"
ID_MAX_LENGTH = 120
_PLAIN = frozenset("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789._@-")


@dataclass(frozen=True, slots=True)
class StoredRecord:
    path: Path
    record: ColdStart

    @property
    def id(self) -> str:
        return self.path.name.removesuffix(SUFFIX)


def file_name(record: ColdStart) -> str:
    """``<unix ms>-<start id>.json``; an id that had to be changed gets a checksum, so that two ids
    that look alike afterwards stay two files."""
    plain = "".join(c if c in _PLAIN else "_" for c in record.start_id)[:ID_MAX_LENGTH]
    if plain != record.start_id:
        plain += f"-{zlib.crc32(record.start_id.encode('utf-8', 'surrogatepass')):08x}"
    return f"{round(record.unix_time_s * 1e3)}-{plain}{SUFFIX}"


def write_record(record: ColdStart, directory: Path) -> Path:
    """Writes the record's file in one step (made if missing: the directory). Raises OSError."""
    directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    path = directory / file_name(record)
    write_atomically(path, msgspec.json.encode(record))
    return path


def write_atomically(path: Path, content: bytes) -> None:
    """Puts a private file in place in one step. Not synced to the disk: after a power cut it may be
    empty, which readers skip, and a start never waits for the disk."""
    unfinished = path.with_name(path.name.removesuffix(SUFFIX) + UNFINISHED_SUFFIX)
    descriptor = os.open(unfinished, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(content)
        unfinished.replace(path)
    except BaseException:
        unfinished.unlink(missing_ok=True)
        raise


def read_records(directory: Path) -> tuple[list[StoredRecord], list[str]]:
    """All records, newest first, and a warning for each file that holds none."""
    records: list[StoredRecord] = []
    warnings: list[str] = []
    for path in _newest_first(directory, (SUFFIX,)):
        try:
            record = msgspec.json.decode(path.read_bytes(), type=ColdStart)
        except FileNotFoundError:
            continue  # pruned meanwhile by another process
        except (OSError, UnicodeDecodeError, msgspec.DecodeError) as error:
            warnings.append(f"{path}: skipped, not a cold-start record ({error})")
        else:
            records.append(StoredRecord(path, record))
    return records, warnings


def prune_records(directory: Path, keep: int = KEEP) -> int:
    """Deletes all but the newest ``keep`` files, leftovers of killed writers among them. Returns
    how many went."""
    surplus = _newest_first(directory, (SUFFIX, UNFINISHED_SUFFIX))[keep:]
    for path in surplus:
        path.unlink(missing_ok=True)
    return len(surplus)


def _newest_first(directory: Path, suffixes: tuple[str, ...]) -> list[Path]:
    try:
        paths = list(directory.iterdir())
    except FileNotFoundError:
        return []
    dated = []
    for path in paths:
        milliseconds = path.name.partition("-")[0]
        if path.name.endswith(suffixes) and milliseconds.isdecimal():
            dated.append((int(milliseconds), path))
    return [path for _, path in sorted(dated, reverse=True)]
