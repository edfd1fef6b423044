"""Block fixed point; see `host.fixed_point`.

Blocks are short. LLVM makes fast loops only if each loop is in a function of its own, and if each of its arrays
has a single possible address. So float32, which needs no conversion, has separate branches.
"""

from __future__ import annotations

from typing import Any

import numba
import numpy as np

from ...arrays import Array
from .codegen import STRIP, inner, kernel, scratch
from .numbers import (
    FLOAT32,
    NAN,
    NOT_FINITE,
    bytes_at,
    float_of,
    floats_at,
    ints_at,
    itemsize,
    load,
    longs_at,
    store,
)

_SMALLEST_NORMAL = 2.0**-126


@kernel
def find_fields(element: int, x: int, bounds: int, blocks: int, fields: int) -> None:
    """Raise the exponent field of each block to that of its largest element."""
    edges, found = longs_at(bounds, blocks + 1), bytes_at(fields, blocks)
    wide = numba.carray(scratch(STRIP), (STRIP,))
    for block in range(blocks):
        most = np.uint32(0)
        for at in range(edges[block], edges[block + 1], STRIP):
            count, where = min(STRIP, edges[block + 1] - at), x + at * itemsize(element)
            if element == FLOAT32:
                most = max(most, _largest_magnitude(floats_at(where, count)))
            else:
                most = max(most, _largest_magnitude(load(element, where, count, wide)))
        found[block] = max(found[block], np.uint8(most >> 23))


@inner
def _largest_magnitude(values: Array) -> Any:
    bits, most = values.view(np.uint32), np.uint32(0)
    for i in range(len(bits)):
        most = max(most, np.uint32(bits[i] & 0x7FFFFFFF))
    return most


@kernel
def add_fixed(
    element: int, x: int, bounds: int, blocks: int, fields: int, bits: int, total: int, first: int
) -> None:
    """Add elements, as multiples of the unit of their block, to its sums."""
    edges, found = longs_at(bounds, blocks + 1), bytes_at(fields, blocks)
    wide, kept = numba.carray(scratch(STRIP), (STRIP,)), np.int32(0 if first else -1)
    # From 24 bits on this rounds to 2^bits, which no value exceeds: float32 has 24 bits.
    limit = np.float32((1 << bits) - 1)
    for block in range(blocks):
        field = np.int64(found[block])
        power = 126 + bits - max(field, 1)
        left, right = _power_of_2(power // 2), _power_of_2(power - power // 2)
        for at in range(edges[block], edges[block + 1], STRIP):
            count, where = min(STRIP, edges[block + 1] - at), x + at * itemsize(element)
            sums = ints_at(total + at * 4, count)
            if field == NOT_FINITE:
                _keep(sums, kept)
            elif element == FLOAT32:
                _add_multiples(floats_at(where, count), left, right, limit, kept, sums)
            else:
                _add_multiples(load(element, where, count, wide), left, right, limit, kept, sums)


@inner
def _add_multiples(
    values: Array, left: np.float32, right: np.float32, limit: np.float32, kept: np.int32, sums: Array
) -> None:
    """Add clipped multiples to `sums`, whose bits are first masked with `kept`: all bits or none."""
    for i in range(len(sums)):
        q = np.int32(min(max(np.rint(values[i] * left * right), -limit), limit))
        sums[i] = np.int32((sums[i] & kept) + q)


@inner
def _keep(sums: Array, kept: np.int32) -> None:
    for i in range(len(sums)):
        sums[i] = np.int32(sums[i] & kept)


@kernel
def mean_of_fixed(
    element: int, total: int, bounds: int, blocks: int, fields: int, bits: int, divisor: int, target: int
) -> None:
    """Convert sums of multiples to mean elements."""
    edges, found = longs_at(bounds, blocks + 1), bytes_at(fields, blocks)
    wide = numba.carray(scratch(STRIP), (STRIP,))
    for block in range(blocks):
        field = np.int64(found[block])
        for at in range(edges[block], edges[block + 1], STRIP):
            count, where = min(STRIP, edges[block + 1] - at), target + at * itemsize(element)
            sums = ints_at(total + at * 4, count)
            if element == FLOAT32:
                _mean_strip(sums, field, bits, divisor, floats_at(where, count))
            else:
                _mean_strip(sums, field, bits, divisor, wide[:count])
                store(element, wide[:count], where)


@inner
def _mean_strip(sums: Array, field: int, bits: int, divisor: int, values: Array) -> None:
    # 2^power in float64, by its bits.
    unit = np.int64((max(field, 1) - 126 - bits + 1023) << 52).view(np.float64)
    factor = unit / np.float64(divisor)
    if field == NOT_FINITE:
        values[:] = float_of(NAN)
    elif divisor & (divisor - 1) == 0 and factor >= _SMALLEST_NORMAL:
        # A product with a power of two is exact or overflows, so rounding may come first.
        _round_and_multiply(sums, np.float32(factor), values)
    else:
        _divide_and_multiply(sums, np.float64(divisor), unit, values)


@inner
def _round_and_multiply(sums: Array, factor: np.float32, values: Array) -> None:
    for i in range(len(sums)):
        values[i] = np.float32(sums[i]) * factor


@inner
def _divide_and_multiply(sums: Array, divisor: np.float64, unit: np.float64, values: Array) -> None:
    for i in range(len(sums)):
        values[i] = np.float32(np.float64(sums[i]) / divisor * unit)


@inner
def _power_of_2(power: int) -> np.float32:
    """2^power in float32, by its bits; it is a normal number."""
    return float_of(np.uint32(power + 127) << 23)
