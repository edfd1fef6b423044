"""Kernels of `MinMaxUInt8`: codes of 8 bits, with a minimum and a maximum for each block.

Per block of elements, with x' the decoded value (for the layout of the wire, see `codecs.minmax`):

    range = max - min + eps        scale = 255 / range        upper = rint(max * scale)
    lower = upper - 255            code = clip(rint(x * scale) - lower, 0, 255)
    x' = (code + lower) / scale

rint(x * scale) never exceeds `upper`, since rounding is monotonic and x <= max, so Bagua's
min(rint(x * scale), upper) is not computed. The clip acts only where both ends of a block fall on
half-way ties, or where float32 cannot hold upper - 255 exactly.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from ...arrays import Array, DType
from .numbers import LEVELS, PIECE, ZERO, largest_finite, shaped, widen

SPAN = 1 << 20
"""The number of elements whose constants are computed at a time: 4 MiB of float32, for the last-level cache."""

_EXACT = 2.0**23
"""Up to this, float32 holds every integer exactly, also after 255 is added."""


def minmax_encode(chunks: Array, wire: Array, start: int, block: int, eps: float) -> None:
    """Encode `chunks`, (n, m), of float32, float16 or bfloat16, in rows of `wire`, (n, w) uint8.

    A row gets the min and max of every block in the dtype of `chunks`, then, from byte `start` on, m codes.
    The other bytes are zeroed.
    """
    header, codes = _parts_of(wire, chunks.shape[1], chunks.dtype, start, block)
    _clear_padding(wire, header, codes, start)
    value = np.empty(min(chunks.size, PIECE), np.float32)
    wide = np.empty(0 if chunks.dtype == np.float32 else min(chunks.size, max(SPAN, block)), np.float32)
    with np.errstate(all="ignore"):
        for x, ends, code in _spans(chunks, header, codes, block):
            _encode_blocks(x, ends, code, np.float32(eps), value, wide)


def minmax_decode(wire: Array, out: Array, start: int, block: int, eps: float) -> None:
    """Decode rows of `wire` to `out`, (n, m): x' = (code + lower) / scale, kept finite, rounded once."""
    header, codes = _parts_of(wire, out.shape[1], out.dtype, start, block)
    value = np.empty(0 if out.dtype == np.float32 else min(out.size, PIECE), np.float32)
    with np.errstate(all="ignore"):
        for x, ends, code in _spans(out, header, codes, block):
            decoding = _Decoding(ends, np.float32(eps))
            for at in _parts(x.shape):
                target = x[at]
                if target.dtype == np.float32:
                    decoding.decode(code[at], target, at)
                else:
                    part = shaped(value, target.shape)
                    decoding.decode(code[at], part, at)
                    np.copyto(target, part, casting="unsafe")


