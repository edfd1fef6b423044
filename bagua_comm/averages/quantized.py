"""Averages: the ways to combine the ranks' arrays, and the quantized allreduce.

    Exact()                     the mean, in the array's own precision
    Reproducible()              the mean, to bits that depend on the addends alone; in `reproducible`
    Quantized(codec)            the mean, through a lossy codec: fewer bytes on the wire
    ErrorFeedback(inner)        `inner`, a quantized mean; what it loses is added to the next one
    Hierarchical(inner)         reduce inside each node, `inner` across nodes, gather inside each node

They nest: `Hierarchical(Quantized(MinMaxUInt8()))` quantizes only what crosses between nodes.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol, TypeAlias, cast

import numpy as np

from .. import arrays, kernels
from ..arrays import COMPLEX, FLOATS, A, AnyArray, Array, LinearOp, Scratch
from ..codecs import Codec, MinMaxUInt8
from ..codecs.base import check_aligned, check_codec_argument
from ..comm import Communicator
from ..comm.call import Call, as_argument, check_writable
from ..errors import ArrayError, UnsupportedError
from ..transports.base import Transport
from ..transports.flow import Rows
from ..transports.pipeline import LAG, Stages, cut, reduce_through
from .reproducible import Reproducible

_SETTLED = 256
"""How many kinds of quantized reductions a communicator keeps."""

InPlace: TypeAlias = Callable[[Array], Array]
"""Averages an array in place, over all ranks, and returns it. Collective."""


class Average(Protocol):
    """A way to average; a frozen dataclass."""

    def bind(self, comm: Communicator, like: Array | None = None) -> InPlace:
        """Prepare averaging over `comm`; the result averages a contiguous array in place.

        Collective. With `like`, everything that depends on the library, dtype and size of the arrays is prepared
        now, for arrays like that one; other arrays may still be averaged.
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

    def bind(self, comm: Communicator, like: Array | None = None) -> InPlace:
        """See `Average.bind`."""
        return lambda x: comm.allreduce(x, out=x, op="avg")

    def check(self, dtype: str) -> None:
        """Takes every floating-point and complex dtype."""
        if dtype not in FLOATS | COMPLEX:
            raise UnsupportedError(f"{self} cannot average {dtype}; expected a floating-point or complex dtype")


@dataclass(frozen=True)
class Quantized:
    """The mean through a codec; see `quantized_allreduce`.

    Args:
        codec: Encodes what travels.
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

    def bind(self, comm: Communicator, like: Array | None = None) -> InPlace:
        """See `Average.bind`."""
        mean = _Mean(comm, self.codec, self.min_bytes)
        if like is not None:
            mean.settle(like)
        return mean

    def check(self, dtype: str) -> None:
        """The dtypes of the codec."""
        check_codec_argument("Quantized", self.codec, dtype)


@dataclass(frozen=True)
class ErrorFeedback:
    """A quantized mean that makes up for what it lost: the error of one mean is added to the next.

    Over time nothing is lost: the sum of the means, plus the mean of the ranks' residuals, equals the sum of the
    exact means. This makes up for both quantizations: of a rank's own array, and of the mean. It costs one more
    array like the averaged one, and two more decodings. If the error of an element is not finite, its residual
    starts again at zero.

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
            raise ArrayError(
                f"ErrorFeedback: inner has min_bytes={self.inner.min_bytes}, expected None to quantize all"
            )

    def bind(self, comm: Communicator, like: Array | None = None) -> InPlace:
        """See `Average.bind`."""
        mean = _Mean(comm, self.inner.codec, 0)
        if like is not None:
            mean.settle(like)
        return _Feedback(mean)

    def check(self, dtype: str) -> None:
        """The dtypes of the codec."""
        self.inner.check(dtype)


