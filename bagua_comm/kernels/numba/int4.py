"""Int4; see `host.int4`."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from ...arrays import Array
from .codegen import address_of, inlined, inner, kernel, scratch
from .numbers import (
    FLOAT32,
    LARGEST,
    NAN,
    ZERO,
    bits_of,
    bytes_at,
    clear,
    divide,
    float_of,
    floats_at,
    from_bfloat16,
    halves_at,
    itemsize,
    load,
    load_ahead,
    store,
)
from .units import (
    PART,
    UNIT,
    add_and_subtract_units,
    add_codes,
    decode_unit,
    find_largest,
    quantize_sum,
    quantize_unit,
    quantize_unit_at_random,
    rotate_unit,
    scale_unit,
    unpack_unit,
)

_STRIP = 2048
"""The number of elements in a strip, unless one block is longer."""

_LONGEST = 4096
"""The number of elements in the longest block."""

_PARTS = _LONGEST // PART
"""The number of the smallest blocks in the longest strip, and more than those in a shorter one."""

_INFINITY, _NAN_ALONE = np.uint32(0x7F800000), np.uint32(0x7F800001)
"""Bits of infinity, and those after it."""

_SMALLEST_NORMAL, _LARGEST_SCALE, _NAN_SCALE = np.uint32(0x0080), np.uint32(0x7E12), np.uint32(0x7FC0)
"""Bits of bfloat16; see `host.int4`."""

_SEVEN, _ONE = np.float32(7), np.float32(1)


class _Wire(NamedTuple):
    """Layout of encoded rows, and the random numbers of their elements."""

    element: int
    elements: int
    stride: int
    start: int
    block: int
    shift: int
    """The binary logarithm of `block`; divisions take longer."""
    rotate: int
    random: int
    """Whether codes are rounded at random."""
    low: np.uint32
    high: np.uint32
    """Halves of the key."""
    counter: int


class _Memory(NamedTuple):
    """Addresses of memory for a strip. Each kernel makes its own, since the stack of a function ends with it."""

    x: int
    """Elements, rotated."""
    numbers: int
    """Random numbers of the elements."""
    largest: int
    """The bits of the largest magnitude of each 8 elements."""
    factors: int
    """Factors of the blocks, and more for a unit that reaches beyond the last block."""
    codes: int
    """Codes of such a unit."""


@kernel
def encode_int4(
    element: int,
    x: int,
    pitch: int,
    n: int,
    count: int,
    wire: int,
    stride: int,
    start: int,
    block: int,
    rotate: int,
    random: int,
    low: int,
    high: int,
    counter: int,
) -> None:
    """Encode n rows of elements; each begins `pitch` elements after the one before."""
    key, shift = (np.uint32(low), np.uint32(high)), _logarithm(block)
    layout = _Wire(element, count, stride, start, block, shift, rotate, random, key[0], key[1], counter)
    memory = _Memory(
        address_of(scratch(_LONGEST)),
        address_of(scratch(_LONGEST)),
        address_of(scratch(_PARTS)),
        address_of(scratch(_PARTS)),
        address_of(scratch(UNIT)),
    )
    factor, length = _ONE / np.float32(rotate), max(block, _STRIP)
    for row in range(n):
        source, target = x + row * pitch * itemsize(element), wire + row * stride
        for begin in range(0, count, length):
            where, size = source + begin * itemsize(element), min(length, count - begin)
            whole = _rounded_up(size, block)
            if element == FLOAT32 and size == whole and size % UNIT == 0:
                _rotate(layout, where, memory, whole, factor)
            else:
                wide = floats_at(memory.x, _rounded_up(whole, UNIT))
                load_ahead(where, size * itemsize(element))
                values = load(element, where, size, wide)
                if element == FLOAT32:
                    for i in range(size):
                        wide[i] = values[i]
                wide[size:] = ZERO
                _rotate(layout, memory.x, memory, whole, factor)
            if rotate > UNIT:
                _rotate_units(memory.x, whole, rotate)
                _find_largest(layout, memory, whole)
            _quantize(layout, memory, begin, begin + whole, row * pitch + begin, target, _INFINITY)
        _clear_padding(layout, target)


@kernel
def decode_int4(
    element: int,
    wire: int,
    n: int,
    count: int,
    out: int,
    pitch: int,
    stride: int,
    start: int,
    block: int,
    rotate: int,
) -> None:
    """Decode n rows; see `encode_int4`."""
    nothing, shift = np.uint32(0), _logarithm(block)
    layout = _Wire(element, count, stride, start, block, shift, rotate, 0, nothing, nothing, 0)
    x, factors = address_of(scratch(_LONGEST)), address_of(scratch(_PARTS))
    spare, length, largest = address_of(scratch(UNIT)), max(block, _STRIP), LARGEST[element]
    for row in range(n):
        source, target = wire + row * stride, out + row * pitch * itemsize(element)
        for begin in range(0, count, length):
            where, size = target + begin * itemsize(element), min(length, count - begin)
            end = begin + _rounded_up(size, block)
            decoded = where if element == FLOAT32 and size % UNIT == 0 else x
            _read_factors(layout, source, begin, end, 1, factors)
            if rotate <= UNIT:
                for at in range(begin, begin + size, UNIT):
                    codes, factor = (
                        _codes(layout, source, at, end, spare),
                        _factor_of(layout, at - begin, factors),
                    )
                    decode_unit(codes, factor, block, rotate, largest, decoded + (at - begin) * 4)
            else:
                for at in range(begin, end, UNIT):
                    unpack_unit(_codes(layout, source, at, end, spare), rotate, x + (at - begin) * 4)
                _rotate_units(x, end - begin, rotate)
                scales = floats_at(factors, _PARTS)
                for at in range(0, size, UNIT):
                    scale_unit(x + at * 4, scales[at >> layout.shift], largest, decoded + at * 4)
            if decoded == x:
                store(element, floats_at(x, size), where)


@kernel
def combine_int4(
    wires: int,
    n: int,
    mean: int,
    count: int,
    wire: int,
    stride: int,
    start: int,
    block: int,
    random: int,
    low: int,
    high: int,
    counter: int,
) -> None:
    """Add n rows of `wires`, and encode the sum."""
    key, shift = (np.uint32(low), np.uint32(high)), _logarithm(block)
    layout = _Wire(FLOAT32, count, stride, start, block, shift, 1, random, key[0], key[1], counter)
    memory = _Memory(
        address_of(scratch(_LONGEST)),
        address_of(scratch(_LONGEST)),
        address_of(scratch(_PARTS)),
        address_of(scratch(_PARTS)),
        address_of(scratch(UNIT)),
    )
    length, divisor = max(block, _STRIP), n if mean else 1
    for begin in range(0, count, length):
        end = begin + _rounded_up(min(length, count - begin), block)
        floats_at(memory.x, _rounded_up(end - begin, UNIT))[:] = ZERO
        for row in range(n):
            source = wires + row * stride
            _read_factors(layout, source, begin, end, divisor, memory.factors)
            for at in range(begin, end, UNIT):
                codes = _codes(layout, source, at, end, memory.codes)
                factor = _factor_of(layout, at - begin, memory.factors)
                add_codes(codes, factor, block, memory.x + (at - begin) * 4)
        _find_largest(layout, memory, end - begin)
        _quantize(layout, memory, begin, end, begin, wire, _NAN_ALONE)
    _clear_padding(layout, wire)


@inner
def _rounded_up(count: int, size: int) -> int:
    return -(-count // size) * size


@inner
def _logarithm(power: int) -> int:
    exponent = 0
    while power >> exponent > 1:
        exponent += 1
    return exponent


@inner
def _clear_padding(layout: _Wire, row: int) -> None:
    blocks = -(-layout.elements // layout.block)
    clear(row, 2 * blocks, layout.start)
    clear(row, layout.start + blocks * (layout.block // 2), layout.stride)


@inner
def _rotate(layout: _Wire, source: int, memory: _Memory, count: int, factor: np.float32) -> None:
    """Rotate the elements of each unit of a strip from `source`, and find the largest magnitudes."""
    for at in range(0, count, UNIT):
        largest = _largest_of(layout, memory, at)
        load_ahead(source + at * 4, UNIT * 4)
        rotate_unit(source + at * 4, memory.x + at * 4, layout.rotate, factor, layout.block, largest)


@inner
def _find_largest(layout: _Wire, memory: _Memory, count: int) -> None:
    for at in range(0, count, UNIT):
        find_largest(memory.x + at * 4, layout.block, _largest_of(layout, memory, at))


@inlined
def _largest_of(layout: _Wire, memory: _Memory, at: int) -> int:
    """The address of the bits of the largest magnitudes of the unit at element `at` of a strip."""
    return memory.largest + (at // UNIT if layout.block >= UNIT else at // PART) * 4


@inner
def _rotate_units(x: int, count: int, rotate: int) -> None:
    """The butterflies between units, in place."""
    stride = UNIT
    while stride < rotate:
        for first in range(0, count, 2 * stride):
            for at in range(first, first + stride, UNIT):
                add_and_subtract_units(x + at * 4, x + (at + stride) * 4)
        stride *= 2


@inlined
def _codes(layout: _Wire, row: int, at: int, end: int, spare: int) -> int:
    """The address of the codes of the unit at `at`; `spare`, with zeros, if it reaches beyond `end`."""
    where = row + layout.start + at // 2
    if at + UNIT <= end:
        return where
    padded, codes = bytes_at(spare, UNIT // 2), bytes_at(where, (end - at) // 2)
    padded[:] = 0
    for i in range(len(codes)):
        padded[i] = codes[i]
    return spare


@inlined
def _factor_of(layout: _Wire, at: int, factors: int) -> int:
    """The address of the factor of the first block of the unit at element `at` of a strip."""
    return factors + (at >> layout.shift) * 4


@inner
def _read_factors(layout: _Wire, row: int, begin: int, end: int, divisor: int, factors: int) -> None:
    """The scales of the blocks of a strip, divided by `divisor`; NaN for those that are not finite."""
    blocks = (end - begin) >> layout.shift
    scales, values = halves_at(row + 2 * (begin >> layout.shift), blocks), floats_at(factors, blocks)
    for i in range(blocks):
        finite = np.uint16(scales[i] & np.uint16(0x7F80)) != 0x7F80
        values[i] = from_bfloat16(scales[i]) if finite else float_of(NAN)
    if divisor > 1:
        divide(values, divisor)
    if layout.block < UNIT:
        floats_at(factors + 4 * blocks, UNIT // PART)[:] = ZERO


@inner
def _quantize(
    layout: _Wire, memory: _Memory, begin: int, end: int, index: int, row: int, limit: np.uint32
) -> None:
    """Quantize a strip of rotated elements, from `begin` to `end` in its row.

    Args:
        layout: The layout of the row.
        memory: Memory with the elements.
        begin: The first element.
        end: The element after the last one.
        index: The position of the first element after the first one of all rows.
        row: The address of the row.
        limit: Bits; a block is NaN if the bits of its largest magnitude are not less.
    """
    block, blocks = layout.block, (end - begin) >> layout.shift
    _find_largest_of_blocks(memory.largest, blocks, block // (UNIT if block >= UNIT else PART))
    scales = halves_at(row + 2 * (begin >> layout.shift), blocks)
    broken = _write_scales(layout, memory, blocks, scales, limit)
    if layout.random:
        _draw(layout, index, floats_at(memory.numbers, end - begin))
    for at in range(begin, end, UNIT):
        where = row + layout.start + at // 2
        codes = where if at + UNIT <= end else memory.codes
        x, factor = memory.x + (at - begin) * 4, _factor_of(layout, at - begin, memory.factors)
        if layout.random:
            quantize_unit_at_random(x, factor, block, memory.numbers + (at - begin) * 4, codes)
        elif limit == _INFINITY:  # there are no infinities, and no level that rounds to 8
            quantize_unit(x, factor, block, codes)
        else:
            quantize_sum(x, factor, block, codes)
        if at + UNIT > end:
            target, source = bytes_at(where, (end - at) // 2), bytes_at(codes, (end - at) // 2)
            for i in range(len(target)):
                target[i] = source[i]
    if broken:
        for i in range(blocks):
            if scales[i] == _NAN_SCALE:
                bytes_at(row + layout.start + begin // 2 + i * (block // 2), block // 2)[:] = 0


@inner
def _find_largest_of_blocks(largest: int, blocks: int, parts: int) -> None:
    """Replace the numbers of each block's `parts` by the largest one."""
    if parts == 1:
        return
    bits = floats_at(largest, blocks * parts).view(np.uint32)
    for block in range(blocks):
        most = np.uint32(0)
        for i in range(block * parts, (block + 1) * parts):
            most = max(most, bits[i])
        bits[block] = most


