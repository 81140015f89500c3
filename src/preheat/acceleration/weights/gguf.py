"""Reads the header of a GGUF file: what the model is, and whether the file is long enough for it.

The file is untrusted: every count and length is checked against what the file holds before it is
used, nothing is allocated by a number from the file, nothing recurses, and only ``pread`` touches
it, so a file that shrinks meanwhile gives an error and no signal. Vocabularies are stepped over,
not built. Layout: GGUF specification, versions 2 and 3, little-endian.
What does not belong here: the tensors' data, and what an engine does with a model.
"""

from __future__ import annotations

import os
import struct
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from preheat.core.errors import IntegrityError, SourceError

if TYPE_CHECKING:
    from pathlib import Path

MAGIC: Final = b"GGUF"
SMALLEST_BYTES: Final = 24
"""Magic, version and the two counts."""

# Far above every real model (largest seen: some 1,100 tensors, 800,000 strings, 20 MB of header),
# low enough that the worst file is refused within a second or two.
MAX_HEADER_BYTES: Final = 256 << 20
MAX_STRINGS: Final = 4 << 20
MAX_KEYS: Final = 16_384
MAX_TENSORS: Final = 65_536
MAX_KEY_BYTES: Final = 65_535
MAX_VALUE_BYTES: Final = 65_536
MAX_DIMENSIONS: Final = 4
MAX_ALIGNMENT: Final = 1 << 20
_WINDOW_BYTES: Final = 1 << 20

_STRING: Final = 8
_ARRAY: Final = 9
_SCALARS: Final = {
    0: struct.Struct("<B"),
    1: struct.Struct("<b"),
    2: struct.Struct("<H"),
    3: struct.Struct("<h"),
    4: struct.Struct("<I"),
    5: struct.Struct("<i"),
    6: struct.Struct("<f"),
    7: struct.Struct("<?"),
    10: struct.Struct("<Q"),
    11: struct.Struct("<q"),
    12: struct.Struct("<d"),
}
_U32: Final = struct.Struct("<I")
_U64: Final = struct.Struct("<Q")

# Tensor types: values in a block, bytes of a block. A type that is not listed here is newer than
# this table; of its tensors only the beginning is checked.
_BLOCKS: Final = {
    0: (1, 4), 1: (1, 2), 2: (32, 18), 3: (32, 20), 6: (32, 22), 7: (32, 24), 8: (32, 34),
    9: (32, 36), 10: (256, 84), 11: (256, 110), 12: (256, 144), 13: (256, 176), 14: (256, 210),
    15: (256, 292), 16: (256, 66), 17: (256, 74), 18: (256, 98), 19: (256, 50), 20: (32, 18),
    21: (256, 110), 22: (256, 82), 23: (256, 136), 24: (1, 1), 25: (1, 2), 26: (1, 4), 27: (1, 8),
    28: (1, 8), 29: (256, 56), 30: (1, 2), 34: (256, 54), 35: (256, 66), 39: (32, 17),
}  # fmt: skip

_FILE_TYPES: Final = {
    0: "F32", 1: "F16", 2: "Q4_0", 3: "Q4_1", 7: "Q8_0", 8: "Q5_0", 9: "Q5_1", 10: "Q2_K",
    11: "Q3_K_S", 12: "Q3_K_M", 13: "Q3_K_L", 14: "Q4_K_S", 15: "Q4_K_M", 16: "Q5_K_S",
    17: "Q5_K_M", 18: "Q6_K", 19: "IQ2_XXS", 20: "IQ2_XS", 21: "Q2_K_S", 22: "IQ3_XS",
    23: "IQ3_XXS", 24: "IQ1_S", 25: "IQ4_NL", 26: "IQ3_S", 27: "IQ3_M", 28: "IQ2_S", 29: "IQ2_M",
    30: "IQ4_XS", 31: "IQ1_M", 32: "BF16", 36: "TQ1_0", 37: "TQ2_0", 38: "MXFP4_MOE",
}  # fmt: skip

