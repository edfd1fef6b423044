"""The profile of a tuner: a file of the best settings found, by tensors, ranks and choices."""

from __future__ import annotations

import hashlib
import json
import warnings
from pathlib import Path
from typing import Any

from ...errors import ArrayError
from ...system.files import write_at_once
from .grid import Cell, Grid

_FORMAT = "bagua_comm.tuner 1"


def key_of(about: dict[str, Any]) -> str:
    """The key of an entry: a hash of what it is valid for."""
    return hashlib.blake2b(json.dumps(about, sort_keys=True).encode(), digest_size=16).hexdigest()


def _read_entries(path: Path) -> dict[str, Any]:
    """All entries of a profile, by key; none if the file does not exist yet."""
    try:
        if path.exists() and not path.is_file():
            raise ValueError("expected a file, found a folder or a device")
        content = json.loads(path.read_text())
        if content["format"] != _FORMAT:
            raise ValueError(f"its format is {content['format']!r}, expected {_FORMAT!r}")
        entries: dict[str, Any] = dict(content["entries"])
    except FileNotFoundError:
        if not path.parent.is_dir():
            raise ArrayError(
                f"Tuner: profile {str(path)!r} cannot be written: its folder does not exist; make it first"
            ) from None
        return {}
    except Exception as exc:  # e.g. RecursionError from deeply nested brackets
        raise ArrayError(
            f"Tuner: profile {str(path)!r} was not written by a Tuner: {exc!r}; give the path of another file"
        ) from exc
    return entries


def read_entry(path: Path, key: str, grid: Grid) -> Cell | None:
    """The cell of the best settings in the profile; None if it has no entry with this key."""
    entries = _read_entries(path)
    if key not in entries:
        if entries:
            warnings.warn(
                f"Tuner: profile {str(path)!r} has entries for other trainings, but not for this one; searching",
                stacklevel=2,
            )
        return None
    try:
        cell = grid.cell_of(entries[key]["best"]["bucket_bytes"], entries[key]["best"]["algorithm"])
    except (TypeError, KeyError):
        cell = None
    if cell is None:
        raise ArrayError(
            f"Tuner: profile {str(path)!r}: the best settings of entry {key} are not among the choices; delete "
            "the entry to search again"
        )
    return cell


def write_entry(path: Path, key: str, entry: dict[str, Any]) -> None:
    """Add or replace an entry; the file is replaced at once, so that readers never see half of it."""
    try:
        entries = {**_read_entries(path), key: entry}
        text = json.dumps({"format": _FORMAT, "entries": entries}, indent=1) + "\n"
        write_at_once(path, text.encode())
    except Exception as exc:  # training goes on
        warnings.warn(
            f"Tuner: profile {str(path)!r} was not written, so the next training will search again: {exc}",
            stacklevel=2,
        )
