"""Int4: launches of int4.cu."""

from __future__ import annotations

import functools
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from ...arrays import Array, DType, dtype_name
from ...execution.recording import current
from ..host import Draws
from .launches import LARGEST_CTA, WARP, grid_of, launch, struct

_GROUP, _WARPS = 32, 4
"""Elements of a block that a thread keeps in registers, and warps in a CTA of such threads."""

_TILE = 4096
"""Elements of a CTA of the kernels for blocks of any size."""

_layout = struct("rows", "count", "block", "blocks", "rotate", "start", "stride", "mask")
"""The struct `Layout` of int4.cu."""


class Partition(NamedTuple):
    """The division of rows of elements among the threads of int4.cu."""

    suffix: str
    """The kernels' names end with it."""

    grid: tuple[int, int]
    cta: tuple[int, int]

    layout: npt.NDArray[np.void]
    """The struct `Layout`."""


@functools.lru_cache(maxsize=1024)
def partition_of(rows: int, count: int, block: int, rotate: int, start: int, stride: int) -> Partition:
    """How int4.cu divides `rows` of `count` elements; a `rotate` of 0 stands for sums, which need no rotation."""
    blocks = -(-count // block)
    layout = _layout(rows, count, block, blocks, rotate, start, stride, 15)
    if block == _GROUP and rotate in (0, _GROUP):
        suffix, ctas, cta = "", -(-blocks // (WARP * _WARPS)), (WARP, _WARPS)  # a thread a block
    else:
        suffix, ctas, cta = "_any", -(-blocks * block // _TILE), (LARGEST_CTA, 1)
    return Partition(suffix, grid_of(ctas, rows), cta, layout)


def int4_encode(
    chunks: Array, wire: Array, start: int, block: int, rotate: int, draws: Draws | None = None
) -> None:
    """See `host.int4_encode`."""
    n, m = chunks.shape
    if n * m:
        partition = partition_of(n, m, block, rotate, start, wire.shape[1])
        _launch("encode", partition, chunks.dtype, (chunks, wire), draws)


def int4_decode(wire: Array, out: Array, start: int, block: int, rotate: int) -> None:
    """See `host.int4_decode`."""
    n, m = out.shape
    if n * m:
        _launch("decode", partition_of(n, m, block, rotate, start, wire.shape[1]), out.dtype, (wire, out), None)


def int4_combine(
    wire: Array,
    out: Array,
    count: int,
    dtype: DType,
    start: int,
    block: int,
    rotate: int,
    op: str,
    draws: Draws | None = None,
) -> None:
    """See `host.int4_combine`."""
    if count:
        partition = partition_of(1, count, block, 0, start, out.shape[1])
        _launch("combine", partition, dtype, (wire, len(wire), int(op == "avg"), out), draws)


def _launch(name: str, partition: Partition, dtype: DType, args: tuple[object, ...], draws: Draws | None) -> None:
    name, args = name + partition.suffix, (*args, partition.layout)
    if draws is not None:
        recording = current()
        if recording is not None:
            recording.is_complete = False  # the next call draws other numbers
        name = f"{name}_stochastic"
        args = (*args, *draws.words)
    launch("int4.cu", name, dtype_name(dtype), partition.grid, partition.cta, args)
