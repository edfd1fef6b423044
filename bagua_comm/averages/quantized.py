"""The quantized mean, and the quantized collectives that compute it and its shards.

`reduce_scatter` and `allgather` are those of a codec, or the exact ones without a codec.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from .. import arrays, kernels
from ..arrays import A, AnyArray, Array, Counts, LinearOp, as_array
from ..arrays import parts as parts_of
from ..codecs import Codec, MinMaxUInt8
from ..codecs.base import check_codec_argument
from ..comm import Communicator
from ..comm.arguments import check_counts, even_chunk
from ..comm.base import CommBase
from ..comm.call import Call
from ..comm.weighted import weighted_mean
from ..errors import ArrayError
from ..transports.base import Transport
from ..transports.flow import Rows
from .base import Average, Gathers, InPlace, Shards
from .coded import Coded, Coding, Part, as_like, cached_coding, check_decay, coding_for, new_coding, with_residual

_ALLREDUCE, _REDUCE_SCATTER, _ALLGATHER = "quantized_allreduce", "quantized_reduce_scatter", "quantized_allgather"
"""The names of the calls."""

DEFAULT_CODEC = MinMaxUInt8()


@dataclass(frozen=True)
class Quantized(Average):
    """The mean through a codec; see `quantized_allreduce`.

    Args:
        codec: Encodes the arrays that are sent.
        min_bytes: Smaller arrays are averaged exactly, on all ranks, in a span "exact: small" of the trace. None
            for the size from which quantizing pays on the transport (`Transport.quantize_bytes`): between hosts
            over MPI it follows the speed of the links, which `connect` measures. 0 to quantize all arrays.

    >>> import numpy as np
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
        mean = QuantizedMean(comm, self)
        if like is not None:
            mean.prepare(like)
        return mean

    def bind_shards(self, comm: Communicator, tensors: Sequence[tuple[int, int]] | None = None) -> Shards:
        """See `Average.bind_shards`; a `quantized_reduce_scatter`. `min_bytes` counts the whole array."""

        def reduce(x: AnyArray, out: AnyArray, op: LinearOp) -> AnyArray:
            coding = self._known(comm, _REDUCE_SCATTER, op, x)
            if coding is not None and coding.run_again(comm, x, out, gathers=False):
                return out
            return reduce_scatter(comm, x, out, op=op, codec=codec_for(self, comm, x))

        return reduce

    def bind_gather(self, comm: Communicator) -> Gathers:
        """See `Average.bind_gather`; a `quantized_allgather`. `min_bytes` counts the whole array."""

        def gather(x: AnyArray, out: AnyArray) -> AnyArray:
            coding = self._known(comm, _ALLGATHER, None, out)
            if coding is not None and coding.run_again(comm, out, x, gathers=True):
                return out
            return allgather(comm, x, out, codec=codec_for(self, comm, out))

        return gather

    def _known(self, comm: Communicator, name: str, op: str | None, whole: Any) -> Coding | None:
        """Return the cached coding of arrays like `whole`, if they are quantized and there is one."""
        coding = cached_coding(comm, name, self.codec, op, None, whole)
        return coding if coding is not None and whole.nbytes >= self.least_bytes(coding.transport) else None

    def least_bytes(self, transport: Transport) -> int:
        """Return the size in bytes from which arrays are quantized on this transport."""
        return transport.quantize_bytes if self.min_bytes is None else self.min_bytes

    def check(self, dtype: str) -> None:
        """Accept the dtypes of the codec."""
        check_codec_argument("Quantized", self.codec, dtype)


def codec_for(method: Average, comm: Communicator, x: AnyArray) -> Codec | None:
    """Return the codec for arrays like `x` on `comm`; None if the method sends them exactly."""
    if isinstance(method, Quantized) and as_array(x).nbytes >= method.least_bytes(comm.transport_for(x)):
        return method.codec
    return None


# Allreduce ------------------------------------------------------------------------------------------


