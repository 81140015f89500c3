"""Rules between the fields of a spec, as one pure function that finds every breach at once.

What does not belong here: the type and range of a single field (``schema.py``), and anything that
looks at the machine, such as whether a file exists.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from ipaddress import ip_address

from preheat.core.spec.problem import FieldPath, Problem, nearest, quoted
from preheat.core.spec.schema import (
    ApiKey,
    Dependency,
    Engine,
    Model,
    Source,
    Spec,
    Version,
    Warmup,
)

PYPI_FORM = "pypi:PACKAGE==VERSION/PATH/IN/WHEEL"
# Package names as in PEP 508; a version without wildcards, so that it pins.
PYPI_URI = re.compile(
    r"pypi:(?P<package>[A-Za-z0-9](?:[A-Za-z0-9._-]*[A-Za-z0-9])?)"
    r"==(?P<version>[A-Za-z0-9][A-Za-z0-9.!+_-]*)/(?P<member>.+)"
)
# Two letters at least, and no slash before the colon: ``./a:b.gguf`` is a path.
SCHEME = re.compile(r"([A-Za-z][A-Za-z0-9+.-]+):")


def check(spec: Spec) -> list[Problem]:
    """Every rule that ``spec`` breaks, with the path of the field to change; or none."""
    return [
        *_unique("model", [model.name for model in spec.models], ("models",)),
        *(
            problem
            for i, model in enumerate(spec.models)
            for problem in _model(model, ("models", i))
        ),
        *_unique("key", [key.name for key in spec.api_keys], ("api_keys",)),
        *(problem for i, key in enumerate(spec.api_keys) for problem in _api_key(key, i)),
        *_host(spec.listen.host),
    ]


def _model(model: Model, path: FieldPath) -> Iterator[Problem]:
    versions = (*path, "versions")
    yield from _unique("version", [version.name for version in model.versions], versions)
    shares = [version.traffic_share for version in model.versions]
    if sum(shares) != 100:
        added = f"{' + '.join(map(str, shares))} = " if len(shares) > 1 else ""
        yield Problem(
            path=versions,
            what=f"the traffic shares must sum to 100, not {added}{sum(shares)}",
            advice="set traffic_share of each version",
        )
    for i, version in enumerate(model.versions):
        yield from _version(version, (*versions, i))


def _version(version: Version, path: FieldPath) -> Iterator[Problem]:
    yield from _source(version.source, (*path, "source"))
    yield from _engine(version.engine, (*path, "engine"))
    yield from _warmup(version.warmup, version.engine, (*path, "warmup"))
    preload = version.preload
    if preload.not_before is not None and preload.not_before == preload.not_after:
        yield Problem(
            path=(*path, "preload", "not_after"),
            what=f"the window from {preload.not_before} to {preload.not_after} is empty",
            advice="leave both out for a window that is always open",
        )
    dependencies = (*path, "preload", "critical_dependencies")
    yield from _unique("dependency", [d.name for d in preload.critical_dependencies], dependencies)
    for i, dependency in enumerate(preload.critical_dependencies):
        yield from _dependency(dependency, (*dependencies, i))


def _source(source: Source, path: FieldPath) -> Iterator[Problem]:
    scheme = SCHEME.match(source.uri)
    if scheme is None:
        return
    if scheme[1] != "pypi":
        meant = nearest(scheme[1], ["pypi"])
        yield Problem(
            path=(*path, "uri"),
            what=f"sources of the kind {quoted(scheme[1] + ':')} are not known",
            advice='did you mean "pypi:"?' if meant else f"give a path (./…) or {PYPI_FORM}",
        )
        return
    parts = PYPI_URI.fullmatch(source.uri)
    if parts is None:
        yield Problem(path=(*path, "uri"), what=f"must have the form {PYPI_FORM}")
    elif any(step in ("", ".", "..") for step in parts["member"].split("/")):
        yield Problem(path=(*path, "uri"), what="the path in the wheel must be relative and plain")
    elif not parts["member"].lower().endswith(".gguf"):
        yield Problem(path=(*path, "uri"), what="the file in the wheel must end in .gguf")
    if source.sha256 is None:
        yield Problem(
            path=(*path, "sha256"),
            what="is missing; what comes from an index must be pinned",
            advice="give the SHA-256 of the file in the wheel (sha256sum FILE)",
        )


def _engine(engine: Engine, path: FieldPath) -> Iterator[Problem]:
    if engine.kv_cache_type == "q8_0" and engine.flash_attention == "off":
        yield Problem(
            path=(*path, "kv_cache_type"),
            what="llama.cpp needs flash attention for a cache of q8_0",
            advice="set flash_attention to auto or on, or kv_cache_type to f16",
        )


def _warmup(warmup: Warmup, engine: Engine, path: FieldPath) -> Iterator[Problem]:
    given = [(path, warmup.max_tokens), ((*path, "known_answer"), warmup.known_answer.max_tokens)]
    for where, tokens in given:
        # At least one token of the context is the prompt's.
        if tokens >= engine.context_length and not engine.embeddings:
            yield Problem(
                path=(*where, "max_tokens"),
                what=f"{tokens} tokens and their prompt do not fit into the context of "
                f"{engine.context_length} tokens",
                advice="lower it or raise engine.context_length",
            )
    if not engine.embeddings:
        return
    for name in ("expect", "logprob"):
        if getattr(warmup.known_answer, name) is not None:
            yield Problem(
                path=(*path, "known_answer", name),
                what="a model that serves embeddings generates no text to compare",
                advice="leave it out, or set engine.embeddings to false",
            )


def _dependency(dependency: Dependency, path: FieldPath) -> Iterator[Problem]:
    if dependency.url is None and dependency.name != "gateway":
        yield Problem(
            path=path,
            what=f"the dependency {quoted(dependency.name)} needs a url",
            advice='only "gateway", preheat\'s own Envoy, has none',
        )


def _api_key(key: ApiKey, index: int) -> Iterator[Problem]:
    if (key.env is None) == (key.file is None):
        has = "neither" if key.env is None else "both"
        yield Problem(
            path=("api_keys", index),
            what=f"the key {quoted(key.name)} needs exactly one of env and file, and has {has}",
        )


def _host(host: str) -> Iterator[Problem]:
    try:
        ip_address(host)
    except ValueError:
        yield Problem(
            path=("listen", "host"),
            what=f"must be an IP address, not {quoted(host)}",
            advice="use 127.0.0.1 for this machine only, 0.0.0.0 for all its addresses",
        )


def _unique(noun: str, names: Iterable[str], path: FieldPath) -> Iterator[Problem]:
    first: dict[str, int] = {}
    for i, name in enumerate(names):
        if first.setdefault(name, i) != i:
            yield Problem(
                path=(*path, i, "name"),
                what=f"another {noun} is called {quoted(name)} too: item {first[name]} of the list",
                advice="names must be unique",
            )
