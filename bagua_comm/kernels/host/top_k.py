"""TopK: the largest elements of each chunk, with their indices (see `averages.top_k`)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from ...arrays import Array
from .numbers import PIECE, widen
from .sums import divide

TOP_K_LARGEST_CHUNK = 4096
"""Indices have 12 bits."""

TOP_K_DIVISORS = {"sum": 0, "avg": 1, "senders": 2}
"""By what sums are divided: the number of it in compiled kernels."""

_BOOK_BYTES = 16
_ALIGNMENT = 16
_CANONICAL_NAN = np.uint32(0x7FC00000)
_NAN_KEY = np.uint32(0x7F800001)
"""The key of all NaNs: the magnitude bits that follow infinity."""

_STEP = 1.5
"""Width of a bin in standard deviations: six of them in four bins."""

_LARGEST_BFLOAT16 = np.uint32(0x7F7F0000)


class TopKLayout(NamedTuple):
    """Where the parts of an encoded array are."""

    chunks: int
    """Number of chunks."""
    last: int
    """Elements of the last chunk."""
    entries: int
    """Elements that are sent."""
    values: int
    """Offset of the values in bytes. What is before them is the code book."""
    indices: int
    """Offset of the indices."""
    nbytes: int
    """Size of the whole."""


def top_k_layout(count: int, chunk: int, keep: int, bits: int) -> TopKLayout:
    """Return the layout of an encoded array of `count` elements.

    >>> top_k_layout(8192, 4096, 64, bits=2).nbytes
    240
    """
    chunks = -(-count // chunk)
    last = count - chunk * max(0, chunks - 1)
    entries = keep * max(0, chunks - 1) + min(keep, last)
    values = _BOOK_BYTES if bits == 2 else 0
    indices = values + -(-entries * bits // 8)
    nbytes = indices + 3 * -(-entries // 2)
    return TopKLayout(chunks, last, entries, values, indices, -(-nbytes // _ALIGNMENT) * _ALIGNMENT)


def top_k_encode(x: Array, wire: Array, chunk: int, keep: int, bits: int) -> None:
    """Encode the `keep` largest elements of each chunk of `x`, (m,), in `wire`, (w,) uint8.

    Args:
        x: float32, float16 or bfloat16.
        wire: All of its bytes are written.
        chunk: Elements of a chunk, at most `TOP_K_LARGEST_CHUNK`.
        keep: An even number, at most `chunk`.
        bits: Of a value: 2, codes of the code book; 16, bfloat16; or 32, float32.
    """
    layout = top_k_layout(x.size, chunk, keep, bits)
    values, indices = np.empty(layout.entries, np.float32), np.empty(layout.entries, np.uint32)
    begin, span = 0, max(1, PIECE // chunk) * chunk
    whole = (layout.chunks - 1) * chunk
    for start in range(0, whole, span):
        rows = x[start : min(start + span, whole)].reshape(-1, chunk)
        end = begin + len(rows) * keep
        _select(rows, keep, values[begin:end], indices[begin:end])
        begin = end
    if layout.entries:
        _select(x[whole:].reshape(1, -1), min(keep, layout.last), values[begin:], indices[begin:])
    wire[...] = 0
    with np.errstate(all="ignore"):
        values[~np.isfinite(values)] = _CANONICAL_NAN.view(np.float32)
        _write_values(values, wire, layout, bits)
    pairs = np.zeros(-(-layout.entries // 2) * 2, np.uint32)
    pairs[: layout.entries] = indices
    words = pairs[::2] | pairs[1::2] << 12
    packed = wire[layout.indices : layout.indices + 3 * words.size].reshape(-1, 3)
    for byte in range(3):
        packed[:, byte] = words >> 8 * byte & 255


def top_k_sum(wires: Sequence[Array], out: Array, chunk: int, keep: int, bits: int, op: str) -> None:
    """Add n encoded arrays in their order, in float32, and round once to `out`, (m,).

    "avg" divides by n, and "senders" each element by the number of arrays that have it, other than as 0.
    """
    total = out if out.dtype == np.float32 else np.empty(out.shape, np.float32)
    total[...] = 0
    senders = np.zeros(out.size if op == "senders" else 0, np.float32)
    with np.errstate(all="ignore"):
        for wire in wires:
            positions, values = _entries(wire, out.size, chunk, keep, bits)
            total[positions] += values
            if op == "senders":
                senders[positions] += values != 0
        if op == "avg":
            divide(total, len(wires))
        elif op == "senders":
            total /= np.maximum(senders, 1)
        if total is not out:
            np.copyto(out, total, casting="unsafe")


def top_k_subtract(x: Array, wire: Array, chunk: int, keep: int, bits: int) -> None:
    """Subtract an encoded array from `x`, from which it was encoded: what is left is what was not sent.

    What is not finite afterwards becomes 0. Elements that were not sent keep their bits.
    """
    positions, values = _entries(wire, x.size, chunk, keep, bits)
    wide = np.empty(positions.shape, np.float32)
    widen(x[positions], wide)
    with np.errstate(all="ignore"):
        lost = wide - values
        narrow = lost.astype(x.dtype)
        narrow[~np.isfinite(narrow)] = 0
        x[positions] = narrow
        if np.isnan(values).any():  # then there may be more, since these are the largest
            x[~np.isfinite(x)] = 0


def _select(rows: Array, keep: int, values: Array, indices: Array) -> None:
    """Write the `keep` largest elements of each row, and their indices, in ascending order of the indices."""
    wide = np.empty(rows.shape, np.float32)
    widen(rows, wide)
    keys = np.minimum(wide.view(np.uint32) & 0x7FFFFFFF, _NAN_KEY)
    least = rows.shape[1] - keep
    threshold = np.partition(keys, least, axis=1)[:, least, None]
    above, ties = keys > threshold, keys == threshold
    missing = keep - np.count_nonzero(above, axis=1)[:, None]
    ties &= np.cumsum(ties, axis=1) <= missing
    chosen = np.flatnonzero(above | ties)
    values[...] = wide.reshape(-1)[chosen]
    indices[...] = chosen % rows.shape[1]


def _write_values(values: Array, wire: Array, layout: TopKLayout, bits: int) -> None:
    target = wire[layout.values : layout.indices]
    if bits == 32:
        target.view(np.float32)[...] = values
    elif bits == 16:
        word = values.view(np.uint32)
        magnitude = (word & 0x7FFFFFFF) + 0x7FFF + (word >> 16 & 1)
        limited = np.where(np.isnan(values), _CANONICAL_NAN, np.minimum(magnitude, _LARGEST_BFLOAT16))
        target.view(np.uint16)[...] = (limited | word & 0x80000000) >> 16
    else:
        book, codes = _code_book(values)
        wire[:_BOOK_BYTES].view(np.float32)[...] = book
        four = np.zeros(4 * target.size, np.uint8)
        four[: codes.size] = codes
        target[...] = four[::4] | four[1::4] << 2 | four[2::4] << 4 | four[3::4] << 6


def _code_book(values: Array) -> tuple[Array, Array]:
    """Return the code book, (4,) float32, and a code for each value, (n,) uint8."""
    n, book, codes = values.size, np.zeros(4, np.float32), np.full(values.shape, 2, np.uint8)
    if np.isnan(values).any():
        book.view(np.uint32)[...] = _CANONICAL_NAN
        codes[...] = 0
        return book, codes
    if not n:
        return book, codes
    wide = values.astype(np.float64)
    centered = wide - _total(wide) / n
    step = _STEP * np.sqrt(_total(centered * centered) / max(1, n - 1))
    if step > 0:
        codes[...] = np.clip(np.rint(centered / step + 2), 0, 3)
    for code in range(4):
        mine = codes == code
        if count := np.count_nonzero(mine):
            book[code] = _total(np.where(mine, wide, 0)) / count
    return book, codes


def _total(terms: Array) -> np.float64:
    """The sum of some terms by a tree: neighbours are added, then neighbouring sums, until one is left."""
    while terms.size > 1:
        sums = terms[::2].copy()  # a last one without a neighbour stays
        sums[: terms.size // 2] += terms[1::2]
        terms = sums
    total: np.float64 = terms[0] + 0.0  # not -0.0
    return total


def _entries(wire: Array, count: int, chunk: int, keep: int, bits: int) -> tuple[Array, Array]:
    """The positions of the elements that were sent, and their values in float32; none beyond their chunk."""
    layout = top_k_layout(count, chunk, keep, bits)
    n = layout.entries
    packed = wire[layout.indices : layout.indices + 3 * -(-n // 2)].reshape(-1, 3).astype(np.int64)
    indices = np.empty(2 * len(packed), np.int64)
    indices[::2] = packed[:, 0] | (packed[:, 1] & 15) << 8
    indices[1::2] = packed[:, 1] >> 4 | packed[:, 2] << 4
    indices = indices[:n]
    starts = np.arange(n) // keep * chunk
    positions, source = starts + indices, wire[layout.values : layout.indices]
    if bits == 2:
        codes = np.empty((source.size, 4), np.uint8)
        for i in range(4):
            codes[:, i] = source >> 2 * i & 3
        values = wire[:_BOOK_BYTES].view(np.float32)[codes.reshape(-1)[:n]]
    elif bits == 16:
        values = (source.view(np.uint16).astype(np.uint32) << 16).view(np.float32)
    else:
        values = source.view(np.float32)
    inside = indices < np.minimum(chunk, count - starts)
    return (positions, values) if inside.all() else (positions[inside], values[inside])
