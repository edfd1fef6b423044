"""The record of `TopK`: what a rank sends of an array of several tensors.

    record := whole | tensor | tensor ...

This is the wire format from version 2 on (docs/how-it-works/wire-format.md). `whole` is one chunk of `Int4()`, of
all small tensors together. Each other tensor has the bytes of the kernels of `TopK`, with a code book of its own.
An array that is one large tensor has these bytes alone.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import numpy as np

from .. import kernels
from ..arrays import Array, Scratch, parts
from ..codecs import Int4
from ..kernels.host import top_k_layout

_CODEC = Int4()
_ALIGNMENT = 32
"""The parts of a record start at multiples of this number of bytes, if it has several."""


class _Part(NamedTuple):
    elements: slice
    """In the array."""
    wire: slice
    """In the record."""


class Record:
    """Where the tensors of an array are in its record, and how they get there and back.

    Args:
        layout: `chunk`, `keep` and `bits` of the kernels.
        whole_below: Tensors of fewer elements are sent whole.
        sizes: Numbers of elements of the tensors.
    """

    def __init__(self, layout: tuple[int, int, int], whole_below: int, sizes: tuple[int, ...]) -> None:
        self._layout = layout
        ends = np.cumsum(sizes).tolist()
        tensors = [slice(end - size, end) for size, end in zip(sizes, ends, strict=True)]
        self._small = [each for each, size in zip(tensors, sizes, strict=True) if size < whole_below]
        self._count = sum(each.stop - each.start for each in self._small)
        at = self._whole = _CODEC.wire_nbytes(self._count, np.dtype(np.float32)) if self._count else 0
        self._large: list[_Part] = []
        for each, size in zip(tensors, sizes, strict=True):
            if size >= whole_below:
                at = -(-at // _ALIGNMENT) * _ALIGNMENT
                nbytes = top_k_layout(size, *layout).nbytes
                self._large.append(_Part(each, slice(at, at + nbytes)))
                at += nbytes
        self.nbytes: int = at
        """Size of the record."""
        self._is_plain = len(self._large) == 1 and not self._count

    def encode(self, x: Array, wire: Array, scratch: Scratch) -> None:
        """Encode `x`, (m,), in `wire`, (nbytes,) uint8."""
        if self._count:
            _CODEC.encode(self._gathered(x, scratch), wire[None, : self._whole])
        previous = self._whole
        for part in self._large:
            if previous < part.wire.start:  # one kernel less where nothing is between them
                wire[previous : part.wire.start] = 0
            kernels.of(x).top_k_encode(x[part.elements], wire[part.wire], *self._layout)
            previous = part.wire.stop

    def subtract(self, x: Array, wire: Array, scratch: Scratch) -> None:
        """Subtract the record from `x`, from which it was encoded; what is not finite afterwards becomes 0."""
        run = kernels.of(x)
        if self._count:
            sent, mine = scratch.take("sent", (1, self._count), x.dtype, like=x), self._gathered(x, scratch)
            _CODEC.decode(wire[None, : self._whole], sent)
            run.loss(mine, sent, 1.0, out=mine)
            self._scatter(mine, x)
        for part in self._large:
            run.top_k_subtract(x[part.elements], wire[part.wire], *self._layout)

    def mean(self, wires: Array, out: Array, scratch: Scratch, op: str) -> None:
        """Put the mean of the records of p ranks, (p, nbytes), in `out`, (m,), added in float32 in rank order.

        `op` is that of the kernels of `TopK`; small tensors, which all ranks send, are divided by p.
        """
        run, p = kernels.of(out), len(wires)
        if self._count:
            rows = scratch.take("sent", (p, self._count), out.dtype, like=out)
            _CODEC.decode(self._rows(wires, slice(0, self._whole), scratch), rows)
            mean = scratch.take("small", (1, self._count), out.dtype, like=out)
            run.reduce_rows(rows, mean[0], "avg")
            self._scatter(mean, out)
        for part in self._large:
            rows = self._rows(wires, part.wire, scratch)
            run.top_k_sum(rows, out[part.elements], *self._layout, op)

    def _rows(self, wires: Array, part: slice, scratch: Scratch) -> Array:
        """A part of all records, contiguous."""
        if self._is_plain:
            return wires
        rows: Array = scratch.take("part", (len(wires), part.stop - part.start), np.uint8, like=wires)
        rows[...] = wires[:, part]
        return rows

    def _gathered(self, x: Array, scratch: Scratch) -> Array:
        """The small tensors, (1, count)."""
        gathered: Array = scratch.take("small", (1, self._count), x.dtype, like=x)
        for each, part in zip(self._small, self._parts(gathered), strict=True):
            part[...] = x[each]
        return gathered

    def _scatter(self, gathered: Array, out: Array) -> None:
        """Put the small tensors in an array."""
        for each, part in zip(self._small, self._parts(gathered), strict=True):
            out[each] = part

    def _parts(self, gathered: Array) -> list[Array]:
        return parts(gathered, [each.stop - each.start for each in self._small])


@functools.lru_cache(maxsize=1024)
def record_of(chunk: int, keep: int, bits: int, whole_below: int, sizes: tuple[int, ...]) -> Record:
    """The record of an array of tensors with these numbers of elements; see `TopK`.

    >>> record_of(4096, 64, 2, 0, (8192,)).nbytes, record_of(4096, 64, 2, 100, (8192, 96)).nbytes
    (240, 336)
    """
    return Record((chunk, keep, bits), whole_below, sizes)
