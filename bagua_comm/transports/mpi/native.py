"""MPI's own collectives."""

from __future__ import annotations

import numpy as np
from mpi4py import MPI

from ... import kernels
from ...arrays import Array, Scratch, as_bytes, rows, same_memory
from .. import derived
from ..flow import Flow
from . import tuning
from .endpoint import Endpoint
from .messages import Messages
from .reductions import OPS


class Native:
    """MPI's own collectives on one communicator; ranks have agreed on the call before. All are collective.

    Args:
        endpoint: Waits for MPI.
        messages: Makes the exchanges of a broadcast that MPI cannot count.
        scratch: Memory for arrays that must be copied first.
    """

    def __init__(self, endpoint: Endpoint, messages: Messages, scratch: Scratch) -> None:
        self._endpoint, self._messages, self._scratch = endpoint, messages, scratch
        self._comm, self._calls = endpoint.comm, endpoint.calls
        self.rank, self.size = endpoint.rank, endpoint.size

    # MPI wants IN_PLACE on all ranks or on none, but only some of our ranks may pass `x` as `out`.

    def allreduce(self, x: Array, out: Array, op: str) -> None:
        """Reduce `x` over all ranks into `out`."""
        source = derived.without_overlap(x, out, self._scratch)
        self._endpoint.complete(lambda: self._comm.Iallreduce(source, out, OPS[op]), (source, out))
        self._calls.sent_bytes += 2 * x.nbytes * (self.size - 1) // self.size
        self._end_average(out, op)

    def reduce(self, x: Array, out: Array | None, root: int, op: str) -> None:
        """Reduce `x` over all ranks into `out` of `root`."""
        source = x if out is None else derived.without_overlap(x, out, self._scratch)
        self._endpoint.complete(lambda: self._comm.Ireduce(source, out, OPS[op], root), (source, out))
        self._calls.sent_bytes += x.nbytes * (self.size - 1) // self.size
        if out is not None:
            self._end_average(out, op)

    def reduce_scatter(self, x: Array, out: Array, op: str) -> None:
        """Reduce `x` over all ranks, and keep this rank's chunk in `out`."""
        source = derived.without_overlap(x, out, self._scratch)
        self._endpoint.complete(lambda: self._comm.Ireduce_scatter_block(source, out, OPS[op]), (source, out))
        self._calls.sent_bytes += x.nbytes * (self.size - 1) // self.size
        self._end_average(out, op)

    def _end_average(self, total: Array, op: str) -> None:
        """Divide a sum of floats by the number of ranks, if `op` is "avg"."""
        if op == "avg":
            with np.errstate(all="ignore"):
                kernels.host.divide(total, self.size)

    def allgather(self, x: Array, out: Array) -> None:
        """Collect `x` of every rank in the rows of `out`."""
        mine = rows(out, self.size)[self.rank]
        if not same_memory(x, mine):
            mine[...] = x.reshape(-1)
        self._endpoint.complete(lambda: self._comm.Iallgather(MPI.IN_PLACE, [as_bytes(out), MPI.BYTE]), out)
        self._calls.sent_bytes += x.nbytes * (self.size - 1)

    def alltoall(self, x: Array, out: Array) -> None:
        """Send row j of `x` to rank j; row i of `out`, which does not overlap `x`, comes from rank i."""
        source, target = [as_bytes(x), MPI.BYTE], [as_bytes(out), MPI.BYTE]
        self._endpoint.complete(lambda: self._comm.Ialltoall(source, target), (x, out))
        self._calls.sent_bytes += x.nbytes * (self.size - 1) // self.size

    def broadcast(self, flow: Flow, x: Array, root: int) -> None:
        """Copy `x` of `root` to `x` of all ranks."""
        if x.nbytes > tuning.MESSAGE_BYTES:
            derived.broadcast(self._messages, x, root)
            return
        self._endpoint.complete(lambda: self._comm.Ibcast([as_bytes(x), MPI.BYTE], root), x)
        self._calls.sent_bytes += x.nbytes if self.rank == root else 0
