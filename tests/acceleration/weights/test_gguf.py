from __future__ import annotations

import struct
import tracemalloc
from typing import TYPE_CHECKING

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.acceleration.weights import samples

from preheat.acceleration.weights import gguf
from preheat.core.errors import IntegrityError, SourceError

if TYPE_CHECKING:
    from pathlib import Path

WHOLE = samples.gguf()
HEADER_BYTES = len(WHOLE) - samples.DATA_BYTES
MODEL_ALIGNMENT = samples.u32("general.alignment", 64)

in_one_directory = settings(
    suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None
)


def read(path: Path, data: bytes) -> gguf.GgufInfo:
    file = path / "model.gguf"
    file.write_bytes(data)
    return gguf.read_info(file)


def test_a_header_tells_what_the_model_is(tmp_path: Path) -> None:
    info = read(tmp_path, WHOLE)
    assert info == gguf.GgufInfo(
        version=3,
        architecture="llama",
        name="Tiny",
        context_length=4096,
        file_type="Q4_1",
        parameter_count=64 * 32 + 32 * 4,
        tensor_count=2,
        is_embedding_model=False,
        split_count=1,
        data_start_bytes=HEADER_BYTES,
        needed_bytes=len(WHOLE),
        file_bytes=len(WHOLE),
    )


def test_the_order_of_keys_does_not_matter(tmp_path: Path) -> None:
    assert read(tmp_path, samples.gguf(keys=samples.KEYS[::-1])) == read(tmp_path, WHOLE)


def test_version_2_is_read_and_optional_keys_may_be_missing(tmp_path: Path) -> None:
    info = read(tmp_path, samples.gguf(keys=samples.KEYS[:1], version=2))
    assert (info.version, info.name, info.context_length, info.file_type) == (2, None, None, None)


def test_strings_that_cross_the_window_are_stepped_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for window_bytes in (1, 7, 64, 1000):
        monkeypatch.setattr(gguf, "_WINDOW_BYTES", window_bytes)
        assert read(tmp_path, WHOLE).context_length == 4096


def test_the_alignment_of_the_data_is_the_file_s_own(tmp_path: Path) -> None:
    whole = samples.gguf(keys=[*samples.KEYS, MODEL_ALIGNMENT], alignment=64)
    assert read(tmp_path, whole).data_start_bytes % 64 == 0
    with pytest.raises(IntegrityError, match="cut short"):
        read(tmp_path, whole[:-1])


@pytest.mark.parametrize(
    "extra",
    [
        samples.u32("llama.pooling_type", 1),
        samples.key("llama.attention.causal", samples.BOOL, b"\0"),
    ],
)
def test_models_that_yield_vectors_are_told_apart(tmp_path: Path, extra: bytes) -> None:
    assert read(tmp_path, samples.gguf(keys=[*samples.KEYS, extra])).is_embedding_model
    bert = samples.string("general.architecture", "bert")
    assert read(tmp_path, samples.gguf(keys=[bert])).is_embedding_model


@given(cut=st.integers(0, len(WHOLE) - 1))
@in_one_directory
def test_a_file_cut_anywhere_is_refused_with_its_byte_numbers(tmp_path: Path, cut: int) -> None:
    with pytest.raises(IntegrityError, match="cut short") as raised:
        read(tmp_path, WHOLE[:cut])
    assert f"it has {cut:,} bytes" in str(raised.value)
    if cut >= HEADER_BYTES:
        assert f"needs at least {len(WHOLE):,}" in str(raised.value)


@pytest.mark.parametrize(
    ("data", "says"),
    [
        (b"GGML" + WHOLE[4:], "does not begin with GGUF"),
        (samples.gguf(version=1), "version 1"),
        (samples.gguf(version=0x03000000), "big-endian"),
        (samples.gguf(keys=[samples.KEYS[0]] * 2), "'general.architecture' appears twice"),
        (samples.gguf(keys=[samples.u32("x", 1)]), "general.architecture is missing"),
        (samples.gguf(keys=[samples.u32("general.architecture", 1)]), "general.architecture"),
        (samples.gguf(keys=[samples.key("x", 13, b"")]), "unknown type 13"),
        (samples.gguf(keys=[samples.text(b"\xff")]), "not UTF-8"),
        (samples.gguf(keys=[samples.string("general.name", "x" * 70_000)]), "70,000 bytes"),
        (
            samples.gguf(keys=[samples.key("x", 9, struct.pack("<IQ", 9, 1))]),
            "elements of type 9",
        ),
        (samples.gguf(keys=[*samples.KEYS, samples.u32("general.alignment", 24)]), "alignment"),
        (samples.gguf(keys=[*samples.KEYS, samples.u32("general.alignment", 0)]), "alignment"),
        (samples.gguf(tensors=[samples.TENSORS[0]] * 2), "'token_embd.weight' appears twice"),
        (samples.gguf(tensors=[samples.tensor("t", (1,) * 5, 0, 0)]), "5 dimensions"),
        (samples.gguf(tensors=[samples.tensor("t", (1 << 33, 1 << 33), 0, 0)]), "values"),
        (samples.gguf(tensors=[samples.tensor("t", (32,), 0, 5)]), "not aligned"),
        (samples.gguf(tensors=[samples.tensor("t", (33,), 3, 0)]), "whole blocks"),
    ],
)
def test_what_is_wrong_is_said(tmp_path: Path, data: bytes, says: str) -> None:
    with pytest.raises(IntegrityError, match=says):
        read(tmp_path, data)


