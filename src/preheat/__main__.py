"""``python -m preheat``: the same as the command ``preheat``."""

from __future__ import annotations

import sys

from preheat.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
