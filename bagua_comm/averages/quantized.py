"""The quantized mean, and the quantized allreduce that computes it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, cast

import numpy as np

from .. import arrays, kernels
from ..arrays import A, AnyArray, Array, LinearOp, Scratch
from ..codecs import Codec, MinMaxUInt8
from ..codecs.base import check_aligned, check_codec_argument
from ..comm import Communicator
from ..comm.arguments import as_argument, check_writable
from ..comm.base import CommBase
from ..comm.call import Call
from ..errors import ArrayError
from ..transports.base import Transport
from ..transports.flow import Rows
from ..transports.pipeline import LAG, Stages, cut, reduce_through
from .base import InPlace

_NAME = "quantized_allreduce"


@dataclass(frozen=True)
class Quantized:
    """The mean through a codec; see `quantized_allreduce`.

    Args:
        codec: Encodes the arrays that are sent.
        min_bytes: Smaller arrays are averaged exactly, on all ranks, in a span "exact: small" of the trace. None
            for the size from which quantizing pays on the transport (`Transport.quantize_bytes`): between hosts
            over MPI it follows the speed of the links, which `connect` measures. 0 to quantize all arrays.

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
        mean = QuantizedMean(comm, self.codec, self.min_bytes)
        if like is not None:
            mean.prepare(like)
        return mean

    def check(self, dtype: str) -> None:
        """Accept the dtypes of the codec."""
        check_codec_argument("Quantized", self.codec, dtype)


