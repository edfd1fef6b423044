"""The hierarchical mean: inside nodes first, then across them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from .. import arrays, kernels
from ..arrays import Array, LinearOp
from ..comm import Communicator
from ..comm.call import Call
from ..errors import ArrayError
from .base import Average, Exact, InPlace
from .hierarchical_shards import ShardsByNode, chunks_by_node
from .quantized import Quantized
from .reproducible import Reproducible


@dataclass(frozen=True)
class Hierarchical:
    """The mean in two levels: reduce inside each node, `inner` across nodes, gather inside each node.

    The array is cut into L chunks, where L is the size of the smallest node; in each node, L ranks own one chunk
    each. The steps are: reduce_scatter within the node, `inner` among the owners of the same chunk, allgather
    within the node. Node means are weighted by the sizes of the nodes, so the result is the true mean even if
    nodes differ in size. Some nodes then have more ranks than chunks, so alltoallv and allgatherv replace
    reduce_scatter and allgather.

    Use it if several ranks share the link of a node: each node sends one array over it, not one for each rank.
    Try `Hierarchical(Quantized())` first if that link is the bottleneck; with one rank on each node, it equals
    `Quantized()`.
    """

    inner: Average = field(default_factory=Exact)

    def __post_init__(self) -> None:
        if isinstance(self.inner, Reproducible):
            raise ArrayError(
                f"Hierarchical: inner is {self.inner}, but sums inside a node are not reproducible; use "
                f"{self.inner} alone, which the transport adds up inside nodes first where it can"
            )

    def bind(self, comm: Communicator, like: Array | None = None) -> InPlace:
        """See `Average.bind`."""
        intra, inter = comm.by_node()
        # Ranks that own no chunk bind as well: `inner` may split, which is collective.
        across = self.inner.bind(inter)
        sizes = comm.allgather(np.array(comm.local_size))
        nodes = len(set(comm.allgather(np.array(comm.node)).tolist()))
        return _Levels(self, comm, intra, across, _Sizes(int(sizes.min()), int(sizes.max()), nodes))

    def bind_shards(self, comm: Communicator) -> Callable[[Array, Array, LinearOp], Array]:
        """Return a function that averages an array of which each rank keeps a chunk: a reduce-scatter.

        Collective. It takes `x`, (p * m,), and `out`, (m,), both contiguous, and "avg" or "sum". The steps are: a
        reduce-scatter within the node, one by `inner` among ranks of equal local rank, and, if nodes differ in
        size, messages within the larger nodes. Each node sends 1 / L of the bytes of its ranks, where L is the
        size of the smallest node.

        Raises:
            ArrayError: `inner` is neither `Exact` nor `Quantized`.

        Source: qgZ of ZeRO++ (Wang et al., arXiv 2306.10209).
        """
        if not isinstance(self.inner, (Exact, Quantized)):
            raise ArrayError(f"bind_shards: inner is {self.inner}, expected Exact() or Quantized(codec)")
        return ShardsByNode(comm, self.inner, chunks_by_node(comm))

    def check(self, dtype: str) -> None:
        """Accept the dtypes of `inner`."""
        self.inner.check(dtype)


class _Sizes(NamedTuple):
    """Sizes of the nodes."""

    owners: int
    """Ranks in the smallest node; the number of ranks that own a chunk in each node."""
    largest: int
    """Ranks in the largest node."""
    nodes: int
    """Number of nodes."""


@dataclass
class _Levels:
    """A bound `Hierarchical`."""

    settings: Hierarchical
    comm: Communicator
    intra: Communicator
    across: InPlace
    """`inner` among the ranks that own the same chunk; it may have state."""
    sizes: _Sizes

    def __call__(self, x: Array) -> Array:
        comm, intra, (owners, largest, nodes) = self.comm, self.intra, self.sizes
        value = Call(comm, "Hierarchical", x).x
        self.settings.check(arrays.dtype_name(value.dtype))
        if comm.size == 1 or value.size == 0:
            return x
        flat = arrays.as_real(arrays.contiguous(value), "avg").reshape(-1)
        chunks = _padded(intra, flat, owners, -(-flat.size // owners))
        mine = chunks[intra.rank] if intra.rank < owners else chunks[:0]
        if owners == largest:
            intra.reduce_scatter(chunks.reshape(-1), out=mine, op="avg")
            self.across(mine)
            intra.allgather(mine, out=chunks)
        else:
            counts = [chunks.shape[1] if r < owners else 0 for r in range(intra.size)]
            parts = _exchanged(intra, chunks, counts)
            if mine.size:
                # The mean over ranks is the mean over nodes of: node mean x node size / mean node size. Weights
                # of at most 1 keep finite numbers finite.
                kernels.of(mine).reduce_rows(parts, mine, "avg")
                kernels.of(mine).scale(mine, comm.local_size / largest)
                self.across(mine)
                kernels.of(mine).scale(mine, largest * nodes / comm.size)
            elif hasattr(self.across, "skip"):  # it counts its means, on all ranks alike
                self.across.skip()
            intra.allgatherv(mine, chunks, counts)
        if not arrays.overlap(chunks, value):
            value[...] = chunks.reshape(-1)[: flat.size].view(value.dtype).reshape(value.shape)
        return x


def _exchanged(comm: Communicator, chunks: Array, counts: list[int]) -> Array:
    """Send chunk j to rank j if counts[j] > 0; return this rank's own chunk of every rank, (p, m)."""
    incoming = [counts[comm.rank]] * comm.size
    parts = comm.scratch.take("parts", (comm.size, counts[comm.rank]), chunks.dtype, like=chunks)
    comm.alltoallv(chunks, counts, parts, incoming)
    return parts


def _padded(comm: Communicator, flat: Array, rows: int, length: int, *, copy: bool = False) -> Array:
    """Return `flat` as (rows, length), copied to zero-padded scratch memory of `comm` if it is shorter."""
    if flat.size == rows * length and not copy:
        return flat.reshape(rows, length)
    padded = comm.scratch.take("padded", (rows * length,), flat.dtype, like=flat)
    padded[: flat.size] = flat
    padded[flat.size :] = 0
    return padded.reshape(rows, length)
