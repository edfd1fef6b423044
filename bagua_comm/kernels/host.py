"""Kernels in NumPy: the specification of what every device kernel computes, byte for byte.

All arithmetic is float32 with each operation rounded half to even and no fused multiply-add; sums run
in rank order. A call works on cache-sized pieces with one small set of scratch arrays, and writes every result
to an array that the caller gives.

MinMaxUInt8, per block of elements, with x' the decoded value (for the layout of the wire, see `codecs.minmax`):

    range = max - min + eps        scale = 255 / range        upper = rint(max * scale)
    lower = upper - 255            code = clip(rint(x * scale) - lower, 0, 255)
    x' = (code + lower) / scale

rint(x * scale) never exceeds `upper`, since rounding is monotonic and x <= max, so Bagua's
min(rint(x * scale), upper) is not computed. The clip acts only where both ends of a block fall on
half-way ties, or where float32 cannot hold upper - 255 exactly.
"""

from __future__ import annotations

import contextvars
import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

from ..arrays import REDUCED_PRECISION, UFUNCS, Array, DType, dtype_name

PIECE = 1 << 17
"""How many elements are worked on at a time: 512 KiB of float32, about what a second-level cache holds."""

GROUP = 1 << 16
"""How many elements of blocks with units of their own are worked on at a time: 256 KiB of float32."""

SPAN = 1 << 20
"""How many elements have their blocks scaled at a time: 4 MiB of float32, which stay in the last-level cache."""

_LEVELS = np.float32(255)
_ZERO = np.float32(0)
_EXACT = 2.0**23
"""Up to this, float32 holds every integer exactly, also after 255 is added."""


# ---------------------------------------------------------------------------------------------------
# Sums
# ---------------------------------------------------------------------------------------------------


def is_plain(dtype: DType, op: str) -> bool:
    """Whether rows are reduced in their own dtype: they are neither widened, nor divided as integers."""
    return dtype_name(dtype) not in REDUCED_PRECISION and not (op == "avg" and dtype.kind in "iu")


def silent_context() -> contextvars.Context:
    """A context that runs functions of NumPy without warnings; entering `np.errstate` takes far longer."""
    context = contextvars.Context()
    context.run(np.seterr, all="ignore")
    return context


def reduce_rows(rows: Sequence[Array], out: Array, op: str) -> None:
    """Reduce p `rows` of (m,), as an array or a list, to `out`, (m,), in row order.

    float16 and bfloat16 accumulate in float32 and are rounded once, NaN to the canonical one. "avg" divides the
    sum by p; for it, integers are added in 64 bits, and the quotient is truncated towards zero. `out` may be any
    one of the rows.
    """
    m, dtype = out.size, out.dtype
    wide: DType = dtype
    if dtype_name(dtype) in REDUCED_PRECISION:
        wide = np.dtype(np.float32)
    elif op == "avg" and dtype.kind in "iu":
        wide = np.dtype(np.uint64 if dtype.kind == "u" else np.int64)
    same = wide == dtype
    # The sum may not grow in `out` if that is a row after the first two, which is still to be added.
    grows_in_out = same and not any(np.may_share_memory(out, row) for row in rows[2:])
    total = out if grows_in_out else np.empty(min(m, PIECE), wide)
    term = total if same else np.empty_like(total)
    with np.errstate(all="ignore"):
        for start in range(0, m, PIECE):
            piece = slice(start, min(start + PIECE, m))
            acc, part = total[: piece.stop - start], term[: piece.stop - start]
            if grows_in_out:
                acc = out[piece]
            if same and len(rows) > 1:
                UFUNCS[op](rows[0][piece], rows[1][piece], out=acc)
            else:
                widen(rows[0][piece], acc)
            for row in rows[2 if same else 1 :]:
                value = row[piece]
                if not same:
                    widen(value, part)
                    value = part
                UFUNCS[op](acc, value, out=acc)
            if op == "avg":
                divide(acc, len(rows))
            if wide == np.float32 and not same:
                np.copyto(acc, np.float32(np.nan), where=np.isnan(acc))
            if not grows_in_out:
                np.copyto(out[piece], acc, casting="unsafe")