_DEFAULT_CODEC = MinMaxUInt8()


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
    one) -> allgather -> decode p. Over a network this is pipelined in pieces, so that the network does not wait
    for the codec. Every element is quantized twice, for any number of ranks; each rank sends 2 (p - 1) / p of the
    encoded size. The owner of a chunk also decodes its own wire bytes. On a single rank, the array is returned
    unchanged.

    Source: the compressed scatter-gather of Bagua (Gan et al., arXiv 2107.01499).

    Args:
        comm: The ranks.
        x: The array of this rank.
        out: Where to put the result; a new array if None.
        codec: Encodes the arrays that are sent; `MinMaxUInt8()` if None.
        op: "sum" or "avg".
        residual: The error of earlier calls on this rank, a contiguous array like `x`. It is added to `x`, and
            then overwritten with the error of this call. See `ErrorFeedback`.

    Raises:
        ArrayError: `out` or `residual` does not fit `x`; `op` is not "sum" or "avg"; or an array begins at an
            address from which a device cannot read its elements.
        UnsupportedError: The codec does not take this dtype, or no transport takes such an array.

    >>> from bagua_comm.testing import run_ranks
    >>> run_ranks(2, lambda comm: quantized_allreduce(comm, np.arange(3, dtype=np.float32)))[0]
    array([0., 2., 4.], dtype=float32)
    """
    codec = _DEFAULT_CODEC if codec is None else codec
    if op not in ("sum", "avg"):
        raise ArrayError(f'quantized_allreduce: op is {op!r}, expected "sum" or "avg"')
    call, reduction = _prepared(comm, x, codec, op)
    result: A = (reduction or _reduction(call, codec, op)).reduce(call, out, residual)
    return result


def _prepared(comm: Communicator, x: Any, codec: Codec, op: str) -> tuple[Call, _Reduction | None]:
    """Return a call on `x`, and the cached reduction of arrays like it, if there is one that is up to date.

    Raises:
        UnsupportedError: The codec does not take the dtype of `x`, or no transport takes such an array.
    """
    try:
        found = comm.call_cache.get((_NAME, codec, op, type(x), x.dtype, x.size))
    except (AttributeError, TypeError):  # not an array, or a codec that cannot be hashed
        found = None
    if found is not None and found.is_current(x):
        return Call(comm, _NAME, x, transport=found.transport, codec=codec, op=op), found
    call = Call(comm, _NAME, x, codec=codec, op=op)
    check_codec_argument(_NAME, codec, arrays.dtype_name(call.x.dtype))
    return call, None


def _reduction(call: Call, codec: Codec, op: str) -> _Reduction:
    """Return the reduction of arrays like that of the call: the cached one, or a new one, which is cached."""
    comm, x, cache = call.comm, call.x, call.comm.call_cache
    key = _NAME, codec, op, type(x), x.dtype, x.size
    try:
        found = cache.get(key)
    except TypeError:  # a codec that cannot be hashed may change
        return _Reduction(comm, call.transport, codec, op, x)
    if found is None or not found.is_current(x):
        found = _Reduction(comm, call.transport, codec, op, x)
        cache.add(key, found)
    return cast(_Reduction, found)


class QuantizedMean:
    """A bound `Quantized`."""

    def __init__(self, comm: Communicator, codec: Codec, min_bytes: int | None) -> None:
        self._comm, self._codec, self._min_bytes = comm, codec, min_bytes

    def prepare(self, like: Array) -> None:
        """Prepare the reduction of arrays like this one."""
        call, found = _prepared(self._comm, like, self._codec, "avg")
        least = call.transport.quantize_bytes if self._min_bytes is None else self._min_bytes
        if found is None and call.x.nbytes >= least:
            _reduction(call, self._codec, "avg")

    def __call__(self, x: Array, residual: Array | None = None) -> Array:
        """Average `x` in place, and return it. Collective."""
        comm, codec = self._comm, self._codec
        call, reduction = _prepared(comm, x, codec, "avg")
        least = call.transport.quantize_bytes if self._min_bytes is None else self._min_bytes
        if call.x.nbytes < least:
            with comm.tracer.span("exact: small", bytes=call.x.nbytes, min_bytes=least):
                return comm.allreduce(x, out=x, op="avg")
        return (reduction or _reduction(call, codec, "avg")).reduce(call, x, residual)


class _Reduction:
    """A quantized allreduce, prepared for arrays of one library, dtype and size."""

    def __init__(self, comm: CommBase, transport: Transport, codec: Codec, op: str, like: Array) -> None:
        self.transport, self.codec, self.op, self.dtype = transport, codec, op, like.dtype
        self.rank, self.p, self.size = comm.rank, comm.size, like.size
        self._type, self._piece_bytes = type(like), transport.coded_piece_bytes(like.nbytes)
        self.chunk = -(-like.size // comm.size)
        """Number of elements of a chunk; rank r combines chunk r of all ranks."""
        self._kernels = kernels.of(like)
        if comm.size == 1 or like.size == 0:
            return  # nothing is encoded
        piece_bytes = None if codec.granule is None else self._piece_bytes
        wire_nbytes = codec.wire_nbytes(self.chunk, like.dtype)
        self.pieces = cut(self.chunk, wire_nbytes, piece_bytes, codec.granule or 1)
        lengths = [piece.stop - piece.start for piece in self.pieces]
        self.wire_nbytes = [codec.wire_nbytes(length, like.dtype) for length in lengths]
        steps = {length: codec.steps(length, like) for length in set(lengths)}
        self.steps = [steps[length] for length in lengths]
        # A single piece encodes all rows at once.
        self.groups = [slice(0, self.p)] if len(lengths) == 1 else [slice(r, r + 1) for r in range(self.p)]
        self._call_text = f"quantized_allreduce(codec={codec}, op={op})"

    def is_current(self, x: Array) -> bool:
        """Whether it was made for the present kernels and size of pieces of arrays like `x`."""
        return kernels.of(x) is self._kernels and self._piece_bytes == self.transport.coded_piece_bytes(x.nbytes)

    def reduce(self, call: Call, out: Array | None, residual: Array | None) -> Array:
        """Reduce the array of the call into `out`, which may be that array, and return it. Collective."""
        call.writes_to(out, call.x.shape)
        call.in_place()
        if call.x is not call.target:
            call.contiguous()
        if residual is not None and type(residual) is not self._type:
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

        def move(x: Array, target: Array) -> None:
            flow = self.transport.agree_on_call(self._call_text, x)
            reduce_through(flow, _Coded(self, comm.scratch, x, target, residual))

        call.run(move)
        return call.result

    def check(self, call: Call, residual: Array | None) -> None:
        """Raise unless kernels can read the arrays of the call in place, and `residual` is like `x`."""
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
    """The stages of a quantized reduction, with error feedback if there is a `residual`.

    Each rank encodes the p chunks of its array, combines the received parts of its own chunk (decodes p, adds
    them in rank order in float32, encodes one), and decodes the results of all ranks.
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
        # Results overwrite the encoded chunks of their piece, so that memory is in use for two lags.
        width = p * max(reduction.wire_nbytes)
        self._sent = scratch.take("sent", (min(2 * LAG + 1, self.count), width), np.uint8, like=x)
        self._received = scratch.take("received", (min(LAG + 1, self.count), width), np.uint8, like=x)
        self._in_flight: dict[int, tuple[Array, Array]] = {}

    def encode(self, i: int) -> tuple[Rows, Rows]:
        """See `Stages.encode`."""
        r, piece, encode = self._r, self._r.pieces[i], self._r.steps[i].encode
        sent, received = self._begin(i)
        if self.count == 1:
            encode(self._chunks, sent)
            if self._residual is not None:
                self._store_error(i, sent)
            return sent, received
        rows, into = list(sent), list(received)
        rows[r.rank] = into[r.rank]  # encodes this rank's own chunk directly into the received ones
        for peer in range(r.p):
            encode(self._chunks[peer, None, piece], rows[peer][None])
        if self._residual is not None:
            sent[r.rank] = received[r.rank]
            self._store_error(i, sent)
        return rows, into

    def _begin(self, i: int) -> tuple[Array, Array]:
        """Return memory for piece i, (p, bytes) each: for the encoded chunks and for the received ones."""
        p, nbytes = self._r.p, self._r.wire_nbytes[i]
        sent, received = self._sent[i % len(self._sent)], self._received[i % len(self._received)]
        self._in_flight[i] = sent[: p * nbytes].reshape(p, nbytes), received[: p * nbytes].reshape(p, nbytes)
        return self._in_flight[i]

    def combine(self, i: int) -> tuple[Array, Rows]:
        """See `Stages.combine`."""
        r, mine = self._r, self._r.rank
        results, received = self._in_flight[i]
        r.steps[i].combine(received, results[mine, None], op=r.op)
        if self._residual is not None:
            self._add_error_of_mean(i, received, results[mine, None])
        return results[mine], results if self.count == 1 else list(results)

    def decode(self, i: int) -> None:
        """See `Stages.decode`."""
        r, piece, decode = self._r, self._r.pieces[i], self._r.steps[i].decode
        results, _ = self._in_flight.pop(i)
        for rows in r.groups:
            decode(results[rows], self._results[rows, piece])
        if self._padded_to is not None and i == self.count - 1:
            self._padded_to[...] = self._chunks.reshape(-1)[: r.size]

    # Error feedback ---------------------------------------------------------------------------------

    def _store_error(self, i: int, sent: Array) -> None:
        """Store the error of encoding this rank's chunks: residual <- chunk - decoded."""
        r, piece = self._r, self._r.pieces[i]
        for rows in r.groups:
            chunks = self._chunks[rows, piece]
            decoded = self._scratch.take("decoded", chunks.shape, r.dtype, like=chunks)
            r.steps[i].decode(sent[rows], decoded)
            error = self._residual_of(rows, piece)
            kernels.of(chunks).loss(
                chunks.reshape(-1)[: error.size], decoded.reshape(-1)[: error.size], 1, out=error
            )

    def _add_error_of_mean(self, i: int, received: Array, encoded: Array) -> None:
        """Add the error of encoding the result: residual <- residual + p (mean - decoded)."""
        r, piece, run = self._r, self._r.pieces[i], kernels.of(received)
        length = piece.stop - piece.start
        decoded = self._scratch.take("decoded", (r.p, length), r.dtype, like=received)
        total = self._scratch.take("total", (length,), r.dtype, like=received)
        kept = self._scratch.take("kept", (1, length), r.dtype, like=received)
        r.steps[i].decode(received, decoded)
        run.reduce_rows(decoded, total, r.op)
        r.steps[i].decode(encoded, kept)
        # The next mean divides the residual of this rank by p, so it stores p times the error.
        run.loss(total, kept[0], r.p if r.op == "avg" else 1, out=total)
        error = self._residual_of(slice(r.rank, r.rank + 1), piece)
        run.add(error, total[: error.size], out=error)

    def _residual_of(self, rows: slice, piece: slice) -> Array:
        """Return the residual of a piece of these chunks; it may be shorter than the piece in the last chunk."""
        assert self._residual is not None
        start, end = rows.start * self._r.chunk + piece.start, (rows.stop - 1) * self._r.chunk + piece.stop
        return self._residual[start:end]
