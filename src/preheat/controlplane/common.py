"""What the parts of the running control plane share.

What does not belong here: anything that only one of them uses.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

from preheat.controlplane.drivers.link import SupervisorLink
from preheat.controlplane.drivers.local import LocalDriver
from preheat.controlplane.fleet import Fleet
from preheat.controlplane.notices import Notices
from preheat.controlplane.tasks import Tasks
from preheat.core.paths import Paths


@dataclass(frozen=True, slots=True)
class Common:
    paths: Paths
    fleet: Fleet
    driver: LocalDriver
    link: SupervisorLink
    notices: Notices
    tasks: Tasks
    changed: asyncio.Event
    """Set by whoever told the fleet something."""
