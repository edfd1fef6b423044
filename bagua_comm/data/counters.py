"""Counts of a cache, over a process and the workers that it starts."""

from __future__ import annotations

import mmap
import os
import tempfile
import warnings
from dataclasses import dataclass, fields
from pathlib import Path

import numpy as np

from ..arrays import Array
from ..system.files import private_folder


@dataclass(frozen=True)
class Stats:
    """Counts of a cache, in samples unless noted."""

    hits: int = 0
    """Samples found in the store."""
    misses: int = 0
    """Samples loaded: missing, damaged, or the store was bypassed."""
    waited: int = 0
    """The hits that another worker was just loading."""
    timeouts: int = 0
    """The misses for which another worker took too long."""
    damaged: int = 0
    """The misses whose bytes differed from what was written."""
    errors: int = 0
    """Failed calls of a store."""
    bypassed: int = 0
    """Calls not made, because the store had just failed."""
    unwritten: int = 0
    """Samples loaded but not stored, because the store failed."""
    read_bytes: int = 0
    """Bytes of the samples found."""
    written_bytes: int = 0
    """Bytes written to stores."""


NAMES = [field.name for field in fields(Stats)]

_ROW = 16
"""Numbers in a row of the file: those of `NAMES`, and up to a power of two, so that no row lies in two pages."""


def new_file() -> Path | None:
    """Make the file of a cache's counts; None, with a warning, if that fails."""
    try:
        descriptor, path = tempfile.mkstemp(prefix="counts-", dir=private_folder())
        os.close(descriptor)
    except OSError as exc:
        warnings.warn(f"a cache counts only this process: {exc}", RuntimeWarning, stacklevel=2)
        return None
    return Path(path)


class Counts:
    """The counts of one process: a row of a file, so that they survive the process and others read them."""

    def __init__(self, path: Path | None) -> None:
        self._path = path
        self._row: Array = np.zeros(_ROW, np.int64)
        self._is_in_file = False
        if path is None or not path.exists():
            return  # the process that made it has ended
        try:
            with path.open("a+b", buffering=0) as file:
                file.write(self._row.tobytes())  # so that the disk reserves the space
                rows = np.frombuffer(mmap.mmap(file.fileno(), file.tell()), np.int64)
        except OSError as exc:
            warnings.warn(f"a cache does not count process {os.getpid()}: {exc}", RuntimeWarning, stacklevel=2)
            return
        self._row, self._is_in_file = rows[-_ROW:], True

    def add(self, name: str, count: int = 1) -> None:
        """Increase a count."""
        self._row[NAMES.index(name)] += count

    def total(self) -> Stats:
        """The counts of all processes."""
        total = self._row
        if self._path is not None and self._path.exists():
            rows = np.fromfile(self._path, np.int64).reshape(-1, _ROW)
            total = rows.sum(axis=0) + (0 if self._is_in_file else self._row)
        return Stats(*total[: len(NAMES)].tolist())
