from __future__ import annotations

import stat
from itertools import pairwise
from pathlib import Path

import msgspec
import pytest
from tests.core.records import example, record

from preheat.core.coldstart import ColdStart
from preheat.core.traces.store import (
    file_name,
    prune_records,
    read_records,
    write_atomically,
    write_record,
)


def test_a_written_record_is_read_back(tmp_path: Path) -> None:
    path = write_record(example(), tmp_path / "new" / "coldstarts")
    assert path.name == "1760000000000-chat-v1-0@1.json"
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    (stored,), warnings = read_records(path.parent)
    assert (stored.id, stored.record, warnings) == (path.stem, example(), [])


def test_records_come_back_newest_first(tmp_path: Path) -> None:
    # 9 s after the epoch sorts after 10 s as text.
    for at_s in (10.0, 9.0, 11.0):
        write_record(record(unix_time_s=at_s), tmp_path)
    times = [stored.record.unix_time_s for stored in read_records(tmp_path)[0]]
    assert times == [11.0, 10.0, 9.0]


@pytest.mark.parametrize(
    "content", [b"", b"{", b'{"start_id": 1}', b"\xff\xfe", b'["record"]', b"null"]
)
def test_a_broken_file_is_skipped_with_a_warning(tmp_path: Path, content: bytes) -> None:
    write_record(example(), tmp_path)
    broken = tmp_path / "1760000000001-broken.json"
    broken.write_bytes(content)
    stored, warnings = read_records(tmp_path)
    assert [one.record for one in stored] == [example()]
    assert len(warnings) == 1
    assert str(broken) in warnings[0]


def test_what_is_no_file_of_ours_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "notes.json").write_text("{")
    (tmp_path / "1-a.json.tmp").write_text("{")
    (tmp_path / "2-directory.json").mkdir()
    stored, warnings = read_records(tmp_path)
    assert stored == []
    assert len(warnings) == 1
    assert "2-directory.json" in warnings[0]


def test_a_missing_directory_holds_nothing(tmp_path: Path) -> None:
    assert read_records(tmp_path / "none") == ([], [])
    assert prune_records(tmp_path / "none") == 0


@pytest.mark.parametrize("start_id", ["../../etc@1", "a/b@1", "modèle@1", "x" * 500, "a b\n@1", ""])
def test_any_start_id_becomes_a_plain_file_name_of_its_own(tmp_path: Path, start_id: str) -> None:
    first = write_record(record(start_id=start_id), tmp_path)
    second = write_record(record(start_id=start_id.replace("/", "_") + "!"), tmp_path)
    assert first.parent == tmp_path
    assert first != second
    assert {stored.record.start_id for stored in read_records(tmp_path)[0]} >= {start_id}


def test_pruning_keeps_the_newest_and_clears_old_leftovers(tmp_path: Path) -> None:
    for at_s in range(1, 8):
        write_record(record(unix_time_s=float(at_s)), tmp_path)
    (tmp_path / "1-killed@1.json.tmp").touch()
    other = tmp_path / "notes.txt"
    other.touch()
    assert prune_records(tmp_path, keep=3) == 5
    times = [stored.record.unix_time_s for stored in read_records(tmp_path)[0]]
    assert times == [7.0, 6.0, 5.0]
    assert other.exists()
    assert len(list(tmp_path.iterdir())) == 4
    assert prune_records(tmp_path, keep=3) == 0


def test_a_reader_never_sees_half_a_record(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the file is put in place, the whole of it is already written."""
    seen: list[bytes] = []
    replace = Path.replace

    def watched(self: Path, target: Path) -> Path:
        assert not target.exists()
        seen.append(self.read_bytes())
        return replace(self, target)

    monkeypatch.setattr(Path, "replace", watched)
    write_record(example(), tmp_path)
    assert [msgspec.json.decode(content, type=ColdStart) for content in seen] == [example()]


def test_a_write_that_fails_leaves_the_old_file_and_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / file_name(example())
    write_atomically(path, b"old")

    def full(self: Path, target: Path) -> Path:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "replace", full)
    with pytest.raises(OSError, match="No space"):
        write_atomically(path, b"new")
    assert path.read_bytes() == b"old"
    assert list(tmp_path.iterdir()) == [path]


def test_names_sort_by_time() -> None:
    names = [file_name(record(unix_time_s=at_s)) for at_s in (1.7e9, 1.7e9 + 0.001, 1.8e9)]
    assert all(earlier < later for earlier, later in pairwise(names))
