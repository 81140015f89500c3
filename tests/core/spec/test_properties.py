from __future__ import annotations

import contextlib
import re
from pathlib import Path

import msgspec
import yaml
from hypothesis import given
from hypothesis import strategies as st

from preheat.core.errors import SpecError
from preheat.core.spec.load import parse
from preheat.core.spec.schema import (
    ApiKey,
    Dependency,
    Engine,
    KnownAnswer,
    Limits,
    Listen,
    Model,
    Preload,
    Source,
    Spec,
    Tls,
    Version,
    Warmup,
)

EXAMPLES = Path(__file__).parents[3] / "examples"
EXAMPLE = (EXAMPLES / "01-default" / "preheat.yaml").read_text(encoding="utf-8")
# What YAML gives a meaning to, and what has tripped parsers before.
FRAGMENTS = (
    *"\t\n\r:-?[]{},&*!|>'\"%@`#~<\\\0\x07\x85\u2028\ufeff\ud800é",
    *("- ", ": ", "? ", "<<: ", "&a ", "*a", "!!str ", "!!int ", "!x ", "---\n", "...\n", "\n\n  "),
    *("on", "012", "1:30", ".nan", "-.inf", "null", "1e999", "9" * 25, '"\\0"', '"\\uD800"'),
    "schema:", "models:", "versions:", "source: {uri: x}", "threads: 0", "{}", "[]", "[[]]",
)  # fmt: skip

fragment = st.sampled_from(FRAGMENTS) | st.text(max_size=3)
edit = st.tuples(st.integers(0, len(EXAMPLE)), st.integers(0, 12), fragment)


def edited(text: str, edits: list[tuple[int, int, str]]) -> str:
    for start, length, replacement in edits:
        text = text[:start] + replacement + text[start + length :]
    return text


@given(st.lists(edit, min_size=1, max_size=6))
def test_no_edit_of_a_sound_spec_raises_anything_but_a_spec_error(
    edits: list[tuple[int, int, str]],
) -> None:
    with contextlib.suppress(SpecError):
        parse(edited(EXAMPLE, edits), file="s.yaml", base=Path("/base"))


@given(st.text() | st.lists(fragment, max_size=30).map("".join))
def test_no_text_at_all_raises_anything_but_a_spec_error(text: str) -> None:
    with contextlib.suppress(SpecError):
        parse(text, file="s.yaml", base=Path("/base"))


json_value = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner),
    max_leaves=5,
)


@given(st.data())
def test_no_value_in_the_place_of_another_raises_anything_but_a_spec_error(
    data: st.DataObject,
) -> None:
    tree = yaml.safe_load(EXAMPLE)
    node = tree
    while True:
        keys = list(node) if isinstance(node, dict) else list(range(len(node)))
        key = data.draw(st.sampled_from(keys))
        if not isinstance(node[key], dict | list) or not node[key] or data.draw(st.booleans()):
            break
        node = node[key]
    node[key] = data.draw(json_value)
    with contextlib.suppress(SpecError):
        parse(yaml.safe_dump(tree), file="s.yaml", base=Path("/base"))


# --- round trip -----------------------------------------------------------------------------------

# Surrogates cannot stand in a file; the rest of unicode can.
text = st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=20)
tricky = st.sampled_from(["on", "No", "012", "1:30", "null", "~", "1.0", "=", "<<", "- x", "#"])
name = (tricky | st.text("abcé/:._-0~", min_size=1, max_size=12)).filter(
    lambda word: not set(word) & set(" #<")
)
path = st.text("ab./é _", min_size=1, max_size=12).map(lambda part: str(Path("/") / f"x{part}"))
path = path.filter(lambda p: ".." not in p)
seconds = st.floats(min_value=0.0, max_value=86_400.0, exclude_min=True)
engine = st.builds(
    Engine,
    max_batch_size=st.integers(1, 256),
    context_length=st.integers(2048, 1 << 20),
    threads=st.none() | st.integers(1, 1024),
    prefix_caching=st.booleans(),
    flash_attention=st.sampled_from(["auto", "on", "off"]),
    kv_cache_type=st.sampled_from(["f16", "q8_0", "f32"]),
    gpu_layers=st.integers(0, 1024),
).filter(lambda e: (e.kv_cache_type, e.flash_attention) != ("q8_0", "off"))
known_answer = st.builds(
    KnownAnswer,
    prompt=tricky | text,
    expect=st.none() | text,
    max_tokens=st.integers(1, 64),
    logprob=st.none() | st.floats(max_value=0.0, allow_infinity=False),
    tolerance=st.floats(min_value=0.0, exclude_min=True, allow_infinity=False),
)
warmup = st.builds(
    Warmup,
    strategy=st.sampled_from(["cold", "warm", "hot"]),
    prompts=st.lists(tricky | text, max_size=3).map(tuple),
    max_tokens=st.integers(1, 1024),
    known_answer=known_answer,
    deadline_s=seconds,
)
preload = st.builds(
    Preload,
    not_before=st.none() | st.just("22:30"),
    not_after=st.none() | st.just("06:15"),
    deadline_s=st.none() | seconds,
    critical_dependencies=st.sampled_from(
        [(), (Dependency(name="gateway"), Dependency(name="on", url="http://127.0.0.1:1/"))]
    ),
)
sha256 = st.text("0123456789abcdef", min_size=64, max_size=64)
source = st.builds(Source, uri=path, sha256=st.none() | sha256) | st.builds(
    Source, uri=st.just("pypi:a==1.0/b/c.gguf"), sha256=sha256
)


@st.composite
def models(draw: st.DrawFn, model_name: str) -> Model:
    names = draw(st.lists(name, min_size=1, max_size=3, unique=True))
    versions = tuple(
        Version(
            name=version_name,
            source=draw(source),
            engine=draw(engine),
            replicas=draw(st.integers(0, 64)),
            traffic_share=100 if i == 0 else 0,
            warmup=draw(warmup),
            preload=draw(preload),
        )
        for i, version_name in enumerate(names)
    )
    return Model(name=model_name, versions=versions)


@st.composite
def specs(draw: st.DrawFn) -> Spec:
    names = draw(st.lists(name, min_size=1, max_size=2, unique=True))
    tls = draw(st.none() | st.builds(Tls, certificate=path, key=path))
    return Spec(
        models=tuple(draw(models(model_name)) for model_name in names),
        listen=Listen(host="::1", port=draw(st.integers(1, 65535)), tls=tls),
        api_keys=draw(
            st.sampled_from([(), (ApiKey(name="no", env="KEY"), ApiKey(name="b", file="/k"))])
        ),
        limits=draw(st.builds(Limits, retries=st.integers(0, 5), drain_timeout_s=seconds)),
    )


@given(specs())
def test_a_spec_written_as_yaml_reads_as_itself(spec: Spec) -> None:
    text = yaml.safe_dump(msgspec.to_builtins(spec), sort_keys=False)
    assert parse(text, file="s.yaml", base=Path("/base")) == spec


@given(specs())
def test_a_spec_written_as_json_reads_as_itself(spec: Spec) -> None:
    text = msgspec.json.encode(spec).decode()
    # The few characters that JSON allows and YAML wants escaped.
    text = re.sub(r"[\x7f-\x9f\ufffe\uffff]", lambda found: f"\\u{ord(found[0]):04x}", text)
    assert parse(text, file="s.json", base=Path("/base")) == spec
