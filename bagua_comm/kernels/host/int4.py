"""Int4: blocks of rotated elements with a scale each, in four bits an element (see `codecs.int4`)."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from ...arrays import Array, DType
from .numbers import PIECE, largest_finite, widen
from .random_bits import Draws, uniform

_SPAN = PIECE // 2
"""The number of elements of blocks that are coded at a time."""

_MOST = np.float32(7)
"""The largest code."""

_SIGNS = np.array([1, 1, 1, -1, 1, 1, 1, -1, 1, 1, 1, -1, -1, -1, -1, 1], np.float32)
"""The signs of elements before a rotation, by their position in a chunk modulo 16."""

_LARGEST = np.float32(largest_finite(np.dtype(np.float32)))
_NAN, _SMALLEST_NORMAL, _LARGEST_SCALE = 0x7FC0, 0x0080, 0x7E12
"""Bits of bfloat16: the canonical NaN, 2^-126, and 146 * 2^118, the largest number whose 7-fold is finite."""


def int4_encode(
    chunks: Array, wire: Array, start: int, block: int, rotate: int, draws: Draws | None = None
) -> None:
    """Encode `chunks`, (n, m), of float32, float16 or bfloat16, in rows of `wire`, (n, w) uint8.

    A row gets the scale of every block in bfloat16, then, from byte `start` on, two codes a byte. Codes are
    rounded half to even; with `draws`, stochastically. The rows of `chunks` need not be adjacent.
    """
    (n, m), pitch = chunks.shape, chunks.strides[0] // chunks.itemsize
    scales, codes = _parts_of(wire, m, start, block)
    _clear_padding(wire, scales, codes, start)
    with np.errstate(all="ignore"):
        for row in range(n):
            for blocks in _spans(scales.shape[1], block):
                first, last = blocks.start * block, min(blocks.stop * block, m)
                t = np.zeros((blocks.stop - blocks.start, block), np.float32)
                widen(chunks[row, first:last], t.reshape(-1)[: last - first])
                if rotate > 1:
                    factors = np.resize(_SIGNS / np.float32(rotate), t.shape)
                    t = _rotated(np.multiply(t, factors, out=t), rotate)
                most = _largest(t)
                most[np.isinf(most)] = np.nan
                here = None if draws is None else draws.after(row * pitch + first)
                _quantize(t, most, scales[row, blocks], codes[row, blocks], here)


def int4_decode(wire: Array, out: Array, start: int, block: int, rotate: int) -> None:
    """Decode rows of `wire` to `out`, (n, m): x' = D H q s, kept finite, rounded once to the dtype of `out`."""
    n, m = out.shape
    scales, codes = _parts_of(wire, m, start, block)
    limit = largest_finite(out.dtype)
    with np.errstate(all="ignore"):
        for row in range(n):
            for blocks in _spans(scales.shape[1], block):
                first, last = blocks.start * block, min(blocks.stop * block, m)
                x = _unpacked(codes[row, blocks])
                if rotate > 1:
                    x = _rotated(x, rotate)  # of integers, so exact
                    np.subtract(0, x, out=x, where=np.resize(_SIGNS < 0, x.shape))  # 0 stays 0, not -0
                scale = _factors(scales[row, blocks])
                np.multiply(x, scale, out=x)
                np.clip(x, -limit, limit, out=x)
                x[np.isnan(scale[:, 0])] = np.nan
                np.copyto(out[row, first:last], x.reshape(-1)[: last - first], casting="unsafe")


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
    """Add n rows of `wire`, `count` elements each, in row order, and encode the sum in `out`, (1, w).

    The rotation is linear, so rotated elements are added; `rotate` and `dtype` do not matter. Sums are float32.
    "avg" divides the scales by n. A sum of finite numbers is kept finite.
    """
    scales, codes = _parts_of(wire, count, start, block)
    out_scales, out_codes = _parts_of(out, count, start, block)
    _clear_padding(out, out_scales, out_codes, start)
    n = len(wire)
    with np.errstate(all="ignore"):
        for blocks in _spans(scales.shape[1], block):
            total = np.zeros((blocks.stop - blocks.start, block), np.float32)
            for row in range(n):
                scale = _factors(scales[row, blocks])
                if op == "avg":
                    np.divide(scale, np.float32(n), out=scale)
                term = _unpacked(codes[row, blocks])
                np.multiply(term, scale, out=term)
                np.add(total, term, out=total)
            most = np.minimum(_largest(total), _LARGEST)  # NaN stays
            here = None if draws is None else draws.after(blocks.start * block)
            _quantize(total, most, out_scales[0, blocks], out_codes[0, blocks], here)


