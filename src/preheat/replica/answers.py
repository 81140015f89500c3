"""Recorded answers on disk: one JSON file per model, engine build, CPU, options and question."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

import msgspec

from preheat.core.errors import ProofError
from preheat.replica.warmup import Answer

_CPU_FIELDS = ("model name", "flags", "CPU implementer", "CPU part", "Features")


def cpu_model(cpuinfo: Path = Path("/proc/cpuinfo")) -> str:
    """Name of the CPU and its vector units, on which the last digits of an answer depend."""
    found: dict[str, str] = {}
    # The first processor's lines only: with hundreds of them the kernel takes long to write all.
    with cpuinfo.open() as lines:
        for line in lines:
            name, _, value = line.partition(":")
            if name.strip() in _CPU_FIELDS:
                found[name.strip()] = value.strip()
            if not line.strip():
                break
    return " ".join(found.values())


def recorded(directory: Path, key: str) -> Answer | None:
    """The recorded answer, or None. Raises ProofError for a file that cannot be read."""
    path = directory / f"{key}.json"
    try:
        return msgspec.json.decode(path.read_bytes(), type=Answer)
    except FileNotFoundError:
        return None
    except (OSError, msgspec.MsgspecError) as error:
        raise ProofError(
            f"the recorded answer {path} cannot be read: {error}",
            advice=f"rm {path}; the next start records it anew",
        ) from error


def record(directory: Path, key: str, answer: Answer) -> None:
    """Keeps the answer unless there is one already: the first proven start's counts.

    Raises OSError when it cannot be written; nothing of it stays then.
    """
    directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    temporary = directory / f".{key}.{os.urandom(4).hex()}"
    try:
        temporary.write_bytes(msgspec.json.encode(answer))
        with contextlib.suppress(FileExistsError):
            (directory / f"{key}.json").hardlink_to(temporary)
    finally:
        temporary.unlink(missing_ok=True)