def quantized_allreduce(
    comm: Communicator,
    x: A,
    out: A | None = None,
    *,
    codec: Codec | None = None,
    op: LinearOp = "sum",
    weight: float | None = None,
    residual: AnyArray | None = None,
    decay: float = 0.0,
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
        weight: The weight of `x` in the mean; see `Communicator.allreduce`.
        residual: The error of earlier calls on this rank, a contiguous array like `x`. It is added to `x`, and
            then overwritten with the error of this call. See `ErrorFeedback`.
        decay: The part of the residual that stays in it; only the rest is added to `x`.

    Raises:
        ArrayError: `out` or `residual` does not fit `x`; `op` is not "sum" or "avg"; `decay` is out of range; or
            an array begins at an address from which a device cannot read its elements.
        UnsupportedError: The codec does not take this dtype, or no transport takes such an array.

    >>> import numpy as np
    >>> from bagua_comm.testing import run_ranks
    >>> run_ranks(2, lambda comm: quantized_allreduce(comm, np.arange(3, dtype=np.float32)))[0]
    array([0., 2., 4.], dtype=float32)
    """
    check_decay(_ALLREDUCE, decay)
    codec = DEFAULT_CODEC if codec is None else codec
    if weight is None:
        result: A = _allreduce(comm, x, out, op, codec, residual=residual, decay=decay)
        return result

    def mean(y: Array) -> object:
        return _allreduce(comm, y, y, "avg", codec, residual=residual, decay=decay)

    call = _call(comm, _ALLREDUCE, x, codec, op=op)
    weighted: A = weighted_mean(comm, call, out, weight, mean, shrinks=residual is None)
    return weighted


class QuantizedMean:
    """A bound `Quantized`."""

    def __init__(self, comm: Communicator, method: Quantized) -> None:
        self._comm, self._codec, self._least = comm, method.codec, method.least_bytes

    def prepare(self, like: Array) -> None:
        """Prepare the reduction of arrays like this one."""
        call = _call(self._comm, _ALLREDUCE, like, self._codec, op="avg")
        if call.x.nbytes >= self._least(call.transport):
            coding_for(call, self._codec, None, call.x)

    def __call__(self, x: Array, residual: Array | None = None, decay: float = 0.0) -> Array:
        """Average `x` in place, and return it. Collective."""
        return _allreduce(self._comm, x, x, "avg", self._codec, self._least, residual, decay)


_Least = Callable[[Transport], int]
"""A function that returns the size in bytes from which arrays are quantized on a transport."""


def _allreduce(
    comm: Communicator,
    x: Any,
    out: Any,
    op: LinearOp,
    codec: Codec,
    least: _Least | None = None,
    residual: AnyArray | None = None,
    decay: float = 0.0,
) -> Any:
    """`quantized_allreduce`; exactly, if the array has fewer bytes than `least` returns. Collective."""
    coding = cached_coding(comm, _ALLREDUCE, codec, op, None, x)
    is_small = coding is not None and least is not None and x.nbytes < least(coding.transport)
    if coding is not None and residual is None and not is_small and coding.replay(comm, x, out):
        return out
    call = _call(comm, _ALLREDUCE, x, codec, coding, op=op)
    if least is not None and call.x.nbytes < (limit := least(call.transport)):
        with comm.tracer.span("exact: small", bytes=call.x.nbytes, min_bytes=limit):
            return comm.allreduce(x, out=out, op=op)
    call.writes_to(out, call.x.shape)
    call.in_place()
    is_view = call.x is not call.original
    coding = coding or (coding_for if is_view else new_coding)(call, codec, None, call.x)
    if call.x is not call.target:
        call.contiguous()
    errors = None if residual is None else as_like(call, "residual", residual, call.x)
    coding.check_aligned(call, x=call.x, out=call.target, residual=errors)
    # For a view of another library's array, no recording was looked up above.
    if errors is None and is_view and coding.replay(comm, call.x, call.target):
        return call.result

    def move(comm: CommBase, x: Array, target: Array) -> None:
        flow = coding.transport.agree_on_call(coding.text, x, by_messages=True)
        chunks = with_residual(comm.scratch, x, errors, coding.size, decay)
        results = target.reshape(-1)
        is_padded = results.size != coding.size
        flat = None if errors is None else errors.reshape(-1)
        into = chunks if is_padded else results
        stages = _AllReduce(coding, comm, chunks, into, op=op, residual=flat, decay=decay)
        if errors is None:
            coding.through_recorded(flow, stages, call, x, target)
        else:
            coding.through(flow, stages)
        if is_padded:
            results[...] = chunks[: results.size]

    return _run(call, coding, move, call.x, keeps=False)


def _call(
    comm: Communicator, name: str, x: AnyArray, codec: Codec, coding: Coding | None = None, **ops: Any
) -> Call:
    """Return a call on `x`, of which the cached coding is given, if there is one; `ops` has its `op`.

    Raises:
        ArrayError: `op` is neither "sum" nor "avg".
        UnsupportedError: The codec does not take the dtype of `x`, or no transport takes such an array.
    """
    for op in ops.values():
        if op not in ("sum", "avg"):
            raise ArrayError(f'{name}: op is {op!r}, expected "sum" or "avg"')
    if coding is not None:
        return Call(comm, name, x, transport=coding.transport, codec=codec, **ops)
    call = Call(comm, name, x, codec=codec, **ops)
    check_codec_argument(name, codec, arrays.dtype_name(call.x.dtype))
    return call


# Shards ---------------------------------------------------------------------------------------------


def quantized_reduce_scatter(
    comm: Communicator,
    x: A,
    out: A | None = None,
    *,
    op: LinearOp = "sum",
    codec: Codec | None = None,
    residual: AnyArray | None = None,
    decay: float = 0.0,
    counts: Counts = None,
) -> A:
    """Sum or average `x` over all ranks through a lossy codec, and keep this rank's chunk.

    Collective. `x` has shape (p * m, ...) and the same dtype on every rank, and the result has shape (m, ...).
    With `counts`, `x` has sum(counts) elements, in any shape, and the result has shape (counts[rank],).

    Over p ranks: encode p chunks -> alltoall -> decode p, and add them in float32 in rank order. So each
    contribution is quantized once, a rank's own too; each rank sends (p - 1) / p of the encoded size. Decoded
    values are rounded to the dtype of `x` before they are added, and so is the result. Over a network this is
    pipelined in pieces. On a single rank, the array is returned unchanged.

    The mean of `weigh(comm, x, weight)` in place of `x` is one with weights of ranks. A residual has the unit of
    that mean, so weights may change from call to call.

    Source: the first half of Bagua's compressed scatter-gather (Gan et al., arXiv 2107.01499); qgZ on one level,
    for the gradients of sharded models, of ZeRO++ (Wang et al., arXiv 2306.10209).

    Args:
        comm: The ranks.
        x: The array of this rank.
        out: Where to put the result; may be this rank's chunk of `x`. With `counts`, it may have any shape with
            that many elements.
        op: "sum" or "avg".
        codec: Encodes the chunks that are sent; `MinMaxUInt8()` if None.
        residual: The error of earlier calls on this rank, a contiguous array like `x`. It is added to `x`, and
            then overwritten with the error of this call. See `ErrorFeedback`.
        decay: The part of the residual that stays in it; only the rest is added to `x`.
        counts: Numbers of elements that the ranks keep, (p,), the same on every rank; equal ones if None.

    Raises:
        ArrayError: `x` does not split evenly or has not sum(counts) elements; `out` or `residual` does not fit;
            `op` is not "sum" or "avg"; `decay` is out of range; or an array begins at an address from which a
            device cannot read its elements.
        UnsupportedError: The codec does not take this dtype, or no transport takes such an array.

    >>> import numpy as np
    >>> from bagua_comm.testing import run_ranks
    >>> def body(comm):
    ...     return quantized_reduce_scatter(comm, np.array([0, 255 * comm.rank, 0, 510], np.float32))
    >>> run_ranks(2, body)
    [array([  0., 255.], dtype=float32), array([   0., 1020.], dtype=float32)]
    """
    name, codec = _REDUCE_SCATTER, DEFAULT_CODEC if codec is None else codec
    check_decay(name, decay)
    call = _call(comm, name, x, codec, op=op)
    lengths = _lengths(call, counts)
    if lengths is None:
        shape: tuple[int, ...] = (even_chunk(name, call.x, comm.size), *call.x.shape[1:])
    else:
        shape = (lengths[comm.rank],)
    call.writes_to(out, shape, any_shape=counts is not None)
    errors = None if residual is None else as_like(call, "residual", residual, call.x)
    call.contiguous()
    call.check_overlap(parts_of(call.x, lengths or [math.prod(shape)] * comm.size)[comm.rank])
    if errors is not None and (arrays.overlap(errors, call.x) or arrays.overlap(errors, call.target)):
        raise ArrayError(f"{name}: residual overlaps x or out; pass memory of its own")
    coding = coding_for(call, codec, lengths, call.x)
    coding.check_aligned(call, x=call.x, out=call.target, residual=errors)

    def move(comm: CommBase, x: Array, target: Array) -> None:
        flow = coding.transport.agree_on_call(coding.text, x, by_messages=_all_send(lengths))
        chunks = with_residual(comm.scratch, x, errors, coding.size, decay)
        flat = None if errors is None else errors.reshape(-1)
        stages = _ReduceScatter(coding, comm, chunks, None, op=op, residual=flat, decay=decay)
        stages.target = target.reshape(-1)
        coding.through(flow, stages, gather=False)

    result: A = _run(call, coding, move, call.x, keeps=lengths is None and errors is None)
    return result


def quantized_allgather(
    comm: Communicator,
    x: A,
    out: A | None = None,
    *,
    codec: Codec | None = None,
    reference: AnyArray | None = None,
    counts: Counts = None,
) -> A:
    """Gather `x` of all ranks through a lossy codec, to the same bytes on every rank.

    Collective. `x` has the same shape and dtype on every rank, and the result has shape `(p, *x.shape)`; or, with
    `counts`, rank r gives counts[r] elements, in any shape, and the result has shape (sum(counts),).

    Over p ranks: encode one chunk -> allgather -> decode p. Every rank decodes all chunks, its own too, so that
    all hold the same bytes; each element is quantized once. On a single rank, `x` is copied unchanged. Over a
    network this is pipelined in pieces.

    With `reference`, which all ranks hold alike, the differences from it are quantized, which are smaller: the
    result is reference + decoded(x - reference). With out=reference, the next differences contain the error of
    this call, so that errors do not accumulate.

    Source: qwZ of ZeRO++ (Wang et al., arXiv 2306.10209); differences: SDP4Bit (Jia et al., arXiv 2410.15526).

    Args:
        comm: The ranks.
        x: The array of this rank; may be this rank's part of `out`.
        out: Where to put the result, of any shape with that many elements; a new array if None.
        codec: Encodes the arrays that are sent; `MinMaxUInt8()` if None.
        reference: A contiguous array of the shape of the result, with the same bytes on all ranks, which are not
            compared. May be `out`; may not overlap `x`.
        counts: Numbers of elements of the ranks, (p,), the same on every rank; equal ones if None.

    Raises:
        ArrayError: `counts`, `out` or `reference` does not fit, or arrays overlap in another way; or an array
            begins at an address from which a device cannot read its elements.
        UnsupportedError: The codec does not take this dtype, or no transport takes such an array.

    >>> import numpy as np
    >>> from bagua_comm.testing import run_ranks
    >>> def body(comm):
    ...     return quantized_allgather(comm, np.array([0, 0.3, 255 * (comm.rank + 1)], np.float32))
    >>> run_ranks(2, body)[0]
    array([[  0.,   0., 255.],
           [  0.,   0., 510.]], dtype=float32)
    """
    name, codec = _ALLGATHER, DEFAULT_CODEC if codec is None else codec
    call = _call(comm, name, x, codec)
    lengths = _lengths(call, counts, own=comm.rank)
    shape = (comm.size, *call.x.shape) if lengths is None else (sum(lengths),)
    call.writes_to(out, shape, any_shape=True)
    call.contiguous()
    mine, whole = call.x.reshape(-1), call.target.reshape(-1)
    call.check_overlap(parts_of(whole, lengths or [mine.size] * comm.size)[comm.rank])
    base = None
    if reference is not None:
        base = as_like(call, "reference", reference, call.output.value, written=False)
        if arrays.overlap(base, mine):
            raise ArrayError(f"{name}: reference overlaps x; pass memory that does not overlap x")
        if arrays.overlap(base, call.target) and not arrays.same_memory(base, call.target):
            raise ArrayError(
                f"{name}: reference overlaps out; pass out=reference, or memory that does not overlap out"
            )
    coding = coding_for(call, codec, lengths, whole)
    coding.check_aligned(call, x=mine, out=whole, reference=base)
    call.sends(mine)
    call.x, call.payload = whole, mine.nbytes  # inputs differ among ranks; the outputs are alike

    def move(comm: CommBase, x: Array, target: Array) -> None:
        results = target.reshape(-1)
        flow = coding.transport.agree_on_call(coding.text, results, by_messages=_all_send(lengths))
        stages = _AllGather(coding, comm, None, results)
        stages.mine, stages.reference = x, None if base is None else base.reshape(-1)
        coding.through(flow, stages, scatter=False)

    result: A = _run(call, coding, move, mine, keeps=lengths is None and base is None)
    return result


def _all_send(lengths: Sequence[int] | None) -> bool:
    """Whether no rank ends a call with these chunks without a message of each other one."""
    return lengths is None or min(lengths) > 0


def _lengths(call: Call, counts: Counts, *, own: int | None = None) -> tuple[int, ...] | None:
    """Return checked `counts`, which the ranks compare; None for equal chunks."""
    if counts is None:
        return None
    call.detail["counts"] = found = check_counts(call.name, "counts", counts, call.comm.size, call.x, own=own)
    return tuple(found)


def _run(
    call: Call, coding: Coding, move: Callable[[CommBase, Array, Array], None], x: Array, *, keeps: bool
) -> Any:
    """Run a call that sends `x` by `move`, and return its result; `coding` keeps it if it `keeps`. Collective."""
    if coding.is_trivial:
        return coding.copy(call, x)
    if len(coding.pieces) > 1:
        call.detail["pieces"] = len(coding.pieces)
    call.run(lambda _, target: move(call.comm, x, target))
    if keeps:
        coding.keep(call, move)
    return call.result


def reduce_scatter(
    comm: Communicator, x: A, out: A, *, op: LinearOp, codec: Codec | None, counts: Counts = None
) -> A:
    """Reduce `x`, (p * m,), and keep this rank's chunk in `out`, (m,): exactly if `codec` is None. Collective.

    Rank r keeps counts[r] elements instead of m if there are `counts`.
    """
    counts = None if counts is None or min(counts) == max(counts) else counts
    if codec is None:
        return comm.reduce_scatter(x, out=out, op=op, counts=counts)
    return quantized_reduce_scatter(comm, x, out, op=op, codec=codec, counts=counts)


def allgather(comm: Communicator, x: A, out: A, *, codec: Codec | None, counts: Counts = None) -> A:
    """Gather `x`, (m,), of all ranks in `out`, (p * m,): exactly if `codec` is None. Collective.

    Rank r has counts[r] elements instead of m if there are `counts`. `x` may be this rank's part of `out`.
    """
    counts = None if counts is None or min(counts) == max(counts) else counts
    if codec is not None:
        return quantized_allgather(comm, x, out, codec=codec, counts=counts)
    return comm.allgather(x, out=out, counts=counts)


# Stages ---------------------------------------------------------------------------------------------


class _AllReduce(Coded):
    """The stages of a quantized allreduce, with error feedback if there is a `residual`."""

    def combine(self, i: int) -> tuple[Array, Rows]:
        """See `Stages.combine`: decode the parts of all ranks, add them, and encode the result."""
        c = self._coding
        mine, (rows, received) = c.pieces[i][c.rank], self._in_flight[i]
        result = rows[c.rank]
        if self._draws is None:
            mine.steps.combine(received, result[None], op=self._op)
        else:
            draws = self._draws.of_result().after(mine.elements.start)
            mine.steps.combine(received, result[None], op=self._op, draws=draws)
        if self._residual is not None:
            self._add_error_of_mean(mine, received, result[None])
        return result, rows

    def _add_error_of_mean(self, mine: Part, received: Array, encoded: Array) -> None:
        """Add the error of encoding the result: residual <- residual + p (mean - decoded)."""
        assert self._residual is not None
        p, dtype, run = self._coding.p, self._coding.dtype, kernels.of(received)
        length = mine.local.stop - mine.local.start
        decoded = self._scratch.take("decoded", (p, length), dtype, like=received)
        total = self._scratch.take("total", (length,), dtype, like=received)
        kept = self._scratch.take("kept", (1, length), dtype, like=received)
        mine.steps.decode(received, decoded)
        run.reduce_rows(decoded, total, self._op)
        mine.steps.decode(encoded, kept)
        # The next mean divides the residual of this rank by p, so it stores p times the error.
        run.loss(total, kept[0], p if self._op == "avg" else 1, out=total)
        error = self._residual[mine.elements]
        run.add(error, total[: error.size], out=error)


class _ReduceScatter(Coded):
    """The stages of a quantized reduce-scatter, with error feedback if there is a `residual`."""

    target: Array
    """The array for the result, flat."""

    def combine(self, i: int) -> tuple[Array, Rows]:
        """See `Stages.combine`: decode the parts of all ranks, and add them."""
        c = self._coding
        part, (_, received) = c.pieces[i][c.rank], self._in_flight.pop(i)
        total = self.target[part.local]
        if part.nbytes:
            decoded = self._scratch.take("decoded", (c.p, total.size), c.dtype, like=received)
            part.steps.decode(received, decoded)
            kernels.of(total).reduce_rows(decoded, total, self._op)
        return total, []


class _AllGather(Coded):
    """The stages of a quantized allgather, of differences if there is a `reference`."""

    mine: Array
    """This rank's elements, flat."""
    reference: Array | None
    """The reference of the differences: the same array on all ranks, flat."""

    def combine(self, i: int) -> tuple[Array, Rows]:
        """See `Stages.combine`: encode this rank's part."""
        c = self._coding
        part, rows = c.pieces[i][c.rank], self._slot(i)
        self._in_flight[i] = rows, rows
        if part.nbytes:
            values = self.mine[part.local]
            if self.reference is not None:
                differences = self._scratch.take("decoded", values.shape, c.dtype, like=values)
                kernels.of(values).subtract(values, self.reference[part.elements], out=differences)
                values = differences
            self._encode(part, values[None], rows[c.rank][None], part.elements.start)
        return rows[c.rank], rows

    def decode(self, i: int) -> None:
        """See `Stages.decode`."""
        if self.reference is None:
            super().decode(i)
            return
        c, (rows, _), whole = self._coding, self._in_flight.pop(i), self._results
        assert whole is not None
        for part, row in zip(c.pieces[i], rows, strict=True):
            if part.nbytes:
                results = whole[part.elements]
                decoded = self._scratch.take("decoded", results.shape, c.dtype, like=results)
                part.steps.decode(row[None], decoded[None])
                kernels.of(results).add(self.reference[part.elements], decoded, out=results)
