"""The filter's own machine, without Envoy: what it takes from an answer however that is cut."""

from __future__ import annotations

import ctypes
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from preheat.core.errors import GatewayError
from preheat.dataplane.envoy import binary, usage
from preheat.dataplane.envoy.usage import COUNTS, OBJECT_MAX_BYTES

SOURCE = Path(binary.__file__).with_name("native") / "usage.c"
STRICT = ("-std=c11", "-D_GNU_SOURCE", "-Wall", "-Wextra", "-Wpedantic", "-Werror")
TRAP = "-fsanitize-undefined-trap-on-error"
STUBS = """
#include <stdbool.h>
#include <stddef.h>
typedef struct { char *bytes; size_t length; } Buffer;
size_t envoy_dynamic_module_callback_http_get_body_chunks_size(void *f, int b) {
  (void)f, (void)b;
  return 0;
}
bool envoy_dynamic_module_callback_http_get_body_chunks(void *f, int b, Buffer *all) {
  (void)f, (void)b, (void)all;
  return false;
}
void envoy_dynamic_module_callback_http_set_dynamic_metadata_string(void *f, Buffer s, Buffer k,
                                                                    Buffer v) {
  (void)f, (void)s, (void)k, (void)v;
}
bool envoy_dynamic_module_callback_http_get_metadata_bool(void *f, int o, Buffer s, Buffer k,
                                                          bool *r) {
  (void)f, (void)o, (void)s, (void)k, (void)r;
  return false;
}
"""
# Reads seeds' answers, changes bytes of them at random, and has them read in random pieces.
FUZZER = """
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
long preheat_usage_of(char *, size_t, size_t, bool, char *);
static uint64_t state = 88172645463325252u;
static uint64_t next(void) {
  state ^= state << 13, state ^= state >> 7, state ^= state << 17;
  return state;
}
int main(int count, char **seeds) {
  static const char bytes[] = "\\"{}[]:,\\\\ \\n\\rdata019eE+-usagetimings";
  long found = 0;
  for (int round = 0; round < 200000; round++) {
    const char *seed = seeds[1 + next() % (uint64_t)(count - 1)];
    size_t length = strlen(seed);
    char *answer = malloc(length);
    memcpy(answer, seed, length);
    for (uint64_t i = next() % 8; i; i--) {
      answer[next() % length] =
          next() % 4 ? bytes[next() % (sizeof bytes - 1)] : (char)(next() & 255);
    }
    char *text = malloc(6 * 33);
    long size = preheat_usage_of(answer, length, 1 + next() % length, next() & 1, text);
    if (size >= 0) {
      found++;
      if (size > 6 * 33 || memchr(text, '"', (size_t)size)) return 2;
    }
    free(text);
    free(answer);
  }
  printf("%ld\\n", found);
  return 0;
}
"""
USAGE = {"prompt_tokens": 7, "completion_tokens": 3, "total_tokens": 10}
TIMINGS = {"cache_n": 2, "prompt_n": 5, "prompt_ms": 1.5, "predicted_n": 4, "predicted_ms": 33.25}


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    """Compiled with all warnings as errors; undefined behaviour ends the process."""
    directory = tmp_path_factory.mktemp("usage")
    made, stubs = directory / "usage.so", directory / "stubs.c"
    stubs.write_text(STUBS)
    flags = ("-O1", "-fPIC", "-shared", "-fsanitize=undefined", TRAP)
    subprocess.run(["cc", *STRICT, *flags, "-o", str(made), str(SOURCE), str(stubs)], check=True)
    library = ctypes.CDLL(str(made))
    text, size = ctypes.c_char_p, ctypes.c_size_t
    library.preheat_usage_of.argtypes = [text, size, size, ctypes.c_bool, text]
    library.preheat_usage_of.restype = ctypes.c_long
    return library


def hidden(library: ctypes.CDLL, answer: bytes, step_bytes: int) -> bytes:
    """What is passed on of an answer whose request did not ask for usage."""
    text, passed = ctypes.create_string_buffer(6 * 33), ctypes.create_string_buffer(answer)
    library.preheat_usage_of(passed, len(answer), step_bytes, True, text)
    return passed.raw[: len(answer)]


