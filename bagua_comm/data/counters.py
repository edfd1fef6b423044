"""Counts of a cache, over a process and the workers that it starts."""

from __future__ import annotations

import contextlib
import mmap
import os
import secrets
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
_ENDED = "ended"


def new_folder() -> Path | None:
    """Make the folder of a cache's counts; None, with a warning, if that fails."""
    try:
        folder = private_folder() / f"counts-{secrets.token_hex(8)}"
        folder.mkdir(mode=0o700)
    except OSError as exc:
        warnings.warn(f"a cache counts only this process: {exc}", RuntimeWarning, stacklevel=2)
        return None
    return folder


class Counts:
    """The counts of one process, in a file that others read, so that they survive the process."""

    def __init__(self, folder: Path | None) -> None:
        self._folder = folder
        self._file: Path | None = None
        self._values: Array = np.zeros(len(NAMES), np.int64)
        if folder is None or not folder.is_dir():
            return  # the process that made it has ended
        path = folder / secrets.token_hex(8)
        try:
            with path.open("x+b") as file:
                file.write(self._values.tobytes())  # so that the disk reserves the space
                file.flush()
                self._values = np.frombuffer(mmap.mmap(file.fileno(), 0), np.int64)
        except OSError as exc:
            with contextlib.suppress(OSError):
                path.unlink()
            warnings.warn(f"a cache does not count process {os.getpid()}: {exc}", RuntimeWarning, stacklevel=2)
            return
        self._file = path

    def add(self, name: str, count: int = 1) -> None:
        """Increase a count."""
        self._values[NAMES.index(name)] += count

    def end(self) -> None:
        """Add the counts to those of other processes that have ended."""
        if self._file is None or self._folder is None:
            return
        with contextlib.suppress(FileNotFoundError):  # the process that made the folder has ended, and removed it
            with (self._folder / _ENDED).open("ab", buffering=0) as file:
                file.write(self._values.tobytes())
            self._file.unlink()
        self._file = None
        self._values = np.zeros(len(NAMES), np.int64)

    def total(self) -> Stats:
        """The counts of all processes."""
        if self._folder is None or not self._folder.is_dir():
            return Stats(*self._values.tolist())
        rows = [self._values] if self._file is None else []
        for path in self._folder.iterdir():
            with contextlib.suppress(FileNotFoundError):  # it has just ended
                rows.append(np.frombuffer(path.read_bytes(), np.int64))
        return Stats(*np.concatenate(rows).reshape(-1, len(NAMES)).sum(axis=0).tolist())
