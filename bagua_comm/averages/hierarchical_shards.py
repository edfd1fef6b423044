"""The hierarchical mean of shards: reduce-scatter inside nodes first, then across them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from .. import arrays, kernels
from ..arrays import Array, LinearOp
from ..comm import Communicator
from .base import Exact
from .quantized import Quantized
from .quantized_shards import quantized_reduce_scatter


class Chunks(NamedTuple):
    """Which chunks the ranks of this node add up, and which of them this rank keeps.

    The chunk of each rank is added up, in every node, by one of the first L ranks, where L is the size of the
    smallest node: by the one whose local rank is that of the chunk's rank modulo L.
    """

    order: list[int]
    """All chunks: first those that the local rank 0 adds up, by node; then those of local rank 1, and so on."""
    inside: list[int]
    """Number of chunks that each rank of this node adds up; 0 beyond the first L."""
    across: list[int]
    """Of those of this rank, the number that belong to each node; empty beyond the first L."""
    largest: int
    """Size of the largest node."""
    nodes: int
    """Number of nodes."""


@dataclass
class ShardsByNode:
    """A reduce-scatter in two levels; made by `Hierarchical.bind_shards`."""

    comm: Communicator
    inner: Exact | Quantized
    chunks: Chunks

    def __call__(self, x: Array, out: Array, op: LinearOp) -> Array:
        """Reduce `x`, (p * m,), and keep this rank's chunk in `out`, (m,); both are contiguous. Collective."""
        comm, (intra, inter), chunks = self.comm, self.comm.by_node(), self.chunks
        owners, m = len([count for count in chunks.inside if count]), out.size
        rows = x.reshape(comm.size, m)
        if chunks.order != sorted(chunks.order):
            sorted_rows = comm.scratch.take("by node", rows.shape, x.dtype, like=x)
            for place, rank in enumerate(chunks.order):
                sorted_rows[place] = rows[rank]
            rows = sorted_rows
        counts = [m * count for count in chunks.inside]
        mine = comm.scratch.take("mine", (counts[intra.rank],), x.dtype, like=x)
        is_even = min(counts) == max(counts)
        intra.reduce_scatter(rows.reshape(-1), out=mine, op="avg", counts=None if is_even else counts)
        run, weighted = kernels.of(x), comm.size != chunks.largest * chunks.nodes
        if chunks.across:
            # See `Hierarchical`: the mean of node means, weighted by the sizes of the nodes.
            if weighted:
                run.scale(mine, comm.local_size / chunks.largest)
            kept = out if chunks.across[inter.rank] == 1 else mine[: m * chunks.across[inter.rank]]
            kept = self._across(inter, mine, kept, [m * count for count in chunks.across])
            if weighted or op == "sum":
                factor = chunks.largest * chunks.nodes / comm.size
                run.scale(kept, factor * (comm.size if op == "sum" else 1))
            if kept is not out:
                out[...] = kept[:m]
                peers = range(intra.rank + owners, intra.size, owners)
                intra.exchange([(r, kept[i * m : (i + 1) * m]) for i, r in enumerate(peers, 1)], [])
        else:
            intra.exchange([], [(intra.rank % owners, out)])
        return out

    def _across(self, inter: Communicator, x: Array, out: Array, counts: Sequence[int]) -> Array:
        """Average the partial means of all nodes; keep this rank's chunks."""
        own = sum(counts[: inter.rank])
        target = out if not arrays.overlap(x, out) else x[own : own + counts[inter.rank]]
        inner, even = self.inner, None if min(counts) == max(counts) else counts
        if isinstance(inner, Quantized) and x.nbytes >= inner.least_bytes(inter.transport_for(x)):
            return quantized_reduce_scatter(inter, x, target, op="avg", codec=inner.codec, counts=even)
        return inter.reduce_scatter(x, out=target, op="avg", counts=even)


def chunks_by_node(comm: Communicator) -> Chunks:
    """Return the chunks of this rank's node. Collective."""
    nodes: list[list[int]] = comm.allgather(np.array([comm.node, comm.local_rank])).tolist()
    sizes = np.bincount([node for node, _ in nodes])
    owners, order = int(sizes.min()), []
    inside, across = [0] * comm.local_size, []
    for local in range(owners):
        # In the order of the communicator across nodes: of its ranks.
        owned = [(r, node) for r, (node, place) in enumerate(nodes) if place % owners == local]
        in_order = [node for node, place in nodes if place == local]
        by_node = [[r for r, node in owned if node == each] for each in in_order]
        order += [r for ranks in by_node for r in ranks]
        inside[local] = sum(map(len, by_node))
        if local == comm.local_rank:
            across = [*map(len, by_node)]
    return Chunks(order, inside, across, int(sizes.max()), len(sizes))
