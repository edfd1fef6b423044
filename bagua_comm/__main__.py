# PYTHON_ARGCOMPLETE_OK
"""The command line: `bagua`, or `python -m bagua_comm`. Its commands are the modules of `commands`."""

from __future__ import annotations

import argparse
import difflib
import os
import re
import sys
from collections.abc import Sequence
from types import ModuleType
from typing import NoReturn

from ._version import __version__
from .commands import advise, compare, diagnose, doctor, info, net, run, top, trace
from .errors import BaguaError
from .launch.cli import CommandError, complete, program_name

DESCRIPTION = "Start programs on several ranks, look at machines, and predict what trains fastest."

COMMANDS: dict[str, ModuleType] = {
    "run": run,
    "doctor": doctor,
    "info": info,
    "top": top,
    "diagnose": diagnose,
    "compare": compare,
    "trace": trace,
    "advise": advise,
    "net": net,
}
"""The module of each command, with SUMMARY, add_arguments(parser) and run(options).

The second paragraph of its docstring describes it to users; without one, SUMMARY does.
"""

SIGPIPE_EXIT_CODE = 141
"""The exit code of a shell for a program that a closed pipe has ended."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command; returns the exit code."""
    parser = make_parser(sys.argv[1:] if argv is None else argv)
    complete(parser)
    options, unknown = parser.parse_known_args(argv)
    if unknown:
        refuse(unknown, options.parser)
    try:
        code: int = COMMANDS[options.command].run(options)
        sys.stdout.flush()
    except (CommandError, BaguaError) as exc:
        print(f"{parser.prog} {options.command}: {exc}", file=sys.stderr)
        return getattr(exc, "exit_code", 2)
    except BrokenPipeError:
        # The reader of the output has closed it (`| head`). Python would try to write the rest at its exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return SIGPIPE_EXIT_CODE
    return code


class Parser(argparse.ArgumentParser):
    """A parser whose errors are short; its subcommands have the same class."""

    given: Sequence[str] = ()
    """The arguments of the program."""

    def error(self, message: str) -> NoReturn:
        """Exit with an error, and the command that shows the arguments, in place of a list of them."""
        if message.startswith("the following arguments are required"):
            options = (text.partition("=")[0] for text in self.given if text.startswith("--"))
            if unknown := next((each for each in options if each not in self._option_string_actions), None):
                message += f", and {unknown} is unrecognized{_advice([unknown], self)}"
        elif found := re.search(r"invalid choice: '([^']*)' \(choose from (.*)\)", message):
            similar = difflib.get_close_matches(found[1], re.findall(r"[\w.-]+", found[2]), n=1)
            message += f"; did you mean {similar[0]!r}?" if similar else ""
        self.exit(2, f"{self.prog}: error: {message}\n  for the arguments: {self.prog} --help\n")


def make_parser(given: Sequence[str] = ()) -> argparse.ArgumentParser:
    """Return the parser of all commands, or of those in `given`, where errors look for misspelled options."""
    parser = Parser(prog=program_name(), description=DESCRIPTION)
    parser.add_argument("--version", action="version", version=f"bagua_comm {__version__}")
    commands = parser.add_subparsers(dest="command", required=True)
    for name, command in COMMANDS.items():
        _, *paragraphs = (command.__doc__ or "").split("\n\n")
        description = paragraphs[0] if paragraphs else command.SUMMARY
        command_parser = commands.add_parser(
            name, help=command.SUMMARY, description=description, allow_abbrev=False
        )
        command_parser.given = given
        command_parser.set_defaults(parser=command_parser)
        if not given or name in given:
            command.add_arguments(command_parser)
    return parser


def refuse(unknown: Sequence[str], parser: argparse.ArgumentParser) -> NoReturn:
    """Exit with an error that names the unknown arguments, and a similar known one."""
    parser.error(f"unrecognized arguments: {' '.join(unknown)}{_advice(unknown, parser)}")


OF_OTHERS = {"--nproc-per-node": "-n", "--nproc_per_node": "-n", "--np": "-n", "-np": "-n", "-x": "--env"}
"""Options of torchrun and mpirun, and the corresponding ones of this library."""


def _advice(given: Sequence[str], parser: argparse.ArgumentParser) -> str:
    """A known option in place of the first unknown one among the arguments; empty without one."""
    known = parser._option_string_actions
    for option in (text.partition("=")[0] for text in given):
        if option.startswith("-") and option not in known:
            meant = [OF_OTHERS[option]] if OF_OTHERS.get(option) in known else []
            similar = meant or difflib.get_close_matches(option, known, n=1)
            return f"; did you mean {similar[0]}?" if similar else ""
    return ""


if __name__ == "__main__":
    sys.exit(main())
