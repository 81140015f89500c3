"""Fixtures that tests of several wings share."""

from __future__ import annotations

import os
import shutil
import signal
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from preheat.acceleration.weights.sources import resolve
from preheat.core.paths import default_paths
from preheat.core.spec.load import default_spec

# Whoever started the tests in the background had SIGINT ignored, and children inherit that: tests
# that send one would wait for ever.
signal.signal(signal.SIGINT, signal.default_int_handler)

MODEL_VARIABLE = "PREHEAT_TEST_MODEL"


@pytest.fixture(scope="session")
def model_file() -> Path:
    """The default model's file: ``PREHEAT_TEST_MODEL``, or from the user's cache, or fetched."""
    if given := os.environ.get(MODEL_VARIABLE):
        return Path(given)
    source = default_spec().models[0].versions[0].source
    return resolve(source, default_paths().cache).path


@pytest.fixture
def short_dir() -> Iterator[Path]:
    """A directory whose path leaves room for the names of Unix sockets, which ``tmp_path`` may
    not."""
    made = Path(tempfile.mkdtemp(prefix="ph-", dir="/tmp"))
    yield made
    shutil.rmtree(made)
