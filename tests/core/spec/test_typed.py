from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from preheat.core.spec.load import parse
from preheat.core.spec.schema import Spec, Version

Refused = Callable[[str], str]


def version_of(lines: str) -> Version:
    """The version that holds these lines, each indented by its own two spaces."""
    text = "models:\n- name: m\n  versions:\n  - source: {uri: /m.gguf}\n"
    text += "".join(f"    {line}\n" for line in lines.splitlines())
    return parse(text, file="s.yaml", base=Path("/base")).models[0].versions[0]


def spec_of(model_name: str) -> Spec:
    text = f"models: [{{name: {model_name}, versions: [{{source: {{uri: /m}}}}]}}]"
    return parse(text, file="s.yaml", base=Path("/base"))


# --- what YAML 1.1 would turn into something else -------------------------------------------------


@pytest.mark.parametrize(
    "literal",
    ["on", "No", "yes", "1:30", "012", "0x1f", "1_000", "1e3", "1.0", ".inf", "2026-01-31", "true"],
)
def test_a_text_field_takes_a_scalar_as_it_is_written(literal: str) -> None:
    assert spec_of(literal).models[0].name == literal
    assert spec_of(f"'{literal}'").models[0].name == literal


def test_an_unquoted_time_of_day_is_not_taken_for_minutes() -> None:
    preload = version_of("preload: {not_before: 22:30, not_after: 06:15}").preload
    assert (preload.not_before, preload.not_after) == ("22:30", "06:15")


def test_a_choice_may_be_called_on() -> None:
    assert version_of("engine: {flash_attention: on}").engine.flash_attention == "on"


def test_the_schema_number_needs_no_quotes() -> None:
    text = "schema: 1.0\nmodels: [{name: m, versions: [{source: {uri: /m}}]}]"
    assert parse(text, file="s.yaml", base=Path("/")).schema == "1.0"


@pytest.mark.parametrize("literal", ["null", "~", ""])
def test_null_where_text_must_stand_is_an_error(refused: Refused, literal: str) -> None:
    text = f"models:\n- name: {literal}\n  versions: [{{source: {{uri: /m}}}}]"
    assert "models[0].name: must be a name of 1 to 200 characters" in refused(text)


@pytest.mark.parametrize("literal", ["!!str null", "! null", '"null"', "|-\n        null"])
def test_null_that_is_said_to_be_text_is_text(literal: str) -> None:
    known_answer = version_of(
        f"warmup:\n  known_answer:\n    expect: {literal}"
    ).warmup.known_answer
    assert known_answer.expect == "null"


def test_null_is_the_absence_of_an_optional_field() -> None:
    assert version_of("engine: {threads: null}").engine.threads is None
    assert version_of("warmup: {known_answer: {expect: ~}}").warmup.known_answer.expect is None


@pytest.mark.parametrize("literal", ["012", "1:30", "0x10", "0o7", "4.0", "4MiB", ".inf", '"4"'])
def test_a_whole_number_is_written_in_decimal_or_refused(refused: Refused, literal: str) -> None:
    message = refused(f"listen: {{port: {literal}}}")
    assert f"listen.port: must be a whole number from 1 to 65535, not {literal}" in message


@pytest.mark.parametrize("literal", ["9" * 30, "9" * 5000])
def test_a_number_of_any_length_is_only_out_of_range(refused: Refused, literal: str) -> None:
    assert "listen.port: must be a whole number from 1 to 65535" in refused(
        f"listen: {{port: {literal}}}"
    )


@pytest.mark.parametrize("literal", [".nan", "-.inf", "1e9999", "30s", "1:30.5", '"30"'])
def test_a_number_is_finite_and_decimal_or_refused(refused: Refused, literal: str) -> None:
    message = refused(f"limits: {{drain_timeout_s: {literal}}}")
    assert "limits.drain_timeout_s: must be a number above 0 and up to 86400" in message


