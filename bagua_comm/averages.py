"""Averages: what "combine the ranks' arrays" may mean, and the quantized allreduce.

    Exact()                     the mean, in the array's own precision
    Quantized(codec)            the mean, through a lossy codec: fewer bytes on the wire
    ErrorFeedback(inner)        `inner`, a quantized mean, with what it lost added to the next one
    Hierarchical(inner)         reduce inside each node, `inner` across nodes, gather inside each node

They nest: `Hierarchical(Quantized(MinMaxUInt8()))` quantizes only what crosses between nodes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol, TypeAlias

import numpy as np

from . import arrays, kernels
from .arrays import FLOATS, Array
from .codecs import Codec, MinMaxUInt8
from .codecs.base import check_aligned, check_codec_argument
from .comm import Communicator, Operation, finished
from .errors import ArrayError, UnsupportedError
from .transports.base import LAG, Transport, Wait, cut, pipeline

CODED_PIECE_BYTES = 1 << 17
"""What is coded, and sent to a peer, at a time, where a transport works in pieces."""

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

    Args:
        codec: What travels.
        min_bytes: Smaller arrays are averaged exactly, on all ranks, and the trace says so; None for the size
            from which quantizing pays on the transport (`Transport.quantize_bytes`), 0 to quantize all.

    >>> from bagua_comm.testing import run_ranks
    >>> mean = Quantized(MinMaxUInt8())
    >>> run_ranks(2, lambda comm: mean.bind(comm)(np.array([0, 1, 255 * comm.rank], np.float32)))[1]
    array([  0. ,   1. , 127.5], dtype=float32)
    """

    codec: Codec = field(default_factory=MinMaxUInt8)
    min_bytes: int | None = None

    def __post_init__(self) -> None:
        check_codec_argument("Quantized", self.codec)
        if self.min_bytes is not None and (type(self.min_bytes) is not int or self.min_bytes < 0):
            raise ArrayError(f"Quantized: min_bytes is {self.min_bytes!r}, expected None or an int of at least 0")

    def bind(self, comm: Communicator) -> InPlace:
        """See `Average.bind`."""

        def average(x: Array) -> Array:
            value, transport = comm.accept("Quantized", "x", x)
            self.check(arrays.dtype_name(value.dtype))
            least = transport.quantize_bytes if self.min_bytes is None else self.min_bytes
            if value.nbytes >= least:
                return quantized_allreduce(comm, x, out=x, codec=self.codec, op="avg")
            with comm.tracer.span("exact: small", bytes=value.nbytes, min_bytes=least):
                return comm.allreduce(x, out=x, op="avg")

        return average

    def check(self, dtype: str) -> None:
        """The dtypes of the codec."""
        check_codec_argument("Quantized", self.codec, dtype)


@dataclass
class _Feedback:
    """A bound `ErrorFeedback`, with what it keeps."""

    comm: Communicator
    codec: Codec
    residual: Array | None = None

    def __call__(self, x: Array) -> Array:
        if self.residual is None:
            self.residual = arrays.zeros_like(x)
        return quantized_allreduce(self.comm, x, out=x, codec=self.codec, op="avg", residual=self.residual)


