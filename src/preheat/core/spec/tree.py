"""YAML text as a tree whose every node knows its line and column.

Scalars keep their literal text: what ``on``, ``1:30`` or ``012`` mean depends on the field they are
given to, and only ``typed.py`` knows that. The tree is built from libyaml's events and not by
PyYAML's composer, because that one recurses in C as deep as the file asks for.
What does not belong here: anything about fields.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from msgspec import Struct

from preheat.core.errors import SpecError
from preheat.core.spec.problem import Mark, Problem, quoted, spec_error

if TYPE_CHECKING:
    import yaml

# The deepest field of the spec stands in 8 collections; no spec comes near these.
DEPTH_MAX = 50
NODES_MAX = 50_000
"""Nodes after every alias has been replaced by what it stands for."""

STRING_TAGS = (None, "!", "tag:yaml.org,2002:str")


class Scalar(Struct, frozen=True):
    text: str
    mark: Mark
    plain: bool = False
    """Written without quotes and without a tag, so that it may be a number, null or a boolean."""
    tag: str | None = None
    """A tag that asks for anything but text, or None."""


class Sequence(Struct, frozen=True):
    items: tuple[Node, ...]
    mark: Mark
    tag: str | None = None


class Mapping(Struct, frozen=True):
    entries: tuple[tuple[Node, Node], ...]
    """Keys and values in the order of the file, duplicates included."""
    mark: Mark
    tag: str | None = None


Node = Scalar | Sequence | Mapping


class _Sized(Struct, frozen=True):
    node: Node
    count: int
    """Nodes in it, itself included, aliases expanded."""
    height: int
    """Collections on the longest way down from it, itself included."""


class _Open(Struct):
    """A collection whose end has not been read yet."""

    mark: Mark
    tag: str | None
    anchor: str | None
    is_mapping: bool
    counted_before: int
    children: list[Node] = []
    height: int = 1

    def close(self) -> Node:
        if not self.is_mapping:
            return Sequence(tuple(self.children), self.mark, self.tag)
        pairs = zip(self.children[::2], self.children[1::2], strict=True)
        return Mapping(tuple(pairs), self.mark, self.tag)


def read_tree(text: str, *, file: str) -> Node | None:
    """The tree of the single document in ``text``; None if there is nothing but comments.

    Raises SpecError for text that is not YAML, and for trees too large or too deep for a spec.
    """
    import yaml  # 15 ms that a start without a file does not pay
    from yaml.reader import ReaderError

    builder = _Builder(file)
    try:
        for event in yaml.parse(text, Loader=yaml.CSafeLoader):
            builder.take(event)
    except yaml.MarkedYAMLError as error:
        raise _syntax_error(file, text, error) from error
    except ReaderError as error:
        before = text.encode()[: error.position].decode(errors="ignore")
        raise _character_error(file, text, len(before)) from error
    except UnicodeEncodeError as error:  # a lone surrogate, in text that did not come from a file
        raise _character_error(file, text, error.start) from error
    return builder.root


class _Builder:
    """Takes events one by one; ``root`` is the tree once all have come."""

    def __init__(self, file: str) -> None:
        self.root: Node | None = None
        self._file = file
        self._open: list[_Open] = []
        self._anchors: dict[str, _Sized] = {}
        self._counted = 0

    def take(self, event: Any) -> None:
        import yaml

        match event:
            case yaml.ScalarEvent():
                self._count(1, event)
                self._add(_Sized(_scalar(event), 1, 0), event.anchor)
            case yaml.SequenceStartEvent() | yaml.MappingStartEvent():
                self._count(1, event)
                self._start(event, is_mapping=isinstance(event, yaml.MappingStartEvent))
            case yaml.SequenceEndEvent() | yaml.MappingEndEvent():
                ended = self._open.pop()
                count = self._counted - ended.counted_before
                self._add(_Sized(ended.close(), count, ended.height), ended.anchor)
            case yaml.AliasEvent():
                found = self._resolve(event)
                self._count(found.count, event)
                self._check_depth(found.height, event)
                self._add(found, None)
            case yaml.DocumentStartEvent() if self.root is not None:
                raise self._error(event, "a second document begins here; a spec is a single one")
            case _:
                pass  # begin and end of the stream and of its document

    def _start(self, event: Any, *, is_mapping: bool) -> None:
        self._check_depth(1, event)
        self._open.append(
            _Open(
                mark=_mark(event.start_mark),
                tag=None if event.tag == "!" else event.tag,
                anchor=event.anchor,
                is_mapping=is_mapping,
                counted_before=self._counted - 1,
            )
        )

    def _add(self, sized: _Sized, anchor: str | None) -> None:
        if anchor is not None:
            self._anchors[anchor] = sized
        if not self._open:
            self.root = sized.node
            return
        parent = self._open[-1]
        parent.children.append(sized.node)
        parent.height = max(parent.height, sized.height + 1)

    def _resolve(self, event: Any) -> _Sized:
        if any(collection.anchor == event.anchor for collection in self._open):
            raise self._error(event, f"the alias *{event.anchor} stands inside its own anchor")
        if event.anchor not in self._anchors:
            raise self._error(event, f"the alias *{event.anchor} has no anchor before it")
        return self._anchors[event.anchor]

    def _count(self, nodes: int, event: Any) -> None:
        self._counted += nodes
        if self._counted > NODES_MAX:
            raise self._error(event, f"more than {NODES_MAX} values, aliases expanded")

    def _check_depth(self, height: int, event: Any) -> None:
        if len(self._open) + height > DEPTH_MAX:
            raise self._error(event, f"nested more than {DEPTH_MAX} deep")

    def _error(self, event: Any, what: str) -> SpecError:
        return spec_error(self._file, [Problem(what=what, mark=_mark(event.start_mark))])


def _scalar(event: Any) -> Scalar:
    plain = event.implicit[0] and event.tag is None  # libyaml calls text with the tag ``!`` plain
    tag = None if event.tag in STRING_TAGS else event.tag
    return Scalar(event.value, _mark(event.start_mark), plain, tag)


def _mark(mark: Any) -> Mark:
    return Mark(mark.line + 1, mark.column + 1)


def _syntax_error(file: str, text: str, error: yaml.MarkedYAMLError) -> SpecError:
    found = error.problem_mark or error.context_mark
    mark = _mark(found) if found else None
    lines = text.splitlines()
    line = lines[mark.line - 1] if mark and mark.line <= len(lines) else ""
    if mark and line[: mark.column].endswith("\t"):
        what, advice = "a tab where YAML wants spaces", "indent with spaces"
        return spec_error(file, [Problem(what=what, advice=advice, mark=mark)])
    what = f"not valid YAML: {error.problem}"
    if error.context and error.context_mark:
        what += f", {error.context} that begins in line {error.context_mark.line + 1}"
    return spec_error(file, [Problem(what=what, mark=mark)])


def _character_error(file: str, text: str, index: int) -> SpecError:
    line_start = text.rfind("\n", 0, index) + 1
    mark = Mark(text.count("\n", 0, index) + 1, index - line_start + 1)
    what = f"the character {quoted(text[index : index + 1])} may not stand in YAML"
    advice = 'remove it, or write it as an escape in double quotes: "\\x7f"'
    return spec_error(file, [Problem(what=what, advice=advice, mark=mark)])
