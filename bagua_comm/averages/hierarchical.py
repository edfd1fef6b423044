"""The hierarchical mean: inside nodes first, then across them."""

from __future__ import annotations

import zlib
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from .. import arrays, kernels
from ..arrays import Array
from ..codecs import Codec
from ..comm import Communicator
from ..comm.call import Call
from ..errors import ArrayError, how_to_call
from .base import Average, Exact, InPlace, check_average_argument
from .hierarchical_shards import GatherByNode, ShardsByNode, chunks_by_node
from .quantized import Quantized
from .quantized_shards import allgather, codec_for, quantized_reduce_scatter
from .reproducible import Reproducible


@dataclass(frozen=True)
class Hierarchical:
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
        if isinstance(self.inner, Reproducible):
            raise ArrayError(
                f"Hierarchical: inner is {self.inner}, but sums inside a node are not reproducible; use "
                f"{self.inner} alone, which the transport adds up inside nodes first where it can"
            )

    def __repr__(self) -> str:
        inside = "" if self.inside == Exact() else f", inside={self.inside!r}"
        return f"Hierarchical(inner={self.inner!r}{inside})"

    def bind(self, comm: Communicator, like: Array | None = None) -> InPlace:
        """See `Average.bind`."""
        sizes = _sizes(comm, f"inside={self.inside!r}")
        intra, inter = comm.by_node()
        # Ranks that own no chunk bind as well: `inner` may split, which is collective.
        across = self.inner.bind(inter)
        return _Levels(self, comm, intra, across, sizes)

    def bind_shards(self, comm: Communicator) -> ShardsByNode:
        """Return a function that averages an array of which each rank keeps a chunk: a reduce-scatter.

        Collective. It takes `x`, (p * m,), and `out`, (m,), both contiguous, and "avg" or "sum". The steps are: a
        reduce-scatter within the node by `inside`, one by `inner` among ranks of equal local rank, and, if nodes
        differ in size, messages within the larger nodes. Each node sends 1 / L of the bytes of its ranks, where L
        is the size of the smallest node.

        Raises:
            ArrayError: `inner` is neither `Exact` nor `Quantized`; or the ranks have different settings, on all
                ranks.

        Source: qgZ of ZeRO++ (Wang et al., arXiv 2306.10209).
        """
        inner = self._stateless("bind_shards")
        _sizes(comm, repr(self))
        return ShardsByNode(comm, inner, self.inside, chunks_by_node(comm))

    def bind_gather(self, comm: Communicator) -> GatherByNode:
        """Return a function that gathers the chunks of all ranks, to the same bytes on every rank: an allgather.

        Collective. It takes `x`, (m,), and `out`, (p * m,), both contiguous; `x` may be this rank's part of
        `out`. The steps are: messages within nodes that are larger than the smallest one, an allgather among
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
        inner = self._stateless("bind_gather")
        _sizes(comm, repr(self))
        return GatherByNode(comm, self.inside if isinstance(inner, Exact) else inner, chunks_by_node(comm))

    def check(self, dtype: str) -> None:
        """Accept the dtypes of `inner` and `inside`."""
        self.inner.check(dtype)
        self.inside.check(dtype)

    def _stateless(self, call: str) -> Exact | Quantized:
        if not isinstance(self.inner, (Exact, Quantized)):
            raise ArrayError(f"{call}: inner is {self.inner}, expected Exact() or Quantized(codec)")
        return self.inner


class _Sizes(NamedTuple):
    """Sizes of the nodes."""

    owners: int
    """Ranks in the smallest node; the number of ranks that own a chunk in each node."""
    largest: int
    """Ranks in the largest node."""
    nodes: int
    """Number of nodes."""


def _sizes(comm: Communicator, settings: str) -> _Sizes:
    """Return the sizes of the nodes; raise on all ranks if their settings differ. Collective."""
    table = comm.allgather(np.array([comm.node, comm.local_size, zlib.crc32(settings.encode())]))
    if len(set(table[:, 2].tolist())) > 1:
        rows: list[str] = comm.allgather_object(settings)
        rank = next(r for r, each in enumerate(rows) if each != rows[0])
        raise ArrayError(f"Hierarchical: ranks differ: rank 0 has {rows[0]}, but rank {rank} has {rows[rank]}")
    return _Sizes(int(table[:, 1].min()), int(table[:, 1].max()), len(set(table[:, 0].tolist())))


@dataclass
class _Levels:
    """A bound `Hierarchical`."""

    settings: Hierarchical
    comm: Communicator
    intra: Communicator
    across: InPlace = field(metadata={"chunk": "of nodes"})
    """`inner` among the ranks that own the same chunk; it may have state. If each rank is a node of its own, its
    chunk is the whole array, so that its state is as that of `inner` alone."""
    sizes: _Sizes

    def __call__(self, x: Array) -> Array:
        comm, intra, (owners, largest, nodes) = self.comm, self.intra, self.sizes
        value = Call(comm, "Hierarchical", x).x
        self.settings.check(arrays.dtype_name(value.dtype))
        if comm.size == 1:
            return x
        flat = arrays.as_real(arrays.contiguous(value), "avg").reshape(-1)
        codec = codec_for(self.settings.inside, comm, flat) if largest > 1 else None
        chunks = _padded(intra, flat, owners, -(-flat.size // owners))
        mine = chunks[intra.rank] if intra.rank < owners else chunks[:0]
        counts = [chunks.shape[1] if r < owners else 0 for r in range(intra.size)]
        self._reduce(chunks, mine, counts, codec)
        if owners == largest:
            self.across(mine)
        elif intra.rank < owners:
            # The mean over ranks is the mean over nodes of: node mean x node size / mean node size. Weights
            # of at most 1 keep finite numbers finite.
            _scale(mine, comm.local_size / largest)
            self.across(mine)
            _scale(mine, largest * nodes / comm.size)
        elif hasattr(self.across, "skip"):  # it counts its means, on all ranks alike
            self.across.skip()
        if codec is not None and intra.size == 1 and mine.size:
            _round(intra, mine, codec)
        else:
            allgather(intra, mine, chunks, codec=codec, counts=counts)
        if not arrays.overlap(chunks, value):
            value[...] = chunks.reshape(-1)[: flat.size].view(value.dtype).reshape(value.shape)
        return x

    def _reduce(self, chunks: Array, mine: Array, counts: list[int], codec: Codec | None) -> None:
        """Average the chunks of the node's ranks; keep this rank's in `mine`, if it owns one. Collective."""
        intra, is_even = self.intra, min(counts) == max(counts)
        if codec is not None:
            even = None if is_even else counts
            quantized_reduce_scatter(
                intra, chunks.reshape(-1), mine.reshape(-1), op="avg", codec=codec, counts=even
            )
        elif self.sizes.owners == self.sizes.largest:
            intra.reduce_scatter(chunks.reshape(-1), out=mine, op="avg")
        else:
            parts = _exchanged(intra, chunks, counts)  # also empty ones: those of another rank may not be empty
            if mine.size:
                kernels.of(mine).reduce_rows(parts, mine, "avg")


def _scale(x: Array, factor: float) -> None:
    """Multiply `x` by `factor`, in place."""
    if x.size:
        kernels.of(x).scale(x, factor)


def _round(comm: Communicator, x: Array, codec: Codec) -> None:
    """Encode and decode `x` in place, as the ranks of other nodes do; this one is alone in its node."""
    steps = codec.steps(x.size, x)
    wire = comm.scratch.take("sent", (1, codec.wire_nbytes(x.size, x.dtype)), np.uint8, like=x)
    steps.encode(x[None], wire)
    steps.decode(wire, x[None])


def _exchanged(comm: Communicator, chunks: Array, counts: list[int]) -> Array:
    """Send chunk j to rank j if counts[j] > 0; return this rank's own chunk of every rank, (p, m)."""
    incoming = [counts[comm.rank]] * comm.size
    parts = comm.scratch.take("parts", (comm.size, counts[comm.rank]), chunks.dtype, like=chunks)
    comm.alltoall(chunks, parts, counts=counts, out_counts=incoming)
    return parts


def _padded(comm: Communicator, flat: Array, rows: int, length: int, *, copy: bool = False) -> Array:
    """Return `flat` as (rows, length), copied to zero-padded scratch memory of `comm` if it is shorter."""
    if flat.size == rows * length and not copy:
        return flat.reshape(rows, length)
    padded = comm.scratch.take("padded", (rows * length,), flat.dtype, like=flat)
    padded[: flat.size] = flat
    padded[flat.size :] = 0
    return padded.reshape(rows, length)
