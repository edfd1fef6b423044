"""The profile of a tuner: a file of the best settings found, and of the training that they are for."""

from __future__ import annotations

import json
import warnings
from pathlib import Path
from typing import Any

from ...errors import ArrayError
from ...system.files import write_at_once
from .grid import Cell, Grid

FORMAT = "bagua_comm.tuner 1"


def _read(path: Path) -> dict[str, Any]:
    """The content of a profile; empty if the file does not exist yet."""
    try:
        if path.exists() and not path.is_file():
            raise ValueError("expected a file, found a folder or a device")
        content: dict[str, Any] = json.loads(path.read_text())
        if content["format"] != FORMAT:
            raise ValueError(f"its format is {content['format']!r}, expected {FORMAT!r}")
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
    return content


def read_best(path: Path, about: dict[str, object], grid: Grid) -> Cell | None:
    """The cell of the best settings in a profile; None without a profile, and in one of another training."""
    content = _read(path)
    if not content or content.get("about") != about:
        if content:
            warnings.warn(
                f"Tuner: profile {str(path)!r} is of another training; searching, and then it is replaced",
                stacklevel=2,
            )
        return None
    try:
        cell = grid.cell_of(content["best"]["bucket_bytes"], content["best"]["algorithm"])
    except (TypeError, KeyError):
        cell = None
    if cell is None:
        raise ArrayError(f"Tuner: profile {str(path)!r}: its best settings are not among the choices; delete it")
    return cell


def write_profile(path: Path, content: dict[str, object]) -> None:
    """Replace a profile at once, so that readers never see half of it."""
    try:
        _read(path)  # another file is not replaced
        write_at_once(path, (json.dumps({"format": FORMAT, **content}, indent=1) + "\n").encode())
    except Exception as exc:  # training goes on
        warnings.warn(
            f"Tuner: profile {str(path)!r} was not written, so the next training will search again: {exc}",
            stacklevel=2,
        )
