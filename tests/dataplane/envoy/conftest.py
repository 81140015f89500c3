from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterator

import pytest
from tests.dataplane.envoy.harness import Gateway, LoopThread, running_gateway
from tests.dataplane.envoy.upstream import Script, Upstream

_numbers = itertools.count(1)


@pytest.fixture(scope="session")
def loop() -> Iterator[LoopThread]:
    thread = LoopThread()
    yield thread
    thread.stop()


@pytest.fixture(scope="session")
def session_gateway(loop: LoopThread) -> Iterator[Gateway]:
    with running_gateway(loop) as gateway:
        yield gateway


@pytest.fixture
def gateway(session_gateway: Gateway) -> Gateway:
    """One Envoy for all tests; each publishes a table of its own."""
    session_gateway.since_unix_s = time.time()
    session_gateway.records.on_record = None
    return session_gateway


@pytest.fixture
def start(gateway: Gateway) -> Iterator[Callable[[], Upstream]]:
    """Makes stub engines, each a start with a name of its own."""
    made: list[Upstream] = []

    def make() -> Upstream:
        upstream = Upstream(f"m-v1-0@{next(_numbers)}", gateway.paths.runtime)
        gateway.loop.run(upstream.start())
        made.append(upstream)
        return upstream

    yield make
    for upstream in made:
        gateway.loop.run(upstream.stop())


@pytest.fixture
def engine(start: Callable[[], Upstream]) -> Upstream:
    return start()


@pytest.fixture
def script(loop: LoopThread) -> Script:
    return Script(loop.loop)