@dataclass(frozen=True)
class ErrorFeedback:
    """A quantized mean that makes up for what it lost: the error of one mean is added to the next.

    Over time nothing is lost: the sum of the means and the mean of the ranks' residuals is the sum of the exact
    means. Both quantizations are made up for, that of a rank's own array and that of the mean. Costs an array
    like the averaged one, and two more decodings. An element whose error is not finite starts anew at zero.

    Each bound average serves one array; algorithms bind one for every bucket, and checkpoints hold the residuals.
    Don't combine it with dynamic loss scaling, which changes the unit of the gradients.

    Source: Seide et al., "1-Bit Stochastic Gradient Descent", Interspeech 2014; Karimireddy et al., "Error
    Feedback Fixes SignSGD", arXiv 1901.09847; both ways: Tang et al., "DoubleSqueeze", arXiv 1905.05957.

    >>> from bagua_comm.testing import run_ranks
    >>> def body(comm):
    ...     mean, x = ErrorFeedback(Quantized(MinMaxUInt8())).bind(comm), np.array([0, 0.3, 255], np.float32)
    ...     return (sum(mean(x.copy()) for _ in range(10)) / 10).round(3)
    >>> run_ranks(2, body)[0]
    array([  0. ,   0.3, 255. ], dtype=float32)
    """

    inner: Quantized = field(default_factory=Quantized)

    def __post_init__(self) -> None:
        if not isinstance(self.inner, Quantized):
            raise ArrayError(f"ErrorFeedback: inner is {self.inner!r}, expected Quantized(codec)")
        if self.inner.min_bytes is not None:
            raise ArrayError(f"ErrorFeedback: inner has min_bytes={self.inner.min_bytes}; it quantizes all sizes")

    def bind(self, comm: Communicator) -> InPlace:
        """See `Average.bind`."""
        return _Feedback(comm, self.inner.codec)

    def check(self, dtype: str) -> None:
        """The dtypes of the codec."""
        self.inner.check(dtype)


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
        nodes = len(set(comm.allgather(np.array(comm.node)).tolist()))
        return _Levels(self, comm, intra, across, _Sizes(int(sizes.min()), int(sizes.max()), nodes))

    def check(self, dtype: str) -> None:
        """What `inner` takes."""
        self.inner.check(dtype)


class _Sizes(NamedTuple):
    """Ranks in the smallest node, each of which owns a chunk there; ranks in the largest; number of nodes."""

    owners: int
    largest: int
    nodes: int


@dataclass
class _Levels:
    """A bound `Hierarchical`."""

    settings: Hierarchical
    comm: Communicator
    intra: Communicator
    across: InPlace
    """`inner` among the ranks that own the same chunk; may keep state of its own."""
    sizes: _Sizes

    def __call__(self, x: Array) -> Array:
        comm, intra, (owners, largest, nodes) = self.comm, self.intra, self.sizes
        value, _ = comm.accept("Hierarchical", "x", x)
        self.settings.check(arrays.dtype_name(value.dtype))
        if comm.size == 1 or value.size == 0:
            return x
        flat = arrays.contiguous(value).reshape(-1)
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
                # The mean of the ranks is the mean of the nodes, each times its size by the mean size. Weights
                # of at most 1 keep what is finite finite.
                kernels.of(mine).reduce_rows(parts, mine, "avg")
                kernels.of(mine).scale(mine, comm.local_size / largest)
                self.across(mine)
                kernels.of(mine).scale(mine, largest * nodes / comm.size)
            intra.allgatherv(mine, chunks, counts)
        if not arrays.overlap(chunks, value):
            value[...] = chunks.reshape(-1)[: value.size].reshape(value.shape)
        return x


_EIGHT_BITS = MinMaxUInt8()


