from __future__ import annotations

import threading
from pathlib import Path

import pytest

from preheat.core.errors import ProofError
from preheat.replica.answers import cpu_model, record, recorded
from preheat.replica.warmup import Step

ANSWER = (Step(" Paris", -0.5), Step(" ✅", -1.25))


def test_an_answer_comes_back_as_it_was_recorded(tmp_path: Path) -> None:
    assert recorded(tmp_path / "new", "k") is None
    record(tmp_path / "new", "k", ANSWER)
    assert recorded(tmp_path / "new", "k") == ANSWER
    assert recorded(tmp_path / "new", "other") is None
    assert [file.name for file in (tmp_path / "new").iterdir()] == ["k.json"]


def test_the_first_record_stays(tmp_path: Path) -> None:
    record(tmp_path, "k", ANSWER)
    record(tmp_path, "k", ANSWER[:1])
    assert recorded(tmp_path, "k") == ANSWER


def test_replicas_that_record_at_once_leave_one_whole_record(tmp_path: Path) -> None:
    threads = [
        threading.Thread(target=record, args=(tmp_path, "k", (Step(str(n), -0.5),)))
        for n in range(8)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert recorded(tmp_path, "k") is not None
    assert len(list(tmp_path.iterdir())) == 1


@pytest.mark.parametrize("content", [b"", b"{}", b'[["a", "b"]]', b"\xff", b'[{"text": "a"'])
def test_a_damaged_record_is_named_with_the_way_out(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "k.json").write_bytes(content)
    with pytest.raises(ProofError) as caught:
        recorded(tmp_path, "k")
    assert str(tmp_path / "k.json") in caught.value.what
    assert caught.value.advice.startswith(f"rm {tmp_path / 'k.json'}")


def test_a_place_that_cannot_be_written_is_an_error_that_leaves_nothing(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises((NotADirectoryError, FileExistsError)):
        record(tmp_path / "file", "k", ANSWER)
    assert [file.name for file in tmp_path.iterdir()] == ["file"]


def test_the_cpu_is_that_of_the_first_processor(tmp_path: Path) -> None:
    (tmp_path / "cpuinfo").write_text(
        "processor\t: 0\nmodel name\t: Fast 9000\ncpu MHz\t: 1.5\nflags\t\t: avx2 fma\n\n"
        "processor\t: 1\nmodel name\t: Slow\nflags\t\t: none\n"
    )
    assert cpu_model(tmp_path / "cpuinfo") == "Fast 9000 avx2 fma"
    assert cpu_model() == cpu_model() != ""
