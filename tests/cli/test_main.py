from __future__ import annotations

import argparse
import os
import subprocess
import sys
from collections.abc import Callable
from types import ModuleType

import pytest

from preheat import __version__
from preheat.cli import main as cli
from preheat.core.errors import Busy

Command = Callable[[argparse.Namespace], int]


@pytest.fixture
def status_does(monkeypatch: pytest.MonkeyPatch) -> Callable[[Command], None]:
    """Puts a function in the place of the subcommand ``status``."""

    def plant(command: Command) -> None:
        module = ModuleType("planted")

        def register(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
            subparsers.add_parser("status").set_defaults(func=command)

        module.__dict__["register"] = register
        monkeypatch.setitem(sys.modules, "planted", module)
        monkeypatch.setitem(cli.COMMANDS, "status", ("planted", "planted"))

    return plant


def fails_with(error: BaseException) -> Command:
    def command(_: argparse.Namespace) -> int:
        raise error

    return command


def test_the_code_of_the_subcommand_is_the_exit_code(
    status_does: Callable[[Command], None],
) -> None:
    status_does(lambda _: 42)
    assert cli.main(["status"]) == 42


def test_an_error_is_told_with_its_advice_and_gives_its_exit_code(
    status_does: Callable[[Command], None], capsys: pytest.CaptureFixture[str]
) -> None:
    status_does(fails_with(Busy("port 8080 is taken", advice="take another")))
    assert cli.main(["status"]) == Busy.exit_code
    out, err = capsys.readouterr()
    assert (out, err) == ("", "preheat: port 8080 is taken\n  → take another\n")


def test_ctrl_c_ends_quietly_with_130(
    status_does: Callable[[Command], None], capsys: pytest.CaptureFixture[str]
) -> None:
    status_does(fails_with(KeyboardInterrupt()))
    assert cli.main(["status"]) == 130
    assert capsys.readouterr() == ("", "")


def test_an_unknown_command_names_the_nearest(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["stauts"]) == 2
    assert "did you mean `preheat status`?" in capsys.readouterr().err
    assert cli.main(["zzz"]) == 2
    assert "serve, status, models" in capsys.readouterr().err


def test_no_command_prints_the_help_and_is_a_usage_error(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert cli.main([]) == 2
    err = capsys.readouterr().err
    assert all(f"preheat {name}" in err for name in ("serve", "status", "coldstart", "doctor"))


def run(*argv: str, code: str = "") -> subprocess.CompletedProcess[str]:
    program = ["-c", code] if code else ["-m", "preheat"]
    return subprocess.run(
        [sys.executable, *program, *argv], capture_output=True, text=True, check=False
    )


def test_the_version_is_the_packages() -> None:
    assert run("--version").stdout == f"preheat {__version__}\n"


def test_only_the_chosen_subcommand_is_imported() -> None:
    code = (
        "import sys; from preheat.cli.main import build_parser; build_parser('doctor');"
        "print([name for name in sys.modules if name.startswith('preheat.cli.')])"
    )
    done = run(code=code)
    assert "preheat.cli.doctor" in done.stdout
    assert not any(
        f"preheat.cli.{name}'" in done.stdout for name in ("serve", "status", "models", "coldstart")
    )


def test_parsing_needs_no_heavy_module() -> None:
    heavy = {"asyncio", "msgspec", "yaml", "rich", "importlib.metadata", "difflib"}
    code = "import sys, preheat.cli.main; print(*sys.modules)"
    assert heavy.isdisjoint(run(code=code).stdout.split())


def test_a_reader_that_has_gone_is_no_traceback() -> None:
    reader, writer = os.pipe()
    os.close(reader)
    with os.fdopen(writer, "wb") as broken:
        done = subprocess.run(
            [sys.executable, "-m", "preheat", "doctor", "--json"],
            stdout=broken,
            stderr=subprocess.PIPE,
            check=False,
        )
    assert (done.returncode, done.stderr) == (141, b"")
