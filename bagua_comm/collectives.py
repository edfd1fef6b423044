"""Averages: what "combine the ranks' arrays" may mean, and the quantized allreduce.

    Exact()                     the mean, in the array's own precision
    Quantized(codec)            the mean, through a lossy codec: fewer bytes on the wire
    Hierarchical(inner)         reduce inside each node, `inner` across nodes, gather inside each node

They nest: `Hierarchical(Quantized(MinMaxUInt8()))` quantizes only what crosses between nodes.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol, TypeAlias

import numpy as np

from . import arrays, kernels
from .arrays import FLOATS, Array
from .codecs import Codec, MinMaxUInt8
from .comm import Communicator, finished
from .errors import ArrayError, UnsupportedError

InPlace: TypeAlias = Callable[[Array], Array]
"""Averages an array in place, over all ranks, and returns it. Collective."""


class Average(Protocol):
    """A way to average; a frozen dataclass."""

    def bind(self, comm: Communicator) -> InPlace:
        """Prepare averaging over `comm`; the result averages a contiguous array in place.

        Collective.
        """

    def check(self, dtype: str) -> None:
        """Raise unless arrays of this dtype can be averaged.

        Raises:
            UnsupportedError: They can't.
        """


@dataclass(frozen=True)
class Exact:
    """The mean, in the array's own precision (float16 and bfloat16 are added in float32).

    >>> from bagua_comm.testing import run_ranks
    >>> run_ranks(2, lambda comm: Exact().bind(comm)(np.array([0.0, comm.rank])))
    [array([0. , 0.5]), array([0. , 0.5])]
    """

    def bind(self, comm: Communicator) -> InPlace:
        """See `Average.bind`."""
        return lambda x: comm.allreduce(x, out=x, op="avg")

    def check(self, dtype: str) -> None:
        """Every floating-point dtype will do."""
        if dtype not in FLOATS:
            raise UnsupportedError(f"{self} cannot average {dtype}")


@dataclass(frozen=True)
class Quantized:
    """The mean through a codec; see `quantized_allreduce`.

    >>> from bagua_comm.testing import run_ranks
    >>> mean = Quantized(MinMaxUInt8())
    >>> run_ranks(2, lambda comm: mean.bind(comm)(np.array([0, 1, 255 * comm.rank], np.float32)))[1]
    array([  0. ,   1. , 127.5], dtype=float32)
    """

    codec: Codec = field(default_factory=MinMaxUInt8)

    def __post_init__(self) -> None:
        if not isinstance(self.codec, Codec):
            raise ArrayError(f"Quantized: codec is {self.codec!r}, expected a Codec such as MinMaxUInt8()")

    def bind(self, comm: Communicator) -> InPlace:
        """See `Average.bind`."""
        return lambda x: quantized_allreduce(comm, x, out=x, codec=self.codec, op="avg")

    def check(self, dtype: str) -> None:
        """The dtypes of the codec."""
        if dtype not in self.codec.dtypes:
            wanted = ", ".join(sorted(self.codec.dtypes))
            raise UnsupportedError(f"{self} cannot average {dtype}, only {wanted}")


@dataclass(frozen=True)
class Hierarchical:
    """Average inside each node first, then across nodes through `inner`, then spread inside each node.

    Each of the L owners in a node, L being the size of the smallest node, averages one chunk: reduce_scatter
    within the node, `inner` among the owners of that chunk, allgather within the node. Node means are weighted
    by the sizes of the nodes, so the result is the true mean on nodes of unequal size; there, where chunks and
    ranks do not match, alltoallv and allgatherv take the place of the two.
    """

    inner: Average = field(default_factory=Exact)

    def bind(self, comm: Communicator) -> InPlace:
        """See `Average.bind`."""
        intra, inter = comm.by_node()
        # Ranks that own nothing must bind as well: `inner` may split, and that is collective.
        across = self.inner.bind(inter)
        sizes = comm.allgather(np.array(comm.local_size))
        owners = int(sizes.min())
        even = owners == int(sizes.max())
        nodes = len(set(comm.allgather(np.array(comm.node)).tolist()))
        # The mean of the ranks is the mean of the nodes, each times its size by the mean size. Weights of at
        # most 1 keep what is finite finite.
        weight = comm.local_size / int(sizes.max())
        correction = int(sizes.max()) * nodes / comm.size

        def average(x: Array) -> Array:
            value, _ = comm.accept("Hierarchical", "x", x)
            self.check(arrays.dtype_name(value.dtype))
            if comm.size == 1 or value.size == 0:
                return x
            flat = arrays.contiguous(value).reshape(-1)
            chunks = _padded(intra, flat, owners, -(-flat.size // owners))
            mine = chunks[intra.rank] if intra.rank < owners else chunks[:0]
            if even:
                intra.reduce_scatter(chunks.reshape(-1), out=mine, op="avg")
                across(mine)
                intra.allgather(mine, out=chunks)
            else:
                counts = [chunks.shape[1] if r < owners else 0 for r in range(intra.size)]
                parts = _exchanged(intra, chunks, counts)
                if mine.size:
                    kernels.of(mine).reduce_rows(parts, mine, "avg")
                    kernels.of(mine).scale(mine, weight)
                    across(mine)
                    kernels.of(mine).scale(mine, correction)
                intra.allgatherv(mine, chunks, counts)
            if not arrays.overlap(chunks, value):
                value[...] = chunks.reshape(-1)[: value.size].reshape(value.shape)
            return x

        return average

    def check(self, dtype: str) -> None:
        """What `inner` takes."""
        self.inner.check(dtype)


def quantized_allreduce(
    comm: Communicator,
    x: Array,
    out: Array | None = None,
    *,
    codec: Codec | None = None,
    op: str = "sum",
) -> Array:
    """Sum or average `x` over all ranks through a lossy codec, to the same bytes on every rank.

    Collective. `x` has the same shape and dtype on every rank, any size and shape. `out` may be `x`.

    Over p ranks: encode p chunks -> alltoall -> combine (decode p, add in rank order in float32, encode
    one) -> allgather -> decode p. Every element is quantized twice, whatever p; each rank sends
    2 (p - 1) / p of the encoded size. The owner of a chunk decodes its own wire bytes like everyone
    else. A single rank's array is returned as it is: nothing is sent, so nothing is rounded.

    Source: the compressed scatter-gather of Bagua (Gan et al., arXiv 2107.01499).

    Args:
        comm: The ranks.
        x: The array of this rank.
        out: Where to put the result; a new array if None.
        codec: What travels; `MinMaxUInt8()` if None.
        op: "sum" or "avg".

    Raises:
        ArrayError: `out` does not fit `x`, or `op` is something else.
        UnsupportedError: The codec does not take this dtype, or no transport takes such an array.

    >>> from bagua_comm.testing import run_ranks
    >>> run_ranks(2, lambda comm: quantized_allreduce(comm, np.arange(3, dtype=np.float32)))[0]
    array([0., 2., 4.], dtype=float32)
    """
    call, p = "quantized_allreduce", comm.size
    codec = MinMaxUInt8() if codec is None else codec
    if not isinstance(codec, Codec):
        raise ArrayError(f"{call}: codec is {codec!r}, expected a Codec such as MinMaxUInt8()")
    if op not in ("sum", "avg"):
        raise ArrayError(f'{call}: op is {op!r}, expected "sum" or "avg"')
    send, _ = comm.accept(call, "x", x)
    if send.dtype.name not in codec.dtypes:
        wanted = ", ".join(sorted(codec.dtypes))
        raise UnsupportedError(f"{call}: {codec} cannot code {send.dtype.name}, only {wanted}")
    out, target = comm.landing(call, out, send.shape, send)
    send = arrays.contiguous(comm.in_place(call, send, target))
    if comm.check:
        comm.compare_calls(f"{call}({send.dtype.name}{list(send.shape)}, codec={codec}, op={op})")
    if p == 1 or send.size == 0:
        target[...] = send
        return finished(out, target)

    with comm.tracer.span(call, codec=repr(codec), op=op, bytes=send.nbytes):
        count = -(-send.size // p)
        chunks = _padded(comm, send.reshape(-1), p, count)
        shape = (p, codec.wire_nbytes(count, send.dtype))
        wire = comm.scratch.take("wire", shape, np.uint8, like=send)
        received = comm.scratch.take("received", shape, np.uint8, like=send)
        combined = comm.scratch.take("combined", (1, shape[1]), np.uint8, like=send)

        codec.encode(chunks, wire)
        comm.alltoall(wire, received)  # row i is rank i's chunk `rank`
        codec.combine(received, combined, op=op, count=count, dtype=send.dtype)
        comm.allgather(combined, wire)  # row i is the combined chunk i
        if send.size == p * count:
            codec.decode(wire, target.reshape(p, count))
        else:
            codec.decode(wire, chunks)
            target.reshape(-1)[...] = chunks.reshape(-1)[: send.size]
    return finished(out, target)


def _exchanged(comm: Communicator, chunks: Array, counts: list[int]) -> Array:
    """Send chunk j to rank j, where counts[j] is not 0: this rank's own chunk from every rank, (p, m)."""
    incoming = [counts[comm.rank]] * comm.size
    parts = comm.scratch.take("parts", (comm.size, counts[comm.rank]), chunks.dtype, like=chunks)
    comm.alltoallv(chunks, counts, parts, incoming)
    return parts


def _padded(comm: Communicator, flat: Array, rows: int, length: int) -> Array:
    """View `flat` as (rows, length), or copy it to zero-padded scratch of `comm` if it is shorter."""
    if flat.size == rows * length:
        return flat.reshape(rows, length)
    padded = comm.scratch.take("padded", (rows * length,), flat.dtype, like=flat)
    padded[: flat.size] = flat
    padded[flat.size :] = 0
    return padded.reshape(rows, length)
