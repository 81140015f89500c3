from __future__ import annotations

import os
from typing import TYPE_CHECKING

import pytest
from tests.acceleration.weights import samples

from preheat.acceleration.weights.sources import UnusableSourceError, evict, resolve
from preheat.core.errors import IntegrityError, SourceError, SpecError
from preheat.core.spec.schema import Source

if TYPE_CHECKING:
    from pathlib import Path

WHOLE = samples.gguf()
LFS_POINTER = (
    b"version https://git-lfs.github.com/spec/v1\n"
    b"oid sha256:b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53\n"
    b"size 98362432\n"
)


@pytest.fixture
def model(tmp_path: Path) -> Path:
    file = tmp_path / "models" / "model.gguf"
    file.parent.mkdir()
    file.write_bytes(WHOLE)
    return file


def refusal(path: Path, cache: Path, sha256: str | None = None) -> SourceError:
    with pytest.raises(SourceError) as raised:
        resolve(Source(uri=str(path), sha256=sha256), cache)
    assert str(path) in str(raised.value)
    assert not raised.value.retryable
    return raised.value


def test_a_file_and_a_directory_that_holds_exactly_one_are_found(
    model: Path, tmp_path: Path
) -> None:
    (model.parent / "README.md").touch()
    (model.parent / "._model.gguf").touch()
    (model.parent / "old.gguf").mkdir()
    for path in (model, model.parent):
        located = resolve(Source(uri=str(path)), tmp_path / "cache")
        assert (located.path, located.size_bytes, located.sha256) == (model, len(WHOLE), None)
        assert located.origin == str(model)
    assert not (tmp_path / "cache").exists()


def test_a_promised_hash_is_handed_on(model: Path, tmp_path: Path) -> None:
    assert resolve(Source(uri=str(model), sha256="a" * 64), tmp_path).sha256 == "a" * 64


def test_relative_paths_are_taken_from_the_spec_s_directory(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = Source(uri="models/model.gguf")
    assert resolve(source, tmp_path, base=tmp_path).path == model
    monkeypatch.chdir(tmp_path)
    assert resolve(source, tmp_path).path == model
    monkeypatch.setenv("HOME", str(tmp_path))
    home = Source(uri="~/models/model.gguf")
    assert resolve(home, tmp_path, base=tmp_path / "elsewhere").path == model


def test_a_link_is_followed_and_keeps_its_name(model: Path, tmp_path: Path) -> None:
    link = tmp_path / "link.gguf"
    link.symlink_to(model)
    assert resolve(Source(uri=str(link)), tmp_path).path == link


def test_a_dangling_link_says_where_it_leads(tmp_path: Path) -> None:
    link = tmp_path / "link.gguf"
    link.symlink_to(tmp_path / "gone")
    assert str(tmp_path / "gone") in str(refusal(link, tmp_path))


def test_a_directory_with_none_or_several_is_refused_and_names_them(
    model: Path, tmp_path: Path
) -> None:
    (tmp_path / "empty").mkdir()
    assert "holds no .gguf file" in str(refusal(tmp_path / "empty", tmp_path))
    for number in range(12):
        (model.parent / f"copy-{number:02}.GGUF").touch()
    said = str(refusal(model.parent, tmp_path))
    assert "13 .gguf files: copy-00.GGUF, copy-01.GGUF" in said
    assert "and 5 more" in said


def test_what_is_missing_or_may_not_be_read_is_refused(model: Path, tmp_path: Path) -> None:
    assert "does not exist" in str(refusal(tmp_path / "none.gguf", tmp_path))
    assert "Not a directory" in str(refusal(model / "below.gguf", tmp_path))
    model.chmod(0)
    if not os.access(model, os.R_OK):  # root reads everything
        assert "Permission denied" in str(refusal(model, tmp_path))


def test_what_is_no_regular_file_is_refused_without_waiting_for_it(tmp_path: Path) -> None:
    fifo = tmp_path / "model.gguf"
    os.mkfifo(fifo)
    assert "not a regular file" in str(refusal(fifo, tmp_path))


@pytest.mark.parametrize("sha256", [None, "a" * 64])
@pytest.mark.parametrize(
    ("data", "says"),
    [
        (b"", "is empty"),
        (LFS_POINTER, f"Git LFS pointer of {len(LFS_POINTER)} bytes"),
        (b"GG", "cut short: it has 2 bytes"),
        (b"GGUF\3\0\0\0", "cut short: it has 8 bytes"),
        (b"GGML" + bytes(100), "begins with b'GGML'"),
        (b"<!DOCTYPE html>", "an HTML page"),
        (b"PK\3\4" + bytes(100), "PyTorch"),
        (bytes(1000), "filled with zeros"),
    ],
)
def test_what_cannot_be_a_model_is_said_at_once(
    tmp_path: Path, data: bytes, says: str, sha256: str | None
) -> None:
    file = tmp_path / "model.gguf"
    file.write_bytes(data)
    error = refusal(file, tmp_path, sha256)
    assert isinstance(error, IntegrityError)
    assert says in str(error)
    assert error.advice


def test_a_file_shorter_than_its_tensor_table_is_refused(model: Path, tmp_path: Path) -> None:
    os.truncate(model, len(WHOLE) - 1)
    said = str(refusal(model, tmp_path))
    assert f"it has {len(WHOLE) - 1:,} bytes" in said
    assert f"needs at least {len(WHOLE):,}" in said


def test_one_part_of_a_split_model_is_refused(model: Path, tmp_path: Path) -> None:
    model.write_bytes(samples.gguf(keys=[*samples.KEYS, samples.u32("split.count", 3)]))
    assert "one of 3 files" in str(refusal(model, tmp_path))


@pytest.mark.parametrize("uri", ["hf:org/model", "https://example.org/m.gguf", "PYPI:a==1/b"])
def test_an_unknown_kind_of_source_is_told_from_a_missing_file(tmp_path: Path, uri: str) -> None:
    with pytest.raises(SpecError, match="no known kind"):
        resolve(Source(uri=uri), tmp_path)


def test_a_file_whose_name_looks_like_another_kind_is_still_found(tmp_path: Path) -> None:
    (tmp_path / "hf:model.gguf").write_bytes(WHOLE)
    assert resolve(Source(uri="hf:model.gguf"), tmp_path, base=tmp_path).size_bytes == len(WHOLE)


@pytest.mark.parametrize("uri", ["a\0b.gguf", "~nobody-has-this-name/m.gguf", "x" * 5000])
def test_paths_that_no_system_has_are_refused(tmp_path: Path, uri: str) -> None:
    with pytest.raises(UnusableSourceError):
        resolve(Source(uri=uri), tmp_path)


def test_a_local_file_is_never_evicted(model: Path, tmp_path: Path) -> None:
    located = resolve(Source(uri=str(model), sha256="a" * 64), tmp_path / "cache")
    assert not evict(located, tmp_path / "cache")
    assert model.exists()
