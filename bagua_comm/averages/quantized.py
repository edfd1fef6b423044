"""The quantized mean, and the quantized allreduce that computes it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, cast

from .. import arrays, kernels
from ..arrays import A, AnyArray, Array, LinearOp
from ..codecs import Codec, MinMaxUInt8
from ..codecs.base import check_codec_argument
from ..comm import Communicator
from ..comm.call import Call
from ..errors import ArrayError
from ..transports.base import Transport
from ..transports.flow import Rows
from .base import InPlace
from .coded import (
    Coded,
    Coding,
    Part,
    as_like,
    cached_coding,
    check_decay,
    coding_for,
    new_coding,
    with_residual,
)

_NAME = "quantized_allreduce"

DEFAULT_CODEC = MinMaxUInt8()


@dataclass(frozen=True)
class Quantized:
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

    def least_bytes(self, transport: Transport) -> int:
        """Return the size in bytes from which arrays are quantized on this transport."""
        return transport.quantize_bytes if self.min_bytes is None else self.min_bytes

    def check(self, dtype: str) -> None:
        """Accept the dtypes of the codec."""
        check_codec_argument("Quantized", self.codec, dtype)


def quantized_allreduce(
    comm: Communicator,
    x: A,
    out: A | None = None,
    *,
    codec: Codec | None = None,
    op: LinearOp = "sum",
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
    codec = DEFAULT_CODEC if codec is None else codec
    if op not in ("sum", "avg"):
        raise ArrayError(f'quantized_allreduce: op is {op!r}, expected "sum" or "avg"')
    check_decay(_NAME, decay)
    coding = cached_coding(comm, _NAME, codec, op, None, x)
    if coding is not None and residual is None and coding.replay(comm, x, out):
        return cast(A, out)
    call = _call(comm, x, codec, op, coding)
    result: A = _reduce(call, coding or _new_coding(call, codec), op, out, residual, decay)
    return result


def _call(comm: Communicator, x: Any, codec: Codec, op: str, coding: Coding | None) -> Call:
    """Return a call on `x`, of which the cached coding is given, if there is one.

    Raises:
        UnsupportedError: The codec does not take the dtype of `x`, or no transport takes such an array.
    """
    if coding is not None:
        return Call(comm, _NAME, x, transport=coding.transport, codec=codec, op=op)
    call = Call(comm, _NAME, x, codec=codec, op=op)
    check_codec_argument(_NAME, codec, arrays.dtype_name(call.x.dtype))
    return call


def _new_coding(call: Call, codec: Codec) -> Coding:
    """Return the coding of a call of whose array, as the caller gave it, none is cached."""
    is_of_another_library = call.x is not call.original
    return (
        coding_for(call, codec, None, call.x) if is_of_another_library else new_coding(call, codec, None, call.x)
    )


class QuantizedMean:
    """A bound `Quantized`."""

    def __init__(self, comm: Communicator, method: Quantized) -> None:
        self._comm, self._codec, self._least = comm, method.codec, method.least_bytes

    def prepare(self, like: Array) -> None:
        """Prepare the reduction of arrays like this one."""
        coding = cached_coding(self._comm, _NAME, self._codec, "avg", None, like)
        call = _call(self._comm, like, self._codec, "avg", coding)
        if coding is None and call.x.nbytes >= self._least(call.transport):
            _new_coding(call, self._codec)

    def __call__(self, x: Array, residual: Array | None = None, decay: float = 0.0) -> Array:
        """Average `x` in place, and return it. Collective."""
        comm, codec = self._comm, self._codec
        coding = cached_coding(comm, _NAME, codec, "avg", None, x)
        if coding is not None and residual is None and x.nbytes >= self._least(coding.transport):  # noqa: SIM102
            if coding.replay(comm, x, x):
                return x
        call = _call(comm, x, codec, "avg", coding)
        least = self._least(call.transport)
        if call.x.nbytes < least:
            with comm.tracer.span("exact: small", bytes=call.x.nbytes, min_bytes=least):
                return comm.allreduce(x, out=x, op="avg")
        return _reduce(call, coding or _new_coding(call, codec), "avg", x, residual, decay)


def _reduce(
    call: Call, coding: Coding, op: str, out: Array | None, residual: AnyArray | None, decay: float
) -> Array:
    """Reduce the array of the call into `out`, which may be that array, and return it. Collective."""
    call.writes_to(out, call.x.shape)
    call.in_place()
    if call.x is not call.target:
        call.contiguous()
    errors = None if residual is None else as_like(call, "residual", residual, call.x)
    coding.check_aligned(call, x=call.x, out=call.target, residual=errors)
    if coding.is_trivial:
        return coding.copy(call, call.x)
    # For a view of another library's array, the caller has looked up no recording.
    is_view = call.x is not call.original
    if errors is None and is_view and coding.replay(call.comm, call.x, call.target):
        return call.result
    if len(coding.pieces) > 1:
        call.detail["pieces"] = len(coding.pieces)
    scratch = call.comm.scratch

    def move(x: Array, target: Array) -> None:
        flow = coding.transport.agree_on_call(coding.text, x)
        chunks, results = with_residual(scratch, x, errors, coding.size, decay), target.reshape(-1)
        is_padded = results.size != coding.size
        stages = _AllReduce(
            coding,
            scratch,
            x,
            chunks,
            chunks if is_padded else results,
            op=op,
            residual=None if errors is None else errors.reshape(-1),
            decay=decay,
            draws=coding.draws(call.comm),
        )
        if errors is None:
            coding.through_recorded(flow, stages, call, x, target)
        else:
            coding.through(flow, stages)
        if is_padded:
            results[...] = chunks[: results.size]

    call.run(move)
    return call.result


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
