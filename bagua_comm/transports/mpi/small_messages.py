"""Collectives on small arrays: each rank's array goes to all ranks, with the number of its call, in one round.

Ranks on one host write it to memory that all of them map; others use MPI's allgather, whose latency is low.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Sequence
from typing import TypeAlias

import numpy as np
from mpi4py import MPI

from ...arrays import Array, dtype_name
from .agreement import Agreement
from .endpoint import Endpoint
from .shared_window import Rows

Fill: TypeAlias = Callable[[Sequence[Array], Array], object]
"""Fills a flat array from a row, (m,), of each rank."""


class SmallCall:
    """A collective on small arrays of one dtype and size.

    Args:
        endpoint: Waits for MPI and for the window.
        agreement: Finds out which calls differ.
        call: All that must be the same on all ranks, except dtype and size.
        x: An array like those of the call.
        fill: Makes the result of this rank; None if it has none.
        by_chunk: Whether `fill` takes this rank's chunk of each array in place of the whole.
        shown: Whether another rank reads the array of this one.
    """

    def __init__(
        self,
        endpoint: Endpoint,
        agreement: Agreement,
        call: str,
        x: Array,
        fill: Fill | None,
        *,
        by_chunk: bool = False,
        shown: bool = True,
    ) -> None:
        self._endpoint, self._agreement, self._calls = endpoint, agreement, endpoint.calls
        self._call, self._fill, self._by_chunk, self._shown = call, fill, by_chunk, shown
        self._number = zlib.crc32(f"{call} {dtype_name(x.dtype)} {x.size}".encode())
        """The same on all ranks if they make the same call."""
        self._sent_bytes = x.nbytes * (endpoint.size - 1) if shown or endpoint.window is None else 0
        if endpoint.window is not None:
            self._rows = endpoint.window.rows(x.size, x.dtype)
            return
        table = np.zeros((endpoint.size, 8 + -(-x.nbytes // 8) * 8), np.uint8)  # each row begins with the number
        self._numbers = table[:, :8].view(np.int64)
        self._numbers[...] = self._number
        self._wire = [table, MPI.BYTE]
        self._rows = (Rows(table[:, 8 : 8 + x.nbytes].view(x.dtype), endpoint.rank),) * 2

    def run(self, x: Array, out: Array) -> None:
        """Make the call; raises on all ranks if calls differ. Collective."""
        endpoint, calls = self._endpoint, self._calls
        window = endpoint.window
        if calls.broken is not None or endpoint.begun:
            endpoint.check_idle()
        mine = x if x.ndim == 1 else x.reshape(-1)
        if window is None:
            self._agreement.note(self._call, x)
            rows = self._gather_over_mpi(mine)
        else:
            try:
                rows = window.gather(self._rows, mine if self._shown else None, self._number)
            except BaseException as exc:
                raise endpoint.abort_after(exc, None) from exc
        if rows is None:
            raise self._agreement.mismatch(self._call, x)
        calls.sent_bytes += self._sent_bytes
        if self._fill is not None:
            self._fill(rows.chunks if self._by_chunk else rows.all, out if out.ndim == 1 else out.reshape(-1))

    def _gather_over_mpi(self, mine: Array) -> Rows | None:
        """The arrays of all ranks; None everywhere if calls differ. Collective."""
        rows = self._rows[0]
        rows.mine[...] = mine
        if not self._endpoint.gather_rows(self._wire):
            raise self._endpoint.abort_after(self._agreement.mismatch(self._call, mine), None)
        if (self._numbers == self._number).all():
            return rows
        self._numbers[...] = self._number  # in place of the numbers of other calls
        return None


def copy_rows(values: Sequence[Array], out: Array) -> None:
    """Copy arrays, (m,) each, one after another; NumPy takes longer to copy all of them in one go."""
    table = out.reshape(len(values), -1)
    for i, row in enumerate(values):
        table[i] = row
