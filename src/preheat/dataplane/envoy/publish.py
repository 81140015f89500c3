"""Publishes resources to Envoy through files and waits until Envoy has acknowledged them.

Files swapped by rename are not atomic across kinds, so they are written in phases: new clusters and
endpoints before the routes that use them, routes before anything is taken away. "Published" means
that Envoy's statistics name the version; a rejected update raises, and its files are put back.
What does not belong here: what the resources say (``resources.py``).
"""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from preheat.core import localhttp
from preheat.core.errors import GatewayError
from preheat.core.paths import Paths
from preheat.dataplane.envoy.clusters import widened
from preheat.dataplane.envoy.parts import Json
from preheat.dataplane.envoy.resources import Resources

POLL_S = 0.001
POLL_MAX_S = 0.016
# Envoy logs why it refused just after it counted that it did.
REASON_WAIT_S = 0.5
_STATS = (
    "/stats?format=json&filter=(version_text|update_rejected|warming_clusters|listeners_warming)$"
)
# New versions are acknowledged before what is in them has been built.
_WARMING = ("cluster_manager.warming_clusters", "listener_manager.total_listeners_warming")
_REFUSED = (
    "the previous configuration stays in force; if it is not about the listener's address or "
    "certificate, this is a defect of preheat, or Envoy is not of version 1.40"
)
REASON_MAX_CHARACTERS = 1000


@dataclass(frozen=True, slots=True)
class Step:
    """One file: its name without ``.json``, its resources, and Envoy's statistics for it."""

    file: str
    resources: tuple[Json, ...]
    statistic: str = field(compare=False, default="")


def _clusters(clusters: dict[str, Json]) -> Step:
    return Step("cds", tuple(clusters.values()), "cluster_manager.cds")


def _listeners(listeners: dict[str, Json]) -> Step:
    return Step("lds", tuple(listeners.values()), "listener_manager.lds")


def _endpoints(name: str, assignment: Json) -> Step:
    return Step(f"eds-{name}", (assignment,), f"cluster.{name}")


def _routes(name: str, routes: Json) -> Step:
    return Step(f"rds-{name}", (routes,), f"http.{name}.rds.{name}")


def files(resources: Resources) -> list[Step]:
    """All files of ``resources``, each after those that it refers to. Pure."""
    return [
        *(_endpoints(name, value) for name, value in resources.endpoints.items()),
        *(_routes(name, value) for name, value in resources.routes.items()),
        _clusters(resources.clusters),
        _listeners(resources.listeners),
    ]


def phases(
    new: Resources, old: Resources, *, doubtful: Iterable[str] = ()
) -> list[tuple[Step, ...]]:
    """What to write to get from ``old`` to ``new``. Pure.

    Each phase is to be acknowledged before the next. ``doubtful`` names files that are to be
    written even if they would not change.
    """
    if not (old.clusters or old.listeners):
        return [tuple(files(new))]
    wide = {
        name: widened(value, old.endpoints[name]) if name in old.endpoints else value
        for name, value in new.endpoints.items()
    }
    wanted = [
        [*(_endpoints(*item) for item in wide.items()), _clusters(old.clusters | new.clusters)],
        [_routes(*item) for item in new.routes.items()],
        [_listeners(new.listeners)],
        [*(_endpoints(*item) for item in new.endpoints.items()), _clusters(new.clusters)],
    ]
    held = {step.file: step for step in files(old)}
    pending = set(doubtful)
    plan = []
    for phase in wanted:
        steps = tuple(s for s in phase if s.file in pending or held.get(s.file) != s)
        held |= {step.file: step for step in steps}
        pending -= {step.file for step in steps}
        if steps:
            plan.append(steps)
    return plan


def write_initial(paths: Paths) -> None:
    """The files that must exist before Envoy starts."""
    for name in ("cds", "lds"):
        _swap(paths.xds / f"{name}.json", (), version="0")


