"""Kernels of `MXFP8`, `MXFP4` and `NVFP4`: floats of 8 or 4 bits, with a scale for each block.

The layout of the wire and the arithmetic are in `codecs.microscaling`.

MX: the scale of a block is the power of two that brings its largest element to the largest exponent of the code.
NVFP4: the scale of a block is a float of 8 bits, in units of a float32 factor of the chunk.

Codes come from the casts of ml_dtypes, which round half to even.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from ...arrays import Array, DType
from .numbers import PIECE, ZERO, largest_finite, widened

MX_BLOCK = 32
NVFP4_BLOCK = 16

_BIAS = 127
"""Added to the exponent of a scale of the MX formats; the code 255 stands for NaN."""
_E8M0_NAN = 255
_E4M3_NAN = 0x7F
_LEAST_FACTOR = np.float32(2.0**-126)
"""The least factor of a chunk of NVFP4: the least normal float32, so that no quotient by it overflows."""


class Format(NamedTuple):
    """A format of codes.

    Args:
        dtype: Its dtype in ml_dtypes, of one byte an element.
        exponent: The exponent of its largest finite value.
        largest: Its largest finite value.
        per_byte: The codes in a byte of the wire.
    """

    dtype: DType
    exponent: int
    largest: np.float32
    per_byte: int


@functools.cache
def code_format(name: str) -> Format:
    """The format "e4m3", "e5m2" or "e2m1"."""
    import ml_dtypes

    if name == "e4m3":
        return Format(np.dtype(ml_dtypes.float8_e4m3fn), 8, np.float32(448), 1)
    if name == "e5m2":
        return Format(np.dtype(ml_dtypes.float8_e5m2), 15, np.float32(57344), 1)
    return Format(np.dtype(ml_dtypes.float4_e2m1fn), 2, np.float32(6), 2)


def mx_encode(chunks: Array, wire: Array, start: int, name: str) -> None:
    """Encode `chunks`, (n, m), of float32, float16 or bfloat16, in rows of `wire`, (n, w) uint8.

    A row gets the scale of every block of 32 elements, then, from byte `start` on, m codes of format `name`. The
    other bytes are zeroed. A block with a value that is not finite gets the scale NaN and codes 0.
    """
    form = code_format(name)
    wire[...] = 0
    for row, blocks, elements, shape in _pieces(chunks.shape, MX_BLOCK):
        x = widened(chunks[row, elements]).reshape(shape)
        with np.errstate(all="ignore"):
            high = np.abs(x).max(axis=1, keepdims=True)
            finite = np.isfinite(high)
            # frexp gives a fraction of at least a half, so its exponent is one more than that of the value.
            exponent = np.where(high > ZERO, np.frexp(high)[1] - 1 - form.exponent, -_BIAS)
            exponent = np.clip(exponent, -_BIAS, _BIAS)
            scaled = x * np.ldexp(np.float32(1), -exponent)
        wire[row, blocks] = np.where(finite, exponent + _BIAS, _E8M0_NAN)[:, 0]
        _write_codes(scaled, finite, wire[row, start:], elements, form)


def mx_decode(wire: Array, out: Array, start: int, name: str) -> None:
    """Decode rows of `wire` to `out`, (n, m): code times scale, kept finite, rounded once."""
    form = code_format(name)
    for row, blocks, elements, shape in _pieces(out.shape, MX_BLOCK):
        codes = wire[row, blocks]
        with np.errstate(all="ignore"):
            scale = np.ldexp(np.float32(1), codes.astype(np.int32) - _BIAS)
        scale[codes == _E8M0_NAN] = np.nan
        value = _read_codes(wire[row, start:], elements, form).reshape(shape)
        _write_values(value, scale[:, None], out[row, elements])


def nvfp4_encode(chunks: Array, wire: Array, start: int) -> None:
    """Encode `chunks`, (n, m), of float32, float16 or bfloat16, in rows of `wire`, (n, w) uint8.

    A row gets its factor, the scale of every block of 16 elements, and from byte `start` on m codes. The other
    bytes are zeroed. A block with a value that is not finite gets the scale NaN and codes 0, and has no part in
    the factor.
    """
    form, scales = code_format("e2m1"), code_format("e4m3")
    (n, m), wire[...] = chunks.shape, 0
    high = np.empty((n, -(-m // NVFP4_BLOCK), 1), np.float32)
    with np.errstate(all="ignore"):
        for row, blocks, elements, shape in _pieces(chunks.shape, NVFP4_BLOCK):
            x = widened(chunks[row, elements]).reshape(shape)
            np.abs(x).max(axis=1, keepdims=True, out=high[row, blocks])
        finite = np.isfinite(high)
        top = high.max(axis=1, initial=0, where=finite)
        factor = np.maximum(top / (form.largest * scales.largest), _LEAST_FACTOR)
        scale = np.minimum(high / form.largest / factor[:, None], scales.largest).astype(scales.dtype)
        step = scale.astype(np.float32) * factor[:, None]
        if m:
            wire[:, : factor.itemsize] = factor.view(np.uint8)
            wire[:, factor.itemsize : factor.itemsize + high.shape[1]] = np.where(
                finite, scale.view(np.uint8), _E4M3_NAN
            )[..., 0]
        for row, blocks, elements, shape in _pieces(chunks.shape, NVFP4_BLOCK):
            x = widened(chunks[row, elements]).reshape(shape)
            usable = finite[row, blocks] & (step[row, blocks] > ZERO)
            _write_codes(x / step[row, blocks], usable, wire[row, start:], elements, form)


def nvfp4_decode(wire: Array, out: Array, start: int) -> None:
    """Decode rows of `wire` to `out`, (n, m): code times scale times factor, kept finite, rounded once."""
    form, scales = code_format("e2m1"), code_format("e4m3")
    for row, blocks, elements, shape in _pieces(out.shape, NVFP4_BLOCK):
        factor, rest = wire[row, :4].view(np.float32), wire[row, 4:]
        with np.errstate(all="ignore"):
            step = rest[blocks].view(scales.dtype).astype(np.float32) * factor
        value = _read_codes(wire[row, start:], elements, form).reshape(shape)
        _write_values(value, step[:, None], out[row, elements])


def _pieces(shape: tuple[int, int], block: int) -> Iterator[tuple[int, slice, slice, tuple[int, int]]]:
    """Cut rows into pieces of whole blocks that fit a cache; the short last block of a row is a piece of its own.

    Yields the row, its blocks, its elements, and their shape (blocks, elements of each).
    """
    n, m = shape
    whole = m // block * block
    for row in range(n):
        for first in range(0, whole, PIECE):
            last = min(first + PIECE, whole)
            blocks = slice(first // block, last // block)
            yield row, blocks, slice(first, last), ((last - first) // block, block)
        if whole < m:
            yield row, slice(whole // block, whole // block + 1), slice(whole, m), (1, m - whole)


def _write_codes(x: Array, usable: Array, wire: Array, elements: slice, form: Format) -> None:
    """Round `x`, (blocks, elements of each), to codes at `elements` of `wire`; 0 in blocks not `usable`."""
    if not usable.all():
        x = np.where(usable, x, ZERO)
    np.clip(x, -form.largest, form.largest, out=x)
    codes = x.reshape(-1).astype(form.dtype).view(np.uint8)
    if form.per_byte == 1:
        wire[elements] = codes
        return
    if len(codes) % 2:
        codes = np.append(codes, np.uint8(0))
    wire[elements.start // 2 : (elements.stop + 1) // 2] = codes[::2] | codes[1::2] << 4


def _read_codes(wire: Array, elements: slice, form: Format) -> Array:
    """The values in float32 of the codes at `elements` of `wire`."""
    if form.per_byte == 1:
        codes = wire[elements]
    else:
        packed = wire[elements.start // 2 : (elements.stop + 1) // 2]
        codes = np.stack([packed & 15, packed >> 4], axis=-1).reshape(-1)[: elements.stop - elements.start]
    return codes.view(form.dtype).astype(np.float32)


def _write_values(value: Array, scale: Array, out: Array) -> None:
    """Write `value` times `scale`, (blocks, elements of each), to flat `out`; what is finite stays finite."""
    limit = largest_finite(out.dtype)
    with np.errstate(all="ignore"):
        x = value * scale
        odd = ~np.isfinite(x)
        np.clip(x, -limit, limit, out=x)
        if odd.any():
            infinite = np.isinf(value) | np.isinf(scale)
            np.copyto(x, value * scale, where=infinite)
            np.copyto(x, np.float32(np.nan), where=np.isnan(x))
        np.copyto(out, x.reshape(-1), casting="unsafe")