def divide(x: Array, divisor: int) -> None:
    """Divide in place by a positive integer; integers are truncated towards zero."""
    if x.dtype.kind in "iu":
        np.subtract(x, np.fmod(x, x.dtype.type(divisor)), out=x)
        np.floor_divide(x, x.dtype.type(divisor), out=x)
    else:
        np.divide(x, x.dtype.type(divisor), out=x)


def scale(x: Array, factor: float) -> None:
    """Multiply floating-point `x` in place."""
    with np.errstate(all="ignore"):
        np.multiply(x, x.dtype.type(factor), out=x)


# ---------------------------------------------------------------------------------------------------
# Element-wise steps of algorithms and optimizers
#
# Flat arrays of one size. float16 and bfloat16 are computed in float32 and rounded once; `out` may be an input.
# ---------------------------------------------------------------------------------------------------


def add(x: Array, y: Array, out: Array) -> None:
    """x + y."""
    _elementwise(np.add, (x, y), (out,))


def subtract(x: Array, y: Array, out: Array) -> None:
    """x - y."""
    _elementwise(np.subtract, (x, y), (out,))


def loss(x: Array, decoded: Array, factor: float, out: Array) -> None:
    """factor (x - decoded), and 0 where that is not finite."""

    def formula(x: Array, decoded: Array) -> Array:
        lost = (x - decoded) * factor
        return np.where(np.isfinite(lost), lost, _ZERO)

    _elementwise(formula, (x, decoded), (out,))


def midpoint(x: Array, y: Array, out: Array) -> None:
    """(x + y) / 2."""
    _elementwise(lambda x, y: (x + y) / 2, (x, y), (out,))


def blend(x: Array, y: Array, weight: float, out: Array) -> None:
    """weight x + (1 - weight) y."""
    _elementwise(lambda x, y: x * weight + y * (1 - weight), (x, y), (out,))


def ring_difference(x: Array, left: Array, right: Array, weight: Array, out: Array) -> None:
    """x + left / 3 + right / 3 - (5 / 3) weight."""

    def formula(x: Array, left: Array, right: Array, weight: Array) -> Array:
        return x + left / 3 + right / 3 - weight * (5 / 3)

    _elementwise(formula, (x, left, right, weight), (out,))


def move_half(x: Array, received: Array, sent: Array, out: Array) -> None:
    """x + (received - sent) / 2."""
    _elementwise(lambda x, received, sent: x + (received - sent) / 2, (x, received, sent), (out,))


def advance(x: Array, mean: Array, snapshot: Array) -> None:
    """x <- x + (mean - snapshot)."""
    _elementwise(lambda x, mean, snapshot: x + (mean - snapshot), (x, mean, snapshot), (x,))


def add_scaled(x: Array, y: Array, factor: float) -> None:
    """x <- x + factor y."""
    _elementwise(lambda x, y: x + y * factor, (x, y), (x,))


def sgd_step(
    x: Array, g: Array, buffer: Array, *, lr: float, momentum: float, weight_decay: float, nesterov: bool
) -> None:
    """A step of SGD: g' = g + wd x; b <- mu b + g'; x <- x - lr (g' + mu b if nesterov else b)."""

    def step(x: Array, g: Array, b: Array) -> tuple[Array, Array]:
        g = g + x * weight_decay if weight_decay else g
        b = b * momentum + g
        return x - (g + b * momentum if nesterov else b) * lr, b

    _elementwise(step, (x, g, buffer), (x, buffer))