def counts_of(library: ctypes.CDLL, answer: bytes, step_bytes: int) -> dict[str, str] | None:
    """What is told of an answer that comes in pieces of so many bytes, and passes untouched."""
    text, passed = ctypes.create_string_buffer(6 * 33), ctypes.create_string_buffer(answer)
    size = library.preheat_usage_of(passed, len(answer), step_bytes, False, text)
    assert passed.raw[: len(answer)] == answer
    if size < 0:
        return None
    told = dict(zip(COUNTS, text.raw[:size].decode().split(" "), strict=True))
    return {name: number for name, number in told.items() if number}


def numbers(**counts: float) -> dict[str, str]:
    return {name: str(number) for name, number in counts.items() if name in COUNTS}


def test_each_number_stands_in_its_place(library: ctypes.CDLL) -> None:
    answer = json.dumps({"usage": USAGE, "timings": TIMINGS}).encode()
    told = counts_of(library, answer, len(answer))
    assert told == numbers(**USAGE, **TIMINGS)


TEXT = st.text(st.sampled_from('"usage":{}\\ \n') | st.characters(codec="utf-8"), max_size=40)
# Values that look like what is searched for.
VALUES: st.SearchStrategy[Any] = st.recursive(
    st.none() | st.integers() | TEXT | st.sampled_from(["usage", '"usage": {"prompt_tokens": 9}']),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(TEXT.filter(lambda k: k not in ("usage", "timings")), inner, max_size=3)
    ),
    max_leaves=8,
)
COUNT = st.integers(0, 10**9) | st.floats(0, 1e9)


@given(
    before=VALUES,
    counts=st.dictionaries(st.sampled_from(COUNTS[:2]), COUNT),
    nested=VALUES,
    after=VALUES,
    indent=st.sampled_from([None, 0, 3]),
    step_bytes=st.integers(1, 9),
)
def test_counts_are_exact_wherever_an_answer_is_cut_and_whatever_stands_around(
    library: ctypes.CDLL,
    *,
    before: Any,
    counts: dict[str, float],
    nested: Any,
    after: Any,
    indent: int | None,
    step_bytes: int,
) -> None:
    reply = {"a": before, "usage": {"details": nested, **counts, "more": nested}, "b": after}
    answer = json.dumps(reply, indent=indent, ensure_ascii=False).encode()
    wanted = numbers(**counts) if len(json.dumps(nested, indent=indent)) < 1000 else None
    if wanted is not None:
        assert counts_of(library, answer, step_bytes) == wanted
        assert counts_of(library, answer, len(answer)) == wanted


@given(st.lists(st.sampled_from([USAGE, {"prompt_tokens": 1}, None, {}, 5]), max_size=4))
def test_the_last_number_of_a_stream_counts(library: ctypes.CDLL, usages: list[Any]) -> None:
    events = [b"data: " + json.dumps({"usage": usage}).encode() + b"\n\n" for usage in usages]
    wanted: dict[str, str] | None = None
    for told in usages:
        if isinstance(told, dict):
            wanted = {**(wanted or {}), **numbers(**told)}
    for step_bytes in (1, 7, 1000):
        assert counts_of(library, b"".join(events), step_bytes) == wanted


@pytest.mark.parametrize(
    ("answer", "wanted"),
    [
        (b'{"usage" :\n\t{ "prompt_tokens" : 7 } }', numbers(prompt_tokens=7)),
        (b'data: {"usage":\r\ndata: {"prompt_tokens":\ndata:7\n\n', None),
        (b'data: {"usage":\r\ndata: {"prompt_tokens":\ndata:7}}\n\n', numbers(prompt_tokens=7)),
        (b'data: {"usage": \n\ndata: {"prompt_tokens": 7}}\n\n', None),
        (b'{"usage": {"x": {"prompt_tokens": 7}, "y": [{"prompt_n": 1}]}}', {}),
        (b'{"usage": {"prompt_tokens": "7", "completion_tokens": 3}}', {"completion_tokens": "3"}),
        (b'{"usage": {"prompt_n": 7}, "timings": {"prompt_tokens": 7}}', {}),
        (b'{"usage": {"x": "}", "prompt_tokens": 7}}', numbers(prompt_tokens=7)),
        (b'{"usage": {"x": "\\"", "prompt_tokens": 7}}', numbers(prompt_tokens=7)),
        (b'{"text": "\\"usage\\": {\\"prompt_tokens\\": 7}"}', None),
        (b'{"usage": {"prompt_tokens": ' + b"1" * 32 + b"}}", {}),
        (b'{"usage": {"prompt_tokens": ' + b"1" * 31 + b"}}", {"prompt_tokens": "1" * 31}),
        (b'{"usage": {"x": "' + b"y" * OBJECT_MAX_BYTES + b'", "prompt_tokens": 7}}', None),
        (b'{"usage": {"prompt_tokens": 7', None),
        (b'"usage"' * 9, None),
        (b"", None),
    ],
)
def test_what_is_taken_and_what_is_not(
    library: ctypes.CDLL, answer: bytes, wanted: dict[str, str] | None
) -> None:
    for step_bytes in (1, 2, 5, max(1, len(answer))):
        assert counts_of(library, answer, step_bytes) == wanted