def _parts_of(wire: Array, count: int, start: int, block: int) -> tuple[Array, Array]:
    """Views of `wire`: the bits of the scales of all blocks, (n, nb), and the codes, (n, nb, block / 2)."""
    n, nb = len(wire), -(-count // block)
    codes = wire[:, start : start + nb * (block // 2)].reshape(n, nb, block // 2)
    return wire[:, : 2 * nb].view(np.uint16), codes


def _clear_padding(wire: Array, scales: Array, codes: Array, start: int) -> None:
    wire[:, 2 * scales.shape[1] : start] = 0
    wire[:, start + codes.shape[1] * codes.shape[2] :] = 0


def _spans(blocks: int, block: int) -> Iterator[slice]:
    """Cut a row of blocks into spans of at most `_SPAN` elements."""
    length = _SPAN // block
    return (slice(start, min(start + length, blocks)) for start in range(0, blocks, length))


def _rotated(t: Array, rotate: int) -> Array:
    """H t for each group of `rotate` elements, by butterflies (a + b, a - b) of strides 1, 2, 4, ..."""
    groups = np.ascontiguousarray(t.reshape(-1, rotate).T)  # (rotate, groups), which NumPy adds fastest
    total = np.empty((rotate // 2) * groups.shape[1], np.float32)
    stride = 1
    while stride < rotate:
        pairs = groups.reshape(rotate // (2 * stride), 2, stride, -1)
        a, b = pairs[:, 0], pairs[:, 1]
        both = np.add(a, b, out=total.reshape(a.shape))
        np.subtract(a, b, out=b)
        a[...] = both
        stride *= 2
    return np.ascontiguousarray(groups.T).reshape(t.shape)


def _largest(t: Array) -> Array:
    """The largest magnitude of each block, (k,); NaN if there is one."""
    most = np.abs(t)
    while most.shape[1] > 1:  # NumPy reduces short rows slowly
        half = most.shape[1] // 2
        most = np.maximum(most[:, :half], most[:, half:])
    return most[:, 0]


def _quantize(t: Array, most: Array, scales: Array, codes: Array, draws: Draws | None) -> None:
    """Quantize blocks of rotated elements, (k, block), with the largest magnitude of each, (k,).

    A block whose largest magnitude is NaN gets the canonical NaN and codes 0; one whose scale would be subnormal
    gets 0 and codes 0.
    """
    broken = np.isnan(most)
    bits = (most / _MOST).view(np.uint32)
    if draws is None:
        bits = (bits + 0x7FFF + (bits >> 16 & 1)) >> 16
    else:  # rounded up, so that no element is clipped, which would be a bias
        bits = np.minimum((bits + 0xFFFF) >> 16, _LARGEST_SCALE)
    bits[bits < _SMALLEST_NORMAL] = 0
    bits[broken] = _NAN
    scales[...] = bits
    inverse = np.float32(1) / (bits << 16).view(np.float32)
    inverse[broken | (bits == 0)] = 0
    t[broken] = 0
    np.multiply(t, inverse[:, None], out=t)
    if draws is None:
        np.rint(t, out=t)
    else:
        np.add(t, uniform(draws, t.size).reshape(t.shape), out=t)
        np.floor(t, out=t)
    np.clip(t, -_MOST, _MOST, out=t)
    q = t.astype(np.int8).view(np.uint8)
    codes[...] = (q[:, ::2] & 15) | (q[:, 1::2] << 4)


def _unpacked(codes: Array) -> Array:
    """The codes of blocks, (k, block / 2), as float32, (k, block)."""
    q = np.empty((*codes.shape, 2), np.int8)
    q[..., 0] = (codes << 4).view(np.int8) >> 4
    q[..., 1] = codes.view(np.int8) >> 4
    return q.reshape(len(codes), -1).astype(np.float32)


def _factors(scales: Array) -> Array:
    """The scales of blocks in float32, (k, 1); NaN instead of what is not finite."""
    factors = (scales.astype(np.uint32) << 16).view(np.float32)
    factors[~np.isfinite(factors)] = np.nan
    return factors[:, None]