def adam_moments(
    x: Array, g: Array, m: Array, v: Array, *, betas: tuple[float, float], weight_decay: float
) -> None:
    """Adam's moments: g' = g + wd x; m <- b1 m + (1 - b1) g'; v <- b2 v + (1 - b2) g'^2."""
    b1, b2 = betas

    def step(x: Array, g: Array, m: Array, v: Array) -> tuple[Array, Array]:
        g = g + x * weight_decay if weight_decay else g
        return m * b1 + g * (1 - b1), v * b2 + g * g * (1 - b2)

    _elementwise(step, (x, g, m, v), (m, v))


def adam_step(x: Array, m: Array, v: Array, *, lr: float, eps: float, corrections: tuple[float, float]) -> None:
    """Adam's step: x <- x - lr / c1 * m / (sqrt(v) / sqrt(c2) + eps), c = 1 - beta^t; no step where v is 0."""
    first, second = corrections

    def step(x: Array, m: Array, v: Array) -> Array:
        direction = m / (np.sqrt(v) / math.sqrt(second) + eps)
        return x - np.where(v == 0, _ZERO, direction) * (lr / first)

    _elementwise(step, (x, m, v), (x,))


def _elementwise(formula: Callable[..., Any], inputs: Sequence[Array], outputs: Sequence[Array]) -> None:
    """Fill `outputs` with `formula(*inputs)`, piece by piece."""
    narrow = inputs[0].dtype.name in REDUCED_PRECISION
    with np.errstate(all="ignore"):
        for start in range(0, inputs[0].size, PIECE):
            piece = slice(start, start + PIECE)
            values = [x[piece].astype(np.float32) if narrow else x[piece] for x in inputs]
            results = formula(*values)
            for out, result in zip(outputs, results if len(outputs) > 1 else [results], strict=True):
                np.copyto(out[piece], result, casting="unsafe")


# ---------------------------------------------------------------------------------------------------
# Casts
# ---------------------------------------------------------------------------------------------------


def cast_encode(chunks: Array, wire: Array, sent: DType) -> None:
    """Cast `chunks`, (n, m), to rows of `wire`, (n, w) uint8: m elements of dtype `sent`, then zeros.

    Values are rounded half to even. Finite values stay finite, infinities stay, and NaN becomes the canonical
    NaN.
    """
    m = chunks.shape[1]
    cast_saturating(chunks, _sent(wire, m, sent))
    wire[:, m * sent.itemsize :] = 0


def cast_decode(wire: Array, out: Array, sent: DType) -> None:
    """Cast the elements in rows of `wire`, as `cast_encode` writes them, to `out`, (n, m)."""
    cast_saturating(_sent(wire, out.shape[1], sent), out)


def cast_combine(wire: Array, out: Array, count: int, dtype: DType, sent: DType, op: str) -> None:
    """Sum the n rows of `wire`, `count` elements each, in float32 and row order; encode the sum in `out`, (1, w).

    "avg" divides by n. The result is rounded to the element dtype `dtype` before it is cast.
    """
    n, rows, target = len(wire), _sent(wire, count, sent), _sent(out, count, sent)[0]
    total, term = _scratch(2, count)
    with np.errstate(all="ignore"):
        for start in range(0, count, PIECE):
            piece = slice(start, min(start + PIECE, count))
            acc, part = total[: piece.stop - start], term[: piece.stop - start]
            widen(rows[0, piece], acc)
            for row in range(1, n):
                widen(rows[row, piece], part)
                np.add(acc, part, out=acc)
            if op == "avg":
                np.divide(acc, np.float32(n), out=acc)
            cast_saturating(acc.astype(dtype, copy=False), target[piece])
    out[:, count * sent.itemsize :] = 0


def _sent(wire: Array, count: int, dtype: DType) -> Array:
    """The elements in rows of `wire`."""
    return wire[:, : count * dtype.itemsize].view(dtype)