def _swap(path: Path, resources: tuple[Json, ...], *, version: str) -> None:
    # Only a rename makes Envoy look; keys and certificates stand inside, hence the mode.
    temporary = path.with_suffix(".tmp")
    temporary.unlink(missing_ok=True)
    with os.fdopen(os.open(temporary, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600), "w") as file:
        json.dump({"version_info": version, "resources": resources}, file)
    temporary.rename(path)


class _Files:
    """Envoy's files as they are on disk: who writes them knows what is in them."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._token = os.urandom(4).hex()
        self._number = 0
        self._held: dict[str, tuple[Json, ...]] = {
            path.stem: read for path in directory.glob("*.json") if (read := _read(path))
        }
        self.doubtful = set(self._held)
        """Files of which is not known whether Envoy has taken them."""

    def resources(self) -> Resources:
        return Resources(
            clusters={value["name"]: value for value in self._held.get("cds", ())},
            endpoints={v["cluster_name"]: v for v in self._all("eds-")},
            routes={v["name"]: v for v in self._all("rds-")},
            listeners={value["name"]: value for value in self._held.get("lds", ())},
        )

    def _all(self, prefix: str) -> list[Json]:
        return [v for name, held in self._held.items() if name.startswith(prefix) for v in held]

    def write(self, step: Step) -> str:
        """The version that Envoy will name; no other write ever has it."""
        self._number += 1
        version = f"{self._token}-{self._number}"
        self.doubtful.add(step.file)
        self._held[step.file] = step.resources
        _swap(self._directory / f"{step.file}.json", step.resources, version=version)
        return version

    def put_back(self, steps: Iterable[Step], old: Resources) -> None:
        """In place of ``steps`` what ``old`` said."""
        before = {step.file: step for step in files(old)}
        for step in steps:
            if step.file in before:
                self.write(before[step.file])
            else:
                self.remove(step.file)

    def remove(self, name: str) -> None:
        for suffix in (".json", ".tmp"):
            (self._directory / f"{name}{suffix}").unlink(missing_ok=True)
        self._held.pop(name, None)
        self.doubtful.discard(name)

    def remove_all_but(self, wanted: Resources) -> None:
        names = {path.stem for path in self._directory.iterdir()}
        for name in names - {step.file for step in files(wanted)}:
            self.remove(name)


def _read(path: Path) -> tuple[Json, ...]:
    """Resources of a file that an earlier control plane wrote; nothing if it is broken."""
    try:
        return tuple(json.loads(path.read_bytes())["resources"])
    except (ValueError, KeyError, TypeError):
        return ()


class Publisher:
    """The only writer of Envoy's files. ``publish`` calls are taken one after the other.

    Where an earlier publisher has left files, changes are made in order from what they say.
    ``log_tail`` gives the last lines that Envoy logged; the reason of a rejection is taken from it.
    """

    def __init__(
        self, paths: Paths, *, log_tail: Callable[[], str] = str, timeout_s: float = 20.0
    ) -> None:
        self._admin_socket = paths.envoy_admin_socket
        self._log_tail = log_tail
        self._timeout_s = timeout_s
        self._files = _Files(paths.xds)
        self._published: Resources | None = None
        self._lock = asyncio.Lock()

    @property
    def published(self) -> Resources | None:
        """What Envoy acknowledged last; None after ``forget``."""
        return self._published

    def forget(self) -> None:
        """Envoy is a new process: everything must be acknowledged again."""
        self._published = None
        self._files.doubtful |= {step.file for step in files(self._files.resources())}

    async def publish(self, new: Resources) -> None:
        """Returns when Envoy has acknowledged ``new``. An Envoy that is starting is waited for.

        Raises GatewayError when Envoy rejects it or does not answer within the timeout. After that,
        or when cancelled, the next call begins from whatever this one has reached.
        """
        async with self._lock:
            if self._published == new and not self._files.doubtful:
                return
            admin = _Admin(self._admin_socket)
            try:
                async with asyncio.timeout(self._timeout_s):
                    await self._publish(new, admin)
            except TimeoutError:
                raise GatewayError(
                    f"Envoy did not take its configuration within {self._timeout_s:g} s: "
                    f"{admin.waiting_for}",
                    advice="see Envoy's log; a gateway without processor time answers late too",
                ) from None
            finally:
                await admin.close()
            self._files.remove_all_but(new)
            self._published = new

    async def _publish(self, new: Resources, admin: _Admin) -> None:
        old = self._files.resources()
        before = await admin.statistics()
        if before is None:
            # Envoy is not up yet and has nothing to break: it will read all files at once.
            old, before = Resources(), {}
        for phase in phases(new, old, doubtful=self._files.doubtful):
            await self._take(phase, before, admin)

    async def _take(
        self, phase: tuple[Step, ...], before: dict[str, object], admin: _Admin
    ) -> None:
        held = self._files.resources()
        logged = self._log_tail()
        wanted = {f"{s.statistic}.version_text": self._files.write(s) for s in phase}
        pause_s = POLL_S
        while True:
            values = await admin.statistics()
            if values is not None:
                if rejected := [step for step in phase if _newly_rejected(step, values, before)]:
                    self._files.put_back(phase, held)
                    raise await self._refusal(rejected, logged)
                admin.waiting_for = _missing(wanted, values)
                if not admin.waiting_for:
                    break
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, POLL_MAX_S)
        self._files.doubtful -= {step.file for step in phase}

    async def _refusal(self, rejected: list[Step], logged: str) -> GatewayError:
        reason = ""
        for _ in range(round(REASON_WAIT_S / POLL_MAX_S)):
            if reason := _reason(self._log_tail(), logged):
                break
            await asyncio.sleep(POLL_MAX_S)
        for secret in _secrets([step.resources for step in rejected]):
            reason = reason.replace(secret, "***")
        names = ", ".join(step.file for step in rejected)
        return GatewayError(
            f"Envoy refused the configuration of {names}: {reason or 'no reason was logged'}",
            advice=_REFUSED,
        )


def _reason(log: str, before: str) -> str:
    """What Envoy gave as reasons in the lines that were not there before."""
    known = set(before.splitlines())
    lines = [line for line in log.splitlines() if line not in known]
    reasons = [after for line in lines if (after := line.partition("update rejected: ")[2])]
    return "\n".join(reasons or lines)[:REASON_MAX_CHARACTERS].strip()


def _secrets(value: Any) -> list[str]:
    """API keys in resources; Envoy names them when they are the reason."""
    if isinstance(value, list | tuple):
        return [secret for item in value for secret in _secrets(item)]
    if not isinstance(value, dict):
        return []
    own = [str(item["key"]) for item in value.get("credentials", ())]
    return own + [secret for item in value.values() for secret in _secrets(item)]


def _newly_rejected(step: Step, values: dict[str, object], before: dict[str, object]) -> bool:
    # Counters begin again at 0 with a new Envoy and with a cluster of an old name.
    name = f"{step.statistic}.update_rejected"
    return values.get(name, 0) not in (0, before.get(name, 0))


def _missing(wanted: dict[str, str], values: dict[str, object]) -> str:
    """In words, what Envoy has not done yet; empty when all is done."""
    names = [name for name, version in wanted.items() if values.get(name) != version]
    names += [name for name in _WARMING if values.get(name, 0) != 0]
    return ", ".join(names)


class _Admin:
    """Envoy's admin interface on its Unix socket; connects again when Envoy was started again."""

    def __init__(self, socket: Path) -> None:
        self._socket = socket
        self._connection: localhttp.Connection | None = None
        self.waiting_for = f"nobody answers at {socket}"

    async def close(self) -> None:
        if self._connection is not None:
            await self._connection.close()
            self._connection = None

    async def statistics(self) -> dict[str, object] | None:
        """None while Envoy does not answer."""
        try:
            if self._connection is None:
                self._connection = await localhttp.connect(self._socket)
            answer = await self._connection.request("GET", _STATS)
            items = answer.json()["stats"]
        except (OSError, ValueError, KeyError):
            await self.close()
            return None
        return {item["name"]: item["value"] for item in items if "name" in item}