def minmax_combine(
    wire: Array, out: Array, count: int, dtype: DType, start: int, block: int, eps: float, op: str
) -> None:
    """Decode n rows of `wire`, `count` elements each, add them in row order, and encode the sum in `out`, (1, w).

    "avg" divides by n. Sums are float32; they are rounded once, to the element dtype.
    """
    header, codes = _parts_of(wire, count, dtype, start, block)
    out_header, out_codes = _parts_of(out, count, dtype, start, block)
    _clear_padding(out, out_header, out_codes, start)
    n, m = codes.shape
    span = max(block, SPAN // block * block)  # whole blocks
    total = np.empty(min(span, m), np.float32)
    rounded = total if dtype == np.float32 else np.empty(min(span, m), dtype)
    wide = total if dtype == np.float32 else np.empty(min(span, m), np.float32)
    term = np.empty(min(span, m, PIECE), np.float32)
    with np.errstate(all="ignore"):
        for first in range(0, m, span):
            last = min(first + span, m)
            acc, narrow = total[None, : last - first], rounded[None, : last - first]
            blocks, elements = slice(first // block, -(-last // block)), slice(first, last)
            for row in range(n):
                one = slice(row, row + 1)
                for x, ends, code in _spans(acc, header[one, blocks], codes[one, elements], block):
                    decoding = _Decoding(ends, np.float32(eps))
                    for at in _parts(x.shape):
                        target = x[at]
                        if row == 0:
                            decoding.decode(code[at], target, at)
                        else:
                            part = shaped(term, target.shape)
                            decoding.decode(code[at], part, at)
                            np.add(target, part, out=target)
            if op == "avg":
                np.divide(acc, np.float32(n), out=acc)
            if narrow.dtype != acc.dtype:
                np.copyto(narrow, acc, casting="unsafe")
            for x, ends, code in _spans(narrow, out_header[:, blocks], out_codes[:, elements], block):
                _encode_blocks(x, ends, code, np.float32(eps), term, wide)


def _parts_of(wire: Array, count: int, dtype: DType, start: int, block: int) -> tuple[Array, Array]:
    """Views of `wire`: the pairs (min, max) of all blocks, (n, nb, 2), and the codes, (n, count)."""
    nb = -(-count // block)
    header = wire[:, : nb * 2 * dtype.itemsize].view(dtype).reshape(len(wire), nb, 2)
    return header, wire[:, start : start + count]


def _clear_padding(wire: Array, header: Array, codes: Array, start: int) -> None:
    wire[:, 2 * header.shape[1] * header.itemsize : start] = 0
    wire[:, start + codes.shape[1] :] = 0


def _encode_blocks(x: Array, ends: Array, code: Array, eps: np.float32, value: Array, wide: Array) -> None:
    """Encode whole blocks: x (r, k, b) -> ends (r, k, 2) and code (r, k, b)."""
    if x.dtype != np.float32:
        widened = shaped(wide, x.shape)
        widen(x, widened)
        x = widened
    low, high = _min_max(x)
    factor, lower = _levels(low, high, eps)
    all_regular = bool((np.isfinite(factor) & np.isfinite(lower) & (factor > ZERO)).all())
    if not all_regular:
        broken = ~(np.isfinite(low) & np.isfinite(high))
        low[broken] = high[broken] = np.nan
        # Blocks of one value, and those where `upper` overflows.
        flat = broken | ~np.isfinite(factor) | ~np.isfinite(lower)
    np.copyto(ends[..., 0:1], low, casting="unsafe")
    np.copyto(ends[..., 1:2], high, casting="unsafe")
    # No code is below that of the lowest element, and none exceeds 255 while float32 is exact.
    first = np.rint(low * factor) - lower
    inside = all_regular and first.min() >= 0 and lower.min() > -_EXACT and lower.max() < _EXACT
    for at in _parts(x.shape):
        target = code[at]
        part = shaped(value, target.shape)
        np.multiply(x[at], factor[at[:2]], out=part)
        np.rint(part, out=part)
        np.subtract(part, lower[at[:2]], out=part)
        if not inside:
            np.clip(part, ZERO, LEVELS, out=part)
        np.copyto(target, part, casting="unsafe")
    if not all_regular:
        code[flat[..., 0]] = 0


class _Decoding:
    """Decoding constants of some blocks, from their ends, (r, k, 2)."""

    def __init__(self, ends: Array, eps: np.float32) -> None:
        low, high = ends[..., 0:1].astype(np.float32), ends[..., 1:2].astype(np.float32)
        self.factor, self.lower = _levels(low, high, eps)
        self.limit = largest_finite(ends.dtype)
        # Half a step beyond the largest finite value rounds to infinity; the lowest code decodes to low - eps.
        self.clamp = bool(max(-low.min(), high.max()) + eps > self.limit / 2)
        self.special: Array | None = ~(np.isfinite(self.lower) & np.isfinite(self.factor) & (self.factor > 0))
        if not self.special.any():
            self.special = None
            return
        # Blocks without the formula: NaN or an overflown range gives NaN; a zero range or an overflown `upper`
        # gives min.
        self.clamp = True
        self.fill = np.where(self.factor > 0, low, np.float32(np.nan))

    def decode(self, code: Array, out: Array, at: tuple[slice, slice, slice]) -> None:
        """x' = (code + lower) / scale in float32, for the part `at` of the blocks."""
        np.copyto(out, code)
        np.add(out, self.lower[at[:2]], out=out)
        np.divide(out, self.factor[at[:2]], out=out)
        if self.clamp:
            np.clip(out, -self.limit, self.limit, out=out)
        if self.special is not None:
            np.copyto(out, self.fill[at[:2]], where=self.special[at[:2]])


def _levels(low: Array, high: Array, eps: np.float32) -> tuple[Array, Array]:
    """Scale and lower of each block, from its min and max in float32."""
    extent = high - low + eps
    factor = (255.0 / extent.astype(np.float64)).astype(np.float32)
    return factor, np.rint(high * factor) - LEVELS


def _min_max(x: Array) -> tuple[Array, Array]:
    """Min and max of each block, (r, k, 1); zeros are +0.0 and NaN spreads."""
    low, high = np.empty((2, *x.shape[:2], 1), np.float32)
    for at in _parts((*x.shape[:2], 1), weight=x.shape[2]):
        x[at[:2]].min(axis=-1, keepdims=True, out=low[at[:2]])
        x[at[:2]].max(axis=-1, keepdims=True, out=high[at[:2]])
    low += ZERO
    high += ZERO
    return low, high


def _spans(x: Array, header: Array, codes: Array, block: int) -> Iterator[tuple[Array, Array, Array]]:
    """Cut (n, m) into spans (r, k, b) of whole blocks; the short last block of the rows comes last.

    Yields matching views of `x`, the header and the codes. A span has at most `SPAN` elements, or is a
    single longer block. The constants of its blocks are computed together.
    """
    n, m = x.shape
    full = m // block
    if full:
        body = slice(0, full * block)
        shape = (n, full, block)
        x3, c3 = x[:, body].reshape(shape), codes[:, body].reshape(shape)
        k = min(full, max(1, SPAN // block))
        r = max(1, SPAN // (full * block))
        for row in range(0, n, r):
            for start in range(0, full, k):
                at = (slice(row, row + r), slice(start, min(start + k, full)))
                yield x3[at], header[at], c3[at]
    if full * block < m:
        r = max(1, SPAN // (m - full * block))
        for row in range(0, n, r):
            tail = (slice(row, row + r), None, slice(full * block, m))
            yield x[tail], header[row : row + r, full:], codes[tail]


def _parts(shape: tuple[int, ...], weight: int = 1) -> Iterator[tuple[slice, slice, slice]]:
    """Cut a span (r, k, b) into parts of at most `PIECE` elements; an element of the span counts as `weight`."""
    r, k, b = shape
    columns = max(1, min(b, PIECE // weight))
    blocks = max(1, min(k, PIECE // (weight * columns)))
    rows = max(1, PIECE // (weight * columns * blocks)) if blocks == k else 1
    for row in range(0, r, rows):
        for start in range(0, k, blocks):
            for column in range(0, b, columns):
                yield (
                    slice(row, row + rows),
                    slice(start, start + blocks),
                    slice(column, column + columns),
                )
