"""MinMaxUInt8; see `host.minmax`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, TypeAlias, TypeVar

import numba
import numpy as np

from ...arrays import Array
from .codegen import STRIP, inner, kernel, scratch
from .numbers import (
    AHEAD,
    FLOAT16,
    FLOAT32,
    LARGEST,
    LEVELS,
    MINUS_ZERO,
    NAN,
    SIGN,
    ZERO,
    bytes_at,
    clear,
    divide,
    finite_to_bfloat16,
    finite_to_float16,
    float_of,
    floats_at,
    from_bfloat16,
    from_float16,
    halves_at,
    itemsize,
    load,
    load_ahead,
    round_to,
    store,
    to_bfloat16,
    to_float16,
)

_EXACT = np.float32(2.0**23)
"""Up to this, float32 holds every integer exactly, also after 255 is added."""

_Bits = TypeVar("_Bits", np.uint16, np.uint32)
"""The bits of an element."""

_FromBits: TypeAlias = Callable[[_Bits], np.float32]
_ToBits: TypeAlias = Callable[[np.float32], np.uint16]
_Pair: TypeAlias = tuple[np.float32, np.float32]


class _Wire(NamedTuple):
    """Layout of encoded rows."""

    element: int
    elements: int
    stride: int
    start: int
    block: int
    eps: np.float32


class _Decoding(NamedTuple):
    """Decoding constants of a block."""

    scale: np.float32
    lower: np.float32
    fill: np.float32
    largest: np.float32
    constant: bool
    plain: bool


@kernel
def encode_rows(
    element: int,
    x: int,
    pitch: int,
    n: int,
    count: int,
    wire: int,
    stride: int,
    start: int,
    block: int,
    eps: float,
) -> None:
    """Encode n rows of elements; each begins `pitch` elements after the one before."""
    layout = _Wire(element, count, stride, start, block, np.float32(eps))
    pair = numba.carray(scratch(2), (2,))
    for row in range(n):
        source, target = x + row * pitch * itemsize(element), wire + row * stride
        for begin in range(0, count, block):
            where, length = source + begin * itemsize(element), min(block, count - begin)
            load_ahead(where, min(length * itemsize(element), AHEAD))
            if element == FLOAT32:
                _encode_floats(layout, floats_at(where, length).view(np.uint32), begin, target, pair)
            elif element == FLOAT16:
                _encode_halves(layout, halves_at(where, length), from_float16, begin, target, pair)
            else:
                _encode_halves(layout, halves_at(where, length), from_bfloat16, begin, target, pair)
        _clear_padding(layout, target)


@kernel
def combine_rows(
    element: int,
    wires: int,
    n: int,
    mean: int,
    count: int,
    wire: int,
    stride: int,
    start: int,
    block: int,
    eps: float,
) -> None:
    """Decode n rows of `wires`, add them, and encode the sum."""
    layout = _Wire(element, count, stride, start, block, np.float32(eps))
    total, pair = numba.carray(scratch(STRIP), (STRIP,)), numba.carray(scratch(2), (2,))
    for begin in range(0, count, block):
        _encode_sum(layout, wires, n, mean, begin, wire, total, pair)
    _clear_padding(layout, wire)


@kernel
def decode_rows(
    element: int,
    wire: int,
    n: int,
    count: int,
    out: int,
    pitch: int,
    stride: int,
    start: int,
    block: int,
    eps: float,
) -> None:
    """Decode n rows; see `encode_rows`."""
    layout = _Wire(element, count, stride, start, block, np.float32(eps))
    pair = numba.carray(scratch(2), (2,))
    for row in range(n):
        source, target = wire + row * stride, out + row * pitch * itemsize(element)
        for begin in range(0, count, block):
            decoding = _read_decoding(layout, source, begin, pair)
            where, length = target + begin * itemsize(element), min(block, count - begin)
            codes = bytes_at(source + start + begin, length)
            if element == FLOAT32:
                _decode(codes, decoding, False, floats_at(where, length))
            elif element == FLOAT16:
                _decode_rounded(codes, decoding, to_float16, finite_to_float16, halves_at(where, length))
            else:
                _decode_rounded(codes, decoding, to_bfloat16, finite_to_bfloat16, halves_at(where, length))


@inner
def _clear_padding(layout: _Wire, row: int) -> None:
    blocks = -(-layout.elements // layout.block)
    clear(row, blocks * 2 * itemsize(layout.element), layout.start)
    clear(row, layout.start + layout.elements, layout.stride)


@inner
def _header(layout: _Wire, row: int, begin: int) -> int:
    """The address of the pair (min, max) of the block that begins at element `begin`."""
    return row + begin // layout.block * 2 * itemsize(layout.element)


@inner
def _scale_and_lower(low: np.float32, high: np.float32, eps: np.float32) -> _Pair:
    scale = np.float32(255 / np.float64(high - low + eps))
    return scale, np.rint(high * scale) - LEVELS


@inner
def _read_decoding(layout: _Wire, row: int, begin: int, pair: Array) -> _Decoding:
    ends = load(layout.element, _header(layout, row, begin), 2, pair)
    low, high = ends[0], ends[1]
    scale, lower = _scale_and_lower(low, high, layout.eps)
    # NaN or an overflown range gives NaN; a zero range or an overflown `upper` gives min.
    constant = not (np.isfinite(scale) and np.isfinite(lower) and scale > 0)
    fill = low if scale > 0 else float_of(NAN)
    largest = LARGEST[layout.element]
    plain = not constant and max(-low, high) + layout.eps <= largest / np.float32(2)
    return _Decoding(scale, lower, fill, largest, constant, plain)


@inner
def _decode(codes: Array, decoding: _Decoding, adding: bool, out: Array) -> None:
    """Decode: x' = (code + lower) / scale, kept finite; added to `out` if `adding`."""
    scale, lower, largest = decoding.scale, decoding.lower, decoding.largest
    if decoding.plain and adding:
        for i in range(len(out)):
            out[i] += (np.float32(codes[i]) + lower) / scale
    elif decoding.plain:
        for i in range(len(out)):
            out[i] = (np.float32(codes[i]) + lower) / scale
    else:
        for i in range(len(out)):
            value = min(max((np.float32(codes[i]) + lower) / scale, -largest), largest)
            value = decoding.fill if decoding.constant else value
            out[i] = out[i] + value if adding else value


