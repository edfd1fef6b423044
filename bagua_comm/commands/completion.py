"""`bagua completion`: shell completion of the arguments of `bagua`, by argcomplete."""

from __future__ import annotations

import argparse
import importlib
import os
from typing import Any

from ..launch.cli import CommandError

SUMMARY = "print a script for shell completion"

DESCRIPTION = (
    'Print a script that completes the arguments of `bagua`. In bash and zsh: eval "$(bagua completion bash)"; '
    "in fish: bagua completion fish | source."
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `completion`."""
    parser.add_argument("shell", choices=("bash", "zsh", "fish"))


def run(options: argparse.Namespace) -> int:
    """Print the script."""
    argcomplete = _argcomplete()
    if argcomplete is None:
        raise CommandError("completion needs argcomplete: pip install argcomplete")
    print(argcomplete.shellcode(["bagua"], shell=options.shell))
    return 0


def complete(parser: argparse.ArgumentParser) -> None:
    """Complete the arguments and exit, if a shell requests it and argcomplete is installed."""
    argcomplete = _argcomplete() if "_ARGCOMPLETE" in os.environ else None
    if argcomplete is not None:
        argcomplete.autocomplete(parser)


def _argcomplete() -> Any:
    try:
        return importlib.import_module("argcomplete")
    except ImportError:
        return None
