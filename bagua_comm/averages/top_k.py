"""The mean of the largest elements: each rank sends a few elements of each chunk, and their indices.

Each rank gathers the records of all ranks and adds them in rank order, so all ranks have the same bits. What a
rank does not send is lost, unless `ErrorFeedback` adds it to the next mean.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np

from .. import arrays, kernels
from ..arrays import AnyArray, Array
from ..codecs.base import check_aligned
from ..comm import Communicator
from ..comm.call import Call
from ..errors import ArrayError, UnsupportedError
from ..kernels.host import TOP_K_LARGEST_CHUNK, top_k_layout
from .base import Average, InPlace, compare_settings
from .coded import as_like

_NAME = "TopK"
_DTYPES = ("bfloat16", "float16", "float32")


@dataclass(frozen=True)
class TopK(Average):
    """The mean of the `keep` largest elements of each chunk of each rank; use it in `ErrorFeedback(TopK())`.

    An array is cut into chunks. From each, a rank sends the elements of the largest magnitudes (of equal ones,
    those of lower indices): an index of 12 bits each, and a value of 2 bits by a code book of four float32
    numbers for the whole array. These are 112 bytes for 4,096 elements, 146 times less than float32, and 16 bytes
    for an array. A last chunk that is shorter sends as many elements, or all that it has.

    Every rank receives the records of all p ranks, (p - 1) times as many bytes as it sends. So from about 74
    ranks on, a rank receives more than by `Quantized()`. Then, or with several ranks on each node,
    `Hierarchical(ErrorFeedback(TopK()))` sends sparse arrays between nodes only.

    The result is the sum over the ranks in rank order, divided by p, to the same bits on all ranks. On a single
    rank the array is left unchanged, since nothing is sent.

    A NaN counts as larger than everything else, and an infinity as larger than every number, so that both are
    sent. With values of 2 bits, all elements that the rank sends of this array then decode to NaN; else a NaN or
    an infinity decodes to NaN.

    On a CUDA device, the time of a code book grows with the square of the number of chunks, since each block of
    threads adds the sums of all chunks. So with values of 2 bits, use chunks of some thousand elements.

    Args:
        chunk: Elements of a chunk, from 2 to 4,096.
        keep: Elements that are sent of a chunk; an even number up to `chunk`.
        bits: Bits of a value: 2; or 16, for bfloat16, or 32, for float32, without a code book.

    Raises:
        ArrayError: An argument is out of range.

    Source: the compression of SparseLoCo (Sarfi et al., arXiv 2508.15706).

    >>> import numpy as np
    >>> from bagua_comm.testing import run_ranks
    >>> mean = TopK(chunk=4, keep=2, bits=32)
    >>> run_ranks(2, lambda comm: mean.bind(comm)(np.array([1, -4, 3 + comm.rank, 0], np.float32)))[1]
    array([ 0. , -4. ,  3.5,  0. ], dtype=float32)
    """

    chunk: int = 4096
    keep: int = 64
    bits: Literal[2, 16, 32] = 2

    def __post_init__(self) -> None:
        check_top_k(_NAME, self.chunk, self.keep, self.bits)

    def bind(self, comm: Communicator, like: Array | None = None) -> InPlace:
        """See `Average.bind`.

        Raises:
            CommMismatch: The ranks have different settings. Raised on all ranks.
        """
        compare_settings(comm, self)
        mean = TopKMean(comm, self)
        if like is not None:
            mean.prepare(like)
        return mean

    def check(self, dtype: str) -> None:
        """Accept float32, float16 and bfloat16."""
        if dtype not in _DTYPES:
            raise UnsupportedError(f"{_NAME}: {self} cannot average {dtype}, only {', '.join(_DTYPES)}")

    def wire_nbytes(self, count: int) -> int:
        """Bytes that a rank sends of an array of `count` elements.

        >>> TopK().wire_nbytes(100 * 4096)
        11216
        """
        return top_k_layout(count, self.chunk, self.keep, self.bits).nbytes


def check_top_k(owner: str, chunk: object, keep: object, bits: object) -> None:
    """Raise `ArrayError` unless these are settings of `TopK`."""
    if type(chunk) is not int or not 2 <= chunk <= TOP_K_LARGEST_CHUNK:
        raise ArrayError(
            f"{owner}: chunk is {chunk!r}, expected an int from 2 to {TOP_K_LARGEST_CHUNK}, since indices have "
            "12 bits"
        )
    if type(keep) is not int or not 2 <= keep <= chunk or keep % 2:
        raise ArrayError(
            f"{owner}: keep is {keep!r}, expected an even int from 2 to the chunk of {chunk}, since indices are "
            "packed in pairs"
        )
    if type(bits) is not int or bits not in (2, 16, 32):
        raise ArrayError(f"{owner}: bits is {bits!r}, expected 2, 16 or 32")


class TopKMean:
    """A bound `TopK`."""

    def __init__(self, comm: Communicator, settings: TopK) -> None:
        self._comm, self._settings = comm, settings
        self._layout = (settings.chunk, settings.keep, settings.bits)

    def prepare(self, like: Array) -> None:
        """Raise unless arrays like this one can be averaged."""
        self._call(like)

    def __call__(self, x: Array, residual: AnyArray | None = None, decay: float = 0.0) -> Array:
        """Average `x` in place, and return it. Collective.

        Args:
            x: The array of this rank.
            residual: What was not sent before, a contiguous array like `x`. It is added to `x`, and then
                overwritten with what is not sent now. See `ErrorFeedback`.
            decay: The part of the residual that stays in it; only the rest is added to `x`.
        """
        call = self._call(x)
        call.writes_to(x, call.x.shape)
        call.in_place()
        call.contiguous()
        flat = call.x.reshape(-1)
        errors = None if residual is None else as_like(call, "residual", residual, call.x).reshape(-1)
        check_aligned(_NAME, "x", flat)
        if errors is not None:
            check_aligned(_NAME, "residual", errors)
        if flat.size:
            unsent = self._compensated(flat, errors, decay)
            self._exchange(flat, unsent)
            if errors is not None and decay:
                kernels.of(flat).add_scaled(unsent, errors, decay, out=errors)
        if not arrays.same_memory(call.x, call.target):
            call.target[...] = call.x
        result: Array = call.result
        return result

    def _call(self, x: Array) -> Call:
        """Return a call on `x`.

        Raises:
            UnsupportedError: It cannot be averaged.
        """
        call = Call(self._comm, _NAME, x)
        self._settings.check(arrays.dtype_name(call.x.dtype))
        return call

    def _compensated(self, flat: Array, errors: Array | None, decay: float) -> Array:
        """Return an array of what is to be sent, which may be overwritten: without a residual, `flat` itself."""
        if errors is None:
            return flat
        run = kernels.of(flat)
        if not decay:
            run.add(flat, errors, out=errors)
            return errors
        addend: Array = self._comm.scratch.take("padded", flat.shape, flat.dtype, like=flat)
        run.add_scaled(flat, errors, 1 - decay, out=addend)
        return addend

    def _exchange(self, flat: Array, unsent: Array) -> None:
        """Put the mean of `unsent` in `flat`, and leave in `unsent` what was not sent, if it is another array."""
        comm, run = self._comm, kernels.of(flat)
        if comm.size == 1:
            if unsent is not flat:
                flat[...] = unsent
                unsent[...] = 0
            return
        shape = (comm.size, self._settings.wire_nbytes(flat.size))
        wires = comm.scratch.take("received", shape, np.uint8, like=flat)
        mine = wires[comm.rank]
        run.top_k_encode(unsent, mine, *self._layout)
        if unsent is not flat:
            run.top_k_subtract(unsent, mine, *self._layout)
        comm.allgather(mine, out=wires)
        run.top_k_sum(wires, flat, *self._layout, "avg")
