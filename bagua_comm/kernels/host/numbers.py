"""Number formats and scratch arrays of the NumPy kernels."""

from __future__ import annotations

import contextvars
import math

import numpy as np

from ...arrays import Array, DType, dtype_name

PIECE = 1 << 17
"""The number of elements in a piece: 512 KiB of float32, about the size of a second-level cache."""

LEVELS = np.float32(255)
ZERO = np.float32(0)


def silent_context() -> contextvars.Context:
    """A context in which NumPy gives no warnings; to enter `np.errstate` takes far longer."""
    context = contextvars.Context()
    context.run(np.seterr, all="ignore")
    return context


def widen(x: Array, out: Array) -> None:
    """Copy `x` to `out`, of the same shape and the same or a wider dtype."""
    if dtype_name(x.dtype) == "bfloat16" and out.dtype == np.float32:  # the upper half of a float32
        bits = out.view(np.uint32)
        np.copyto(bits, x.view(np.uint16))
        np.left_shift(bits, 16, out=bits)
    else:
        np.copyto(out, x)


def largest_finite(dtype: DType) -> float:
    """The largest finite value of a float dtype of at most 32 bits."""
    if dtype.name == "bfloat16":
        return 2.0**127 * (2 - 2.0**-7)
    return float(np.finfo(dtype).max)


def widened(x: Array) -> Array:
    """`x` in float32, or float64 if it is: `x` itself, or a copy."""
    if x.dtype in (np.float32, np.float64):
        return x
    wide = np.empty(x.shape, np.float32)
    widen(x, wide)
    return wide


def shaped(scratch: Array, shape: tuple[int, ...]) -> Array:
    """The first elements of a scratch array, in this shape."""
    return scratch[: math.prod(shape)].reshape(shape)


def scratch_arrays(count: int, elements: int) -> tuple[Array, ...]:
    """Scratch arrays of float32, of at most `PIECE` elements."""
    return tuple(np.empty(min(elements, PIECE), np.float32) for _ in range(count))
