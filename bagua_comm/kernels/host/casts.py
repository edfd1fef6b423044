"""Casts between float dtypes, and the sums of cast rows."""

from __future__ import annotations

import numpy as np

from ...arrays import Array, DType
from .numbers import PIECE, largest_finite, scratch_arrays, widen


def cast_encode(chunks: Array, wire: Array, sent: DType) -> None:
    """Cast `chunks`, (n, m), to rows of `wire`, (n, w) uint8: m elements of dtype `sent`, then zeros.

    Values are rounded half to even. Finite values stay finite, infinities stay, and NaN becomes canonical.
    """
    m = chunks.shape[1]
    cast_saturating(chunks, _sent(wire, m, sent))
    wire[:, m * sent.itemsize :] = 0


def cast_decode(wire: Array, out: Array, sent: DType) -> None:
    """Cast the elements in rows of `wire`, as `cast_encode` writes them, to `out`, (n, m)."""
    cast_saturating(_sent(wire, out.shape[1], sent), out)


def cast_combine(wire: Array, out: Array, count: int, dtype: DType, sent: DType, op: str) -> None:
    """Sum the n rows of `wire`, `count` elements each, in float32 and row order; encode the sum in `out`, (1, w).

    "avg" divides by n. The result is rounded to the element dtype `dtype` before it is cast.
    """
    n, rows, target = len(wire), _sent(wire, count, sent), _sent(out, count, sent)[0]
    total, term = scratch_arrays(2, count)
    with np.errstate(all="ignore"):
        for start in range(0, count, PIECE):
            piece = slice(start, min(start + PIECE, count))
            acc, part = total[: piece.stop - start], term[: piece.stop - start]
            widen(rows[0, piece], acc)
            for row in range(1, n):
                widen(rows[row, piece], part)
                np.add(acc, part, out=acc)
            if op == "avg":
                np.divide(acc, np.float32(n), out=acc)
            cast_saturating(acc.astype(dtype, copy=False), target[piece])
    out[:, count * sent.itemsize :] = 0


def _sent(wire: Array, count: int, dtype: DType) -> Array:
    """The elements in rows of `wire`."""
    return wire[:, : count * dtype.itemsize].view(dtype)


def cast_saturating(x: Array, out: Array) -> None:
    """Round `x` to the dtype of `out`, half to even; finite values stay finite, NaN and inf stay.

    `x` and `out` have one shape. Works on pieces along the last axis.
    """
    limit = largest_finite(out.dtype)
    (wide,) = scratch_arrays(1, x.shape[-1])
    with np.errstate(all="ignore"):
        for row in np.ndindex(x.shape[:-1]):
            for start in range(0, x.shape[-1], PIECE):
                source = x[row][start : start + PIECE]
                value = wide[: source.size]
                np.copyto(value, source, casting="unsafe")
                _clamp_finite(value, limit)
                np.copyto(out[row][start : start + PIECE], value, casting="unsafe")


def _clamp_finite(x: Array, limit: float) -> None:
    """Clamp finite values of float32 `x` to [-limit, limit], in place; inf stays, NaN becomes canonical."""
    if x.size == 0:
        return
    low, high = x.min(), x.max()
    if -limit <= low and high <= limit:  # False for NaN
        return
    beyond = np.isfinite(x) & (np.abs(x) > limit)
    np.copyto(x, np.copysign(limit, x), where=beyond)
    np.copyto(x, np.float32(np.nan), where=np.isnan(x))
