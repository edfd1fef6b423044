"""`bagua net`: build, locate and test NCCL's network plugin.

NCCL's network plugin that splits messages over many TCP flows. `build` compiles it into the user's cache; `path`
prints the path of its file; `check` sends messages through it on this host, without NCCL.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
from pathlib import Path

from .. import net
from ..errors import BaguaError
from ..launch.cli import CommandError

SUMMARY = "build and test the plugin that gives NCCL many TCP flows"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `net`."""
    parser.add_argument("action", choices=["build", "path", "check"])
    parser.add_argument(
        "--folder", type=Path, metavar="FOLDER", help="the folder of the compiled plugin, in place of the cache"
    )
    parser.add_argument("--json", action="store_true", help="for check: as JSON")


def run(options: argparse.Namespace) -> int:
    """Run the action. The exit code is 0 if the plugin is there, or works."""
    try:
        library = net.path(options.folder) if options.action == "path" else net.build(options.folder)
        found = net.check(library) if options.action == "check" and library is not None else None
    except (BaguaError, OSError) as exc:
        raise CommandError(str(exc), exit_code=1) from exc
    if library is None:
        text = "the network plugin is not built here; run: python -m bagua_comm net build"
        raise CommandError(text, exit_code=1)
    if found is None:
        print(library)
    elif options.json:
        print(json.dumps(dataclasses.asdict(found), indent=2))
    else:
        print(
            f"{found.library} works: {found.messages} messages, {found.nbytes} bytes over {found.interface} "
            f"({found.speed_mbit} Mbit/s) in {found.seconds:.2f} s; all bytes arrived intact"
        )
    return 0
