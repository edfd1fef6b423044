"""Checksums of blocks of words; see `host.checksums`."""

from __future__ import annotations

import numpy as np

from .codegen import kernel
from .numbers import words_at

_UPPER = np.uint64(32)


@kernel
def checksum_blocks(words: int, count: int, weights: int, size: int, sums: int, out: int) -> None:
    """Sum words with weights, block by block, and copy them if `out` is not 0."""
    blocks = -(-count // size)
    pair, found = words_at(weights, 2 * size), words_at(sums, blocks)
    v, w = pair[:size], pair[size:]
    for block in range(blocks):
        begin = block * size
        part = words_at(words + begin * 8, min(size, count - begin))
        total = np.uint64(0)
        if out == 0:
            for i in range(len(part)):
                total += v[i] * part[i] + w[i] * (part[i] >> _UPPER)
        else:
            copied = words_at(out + begin * 8, len(part))
            for i in range(len(part)):
                word = part[i]
                copied[i] = word
                total += v[i] * word + w[i] * (word >> _UPPER)
        found[block] = total
