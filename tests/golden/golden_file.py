"""The command line of the scripts that make one golden file of JSON each."""

import argparse
import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any


def main(file: Path, cases: Iterable[Mapping[str, Any]]) -> int:
    """Write or check a golden file; return the exit code."""
    parser = argparse.ArgumentParser(description=f"Make the golden file {file.name}.")
    parser.add_argument("--check", action="store_true", help="compare with the file on disk only")
    text = "[\n" + ",\n".join(map(json.dumps, cases)) + "\n]\n"
    if not parser.parse_args().check:
        file.write_text(text)
    elif text != file.read_text():
        print(f"{file.name}: not what make_{file.stem}.py makes")
        return 1
    return 0
