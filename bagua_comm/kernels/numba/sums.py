"""Sums of rows of 16-bit floats; see `host.sums` and `host.casts`."""

from __future__ import annotations

import numba

from .codegen import STRIP, kernel, scratch
from .numbers import MINUS_ZERO, clear, divide, itemsize, load, longs_at, round_to, saturate, store


@kernel
def sum_rows(
    source_element: int,
    addresses: int,
    n: int,
    count: int,
    mean: int,
    rounded_element: int,
    element: int,
    target: int,
    stride: int,
) -> None:
    """Add rows of 16-bit floats, round the sum to elements, cast these, and zero the bytes after them."""
    total, wide = numba.carray(scratch(STRIP), (STRIP,)), numba.carray(scratch(STRIP), (STRIP,))
    for at in range(0, count, STRIP):
        part = total[: min(STRIP, count - at)]
        part[:] = MINUS_ZERO
        for address in longs_at(addresses, n):
            term = load(source_element, address + at * itemsize(source_element), len(part), wide)
            for i in range(len(part)):
                part[i] += term[i]
        if mean:
            divide(part, n)
        round_to(rounded_element, part)
        store(element, saturate(element, part, wide), target + at * itemsize(element))
    clear(target, count * itemsize(element), stride)
