"""The mean of the largest elements: each rank sends a few elements of each chunk, and their indices.

Each rank gathers the records of all ranks and adds them in rank order, so all ranks have the same bits. What a
rank does not send is lost, unless `ErrorFeedback` adds it to the next mean.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from .. import arrays, kernels
from ..arrays import AnyArray, Array
from ..codecs.base import check_aligned
from ..comm import Communicator
from ..comm.call import Call
from ..errors import ArrayError, UnsupportedError
from ..kernels.host import TOP_K_LARGEST_CHUNK
from ..transports.base import Transport
from ..transports.flow import Flow
from .base import Average, InPlace, compare_settings, with_changed
from .coded import as_like
from .records import Record, record_of

_NAME = "TopK"
_DTYPES = ("bfloat16", "float16", "float32")


@dataclass(frozen=True)
class TopK(Average):
    """The mean of the `keep` largest elements of each chunk of each rank; use it in `ErrorFeedback(TopK())`.

    An array is cut into chunks. From each, a rank sends the elements of the largest magnitudes (of equal ones,
    those of lower indices): an index of 12 bits each, and a value of 2 bits by a code book of four float32
    numbers for the whole array. These are 112 bytes for 4,096 elements, 146 times less than float32, and 16 bytes
    for an array. A last chunk that is shorter sends as many elements, or all that it has.

    With `whole_below`, each tensor of a bucket is cut by itself and has its own code book, and tensors of fewer
    elements are sent whole, by `Int4()`: 4.5 bits an element. An array that is bound without `sizes`, as inside
    `Hierarchical`, is one tensor.

    Every rank receives the records of all p ranks, (p - 1) times as many bytes as it sends. So from about 74
    ranks on, a rank receives more than by `Quantized()`. Then, or with several ranks on each node,
    `Hierarchical(ErrorFeedback(TopK()))` sends sparse arrays between nodes only.

    The result is the sum over the ranks in rank order, divided as `divide` says, to the same bits on all ranks.
    On a single rank the array is left unchanged, since nothing is sent.

    A NaN counts as larger than everything else, and an infinity as larger than every number, so that both are
    sent. With values of 2 bits, all elements that the rank sends of this array then decode to NaN; else a NaN or
    an infinity decodes to NaN.

    Args:
        chunk: Elements of a chunk, from 2 to 4,096.
        keep: Elements that are sent of a chunk; an even number up to `chunk`.
        bits: Bits of a value: 2; or 16, for bfloat16, or 32, for float32, without a code book.
        whole_below: Tensors of fewer elements than this are sent whole; 0 to cut a bucket without regard to its
            tensors.
        divide: "all" for the mean over all ranks, to which those that do not send an element add 0; "senders" for
            the mean over the ranks that send it, other than as 0. The latter moves an element further that few
            ranks send, and is not linear: sums of means are no longer those of the exact means, and ranks cannot
            have weights.

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
    whole_below: int = 0
    divide: Literal["all", "senders"] = "all"

    def __post_init__(self) -> None:
        check_top_k(_NAME, self.chunk, self.keep, self.bits, self.whole_below, self.divide)

    def __repr__(self) -> str:
        """The settings, of the last two those that are not defaults: so checkpoints of earlier versions load."""
        return with_changed(self, "whole_below", "divide")

    @property
    def weighs(self) -> bool:  # type: ignore[override]
        """Whether it divides by all ranks: among senders, a rank with weight 0 does not count."""
        return self.divide == "all"

    def bind(self, comm: Communicator, like: Array | None = None, sizes: Sequence[int] | None = None) -> InPlace:
        """See `Average.bind`.

        Args:
            comm: The ranks.
            like: An array like those to be averaged.
            sizes: Numbers of elements of the consecutive tensors in the array; the rest is padding, whose values
                afterwards are unspecified. None if the array is one tensor.

        Raises:
            CommMismatch: The ranks have different settings or tensors. Raised on all ranks.
        """
        tensors = None if sizes is None or not self.whole_below else tuple(sizes)
        compare_settings(comm, self, tensors=tensors)
        mean = TopKMean(comm, self, tensors)
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
        return record_of(self.chunk, self.keep, self.bits, self.whole_below, (count,)).nbytes


def check_top_k(
    owner: str, chunk: object, keep: object, bits: object, whole_below: object, divide: object
) -> None:
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
    if type(whole_below) is not int or whole_below < 0:
        raise ArrayError(
            f"{owner}: whole_below is {whole_below!r}, expected a number of elements, an int from 0 on"
        )
    if not isinstance(divide, str) or divide not in ("all", "senders"):
        raise ArrayError(f'{owner}: divide is {divide!r}, expected "all" or "senders"')


class TopKMean:
    """A bound `TopK`."""

    def __init__(self, comm: Communicator, settings: TopK, tensors: tuple[int, ...] | None) -> None:
        self._comm, self._settings, self._tensors = comm, settings, tensors

    def prepare(self, like: Array) -> None:
        """Raise unless arrays like this one can be averaged."""
        self._call(like)
        self._record(like.size)

    def _record(self, count: int) -> Record:
        """The record of an array of `count` elements."""
        settings, tensors = self._settings, self._tensors or (count,)
        if sum(tensors) > count:
            raise ArrayError(
                f"{_NAME}: x has {count} elements, expected the {sum(tensors)} of its tensors; bind an average "
                "for each array"
            )
        return record_of(settings.chunk, settings.keep, settings.bits, settings.whole_below, tensors)

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
        if self._comm.size > 1:
            call.run(lambda *_: self._average(flat, errors, decay, call.transport))
        else:
            self._average(flat, errors, decay)
        if not arrays.same_memory(call.x, call.target):
            call.target[...] = call.x
        return call.result

    def _call(self, x: Array) -> Call:
        """Return a call on `x`.

        Raises:
            UnsupportedError: It cannot be averaged.
        """
        call = Call(self._comm, _NAME, x, average=self._settings)
        self._settings.check(arrays.dtype_name(call.x.dtype))
        return call

    def _average(
        self, flat: Array, errors: Array | None, decay: float, transport: Transport | None = None
    ) -> None:
        """Average `flat` in place, over `transport` if there are several ranks. Collective."""
        flow = None if transport is None else transport.agree_on_call(_NAME, flat, by_messages=flat.size > 0)
        if not flat.size:
            if transport is not None:
                transport.barrier()  # the array of another rank may not be empty
            return
        record = self._record(flat.size)  # may raise, and the residual is as it was
        unsent = self._compensated(flat, errors, decay)
        self._exchange(flow, record, flat, unsent)
        if errors is not None and decay:
            kernels.of(flat).add_scaled(unsent, errors, decay, out=errors)

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

    def _exchange(self, flow: Flow | None, record: Record, flat: Array, unsent: Array) -> None:
        """Put the mean of `unsent` in `flat`, and leave in `unsent` what was not sent, if it is another array."""
        comm = self._comm
        if flow is None:
            if unsent is not flat:
                flat[...] = unsent
                unsent[...] = 0
            return
        scratch = comm.scratch
        wires = scratch.take("received", (comm.size, record.nbytes), np.uint8, like=flat)
        mine = wires[comm.rank]
        record.encode(unsent, mine, scratch)
        if unsent is not flat:
            record.subtract(unsent, mine, scratch)
        flow.allgather(mine, wires)()
        record.mean(wires, flat, scratch, "avg" if self._settings.divide == "all" else "senders")