@dataclass(frozen=True)
class Hierarchical:
    """Average inside each node first, then across nodes through `inner`, then spread inside each node.

    The array is cut into L chunks, where L is the size of the smallest node; in each node, L ranks own one chunk
    each. The steps are: reduce_scatter within the node, `inner` among the owners of the same chunk, allgather
    within the node. Node means are weighted by the sizes of the nodes, so the result is the true mean even if
    nodes differ in size. Some nodes then have more ranks than chunks, so alltoallv and allgatherv replace
    reduce_scatter and allgather.

    Use it where several ranks share the link of a node: each node sends one array over it, not one for each rank.
    `Hierarchical(Quantized())` is the first to try where that link is the bottleneck; with one rank on each node,
    it is `Quantized()` alone.
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
        # Ranks that own nothing must bind as well: `inner` may split, and that is collective.
        across = self.inner.bind(inter)
        sizes = comm.allgather(np.array(comm.local_size))
        nodes = len(set(comm.allgather(np.array(comm.node)).tolist()))
        return _Levels(self, comm, intra, across, _Sizes(int(sizes.min()), int(sizes.max()), nodes))

    def check(self, dtype: str) -> None:
        """Takes the dtypes of `inner`."""
        self.inner.check(dtype)


class _Sizes(NamedTuple):
    """Ranks in the smallest node, as many as own a chunk in each node; ranks in the largest; number of nodes."""

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
            intra.allgatherv(mine, chunks, counts)
        if not arrays.overlap(chunks, value):
            value[...] = chunks.reshape(-1)[: flat.size].view(value.dtype).reshape(value.shape)
        return x


_EIGHT_BITS = MinMaxUInt8()


def quantized_allreduce(
    comm: Communicator,
    x: A,
    out: A | None = None,
    *,
    codec: Codec | None = None,
    op: LinearOp = "sum",
    residual: AnyArray | None = None,
) -> A:
    """Sum or average `x` over all ranks through a lossy codec, to the same bytes on every rank.

    Collective. `x` has the same shape and dtype on every rank, any size and shape. `out` may be `x`.

    Over p ranks: encode p chunks -> alltoall -> combine (decode p, add in rank order in float32, encode
    one) -> allgather -> decode p; over a network in pieces, so that it does not wait for the codec. Every element
    is quantized twice, however many ranks there are; each rank sends 2 (p - 1) / p of the encoded size. The owner
    of a chunk decodes its own wire bytes like everyone else. A single rank's array is returned as it is: nothing
    is sent, so nothing is rounded.

    Source: the compressed scatter-gather of Bagua (Gan et al., arXiv 2107.01499).

    Args:
        comm: The ranks.
        x: The array of this rank.
        out: Where to put the result; a new array if None.
        codec: Encodes what travels; `MinMaxUInt8()` if None.
        op: "sum" or "avg".
        residual: What earlier calls lost on this rank, a contiguous array like `x`. It is added to `x`, and then
            overwritten with what this call loses. See `ErrorFeedback`.

    Raises:
        ArrayError: `out` or `residual` does not fit `x`; `op` is not "sum" or "avg"; or an array begins at an
            address from which a device cannot read its elements.
        UnsupportedError: The codec does not take this dtype, or no transport takes such an array.

    >>> from bagua_comm.testing import run_ranks
    >>> run_ranks(2, lambda comm: quantized_allreduce(comm, np.arange(3, dtype=np.float32)))[0]
    array([0., 2., 4.], dtype=float32)
    """
    codec = _EIGHT_BITS if codec is None else codec
    if op not in ("sum", "avg"):
        raise ArrayError(f'quantized_allreduce: op is {op!r}, expected "sum" or "avg"')
    call = _call(comm, x, codec, op)
    result: A = _reduction(call, codec, op).reduce(call, out, residual)
    return result


def _call(comm: Communicator, x: Array, codec: Codec, op: str) -> Call:
    """A `Call` of quantized_allreduce on `x`; checks that the codec takes its dtype."""
    call = Call(comm, "quantized_allreduce", x, codec=codec, op=op)
    check_codec_argument(call.name, codec, arrays.dtype_name(call.x.dtype))
    return call


def _reduction(call: Call, codec: Codec, op: str) -> _Reduction:
    """The reduction of arrays like that of the call, worked out for the first and kept by the communicator."""
    comm, x, transport = call.comm, call.x, call.transport
    key = codec, op, type(x), x.size, x.dtype, transport, transport.coded_piece_bytes(x.nbytes), kernels.of(x)
    try:
        found = comm.settled.get(key)
    except TypeError:  # a codec that is not frozen may change
        return _Reduction(comm, transport, codec, op, x)
    if found is not None:
        return cast(_Reduction, found)
    if len(comm.settled) >= _SETTLED:
        comm.settled.clear()
    comm.settled[key] = made = _Reduction(comm, transport, codec, op, x)
    return made


class _Mean:
    """A bound `Quantized`: what depends on an array's library, dtype and size is worked out once."""

    def __init__(self, comm: Communicator, codec: Codec, min_bytes: int | None) -> None:
        self._comm, self._codec, self._min_bytes = comm, codec, min_bytes
        self._reduction: _Reduction | None = None

    def settle(self, like: Array) -> None:
        """Work out how arrays like this one are averaged; others may be averaged all the same."""
        call = _call(self._comm, like, self._codec, "avg")
        if call.x.nbytes >= self._least(call.transport):
            self._reduction = _reduction(call, self._codec, "avg")

    def _least(self, transport: Transport) -> int:
        """Bytes of the smallest array that is quantized."""
        return transport.quantize_bytes if self._min_bytes is None else self._min_bytes

    def __call__(self, x: Array, residual: Array | None = None) -> Array:
        comm, codec, reduction = self._comm, self._codec, self._reduction
        if reduction is not None and reduction.fits(x):
            call = Call.of(comm, "quantized_allreduce", x, reduction.transport, codec=codec, op="avg")
        else:
            call, reduction = _call(comm, x, codec, "avg"), None
        least = self._least(call.transport)
        if call.x.nbytes < least:
            with comm.tracer.span("exact: small", bytes=call.x.nbytes, min_bytes=least):
                return comm.allreduce(x, out=x, op="avg")
        if reduction is None:
            reduction = self._reduction = _reduction(call, codec, "avg")
        return reduction.reduce(call, x, residual)


