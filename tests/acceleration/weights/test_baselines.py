from __future__ import annotations

import threading
from typing import TYPE_CHECKING

import pytest
from tests.acceleration.weights import samples

from preheat.acceleration.weights.baselines import (
    Baselines,
    record_sha256,
    recorded_sha256,
    trust,
)
from preheat.core.errors import IntegrityError, SourceError

if TYPE_CHECKING:
    from pathlib import Path

A, B = "a" * 64, "b" * 64


def test_the_first_hash_is_recorded_and_the_same_one_agrees(tmp_path: Path) -> None:
    baselines = Baselines(tmp_path / "state")
    file = tmp_path / "m.gguf"
    assert baselines.get(file) is None
    assert baselines.compare_or_record(file, A, 7)
    assert not Baselines(tmp_path / "state").compare_or_record(file, A, 7)
    recorded = baselines.get(file)
    assert recorded is not None
    assert (recorded.path, recorded.sha256, recorded.size_bytes) == (str(file), A, 7)
    assert recorded_sha256(file, tmp_path / "state") == A


def test_another_hash_is_an_error_that_names_both_and_the_way_to_accept_it(tmp_path: Path) -> None:
    baselines = Baselines(tmp_path)
    file = tmp_path / "m.gguf"
    baselines.compare_or_record(file, A, 7)
    with pytest.raises(IntegrityError) as raised:
        baselines.compare_or_record(file, B, 8)
    for part in (str(file), A, B, f"preheat models trust {file}"):
        assert part in str(raised.value)
    assert recorded_sha256(file, tmp_path) == A


def test_records_of_different_paths_are_apart_and_a_relative_path_is_its_absolute_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    record_sha256(tmp_path / "one", A, 1, tmp_path)
    record_sha256(tmp_path / "two", B, 1, tmp_path)
    relative = (tmp_path / "one").relative_to(tmp_path)
    assert recorded_sha256(relative, tmp_path) == A
    assert recorded_sha256(tmp_path / "two", tmp_path) == B


def test_a_record_can_be_replaced_and_forgotten(tmp_path: Path) -> None:
    baselines = Baselines(tmp_path)
    file = tmp_path / "m.gguf"
    baselines.put(file, A, 1)
    baselines.put(file, B, 2)
    assert recorded_sha256(file, tmp_path) == B
    assert baselines.forget(file)
    assert not baselines.forget(file)
    assert baselines.get(file) is None


def test_trusting_a_changed_file_accepts_it(tmp_path: Path) -> None:
    state = tmp_path / "state"
    file = tmp_path / "m.gguf"
    file.write_bytes(samples.gguf())
    Baselines(state).compare_or_record(file, A, 7)
    baseline = trust(tmp_path, state)  # the directory stands for its only file
    assert baseline.sha256 == samples.sha256(samples.gguf())
    assert not Baselines(state).compare_or_record(file, baseline.sha256, baseline.size_bytes)


def test_what_is_no_model_cannot_be_trusted(tmp_path: Path) -> None:
    file = tmp_path / "m.gguf"
    file.write_bytes(samples.gguf()[:-1])
    with pytest.raises(IntegrityError, match="cut short"):
        trust(file, tmp_path / "state")
    assert not (tmp_path / "state").exists()


@pytest.mark.parametrize("damage", [b"", b"{", b"[]", b"\xff", b'{"path": "/m"}'])
def test_a_damaged_record_is_no_licence(tmp_path: Path, damage: bytes) -> None:
    baselines = Baselines(tmp_path)
    file = tmp_path / "m.gguf"
    baselines.put(file, A, 1)
    (record,) = (tmp_path / "baselines").iterdir()
    record.write_bytes(damage)
    with pytest.raises(IntegrityError, match=r"cannot be read\n.*preheat models trust"):
        baselines.compare_or_record(file, B, 1)
    baselines.put(file, B, 1)
    assert recorded_sha256(file, tmp_path) == B


def test_a_state_directory_that_cannot_be_written_is_said(tmp_path: Path) -> None:
    (tmp_path / "state").touch()
    with pytest.raises(SourceError, match=r"cannot (record|read)"):
        Baselines(tmp_path / "state").compare_or_record(tmp_path / "m.gguf", A, 1)


def test_of_two_first_starts_at_once_exactly_one_records(tmp_path: Path) -> None:
    file = tmp_path / "m.gguf"
    for turn in range(20):
        state = tmp_path / str(turn)
        together = threading.Barrier(2)
        results: list[bool | str] = []

        def start(sha256: str, state: Path = state, together: threading.Barrier = together) -> None:
            together.wait()
            try:
                results.append(Baselines(state).compare_or_record(file, sha256, 1))  # noqa: B023
            except IntegrityError:
                results.append("refused")  # noqa: B023

        threads = [threading.Thread(target=start, args=(sha256,)) for sha256 in (A, B)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert sorted(map(str, results)) == ["True", "refused"]
        assert len(list((state / "baselines").iterdir())) == 1
