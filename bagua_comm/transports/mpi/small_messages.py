"""Collectives on small arrays: each rank's array goes to all ranks, with the number of its call, in one round.

Ranks on one host write it to memory that all of them map; others use MPI's allgather, whose latency is low.
"""

from __future__ import annotations

import functools
import zlib
from collections.abc import Sequence

import numpy as np
from mpi4py import MPI

from ... import kernels
from ...arrays import Array, DType, dtype_name, rows
from ...objects.caching import BoundedCache
from ..flow import Move
from . import tuning
from .agreement import Agreement
from .endpoint import Endpoint
from .messages import flat
from .shared_window import Rows, SharedWindow


class Table:
    """The small arrays of all ranks in calls of one name, dtype and size."""

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


class SmallMessages:
    """Collectives on small arrays of one communicator.

    Args:
        endpoint: Waits for MPI and for the window.
        agreement: Finds out which calls differ.
    """

    def __init__(self, endpoint: Endpoint, agreement: Agreement) -> None:
        self._endpoint, self._comm, self._calls = endpoint, endpoint.comm, endpoint.calls
        self._begun, self._agreement = endpoint.begun, agreement
        self.rank, self.size = endpoint.rank, endpoint.size
        self._tables: BoundedCache[tuple[str, int, DType], Table] = BoundedCache(tuning.TABLES)
        self._shown_bytes = 0

    def use_window(self, window: SharedWindow) -> None:
        """Gather through the window from now on."""
        self._tables.clear()
        self._shown_bytes = min(tuning.SHOWN_BYTES // self.size, window.slot_bytes)

    def clear(self) -> None:
        """Forget the tables."""
        self._tables.clear()

    def fit(self, x: Array) -> bool:
        """Whether arrays of the size of `x` are small enough."""
        if self._endpoint.window is not None:
            return bool(x.nbytes <= self._shown_bytes)
        return bool(x.nbytes <= tuning.EAGER_BYTES and x.nbytes * self.size <= tuning.NATIVE_BYTES)

    def route(self, name: str, call: str, x: Array, op: str, root: int) -> Move:
        """How to make a collective on arrays such as `x`."""
        table = self.table(call, x, op or "sum")
        gather, add, at_root = functools.partial(self.gather, table, call), table.reduce, self.rank == root

        def broadcast(x: Array, _: Array) -> None:
            # This has the latency of MPI's own, which would not notice that ranks give different roots.
            gathered = gather(x, shown=at_root)
            if not at_root:
                flat(x)[...] = gathered.all[root]

        moves: dict[str, Move] = {
            "barrier": lambda x, _: gather(x),
            "broadcast": broadcast,
            "allgather": lambda x, out: _fill_rows(out, gather(x).all),
            "alltoall": lambda x, out: _fill_rows(out, gather(x).chunks),
            "allreduce": lambda x, out: add(gather(x).all, flat(out)),
            "reduce_scatter": lambda x, out: add(gather(x).chunks, flat(out)),
            "reduce": lambda x, out: add(gather(x).all, flat(out)) if at_root else gather(x),
        }
        return moves[name]

    def rows_of_all(self, call: str, x: Array) -> Sequence[Array]:
        """The arrays of all ranks, valid until the next call; raises on all ranks if calls differ. Collective."""
        return self.gather(self.table(call, x), call, x).all

    def table(self, call: str, x: Array, op: str = "sum") -> Table:
        """The table of calls on arrays such as `x`, made once; `op` reduces the arrays."""
        key = call, x.size, x.dtype
        table = self._tables.get(key)
        if table is None:
            table = self._tables[key] = Table(self.size, self.rank, self._endpoint.window, call, x, op)
        return table

    def gather(self, table: Table, call: str, x: Array, *, shown: bool = True) -> Rows:
        """The arrays of all ranks, valid until the next call; raises on all ranks if calls differ.

        Collective. A rank whose array no rank reads need not write it: `shown` is False.
        """
        endpoint, calls = self._endpoint, self._calls
        window = endpoint.window
        if calls.broken is not None or self._begun:
            endpoint.check_idle()
        if window is None:
            return self._gather_over_mpi(table, call, x)
        try:
            gathered = window.gather(table.rows, flat(x) if shown else None, table.number)
        except BaseException as exc:
            raise endpoint.abort_after(exc, None) from exc
        if gathered is None:
            raise self._agreement.mismatch(call, x)
        if shown:
            calls.sent_bytes += x.nbytes * (self.size - 1)
        return gathered

    def _gather_over_mpi(self, table: Table, call: str, x: Array) -> Rows:
        gathered = table.rows[0]
        gathered.mine[...] = x.reshape(-1)
        self._endpoint.complete(lambda: self._comm.Iallgather(MPI.IN_PLACE, table.wire), table)
        self._calls.sent_bytes += x.nbytes * (self.size - 1)
        if not table.is_of_one_call():
            table.renew()  # it holds the numbers of other calls
            raise self._agreement.mismatch(call, x)
        return gathered


def _fill_rows(out: Array, values: Sequence[Array]) -> None:
    """Copy arrays, (m,) each, to the rows of `out`; NumPy takes longer to copy all of them in one go."""
    table = rows(out, len(values))
    for i, row in enumerate(values):
        table[i] = row
