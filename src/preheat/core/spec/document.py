"""The spec's JSON schema and reference page, made from the types and the text after each field.

``python -m preheat.core.spec.document`` writes both; with ``--check`` it only says, by its exit
code, whether they are true. A tool for development: nothing that serves imports it.
What does not belong here: what a field means (``schema.py``).
"""

from __future__ import annotations

import argparse
import ast
import functools
import inspect
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
from msgspec import Struct

from preheat.core.spec import schema
from preheat.core.spec.typed import expected, shape_of

SCHEMA_FILE = Path(__file__).with_name("preheat.schema.json")
REFERENCE_FILE = Path(__file__).parents[4] / "docs" / "reference" / "spec.md"

PREFACE = """\
# The spec: `preheat.yaml`

<!-- Written by `python -m preheat.core.spec.document`; edit src/preheat/core/spec/schema.py. -->

Schema {version}. Every field has a default unless it says *required*. Fields that do not exist are
errors. Durations are in seconds, sizes in bytes.

How values are read: a text field takes what is written, quoted or not (`on`, `012` and `22:30` stay
as they are); a number field takes decimal numbers only; a true-or-false field takes `true`,
`false`, `yes`, `no`, `on` and `off`. Anchors, aliases and `<<` work; tags and repeated fields are
errors.

For editors, `# yaml-language-server: $schema=PATH` as the first line points at
`preheat.schema.json`, which is installed beside `preheat/core/spec/schema.py`.
"""


@functools.cache
def field_docs() -> dict[str, dict[str, str]]:
    """For each type of the spec, the text after each of its own fields, on one line each."""
    module = ast.parse(inspect.getsource(schema))
    return {
        node.name: dict(_documented(node)) for node in module.body if isinstance(node, ast.ClassDef)
    }


def _documented(node: ast.ClassDef) -> Iterator[tuple[str, str]]:
    for field, after in zip(node.body, node.body[1:], strict=False):
        match field, after:
            case (
                ast.AnnAssign(target=ast.Name(id=name)),
                ast.Expr(value=ast.Constant(value=str(text))),
            ):
                yield name, " ".join(text.split())


def json_schema() -> dict[str, Any]:
    """The JSON schema (draft 2020-12) of a spec, with descriptions and defaults."""
    (root,), definitions = msgspec.json.schema_components(
        [schema.Spec], ref_template="#/$defs/{name}"
    )
    for type_name, documented in field_docs().items():
        for name, text in documented.items():
            definitions[type_name]["properties"][name]["description"] = text
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": f"preheat.yaml, schema {schema.SCHEMA_VERSION}",
        **root,
        "$defs": definitions,
    }


def reference_markdown() -> str:
    """The reference page: one table for each type, in the order in which a reader meets them."""
    sections = [PREFACE.format(version=schema.SCHEMA_VERSION)]
    for place, cls in _places(schema.Spec, ""):
        heading = f"`{place}`" if place else "Top level"
        lines = [
            f"## {heading}",
            "",
            " ".join((cls.__doc__ or "").split()).replace("``", "`"),
            "",
            "| field | takes | meaning |",
            "|---|---|---|",
            *(_row(cls, field) for field in msgspec.structs.fields(cls)),
        ]
        sections.append("\n".join(lines) + "\n")
    return "\n".join(sections)


def _places(cls: type[Struct], place: str) -> Iterator[tuple[str, type[Struct]]]:
    """Every type of the spec with the path at which it stands, depth first."""
    yield place, cls
    for field in msgspec.structs.fields(cls):
        shape = shape_of(field.type)
        below = f"{place}.{field.name}".removeprefix(".")
        if shape.item is not None:
            shape, below = shape_of(shape.item), f"{below}[]"
        if isinstance(shape.base, type) and issubclass(shape.base, Struct):
            yield from _places(shape.base, below)


def _row(cls: type[Struct], field: msgspec.structs.FieldInfo) -> str:
    meaning = field_docs()[cls.__name__][field.name]
    if field.required:
        meaning = f"*Required.* {meaning}"
    cells = (f"`{field.name}`", _takes(field.type), meaning.replace("``", "`"))
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


def _takes(hint: Any) -> str:
    shape = shape_of(hint)
    if shape.item is not None:
        item = shape_of(shape.item)
        return f"{expected(shape)}, each {_takes(item.hint)}"
    if isinstance(shape.base, type) and issubclass(shape.base, Struct):
        return "a mapping, see below"
    if shape.choices:
        return " or ".join(f"`{choice}`" for choice in shape.choices)
    return re.sub(r"([\\`<>#])", r"\\\1", expected(shape))


def outputs() -> dict[Path, str]:
    """What is committed: each file and its true content."""
    schema_text = msgspec.json.format(msgspec.json.encode(json_schema()), indent=2).decode()
    return {SCHEMA_FILE: schema_text + "\n", REFERENCE_FILE: reference_markdown()}


def stale(expected_outputs: dict[Path, str]) -> list[Path]:
    """The files that are missing or say something else."""
    return [
        path
        for path, text in expected_outputs.items()
        if not path.exists() or path.read_text(encoding="utf-8") != text
    ]


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Write the spec's JSON schema and reference page.")
    parser.add_argument("--check", action="store_true", help="write nothing; exit 1 if stale")
    check = parser.parse_args(arguments).check
    texts = outputs()
    for path in stale(texts):
        if check:
            print(f"{path} is not what schema.py says; run python -m {__spec__.name}")
        else:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(texts[path], encoding="utf-8")
            print(f"wrote {path}")
    return 1 if check and stale(texts) else 0


if __name__ == "__main__":
    sys.exit(main())
