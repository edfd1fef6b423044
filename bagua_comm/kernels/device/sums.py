"""Sums of rows: launches of reduce.cu."""

from __future__ import annotations

from ...arrays import Array
from .launches import launch_flat


def reduce_rows(rows: Array, out: Array, op: str) -> None:
    """See `host.reduce_rows`."""
    p, m = rows.shape
    defines = ["INTEGER"] if rows.dtype.kind in "iu" else []
    launch_flat("reduce.cu", f"reduce_{op}", (rows, out, p), m, rows.dtype, defines)
