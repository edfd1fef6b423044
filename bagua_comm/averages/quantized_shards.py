"""Quantized reduce-scatter and allgather, the halves of a quantized allreduce, for sharded arrays.

`reduce_scatter` and `allgather` call them, or the exact ones, as a method says.
"""

from __future__ import annotations

import math

from .. import arrays, kernels
from ..arrays import A, AnyArray, Array, Counts, LinearOp
from ..arrays import parts as parts_of
from ..codecs import Codec
from ..codecs.base import check_codec_argument
from ..comm import Communicator
from ..comm.arguments import check_counts, even_chunk
from ..comm.call import Call
from ..errors import ArrayError
from ..transports.flow import Rows
from .base import Exact
from .coded import Coded, as_like, check_decay, coding_for, with_residual
from .quantized import DEFAULT_CODEC, Quantized


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
    name, codec = "quantized_reduce_scatter", DEFAULT_CODEC if codec is None else codec
    if op not in ("sum", "avg"):
        raise ArrayError(f'{name}: op is {op!r}, expected "sum" or "avg"')
    check_decay(name, decay)
    call = Call(comm, name, x, codec=codec, op=op)
    check_codec_argument(name, codec, arrays.dtype_name(call.x.dtype))
    if counts is None:
        lengths, shape = None, (even_chunk(name, call.x, comm.size), *call.x.shape[1:])
    else:
        lengths = call.detail["counts"] = check_counts(name, "counts", counts, comm.size, call.x)
        shape = (lengths[comm.rank],)
    call.writes_to(out, shape, any_shape=counts is not None)
    errors = None if residual is None else as_like(call, "residual", residual, call.x)
    call.contiguous()
    call.check_overlap(parts_of(call.x, lengths or [math.prod(shape)] * comm.size)[comm.rank])
    if errors is not None and (arrays.overlap(errors, call.x) or arrays.overlap(errors, call.target)):
        raise ArrayError(f"{name}: residual overlaps x or out; pass memory of its own")
    coding = coding_for(call, codec, None if lengths is None else tuple(lengths), call.x)
    coding.check_aligned(call, x=call.x, out=call.target, residual=errors)
    result: A
    if coding.is_trivial:
        result = coding.copy(call, call.x)
        return result
    if len(coding.pieces) > 1:
        call.detail["pieces"] = len(coding.pieces)

    def move(x: Array, target: Array) -> None:
        flow = coding.transport.agree_on_call(coding.text, x)
        chunks = with_residual(comm.scratch, x, errors, coding.size, decay)
        flat = None if errors is None else errors.reshape(-1)
        draws = coding.draws(comm)
        stages = _ReduceScatter(coding, comm.scratch, x, chunks, op=op, residual=flat, decay=decay, draws=draws)
        stages.target = target.reshape(-1)
        coding.through(flow, stages, gather=False)

    call.run(move)
    result = call.result
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
    name, codec = "quantized_allgather", DEFAULT_CODEC if codec is None else codec
    call = Call(comm, name, x, codec=codec)
    check_codec_argument(name, codec, arrays.dtype_name(call.x.dtype))
    if counts is None:
        lengths, shape = None, (comm.size, *call.x.shape)
    else:
        lengths = call.detail["counts"] = check_counts(name, "counts", counts, comm.size, call.x, own=comm.rank)
        shape = (sum(lengths),)
    call.writes_to(out, shape, any_shape=True)
    call.contiguous()
    mine, whole = call.x.reshape(-1), call.target.reshape(-1)
    call.check_overlap(parts_of(whole, lengths or [mine.size] * comm.size)[comm.rank])
    base = None
    if reference is not None:
        base = as_like(call, "reference", reference, call.output.value, written=False)
        if arrays.overlap(base, mine):
            raise ArrayError(f"{name}: reference overlaps x; pass memory apart from x")
        if arrays.overlap(base, call.target) and not arrays.same_memory(base, call.target):
            raise ArrayError(f"{name}: reference overlaps out; pass out=reference, or memory apart from out")
    coding = coding_for(call, codec, None if lengths is None else tuple(lengths), whole)
    coding.check_aligned(call, x=mine, out=whole, reference=base)
    call.sends(mine)
    call.x, call.payload = whole, mine.nbytes  # inputs differ among ranks; the outputs are alike
    result: A
    if coding.is_trivial:
        result = coding.copy(call, mine)
        return result
    if len(coding.pieces) > 1:
        call.detail["pieces"] = len(coding.pieces)

    def move(x: Array, target: Array) -> None:
        flow = coding.transport.agree_on_call(coding.text, x)
        stages = _AllGather(coding, comm.scratch, x, results=whole, draws=coding.draws(comm))
        stages.mine, stages.reference = mine, None if base is None else base.reshape(-1)
        coding.through(flow, stages, scatter=False)

    call.run(move)
    result = call.result
    return result


def codec_for(method: Exact | Quantized, comm: Communicator, x: Array) -> Codec | None:
    """Return the codec for arrays like `x` on `comm`; None if the method sends them exactly."""
    if isinstance(method, Quantized) and x.nbytes >= method.least_bytes(comm.transport_for(x)):
        return method.codec
    return None


def reduce_scatter(
    comm: Communicator,
    x: Array,
    out: Array,
    *,
    op: LinearOp,
    codec: Codec | None,
    counts: Counts = None,
) -> Array:
    """Reduce `x`, (p * m,), and keep this rank's chunk in `out`, (m,): exactly if `codec` is None. Collective.

    Rank r keeps counts[r] elements instead of m if there are `counts`.
    """
    counts = None if counts is None or min(counts) == max(counts) else counts
    if codec is None:
        return comm.reduce_scatter(x, out=out, op=op, counts=counts)
    return quantized_reduce_scatter(comm, x, out, op=op, codec=codec, counts=counts)


def allgather(comm: Communicator, x: Array, out: Array, *, codec: Codec | None, counts: Counts = None) -> Array:
    """Gather `x`, (m,), of all ranks in `out`, (p * m,): exactly if `codec` is None. Collective.

    Rank r has counts[r] elements instead of m if there are `counts`. `x` may be this rank's part of `out`.
    """
    counts = None if counts is None or min(counts) == max(counts) else counts
    if codec is not None:
        return quantized_allgather(comm, x, out, codec=codec, counts=counts)
    return comm.allgather(x, out=out, counts=counts)


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
    """What differences are computed from, and added to: of all ranks, flat."""

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
