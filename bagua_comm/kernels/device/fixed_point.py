"""Block fixed point: launches of fixed.cu."""

from __future__ import annotations

from ...arrays import Array, DType, dtype_name
from .launches import THREADS, WARP, grid_of, launch


def fixed_exponents(x: Array, bounds: Array, fields: Array) -> None:
    """See `host.fixed_exponents`."""
    _fixed("exponents", x.dtype, bounds, (x, bounds, fields))


def fixed_add(x: Array, bounds: Array, fields: Array, bits: int, total: Array, *, first: bool) -> None:
    """See `host.fixed_add`."""
    _fixed("add", x.dtype, bounds, (x, bounds, fields, total, bits, int(first)))


def fixed_mean(total: Array, bounds: Array, fields: Array, bits: int, divisor: int, out: Array) -> None:
    """See `host.fixed_mean`."""
    _fixed("mean", out.dtype, bounds, (total, bounds, fields, out, bits, divisor))


def _fixed(name: str, dtype: DType, bounds: Array, args: tuple[object, ...]) -> None:
    """Launch a kernel of fixed.cu: a warp for each block."""
    blocks = bounds.size - 1
    if blocks:
        warps = THREADS // WARP
        launch("fixed.cu", name, dtype_name(dtype), grid_of(-(-blocks // warps)), (WARP, warps), (*args, blocks))
