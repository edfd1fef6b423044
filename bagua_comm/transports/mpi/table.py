"""The small arrays of all ranks in one call, each with the number of its call."""

from __future__ import annotations

import zlib

import numpy as np
from mpi4py import MPI

from ... import kernels
from ...arrays import Array, dtype_name
from .window import Rows, SharedWindow


class Table:
    """The small arrays of all ranks in calls of one kind."""

    def __init__(self, size: int, rank: int, window: SharedWindow | None, call: str, x: Array, op: str) -> None:
        self.number = zlib.crc32(f"{call} {dtype_name(x.dtype)} {x.size}".encode())
        """The same on all ranks if they make the same call."""
        self.reduce = kernels.reducer(x.dtype, op, size)
        if window is not None:
            self.rows = window.rows(x.size, x.dtype)
            return
        table = np.zeros((size, 8 + -(-x.nbytes // 8) * 8), np.uint8)  # each row begins with the number
        self._numbers = table[:, :8].view(np.int64)
        self.renew()
        self.wire = [table, MPI.BYTE]
        self.rows = (Rows(table[:, 8 : 8 + x.nbytes].view(x.dtype), rank),) * 2

    def renew(self) -> None:
        """Write the number of the call to all rows, without a window."""
        self._numbers[...] = self.number

    def is_of_one_call(self) -> bool:
        """Whether all ranks have sent the same number, without a window."""
        return bool((self._numbers == self.number).all())
