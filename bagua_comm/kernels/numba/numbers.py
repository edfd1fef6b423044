"""Number formats: elements in memory, their conversion to float32, and rounding.

A processor without instructions for float16 has no compiled kernels: LLVM calls C functions instead, which are
missing when the kernels are loaded and compared with NumPy's.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numba
import numpy as np
from llvmlite import ir

from ...arrays import Array
from .codegen import emits, inlined, inner, pointer, prefetch

FLOAT32, FLOAT16, BFLOAT16 = range(3)
"""The numbers of element dtypes (see `compiled`)."""

LARGEST = tuple(np.float32(largest) for largest in (2.0**128 - 2.0**104, 65504, 2.0**128 - 2.0**120))
"""The largest finite number of each element dtype."""

SIGN, _INFINITY, NAN = np.uint32(0x80000000), np.uint32(0x7F800000), np.uint32(0x7FC00000)
MINUS_ZERO = np.float32(-0.0)
"""The identity of float addition: -0.0 + x == x, also for x = -0.0."""

ZERO, LEVELS = np.float32(0), np.float32(255)
NOT_FINITE = 255
"""The exponent field of infinities and NaN."""

AHEAD = 4096
"""How many bytes ahead of their use elements are loaded into caches, by kernels that read a few of them and then
compute: a processor by itself loads ahead only within pages of this size."""

_LINE = 64
"""The bytes of a cache line."""


def _elements_at(dtype: type[np.generic]) -> Callable[[int, int], Array]:
    """A function of an address and a number of elements, for kernels: these elements, as an array."""

    @inner
    def elements_at(where: int, count: int) -> Array:
        return numba.carray(pointer(where, dtype), (count,))

    return elements_at


floats_at, ints_at, uints_at = map(_elements_at, (np.float32, np.int32, np.uint32))
longs_at, words_at, doubles_at = map(_elements_at, (np.int64, np.uint64, np.float64))
halves_at = _elements_at(np.uint16)
"""The bits of elements of float16 or bfloat16."""
bytes_at = _elements_at(np.uint8)


@inner
def itemsize(element: int) -> int:
    """The bytes of an element."""
    return 4 if element == FLOAT32 else 2


@emits(numba.types.float32, numba.types.uint16)
def _extended(builder: ir.IRBuilder, half: ir.Value) -> ir.Value:
    """The bits of a float16, as float32."""
    return builder.fpext(builder.bitcast(half, ir.HalfType()), ir.FloatType())


@emits(numba.types.uint16, numba.types.float32)
def _truncated(builder: ir.IRBuilder, x: ir.Value) -> ir.Value:
    """The bits of a float32, rounded to float16."""
    return builder.bitcast(builder.fptrunc(x, ir.HalfType()), ir.IntType(16))


@emits(numba.types.float64, numba.types.float64)
def square_root(builder: ir.IRBuilder, x: ir.Value) -> ir.Value:
    """The square root of a float64; NumPy's would call the C library."""
    return builder.call(builder.module.declare_intrinsic("llvm.sqrt", [ir.DoubleType()]), [x])


@inner
def bits_of(x: np.float32) -> np.uint32:
    """The bits of a float32."""
    bits: np.uint32 = np.float32(x).view(np.uint32)
    return bits


@inner
def float_of(bits: np.uint32) -> np.float32:
    """The float32 with these bits."""
    x: np.float32 = np.uint32(bits).view(np.float32)
    return x


@inner
def from_float16(half: np.uint16) -> Any:
    """The bits of a float16, as float32."""
    return _extended(np.uint16(half))


@inner
def to_float16(x: np.float32) -> Any:
    """Round half to even; NaN becomes the canonical NaN."""
    return finite_to_float16(x) if x == x else np.uint16(0x7E00)


@inner
def finite_to_float16(x: np.float32) -> Any:
    """Round a number other than NaN."""
    return _truncated(np.float32(x))


@inner
def from_bfloat16(half: np.uint16) -> np.float32:
    """The bits of a bfloat16, as float32."""
    return float_of(np.uint32(half) << 16)


