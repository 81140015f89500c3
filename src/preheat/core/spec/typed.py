"""A YAML tree as a spec: each value is read as the type of its field asks for.

The type of the field decides what a scalar means, not YAML 1.1: a text field takes the literal text
(``on``, ``012``, ``22:30`` and ``1.0`` stay what was written), a number field takes decimal numbers
only, and a boolean field takes true, false, yes, no, on and off. All problems are collected, not
only the first. Ranges and patterns are msgspec's to check.
What does not belong here: rules between fields (``check.py``).
"""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Iterator
from types import UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

import msgspec
from msgspec import UNSET, Meta, Struct, structs

from preheat.core.spec.problem import FieldPath, Mark, Problem, nearest, quoted
from preheat.core.spec.tree import Mapping, Node, Scalar, Sequence

NULLS = ("", "~", "null", "Null", "NULL")
BOOLEANS = {"true": True, "yes": True, "on": True, "false": False, "no": False, "off": False}
# No leading zeros, which YAML 1.1 takes for octal, and no more digits than any field could want.
WHOLE = re.compile(r"[-+]?(0|[1-9][0-9_]{0,20})")
DECIMAL = re.compile(
    r"[-+]?((0|[1-9][0-9_]{0,20})(\.[0-9]{0,30})?|\.[0-9]{1,30})([eE][-+]?[0-9]{1,4})?"
)

Entries = dict[str, tuple[Scalar, Node]]


class Shape(Struct, frozen=True):
    """What a field's annotation says."""

    hint: Any
    """The annotation without ``None``."""
    base: Any
    """``str``, ``int``, ``float``, ``bool``, ``Literal[…]``, ``tuple[X, …]`` or a Struct."""
    meta: Meta
    optional: bool

    @property
    def item(self) -> Any:
        """The annotation of the items of a list, or None for anything else."""
        return get_args(self.base)[0] if get_origin(self.base) is tuple else None

    @property
    def choices(self) -> tuple[str, ...]:
        return get_args(self.base) if get_origin(self.base) is Literal else ()


@functools.cache
def fields_of(cls: type[Struct]) -> dict[str, structs.FieldInfo]:
    """The fields of a type by name, with their annotations."""
    return {field.name: field for field in structs.fields(cls)}


@functools.cache
def shape_of(hint: Any) -> Shape:
    optional = False
    if get_origin(hint) in (Union, UnionType):
        (hint,) = (arg for arg in get_args(hint) if arg is not type(None))
        optional = True
    base, *metas = get_args(hint) if get_origin(hint) is Annotated else (hint,)
    return Shape(hint, base, metas[0] if metas else Meta(), optional)


def read_typed(root: Node, cls: type[Struct]) -> tuple[Any, list[Problem]]:
    """What ``msgspec.convert`` turns into ``cls``, and the problems; with any, only these count."""
    reader = _Reader()
    return reader.read(root, cls, ()), reader.problems


def locate(root: Node, path: FieldPath) -> Mark:
    """Where a field stands; for one that is not there, where the nearest thing around it stands."""
    mark, node = root.mark, root
    for step in path:
        if isinstance(node, Sequence) and isinstance(step, int) and step < len(node.items):
            node = node.items[step]
            mark = node.mark
        elif isinstance(node, Mapping) and step in (entries := _Reader().entries(node, ())):
            key, node = entries[str(step)]
            mark = node.mark if isinstance(node, Scalar) else key.mark
        else:
            break
    return mark


class _Reader:
    def __init__(self) -> None:
        self.problems: list[Problem] = []

    def read(self, node: Node, hint: Any, path: FieldPath, *, required: bool = True) -> Any:
        """The value for msgspec, or UNSET if there was a problem."""
        shape = shape_of(hint)
        if node.tag is not None:
            shown = node.tag.replace("tag:yaml.org,2002:", "!!")
            return self._problem(node, path, f"the tag {shown} has no meaning here", "remove it")
        if isinstance(node, Scalar) and node.plain and node.text in NULLS:
            if shape.optional:
                return None
            advice = "" if required else "leave the field out for its default"
            return self._mismatch(node, shape, path, advice)
        if shape.item is not None:
            return self._list(node, shape, path)
        if isinstance(shape.base, type) and issubclass(shape.base, Struct):
            return self._struct(node, shape, path)
        return self._scalar(node, shape, path)

    def entries(self, node: Mapping, path: FieldPath) -> Entries:
        """The fields of a mapping, with those of ``<<`` where it does not give them itself."""
        own: Entries = {}
        for key, value in node.entries:
            if not isinstance(key, Scalar) or key.tag is not None:
                self._problem(key, path, "a field's name must be plain text")
            elif key.text in own:
                first = own[key.text][0].mark.line
                what = f"given twice, first in line {first}"
                self._problem(key, (*path, key.text), what, "keep one of them")
            else:
                own[key.text] = (key, value)
        if "<<" not in own or not own["<<"][0].plain:
            return own
        _, merged = own.pop("<<")
        return self._merged(merged, path) | own

    def _merged(self, node: Node, path: FieldPath) -> Entries:
        sources = node.items if isinstance(node, Sequence) else (node,)
        merged: Entries = {}
        for source in reversed(sources):  # the first one wins
            if isinstance(source, Mapping):
                merged |= self.entries(source, path)
            else:
                self._problem(source, (*path, "<<"), "must be a mapping, or a list of mappings")
        return merged

    def _struct(self, node: Node, shape: Shape, path: FieldPath) -> Any:
        if not isinstance(node, Mapping):
            return self._mismatch(node, shape, path)
        fields = fields_of(shape.base)
        given = self.entries(node, path)
        for name, field in fields.items():
            if field.required and name not in given:
                self._problem(node, (*path, name), "is missing")
        values: dict[str, Any] = {}
        for name, (key, value) in given.items():
            below = (*path, name)
            if name not in fields:
                self._problem(key, below, "unknown field", _meant(name, shape.base))
            else:
                field = fields[name]
                values[name] = self.read(value, field.type, below, required=field.required)
        return values

    def _list(self, node: Node, shape: Shape, path: FieldPath) -> Any:
        if not isinstance(node, Sequence):
            return self._mismatch(node, shape, path, 'begin each item with "- "')
        values = [self.read(item, shape.item, (*path, i)) for i, item in enumerate(node.items)]
        if not _fits(values, Annotated[list[Any], shape.meta]):
            return self._mismatch(node, shape, path)
        return values

    def _scalar(self, node: Node, shape: Shape, path: FieldPath) -> Any:
        if not isinstance(node, Scalar):
            return self._mismatch(node, shape, path)
        value = _value(node, shape)
        if value is UNSET or not _fits(value, shape.hint):
            return self._mismatch(node, shape, path, _advice(node, shape))
        return value

    def _mismatch(self, node: Node, shape: Shape, path: FieldPath, advice: str = "") -> Any:
        what = f"must be {expected(shape)}, not {_shown(node, shape)}"
        return self._problem(node, path, what, advice)

    def _problem(self, node: Node, path: FieldPath, what: str, advice: str = "") -> Any:
        self.problems.append(Problem(path=path, what=what, advice=advice, mark=node.mark))
        return UNSET


