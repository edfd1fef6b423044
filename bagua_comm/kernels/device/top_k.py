"""TopK: launches of top_k.cu."""

from __future__ import annotations

import functools
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from ...arrays import Array, DType, dtype_name
from ..host import TOP_K_DIVISORS, TopKLayout, top_k_layout
from .launches import WARP, between_kernels, grid_of, launch, struct

_HELD, _WARPS = 16, 4
"""Elements of a chunk that a thread of `choose` keeps in registers; warps in a CTA of `subtract`."""

_BOOK_WARPS, _BLOCK = 8, 1024
"""Warps in a CTA of the kernels of the code book, and the values that it adds at a time."""

_layout = struct("count", "chunk", "keep", "bits", "chunks", "entries", "values", "indices", "nbytes", "blocks")
"""The struct `Layout` of top_k.cu."""

_SUMS = 5
"""Numbers of 8 bytes between kernels for each block, and as many more: the struct `Sums` of top_k.cu."""


class Partition(NamedTuple):
    """The division of an array among the threads of top_k.cu."""

    wire: TopKLayout

    blocks: int
    """Blocks of entries."""

    by_cta: tuple[tuple[int, int], tuple[int, int]]
    """Grid and CTA of the kernels with a CTA for each chunk."""

    by_warp: tuple[tuple[int, int], tuple[int, int]]
    by_block: tuple[tuple[int, int], tuple[int, int]]

    layout: npt.NDArray[np.void]
    """The struct `Layout`."""


@functools.lru_cache(maxsize=1024)
def partition_of(count: int, chunk: int, keep: int, bits: int) -> Partition:
    """How top_k.cu divides an array of `count` elements."""
    wire = top_k_layout(count, chunk, keep, bits)
    blocks = -(-wire.entries // _BLOCK)
    values = count, chunk, keep, bits, wire.chunks, wire.entries, wire.values, wire.indices, wire.nbytes, blocks
    threads = -(-chunk // (_HELD * WARP)) * WARP
    ctas = map(grid_of, (wire.chunks, -(-wire.chunks // _WARPS), blocks))
    by_cta, by_warp, by_block = zip(ctas, ((threads, 1), (WARP, _WARPS), (_BOOK_WARPS * WARP, 1)), strict=True)
    return Partition(wire, blocks, by_cta, by_warp, by_block, _layout(*values))


def top_k_encode(x: Array, wire: Array, chunk: int, keep: int, bits: int) -> None:
    """See `host.top_k_encode`."""
    if not x.size:
        wire[...] = 0
        return
    partition = partition_of(x.size, chunk, keep, bits)
    layout, by_block = partition.layout, partition.by_block
    if bits != 2:
        _launch("choose", x.dtype, partition.by_cta, x, wire, 0, 0, layout)
        return
    values = between_kernels("values", (partition.wire.entries,), np.float32, wire)
    sums = between_kernels("sums", (_SUMS * (1 + partition.blocks),), np.float64, wire)
    _launch("choose", x.dtype, partition.by_cta, x, wire, values, sums, layout)
    _launch("average", x.dtype, by_block, values, sums, layout)
    _launch("spread", x.dtype, by_block, values, sums, layout)
    _launch("codes", x.dtype, by_block, values, wire, sums, layout)


def top_k_sum(wires: Array, out: Array, chunk: int, keep: int, bits: int, op: str) -> None:
    """See `host.top_k_sum`; `wires` is one array, (n, w)."""
    if out.size:
        partition = partition_of(out.size, chunk, keep, bits)
        args = wires, len(wires), TOP_K_DIVISORS[op], out, partition.layout
        _launch("sum", out.dtype, partition.by_cta, *args)


def top_k_subtract(x: Array, wire: Array, chunk: int, keep: int, bits: int) -> None:
    """See `host.top_k_subtract`."""
    if x.size:
        partition = partition_of(x.size, chunk, keep, bits)
        _launch("subtract", x.dtype, partition.by_warp, x, wire, partition.layout)


def _launch(name: str, dtype: DType, threads: tuple[tuple[int, int], tuple[int, int]], *args: object) -> None:
    launch("top_k.cu", name, dtype_name(dtype), *threads, args)