@given(before=VALUES, after=VALUES, first=st.booleans(), last=st.booleans(), indent=st.booleans())
def test_usage_that_was_not_asked_for_is_as_if_it_had_not_been_there(
    library: ctypes.CDLL, *, before: Any, after: Any, first: bool, last: bool, indent: bool
) -> None:
    reply: dict[str, Any] = {} if first else {"a": before}
    rest = {} if last else {"b": after}
    style = (", ", ": ") if indent else (",", ":")

    def event(value: Any) -> bytes:
        return b"data: " + json.dumps(value, separators=style).encode() + b"\n\n"

    carrying = event({**reply, "usage": USAGE, **rest})
    passed = hidden(library, carrying, len(carrying))
    assert len(passed) == len(carrying)
    assert json.loads(passed.removeprefix(b"data: ")) == {**reply, **rest}
    # In pieces it may stay, but is never half there.
    for step_bytes in (1, 7, 30):
        told = json.loads(hidden(library, carrying, step_bytes).removeprefix(b"data: "))
        assert told in ({**reply, **rest}, {**reply, "usage": USAGE, **rest})


def test_only_usage_of_streams_is_hidden(library: ctypes.CDLL) -> None:
    whole = json.dumps({"usage": USAGE, "timings": TIMINGS}).encode()
    assert hidden(library, whole, len(whole)) == whole
    event = b'data: {"usage": null, "timings": {"prompt_n": 5}}\n\n'
    assert hidden(library, event, len(event)) == event
    lines = b'data: {"a": 1, "usage":\ndata: {"prompt_tokens": 7}}\n\ndata: [DONE]\n\n'
    assert hidden(library, lines, len(lines)).split() == b'data: {"a": 1 }\n\ndata: [DONE]'.split()


def test_no_bytes_make_it_read_or_write_where_it_must_not(tmp_path: Path) -> None:
    """200,000 changed answers under the compiler's checks of addresses and undefined behaviour."""
    source, program = tmp_path / "fuzz.c", tmp_path / "fuzz"
    source.write_text(STUBS + FUZZER)
    flags = ("-O1", "-g", "-fsanitize=address,undefined", "-fno-sanitize-recover=all")
    files = ("-o", str(program), str(SOURCE), str(source))
    subprocess.run(["cc", *STRICT, *flags, *files], check=True)
    whole = json.dumps({"id": "x", "usage": USAGE, "timings": TIMINGS})
    lines = 'data: {"usage":\r\ndata: {"prompt_tokens": 7,\ndata: "completion_tokens":3}}\n\n'
    seeds = [whole, f"data: {whole}\n\ndata: [DONE]\n\n", lines, '{"usage": {"x": "\\"' + "y" * 90]
    done = subprocess.run([program, *seeds], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    # Most are still found, so that the changes reached all of the machine.
    assert int(done.stdout) > 50_000


def test_a_filter_that_was_not_compiled_is_told_of(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(binary, "_NATIVE", tmp_path)
    with pytest.raises(GatewayError, match="was not compiled") as caught:
        binary.environment()
    assert "make serve" in caught.value.advice


@pytest.mark.parametrize("compiler", ["/does/not/exist", "false"])
def test_a_missing_compiler_is_told_of_and_leaves_the_old_filter(compiler: str) -> None:
    library = SOURCE.with_name("libpreheat_usage.so")
    before = sorted(SOURCE.parent.iterdir()), library.stat().st_mtime_ns
    root = SOURCE.parents[5]
    done = subprocess.run(
        [sys.executable, root / "hatch_build.py"],
        env={"CC": compiler, "PATH": "/usr/bin:/bin"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 1
    assert "apt install gcc" in done.stderr
    assert (sorted(SOURCE.parent.iterdir()), library.stat().st_mtime_ns) == before


def test_both_sides_agree_on_the_longest_object() -> None:
    assert f"OBJECT_MAX = {usage.OBJECT_MAX_BYTES}," in SOURCE.read_text()
