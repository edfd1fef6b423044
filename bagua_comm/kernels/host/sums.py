"""Reductions of the rows of ranks, in rank order."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ...arrays import REDUCED_PRECISION, UFUNCS, Array, DType, dtype_name
from .numbers import PIECE, widen


def is_plain(dtype: DType, op: str) -> bool:
    """Whether rows are reduced in their own dtype, without widening or integer division."""
    return dtype_name(dtype) not in REDUCED_PRECISION and not (op == "avg" and dtype.kind in "iu")


def reduce_rows(rows: Sequence[Array], out: Array, op: str) -> None:
    """Reduce p `rows` of (m,), as an array or a list, to `out`, (m,), in row order.

    float16 and bfloat16 accumulate in float32 and are rounded once; NaN becomes canonical. "avg" divides the sum
    by p; integers are then added in 64 bits, and the quotient is truncated towards zero. `out` may be one of the
    rows.
    """
    m, dtype = out.size, out.dtype
    wide: DType = dtype
    if dtype_name(dtype) in REDUCED_PRECISION:
        wide = np.dtype(np.float32)
    elif op == "avg" and dtype.kind in "iu":
        wide = np.dtype(np.uint64 if dtype.kind == "u" else np.int64)
    same = wide == dtype
    # The sum cannot accumulate in `out` if that is a later row, still to be added.
    grows_in_out = same and not any(np.may_share_memory(out, row) for row in rows[2:])
    total = out if grows_in_out else np.empty(min(m, PIECE), wide)
    term = total if same else np.empty_like(total)
    with np.errstate(all="ignore"):
        for start in range(0, m, PIECE):
            piece = slice(start, min(start + PIECE, m))
            acc, part = total[: piece.stop - start], term[: piece.stop - start]
            if grows_in_out:
                acc = out[piece]
            if same and len(rows) > 1:
                UFUNCS[op](rows[0][piece], rows[1][piece], out=acc)
            else:
                widen(rows[0][piece], acc)
            for row in rows[2 if same else 1 :]:
                value = row[piece]
                if not same:
                    widen(value, part)
                    value = part
                UFUNCS[op](acc, value, out=acc)
            if op == "avg":
                divide(acc, len(rows))
            if wide == np.float32 and not same:
                np.copyto(acc, np.float32(np.nan), where=np.isnan(acc))
            if not grows_in_out:
                np.copyto(out[piece], acc, casting="unsafe")


def divide(x: Array, divisor: int) -> None:
    """Divide in place by a positive integer; integers are truncated towards zero."""
    if x.dtype.kind in "iu":
        np.subtract(x, np.fmod(x, x.dtype.type(divisor)), out=x)
        np.floor_divide(x, x.dtype.type(divisor), out=x)
    else:
        np.divide(x, x.dtype.type(divisor), out=x)
