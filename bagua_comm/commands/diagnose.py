"""`bagua diagnose`: the cause of a failed call, from the flight records of all ranks.

Explain why a call failed or hung: which rank skipped a call, made another one, died, left, or was late. Each rank
writes its last calls to a folder, which the error message names; BAGUA_FLIGHT_FOLDER sets it.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from pathlib import Path

from ..flight import FlightError, diagnose, read_folder
from ..flight.pytorch import write_dumps
from ..flight.recorder import JOBS, default_folder
from ..launch.cli import CommandError

SUMMARY = "explain why a call failed or hung, from the records of all ranks"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `diagnose`."""
    parser.add_argument(
        "folder",
        type=Path,
        nargs="?",
        help="the folder of the ranks' files, or its parent, of which the latest job is read; by default that of "
        "BAGUA_FLIGHT_FOLDER, or the default folder",
    )
    parser.add_argument("--json", action="store_true", help="as JSON")
    parser.add_argument(
        "--stacks", action="store_true", help="also print the Python stacks of all threads of each rank"
    )
    parser.add_argument(
        "--torch",
        type=Path,
        metavar="FOLDER",
        help="also write the records there in the format of PyTorch's flight recorder, for torchfrtrace",
    )


def run(options: argparse.Namespace) -> int:
    """Print the diagnosis. The exit code is 1 if there are findings, else 0."""
    folder = options.folder or os.environ.get("BAGUA_FLIGHT_FOLDER") or default_folder()
    if folder is None:
        raise CommandError("there is no default folder here; give the folder that the error message names")
    try:
        records = read_folder(Path(folder))
    except FlightError as exc:
        is_gone = not Path(folder).exists()
        advice = f". The default folder keeps the latest {JOBS} jobs; connect(record=FOLDER) keeps all"
        raise CommandError(f"{exc}{advice if is_gone else ''}") from exc
    if options.folder is None:
        print(f"the latest job in {folder}: {records[0].job or 'without a name'}", file=sys.stderr)
    if options.torch is not None:
        try:
            write_dumps(records, options.torch)
        except OSError as exc:
            raise CommandError(f"--torch {options.torch}: {exc.strerror or exc}") from exc
    diagnosis = diagnose(records)
    text = diagnosis.with_stacks() if options.stacks else str(diagnosis)
    print(json.dumps(diagnosis.as_dict(), indent=2) if options.json else text)
    return 1 if diagnosis.findings else 0
