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

    Each of the L owners of a node, L being the size of the smallest node, averages one chunk: reduce_scatter
    within the node, `inner` among the owners of a chunk, allgather within the node. Node means are
    weighted by the sizes of the nodes, so the result is the true mean on nodes of unequal size.
    """

    inner: Average = field(default_factory=Exact)

    def bind(self, comm: Communicator) -> InPlace:
        """See `Average.bind`."""
        intra, inter = comm.by_node()
        sizes = comm.allgather(np.array(comm.local_size))
        owners = int(sizes.min())
        is_owner = comm.local_rank < owners
        # Ranks that own nothing must bind as well: `inner` may split, and that is collective.
        across = self.inner.bind(inter)
        nodes = len(set(comm.allgather(np.array(comm.node)).tolist()))
        weight = comm.local_size * nodes / comm.size

        def average(x: Array) -> Array:
            if comm.size == 1:
                return x
            flat = x.reshape(-1)
            length = -(-flat.size // owners)
            # Row r belongs to local rank r; ranks beyond the owners get rows of padding.
            rows = _padded(intra, flat, intra.size, length)
            mine = rows[intra.rank]
            intra.reduce_scatter(rows.reshape(-1), out=mine, op="avg")
            if is_owner:
                if weight != 1:
                    kernels.of(x).scale(mine, weight)
                across(mine)
            intra.allgather(mine, out=rows)
            if not arrays.overlap(rows, flat):
                flat[...] = rows.reshape(-1)[: flat.size]
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
    if op not in ("sum", "avg"):
        raise ArrayError(f'{call}: op is {op!r}, expected "sum" or "avg"')
    send, _ = comm.accept(call, "x", x)
    if send.dtype.name not in codec.dtypes:
        wanted = ", ".join(sorted(codec.dtypes))
        raise UnsupportedError(f"{call}: {codec} cannot code {send.dtype.name}, only {wanted}")
    out, target = comm.landing(call, out, send.shape, send)
    send = arrays.contiguous(comm.in_place(call, send, target))
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


def _padded(comm: Communicator, flat: Array, rows: int, length: int) -> Array:
    """View `flat` as (rows, length), or copy it to zero-padded scratch of `comm` if it is shorter."""
    if flat.size == rows * length:
        return flat.reshape(rows, length)
    padded = comm.scratch.take("padded", (rows * length,), flat.dtype, like=flat)
    padded[: flat.size] = flat
    padded[flat.size :] = 0
    return padded.reshape(rows, length)