def cast_saturating(x: Array, out: Array) -> None:
    """Round `x` to the dtype of `out`, half to even; finite values stay finite, NaN and inf stay.

    `x` and `out` have one shape. Works on pieces along the last axis.
    """
    limit = largest_finite(out.dtype)
    (wide,) = _scratch(1, x.shape[-1])
    with np.errstate(all="ignore"):
        for row in np.ndindex(x.shape[:-1]):
            for start in range(0, x.shape[-1], PIECE):
                source = x[row][start : start + PIECE]
                value = wide[: source.size]
                np.copyto(value, source, casting="unsafe")
                _clamp_finite(value, limit)
                np.copyto(out[row][start : start + PIECE], value, casting="unsafe")


def widen(x: Array, out: Array) -> None:
    """Copy `x` to `out`, of the same shape and the same or a wider dtype."""
    if dtype_name(x.dtype) == "bfloat16" and out.dtype == np.float32:  # the upper half of a float32
        bits = out.view(np.uint32)
        np.copyto(bits, x.view(np.uint16))
        np.left_shift(bits, 16, out=bits)
    else:
        np.copyto(out, x)


def largest_finite(dtype: DType) -> float:
    """The largest finite value of a float dtype of at most 32 bits."""
    if dtype.name == "bfloat16":
        return 2.0**127 * (2 - 2.0**-7)
    return float(np.finfo(dtype).max)


def _clamp_finite(x: Array, limit: float) -> None:
    """Clamp finite values of float32 `x` to [-limit, limit], in place; inf stays, NaN becomes canonical."""
    if x.size == 0:
        return
    low, high = x.min(), x.max()
    if -limit <= low and high <= limit:  # false also for NaN
        return
    beyond = np.isfinite(x) & (np.abs(x) > limit)
    np.copyto(x, np.copysign(limit, x), where=beyond)
    np.copyto(x, np.float32(np.nan), where=np.isnan(x))


# ---------------------------------------------------------------------------------------------------
# Block fixed point
#
# Block b is x[bounds[b] : bounds[b + 1]]; `bounds` is int64 and ascends strictly: no block is empty. Its elements
# are multiples of one unit,
#
#     unit = 2^(max(f, 1) - 126 - bits)        q = clip(rint(x / unit), 1 - 2^bits, 2^bits - 1)
#
# where f is the exponent field of float32 (0 to 255) of the largest |x| in the block, over all addends. Of a
# block with an infinity or a NaN, f is 255. For the proofs see `reproducible`.
# ---------------------------------------------------------------------------------------------------


_NOT_FINITE = 255
"""The exponent field of infinities and NaN."""


def fixed_exponents(x: Array, bounds: Array, fields: Array) -> None:
    """Raise `fields`, uint8, to the exponent field of the largest |x| in each block of `x`.

    `x` is float32, float16 or bfloat16; the field is that of the same number in float32. No block is empty: of
    empty ones, NumPy and CUDA give different fields.
    """
    room = np.empty(min(x.size, GROUP), np.uint32)
    for group in _groups(bounds):
        bits = group.room(room)
        np.bitwise_and(_widened(x[group.at]).view(np.uint32), np.uint32(0x7FFFFFFF), out=bits)
        largest = np.maximum.reduceat(bits, group.starts) >> np.uint32(23)
        np.maximum(fields[group.blocks], largest.astype(np.uint8), out=fields[group.blocks])


