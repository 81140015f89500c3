from __future__ import annotations

import json
import re
from pathlib import Path
from urllib.parse import quote

from hypothesis import given
from hypothesis import strategies as st

from preheat.core.paths import Paths
from preheat.dataplane.envoy.answers import any_spelling
from preheat.dataplane.envoy.resources import Resources, bootstrap, resources
from preheat.dataplane.envoy.routing import (
    Endpoint,
    Key,
    Listener,
    ModelRoute,
    RoutingTable,
    VersionRoute,
    cluster_name,
)

PATHS = Paths(Path("/r"), Path("/s"), Path("/c"))


def made(*models: ModelRoute, listener: Listener | None = None) -> Resources:
    return resources(RoutingTable(listener or Listener("127.0.0.1", 8080), models), PATHS)


def version(name: str, share: int, *serving: bool) -> VersionRoute:
    endpoints = tuple(
        Endpoint(f"{name}-{n}@1", Path(f"/e/{name}{n}"), Path(f"/h/{name}{n}"), serving=one)
        for n, one in enumerate(serving)
    )
    return VersionRoute(name, share, endpoints, 8)


@given(st.text(st.characters(exclude_categories=["Cs"]), min_size=1), st.text("/:@+%. ~"))
def test_a_name_in_a_path_matches_however_it_is_escaped_and_nothing_else_does(
    name: str, safe: str
) -> None:
    # Python knows flags in the middle of a pattern only as groups, which these are.
    pattern = re.compile(any_spelling(name))
    assert pattern.fullmatch(quote(name, safe=""))
    assert pattern.fullmatch(quote(name, safe=safe))
    assert not pattern.fullmatch(quote(name + "x", safe=""))
    assert not pattern.fullmatch(quote("x" + name, safe=""))


shares = st.integers(0, 100)
versions = st.lists(st.tuples(shares, st.lists(st.booleans(), max_size=3)), max_size=4).map(
    lambda drawn: tuple(version(f"v{n}", share, *s) for n, (share, s) in enumerate(drawn))
)


@given(versions)
def test_weights_are_given_to_versions_with_a_share_and_a_serving_start(
    drawn: tuple[VersionRoute, ...],
) -> None:
    routes = made(ModelRoute("m", drawn)).routes["public"]["virtual_hosts"][0]["routes"]
    route = next(route for route in routes if route.get("name") == "m")
    shared = {cluster_name("m", v.name): v.share for v in drawn if v.share}
    proven = {
        cluster_name("m", v.name): v.share
        for v in drawn
        if v.share and any(e.serving for e in v.endpoints)
    }
    if "direct_response" in route:
        assert not shared
        return
    action = route["route"]
    if "cluster" in action:
        assert [action["cluster"]] == list(proven or shared)
        return
    named = {c["name"]: c["weight"] for c in action["weighted_clusters"]["clusters"]}
    assert named == (proven or shared)


@given(versions)
def test_every_cluster_that_a_route_names_is_there(drawn: tuple[VersionRoute, ...]) -> None:
    told = made(ModelRoute("m", drawn), ModelRoute("n", drawn))
    text = json.dumps(told.routes)
    named = set(re.findall(r'"(?:cluster|name)": "([mn]_v\d-[0-9a-f]{8})"', text))
    assert named <= told.clusters.keys()
    assert told.clusters.keys() == told.endpoints.keys()


def test_nothing_but_the_listener_knows_secrets() -> None:
    listener = Listener(
        "0.0.0.0", 8080, certificate_pem="C", key_pem="-pem-", keys=(Key("alice", "-secret-"),)
    )
    told = made(ModelRoute("m", (version("v", 100, True),)), listener=listener)
    everything_else = json.dumps([told.clusters, told.endpoints, told.routes])
    everything_else += json.dumps(bootstrap(PATHS, max_connections=10))
    for secret in ("-secret-", "-pem-"):
        assert secret in json.dumps(told.listeners)
        assert secret not in everything_else


def test_the_same_table_gives_the_same_resources() -> None:
    table = RoutingTable(Listener("h", 1), (ModelRoute("m", (version("v", 100, True),)),))
    assert resources(table, PATHS) == resources(table, PATHS)