def test_a_number_without_an_upper_bound_is_finite_too(refused_after_head: Refused) -> None:
    told = refused_after_head("        warmup: {known_answer: {tolerance: 1e9999}}")
    assert "known_answer.tolerance: must be a number above 0, not 1e9999" in told


@pytest.mark.parametrize(
    ("literal", "value"), [("30", 30.0), ("1.5", 1.5), (".5", 0.5), ("1e2", 100.0), ("1_0.0", 10.0)]
)
def test_a_number_may_be_written_in_each_decimal_way(literal: str, value: float) -> None:
    assert version_of(f"warmup: {{deadline_s: {literal}}}").warmup.deadline_s == value


def test_an_underscore_may_part_the_digits_of_a_whole_number() -> None:
    assert version_of("engine: {context_length: 16_384}").engine.context_length == 16_384


@pytest.mark.parametrize(
    ("literal", "value"), [("true", True), ("Off", False), ("yes", True), ("NO", False)]
)
def test_a_boolean_takes_the_words_for_it(literal: str, value: bool) -> None:
    assert version_of(f"engine: {{prefix_caching: {literal}}}").engine.prefix_caching is value


# --- messages -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        (
            "        engine: {threds: 4}",
            "s.yaml:5:18: models[0].versions[0].engine.threds: unknown field\n"
            '  → did you mean "threads"?',
        ),
        (
            "        engine: {maxBatch-size: 4}",
            "s.yaml:5:18: models[0].versions[0].engine.maxBatch-size: unknown field\n"
            '  → did you mean "max_batch_size"?',
        ),
        (
            "        threads: 4",
            "s.yaml:5:9: models[0].versions[0].threads: unknown field\n"
            '  → did you mean "engine.threads"?',
        ),
        (
            "listen: {zzz: 4}",
            "s.yaml:5:10: listen.zzz: unknown field\n  → the fields here are host, port, tls",
        ),
        (
            "        engine: {kv_cache_type: q8}",
            "s.yaml:5:33: models[0].versions[0].engine.kv_cache_type: "
            'must be one of "f16", "q8_0", "f32", not q8\n  → did you mean "q8_0"?',
        ),
        (
            "        engine: {threads: 0}",
            "s.yaml:5:27: models[0].versions[0].engine.threads: "
            "must be a whole number from 1 to 1024, not 0",
        ),
        (
            '        engine: {threads: "4"}',
            "s.yaml:5:27: models[0].versions[0].engine.threads: "
            'must be a whole number from 1 to 1024, not "4"\n  → leave the quotes out',
        ),
        (
            "        engine:\n",
            "s.yaml:5:16: models[0].versions[0].engine: must be a mapping with kind, "
            "max_batch_size, context_length, threads, prefix_caching, embeddings, "
            "flash_attention, kv_cache_type, gpu_layers, not empty\n"
            "  → leave the field out for its default",
        ),
        (
            "        warmup: {prompts: Hello}",
            "s.yaml:5:27: models[0].versions[0].warmup.prompts: "
            "must be a list, not a single value\n"
            '  → begin each item with "- "',
        ),
        (
            "        warmup: {prompts: [a, '', {b: c}]}",
            "2 problems in s.yaml:\n"
            "  s.yaml:5:31: models[0].versions[0].warmup.prompts[1]: "
            'must be non-empty text, not ""\n'
            "  s.yaml:5:35: models[0].versions[0].warmup.prompts[2]: "
            "must be non-empty text, not a mapping",
        ),
        (
            "listen:\n  port: 1\n  port: 2",
            "s.yaml:7:3: listen.port: given twice, first in line 6\n  → keep one of them",
        ),
        ("listen: {[a]: 1}", "s.yaml:5:10: listen: a field's name must be plain text"),
        (
            "listen: {port: !!int 8080}",
            "s.yaml:5:16: listen.port: the tag !!int has no meaning here\n  → remove it",
        ),
        ("schema: '2.0'", 's.yaml:5:9: schema: must be "1.0", not "2.0"'),
        (
            "        source: {uri: x}",
            "s.yaml:5:9: models[0].versions[0].source: given twice, first in line 4\n"
            "  → keep one of them",
        ),
    ],
)
def test_a_mistake_is_told_with_its_place_and_the_way_out(
    refused_after_head: Refused, lines: str, message: str
) -> None:
    told = refused_after_head(lines)
    assert told.startswith(message), told


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "models: {name: m}",
            "s.yaml:1:9: models: must be a list of at least 1, not a mapping",
        ),
        ("models: []", "s.yaml:1:9: models: must be a list of at least 1, not a list of 0"),
        ("models: m", "s.yaml:1:9: models: must be a list of at least 1, not a single value"),
        ("models:", "s.yaml:1:8: models: must be a list of at least 1, not empty"),
        ("models: [m]", "s.yaml:1:10: models[0]: must be a mapping with name, versions"),
        ("listen: {}", "s.yaml:1:1: models: is missing"),
        ("! {}", "s.yaml:1:1: models: is missing"),
        (
            "models: [{name: m, versions: [{source: {}}]}]",
            "s.yaml:1:40: models[0].versions[0].source.uri: is missing",
        ),
        ("- models", "s.yaml:1:1: must be a mapping with schema, models"),
        ("models", "s.yaml:1:1: must be a mapping with schema, models"),
        ("!x {}", "s.yaml:1:1: the tag !x has no meaning here"),
    ],
)
def test_a_wrong_shape_is_told_clearly(refused: Refused, text: str, message: str) -> None:
    assert refused(text).startswith(message), refused(text)