def quantized_allreduce(
    comm: Communicator,
    x: Array,
    out: Array | None = None,
    *,
    codec: Codec | None = None,
    op: str = "sum",
    residual: Array | None = None,
) -> Array:
    """Sum or average `x` over all ranks through a lossy codec, to the same bytes on every rank.

    Collective. `x` has the same shape and dtype on every rank, any size and shape. `out` may be `x`.

    Over p ranks: encode p chunks -> alltoall -> combine (decode p, add in rank order in float32, encode
    one) -> allgather -> decode p; over a network in pieces, so that it does not wait for the codec. Every
    element is quantized twice, whatever p; each rank sends 2 (p - 1) / p of the encoded size. The owner of a
    chunk decodes its own wire bytes like everyone else. A single rank's array is returned as it is: nothing
    is sent, so nothing is rounded.

    Source: the compressed scatter-gather of Bagua (Gan et al., arXiv 2107.01499).

    Args:
        comm: The ranks.
        x: The array of this rank.
        out: Where to put the result; a new array if None.
        codec: What travels; `MinMaxUInt8()` if None.
        op: "sum" or "avg".
        residual: What earlier calls lost on this rank, a contiguous array like `x`: it is added to `x`, and
            becomes what this call loses. See `ErrorFeedback`.

    Raises:
        ArrayError: `out` or `residual` does not fit `x`, or `op` is something else; or one of them begins where a
            device cannot read its elements.
        UnsupportedError: The codec does not take this dtype, or no transport takes such an array.

    >>> from bagua_comm.testing import run_ranks
    >>> run_ranks(2, lambda comm: quantized_allreduce(comm, np.arange(3, dtype=np.float32)))[0]
    array([0., 2., 4.], dtype=float32)
    """
    call, p = "quantized_allreduce", comm.size
    codec = _EIGHT_BITS if codec is None else codec
    if op not in ("sum", "avg"):
        raise ArrayError(f'{call}: op is {op!r}, expected "sum" or "avg"')
    send, transport = comm.accept(call, "x", x)
    check_codec_argument(call, codec, arrays.dtype_name(send.dtype))
    out, target = comm.landing(call, out, send.shape, send)
    send = comm.in_place(call, send, target)
    if send is not target:
        send = arrays.contiguous(send)
    if residual is not None and (
        residual.shape != send.shape or residual.dtype != send.dtype or not arrays.is_contiguous(residual)
    ):
        raise ArrayError(
            f"{call}: residual is {residual.dtype}{residual.shape}, "
            f"expected a contiguous {send.dtype}{send.shape}"
        )
    if comm.check:
        comm.compare_calls(f"{call}({send.dtype.name}{list(send.shape)}, codec={codec}, op={op})")
    if p == 1 or send.size == 0:
        if not arrays.same_memory(send, target):
            target[...] = send
        return finished(out, target)
    check_aligned(call, "x", send)
    if send is not target:
        check_aligned(call, "out", target)
    if residual is not None:
        check_aligned(call, "residual", residual)

    outermost = comm.take_turn(
        call, lambda: f"{call}({send.dtype}, codec={codec}, op={op})"
    )  # from here on, scratch is in use
    try:
        _quantize_and_reduce(comm, transport, codec, send, target, op, residual)
    finally:
        comm.end_turn(outermost)
    return finished(out, target)


