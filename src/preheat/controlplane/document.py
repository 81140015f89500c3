"""The reference page of the control plane's tables: the gate of preloads, and what failures mean.

``python -m preheat.controlplane.document`` writes it; with ``--check`` it only says, by its exit
code, whether it is true. A tool for development: nothing that serves imports it.
What does not belong here: what the tables say (``preload.py``, ``failures.py``).
"""

from __future__ import annotations

import sys
from pathlib import Path

from preheat.controlplane import failures, fleet, preload
from preheat.replica.document import REFERENCE, main

PAGE = """\
# Starting: the preload gate, and what failures lead to

<!-- Written by `python -m preheat.controlplane.document`; edit src/preheat/controlplane/preload.py
and failures.py. -->

## When a preload may start

A replica that has never been ready starts when this table says *trigger*. It is asked again as
long as it says *wait* or *refuse*, until the preload's `deadline_s` has passed since it was first
wanted: at the deadline a start may still begin, after it never (`preheat models heat NAME` asks
anew). What keeps a preload from starting stands in `/ready`. A replica that has served and ended
comes back without being asked. Taking traffic is another gate: [the life of a
replica](lifecycle.md).

{gate}
Dependencies are healthy when each of `critical_dependencies` answers a GET with 2xx within its
`timeout_s`; one that has not been asked yet is not. They are asked once a second while a preload
waits for them. A window that ends before it begins runs over midnight; its edges belong to it.

## What follows a failure

A failure that another attempt could mend is followed by one after {first:g} s, then after twice
as long each time, at most {longest:g} s; at once, if the start had been ready for {sound:g} s. A
replica that never was ready is given up after {attempts} failures in a row. When nothing serves and
nothing else is on its way, `preheat serve` ends with the exit code below.

{consequences}"""


def page() -> str:
    rows = [
        f"| {kind} | {'no' if consequence.hopeless else 'yes'} | {consequence.error.exit_code} |"
        for kind, consequence in failures.TABLE.items()
    ]
    header = ["| failure | another attempt can help | exit code |", "|---|---|---|"]
    return PAGE.format(
        gate=preload.markdown(),
        consequences="\n".join([*header, *rows]) + "\n",
        first=fleet.FIRST_BACKOFF_S,
        longest=fleet.LONGEST_BACKOFF_S,
        sound=fleet.SOUND_S,
        attempts=fleet.ATTEMPTS_BEFORE_GIVING_UP,
    )


def outputs() -> dict[Path, str]:
    """What is committed: each file and its true content."""
    return {REFERENCE / "starting.md": page()}


if __name__ == "__main__":
    sys.exit(main(outputs(), module="preheat.controlplane.document"))
