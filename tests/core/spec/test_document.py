from __future__ import annotations

import inspect
import re
from pathlib import Path
from typing import Any

import jsonschema
import msgspec
import pytest
import yaml
from msgspec import NODEFAULT, Struct

from preheat.core.errors import SpecError
from preheat.core.spec import document, schema
from preheat.core.spec.load import default_spec, parse

EXAMPLES = Path(__file__).parents[3] / "examples"
TYPES = [
    cls
    for _, cls in inspect.getmembers(schema, inspect.isclass)
    if issubclass(cls, Struct) and cls.__module__ == schema.__name__ and cls.__struct_fields__
]
FIELDS = [(cls, field) for cls in TYPES for field in msgspec.structs.fields(cls)]
BY_NAME = [f"{cls.__name__}.{field.name}" for cls, field in FIELDS]


def written(default: Any) -> list[str]:
    """How a default stands in the text of its field."""
    match default:
        case None | ():
            return []  # in words: none, never, the cores this process may use
        case bool():
            return [str(default).lower()]
        case int() | float():
            return [f"{default:.15g}"]
        case str():
            return [f"``{default}``"]
        case tuple():
            return [f"``{item}``" for item in default]
        case _:
            return ["the defaults of its fields"]


# --- the text after each field --------------------------------------------------------------------


@pytest.mark.parametrize(("cls", "field"), FIELDS, ids=BY_NAME)
def test_each_field_is_documented_with_its_default(
    cls: type[Struct], field: msgspec.structs.FieldInfo
) -> None:
    text = document.field_docs()[cls.__name__][field.name]
    assert text.endswith((".", "``", "``)."))
    if field.default is NODEFAULT and field.default_factory is NODEFAULT:
        assert "Default:" not in text
        return
    default = field.default_factory() if field.default is NODEFAULT else field.default
    named = text.partition("Default: ")[2]
    assert named, f"no default is named: {text}"
    for part in written(default):
        assert re.search(rf"(?<![\w.]){re.escape(part)}(?!\w)", named), (part, named)


def test_the_text_before_a_field_is_not_taken_for_its_own() -> None:
    assert document.field_docs()["Listen"]["port"] == "TCP port. Default: 8080."


# --- what is committed ----------------------------------------------------------------------------


def test_the_committed_schema_and_reference_are_true() -> None:
    assert document.stale(document.outputs()) == [], "run python -m preheat.core.spec.document"


def test_a_file_that_says_something_else_is_stale(tmp_path: Path) -> None:
    (tmp_path / "true").write_text("a")
    (tmp_path / "false").write_text("b")
    wanted = {tmp_path / name: "a" for name in ("true", "false", "missing")}
    assert document.stale(wanted) == [tmp_path / "false", tmp_path / "missing"]


def test_the_tool_writes_what_is_stale_and_its_check_only_tells(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "docs" / "spec.md"
    monkeypatch.setattr(document, "outputs", lambda: {path: "text"})
    assert document.main(["--check"]) == 1
    assert not path.exists()
    assert f"{path} is not what schema.py says" in capsys.readouterr().out
    assert document.main([]) == 0
    assert path.read_text() == "text"
    assert document.main(["--check"]) == 0


def test_the_reference_has_a_row_for_each_field() -> None:
    page = document.reference_markdown()
    rows = re.findall(r"^\| `(\w+)` \|", page, flags=re.MULTILINE)
    assert sorted(rows) == sorted(field.name for _, field in FIELDS)
    for line in page.splitlines():
        if line.startswith("|"):
            assert len(re.findall(r"(?<!\\)\|", line)) == 4, line


# --- the JSON schema ------------------------------------------------------------------------------


def default_tree() -> Any:
    """The default spec as JSON has it: lists are arrays to jsonschema, tuples are not."""
    return msgspec.json.decode(msgspec.json.encode(default_spec()))


@pytest.fixture(scope="module")
def validator() -> jsonschema.Draft202012Validator:
    jsonschema.Draft202012Validator.check_schema(document.json_schema())
    return jsonschema.Draft202012Validator(document.json_schema())


def test_the_schema_describes_each_field() -> None:
    definitions = document.json_schema()["$defs"]
    for cls, field in FIELDS:
        assert definitions[cls.__name__]["properties"][field.name]["description"]


@pytest.mark.parametrize(
    "path", sorted(EXAMPLES.glob("*/preheat.yaml")), ids=lambda p: p.parent.name
)
def test_the_schema_accepts_the_examples(
    validator: jsonschema.Draft202012Validator, path: Path
) -> None:
    validator.validate(yaml.safe_load(path.read_text()))


def test_the_schema_accepts_the_default(validator: jsonschema.Draft202012Validator) -> None:
    validator.validate(default_tree())


@pytest.mark.parametrize(
    ("path", "value"),
    [
        (("schema",), "2.0"),
        (("models",), []),
        (("models",), {"name": "m"}),
        (("models", 0, "name"), "a b"),
        (("models", 0, "versions", 0, "source", "sha256"), "abc"),
        (("models", 0, "versions", 0, "source", "sha265"), "abc"),
        (("models", 0, "versions", 0, "engine", "threads"), 0),
        (("models", 0, "versions", 0, "engine", "flash_attention"), "yes"),
        (("models", 0, "versions", 0, "warmup", "prompts"), "Hello"),
        (("models", 0, "versions", 0, "warmup", "deadline_s"), 0),
        (("models", 0, "versions", 0, "preload", "not_before"), "24:00"),
        (("listen", "port"), "8080"),
        (("api_keys",), [{"name": "x", "env": "not a name"}]),
    ],
)
def test_the_schema_and_the_loader_refuse_the_same(
    validator: jsonschema.Draft202012Validator, path: tuple[str | int, ...], value: object
) -> None:
    spec = default_tree()
    node = spec
    for step in path[:-1]:
        node = node[step]
    node[path[-1]] = value
    assert not validator.is_valid(spec)
    with pytest.raises(SpecError):
        parse(yaml.safe_dump(spec), file="s.yaml", base=Path("/base"))