@inner
def _write_scales(layout: _Wire, memory: _Memory, blocks: int, scales: Array, limit: np.uint32) -> Any:
    """Write the scales of blocks, and their inverses as factors; 0 where the scale is 0 or NaN.

    Returns whether any are NaN, as 0 or 1.
    """
    largest, factors = floats_at(memory.largest, blocks).view(np.uint32), floats_at(memory.factors, blocks)
    up = np.uint32(0xFFFF) if layout.random else np.uint32(0x7FFF)
    even, broken = np.uint32(0) if layout.random else np.uint32(1), np.uint32(0)
    for i in range(blocks):
        most = min(largest[i], bits_of(LARGEST[FLOAT32]))
        quotient = bits_of(float_of(most) / _SEVEN)
        bits = np.uint32(np.uint32(quotient + up + np.uint32(np.uint32(quotient >> 16) & even)) >> 16)
        bits = min(bits, _LARGEST_SCALE)
        is_large = bits >= _SMALLEST_NORMAL
        bits = bits if is_large else _SMALLEST_NORMAL
        inverse = _ONE / float_of(np.uint32(bits << 16))
        bits, inverse = (bits, inverse) if is_large else (np.uint32(0), ZERO)
        is_broken = largest[i] >= limit
        broken |= np.uint32(is_broken)
        factors[i] = ZERO if is_broken else inverse
        scales[i] = np.uint16(_NAN_SCALE if is_broken else bits)
    if layout.block < UNIT:
        floats_at(memory.factors + 4 * blocks, UNIT // PART)[:] = ZERO
    return broken


@inner
def _draw(layout: _Wire, index: int, numbers: Array) -> None:
    """Random numbers of elements, from number `index` on; see `host.random_bits`."""
    first, low, high = np.uint32(layout.counter + index), layout.low, layout.high
    for i in range(len(numbers)):
        x = np.uint32(np.uint32(first + np.uint32(i)) ^ low)
        x = np.uint32(np.uint32(x ^ np.uint32(x >> np.uint32(16))) * np.uint32(0x7FEB352D))
        x = np.uint32(np.uint32(x ^ np.uint32(x >> np.uint32(15))) + high)
        x = np.uint32(x * np.uint32(0x846CA68B))
        x = np.uint32(x ^ np.uint32(x >> np.uint32(16)))
        numbers[i] = np.float32(np.int32(np.uint32(x >> np.uint32(8)))) * np.float32(2.0**-24)
