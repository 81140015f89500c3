"""The command ``preheat``: finds the subcommand's module, parses, calls, and gives the exit code.

Only the chosen subcommand's module is imported, since ``preheat serve`` counts milliseconds. Each
such module has ``register(subparsers)``, which adds its parser and sets ``func(args) -> int``.
What does not belong here: any option of a subcommand, any work.
"""

from __future__ import annotations

import argparse
import os
import sys
from importlib import import_module

from preheat import __version__
from preheat.core.errors import PreheatError, SpecError

TYPE_CHECKING = False  # what type checkers take for true; importing typing for it costs 2 ms
if TYPE_CHECKING:
    from collections.abc import Sequence

COMMANDS = {
    "serve": ("preheat.cli.serve", "bring models up and serve them"),
    "status": ("preheat.cli.status", "say what runs, how hot it is and what is missing"),
    "models": ("preheat.cli.models", "list the models; heat or trust one"),
    "coldstart": ("preheat.cli.coldstart", "show where the time of a start went"),
    "doctor": ("preheat.cli.doctor", "check this machine and say what to change"),
}
"""Subcommand → (module, help in one line)."""

EXIT_INTERRUPTED = 130
EXIT_BROKEN_PIPE = 141

EXAMPLES = """\
examples:
  preheat serve                      the embedded default model on 127.0.0.1:8080
  preheat serve model.gguf           a model of your own
  preheat serve preheat.yaml         what a spec says
  preheat status --watch             what is running, as it changes
  preheat coldstart show             the last start as a waterfall
  preheat doctor                     is this machine fit for it?

`preheat COMMAND --help` tells more about each command.
"""


def _command_of(argv: Sequence[str]) -> str | None:
    """The subcommand: the first argument that is no option. ``preheat`` itself has only flags."""
    return next((argument for argument in argv if not argument.startswith("-")), None)


def build_parser(chosen: str | None) -> argparse.ArgumentParser:
    """The parser, with the options of the ``chosen`` subcommand and the names of the others."""
    parser = argparse.ArgumentParser(
        prog="preheat",
        description="LLM serving in which no request ever meets a cold replica.",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"preheat {__version__}")
    subparsers = parser.add_subparsers(metavar="COMMAND", dest="command")
    for name, (module, help_line) in COMMANDS.items():
        if name == chosen:
            import_module(module).register(subparsers)
        else:
            subparsers.add_parser(name, help=help_line)
    return parser


def _unknown(command: str) -> SpecError:
    from difflib import get_close_matches

    near = get_close_matches(command, COMMANDS, n=1)
    advice = f"did you mean `preheat {near[0]}`?" if near else f"there are: {', '.join(COMMANDS)}"
    return SpecError(f"there is no command {command!r}", advice=advice)


def _run(argv: Sequence[str]) -> int:
    command = _command_of(argv)
    if command is not None and command not in COMMANDS:
        raise _unknown(command)
    parser = build_parser(command)
    args = parser.parse_args(argv)
    if command is None:
        parser.print_help(sys.stderr)
        return SpecError.exit_code
    code: int = args.func(args)
    # A reader that has gone is noticed here, not in the interpreter's last breath.
    sys.stdout.flush()
    return code


def main(argv: Sequence[str] | None = None) -> int:
    """Run one subcommand. Returns the exit code of the process (see ``preheat.core.errors``)."""
    try:
        return _run(sys.argv[1:] if argv is None else argv)
    except PreheatError as error:
        print(f"preheat: {error}", file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED
    except BrokenPipeError:
        # What is still buffered has no reader; without this, exit would complain about it.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return EXIT_BROKEN_PIPE