@dataclass
class _Feedback:
    """A bound `ErrorFeedback`, with what it keeps."""

    mean: _Mean
    residual: Array | None = field(default=None, metadata={"reshape": "mean"})
    """What earlier means lost on this rank. What counts is its mean over the ranks."""

    def __call__(self, x: Array) -> Array:
        if self.residual is None:
            self.residual = arrays.zeros_like(arrays.as_array(x))
        return self.mean(x, self.residual)


class _Reduction:
    """A quantized allreduce of arrays of one library, dtype and size: what does not change from call to call."""

    def __init__(self, comm: Communicator, transport: Transport, codec: Codec, op: str, like: Array) -> None:
        self.transport, self.codec, self.op, self.dtype = transport, codec, op, like.dtype
        self.rank, self.p, self.size = comm.rank, comm.size, like.size
        self._kind, self._piece_bytes = type(like), transport.coded_piece_bytes(like.nbytes)
        self.chunk = -(-like.size // comm.size)
        """Elements of a chunk; rank r combines chunk r of all ranks."""
        self._kernels = kernels.of(like)
        if comm.size == 1 or like.size == 0:
            return  # nothing is coded
        piece_bytes = None if codec.granule is None else self._piece_bytes
        wire_nbytes = codec.wire_nbytes(self.chunk, like.dtype)
        self.pieces = cut(self.chunk, wire_nbytes, piece_bytes, codec.granule or 1)
        lengths = [piece.stop - piece.start for piece in self.pieces]
        self.wire_nbytes = [codec.wire_nbytes(length, like.dtype) for length in lengths]
        steps = {length: codec.steps(length, like) for length in set(lengths)}
        self.steps = [steps[length] for length in lengths]
        # In one piece all rows are coded at once.
        self.groups = [slice(0, self.p)] if len(lengths) == 1 else [slice(r, r + 1) for r in range(self.p)]
        self._call_text = f"quantized_allreduce(codec={codec}, op={op})"

    def fits(self, x: Array) -> bool:
        """Whether `x` is an array of this kind."""
        return (
            type(x) is self._kind
            and x.size == self.size
            and x.dtype == self.dtype
            and kernels.of(x) is self._kernels
            and self._piece_bytes == self.transport.coded_piece_bytes(x.nbytes)
        )

    def reduce(self, call: Call, out: Array | None, residual: Array | None) -> Array:
        """Reduce the array of the call into `out`, which may be that array; returns it. Collective."""
        call.into(out, call.x.shape)
        call.in_place()
        if call.x is not call.target:
            call.contiguous()
        if residual is not None and type(residual) is not self._kind:
            residual = as_argument(call.name, "residual", residual)
        self.check(call, residual)
        comm, x, target = call.comm, call.x, call.target
        if self.p == 1 or self.size == 0:
            if comm.check:
                call.compare()
            if not arrays.same_memory(x, target):
                target[...] = x
            return call.result
        if len(self.pieces) > 1:
            call.detail["pieces"] = len(self.pieces)

        def move() -> None:
            flow = self.transport.agree_on_call(self._call_text, x)
            reduce_through(flow, _Coded(self, comm.scratch, x, target, residual))

        call.run(move)
        return call.result

    def check(self, call: Call, residual: Array | None) -> None:
        """Raise unless kernels can read the arrays of the call where they lie, and `residual` is like `x`."""
        x = call.x
        if residual is not None and (
            residual.shape != x.shape or residual.dtype != x.dtype or not arrays.is_contiguous(residual)
        ):
            raise ArrayError(
                f"{call.name}: residual is {residual.dtype}{residual.shape}, "
                f"expected a contiguous {x.dtype}{x.shape}"
            )
        if residual is not None:
            check_writable(call.name, "residual", residual, residual)
        if isinstance(x, np.ndarray) or self.p == 1 or self.size == 0:
            return
        check_aligned(call.name, "x", x)
        if x is not call.target:
            check_aligned(call.name, "out", call.target)
        if residual is not None:
            check_aligned(call.name, "residual", residual)


class _Coded(Stages):
    """A quantized reduction, with error feedback if there is a `residual`.

    Each rank encodes the p chunks of its array, combines what it received of its own chunk (decodes p, adds them
    in rank order in float32, encodes one), and decodes everybody's results.
    """

    def __init__(
        self, reduction: _Reduction, scratch: Scratch, x: Array, target: Array, residual: Array | None
    ) -> None:
        self._r, self._scratch = reduction, scratch
        self._residual = None if residual is None else residual.reshape(-1)
        self.count = len(reduction.pieces)
        p, chunk, size = reduction.p, reduction.chunk, reduction.size
        self._padded_to: Array | None = None
        if residual is None and size == p * chunk:
            self._chunks = x.reshape(p, chunk)
        else:
            padded = scratch.take("padded", (p * chunk,), x.dtype, like=x)
            if residual is None:
                padded[:size] = x.reshape(-1)
            else:
                kernels.of(x).add(x.reshape(-1), residual.reshape(-1), out=padded[:size])
            padded[size:] = 0
            self._chunks = padded.reshape(p, chunk)
        self._results = self._chunks
        if size == p * chunk:
            self._results = target.reshape(p, chunk)
        else:
            self._padded_to = target.reshape(-1)
        # The results of a piece take the place of its encoded chunks, so the memory is in use for two lags.
        width = p * max(reduction.wire_nbytes)
        self._sent = scratch.take("sent", (min(2 * LAG + 1, self.count), width), np.uint8, like=x)
        self._received = scratch.take("received", (min(LAG + 1, self.count), width), np.uint8, like=x)
        self._under_way: dict[int, tuple[Array, Array]] = {}

    def encode(self, i: int) -> tuple[Rows, Rows]:
        """See `Stages.encode`."""
        r, piece, encode = self._r, self._r.pieces[i], self._r.steps[i].encode
        sent, received = self._begin(i)
        if self.count == 1:
            encode(self._chunks, sent)
            if self._residual is not None:
                self._keep_loss(i, sent)
            return sent, received
        rows, into = list(sent), list(received)
        rows[r.rank] = into[r.rank]  # this rank's own part goes straight to the parts that it receives
        for peer in range(r.p):
            encode(self._chunks[peer, None, piece], rows[peer][None])
        if self._residual is not None:
            sent[r.rank] = received[r.rank]
            self._keep_loss(i, sent)
        return rows, into

    def _begin(self, i: int) -> tuple[Array, Array]:
        """Memory for piece i, (p, bytes) each: for all encoded chunks, and for what all ranks send here."""
        p, nbytes = self._r.p, self._r.wire_nbytes[i]
        sent, received = self._sent[i % len(self._sent)], self._received[i % len(self._received)]
        self._under_way[i] = sent[: p * nbytes].reshape(p, nbytes), received[: p * nbytes].reshape(p, nbytes)
        return self._under_way[i]

    def combine(self, i: int) -> tuple[Array, Rows]:
        """See `Stages.combine`."""
        r, mine = self._r, self._r.rank
        results, received = self._under_way[i]
        r.steps[i].combine(received, results[mine, None], op=r.op)
        if self._residual is not None:
            self._keep_loss_of_mean(i, received, results[mine, None])
        return results[mine], results if self.count == 1 else list(results)

    def decode(self, i: int) -> None:
        """See `Stages.decode`."""
        r, piece, decode = self._r, self._r.pieces[i], self._r.steps[i].decode
        results, _ = self._under_way.pop(i)
        for rows in r.groups:
            decode(results[rows], self._results[rows, piece])
        if self._padded_to is not None and i == self.count - 1:
            self._padded_to[...] = self._chunks.reshape(-1)[: r.size]

    # Error feedback ---------------------------------------------------------------------------------

    def _keep_loss(self, i: int, sent: Array) -> None:
        """Keep what encoding this rank's chunks has lost: residual <- chunk - decoded."""
        r, piece = self._r, self._r.pieces[i]
        for rows in r.groups:
            chunks = self._chunks[rows, piece]
            decoded = self._scratch.take("decoded", chunks.shape, r.dtype, like=chunks)
            r.steps[i].decode(sent[rows], decoded)
            lost = self._place(rows, piece)
            kernels.of(chunks).loss(
                chunks.reshape(-1)[: lost.size], decoded.reshape(-1)[: lost.size], 1, out=lost
            )

    def _keep_loss_of_mean(self, i: int, received: Array, encoded: Array) -> None:
        """Add what encoding the result has lost: residual <- residual + p (mean - decoded)."""
        r, piece, run = self._r, self._r.pieces[i], kernels.of(received)
        length = piece.stop - piece.start
        decoded = self._scratch.take("decoded", (r.p, length), r.dtype, like=received)
        total = self._scratch.take("total", (length,), r.dtype, like=received)
        kept = self._scratch.take("kept", (1, length), r.dtype, like=received)
        r.steps[i].decode(received, decoded)
        run.reduce_rows(decoded, total, r.op)
        r.steps[i].decode(encoded, kept)
        # The next mean divides what this rank adds by p, so p times the loss is kept.
        run.loss(total, kept[0], r.p if r.op == "avg" else 1, out=total)
        lost = self._place(slice(r.rank, r.rank + 1), piece)
        run.add(lost, total[: lost.size], out=lost)

    def _place(self, rows: slice, piece: slice) -> Array:
        """The residual of a piece of these chunks; in the last chunk it may be shorter than the piece."""
        assert self._residual is not None
        start, end = rows.start * self._r.chunk + piece.start, (rows.stop - 1) * self._r.chunk + piece.stop
        return self._residual[start:end]


def _exchanged(comm: Communicator, chunks: Array, counts: list[int]) -> Array:
    """Send chunk j to rank j, if counts[j] is not 0; returns this rank's own chunk from every rank, (p, m)."""
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
