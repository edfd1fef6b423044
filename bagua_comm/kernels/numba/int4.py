"""Int4; see `host.int4`."""

from __future__ import annotations

from typing import Any, NamedTuple

import numba
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
    float_of,
    floats_at,
    from_bfloat16,
    halves_at,
    itemsize,
    load,
    store,
)
from .units import (
    UNIT,
    add_and_subtract_units,
    add_codes,
    fill_unit,
    largest_bits,
    quantize_unit,
    quantize_unit_at_random,
    rotate_unit,
    scale_unit,
    unpack_unit,
)

_STRIP = 1024
"""The number of elements in a strip, unless one block is longer."""

_LONGEST = 4096
"""The number of elements in the longest block."""

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
    low: Any
    high: Any
    """Halves of the key."""
    counter: Any


class _Memory(NamedTuple):
    """Addresses of memory for a strip and for a unit."""

    x: int
    """Elements of a strip, rotated."""
    numbers: int
    """Random numbers of a strip."""
    factors: int
    """Factors of the elements of a unit."""
    codes: int
    """Codes of a unit that reaches beyond the last block."""


@kernel
def encode_int4(
    element: int,
    x: int,
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
    """Encode n rows of elements."""
    layout = _Wire(
        element,
        count,
        stride,
        start,
        block,
        _logarithm(block),
        rotate,
        random,
        np.uint32(low),
        np.uint32(high),
        counter,
    )
    memory = _Memory(
        address_of(scratch(_LONGEST)),
        address_of(scratch(_LONGEST)),
        address_of(scratch(UNIT)),
        address_of(scratch(UNIT)),
    )
    factor, length = _ONE / np.float32(rotate), max(block, _STRIP)
    for row in range(n):
        source, target = x + row * count * itemsize(element), wire + row * stride
        for begin in range(0, count, length):
            where, size = source + begin * itemsize(element), min(length, count - begin)
            whole = -(-size // block) * block
            if element == FLOAT32 and size % UNIT == 0 and size == whole:
                _rotate(layout, where, memory.x, whole, factor)
            else:
                wide = floats_at(memory.x, -(-whole // UNIT) * UNIT)
                values = load(element, where, size, wide)
                if element == FLOAT32:
                    for i in range(size):
                        wide[i] = values[i]
                wide[size:] = ZERO
                _rotate(layout, memory.x, memory.x, whole, factor)
            _quantize(layout, memory, begin, begin + whole, row * count + begin, target, _INFINITY)
        _clear_padding(layout, target)


@kernel
def decode_int4(
    element: int, wire: int, n: int, count: int, out: int, stride: int, start: int, block: int, rotate: int
) -> None:
    """Decode n rows."""
    none = np.uint32(0)
    layout = _Wire(element, count, stride, start, block, _logarithm(block), rotate, 0, none, none, 0)
    x, factors, spare = address_of(scratch(_LONGEST)), address_of(scratch(UNIT)), address_of(scratch(UNIT))
    length, largest = max(block, _STRIP), LARGEST[element]
    for row in range(n):
        source, target = wire + row * stride, out + row * count * itemsize(element)
        for begin in range(0, count, length):
            where, size = target + begin * itemsize(element), min(length, count - begin)
            end = begin + -(-size // block) * block
            for at in range(begin, end, UNIT):
                unpack_unit(_codes(layout, source, at, end, spare), x + (at - begin) * 4)
            _rotate(layout, x, x, end - begin, _ONE)
            directly = element == FLOAT32 and size % UNIT == 0
            scaled = where if directly else x
            for at in range(begin, end, UNIT):
                _read_factors(layout, source, at, end, 1, factors)
                if directly and at - begin >= size:
                    break
                scale_unit(x + (at - begin) * 4, factors, largest, scaled + (at - begin) * 4)
            if not directly:
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
    layout = _Wire(
        FLOAT32,
        count,
        stride,
        start,
        block,
        _logarithm(block),
        1,
        random,
        np.uint32(low),
        np.uint32(high),
        counter,
    )
    memory = _Memory(
        address_of(scratch(_LONGEST)),
        address_of(scratch(_LONGEST)),
        address_of(scratch(UNIT)),
        address_of(scratch(UNIT)),
    )
    length, divisor = max(block, _STRIP), n if mean else 1
    for begin in range(0, count, length):
        end = begin + -(-min(length, count - begin) // block) * block
        for at in range(begin, end, UNIT):
            fill_unit(memory.x + (at - begin) * 4, ZERO)
        for row in range(n):
            source = wires + row * stride
            for at in range(begin, end, UNIT):
                _read_factors(layout, source, at, end, divisor, memory.factors)
                codes = _codes(layout, source, at, end, memory.codes)
                add_codes(codes, memory.factors, memory.x + (at - begin) * 4)
        _quantize(layout, memory, begin, end, begin, wire, _NAN_ALONE)
    _clear_padding(layout, wire)


@inner
def _logarithm(power: int) -> int:
    exponent = 0
    while power >> exponent > 1:
        exponent += 1
    return exponent


@inner
def _clear_padding(layout: Any, row: int) -> None:
    blocks = -(-layout.elements // layout.block)
    clear(row, 2 * blocks, layout.start)
    clear(row, layout.start + blocks * (layout.block // 2), layout.stride)


@inlined
def _rotate(layout: Any, source: int, target: int, count: int, factor: Any) -> None:
    """target <- H (source * factor), in groups of `layout.rotate` elements; memory for whole units."""
    for unit in range(-(-count // UNIT)):
        rotate_unit(source + unit * UNIT * 4, target + unit * UNIT * 4, layout.rotate, factor)
    stride = UNIT
    while stride < layout.rotate:
        for first in range(0, count, 2 * stride):
            for at in range(first, first + stride, UNIT):
                add_and_subtract_units(target + at * 4, target + (at + stride) * 4)
        stride *= 2


@inlined
def _codes(layout: Any, row: int, at: int, end: int, spare: int) -> int:
    """The address of the codes of the unit at element `at`: in `spare`, with zeros, if it reaches beyond `end`."""
    where = row + layout.start + at // 2
    if at + UNIT <= end:
        return where
    padded, codes = bytes_at(spare, UNIT // 2), bytes_at(where, (end - at) // 2)
    padded[:] = 0
    for i in range(len(codes)):
        padded[i] = codes[i]
    return spare


@inlined
def _read_factors(layout: Any, row: int, at: int, end: int, divisor: int, factors: int) -> None:
    """The scales of the elements of the unit at `at`, divided by `divisor`; NaN for those that are not finite."""
    scales = halves_at(row, end >> layout.shift)
    if layout.block >= UNIT:
        fill_unit(factors, _factor(scales[at >> layout.shift], divisor))
        return
    values = floats_at(factors, UNIT)
    for first in range(0, UNIT, layout.block):
        inside = at + first < end
        values[first : first + layout.block] = (
            _factor(scales[(at + first) >> layout.shift], divisor) if inside else ZERO
        )


@inlined
def _factor(scale: Any, divisor: int) -> Any:
    finite = np.uint16(scale & np.uint16(0x7F80)) != 0x7F80
    value = from_bfloat16(scale) if finite else float_of(NAN)
    return value / np.float32(divisor) if divisor > 1 else value


@inner
def _quantize(layout: Any, memory: Any, begin: int, end: int, index: int, row: int, limit: Any) -> None:
    """Quantize a strip of rotated elements, from `begin` to `end` in its row.

    Args:
        layout: The layout of the row.
        memory: Memory with the elements.
        begin: The first element.
        end: The element after the last one.
        index: The number of the first element in all rows.
        row: The address of the row.
        limit: Bits; a block is NaN if the bits of its largest magnitude are not less.
    """
    if layout.random:
        _draw(layout, index, floats_at(memory.numbers, end - begin))
    longest = max(layout.block, UNIT)
    for first in range(begin, end, longest):
        if layout.block >= UNIT:
            largest = np.uint32(0)
            for at in range(first, first + layout.block, UNIT):
                largest = max(largest, largest_bits(memory.x + (at - begin) * 4))
            values = floats_at(memory.x + (first - begin) * 4, layout.block)
            fill_unit(memory.factors, _write_scale(layout, largest, limit, first, row, values))
        else:
            _write_scales(layout, memory, begin, end, first, row, limit)
        for at in range(first, min(first + longest, end), UNIT):
            where = row + layout.start + at // 2
            codes = where if at + UNIT <= end else memory.codes
            x = memory.x + (at - begin) * 4
            if layout.random:
                quantize_unit_at_random(x, memory.factors, memory.numbers + (at - begin) * 4, codes)
            else:
                quantize_unit(x, memory.factors, codes)
            if at + UNIT > end:
                target, source = bytes_at(where, (end - at) // 2), bytes_at(codes, (end - at) // 2)
                for i in range(len(target)):
                    target[i] = source[i]


@inner
def _write_scales(layout: Any, memory: Any, begin: int, end: int, first: int, row: int, limit: Any) -> None:
    """Write the scales of the blocks of a unit, and the factors of its elements."""
    factors = floats_at(memory.factors, UNIT)
    factors[:] = ZERO
    for at in range(first, min(first + UNIT, end), layout.block):
        values = floats_at(memory.x + (at - begin) * 4, layout.block)
        bits, largest = values.view(np.uint32), np.uint32(0)
        for i in range(layout.block):
            largest = max(largest, np.uint32(bits[i] & np.uint32(0x7FFFFFFF)))
        factor = _write_scale(layout, largest, limit, at, row, values)
        factors[at - first : at - first + layout.block] = factor


@inlined
def _write_scale(layout: Any, largest: Any, limit: Any, at: int, row: int, values: Array) -> Any:
    """Write the scale of the block at element `at`, and return its inverse; 0, with zeros as values, if it is 0."""
    bits = _NAN_SCALE
    if largest < limit:
        most = min(float_of(largest), LARGEST[FLOAT32])
        quotient = bits_of(most / _SEVEN)
        if layout.random:
            bits = min(np.uint32(np.uint32(quotient + np.uint32(0xFFFF)) >> 16), _LARGEST_SCALE)
        else:
            bits = np.uint32(np.uint32(quotient + 0x7FFF + (np.uint32(quotient >> 16) & 1)) >> 16)
        if bits < _SMALLEST_NORMAL:
            bits = np.uint32(0)
    halves_at(row + 2 * (at >> layout.shift), 1)[0] = np.uint16(bits)
    if bits == 0 or bits == _NAN_SCALE:
        values[:] = ZERO
        return ZERO
    return _ONE / float_of(np.uint32(bits << 16))


@inner
def _draw(layout: Any, index: int, numbers: Array) -> None:
    """Random numbers of elements, from number `index` on; see `host.random_bits`."""
    first, low, high = np.uint32(layout.counter + index), layout.low, layout.high
    for i in range(len(numbers)):
        x = np.uint32(np.uint32(first + np.uint32(i)) ^ low)
        x = np.uint32(np.uint32(x ^ np.uint32(x >> np.uint32(16))) * np.uint32(0x7FEB352D))
        x = np.uint32(np.uint32(x ^ np.uint32(x >> np.uint32(15))) + high)
        x = np.uint32(x * np.uint32(0x846CA68B))
        x = np.uint32(x ^ np.uint32(x >> np.uint32(16)))
        numbers[i] = np.float32(np.int32(np.uint32(x >> np.uint32(8)))) * np.float32(2.0**-24)
