"""The average of `BackendOptions` in the reductions of a group."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence

from bagua_comm import (
    Communicator,
    Exact,
    Hierarchical,
    Quantized,
    Reproducible,
    UnsupportedError,
    arrays,
    kernels,
)
from bagua_comm.arrays import Array, LinearOp, Op
from bagua_comm.averages import Average, InPlace
from bagua_comm.averages.quantized_shards import codec_for, reduce_scatter


class GroupAverage:
    """Adds and averages arrays of one communicator by an average.

    Args:
        average: The average; None to take no array.
        comm: The communicator.
    """

    def __init__(self, average: Average | None, comm: Communicator) -> None:
        self._average, self._comm = average, comm
        self._mean: InPlace | None = None
        self._shards: Callable[[Array, Array, LinearOp], object] | None = None

    def takes(self, op: Op, xs: Sequence[Array]) -> bool:
        """Whether arrays of these dtypes are reduced here by `op`."""
        if self._average is None or op not in ("sum", "avg"):
            return False
        try:
            for dtype in {arrays.dtype_name(x.dtype) for x in xs}:
                self._average.check(dtype)
        except UnsupportedError as exc:
            if isinstance(self._average, Reproducible) and dtype not in arrays.INTEGERS and dtype != "bool":
                warnings.warn(f"BackendOptions: the bits depend on the order of the ranks: {exc}", stacklevel=2)
            return False
        return True

    def allreduce(self, xs: Sequence[Array], op: Op) -> None:
        """Reduce each of `xs` over all ranks, in place. Collective."""
        for x in xs:
            x[...] = self._averaged(x, op).reshape(x.shape)

    def reduce_scatter(self, x: Array, out: Array, op: Op) -> None:
        """Reduce `x`, (p * m,), over all ranks, and keep this rank's chunk in `out`, (m,).

        Collective.
        """
        if self._shards is None:
            self._shards = self._bind_shards()
        self._shards(x, out, "avg" if op == "avg" else "sum")

    def _bind_shards(self) -> Callable[[Array, Array, LinearOp], object]:
        """The function that reduces an array of which each rank keeps a chunk. Collective."""
        average, comm = self._average, self._comm
        if isinstance(average, Quantized):
            return lambda x, out, op: reduce_scatter(comm, x, out, op=op, codec=codec_for(average, comm, x))
        if isinstance(average, Hierarchical) and isinstance(average.inner, (Exact, Quantized)):
            return average.bind_shards(comm)

        def cut(x: Array, out: Array, op: LinearOp) -> None:
            out[...] = arrays.rows(self._averaged(x.copy(), op), comm.size)[comm.rank]

        return cut

    def _averaged(self, x: Array, op: Op) -> Array:
        """The sum or average of `x` over all ranks, flat; may overwrite `x`. Collective."""
        assert self._average is not None
        if self._mean is None:
            self._mean = self._average.bind(self._comm)
        mean: Array = self._mean(arrays.contiguous(x).reshape(-1))
        if op == "sum":  # by a kernel, since NumPy rounds the factor to 16 bits
            kernels.of(mean).scale(arrays.as_real(mean, op), self._comm.size)
        return mean
