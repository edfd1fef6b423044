"""Block fixed point, the arithmetic of reproducible sums.

Block b is x[bounds[b] : bounds[b + 1]]; `bounds` is int64 and strictly ascending, so no block is empty. The
elements of a block are multiples of one unit,

    unit = 2^(max(f, 1) - 126 - bits)        q = clip(rint(x / unit), 1 - 2^bits, 2^bits - 1)

where f is the float32 exponent field (0 to 255) of the largest |x| in the block, over all addends. In a block
with an infinity or a NaN, f is 255. For the proofs see `averages.reproducible`.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from ...arrays import Array
from .numbers import widened

GROUP = 1 << 16
"""The number of elements in a range of blocks: 256 KiB of float32."""

_NOT_FINITE = 255
"""The exponent field of infinities and NaN."""


def fixed_exponents(x: Array, bounds: Array, fields: Array) -> None:
    """Raise `fields`, uint8, to the exponent field of the largest |x| in each block of `x`.

    `x` is float32, float16 or bfloat16; the field is that of the same number in float32. For an empty block,
    NumPy and CUDA would give different fields.
    """
    room = np.empty(min(x.size, GROUP), np.uint32)
    for group in _groups(bounds):
        bits = group.room(room)
        np.bitwise_and(widened(x[group.at]).view(np.uint32), np.uint32(0x7FFFFFFF), out=bits)
        largest = np.maximum.reduceat(bits, group.starts) >> np.uint32(23)
        np.maximum(fields[group.blocks], largest.astype(np.uint8), out=fields[group.blocks])


def fixed_add(x: Array, bounds: Array, fields: Array, bits: int, total: Array, *, first: bool) -> None:
    """Add q of every element of `x` to `total`, int32; overwrite `total` if `x` is the `first` addend.

    A block with a value that is not finite adds zeros.
    """
    limit = 2**bits - 1
    room = np.empty(min(x.size, GROUP), np.float32)
    with np.errstate(all="ignore"):
        for group in _groups(bounds):
            found, value = fields[group.blocks], group.room(room)
            power = 126 + bits - _exponents(found)
            # Two factors where one may overflow. Only values far below 1/2 are rounded.
            halves = [power] if power.max() < 128 else [power // 2, power - power // 2]
            np.multiply(widened(x[group.at]), group.spread(np.ldexp(np.float32(1), halves[0])), out=value)
            for half in halves[1:]:
                value *= group.spread(np.ldexp(np.float32(1), half))
            np.rint(value, out=value)
            if bits < 24:  # float32 has 24 bits: from there on, no value exceeds the limit
                np.clip(value, -limit, limit, out=value)
            if (found == _NOT_FINITE).any():
                value[group.spread(found == _NOT_FINITE)] = 0
            if first:
                np.copyto(total[group.at], value, casting="unsafe")
            else:
                total[group.at] += value.astype(np.int32)


def fixed_mean(total: Array, bounds: Array, fields: Array, bits: int, divisor: int, out: Array) -> None:
    """total unit / divisor, rounded to float32, then to the dtype of `out`; NaN where a block is not finite."""
    shift = divisor.bit_length() - 1
    with np.errstate(all="ignore"):
        for group in _groups(bounds):
            found, sums = fields[group.blocks], total[group.at]
            power = _exponents(found) - 126 - bits
            if divisor == 1 << shift and power.min() - shift >= -126:
                # A product with a power of two is exact or overflows, so rounding may come first.
                value = out[group.at] if out.dtype == np.float32 else np.empty(sums.shape, np.float32)
                np.copyto(value, sums, casting="unsafe")
                value *= group.spread(np.ldexp(np.float32(1), power - shift))
            else:
                value = sums / np.float64(divisor)
                value *= group.spread(np.ldexp(1.0, power))
            if (found == _NOT_FINITE).any():
                value[group.spread(found == _NOT_FINITE)] = np.nan
            np.copyto(out[group.at], value.astype(np.float32, copy=False), casting="unsafe")


class _BlockRange(NamedTuple):
    """Consecutive blocks of about `GROUP` elements in all, which fit a cache."""

    blocks: slice
    at: slice
    """Their elements in the array."""
    starts: Array
    """The first of these elements of each block."""
    lengths: Array
    """The number of elements of each block."""

    def room(self, room: Array) -> Array:
        """The first elements of `room`, one for each of the blocks; a new array if `room` is too small."""
        count = self.at.stop - self.at.start
        return room[:count] if count <= room.size else np.empty(count, room.dtype)

    def spread(self, values: Array) -> Array:
        """Repeat the value of each block for each of its elements."""
        return np.repeat(values, self.lengths)


def _exponents(fields: Array) -> Array:
    """The exponents of these fields; subnormal numbers have that of the smallest normal ones."""
    return np.maximum(fields, 1).astype(np.int32)


def _groups(bounds: Array) -> Iterator[_BlockRange]:
    """Cut the blocks into ranges."""
    lengths = np.diff(bounds)
    cuts = np.searchsorted(bounds, np.arange(bounds[0], bounds[-1], GROUP))
    for begin, end in itertools.pairwise(np.unique(np.append(cuts, len(lengths))).tolist()):
        edges = bounds[begin : end + 1]
        at = slice(int(edges[0]), int(edges[-1]))
        yield _BlockRange(slice(begin, end), at, edges[:-1] - edges[0], lengths[begin:end])