@inner
def to_bfloat16(x: np.float32) -> Any:
    """Round half to even; NaN becomes the canonical NaN."""
    return finite_to_bfloat16(x if x == x else float_of(NAN))


@inner
def finite_to_bfloat16(x: np.float32) -> Any:
    """Round a number other than NaN."""
    bits = bits_of(x)
    return np.uint16(np.uint32(bits + 0x7FFF + (np.uint32(bits >> 16) & 1)) >> 16)


@inner
def load(element: int, where: int, count: int, scratch: Array) -> Array:
    """`count` elements in float32: in place if they are float32, else converted in `scratch`."""
    if element == FLOAT32:
        return floats_at(where, count)
    halves, wide = halves_at(where, count), scratch[:count]
    if element == FLOAT16:
        for i in range(count):
            wide[i] = from_float16(halves[i])
    else:
        for i in range(count):
            wide[i] = from_bfloat16(halves[i])
    return wide


@inner
def store(element: int, values: Array, where: int) -> None:
    """Round `values` to an element dtype, and write them."""
    count = len(values)
    floats, halves = floats_at(where, count), halves_at(where, count)
    if element == FLOAT32:
        for i in range(count):
            floats[i] = values[i]
    elif element == FLOAT16:
        for i in range(count):
            halves[i] = to_float16(values[i])
    else:
        for i in range(count):
            halves[i] = to_bfloat16(values[i])


@inner
def round_to(element: int, values: Array) -> None:
    """Round `values` to an element dtype, in place."""
    if element == FLOAT16:
        for i in range(len(values)):
            values[i] = from_float16(to_float16(values[i]))
    elif element == BFLOAT16:
        for i in range(len(values)):
            values[i] = from_bfloat16(to_bfloat16(values[i]))


@inner
def saturate(element: int, values: Array, scratch: Array) -> Array:
    """Copy to `scratch`: finite values stay finite in an element dtype, NaN become canonical."""
    source, target = values.view(np.uint32), scratch[: len(values)].view(np.uint32)
    largest = bits_of(LARGEST[element])
    for i in range(len(source)):
        target[i] = _saturated(source[i], largest)
    return scratch[: len(values)]


@inner
def _saturated(bits: np.uint32, largest: np.uint32) -> Any:
    magnitude = np.uint32(bits & 0x7FFFFFFF)
    kept = min(magnitude, largest) if magnitude < _INFINITY else magnitude
    return NAN if magnitude > _INFINITY else np.uint32(kept | (bits & SIGN))


@inner
def cast_halves(source_element: int, source: int, element: int, target: int, count: int) -> None:
    """Cast between 16-bit dtypes: finite values stay finite, NaN become canonical."""
    halves, casts = halves_at(source, count), halves_at(target, count)
    if source_element == element:
        infinity = np.uint16(0x7C00 if element == FLOAT16 else 0x7F80)
        nan = np.uint16(0x7E00 if element == FLOAT16 else 0x7FC0)
        for i in range(count):
            half = halves[i]
            casts[i] = nan if np.uint16(half & np.uint16(0x7FFF)) > infinity else half
    elif element == FLOAT16:
        largest = bits_of(LARGEST[FLOAT16])
        for i in range(count):
            casts[i] = finite_to_float16(float_of(_saturated(bits_of(from_bfloat16(halves[i])), largest)))
    else:  # no float16 is too large
        for i in range(count):
            casts[i] = to_bfloat16(from_float16(halves[i]))


@inner
def divide(values: Array, divisor: int) -> None:
    """Divide float32 values in place."""
    for i in range(len(values)):
        values[i] /= np.float32(divisor)


@inlined
def load_ahead(where: int, nbytes: int) -> None:
    """Begin to load the bytes that follow these ones after `AHEAD`."""
    for line in range(0, nbytes, _LINE):
        prefetch(where + AHEAD + line)


@inner
def clear(row: int, begin: int, end: int) -> None:
    """Zero the bytes from `begin` to `end` of a row."""
    bytes_at(row + begin, end - begin)[:] = 0
