"""MinMaxUInt8: launches of minmax.cu."""

from __future__ import annotations

import functools
import math
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from ...arrays import Array, DType, dtype_name
from .launches import LARGEST_CTA, THREADS, WARP, between_kernels, grid_of, launch, struct

_HELD = 16
"""The number of elements that a thread of minmax.cu keeps in registers."""

_layout = struct(
    *("rows", "count", "block", "blocks", "segments", "all_segments", "start", "stride"), floats=("eps",)
)
"""The struct `Layout` of minmax.cu."""


class Partition(NamedTuple):
    """The division of rows of elements, cut into blocks, among the threads of minmax.cu."""

    grid: tuple[int, int]
    cta: tuple[int, int]
    """Threads in a team, teams in a CTA."""

    segments: int
    """The number of segments in a block."""

    ranges: int
    """The number of ranges of segments in all."""

    layout: npt.NDArray[np.void]
    """The struct `Layout`."""


@functools.lru_cache(maxsize=1024)
def partition_of(rows: int, count: int, block: int, start: int, stride: int, eps: float) -> Partition:
    """How minmax.cu divides `rows` of `count` elements; for the other arguments, see the struct `Layout`."""
    block = min(block, count)
    blocks, threads = -(-count // block), -(-block // _HELD)
    team = min(1 << (threads - 1).bit_length(), LARGEST_CTA)
    segments = -(-threads // team)
    teams = THREADS // team if team <= WARP else 1
    ctas = -(-blocks * segments // teams)
    values = rows, count, block, blocks, segments, blocks * segments, start, stride, eps
    return Partition(grid_of(ctas, rows), (team, teams), segments, rows * blocks * segments, _layout(*values))


def minmax_encode(chunks: Array, wire: Array, start: int, block: int, eps: float) -> None:
    """See `host.minmax_encode`."""
    n, m = chunks.shape
    if n * m:
        _encode("encode", (chunks,), wire, partition_of(n, m, block, start, wire.shape[1], eps), chunks.dtype)


def minmax_combine(
    wire: Array, out: Array, count: int, dtype: DType, start: int, block: int, eps: float, op: str
) -> None:
    """See `host.minmax_combine`."""
    if count:
        partition = partition_of(1, count, block, start, out.shape[1], eps)
        _encode("combine", (wire, len(wire), int(op == "avg")), out, partition, dtype)


def minmax_decode(wire: Array, out: Array, start: int, block: int, eps: float) -> None:
    """See `host.minmax_decode`."""
    n, m = out.shape
    if n * m:
        partition = partition_of(n, m, block, start, wire.shape[1], eps)
        grid, cta, layout = partition.grid, partition.cta, partition.layout
        launch("minmax.cu", "decode", dtype_name(out.dtype), grid, cta, (wire, out, layout))


def _encode(name: str, source: tuple[object, ...], wire: Array, partition: Partition, dtype: DType) -> None:
    """Encode the `source` of kernel `name`, in two passes if a block is too long for a CTA."""
    grid, cta, layout, element = partition.grid, partition.cta, partition.layout, dtype_name(dtype)
    if partition.segments == 1:
        is_wide = name == "combine" and math.prod(cta) > THREADS  # `combine` is compiled for fewer threads
        launch("minmax.cu", f"{name}_wide" if is_wide else name, element, grid, cta, (*source, wire, layout))
        return
    # 8 bytes for each 8192 elements.
    ranges = between_kernels("ranges", (partition.ranges, 2), np.float32, wire)
    launch("minmax.cu", f"{name}_ranges", element, grid, cta, (*source, ranges, layout))
    launch("minmax.cu", f"{name}_segments", element, grid, cta, (*source, ranges, wire, layout))