@pytest.mark.parametrize(
    "lines",
    ["api_keys: [sk-hidden]", "api_keys: [{name: x, env: sk-hidden}]", "api_keys: sk-hidden"],
)
def test_a_key_in_the_wrong_place_is_not_repeated(refused_after_head: Refused, lines: str) -> None:
    assert "sk-hidden" not in refused_after_head(lines)


def test_all_mistakes_are_told_at_once_in_the_order_of_the_file(
    refused_after_head: Refused,
) -> None:
    told = refused_after_head(
        "        replicas: many\n"
        "        engine: {threads: -1}\n"
        "listen: {port: 0, hots: x}\n"
        "limits: {retries: 9}\n"
    )
    places = [line.split(": ")[0].strip() for line in told.splitlines()[1:]]
    assert places == [
        "s.yaml:5:19",
        "s.yaml:6:27",
        "s.yaml:7:16",
        "s.yaml:7:19",
        "s.yaml:8:19",
    ]


def test_a_flood_of_mistakes_is_cut(refused: Refused) -> None:
    told = refused("\n".join(f"field{i}: 1" for i in range(100)))
    assert told.startswith("101 problems in s.yaml:")
    assert told.endswith("and 81 more")
    assert len(told.splitlines()) == 22


# --- anchors and merges ---------------------------------------------------------------------------


def test_a_merged_mapping_gives_what_the_field_does_not_give_itself() -> None:
    text = """
models:
  - name: m
    versions:
      - &base
        name: old
        source: {uri: /old.gguf}
        traffic_share: 90
        engine: {threads: 3}
      - <<: *base
        name: new
        traffic_share: 10
"""
    old, new = parse(text, file="s.yaml", base=Path("/")).models[0].versions
    assert (new.name, new.traffic_share) == ("new", 10)
    assert (new.engine, new.source) == (old.engine, old.source)


def test_of_several_merged_mappings_the_first_wins() -> None:
    engine = version_of("engine: {<<: [{threads: 1}, {threads: 2, gpu_layers: 5}]}").engine
    assert (engine.threads, engine.gpu_layers) == (1, 5)


def test_a_merge_of_anything_else_is_an_error(refused: Refused) -> None:
    assert "listen.<<: must be a mapping, or a list of mappings" in refused("listen: {<<: [1]}")


def test_a_quoted_merge_key_is_a_field_that_does_not_exist(refused: Refused) -> None:
    assert "listen.<<: unknown field" in refused('listen: {"<<": {port: 1}}')
