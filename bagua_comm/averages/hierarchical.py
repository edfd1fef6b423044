"""The hierarchical mean: inside nodes first, then across them; of whole arrays, and of shards.

A reduce-scatter of shards goes the same way, and an allgather the other way round.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from .. import arrays
from ..arrays import AnyArray, Array, LinearOp
from ..codecs import Codec
from ..comm import Communicator
from ..comm.call import Call
from ..errors import ArrayError, UnsupportedError, how_to_call
from ..transports.labels import UNLABELLED
from .base import Average, Exact, Gathers, InPlace, Shards, check_average_argument, check_shards, scale
from .coded import next_draws
from .quantized import Quantized, allgather, codec_for, reduce_scatter


@dataclass(frozen=True)
class Hierarchical(Average):
    """The mean in two levels: `inside` reduces inside each node, `inner` across nodes, `inside` gathers there.

    The array is cut into L chunks, where L is the size of the smallest node; in each node, L ranks own one chunk
    each. The steps are: reduce_scatter within the node, `inner` among the owners of the same chunk, allgather
    within the node. Node means are weighted by the sizes of the nodes, so the result is the true mean even if
    nodes differ in size. Some nodes then have more ranks than chunks, so alltoall and allgather with counts
    replace reduce_scatter and allgather.

    Use it if several ranks share the link of a node: each node sends one array over it, not one for each rank.
    Try `Hierarchical(Quantized())` first if that link is the bottleneck; with one rank on each node, it equals
    `Quantized()`.

    Args:
        inner: The average across nodes.
        inside: How the ranks of a node exchange: `Exact()`, or `Quantized(codec)` where the links inside nodes
            are slow as well. It rounds each array before the mean of the node, and the result once more, to the
            same bytes in all nodes, also in those of one rank. Its `min_bytes` is compared with the whole array,
            and by default is that of the transport of all ranks.

    Raises:
        ArrayError: `inner` is `Reproducible`, or `inside` is neither `Exact` nor `Quantized`; or, when it is
            bound, the ranks have different settings, on all ranks.
        UnsupportedError: When it is bound, nodes differ in size, and `inner` divides by those that send an
            element. On all ranks.

    Source: the hierarchical mode of Bagua (Gan et al., arXiv 2107.01499); with fewer bits across nodes than
    inside them, ZeRO++ (Wang et al., arXiv 2306.10209).
    """

    inner: Average = field(default_factory=Exact)
    inside: Exact | Quantized = field(default_factory=Exact, kw_only=True)

    def __post_init__(self) -> None:
        check_average_argument("Hierarchical", self.inner, "inner")
        if not isinstance(self.inside, (Exact, Quantized)):
            hint = how_to_call(self.inside)
            raise ArrayError(
                f"Hierarchical: inside is {self.inside!r}, expected Exact() or Quantized(codec){hint}"
            )
        if isinstance(self.inside, Quantized) and self.inside.codec.random_seed is not None:
            raise ArrayError(
                f"Hierarchical: inside is {self.inside}, which rounds stochastically, so that nodes would "
                "end with different values; expected a codec that rounds to the nearest value"
            )
        if self.inner.is_reproducible:
            raise ArrayError(
                f"Hierarchical: inner is {self.inner}, but sums inside a node are not reproducible; use "
                f"{self.inner} alone, which the transport adds up inside nodes first where it can"
            )

    def __repr__(self) -> str:
        inside = "" if self.inside == Exact() else f", inside={self.inside!r}"
        return f"Hierarchical(inner={self.inner!r}{inside})"

    def bind(self, comm: Communicator, like: Array | None = None) -> InPlace:
        """See `Average.bind`."""
        known = set() if like is None else {_size_and_dtype(like)}
        nodes = _nodes(comm, f"inside={self.inside!r}{''.join(f', for {n} {dtype}' for n, dtype in known)}")
        if nodes.owners != nodes.largest and not self.inner.weighs:
            raise UnsupportedError(
                f"Hierarchical: inner is {self.inner}, which divides by the nodes that send an element, but "
                f'nodes have {nodes.owners} to {nodes.largest} ranks, by which they count; give divide="all"'
            )
        intra, inter = comm.by_node()
        # Ranks that own no chunk bind as well: `inner` may split, which is collective.
        across = self.inner.bind(inter)
        return _Levels(self, comm, intra, across, nodes, known)

    @property
    def keeps_zeros(self) -> bool:  # type: ignore[override]
        """Whether both levels do."""
        return self.inner.keeps_zeros and self.inside.keeps_zeros

    @property
    def has_residual(self) -> bool:  # type: ignore[override]
        """Whether `inner` has one, of a chunk."""
        return self.inner.has_residual

    @property
    def weighs(self) -> bool:  # type: ignore[override]
        """See `Average`; that of `inner`."""
        return self.inner.weighs

    def bind_shards(self, comm: Communicator, tensors: Sequence[tuple[int, int]] | None = None) -> Shards:
        """Return a function that averages an array of which each rank keeps a chunk: a reduce-scatter.

        Collective. The steps are: a reduce-scatter within the node by `inside`, one by `inner` among ranks of
        equal local rank, and, if nodes differ in size, messages within the larger nodes. Each node sends 1 / L of
        the bytes of its ranks, where L is the size of the smallest node. With an `inner` other than `Exact` and
        `Quantized`, the whole array is averaged on all ranks.

        Raises:
            ArrayError: `inner` has a residual; or the ranks have different settings, on all ranks.

        Source: qgZ of ZeRO++ (Wang et al., arXiv 2306.10209).
        """
        if self.has_residual:
            raise self._refusal("bind_shards")
        if not isinstance(self.inner, (Exact, Quantized)):
            return super().bind_shards(comm, tensors)
        return _ShardsByNode(comm, self, _nodes_with_shards(comm, repr(self)))

    def bind_gather(self, comm: Communicator) -> Gathers:
        """Return a function that gathers the chunks of all ranks, to the same bytes on every rank: an allgather.

        Collective. The steps are: messages within nodes that are larger than the smallest one, an allgather among
        ranks of equal local rank, and one within each node. So each chunk enters a node once, not once for each
        rank.

        Each chunk is encoded once, by its rank, and these bytes are forwarded: by the codec of `inner`, or, if
        that is exact, by the codec of `inside`. Every rank decodes all chunks, its own too. Two codecs would
        round twice, and not send fewer bytes.

        Raises:
            ArrayError: `inner` is neither `Exact` nor `Quantized`; or the ranks have different settings, on all
                ranks.

        >>> from bagua_comm.testing import run_ranks
        >>> def body(comm):
        ...     gather = Hierarchical(Quantized()).bind_gather(comm)
        ...     return gather(np.array([0, 255 * comm.rank], np.float32), np.empty(6, np.float32))
        >>> run_ranks(3, body, nodes=["a", "a", "b"])[2]
        array([  0.,   0.,   0., 255.,   0., 510.], dtype=float32)
        """
        if not isinstance(self.inner, (Exact, Quantized)):
            raise self._refusal("bind_gather")
        method = self.inside if isinstance(self.inner, Exact) else self.inner
        return _GatherByNode(comm, method, _nodes_with_shards(comm, repr(self)))

    def check(self, dtype: str) -> None:
        """Accept the dtypes of `inner` and `inside`."""
        self.inner.check(dtype)
        self.inside.check(dtype)

    def _refusal(self, call: str) -> ArrayError:
        return ArrayError(f"{call}: {self}: inner is {self.inner}, expected Exact() or Quantized(codec)")


class _Nodes(NamedTuple):
    """Sizes of the nodes, and which chunks of shards the ranks of this node add up.

    The chunk of each rank is added up, in every node, by one of the first L ranks, where L is the size of the
    smallest node: by the one whose local rank is that of the chunk's rank modulo L.
    """

    owners: int
    """Ranks in the smallest node, L; the number of ranks that own a chunk in each node."""
    largest: int
    """Ranks in the largest node."""
    nodes: int
    """Number of nodes."""
    places: list[list[int]]
    """The node of each rank, and its rank in there."""
    order: Sequence[int] = ()
    """All shards: first those that the local rank 0 adds up, by node; then those of local rank 1, and so on."""
    inside: Sequence[int] = ()
    """Number of shards that each rank of this node adds up; 0 beyond the first L."""
    across: Sequence[int] = ()
    """Of those of this rank, the number that belong to each node; empty beyond the first L."""

    def peers(self, intra: Communicator) -> range:
        """Return the ranks of this node, other than this one, whose shards this rank adds up."""
        return range(intra.rank + self.owners, intra.size, self.owners)


def _nodes(comm: Communicator, settings: str) -> _Nodes:
    """Return the nodes; raise on all ranks if their settings differ. Collective."""
    mine = [comm.node, comm.local_rank, comm.local_size, zlib.crc32(settings.encode())]
    table = comm.allgather(np.array(mine))
    if len(set(table[:, 3].tolist())) > 1:
        rows: list[str] = comm.allgather_object(settings)
        rank = next(r for r, each in enumerate(rows) if each != rows[0])
        raise ArrayError(f"Hierarchical: ranks differ: rank 0 has {rows[0]}, but rank {rank} has {rows[rank]}")
    places, sizes = table[:, :2].tolist(), table[:, 2]
    return _Nodes(int(sizes.min()), int(sizes.max()), len({node for node, _ in places}), places)


def _nodes_with_shards(comm: Communicator, settings: str) -> _Nodes:
    """Return the nodes, and which shards the ranks of this one add up; see `_nodes`. Collective."""
    nodes = _nodes(comm, settings)
    owners, places, order = nodes.owners, nodes.places, list[int]()
    inside, across = [0] * comm.local_size, list[int]()
    for local in range(owners):
        # In the order of the communicator across nodes: of its ranks.
        owned = [(r, node) for r, (node, place) in enumerate(places) if place % owners == local]
        in_order = [node for node, place in places if place == local]
        by_node = [[r for r, node in owned if node == each] for each in in_order]
        order += [r for ranks in by_node for r in ranks]
        inside[local] = sum(map(len, by_node))
        if local == comm.local_rank:
            across = [*map(len, by_node)]
    return nodes._replace(order=order, inside=inside, across=across)


@dataclass
class _Levels:
    """A bound `Hierarchical`."""

    settings: Hierarchical
    comm: Communicator
    intra: Communicator
    across: InPlace = field(metadata={"chunk": "of nodes"})
    """`inner` among the ranks that own the same chunk; it may have state. If each rank is a node of its own, its
    chunk is the whole array, so that its state is as that of `inner` alone."""
    sizes: _Nodes
    compared: set[tuple[int, str]]
    """The sizes and dtypes of arrays that the ranks have compared."""

    def __call__(self, x: Array) -> Array:
        comm, intra, (owners, largest, nodes, *_) = self.comm, self.intra, self.sizes
        value = Call(comm, "Hierarchical", x).x
        self.settings.check(arrays.dtype_name(value.dtype))
        if comm.size == 1:
            return x
        flat = arrays.as_real(arrays.contiguous(value), "avg").reshape(-1)
        self._compare(value)
        codec = codec_for(self.settings.inside, comm, flat) if largest > 1 else None
        chunks = _padded(intra, flat, owners, -(-flat.size // owners))
        mine = chunks[intra.rank] if intra.rank < owners else chunks[:0]
        counts = [chunks.shape[1] if r < owners else 0 for r in range(intra.size)]
        # Also of empty chunks: those of another rank may not be empty.
        reduce_scatter(intra, chunks.reshape(-1), mine.reshape(-1), op="avg", codec=codec, counts=counts)
        if owners == largest:
            self.across(mine)
        elif intra.rank < owners:
            # The mean over ranks is the mean over nodes of: node mean x node size / mean node size. Weights
            # of at most 1 keep finite numbers finite.
            scale(mine, comm.local_size / largest)
            self.across(mine)
            scale(mine, largest * nodes / comm.size)
        elif hasattr(self.across, "skip"):  # it counts its means, on all ranks
            self.across.skip()
        if codec is not None and intra.size == 1 and mine.size:
            _round(intra, mine, codec)
        else:
            allgather(intra, mine, chunks, codec=codec, counts=counts)
        if not arrays.overlap(chunks, value):
            value[...] = chunks.reshape(-1)[: flat.size].view(value.dtype).reshape(value.shape)
        return x

    def _compare(self, x: Array) -> None:
        """Raise `CommMismatch` on all ranks unless they average arrays of one size and dtype. Collective.

        Different sizes may be equal once they are padded. The first arrays of a size and dtype are compared.
        """
        known = _size_and_dtype(x)
        if known not in self.compared:
            call = Call(self.comm, "Hierarchical", x.reshape(-1), average=self.settings).unchecked()
            call.run(lambda *_: call.compare())
            self.compared.add(known)


def _size_and_dtype(x: Array) -> tuple[int, str]:
    return x.size, arrays.dtype_name(x.dtype)


def _round(comm: Communicator, x: Array, codec: Codec) -> None:
    """Encode and decode `x` in place, as the ranks of other nodes do; this one is alone in its node."""
    steps = codec.steps(x.size, x)
    wire = comm.scratch.take("sent", (1, codec.wire_nbytes(x.size, x.dtype)), np.uint8, like=x)
    steps.encode(x[None], wire)
    steps.decode(wire, x[None])


def _padded(comm: Communicator, flat: Array, rows: int, length: int) -> Array:
    """Return `flat` as (rows, length), copied to zero-padded scratch memory of `comm` if it is shorter."""
    if flat.size == rows * length:
        return flat.reshape(rows, length)
    padded = comm.scratch.take("padded", (rows * length,), flat.dtype, like=flat)
    padded[: flat.size] = flat
    padded[flat.size :] = 0
    return padded.reshape(rows, length)


# Shards ---------------------------------------------------------------------------------------------


@dataclass
class _ShardsByNode:
    """A reduce-scatter in two levels; made by `Hierarchical.bind_shards`."""

    comm: Communicator
    settings: Hierarchical
    nodes: _Nodes

    def __call__(self, x: AnyArray, out: AnyArray, op: LinearOp) -> AnyArray:
        """See `Shards`."""
        whole, chunk = check_shards("Hierarchical", ("x", x), ("out", out), self.comm.size, op)
        self.settings.check(arrays.dtype_name(whole.dtype))  # else a rank waits for one that raises later
        self._reduce(whole, chunk, op)
        return out

    def _reduce(self, x: Array, out: Array, op: LinearOp) -> None:
        comm, (intra, inter), nodes = self.comm, self.comm.by_node(), self.nodes
        m = out.size
        rows = x.reshape(comm.size, m)
        if nodes.order != sorted(nodes.order):
            sorted_rows = comm.scratch.take("by node", rows.shape, x.dtype, like=x)
            for place, rank in enumerate(nodes.order):
                sorted_rows[place] = rows[rank]
            rows = sorted_rows
        counts = [m * count for count in nodes.inside]
        mine = comm.scratch.take("mine", (counts[intra.rank],), x.dtype, like=x)
        codec = codec_for(self.settings.inside, comm, x) if nodes.largest > 1 else None
        reduce_scatter(intra, rows.reshape(-1), mine, op="avg", codec=codec, counts=counts)
        weighted = comm.size != nodes.largest * nodes.nodes
        if nodes.across:
            # See `Hierarchical`: the mean of node means, weighted by the sizes of the nodes.
            if weighted:
                scale(mine, comm.local_size / nodes.largest)
            kept = out if nodes.across[inter.rank] == 1 else mine[: m * nodes.across[inter.rank]]
            kept = self._across(inter, mine, kept, [m * count for count in nodes.across])
            if weighted or op == "sum":
                factor = nodes.largest * nodes.nodes / comm.size
                scale(kept, factor * (comm.size if op == "sum" else 1))
            if kept is not out:
                out[...] = kept[:m]
                peers = enumerate(nodes.peers(intra), 1)
                sends = [(r, kept[i * m : (i + 1) * m], UNLABELLED) for i, r in peers]
                intra.exchange(sends, [])
        else:
            intra.recv(out, source=intra.rank % nodes.owners, tag=UNLABELLED)

    def _across(self, inter: Communicator, x: Array, out: Array, counts: list[int]) -> Array:
        """Average the partial means of all nodes; keep this rank's chunks."""
        own = sum(counts[: inter.rank])
        target = out if not arrays.overlap(x, out) else x[own : own + counts[inter.rank]]
        codec = codec_for(self.settings.inner, inter, x)
        return reduce_scatter(inter, x, target, op="avg", codec=codec, counts=counts)


