"""Shared by all commands: their error, the types of their arguments, and helpers for output."""

from __future__ import annotations

import argparse
import importlib
import os
import re
import sys
from contextlib import suppress
from pathlib import Path


class CommandError(Exception):
    """A command cannot be carried out; the message gives the reason and the remedy."""

    def __init__(self, message: str, exit_code: int = 2) -> None:
        super().__init__(message)
        self.exit_code = exit_code


CPUS = Path("/sys/devices/system/cpu")
"""The folder where Linux describes each core."""


def program_name() -> str:
    """Return the name of the command line: "bagua", or "python -m bagua_comm"."""
    return "bagua" if Path(sys.argv[0]).stem == "bagua" else "python -m bagua_comm"


def complete(parser: argparse.ArgumentParser) -> None:
    """Complete the arguments and exit, if a shell requests it and argcomplete is installed."""
    if "_ARGCOMPLETE" in os.environ:
        with suppress(ImportError):
            importlib.import_module("argcomplete").autocomplete(parser)


def cores() -> list[int]:
    """Return the cores that this process may use; Linux counts each hardware thread as one."""
    if hasattr(os, "sched_getaffinity"):
        return sorted(os.sched_getaffinity(0))
    return list(range(os.cpu_count() or 1))


def physical_cores() -> int:
    """Return the number of physical cores that this process may use.

    The hardware threads of a core count once; if Linux does not describe them, each counts.
    """
    found = set()
    for core in cores():
        try:
            found.add((CPUS / f"cpu{core}" / "topology" / "thread_siblings_list").read_text().strip())
        except OSError:
            found.add(str(core))
    return len(found)


def positive(text: str) -> int:
    """Parse a whole number from 1 on, as "4"."""
    if not re.fullmatch("0*[1-9][0-9]{0,8}", text):
        raise argparse.ArgumentTypeError(f"{text[:40]!r} is not a positive number; expected e.g. 4")
    return int(text)


def natural(text: str) -> int:
    """Parse a whole number from 0 on, as "2"."""
    if not re.fullmatch("0*[0-9]{1,9}", text):
        raise argparse.ArgumentTypeError(f"{text[:40]!r} is not a number from 0 on; expected e.g. 2")
    return int(text)


def count(number: int, noun: str) -> str:
    """Return a number with a noun: "1 rank", "2 ranks"."""
    return f"{number} {noun}{'s' * (number != 1)}"


def parse_variable(text: str) -> tuple[str, str | None]:
    """Parse "NAME=VALUE" into the name and the value of an environment variable; the value of "NAME" is None.

    Raises:
        CommandError: The name is invalid.
    """
    name, equals, value = text.partition("=")
    if not re.fullmatch("[A-Za-z_][A-Za-z0-9_]*", name):
        raise CommandError(f"--env {text}: {name!r} is not the name of a variable; expected NAME or NAME=VALUE")
    return name, value if equals else None
