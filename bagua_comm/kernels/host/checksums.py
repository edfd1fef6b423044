"""Checksums of blocks of words."""

from __future__ import annotations

import numpy as np

from ...arrays import Array

_UPPER = np.uint64(32)
_PIECE = 1 << 15
"""The number of words in a piece: 256 KiB, which stay in the second-level cache."""


def checksum_blocks(words: Array, weights: Array, sums: Array, out: Array | None = None) -> None:
    """sums[b] = sum_i (v_i x_i + w_i floor(x_i / 2^32)) over the words x of block b; sums wrap.

    Args:
        words: A row of uint64.
        weights: v and w, uint64 of shape (2, words of a block). The last block may be shorter.
        sums: A row of uint64, one for each block.
        out: Receives a copy of `words`; each block is read from memory only once.
    """
    size, whole = weights.shape[1], len(words) // weights.shape[1]
    step = max(1, _PIECE // size)
    groups = [(at, min(step, whole - at), size) for at in range(0, whole, step)]
    if whole < len(sums):
        groups.append((whole, 1, len(words) - whole * size))
    for block, rows, row_words in groups:
        these = slice(block * size, block * size + rows * row_words)
        part = words[these]
        if out is not None:
            out[these] = part
            part = out[these]
        table, (v, w) = part.reshape(rows, row_words), weights[:, :row_words]
        sums[block : block + rows] = np.einsum("bi,i->b", table, v) + np.einsum("bi,i->b", table >> _UPPER, w)
