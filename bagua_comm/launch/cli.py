"""What commands share: their error, and the types of their arguments."""

from __future__ import annotations

import argparse
import os
import re
import sys
from pathlib import Path


class CommandError(Exception):
    """A command cannot do what it was asked; the message says why, and what to do."""

    def __init__(self, message: str, exit_code: int = 2) -> None:
        super().__init__(message)
        self.exit_code = exit_code


CPUS = Path("/sys/devices/system/cpu")
"""Where Linux tells of each core."""


def program_name() -> str:
    """The name by which the command line was called: "bagua", or "python -m bagua_comm"."""
    return "bagua" if Path(sys.argv[0]).stem == "bagua" else "python -m bagua_comm"


def cores() -> list[int]:
    """The cores that this process may use, as Linux counts them: each hardware thread is one."""
    if hasattr(os, "sched_getaffinity"):
        return sorted(os.sched_getaffinity(0))
    return list(range(os.cpu_count() or 1))


def physical_cores() -> int:
    """How many cores these are in the machine: the hardware threads of a core count once.

    Where that is not known, each counts.
    """
    found = set()
    for core in cores():
        try:
            found.add((CPUS / f"cpu{core}" / "topology" / "thread_siblings_list").read_text().strip())
        except OSError:
            found.add(str(core))
    return len(found)


def positive(text: str) -> int:
    """A whole number from 1 on, from a text such as "4"."""
    if not text.isdecimal() or not 1 <= int(text) < 10**9:
        raise argparse.ArgumentTypeError(f"{text[:40]!r} is not a positive number; expected e.g. 4")
    return int(text)


def natural(text: str) -> int:
    """A whole number from 0 on, from a text such as "2"."""
    if not text.isdecimal() or int(text) >= 10**9:
        raise argparse.ArgumentTypeError(f"{text[:40]!r} is not a number from 0 on; expected e.g. 2")
    return int(text)


def count(number: int, noun: str) -> str:
    """A number of things: "1 rank", "2 ranks"."""
    return f"{number} {noun}{'s' * (number != 1)}"


def parse_variable(text: str) -> tuple[str, str | None]:
    """Name and value of an environment variable, from "NAME=VALUE"; None for the value if there is only a name.

    Raises:
        CommandError: This is no name of a variable.
    """
    name, equals, value = text.partition("=")
    if not re.fullmatch("[A-Za-z_][A-Za-z0-9_]*", name):
        raise CommandError(f"--env {text}: {name!r} is not the name of a variable; expected NAME or NAME=VALUE")
    return name, value if equals else None