def _value(node: Scalar, shape: Shape) -> Any:
    """The scalar as the field's type reads it, UNSET if it cannot."""
    if shape.base is str or shape.choices:
        return node.text
    if not node.plain:
        return UNSET
    if shape.base is bool:
        return BOOLEANS.get(node.text.lower(), UNSET)
    if shape.base is int and WHOLE.fullmatch(node.text):
        return int(node.text.replace("_", ""))
    if shape.base is float and DECIMAL.fullmatch(node.text):
        value = float(node.text.replace("_", ""))
        return value if math.isfinite(value) else UNSET
    return UNSET


def _fits(value: Any, hint: Any) -> bool:
    try:
        msgspec.convert(value, hint)
    except msgspec.ValidationError:
        return False
    return True


def expected(shape: Shape) -> str:
    """What a field takes, for messages: ``a whole number from 1 to 256``."""
    meta = shape.meta
    if meta.extra and "expected" in meta.extra:
        return str(meta.extra["expected"])
    if shape.choices:
        names = [quoted(choice) for choice in shape.choices]
        return names[0] if len(names) == 1 else f"one of {', '.join(names)}"
    if shape.item is not None:
        return f"a list of at least {meta.min_length}" if meta.min_length else "a list"
    if shape.base is str:
        return "non-empty text" if meta.min_length else "text"
    if shape.base is bool:
        return "true or false"
    if shape.base in (int, float):
        return ("a whole number" if shape.base is int else "a number") + _bounds(meta)
    return f"a mapping with {', '.join(fields_of(shape.base))}"


def _bounds(meta: Meta) -> str:
    low, high = meta.ge if meta.ge is not None else meta.gt, meta.le
    if low is not None and high is not None:
        return (
            f" above {low:g} and up to {high:g}"
            if meta.gt is not None
            else f" from {low} to {high}"
        )
    if low is not None:
        return f" above {low:g}" if meta.gt is not None else f" of at least {low}"
    return f" of at most {high:g}" if high is not None else ""


def _shown(node: Node, shape: Shape) -> str:
    if isinstance(node, Mapping):
        return "a mapping"
    if isinstance(node, Sequence):
        return f"a list of {len(node.items)}" if shape.item is not None else "a list"
    if node.plain and node.text in NULLS:
        return "empty" if node.text == "" else node.text
    if not shape.choices and shape.base not in (str, bool, int, float):
        return "a single value"  # not repeated: it may be a key that was put into the wrong place
    if (shape.meta.extra or {}).get("secret"):
        return "what is given"
    return quoted(node.text) if not node.plain or shape.base is str else quoted(node.text)[1:-1]


def _advice(node: Scalar, shape: Shape) -> str:
    if shape.choices:
        meant = nearest(node.text, shape.choices)
        return f"did you mean {quoted(meant)}?" if meant else ""
    unquoted = Scalar(node.text, node.mark, plain=True)
    is_number = shape.base is not str and not node.plain and _value(unquoted, shape) is not UNSET
    return "leave the quotes out" if is_number else ""


def _meant(name: str, cls: type[Struct]) -> str:
    """The nearest valid field: here, then by its exact name further down, else all there are."""
    fields = list(fields_of(cls))
    if found := nearest(name, fields):
        return f"did you mean {quoted(found)}?"
    for path in _paths_below(cls, ""):
        if path.rpartition(".")[2] == name:
            return f"did you mean {quoted(path)}?"
    return f"the fields here are {', '.join(fields)}"


def _paths_below(cls: type[Struct], prefix: str) -> Iterator[str]:
    for field in fields_of(cls).values():
        shape = shape_of(field.type)
        path = prefix + field.name
        if shape.item is not None:
            shape, path = shape_of(shape.item), f"{path}[]"
        yield path
        if isinstance(shape.base, type) and issubclass(shape.base, Struct):
            yield from _paths_below(shape.base, f"{path}.")
