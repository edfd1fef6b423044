"""Units of 32 floats in vector registers: rotations, four-bit codes.

LLVM makes no shuffles of Python's loops, so these are written in its own terms. It divides a unit among the
registers of the processor. All arguments that are not numbers are addresses, of the first element of a unit.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numba
from llvmlite import ir
from llvmlite.ir import IRBuilder, Value
from numba.core import cgutils

from .codegen import emits

UNIT = 32
"""The number of elements in a unit."""

PART = 8
"""The number of elements in the smallest block."""

_SIGNS = 0x7888
"""Bits of the positions, modulo 16, of elements with a negative sign; see `host.int4`."""

_ROUNDER = 3.0 * 2**22
"""Added to a small float32, it makes the last byte of the bits the nearest integer, in two's complement."""

_FLOAT, _INT, _BYTE = ir.FloatType(), ir.IntType(32), ir.IntType(8)
_FLOATS, _INTS, _SHORTS, _BITS = (
    ir.VectorType(element, UNIT) for element in (_FLOAT, _INT, ir.IntType(16), ir.IntType(1))
)
_PACKED, _HALF_INTS, _PAIRS = (ir.VectorType(element, UNIT // 2) for element in (_BYTE, _INT, ir.IntType(64)))
_VOID, _INT64, _FLOAT32 = numba.types.void, numba.types.int64, numba.types.float32


@emits(_VOID, _INT64, _INT64, _INT64, _FLOAT32, _INT64, _INT64)
def rotate_unit(
    builder: IRBuilder, source: Value, target: Value, rotate: Value, factor: Value, block: Value, largest: Value
) -> None:
    """target <- H D (source * factor), for groups of at most 32; then do as `find_largest` does."""
    factors, zeros = _splat(builder, factor), _constant(_FLOATS, [0.0] * UNIT)
    factors = builder.select(_negative_in(builder, rotate), builder.fsub(zeros, factors), factors)
    x = _rotated(builder, builder.fmul(_read(builder, source, _FLOATS), factors), rotate)
    _write(builder, x, target)
    _write_largest(builder, x, block, largest)


@emits(_VOID, _INT64, _INT64)
def add_and_subtract_units(builder: IRBuilder, a: Value, b: Value) -> None:
    """(a, b) <- (a + b, a - b)."""
    x, y = (_read(builder, value, _FLOATS) for value in (a, b))
    _write(builder, builder.fadd(x, y), a)
    _write(builder, builder.fsub(x, y), b)


@emits(_VOID, _INT64, _INT64, _INT64)
def find_largest(builder: IRBuilder, x: Value, block: Value, target: Value) -> None:
    """target <- the bits of the largest magnitude, or of a NaN; for shorter blocks, for each 8 elements."""
    _write_largest(builder, _read(builder, x, _FLOATS), block, target)


@emits(_VOID, _INT64, _INT64, _INT64, _INT64)
def quantize_unit(builder: IRBuilder, x: Value, factors: Value, block: Value, codes: Value) -> None:
    """codes <- rint(x * factors), two a byte, with a factor for each block; the levels are from -7 to 7."""
    levels = builder.fmul(_read(builder, x, _FLOATS), _of_blocks(builder, factors, block))
    _write_codes(builder, levels, codes)


@emits(_VOID, _INT64, _INT64, _INT64, _INT64)
def quantize_sum(builder: IRBuilder, x: Value, factors: Value, block: Value, codes: Value) -> None:
    """codes <- clip(rint(x * factors), -7, 7), as `quantize_unit`, also of infinities."""
    levels = builder.fmul(_read(builder, x, _FLOATS), _of_blocks(builder, factors, block))
    _write_codes(builder, _clipped(builder, levels, _constant(_FLOATS, [7.0] * UNIT)), codes)


@emits(_VOID, _INT64, _INT64, _INT64, _INT64, _INT64)
def quantize_unit_at_random(
    builder: IRBuilder, x: Value, factors: Value, block: Value, numbers: Value, codes: Value
) -> None:
    """codes <- clip(floor(x * factors + numbers), -7, 7), as `quantize_sum`."""
    levels = builder.fmul(_read(builder, x, _FLOATS), _of_blocks(builder, factors, block))
    levels = builder.fadd(levels, _read(builder, numbers, _FLOATS))
    levels = _call(builder, f"llvm.floor.v{UNIT}f32", _FLOATS, levels)
    _write_codes(builder, _clipped(builder, levels, _constant(_FLOATS, [7.0] * UNIT)), codes)


@emits(_VOID, _INT64, _INT64, _INT64, _INT64)
def add_codes(builder: IRBuilder, codes: Value, factors: Value, block: Value, total: Value) -> None:
    """total <- total + codes * factors, with a factor for each block."""
    terms = builder.sitofp(_read_codes(builder, codes), _FLOATS)
    terms = builder.fmul(terms, _of_blocks(builder, factors, block))
    _write(builder, builder.fadd(_read(builder, total, _FLOATS), terms), total)


@emits(_VOID, _INT64, _INT64, _INT64, _INT64, _FLOAT32, _INT64)
def decode_unit(
    builder: IRBuilder, codes: Value, factors: Value, block: Value, rotate: Value, largest: Value, target: Value
) -> None:
    """target <- D H codes * factors, kept between -largest and largest; NaN stays."""
    x = _rotated_codes(builder, _read_codes(builder, codes), rotate)
    negated = builder.sub(_constant(_SHORTS, [0] * UNIT), x)
    x = builder.sitofp(builder.select(_negative_in(builder, rotate), negated, x), _FLOATS)
    x = builder.fmul(x, _of_blocks(builder, factors, block))
    _write(builder, _clipped(builder, x, _splat(builder, largest)), target)


@emits(_VOID, _INT64, _INT64, _INT64)
def unpack_unit(builder: IRBuilder, codes: Value, rotate: Value, target: Value) -> None:
    """target <- H codes."""
    x = _rotated_codes(builder, _read_codes(builder, codes), rotate)
    _write(builder, builder.sitofp(x, _FLOATS), target)


@emits(_VOID, _INT64, _FLOAT32, _FLOAT32, _INT64)
def scale_unit(builder: IRBuilder, x: Value, factor: Value, largest: Value, target: Value) -> None:
    """target <- D x * factor, kept between -largest and largest; NaN stays."""
    x = _read(builder, x, _FLOATS)
    negated = builder.fsub(_constant(_FLOATS, [0.0] * UNIT), x)  # 0 stays 0
    x = builder.select(_negative(), negated, x)
    product = builder.fmul(x, _splat(builder, factor))
    _write(builder, _clipped(builder, product, _splat(builder, largest)), target)


def _in_stages(builder: IRBuilder, x: Value, size: Value, stage: Callable[[Value, int], Value]) -> Value:
    """Apply `stage(x, stride)` for strides 1, 2, 4, 8 and 16 that are less than `size`."""
    for stride in (1, 2, 4, 8, 16):
        before = builder.block
        with builder.if_then(builder.icmp_signed(">", size, ir.Constant(size.type, stride))):
            changed, inside = stage(x, stride), builder.block
        joined = builder.phi(x.type)
        joined.add_incoming(x, before)
        joined.add_incoming(changed, inside)
        x = joined
    return x


def _rotated(builder: IRBuilder, x: Value, rotate: Value) -> Value:
    """H x, for each group of `rotate` elements."""

    def butterflies(x: Value, stride: int) -> Value:
        partners = _shuffled(builder, x, x, [i ^ stride for i in range(UNIT)])
        signs = _constant(_FLOATS, [-1.0 if i & stride else 1.0 for i in range(UNIT)])  # so products are exact
        return _call(builder, f"llvm.fmuladd.v{UNIT}f32", _FLOATS, x, signs, partners)

    return _in_stages(builder, x, rotate, butterflies)


def _rotated_codes(builder: IRBuilder, codes: Value, rotate: Value) -> Value:
    """H codes, for each group of `rotate` codes; no sum needs more than 16 bits."""

    def butterflies(codes: Value, stride: int) -> Value:
        partners = _shuffled(builder, codes, codes, [i ^ stride for i in range(UNIT)])
        signs = _constant(_SHORTS, [-1 if i & stride else 1 for i in range(UNIT)])
        return builder.add(builder.mul(codes, signs), partners)

    return _in_stages(builder, codes, rotate, butterflies)


def _negative() -> Value:
    """Which elements D negates."""
    return _constant(_BITS, [_SIGNS >> i % 16 & 1 for i in range(UNIT)])


def _negative_in(builder: IRBuilder, rotate: Value) -> Value:
    """`_negative()`, or none if no elements are rotated."""
    is_rotated = builder.icmp_signed(">", rotate, ir.Constant(rotate.type, 1))
    return builder.select(is_rotated, _negative(), _constant(_BITS, [0] * UNIT))


def _write_largest(builder: IRBuilder, x: Value, block: Value, target: Value) -> None:
    """See `find_largest`."""
    magnitudes = builder.and_(builder.bitcast(x, _INTS), _constant(_INTS, [0x7FFFFFFF] * UNIT))

    def larger(bits: Value, stride: int) -> Value:
        partners = _shuffled(builder, bits, bits, [i ^ stride for i in range(UNIT)])
        return builder.select(builder.icmp_unsigned(">", bits, partners), bits, partners)

    is_long = builder.icmp_signed(">=", block, ir.Constant(block.type, UNIT))
    with builder.if_else(is_long, likely=True) as (of_unit, of_parts):
        with of_unit:
            largest = _call(builder, f"llvm.vector.reduce.umax.v{UNIT}i32", _INT, magnitudes)
            builder.store(largest, builder.inttoptr(target, _INT.as_pointer()), align=4)
        with of_parts:
            several = _in_stages(builder, magnitudes, block, larger)
            _write(builder, _shuffled(builder, several, several, list(range(0, UNIT, PART))), target)


def _of_blocks(builder: IRBuilder, factors: Value, block: Value) -> Value:
    """The factors of a unit's elements, from those of its blocks: of all elements, or of 16, or of 8."""
    first = builder.load(builder.inttoptr(factors, _FLOAT.as_pointer()), align=4)
    all_alike, before = _splat(builder, first), builder.block
    with builder.if_then(builder.icmp_signed("<", block, ir.Constant(block.type, UNIT)), likely=False):
        several = _read(builder, factors, ir.VectorType(_FLOAT, UNIT // PART))
        is_part = builder.icmp_signed("==", block, ir.Constant(block.type, PART))
        by_8, by_16 = (_shuffled(builder, several, several, [i // size for i in range(UNIT)]) for size in (8, 16))
        differing, inside = builder.select(is_part, by_8, by_16), builder.block
    result = builder.phi(_FLOATS)
    result.add_incoming(all_alike, before)
    result.add_incoming(differing, inside)
    return result


def _constant(vector: ir.VectorType, values: Sequence[float]) -> ir.Constant:
    return ir.Constant(vector, [ir.Constant(vector.element, value) for value in values])


def _splat(builder: IRBuilder, value: Value) -> Value:
    first = builder.insert_element(ir.Constant(_FLOATS, ir.Undefined), value, ir.Constant(_INT, 0))
    return _shuffled(builder, first, first, [0] * UNIT)


def _shuffled(builder: IRBuilder, x: Value, y: Value, order: list[int]) -> Value:
    return builder.shuffle_vector(x, y, _constant(ir.VectorType(_INT, len(order)), order))


def _read(builder: IRBuilder, address: Value, vector: ir.VectorType) -> Value:
    pointer = builder.inttoptr(address, vector.as_pointer())
    return builder.load(pointer, align=1 if vector.element == _BYTE else 4)


def _write(builder: IRBuilder, vector: Value, address: Value) -> None:
    pointer = builder.inttoptr(address, vector.type.as_pointer())
    builder.store(vector, pointer, align=1 if vector.type.element == _BYTE else 4)


def _call(builder: IRBuilder, name: str, result: ir.Type, *values: Value) -> Value:
    """Call a function of LLVM."""
    prototype = ir.FunctionType(result, [value.type for value in values])
    return builder.call(cgutils.get_or_insert_function(builder.module, prototype, name), values)


def _clipped(builder: IRBuilder, x: Value, largest: Value) -> Value:
    """`x` between -largest and largest; NaN stays, since it compares as false."""
    x = builder.select(builder.fcmp_ordered(">", x, largest), largest, x)
    least = builder.fneg(largest)
    return builder.select(builder.fcmp_ordered("<", x, least), least, x)


def _write_codes(builder: IRBuilder, levels: Value, address: Value) -> None:
    """Round levels half to even, and write them two a byte; anything for NaN."""
    shifted = builder.fadd(levels, _constant(_FLOATS, [_ROUNDER] * UNIT))
    pairs = builder.bitcast(shifted, _PAIRS)  # an even element, and above it an odd one
    low = builder.and_(pairs, _constant(_PAIRS, [0x0F] * (UNIT // 2)))
    high = builder.and_(
        builder.lshr(pairs, _constant(_PAIRS, [28] * (UNIT // 2))), _constant(_PAIRS, [0xF0] * (UNIT // 2))
    )
    _write(builder, builder.trunc(builder.or_(low, high), _PACKED), address)


def _read_codes(builder: IRBuilder, address: Value) -> Value:
    """Codes, two a byte, as integers of 16 bits."""
    packed = builder.zext(_read(builder, address, _PACKED), _HALF_INTS)
    twice = builder.or_(packed, builder.shl(packed, _constant(_HALF_INTS, [16] * (UNIT // 2))))
    high = builder.shl(builder.bitcast(twice, _SHORTS), _constant(_SHORTS, [12, 8] * (UNIT // 2)))
    return builder.ashr(high, _constant(_SHORTS, [12] * UNIT))
