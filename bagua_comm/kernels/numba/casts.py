"""Casts of rows; see `host.casts`."""

from __future__ import annotations

import numba

from .codegen import STRIP, kernel, scratch
from .numbers import FLOAT32, cast_halves, clear, itemsize, load, saturate, store


@kernel
def cast_rows(
    source_element: int,
    source: int,
    source_stride: int,
    n: int,
    count: int,
    element: int,
    target: int,
    stride: int,
) -> None:
    """Cast n rows; zero the bytes after the elements in rows of `target`."""
    wide, saturated = numba.carray(scratch(STRIP), (STRIP,)), numba.carray(scratch(STRIP), (STRIP,))
    for row in range(n):
        if source_element != FLOAT32 and element != FLOAT32:
            cast_halves(source_element, source + row * source_stride, element, target + row * stride, count)
            clear(target + row * stride, 2 * count, stride)
            continue
        for at in range(0, count, STRIP):
            where = source + row * source_stride + at * itemsize(source_element)
            values = load(source_element, where, min(STRIP, count - at), wide)
            store(element, saturate(element, values, saturated), target + row * stride + at * itemsize(element))
        clear(target + row * stride, count * itemsize(element), stride)
