"""Block fixed point, the arithmetic of reproducible sums.

Block b is x[bounds[b] : bounds[b + 1]]; `bounds` is int64 and strictly ascending, so no block is empty. The
elements of a block are multiples of one unit,

    unit = 2^(max(f, 1) - 126 - bits)        q = clip(rint(x / unit), 1 - 2^bits, 2^bits - 1)

where f is the float32 exponent field (0 to 255) of the largest |x| in the block, over all addends. In a block
with an infinity or a NaN, f is 255. For float64, the field has 11 bits, 0 to 2047, and 126 becomes 1022; see
`FixedFormat`. For the proofs see `averages.reproducible`.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from ...arrays import Array, DType
from .numbers import widened

GROUP = 1 << 16
"""The number of elements in a range of blocks: 256 KiB of float32."""


class FixedFormat(NamedTuple):
    """The types of block fixed point for some element dtypes, and the format of floats in which it computes."""

    real: DType
    """float32, also for float16 and bfloat16, or float64."""
    word: DType
    """The bits of a float, as an unsigned integer."""
    field: DType
    """Exponent fields."""
    total: DType
    """Multiples of a unit, and their sums."""
    digits: int
    """The bits of a float's significand, with the leading one."""
    offset: int
    """A float with exponent field f, 1 or more, is below 2^(f - offset)."""

    @property
    def not_finite(self) -> int:
        """The exponent field of infinities and NaN."""
        return 2 * self.offset + 3

    def bits(self, addends: int) -> int:
        """The bits of a multiple, so that the sum of this many does not overflow."""
        return 8 * self.total.itemsize - 1 - (addends - 1).bit_length()

    def powers(self, exponents: Array) -> list[Array]:
        """Factors whose product is 2^exponents: one, or two where that is no normal number."""
        normal = exponents.min() >= -self.offset and exponents.max() < self.offset + 2
        parts = [exponents] if normal else [exponents // 2, exponents - exponents // 2]
        return [np.ldexp(self.real.type(1), part) for part in parts]


_SINGLE = FixedFormat(np.dtype("float32"), np.dtype("uint32"), np.dtype("uint8"), np.dtype("int32"), 24, 126)
_DOUBLE = FixedFormat(np.dtype("float64"), np.dtype("uint64"), np.dtype("uint16"), np.dtype("int64"), 53, 1022)


def fixed_format(dtype: DType) -> FixedFormat:
    """The format of elements of float64, float32, float16 or bfloat16."""
    return _DOUBLE if dtype == np.float64 else _SINGLE


def fixed_exponents(x: Array, bounds: Array, fields: Array) -> None:
    """Raise `fields` to the exponent field of the largest |x| in each block of `x`.

    That of float16 and bfloat16 is the field of the same number in float32. For an empty block, NumPy and CUDA
    would give different fields.
    """
    form = fixed_format(x.dtype)
    room, magnitude = np.empty(min(x.size, GROUP), form.word), form.word.type(np.iinfo(form.word).max >> 1)
    for group in _groups(bounds):
        bits = group.room(room)
        np.bitwise_and(widened(x[group.at]).view(form.word), magnitude, out=bits)
        largest = np.maximum.reduceat(bits, group.starts) >> form.word.type(form.digits - 1)
        np.maximum(fields[group.blocks], largest.astype(fields.dtype), out=fields[group.blocks])


def fixed_add(x: Array, bounds: Array, fields: Array, bits: int, total: Array, *, first: bool) -> None:
    """Add q of every element of `x` to `total`; overwrite `total` if `x` is the `first` addend.

    A block with a value that is not finite adds zeros.
    """
    form, limit = fixed_format(x.dtype), 2**bits - 1
    room = np.empty(min(x.size, GROUP), form.real)
    with np.errstate(all="ignore"):
        for group in _groups(bounds):
            found, value = fields[group.blocks], group.room(room)
            # Only values far below 1/2 are rounded by the first of two factors.
            factors = form.powers(form.offset + bits - _exponents(found))
            np.multiply(widened(x[group.at]), group.spread(factors[0]), out=value)
            for factor in factors[1:]:
                value *= group.spread(factor)
            np.rint(value, out=value)
            if bits < form.digits:  # else no value exceeds the limit
                np.clip(value, -limit, limit, out=value)
            if (found == form.not_finite).any():
                value[group.spread(found == form.not_finite)] = 0
            if first:
                np.copyto(total[group.at], value, casting="unsafe")
            else:
                total[group.at] += value.astype(total.dtype)


def fixed_mean(total: Array, bounds: Array, fields: Array, bits: int, divisor: int, out: Array) -> None:
    """total unit / divisor, rounded to float32 or float64, then to the dtype of `out`; NaN if not finite."""
    form, shift = fixed_format(out.dtype), divisor.bit_length() - 1
    with np.errstate(all="ignore"):
        for group in _groups(bounds):
            found, sums = fields[group.blocks], total[group.at]
            power = _exponents(found) - form.offset - bits
            if divisor == 1 << shift and power.min() - shift >= -form.offset:
                # A product with a power of two is exact or overflows, so rounding may come first.
                value = out[group.at] if out.dtype == form.real else np.empty(sums.shape, form.real)
                np.copyto(value, sums, casting="unsafe")
                value *= group.spread(np.ldexp(form.real.type(1), power - shift))
            else:
                value = _quotients(sums, divisor)
                for factor in _DOUBLE.powers(power):
                    value *= group.spread(factor)
            if (found == form.not_finite).any():
                value[group.spread(found == form.not_finite)] = np.nan
            np.copyto(out[group.at], value.astype(form.real, copy=False), casting="unsafe")


def _quotients(sums: Array, divisor: int) -> Array:
    """sums / divisor in float64, rounded once."""
    if sums.dtype == np.int32:
        return sums / np.float64(divisor)
    # float64 has fewer bits than int64: a large sum is the divisor times a float, and a rest that it holds.
    whole = np.where(np.abs(sums) < 2**53, 0, sums // divisor).astype(np.float64)
    return whole + (sums - whole.astype(np.int64) * divisor) / np.float64(divisor)


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