@dataclass
class _GatherByNode:
    """An allgather in two levels; made by `Hierarchical.bind_gather`."""

    comm: Communicator
    method: Exact | Quantized
    nodes: _Nodes

    def __call__(self, x: AnyArray, out: AnyArray) -> AnyArray:
        """See `Gathers`."""
        whole, chunk = check_shards("Hierarchical", ("out", out), ("x", x), self.comm.size)
        self._gather(chunk.reshape(-1), whole)
        return out

    def _gather(self, x: Array, out: Array) -> None:
        comm, order = self.comm, self.nodes.order
        results = out.reshape(comm.size, x.size)
        if comm.size == 1:
            results[...] = x
            return
        codec = codec_for(self.method, comm, out) if out.size else None  # those of another rank may not be empty
        with comm.tracer.span("Hierarchical gather", bytes=out.nbytes, codec=str(codec)):
            sent, wire, dtype = x, x.size, x.dtype
            if codec is not None:
                self.method.check(arrays.dtype_name(dtype))
                steps, wire, dtype = (
                    codec.steps(x.size, x),
                    codec.wire_nbytes(x.size, x.dtype),
                    np.dtype(np.uint8),
                )
                sent = comm.scratch.take("sent", (wire,), dtype, like=x)
                draws = next_draws(comm, codec.random_seed)
                steps.encode(x[None], sent[None], **({} if draws is None else {"draws": draws}))
            rows = comm.scratch.take("received", (comm.size, wire), dtype, like=x)
            self._move(sent, rows)
            for place, rank in enumerate(order):
                if codec is None:
                    results[rank] = rows[place]
                else:
                    steps.decode(rows[place : place + 1], results[rank : rank + 1])

    def _move(self, x: Array, rows: Array) -> None:
        """Gather `x`, (n,), of all ranks in `rows`, (p, n), in the order of `_Nodes.order`. Collective."""
        (intra, inter), nodes, n = self.comm.by_node(), self.nodes, x.size
        start = sum(nodes.inside[: intra.rank])
        mine = rows[start : start + nodes.inside[intra.rank]]
        if nodes.across:
            before = sum(nodes.across[: inter.rank])
            own = mine[before : before + nodes.across[inter.rank]]
            own[0] = x
            if len(own) > 1:
                peers = enumerate(nodes.peers(intra), 1)
                intra.exchange([], [(r, own[i], UNLABELLED) for i, r in peers])
            counts = [n * count for count in nodes.across]
            allgather(inter, own.reshape(-1), mine.reshape(-1), codec=None, counts=counts)
        else:
            intra.send(x, dest=intra.rank % nodes.owners, tag=UNLABELLED)
        counts = [n * count for count in nodes.inside]
        allgather(intra, mine.reshape(-1), rows.reshape(-1), codec=None, counts=counts)