_EMBEDDING_ARCHITECTURES: Final = frozenset(
    {"bert", "modern-bert", "nomic-bert", "nomic-bert-moe", "neo-bert", "eurobert",
     "jina-bert-v2", "jina-bert-v3", "gemma-embedding", "t5encoder"}
)  # fmt: skip

_WANTED: Final = frozenset(
    {"general.architecture", "general.name", "general.alignment", "general.file_type",
     "split.count"}
)  # fmt: skip
_WANTED_ENDINGS: Final = (".context_length", ".pooling_type", ".attention.causal")

_Value = int | float | bool | str


@dataclass(frozen=True, slots=True)
class GgufInfo:
    """What a GGUF file says about its model."""

    version: int
    """Version of the format, 2 or 3."""
    architecture: str
    """Name of the architecture as llama.cpp spells it (``llama``, ``qwen3``, ``bert``)."""
    name: str | None
    context_length: int | None
    """Tokens of context the model was trained for."""
    file_type: str | None
    """Quantisation of most tensors (``Q4_K_M``), ``type N`` for an N this table does not know."""
    parameter_count: int
    """Values in all tensors."""
    tensor_count: int
    is_embedding_model: bool
    """It yields vectors, not text."""
    split_count: int
    """Files the model is split over; 1 for a whole one."""
    data_start_bytes: int
    """Offset at which the tensors' data begins."""
    needed_bytes: int
    """Smallest size the file must have for its tensor table."""
    file_bytes: int


class _Header:
    """A bounded cursor over the beginning of the file."""

    __slots__ = ("_base", "_fd", "_limit", "_pos", "_strings", "_window", "name", "size")

    def __init__(self, fd: int, name: str, size: int) -> None:
        self._fd = fd
        self.name = name
        self.size = size
        self._limit = min(size, MAX_HEADER_BYTES)
        self._window = b""
        self._base = 0
        self._pos = 0
        self._strings = 0

    @property
    def offset(self) -> int:
        return self._base + self._pos

    def wrong(self, what: str) -> IntegrityError:
        return IntegrityError(
            f"{self.name} is not a valid GGUF file: {what} (byte {self.offset:,})",
            advice="fetch or convert the file again",
        )

    def _reach(self, offset: int, what: str) -> None:
        """Raise unless the header may extend to ``offset``."""
        if offset > self.size:
            raise truncated(self.name, self.size, offset, what)
        if offset > self._limit:
            raise self.wrong(f"its header is longer than {MAX_HEADER_BYTES:,} bytes")

    def _need(self, count: int, what: str) -> int:
        """Have ``count`` (at most a window) bytes in the window; their position in it."""
        if self._pos + count > len(self._window):
            offset = self.offset
            self._reach(offset + count, what)
            self._window = os.pread(self._fd, max(_WINDOW_BYTES, count), offset)
            self._base, self._pos = offset, 0
            if len(self._window) < count:
                raise truncated(self.name, offset + len(self._window), offset + count, what)
        return self._pos

    def _skip(self, count: int, what: str) -> None:
        self._reach(self.offset + count, what)
        self._pos += count

    def u32(self, what: str) -> int:
        at = self._need(4, what)
        self._pos += 4
        return int(_U32.unpack_from(self._window, at)[0])

    def u64(self, what: str) -> int:
        at = self._need(8, what)
        self._pos += 8
        return int(_U64.unpack_from(self._window, at)[0])

    def text(self, limit_bytes: int, what: str) -> str:
        length = self.u64(what)
        if length > limit_bytes:
            raise self.wrong(f"{what} claims a length of {length:,} bytes")
        at = self._need(length, what)
        self._pos += length
        try:
            return self._window[at : at + length].decode()
        except UnicodeDecodeError:
            raise self.wrong(f"{what} is not UTF-8") from None

    def value(self, kind: int, key: str) -> _Value:
        if kind == _STRING:
            return self.text(MAX_VALUE_BYTES, f"the value of {key}")
        form = _SCALARS[kind]
        at = self._need(form.size, key)
        self._pos += form.size
        value: _Value = form.unpack_from(self._window, at)[0]
        return value

    def skip_value(self, kind: int, key: str) -> None:
        if kind == _STRING:
            self._skip_strings(1, key)
        elif kind == _ARRAY:
            self._skip_array(key)
        else:
            self._skip(_SCALARS[kind].size, key)

    def _skip_array(self, key: str) -> None:
        kind = self.u32(key)
        count = self.u64(key)
        if kind == _STRING:
            self._skip_strings(count, key)
        elif kind in _SCALARS:
            self._skip(count * _SCALARS[kind].size, key)
        else:
            raise self.wrong(f"the array {key} has elements of type {kind}")

    def _skip_strings(self, count: int, key: str) -> None:
        self._reach(self.offset + 8 * count, key)
        self._strings += count
        if self._strings > MAX_STRINGS:
            raise self.wrong(f"more than {MAX_STRINGS:,} strings, counted to {key}")
        # The one hot loop: a vocabulary of 49,000 tokens and as many merges is 98,000 turns.
        unpack = _U64.unpack_from
        while count:
            position = self._need(8, key)
            window = self._window
            turn = 0
            try:
                for turn in range(count):  # noqa: B007 - read after the loop was left by an error
                    position += unpack(window, position)[0] + 8
                turn = count
            except (struct.error, OverflowError):
                pass  # past the window: go on from a new one, if the file goes that far
            self._skip(position - self._pos, key)
            count -= turn


