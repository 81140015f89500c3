"""The first milliseconds of the control plane: what a start waits for, before anything heavy is
imported.

The spec is read, and agents are asked for whose weights are at hand; ``runtime.py`` goes on from
there. What does not belong here: whatever can wait until the engine is loading.
"""

from __future__ import annotations

import datetime as dt
import signal
import time
from importlib import import_module

import msgspec

from preheat import __version__
from preheat.controlplane.drivers.link import SupervisorLink
from preheat.controlplane.drivers.local import LocalDriver
from preheat.controlplane.fleet import Fleet
from preheat.controlplane.listening import listener_from
from preheat.controlplane.notices import Notices
from preheat.controlplane.replicas import Launch
from preheat.core.coldstart import Recorder
from preheat.core.paths import Paths, default_paths
from preheat.core.spec.load import resolve_target
from preheat.core.spec.schema import Spec
from preheat.core.yielding import yielding
from preheat.replica.engines.plan import usable_cores

TYPE_CHECKING = False
if TYPE_CHECKING:
    from preheat.controlplane.adoption import Adopted, Kept

GIVE_WAY_S = 0.15
GIVE_WAY_LOOK_S = 0.005
ENOUGH_CORES = 4


class Orders(msgspec.Struct, frozen=True, kw_only=True):
    """What ``preheat serve`` was told."""

    descriptor: int
    """Our end of the supervisor's socket."""
    running: tuple[str, ...] | None
    """Names of what a control plane before this one has left running; None for the first one."""
    target: str | None
    port: int | None
    log_json: bool
    insecure_listen: bool
    spawned_s: float
    """When ``preheat serve`` was spawned (CLOCK_MONOTONIC)."""


class Boot(msgspec.Struct, frozen=True):
    """What is there when the loop begins."""

    paths: Paths
    link: SupervisorLink
    fleet: Fleet
    driver: LocalDriver
    notices: Notices
    recorder: Recorder
    spawned_s: float
    to_fetch: tuple[str, ...]
    """Replicas that are to be launched at once, but whose weights must be fetched first."""
    running: tuple[str, ...] = ()
    adopted: tuple[Adopted, ...] = ()
    """Starts of the control plane before."""


def boot(orders: Orders, started_s: float) -> Boot:
    """Raises a PreheatError for whatever is wrong with the spec, before anything is started."""
    recorder = Recorder()
    recorder.add("process", orders.spawned_s, started_s)
    recorder.add("controlplane.imports", started_s, recorder.now_s())
    with recorder.phase("controlplane.spec"):
        paths = default_paths()
        left = _left_behind(orders, paths)
        spec = _spec(orders) if left is None else left.spec
        listener = (
            listener_from(spec, insecure=orders.insecure_listen) if left is None else left.listener
        )
    with recorder.phase("controlplane.launch"):
        withheld = [key.env for key in spec.api_keys if key.env is not None]
        link = SupervisorLink(orders.descriptor, withheld=withheld)
        unix_s = time.time() if left is None else left.created_unix_s
        fleet = Fleet.from_spec(spec, listener, now_s=time.monotonic(), unix_s=unix_s)
        driver = LocalDriver(paths, link, drain_timeout_s=spec.limits.drain_timeout_s)
        adopted = _adopt(orders.running, fleet, driver, link, paths)
        to_fetch = _first_launches(fleet, driver)
    recorder.add("controlplane", started_s, recorder.now_s())
    notices = Notices(paths.logs, as_json=orders.log_json)
    if orders.running is not None:
        went_on = ", ".join(one.start.start_id for one in adopted) or "no replica"
        text = f"the control plane is back; {went_on} went on meanwhile"
        notices.say(text, event="control plane back", adopted=len(adopted))
    else:
        what = orders.target or ", ".join(model.name for model in spec.models)
        notices.say(f"preheat {__version__}: bringing {what} up", event="starting")
    return Boot(
        *(paths, link, fleet, driver, notices, recorder, orders.spawned_s, to_fetch),
        *(orders.running or (), adopted),
    )


def _left_behind(orders: Orders, paths: Paths) -> Kept | None:
    """What the control plane before this one has left, if there was one."""
    if orders.running is None:
        return None
    from preheat.controlplane.adoption import kept

    return kept(paths)


def _adopt(
    running: tuple[str, ...] | None,
    fleet: Fleet,
    driver: LocalDriver,
    link: SupervisorLink,
    paths: Paths,
) -> tuple[Adopted, ...]:
    if running is None:
        return ()
    from preheat.controlplane.adoption import adopt

    adopted, surplus = adopt(running, fleet, driver, paths, now_s=time.monotonic())
    for name in surplus:
        link.kill(name, signal.SIGTERM)
    return tuple(adopted)


def import_the_rest(boot: Boot) -> None:
    """Where cores are few, agents that were launched get them first: they hash, their engines
    import, and the first token waits for that. What comes next here, Envoy's start included, takes
    as long and is needed only when an engine is up. An agent's socket appears when the worst is
    over."""
    recorder = boot.recorder
    begun_s = recorder.now_s()
    yielding(lambda: import_module("preheat.controlplane.runtime"))
    sockets = [start.agent_socket for start in boot.fleet.starts()]
    if usable_cores() < ENOUGH_CORES:
        while any(not s.exists() for s in sockets) and recorder.now_s() < begun_s + GIVE_WAY_S:
            time.sleep(GIVE_WAY_LOOK_S)
    recorder.add("controlplane.runtime", begun_s, recorder.now_s(), track="controlplane")


def _spec(orders: Orders) -> Spec:
    spec = resolve_target(orders.target)
    if orders.port is None:
        return spec
    return msgspec.structs.replace(
        spec, listen=msgspec.structs.replace(spec.listen, port=orders.port)
    )


def _first_launches(fleet: Fleet, driver: LocalDriver) -> tuple[str, ...]:
    """Launches what can be launched; returns what must be fetched first, which takes its time.

    Dependencies are not known to be healthy yet: whoever has some starts from the loop.
    """
    actions = fleet.reconcile(
        now_s=time.monotonic(),
        local_time=dt.datetime.now().astimezone().time(),
        healthy=frozenset(),
    )
    places = [fleet.replicas[a.replica] for a in actions if isinstance(a, Launch)]
    to_fetch = tuple(p.name for p in places if driver.must_fetch(p))
    # What is not there is found before anything is started.
    ready = [(p, driver.locate(p)) for p in places if p.name not in to_fetch]
    for place, located in ready:
        fleet.launched(place.name, driver.launch(place, located))
    return to_fetch