def _quantize_and_reduce(
    comm: Communicator,
    transport: Transport,
    codec: Codec,
    send: Array,
    target: Array,
    op: str,
    residual: Array | None,
) -> None:
    """`quantized_allreduce` of a contiguous array, whose arguments are checked. Collective."""
    call, p = "quantized_allreduce", comm.size
    count = -(-send.size // p)
    chunks = _padded(comm, send.reshape(-1), p, count, copy=residual is not None)
    results = target.reshape(p, count) if send.size == p * count else chunks
    if transport.piece_bytes is not None and codec.granule is not None and residual is None:
        pieces = cut(count, codec.wire_nbytes(count, send.dtype), CODED_PIECE_BYTES, codec.granule)
        detail = {"codec": codec, "op": op, "pieces": len(pieces)}
        with Operation(comm, call, transport, send, detail, compare=False):
            _reduce_in_pieces(comm, transport, codec, chunks, results, op, pieces)
    else:
        if residual is not None:
            kernels.of(send).add(send.reshape(-1), residual.reshape(-1), out=chunks.reshape(-1)[: send.size])
        with comm.tracer.span(call, codec=codec, op=op, bytes=send.nbytes):
            _reduce_at_once(comm, transport, codec, chunks, results, op, residual)
    if send.size != p * count:
        target.reshape(-1)[...] = chunks.reshape(-1)[: send.size]


def _reduce_at_once(
    comm: Communicator,
    transport: Transport,
    codec: Codec,
    chunks: Array,
    results: Array,
    op: str,
    residual: Array | None,
) -> None:
    """Encode, alltoall, combine, allgather, decode: `chunks` to `results`, (p, m)."""
    p, count = chunks.shape
    shape = (p, codec.wire_nbytes(count, chunks.dtype))
    wire = comm.scratch.take("wire", shape, np.uint8, like=chunks)
    received = comm.scratch.take("received", shape, np.uint8, like=chunks)
    combined = comm.scratch.take("combined", (1, shape[1]), np.uint8, like=chunks)
    encode, decode, combine = codec.unchecked

    encode(chunks, wire)
    with Operation(comm, "alltoall", transport, wire, {}, compare=False):
        transport.alltoall(wire, received)  # row i is rank i's chunk `rank`
    combine(received, combined, op, count, chunks.dtype)
    if residual is not None:
        _keep_loss(comm, codec, chunks, wire, received, combined, op, residual.reshape(-1))
    with Operation(comm, "allgather", transport, combined, {}, compare=False):
        transport.allgather(combined, wire)  # row i is the combined chunk i
    decode(wire, results)


def _reduce_in_pieces(
    comm: Communicator,
    transport: Transport,
    codec: Codec,
    chunks: Array,
    results: Array,
    op: str,
    pieces: Sequence[slice],
) -> None:
    """The same, to the same results, piece by piece: one is coded while others are on their way.

    Encoding goes ahead; combining follows a few pieces behind it, and decoding a few behind that.
    """
    rank, others, dtype = comm.rank, transport.others(), chunks.dtype
    transport.agree_on_call(f"quantized_allreduce(codec={codec}, op={op})", chunks)
    p, ring = comm.size, min(LAG + 1, len(pieces))
    nbytes = [codec.wire_nbytes(piece.stop - piece.start, dtype) for piece in pieces]
    sent, received, combined = comm.scratch.take("pieces", (3, ring, p * max(nbytes)), np.uint8, like=chunks)
    waits: list[Wait] = []
    run = codec.unchecked

    def rows(table: Array, i: int) -> Array:
        view: Array = table[i % ring, : p * nbytes[i]].reshape(p, nbytes[i])
        return view

    def encode(i: int) -> None:
        to, into = rows(sent, i), rows(received, i)
        for peer in (*others, rank):
            # What this rank keeps lies with what it receives.
            run.encode(chunks[peer, None, pieces[i]], (into if peer == rank else to)[peer, None])
        waits.append(
            transport.begin([(peer, to[peer]) for peer in others], [(peer, into[peer]) for peer in others])
        )

    def combine(i: int) -> None:
        waits[i]()
        table, count = rows(combined, i), pieces[i].stop - pieces[i].start
        run.combine(rows(received, i), table[rank, None], op, count, dtype)
        waits[i] = transport.begin(
            [(peer, table[rank]) for peer in others], [(peer, table[peer]) for peer in others]
        )

    def decode(i: int) -> None:
        waits[i]()
        for row, out in zip(rows(combined, i), results[:, pieces[i]], strict=True):
            run.decode(row[None], out[None])

    pipeline(len(pieces), encode, combine, decode)


def _keep_loss(
    comm: Communicator,
    codec: Codec,
    chunks: Array,
    wire: Array,
    received: Array,
    combined: Array,
    op: str,
    residual: Array,
) -> None:
    """Write to `residual` what quantizing lost: of this rank's chunks, and of the combined chunk it owns."""
    run, flat, decode = kernels.of(chunks), chunks.reshape(-1), codec.unchecked.decode
    decoded = comm.scratch.take("decoded", chunks.shape, chunks.dtype, like=chunks)
    decode(wire, decoded)
    run.loss(flat, decoded.reshape(-1), 1, out=flat)

    total = comm.scratch.take("total", chunks.shape[1:], chunks.dtype, like=chunks)
    kept = comm.scratch.take("kept", (1, *chunks.shape[1:]), chunks.dtype, like=chunks)
    decode(received, decoded)
    run.reduce_rows(decoded, total, op)
    decode(combined, kept)
    # The next mean divides by p what this rank adds to it.
    run.loss(total, kept[0], comm.size if op == "avg" else 1, out=total)
    run.add(chunks[comm.rank], total, out=chunks[comm.rank])
    residual[...] = flat[: residual.size]


def _exchanged(comm: Communicator, chunks: Array, counts: list[int]) -> Array:
    """Send chunk j to rank j, where counts[j] is not 0: this rank's own chunk from every rank, (p, m)."""
    incoming = [counts[comm.rank]] * comm.size
    parts = comm.scratch.take("parts", (comm.size, counts[comm.rank]), chunks.dtype, like=chunks)
    comm.alltoallv(chunks, counts, parts, incoming)
    return parts


def _padded(comm: Communicator, flat: Array, rows: int, length: int, *, copy: bool = False) -> Array:
    """View `flat` as (rows, length), or copy it to zero-padded scratch of `comm` if it is shorter."""
    if flat.size == rows * length and not copy:
        return flat.reshape(rows, length)
    padded = comm.scratch.take("padded", (rows * length,), flat.dtype, like=flat)
    padded[: flat.size] = flat
    padded[flat.size :] = 0
    return padded.reshape(rows, length)
