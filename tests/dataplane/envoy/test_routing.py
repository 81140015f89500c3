from __future__ import annotations

import re
from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st

from preheat.dataplane.envoy.routing import (
    Endpoint,
    Key,
    Listener,
    ModelRoute,
    VersionRoute,
    cluster_name,
)


def endpoint(*, serving: bool) -> Endpoint:
    return Endpoint("m-0@1", Path("/e"), Path("/h"), serving=serving)


@given(st.text(), st.text(), st.text(), st.text())
def test_clusters_have_names_of_their_own_that_are_safe_everywhere(
    model: str, version: str, other_model: str, other_version: str
) -> None:
    name = cluster_name(model, version)
    assert re.fullmatch(r"[A-Za-z0-9_-]{1,69}", name)
    if (model, version) != (other_model, other_version):
        assert name != cluster_name(other_model, other_version)


def test_a_model_is_ready_when_a_version_with_a_share_has_a_serving_start() -> None:
    def state(share: int, *serving: bool) -> str:
        endpoints = tuple(endpoint(serving=one) for one in serving)
        return ModelRoute("m", (VersionRoute("v", share, endpoints, 1),)).state

    assert state(100, False, True) == "ready"
    assert state(100, False) == "loading"
    assert state(100) == "loading"
    assert state(0, True) == "loading"
    assert ModelRoute("m", ()).state == "loading"


def test_secrets_do_not_show_when_values_are_printed() -> None:
    listener = Listener("h", 1, key_pem="-secret-", keys=(Key("owner", "-secret-"),))
    assert "-secret-" not in repr(listener)
