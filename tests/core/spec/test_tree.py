from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from preheat.core.errors import SpecError
from preheat.core.spec.load import parse
from preheat.core.spec.tree import DEPTH_MAX, NODES_MAX, read_tree

Refused = Callable[[str], str]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a: 'x", "s.yaml:1:6: not valid YAML: found unexpected end of stream"),
        ("a: b: c", "s.yaml:1:5: not valid YAML: mapping values are not allowed"),
        ("models:\n\t- name: m", "s.yaml:2:1: a tab where YAML wants spaces"),
        ("é: \x07", 's.yaml:1:4: the character "\\x07" may not stand in YAML'),
        ("a: 1\nb: \x00", 's.yaml:2:4: the character "\\x00" may not stand in YAML'),
        ("a: 1\nbé: \ud800", 's.yaml:2:5: the character "\\ud800" may not stand in YAML'),
        ("a: [1, *x]", "s.yaml:1:8: the alias *x has no anchor before it"),
        ("a: &x [*x]", "s.yaml:1:8: the alias *x stands inside its own anchor"),
        ("a: 1\n---\nb: 2", "s.yaml:2:1: a second document begins here"),
        ("%YAML 9.9\n---\na: 1", "s.yaml:1:1: not valid YAML: found incompatible YAML document"),
    ],
)
def test_text_that_is_not_yaml_is_refused_with_its_place(
    refused: Refused, text: str, message: str
) -> None:
    assert refused(text).startswith(message)


def test_a_syntax_error_is_told_in_one_line(refused: Refused) -> None:
    assert len(refused("models: [\n  {name: m\nlisten: 3").splitlines()) == 1


@pytest.mark.parametrize("text", ["[" * 100_000, "{a: " * 100_000, "- " * 100_000, "? " * 5_000])
def test_deep_nesting_is_refused_and_does_not_exhaust_the_stack(
    refused: Refused, text: str
) -> None:
    assert "nest" in refused(text)  # libyaml, which reads ahead, may be the one that says it


@pytest.mark.parametrize(("begin", "end"), [("[", "]"), ("{a: ", "}")])
def test_only_what_is_deeper_than_the_limit_is_refused(begin: str, end: str) -> None:
    read_tree(begin * DEPTH_MAX + end * DEPTH_MAX, file="s.yaml")
    with pytest.raises(SpecError, match=f"nested more than {DEPTH_MAX} deep"):
        read_tree(begin * (DEPTH_MAX + 1) + end * (DEPTH_MAX + 1), file="s.yaml")


def test_depth_counts_through_aliases(refused: Refused) -> None:
    links = "\n".join(f"a{i}: &a{i} {{x: *a{i - 1}}}" for i in range(1, DEPTH_MAX + 1))
    assert f"nested more than {DEPTH_MAX} deep" in refused(f"a0: &a0 [1]\n{links}")


def test_an_alias_bomb_is_refused_before_it_expands(refused: Refused) -> None:
    lines = ["a0: &a0 [x, x, x, x, x, x, x, x, x, x]"]
    lines += [f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 10)}]" for i in range(1, 30)]
    assert f"more than {NODES_MAX} values, aliases expanded" in refused("\n".join(lines))


def test_an_alias_counts_as_much_as_what_it_stands_for() -> None:
    items = NODES_MAX // 2 - 2  # twice them and their list, the list around both, and one more
    text = f"[&a [{'x, ' * items}], *a, y"
    read_tree(f"{text}]", file="s.yaml")
    with pytest.raises(SpecError, match=f"more than {NODES_MAX} values"):
        read_tree(f"{text}, y]", file="s.yaml")


def test_an_alias_bomb_in_fields_that_exist_is_refused_too(refused: Refused) -> None:
    prompts = "&p [" + ", ".join(["x"] * 1000) + "]"
    version = f"&v {{source: {{uri: /m}}, warmup: {{prompts: {prompts}}}}}"
    text = f"models: [{{name: m, versions: [{version}{', *v' * 1000}]}}]"
    assert f"more than {NODES_MAX} values" in refused(text)


def test_the_limits_leave_room_for_the_largest_sensible_spec() -> None:
    version = "{{name: v{}, source: {{uri: /m.gguf}}, traffic_share: {}}}"
    versions = ", ".join(version.format(i, 100 if i == 0 else 0) for i in range(16))
    models = "\n".join(f"  - {{name: m{i}, versions: [{versions}]}}" for i in range(200))
    spec = parse(f"models:\n{models}\n", file="s.yaml", base=Path("/"))
    assert len(spec.models) == 200


def test_comments_alone_are_no_tree() -> None:
    assert read_tree("# nothing\n", file="s.yaml") is None


def test_what_python_would_run_is_never_built(refused: Refused) -> None:
    message = refused('models: !!python/object/apply:os.system ["true"]')
    assert message.startswith("s.yaml:1:9: models: the tag !!python/object/apply:os.system")


def test_a_column_counts_characters_and_not_bytes(refused: Refused) -> None:
    assert "s.yaml:1:20: listen: must be" in refused("{'éé…': 1, listen: 3}")
