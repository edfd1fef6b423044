"""`bagua compare`: where the tensors of ranks begin to differ, from the files of a `DivergenceRecorder`.

Name the first step at which tensors differ between ranks, the ranks that differ from the majority, the tensor,
and its first element that differs. The folder is that of a DivergenceRecorder.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from ..divergence import compare_folder

SUMMARY = "name the first step, tensor and element that differ between ranks"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `compare`."""
    parser.add_argument("folder", type=Path, help="the folder with the files of all ranks")
    parser.add_argument("--json", action="store_true", help="as JSON")


def run(options: argparse.Namespace) -> int:
    """Print the report. The exit code is 1 if ranks differ, else 0."""
    found = compare_folder(options.folder)
    print(json.dumps(found.as_dict(), indent=2) if options.json else found)
    return 0 if found.step is None else 1
