"""Reproducible sums of which each rank keeps a part: the bits are those of `reproducible_allreduce`.

Tensors are cut along their first dimension into one part for each of p ranks, ceil(rows / p) rows each, and
padded with zeros. Rank r keeps part r of every tensor; the parts of a rank lie together. Blocks are those of the
whole tensors, as `Reproducible` counts them, so units and sums do not depend on p:

    f of each block, over all its pieces and all ranks      one allreduce, MAX of uint8
    q of each element, with the unit of its block
    S of this rank's parts                                  one reduce-scatter, SUM of int32

So each rank sends (p - 1) / p of the bytes of float32, and two bytes for each block: half of an allreduce.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from .. import arrays, kernels, topology
from ..arrays import Array
from ..comm import Communicator
from ..errors import ArrayError
from .reproducible import Reproducible


class ReproducibleShards:
    """A reproducible reduce-scatter of tensors that are cut along their first dimension.

    Args:
        settings: The average. With `addends`, each rank has an equal share of them: it holds all but the last.
        comm: The ranks.
        tensors: The numbers of rows and of elements of a row of each tensor, the same on all ranks.

    Raises:
        ArrayError: There are more ranks than addends, or the ranks would not have equal shares.
    """

    def __init__(self, settings: Reproducible, comm: Communicator, tensors: Sequence[tuple[int, int]]) -> None:
        settings.bind(comm)  # checks the number of addends
        self.addends = comm.size if settings.addends is None else settings.addends
        if self.addends % comm.size:
            raise ArrayError(
                f"{settings}: {self.addends} addends on {comm.size} ranks, expected a multiple, since all ranks "
                "of a sharded model run the same number of passes"
            )
        self.share = len(topology.share(self.addends, comm.rank, comm.size))
        self._settings, self._comm = settings, comm
        self._bits = 31 - (self.addends - 1).bit_length()
        self._held: list[Array] = []
        starts, blocks, sizes = _pieces(tensors, comm.size, settings.block)
        self.size = sum(sizes)
        """Number of elements of all parts of all ranks, padding included."""
        self._bounds, self._blocks = np.append(starts, self.size), blocks
        first = sum(sizes[: comm.rank])
        self._own = slice(*np.searchsorted(starts, [first, first + sizes[comm.rank]]))
        """The pieces of this rank's parts."""

    @property
    def held(self) -> int:
        """Number of addends that this rank holds."""
        return len(self._held)

    def drop(self, keep: int = 0) -> None:
        """Hold the first `keep` addends, and no others."""
        del self._held[keep:]

    def __call__(self, x: Array, out: Array, op: str) -> bool:
        """Hold `x` while addends are missing, else add all, and write this rank's parts of the result.

        Collective. `x` has all parts, those of rank 0 first, and `out` has those of this rank; it gets zeros
        while addends are missing. Returns whether it has the result.
        """
        if len(self._held) + 1 < self.share:
            self._held.append(x.copy())
            out[...] = 0
            return False
        addends, self._held = [*self._held, x], []
        with self._comm.tracer.span("Reproducible", addends=self.share, bytes=x.nbytes):
            self._add(addends, out, self.addends if op == "avg" else 1)
        return True

    def _add(self, addends: Sequence[Array], out: Array, divisor: int) -> None:
        comm, x, run = self._comm, addends[-1], kernels.of(addends[-1])
        bounds = _like(self._bounds, x)
        pieces = _like(np.zeros(len(self._blocks), np.uint8), x)
        for each in addends:
            run.fixed_exponents(each, bounds, pieces)
        fields = np.zeros(int(self._blocks.max(initial=0)) + 1, np.uint8)
        np.maximum.at(fields, self._blocks, arrays.to_host(pieces))
        comm.allreduce(fields, out=fields, op="max")
        pieces = _like(fields[self._blocks], x)
        totals = comm.scratch.take("totals", (x.size,), np.int32, like=x)
        for i, each in enumerate(addends):
            run.fixed_add(each, bounds, pieces, self._bits, totals, first=i == 0)
        mine = comm.scratch.take("total", (out.size,), np.int32, like=x)
        comm.reduce_scatter(totals, out=mine, op="sum")
        own = self._own
        bounds = _like(self._bounds[own.start : own.stop + 1] - self._bounds[own.start], x)
        run.fixed_mean(mine, bounds, pieces[own], self._bits, divisor, out)


def _pieces(tensors: Sequence[tuple[int, int]], ranks: int, block: int) -> tuple[Array, Array, list[int]]:
    """Return where each piece of a block begins in the array of all parts, its block, and the sizes of ranks.

    Padding is a block of its own, the first.
    """
    starts: list[Array] = []
    blocks: list[Array] = []
    sizes: list[int] = []
    at = 0
    for rank in range(ranks):
        before, begun = at, 1
        for rows, width in tensors:
            part = -(-rows // ranks)
            first, last = (min(end, rows) * width for end in (rank * part, (rank + 1) * part))
            edges = np.arange(first // block * block, last, block) if last > first else np.zeros(0, np.int64)
            starts.append(at + np.maximum(edges - first, 0))
            blocks.append(begun + edges // block)
            if last - first < part * width:
                starts.append(np.array([at + last - first]))
                blocks.append(np.array([0]))
            at, begun = at + part * width, begun + -(-rows * width // block)
        sizes.append(at - before)
    if not starts:
        return np.zeros(0, np.int64), np.zeros(0, np.int64), sizes
    return np.concatenate(starts).astype(np.int64), np.concatenate(blocks), sizes


def _like(host: Array, x: Array) -> Array:
    """A host array in the memory of `x`."""
    if isinstance(x, np.ndarray):
        return host
    made = arrays.empty(host.shape, host.dtype, like=x)
    made.set(host)
    return made
