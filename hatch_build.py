"""Compiles the filter that Envoy loads, when preheat is installed or a wheel of it is built.

``python hatch_build.py`` does the same for a source tree that is used without being installed.
"""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
import sysconfig
from pathlib import Path
from typing import Any

NATIVE = Path("src/preheat/dataplane/envoy/native")
FLAGS = (
    *("-std=c11", "-D_GNU_SOURCE", "-O2", "-fPIC", "-shared", "-fvisibility=hidden"),
    *("-Wall", "-Wextra", "-Wpedantic", "-fstack-protector-strong"),
)


def compile_filter(root: Path) -> Path:
    """Compiles it with ``$CC`` (or cc) and puts it beside its source; returns its path."""
    source, library = root / NATIVE / "usage.c", root / NATIVE / "libpreheat_usage.so"
    compiler = shlex.split(os.environ.get("CC", "cc"))
    # Not in place: an Envoy that runs has the old one mapped.
    made = library.with_suffix(f".{os.getpid()}.so")
    try:
        subprocess.run([*compiler, *FLAGS, "-o", str(made), str(source)], check=True)
        made.replace(library)
    except (OSError, subprocess.CalledProcessError) as error:
        made.unlink(missing_ok=True)
        sys.exit(f"preheat needs a C compiler (apt install gcc libc6-dev, or set CC): {error}")
    return library


def platform_tag() -> str:
    return "py3-none-" + sysconfig.get_platform().replace("-", "_").replace(".", "_")


if __name__ == "__main__":
    print(compile_filter(Path(__file__).resolve().parent))
else:
    from hatchling.builders.hooks.plugin.interface import BuildHookInterface

    class FilterBuildHook(BuildHookInterface[Any]):
        def initialize(self, version: str, build_data: dict[str, Any]) -> None:
            library = compile_filter(Path(self.root))
            build_data["artifacts"].append(str(library.relative_to(self.root)))
            build_data["tag"] = platform_tag()