@inner
def _decode_rounded(
    codes: Array, decoding: _Decoding, rounded: _ToBits, finite_rounded: _ToBits, out: Array
) -> None:
    """Decode to 16-bit elements with two functions that give their bits: of any float32, and of finite ones."""
    scale, lower, largest = decoding.scale, decoding.lower, decoding.largest
    if decoding.plain:
        for i in range(len(out)):
            out[i] = finite_rounded((np.float32(codes[i]) + lower) / scale)
    else:
        for i in range(len(out)):
            value = min(max((np.float32(codes[i]) + lower) / scale, -largest), largest)
            out[i] = rounded(decoding.fill if decoding.constant else value)


@inner
def _sum_strip(
    layout: _Wire, wires: int, n: int, mean: int, begin: int, at: int, total: Array, pair: Array
) -> None:
    """Sum elements of n rows into `total`, from element `at` of the block that begins at `begin`."""
    total[:] = MINUS_ZERO
    for row in range(n):
        wire = wires + row * layout.stride
        codes = bytes_at(wire + layout.start + at, len(total))
        _decode(codes, _read_decoding(layout, wire, begin, pair), True, total)
    if mean:
        divide(total, n)
    round_to(layout.element, total)


@inner
def _extremes(
    bits: Array, signed: Array, signed_most: np.signedinteger, most: _Bits, least: _Bits
) -> tuple[np.signedinteger, _Bits, _Bits]:
    """Update three extremes of the bits of floats: the signed maximum, the unsigned maximum and minimum."""
    for i in range(len(bits)):
        signed_most = signed[i] if signed[i] > signed_most else signed_most
        most = bits[i] if bits[i] > most else most
        least = bits[i] if bits[i] < least else least
    return signed_most, most, least