def truncated(name: str, have_bytes: int, need_bytes: int, what: str) -> IntegrityError:
    return IntegrityError(
        f"{name} is cut short: it has {have_bytes:,} bytes, {what} needs at least {need_bytes:,}",
        advice="the download may still be running or was interrupted; fetch the file again",
    )


def read_info(path: Path) -> GgufInfo:
    """The header of the file at ``path``. Raises IntegrityError, SourceError if not readable."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except OSError as error:
        raise SourceError(f"cannot open {path}: {error.strerror}") from error
    try:
        return read_info_fd(fd, str(path))
    finally:
        os.close(fd)


def read_info_fd(fd: int, name: str) -> GgufInfo:
    """As ``read_info``, of an open regular file or sealed memory; its position is not touched."""
    header = _Header(fd, name, os.fstat(fd).st_size)
    try:
        version, tensor_count, key_count = _preamble(header)
        values = _metadata(header, key_count)
        alignment = _alignment(header, values)
        parameters, last_end = _tensors(header, tensor_count, alignment)
    except OSError as error:
        raise SourceError(f"cannot read {name}: {error.strerror}") from error
    data_start = -(-header.offset // alignment) * alignment
    needed = data_start + last_end if tensor_count else header.offset
    if needed > header.size:
        raise truncated(name, header.size, needed, "its tensor table")
    architecture = values.get("general.architecture")
    if not isinstance(architecture, str) or not architecture:
        raise header.wrong("general.architecture is missing or not a string")
    model_name = values.get("general.name")
    return GgufInfo(
        version=version,
        architecture=architecture,
        name=model_name if isinstance(model_name, str) else None,
        context_length=_integer(header, values, f"{architecture}.context_length"),
        file_type=_file_type(header, values),
        parameter_count=parameters,
        tensor_count=tensor_count,
        is_embedding_model=_is_embedding_model(header, architecture, values),
        split_count=_integer(header, values, "split.count") or 1,
        data_start_bytes=data_start,
        needed_bytes=needed,
        file_bytes=header.size,
    )


def _preamble(header: _Header) -> tuple[int, int, int]:
    """Version, number of tensors, number of keys."""
    if header.u32("the magic number") != int.from_bytes(MAGIC, "little"):
        raise header.wrong("it does not begin with GGUF")
    version = header.u32("the version")
    if version in (0x02000000, 0x03000000):
        raise header.wrong("it is big-endian; only little-endian files are supported")
    if version not in (2, 3):
        raise header.wrong(f"version {version} of the format is not supported, only 2 and 3 are")
    tensor_count = header.u64("the number of tensors")
    key_count = header.u64("the number of keys")
    if tensor_count > MAX_TENSORS:
        raise header.wrong(f"it claims {tensor_count:,} tensors, more than {MAX_TENSORS:,}")
    if key_count > MAX_KEYS:
        raise header.wrong(f"it claims {key_count:,} keys, more than {MAX_KEYS:,}")
    return version, tensor_count, key_count


def _metadata(header: _Header, key_count: int) -> dict[str, _Value]:
    """The values of the wanted keys; all keys are checked, all other values stepped over."""
    seen: set[str] = set()
    values: dict[str, _Value] = {}
    for number in range(key_count):
        key = header.text(MAX_KEY_BYTES, f"the name of key {number}")
        if key in seen:
            raise header.wrong(f"the key {key!r} appears twice")
        seen.add(key)
        kind = header.u32(key)
        if kind != _ARRAY and kind != _STRING and kind not in _SCALARS:
            raise header.wrong(f"the key {key!r} has the unknown type {kind}")
        if kind != _ARRAY and (key in _WANTED or key.endswith(_WANTED_ENDINGS)):
            values[key] = header.value(kind, key)
        else:
            header.skip_value(kind, key)
    return values


def _tensors(header: _Header, tensor_count: int, alignment: int) -> tuple[int, int]:
    """All tensors' values, and where the last one ends, in bytes from the start of the data."""
    seen: set[str] = set()
    parameters = 0
    last_end = 0
    for number in range(tensor_count):
        name = header.text(MAX_KEY_BYTES, f"the name of tensor {number}")
        if name in seen:
            raise header.wrong(f"the tensor {name!r} appears twice")
        seen.add(name)
        dimensions = header.u32(name)
        if dimensions > MAX_DIMENSIONS:
            raise header.wrong(f"the tensor {name!r} claims {dimensions} dimensions")
        row, values = 1, 1
        for dimension in range(dimensions):
            length = header.u64(name)
            row = length if dimension == 0 else row
            values *= length
        if values >= 1 << 63:
            raise header.wrong(f"the tensor {name!r} claims {values:,} values")
        kind = header.u32(name)
        offset = header.u64(name)
        if offset % alignment:
            raise header.wrong(f"the tensor {name!r} is not aligned to {alignment} bytes")
        block_values, block_bytes = _BLOCKS.get(kind, (1, 0))
        if row % block_values:
            raise header.wrong(f"rows of the tensor {name!r} are not whole blocks")
        parameters += values
        last_end = max(last_end, offset + values // block_values * block_bytes)
    return parameters, last_end


def _alignment(header: _Header, values: dict[str, _Value]) -> int:
    alignment = _integer(header, values, "general.alignment")
    if alignment is None:
        return 32
    if not 8 <= alignment <= MAX_ALIGNMENT or alignment & (alignment - 1):
        raise header.wrong(f"general.alignment is {alignment}")
    return alignment


def _integer(header: _Header, values: dict[str, _Value], key: str) -> int | None:
    value = values.get(key)
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        raise header.wrong(f"{key} is {value!r} and not a whole number")
    return value


def _file_type(header: _Header, values: dict[str, _Value]) -> str | None:
    number = _integer(header, values, "general.file_type")
    return None if number is None else _FILE_TYPES.get(number, f"type {number}")


def _is_embedding_model(header: _Header, architecture: str, values: dict[str, _Value]) -> bool:
    return (
        architecture in _EMBEDDING_ARCHITECTURES
        or bool(_integer(header, values, f"{architecture}.pooling_type"))
        or values.get(f"{architecture}.attention.causal") is False
    )
