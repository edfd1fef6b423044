"""Shards in two levels: a reduce-scatter inside nodes, then across them; an allgather the other way round."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from .. import arrays, kernels
from ..arrays import A, AnyArray, Array, LinearOp
from ..comm import Communicator
from ..comm.arguments import as_argument
from ..errors import ArrayError
from .base import Exact
from .coded import encode, next_draws
from .quantized import Quantized
from .quantized_shards import allgather, codec_for, reduce_scatter


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

    @property
    def owners(self) -> int:
        """Size of the smallest node: L."""
        return len([count for count in self.inside if count])

    def peers(self, intra: Communicator) -> range:
        """Return the ranks of this node, other than this one, whose chunks this rank adds up."""
        return range(intra.rank + self.owners, intra.size, self.owners)


@dataclass
class ShardsByNode:
    """A reduce-scatter in two levels; made by `Hierarchical.bind_shards`."""

    comm: Communicator
    inner: Exact | Quantized
    inside: Exact | Quantized
    chunks: Chunks

    def __call__(self, x: AnyArray, out: A, op: LinearOp) -> A:
        """Reduce `x`, (p * m,), and keep this rank's chunk in `out`, (m,); both are contiguous. Collective."""
        self._reduce(*_checked(("x", x), ("out", out), self.comm.size), op)
        return out

    def _reduce(self, x: Array, out: Array, op: LinearOp) -> None:
        comm, (intra, inter), chunks = self.comm, self.comm.by_node(), self.chunks
        m = out.size
        rows = x.reshape(comm.size, m)
        if chunks.order != sorted(chunks.order):
            sorted_rows = comm.scratch.take("by node", rows.shape, x.dtype, like=x)
            for place, rank in enumerate(chunks.order):
                sorted_rows[place] = rows[rank]
            rows = sorted_rows
        counts = [m * count for count in chunks.inside]
        mine = comm.scratch.take("mine", (counts[intra.rank],), x.dtype, like=x)
        codec = codec_for(self.inside, comm, x) if chunks.largest > 1 else None
        reduce_scatter(intra, rows.reshape(-1), mine, op="avg", codec=codec, counts=counts)
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
                sends = [(r, kept[i * m : (i + 1) * m]) for i, r in enumerate(chunks.peers(intra), 1)]
                intra.exchange(sends, [])
        else:
            intra.exchange([], [(intra.rank % chunks.owners, out)])

    def _across(self, inter: Communicator, x: Array, out: Array, counts: list[int]) -> Array:
        """Average the partial means of all nodes; keep this rank's chunks."""
        own = sum(counts[: inter.rank])
        target = out if not arrays.overlap(x, out) else x[own : own + counts[inter.rank]]
        codec = codec_for(self.inner, inter, x)
        return reduce_scatter(inter, x, target, op="avg", codec=codec, counts=counts)


@dataclass
class GatherByNode:
    """An allgather in two levels; made by `Hierarchical.bind_gather`."""

    comm: Communicator
    method: Exact | Quantized
    chunks: Chunks

    def __call__(self, x: AnyArray, out: A) -> A:
        """Gather `x`, (m,), of all ranks in `out`, (p * m,); both are contiguous. Collective."""
        whole, chunk = _checked(("out", out), ("x", x), self.comm.size)
        self._gather(chunk.reshape(-1), whole)
        return out

    def _gather(self, x: Array, out: Array) -> None:
        comm, order = self.comm, self.chunks.order
        results = out.reshape(comm.size, x.size)
        if comm.size == 1:
            results[...] = x
            return
        codec = codec_for(self.method, comm, out) if out.size else None  # those of another rank may not be empty
        with comm.tracer.span("Hierarchical gather", bytes=out.nbytes, codec=str(codec)):
            if codec is None:
                rows = comm.scratch.take("by node", results.shape, x.dtype, like=x)
                self._move(x, rows)
                for place, rank in enumerate(order):
                    results[rank] = rows[place]
                return
            steps, nbytes = codec.steps(x.size, x), codec.wire_nbytes(x.size, x.dtype)
            sent = comm.scratch.take("sent", (1, nbytes), np.uint8, like=x)
            rows = comm.scratch.take("received", (comm.size, nbytes), np.uint8, like=x)
            encode(steps, x[None], sent, next_draws(comm, codec.random_seed))
            self._move(sent[0], rows)
            for place, rank in enumerate(order):
                steps.decode(rows[place : place + 1], results[rank : rank + 1])

    def _move(self, x: Array, rows: Array) -> None:
        """Gather `x`, (n,), of all ranks in `rows`, (p, n), in the order of `Chunks.order`. Collective."""
        (intra, inter), chunks, n = self.comm.by_node(), self.chunks, x.size
        start = sum(chunks.inside[: intra.rank])
        mine = rows[start : start + chunks.inside[intra.rank]]
        if chunks.across:
            before = sum(chunks.across[: inter.rank])
            own = mine[before : before + chunks.across[inter.rank]]
            own[0] = x
            if len(own) > 1:
                intra.exchange([], [(r, own[i]) for i, r in enumerate(chunks.peers(intra), 1)])
            counts = [n * count for count in chunks.across]
            allgather(inter, own.reshape(-1), mine.reshape(-1), codec=None, counts=counts)
        else:
            intra.exchange([(intra.rank % chunks.owners, x)], [])
        counts = [n * count for count in chunks.inside]
        allgather(intra, mine.reshape(-1), rows.reshape(-1), codec=None, counts=counts)


def _checked(whole: tuple[str, Any], chunk: tuple[str, Any], ranks: int) -> tuple[Array, Array]:
    """View an array of all chunks and one of a chunk, each with its name, as arrays of NumPy or CuPy.

    Raises:
        ArrayError: They are not contiguous, or do not fit together.
    """
    found = {name: as_argument("Hierarchical", name, value) for name, value in (whole, chunk)}
    for name, x in found.items():
        if not arrays.is_contiguous(x):
            raise ArrayError(f"Hierarchical: {name} is not contiguous, expected C-contiguous memory")
    (all_name, every), (name, one) = found.items()
    if every.size != ranks * one.size or every.dtype != one.dtype:
        raise ArrayError(
            f"Hierarchical: {all_name} has {every.size} elements of {every.dtype}, expected "
            f"{ranks * one.size} of {one.dtype}, {ranks} times those of {name}"
        )
    return every, one


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