@pytest.mark.parametrize("claim", [1 << 20, 1 << 32, (1 << 63) - 1, (1 << 64) - 1])
@pytest.mark.parametrize(
    "hostile",
    [
        lambda claim: b"GGUF" + struct.pack("<IQQ", 3, claim, 1) + samples.KEYS[0],
        lambda claim: b"GGUF" + struct.pack("<IQQ", 3, 1, claim) + samples.KEYS[0],
        lambda claim: samples.gguf(keys=[struct.pack("<Q", claim)]),
        lambda claim: samples.gguf(keys=[samples.key("x", 8, struct.pack("<Q", claim))]),
        lambda claim: samples.gguf(keys=[samples.key("general.name", 8, struct.pack("<Q", claim))]),
        lambda claim: samples.gguf(keys=[samples.key("x", 9, struct.pack("<IQ", 8, claim))]),
        lambda claim: samples.gguf(keys=[samples.key("x", 9, struct.pack("<IQ", 12, claim))]),
        lambda claim: samples.gguf(
            keys=[samples.key("x", 9, struct.pack("<IQQ", 8, 100, claim) + bytes(1000))]
        ),
        lambda claim: samples.gguf(tensors=[samples.tensor("t", (claim,), 0, 0)]),
        lambda claim: samples.gguf(tensors=[samples.tensor("t", (1,), 99, claim // 32 * 32)]),
    ],
)
def test_a_claimed_number_costs_no_memory(tmp_path: Path, hostile: object, claim: int) -> None:
    assert callable(hostile)
    file = tmp_path / "model.gguf"
    file.write_bytes(hostile(claim))
    tracemalloc.start()
    try:
        with pytest.raises(IntegrityError):
            gguf.read_info(file)
        assert tracemalloc.get_traced_memory()[1] < 4 * gguf._WINDOW_BYTES
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize(
    ("count", "says"),
    [(1 << 30, "header is longer"), (gguf.MAX_STRINGS + 1, "more than [0-9,]+ strings")],
)
def test_a_huge_file_of_empty_strings_is_refused_by_their_number(
    tmp_path: Path, count: int, says: str
) -> None:
    file = tmp_path / "model.gguf"
    with file.open("wb") as output:
        output.write(b"GGUF" + struct.pack("<IQQ", 3, 0, 1))
        output.write(samples.text("x") + struct.pack("<IIQ", 9, 8, count))
        output.truncate(output.tell() + 8 * count)  # a hole: zeros without a disk
    with pytest.raises(IntegrityError, match=says):
        gguf.read_info(file)


@given(
    changes=st.lists(
        st.tuples(
            st.integers(0, HEADER_BYTES - 8),
            st.one_of(
                st.binary(min_size=1, max_size=8),
                st.integers(0, (1 << 64) - 1).map(lambda number: struct.pack("<Q", number)),
            ),
        ),
        min_size=1,
        max_size=4,
    )
)
@settings(in_one_directory, max_examples=300)
def test_a_damaged_header_is_read_or_refused_and_nothing_else(
    tmp_path: Path, changes: list[tuple[int, bytes]]
) -> None:
    data = bytearray(WHOLE)
    for position, change in changes:
        data[position : position + len(change)] = change
    try:
        info = read(tmp_path, bytes(data))
    except IntegrityError:
        return
    assert info.needed_bytes <= info.file_bytes


def test_a_file_that_cannot_be_opened_is_a_source_error(tmp_path: Path) -> None:
    with pytest.raises(SourceError, match="No such file"):
        gguf.read_info(tmp_path / "none.gguf")
    with pytest.raises(SourceError, match="directory"):
        gguf.read_info(tmp_path)
