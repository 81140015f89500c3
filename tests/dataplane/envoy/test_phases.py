"""What is published is published in an order in which no request can meet a gap."""

from __future__ import annotations

from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st

from preheat.core.paths import Paths
from preheat.dataplane.envoy.parts import Json
from preheat.dataplane.envoy.publish import Step, files, phases
from preheat.dataplane.envoy.resources import Resources, resources
from preheat.dataplane.envoy.routing import (
    Endpoint,
    Listener,
    ModelRoute,
    RoutingTable,
    VersionRoute,
)

PATHS = Paths(Path("/r"), Path("/s"), Path("/c"))

endpoints = st.dictionaries(st.integers(0, 3), st.booleans()).map(
    lambda drawn: tuple(
        Endpoint(f"m-0@{n}", Path(f"/e/{n}"), Path(f"/h/{n}"), serving=serving)
        for n, serving in drawn.items()
    )
)
a_version = st.tuples(st.integers(0, 100), endpoints, st.integers(1, 2))
models = st.dictionaries(
    st.sampled_from(["m", "n"]), st.dictionaries(st.sampled_from(["v", "w"]), a_version)
).map(
    lambda drawn: tuple(
        ModelRoute(name, tuple(VersionRoute(v, *given) for v, given in versions.items()))
        for name, versions in drawn.items()
    )
)
tables = st.builds(RoutingTable, st.builds(Listener, st.just("h"), st.integers(1, 2)), models)


class Envoy:
    """What Envoy has been told so far, by file."""

    def __init__(self, told: Resources) -> None:
        self.files = {step.file: step.resources for step in files(told)}

    def take(self, phase: tuple[Step, ...]) -> None:
        self.files |= {step.file: step.resources for step in phase}

    @property
    def clusters(self) -> set[str]:
        return {str(value["name"]) for value in self.files["cds"]}

    def starts(self, cluster: str, *, serving: bool) -> set[str]:
        (assignment,) = self.files[f"eds-{cluster}"]
        known = [m for place in assignment["endpoints"] for m in place["lb_endpoints"]]
        lb = [host["metadata"]["filter_metadata"]["envoy.lb"] for host in known]
        return {m["start"] for m in lb if m["serving"] == "yes" or not serving}

    def destinations(self, name: str) -> list[tuple[str, Json]]:
        """Clusters and subsets to which routes lead."""
        (routes,) = self.files[f"rds-{name}"]
        found = []
        for route in routes["virtual_hosts"][0]["routes"]:
            action = route.get("route", {})
            weighted = action.get("weighted_clusters", {}).get("clusters", [])
            for target in ([action] if "metadata_match" in action else []) + weighted:
                match = target["metadata_match"]["filter_metadata"]["envoy.lb"]
                found.append((target.get("cluster") or target["name"], match))
        return found


def served(told: Resources) -> dict[str, set[str]]:
    envoy = Envoy(told)
    return {name: envoy.starts(name, serving=True) for name in told.clusters}


@given(tables, tables)
def test_every_phase_leaves_routes_that_lead_somewhere(
    before: RoutingTable, after: RoutingTable
) -> None:
    old, new = resources(before, PATHS), resources(after, PATHS)
    envoy = Envoy(old)
    for phase in phases(new, old):
        if old.clusters:
            check(envoy, phase, old, new)
        envoy.take(phase)
        assert {cluster for cluster, _ in envoy.destinations("public")} <= envoy.clusters
        for cluster, match in envoy.destinations("probe"):
            assert match["start"] in envoy.starts(cluster, serving=False)
    reached = {name: value for name, value in envoy.files.items() if name in Envoy(new).files}
    assert reached == Envoy(new).files


def check(envoy: Envoy, phase: tuple[Step, ...], old: Resources, new: Resources) -> None:
    """No start serves that neither table serves, none goes while old routes still stand, and all
    that the new ones lead to are there when these come."""
    routes_were_new = envoy.files["rds-public"] == Envoy(new).files["rds-public"]
    after = Envoy(old)
    after.files = dict(envoy.files)
    after.take(phase)
    for cluster in after.clusters:
        serving = after.starts(cluster, serving=True)
        known = served(old).get(cluster, set()) | served(new).get(cluster, set())
        assert serving <= known
        if not routes_were_new:
            assert serving >= served(old).get(cluster, set())
    if not routes_were_new and after.files["rds-public"] == Envoy(new).files["rds-public"]:
        for cluster, starts in served(new).items():
            assert starts <= after.starts(cluster, serving=True)


@given(tables)
def test_what_is_in_force_already_needs_nothing(table: RoutingTable) -> None:
    told = resources(table, PATHS)
    if told.clusters or told.listeners:
        assert phases(told, told) == []


@given(tables, st.data())
def test_a_doubtful_file_is_written_again(table: RoutingTable, data: st.DataObject) -> None:
    told = resources(table, PATHS)
    names = sorted(step.file for step in files(told))
    doubtful = set(data.draw(st.lists(st.sampled_from(names))))
    plan = phases(told, told, doubtful=doubtful)
    assert sorted(step.file for phase in plan for step in phase) == sorted(doubtful)


def test_a_fresh_envoy_is_told_everything_at_once() -> None:
    table = RoutingTable(Listener("h", 1), (ModelRoute("m", ()),))
    told = resources(table, PATHS)
    assert phases(told, Resources()) == [tuple(files(told))]
