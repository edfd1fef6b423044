"""A record that grows line by line, so that a process that is killed leaves everything it had found.

Each line is JSON, {"at": [key, ...], "value": ...}: the value belongs at this place. Read in order, the lines
make the record.
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any


def append(path: Path, at: Sequence[str], value: object) -> None:
    """Add a line in one write, so that lines of several processes do not mix."""
    line = "\n" + json.dumps({"at": list(at), "value": value}) + "\n"  # after half a line, if there is one
    descriptor = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
    try:
        os.write(descriptor, line.encode())
    finally:
        os.close(descriptor)


def read(path: Path) -> dict[str, Any]:
    """The record that the lines make. A line that was only partly written is left out.

    >>> import tempfile
    >>> path = Path(tempfile.mkdtemp()) / "lines"
    >>> append(path, ["a"], {"b": 1})
    >>> append(path, ["a", "c"], 2)
    >>> read(path)
    {'a': {'b': 1, 'c': 2}}
    """
    record: dict[str, Any] = {}
    for line in path.read_text(errors="replace").splitlines():
        try:
            entry = json.loads(line)
        except json.JSONDecodeError:
            continue
        place = record
        *outer, last = entry["at"]
        for key in outer:
            place = place.setdefault(key, {})
        place[last] = entry["value"]
    return record