def fixed_add(x: Array, bounds: Array, fields: Array, bits: int, total: Array, *, first: bool) -> None:
    """Add q of every element of `x` to `total`, int32; overwrite `total` if it is the `first` addend.

    A block that is not finite adds zeros.
    """
    limit = 2**bits - 1
    room = np.empty(min(x.size, GROUP), np.float32)
    with np.errstate(all="ignore"):
        for group in _groups(bounds):
            found, value = fields[group.blocks], group.room(room)
            power = 126 + bits - _exponents(found)
            # By two factors where one may overflow. Nothing is rounded but what is far below 1/2.
            halves = [power] if power.max() < 128 else [power // 2, power - power // 2]
            np.multiply(_widened(x[group.at]), group.spread(np.ldexp(np.float32(1), halves[0])), out=value)
            for half in halves[1:]:
                value *= group.spread(np.ldexp(np.float32(1), half))
            np.rint(value, out=value)
            if bits < 24:  # float32 has 24 bits: with as many here, no number is beyond the limit
                np.clip(value, -limit, limit, out=value)
            if (found == _NOT_FINITE).any():
                value[group.spread(found == _NOT_FINITE)] = 0
            if first:
                np.copyto(total[group.at], value, casting="unsafe")
            else:
                total[group.at] += value.astype(np.int32)


def fixed_mean(total: Array, bounds: Array, fields: Array, bits: int, divisor: int, out: Array) -> None:
    """total unit / divisor, rounded to float32, then to the dtype of `out`; NaN where a block is not finite."""
    shift = divisor.bit_length() - 1
    with np.errstate(all="ignore"):
        for group in _groups(bounds):
            found, sums = fields[group.blocks], total[group.at]
            power = _exponents(found) - 126 - bits
            if divisor == 1 << shift and power.min() - shift >= -126:
                # A product with a power of two is exact, or overflows: so it may be rounded before.
                value = out[group.at] if out.dtype == np.float32 else np.empty(sums.shape, np.float32)
                np.copyto(value, sums, casting="unsafe")
                value *= group.spread(np.ldexp(np.float32(1), power - shift))
            else:
                value = sums / np.float64(divisor)
                value *= group.spread(np.ldexp(1.0, power))
            if (found == _NOT_FINITE).any():
                value[group.spread(found == _NOT_FINITE)] = np.nan
            np.copyto(out[group.at], value.astype(np.float32, copy=False), casting="unsafe")


class _Group(NamedTuple):
    """Neighbouring blocks, of about `GROUP` elements together, that fit in a cache."""

    blocks: slice
    at: slice
    """Their elements."""
    starts: Array
    """Where among these each block begins."""
    lengths: Array
    """How long each block is."""

    def room(self, room: Array) -> Array:
        """As much of `room` as they have elements; more room if that is not enough."""
        count = self.at.stop - self.at.start
        return room[:count] if count <= room.size else np.empty(count, room.dtype)

    def spread(self, values: Array) -> Array:
        """The value of each element's block."""
        return np.repeat(values, self.lengths)


def _exponents(fields: Array) -> Array:
    """The exponents that stand in these fields; subnormal numbers have that of the smallest normal ones."""
    return np.maximum(fields, 1).astype(np.int32)


def _widened(x: Array) -> Array:
    """`x` in float32; itself if it is."""
    if x.dtype == np.float32:
        return x
    wide = np.empty(x.shape, np.float32)
    widen(x, wide)
    return wide


def _groups(bounds: Array) -> Iterator[_Group]:
    """Cut blocks into groups."""
    lengths = np.diff(bounds)
    cuts = np.searchsorted(bounds, np.arange(bounds[0], bounds[-1], GROUP))
    for begin, end in itertools.pairwise(np.unique(np.append(cuts, len(lengths))).tolist()):
        edges = bounds[begin : end + 1]
        at = slice(int(edges[0]), int(edges[-1]))
        yield _Group(slice(begin, end), at, edges[:-1] - edges[0], lengths[begin:end])


# ---------------------------------------------------------------------------------------------------
# Checksums
# ---------------------------------------------------------------------------------------------------


_UPPER = np.uint64(32)
_WEIGHED = 1 << 15
"""How many words are weighed at a time: 256 KiB, which stay in the second-level cache."""


def weigh_blocks(words: Array, weights: Array, sums: Array, out: Array | None = None) -> None:
    """sums[b] = sum_i (v_i x_i + w_i floor(x_i / 2^32)) over the words x of block b; sums wrap.

    Args:
        words: A row of uint64.
        weights: v and w, uint64 of shape (2, words of a block). The last block may be shorter.
        sums: A row of uint64 with a place for each block.
        out: Gets a copy of `words`, of which each block is read from memory only once.
    """
    size, whole = weights.shape[1], len(words) // weights.shape[1]
    step = max(1, _WEIGHED // size)
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


# ---------------------------------------------------------------------------------------------------
# MinMaxUInt8
# ---------------------------------------------------------------------------------------------------


def minmax_encode(chunks: Array, wire: Array, start: int, block: int, eps: float) -> None:
    """Encode `chunks`, (n, m), of float32, float16 or bfloat16, in rows of `wire`, (n, w) uint8.

    A row gets the min and max of every block in the dtype of `chunks`, then, from byte `start` on, m codes.
    Its other bytes are zeroed.
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
                    part = _shaped(value, target.shape)
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
                            part = _shaped(term, target.shape)
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
        widened = _shaped(wide, x.shape)
        widen(x, widened)
        x = widened
    low, high = _min_max(x)
    factor, lower = _levels(low, high, eps)
    all_regular = bool((np.isfinite(factor) & np.isfinite(lower) & (factor > _ZERO)).all())
    if not all_regular:
        broken = ~(np.isfinite(low) & np.isfinite(high))
        low[broken] = high[broken] = np.nan
        flat = broken | ~np.isfinite(factor) | ~np.isfinite(lower)  # also a zero range, an overflown `upper`
    np.copyto(ends[..., 0:1], low, casting="unsafe")
    np.copyto(ends[..., 1:2], high, casting="unsafe")
    # No code is below that of the lowest element; none is above 255 while float32 is exact.
    first = np.rint(low * factor) - lower
    inside = all_regular and first.min() >= 0 and lower.min() > -_EXACT and lower.max() < _EXACT
    for at in _parts(x.shape):
        target = code[at]
        part = _shaped(value, target.shape)
        np.multiply(x[at], factor[at[:2]], out=part)
        np.rint(part, out=part)
        np.subtract(part, lower[at[:2]], out=part)
        if not inside:
            np.clip(part, _ZERO, _LEVELS, out=part)
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
        # The formula does not decode some blocks: NaN or an overflown range gives NaN; a zero range or an
        # overflown `upper` gives min.
        self.clamp = True
        self.fill = np.where(self.factor > 0, low, np.float32(np.nan))

    def decode(self, code: Array, out: Array, at: tuple[slice, slice, slice]) -> None:
        """x' = (code + lower) / scale in float32, for the part of the blocks that `at` cuts out."""
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
    return factor, np.rint(high * factor) - _LEVELS


def _min_max(x: Array) -> tuple[Array, Array]:
    """Min and max of each block, (r, k, 1); zeros are +0.0 and NaN spreads."""
    low, high = np.empty((2, *x.shape[:2], 1), np.float32)
    for at in _parts((*x.shape[:2], 1), weight=x.shape[2]):
        x[at[:2]].min(axis=-1, keepdims=True, out=low[at[:2]])
        x[at[:2]].max(axis=-1, keepdims=True, out=high[at[:2]])
    low += _ZERO
    high += _ZERO
    return low, high


def _spans(x: Array, header: Array, codes: Array, block: int) -> Iterator[tuple[Array, Array, Array]]:
    """Cut (n, m) into spans (r, k, b) of whole blocks; the short last block of the rows comes last.

    Yields matching views of `x`, the header and the codes. A span has at most `SPAN` elements, or is a
    single longer block; so the constants of many blocks are computed at a time.
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
    """Cut a span (r, k, b) into parts of at most `PIECE` elements; each one of the span counts for `weight`."""
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


def _shaped(scratch: Array, shape: tuple[int, ...]) -> Array:
    return scratch[: math.prod(shape)].reshape(shape)


def _scratch(count: int, elements: int) -> tuple[Array, ...]:
    return tuple(np.empty(min(elements, PIECE), np.float32) for _ in range(count))