@inner
def _ends(signed_most: Any, most: _Bits, least: _Bits, sign: _Bits, value: _FromBits[_Bits]) -> _Pair:
    """Min and max of floats, from the extremes of their bits; NaN if any is not finite, and zeros are +0.0.

    Args:
        signed_most: The largest as signed integers.
        most: The largest as unsigned integers.
        least: The smallest as unsigned integers.
        sign: The bit of the sign.
        value: Converts bits to float32.
    """
    # Bits of positive floats ascend with the values; those of negative ones descend, and are larger as unsigned.
    low = value(most if most >= sign else least) + ZERO
    high = value(signed_most if signed_most >= 0 else least) + ZERO
    if not (np.isfinite(low) and np.isfinite(high)):
        low = high = float_of(NAN)
    return low, high


@inner
def _encode_floats(layout: _Wire, bits: Array, begin: int, row: int, pair: Array) -> None:
    """Encode a block of float32."""
    most = _extremes(bits, bits.view(np.int32), np.int32(-(2**31)), np.uint32(0), np.uint32(0xFFFFFFFF))
    low, high = _ends(most[0], most[1], most[2], SIGN, float_of)
    scale, lower = _write_ends(layout, low, high, begin, row, pair)
    _quantize(bits, float_of, low, scale, lower, bytes_at(row + layout.start + begin, len(bits)))


@inner
def _encode_halves(
    layout: _Wire, bits: Array, value: _FromBits[_Bits], begin: int, row: int, pair: Array
) -> None:
    """Encode a block of 16-bit elements; `value` converts their bits to float32."""
    most = _extremes(bits, bits.view(np.int16), np.int16(-(2**15)), np.uint16(0), np.uint16(0xFFFF))
    low, high = _ends(most[0], most[1], most[2], np.uint16(0x8000), value)
    scale, lower = _write_ends(layout, low, high, begin, row, pair)
    _quantize(bits, value, low, scale, lower, bytes_at(row + layout.start + begin, len(bits)))


@inner
def _encode_sum(
    layout: _Wire, wires: int, n: int, mean: int, begin: int, row: int, scratch: Array, pair: Array
) -> None:
    """Encode the sum of one block of n rows of `wires`."""
    end = min(begin + layout.block, layout.elements)
    most = np.int32(-(2**31)), np.uint32(0), np.uint32(0xFFFFFFFF)
    for at in range(begin, end, STRIP):
        total = scratch[: min(STRIP, end - at)]
        _sum_strip(layout, wires, n, mean, begin, at, total, pair)
        most = _extremes(total.view(np.uint32), total.view(np.int32), most[0], most[1], most[2])
    low, high = _ends(most[0], most[1], most[2], SIGN, float_of)
    scale, lower = _write_ends(layout, low, high, begin, row, pair)
    for at in range(begin, end, STRIP):
        total = scratch[: min(STRIP, end - at)]
        if end - begin > STRIP:  # a single strip is still in `total`
            _sum_strip(layout, wires, n, mean, begin, at, total, pair)
        codes = bytes_at(row + layout.start + at, len(total))
        _quantize(total.view(np.uint32), float_of, low, scale, lower, codes)


@inner
def _write_ends(layout: _Wire, low: np.float32, high: np.float32, begin: int, row: int, pair: Array) -> _Pair:
    """Write the pair (min, max) of a block, and return its scale and lower level."""
    pair[0], pair[1] = low, high
    store(layout.element, pair, _header(layout, row, begin))
    return _scale_and_lower(low, high, layout.eps)


@inner
def _quantize(
    bits: Array, value: _FromBits[_Bits], low: np.float32, scale: np.float32, lower: np.float32, codes: Array
) -> None:
    """Encode: code = clip(rint(x * scale) - lower, 0, 255), or 0 if the constants are not finite."""
    if not (np.isfinite(low) and np.isfinite(scale) and np.isfinite(lower)):
        codes[:] = 0
    elif np.rint(low * scale) - lower >= 0 and abs(lower) < _EXACT:  # then no code needs clipping: see `host`
        for i in range(len(bits)):
            codes[i] = np.uint8(np.int32(np.rint(value(bits[i]) * scale) - lower))
    else:
        for i in range(len(bits)):
            codes[i] = np.uint8(min(max(np.rint(value(bits[i]) * scale) - lower, ZERO), LEVELS))
