# PYTHON_ARGCOMPLETE_OK
"""The command line: `bagua`, or `python -m bagua_comm`. Its commands are the modules of `commands`."""

from __future__ import annotations

import argparse
import difflib
import os
import sys
from collections.abc import Sequence
from typing import Any, NoReturn

from ._version import __version__
from .commands import advise, completion, diagnose, doctor, info, net, run
from .errors import ArrayError
from .launch.cli import CommandError, program_name

DESCRIPTION = "Start programs on several ranks, look at machines, and predict what trains fastest."

COMMANDS: dict[str, Any] = {
    "run": run,
    "doctor": doctor,
    "info": info,
    "diagnose": diagnose,
    "advise": advise,
    "net": net,
    "completion": completion,
}
"""Each has SUMMARY, DESCRIPTION, add_arguments(parser) and run(options)."""

SIGPIPE_EXIT_CODE = 141
"""What a shell shows for a program that a closed pipe has ended."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command; returns the exit code."""
    parser = make_parser()
    completion.complete(parser)
    options, unknown = parser.parse_known_args(argv)
    if unknown:
        refuse(unknown, options.parser)
    try:
        code: int = COMMANDS[options.command].run(options)
        sys.stdout.flush()
    except (CommandError, ArrayError) as exc:
        print(f"{parser.prog} {options.command}: {exc}", file=sys.stderr)
        return getattr(exc, "exit_code", 2)
    except BrokenPipeError:
        # Whoever read the output has had enough (`| head`). Python would try to write the rest at its end.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return SIGPIPE_EXIT_CODE
    return code


def make_parser() -> argparse.ArgumentParser:
    """The parser of all commands."""
    parser = argparse.ArgumentParser(prog=program_name(), description=DESCRIPTION)
    parser.add_argument("--version", action="version", version=f"bagua_comm {__version__}")
    commands = parser.add_subparsers(dest="command", required=True)
    for name, command in COMMANDS.items():
        its_own = commands.add_parser(
            name, help=command.SUMMARY, description=command.DESCRIPTION, allow_abbrev=False
        )
        its_own.set_defaults(parser=its_own)
        command.add_arguments(its_own)
    return parser


def refuse(unknown: Sequence[str], parser: argparse.ArgumentParser) -> NoReturn:
    """End with what a command's parser does not know, and what was perhaps meant."""
    meant = difflib.get_close_matches(unknown[0].partition("=")[0], parser._option_string_actions, n=1)
    advice = f"; did you mean {meant[0]}?" if meant else ""
    parser.error(f"unrecognized arguments: {' '.join(unknown)}{advice}")


if __name__ == "__main__":
    sys.exit(main())
