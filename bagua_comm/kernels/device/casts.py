"""Casts to 16 bits: launches of cast.cu."""

from __future__ import annotations

from ...arrays import Array, DType, dtype_name
from .launches import THREADS, ctas_of, grid_of, launch


def cast_encode(chunks: Array, wire: Array, sent: DType) -> None:
    """See `host.cast_encode`."""
    n, m = chunks.shape
    _cast("encode", (chunks, wire, n), m, n, wire, chunks.dtype, sent)


def cast_decode(wire: Array, out: Array, sent: DType) -> None:
    """See `host.cast_decode`."""
    n, m = out.shape
    _cast("decode", (wire, out, n), m, n, wire, out.dtype, sent)


def cast_combine(wire: Array, out: Array, count: int, dtype: DType, sent: DType, op: str) -> None:
    """See `host.cast_combine`."""
    _cast("combine", (wire, out, len(wire)), count, 1, wire, dtype, sent, int(op == "avg"))


def _cast(
    name: str, args: tuple[object, ...], m: int, rows: int, wire: Array, dtype: DType, sent: DType, *more: int
) -> None:
    if m and rows:
        grid, args = grid_of(ctas_of(m, dtype), rows), (*args, m, wire.shape[1], *more)
        launch("cast.cu", name, dtype_name(dtype), grid, (THREADS,), args, f"WIRE={dtype_name(sent)}")
