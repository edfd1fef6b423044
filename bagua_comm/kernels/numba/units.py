"""Units of 32 floats in vector registers: rotations, four-bit codes.

LLVM makes no shuffles of Python's loops, so these are written in its own terms. It divides a unit among the
registers of the processor. All arguments that are not numbers are addresses, of the first element of a unit.
"""

from __future__ import annotations

from typing import Any

import numba
from llvmlite import ir
from numba.core import cgutils
from numba.extending import intrinsic

UNIT = 32
"""The number of elements in a unit."""

_FLOAT, _INT, _BYTE = ir.FloatType(), ir.IntType(32), ir.IntType(8)
_FLOATS, _INTS, _BYTES = (ir.VectorType(element, UNIT) for element in (_FLOAT, _INT, _BYTE))
_PACKED = ir.VectorType(_BYTE, UNIT // 2)
_VOID, _INT64, _FLOAT32 = numba.types.void, numba.types.int64, numba.types.float32


@intrinsic  # type: ignore[untyped-decorator]
def rotate_unit(_: Any, source: Any, target: Any, rotate: Any, factor: Any) -> Any:
    """target <- H (source * factor), for each group of `rotate` elements, up to 32: see `host.int4`."""

    def code(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        source, target, rotate, factor = values
        x = builder.fmul(_read(builder, source, _FLOATS), _splat(builder, factor))
        for stride in (1, 2, 4, 8, 16):
            before = builder.block
            with builder.if_then(builder.icmp_signed(">", rotate, ir.Constant(rotate.type, stride))):
                partners = _shuffled(builder, x, x, [i ^ stride for i in range(UNIT)])
                signs = _constant(_INTS, [0x80000000 if i & stride else 0 for i in range(UNIT)])
                bits = builder.xor(builder.bitcast(x, _INTS), signs)
                rotated = builder.fadd(partners, builder.bitcast(bits, _FLOATS))
                inside = builder.block
            joined = builder.phi(_FLOATS)
            joined.add_incoming(x, before)
            joined.add_incoming(rotated, inside)
            x = joined
        _write(builder, x, target)

    return _VOID(_INT64, _INT64, _INT64, _FLOAT32), code


@intrinsic  # type: ignore[untyped-decorator]
def add_and_subtract_units(_: Any, a: Any, b: Any) -> Any:
    """(a, b) <- (a + b, a - b)."""

    def code(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        a, b = (_read(builder, value, _FLOATS) for value in values)
        _write(builder, builder.fadd(a, b), values[0])
        _write(builder, builder.fsub(a, b), values[1])

    return _VOID(_INT64, _INT64), code


@intrinsic  # type: ignore[untyped-decorator]
def largest_bits(_: Any, x: Any) -> Any:
    """The largest bits of the magnitudes in a unit: of the largest magnitude, or of a NaN."""

    def code(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        bits = builder.bitcast(_read(builder, values[0], _FLOATS), _INTS)
        magnitudes = builder.and_(bits, _constant(_INTS, [0x7FFFFFFF] * UNIT))
        return _call(builder, f"llvm.vector.reduce.umax.v{UNIT}i32", _INT, magnitudes)

    return numba.types.uint32(_INT64), code


@intrinsic  # type: ignore[untyped-decorator]
def fill_unit(_: Any, target: Any, value: Any) -> Any:
    """target <- value, for all elements."""

    def code(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        _write(builder, _splat(builder, values[1]), values[0])

    return _VOID(_INT64, _FLOAT32), code


@intrinsic  # type: ignore[untyped-decorator]
def quantize_unit(_: Any, x: Any, factors: Any, codes: Any) -> Any:
    """codes <- clip(rint(x * factors), -7, 7), two a byte; no element is NaN."""

    def code(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        x, factors = (_read(builder, value, _FLOATS) for value in values[:2])
        _write_codes(
            builder, _call(builder, f"llvm.rint.v{UNIT}f32", _FLOATS, builder.fmul(x, factors)), values[2]
        )

    return _VOID(_INT64, _INT64, _INT64), code


@intrinsic  # type: ignore[untyped-decorator]
def quantize_unit_at_random(_: Any, x: Any, factors: Any, numbers: Any, codes: Any) -> Any:
    """codes <- clip(floor(x * factors + numbers), -7, 7), two a byte; no element is NaN."""

    def code(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        x, factors, numbers = (_read(builder, value, _FLOATS) for value in values[:3])
        levels = builder.fadd(builder.fmul(x, factors), numbers)
        _write_codes(builder, _call(builder, f"llvm.floor.v{UNIT}f32", _FLOATS, levels), values[3])

    return _VOID(_INT64, _INT64, _INT64, _INT64), code


@intrinsic  # type: ignore[untyped-decorator]
def unpack_unit(_: Any, codes: Any, target: Any) -> Any:
    """target <- codes."""

    def code(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        _write(builder, _read_codes(builder, values[0]), values[1])

    return _VOID(_INT64, _INT64), code


@intrinsic  # type: ignore[untyped-decorator]
def add_codes(_: Any, codes: Any, factors: Any, total: Any) -> Any:
    """total <- total + codes * factors."""

    def code(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        factors, total = (_read(builder, value, _FLOATS) for value in values[1:])
        terms = builder.fmul(_read_codes(builder, values[0]), factors)
        _write(builder, builder.fadd(total, terms), values[2])

    return _VOID(_INT64, _INT64, _INT64), code


@intrinsic  # type: ignore[untyped-decorator]
def scale_unit(_: Any, x: Any, factors: Any, largest: Any, target: Any) -> Any:
    """target <- x * factors, kept between -largest and largest; NaN stays."""

    def code(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        product = builder.fmul(*(_read(builder, value, _FLOATS) for value in values[:2]))
        _write(builder, _clipped(builder, product, _splat(builder, values[2])), values[3])

    return _VOID(_INT64, _INT64, _FLOAT32, _INT64), code


def _constant(vector: Any, values: list[Any]) -> Any:
    return ir.Constant(vector, [ir.Constant(vector.element, value) for value in values])


def _splat(builder: Any, value: Any) -> Any:
    first = builder.insert_element(ir.Constant(_FLOATS, ir.Undefined), value, ir.Constant(_INT, 0))
    return _shuffled(builder, first, first, [0] * UNIT)


def _shuffled(builder: Any, x: Any, y: Any, order: list[int]) -> Any:
    return builder.shuffle_vector(x, y, _constant(ir.VectorType(_INT, len(order)), order))


def _read(builder: Any, address: Any, vector: Any) -> Any:
    pointer = builder.inttoptr(address, vector.as_pointer())
    return builder.load(pointer, align=1 if vector.element == _BYTE else 4)


def _write(builder: Any, vector: Any, address: Any) -> None:
    pointer = builder.inttoptr(address, vector.type.as_pointer())
    builder.store(vector, pointer, align=1 if vector.type.element == _BYTE else 4)


def _call(builder: Any, name: str, result: Any, *values: Any) -> Any:
    """Call a function of LLVM."""
    prototype = ir.FunctionType(result, [value.type for value in values])
    return builder.call(cgutils.get_or_insert_function(builder.module, prototype, name), values)


def _clipped(builder: Any, x: Any, largest: Any) -> Any:
    """`x` between -largest and largest; NaN stays, since it compares as false."""
    x = builder.select(builder.fcmp_ordered(">", x, largest), largest, x)
    least = builder.fneg(largest)
    return builder.select(builder.fcmp_ordered("<", x, least), least, x)


def _write_codes(builder: Any, levels: Any, address: Any) -> None:
    """Clip levels, and write two a byte."""
    levels = _clipped(builder, levels, _constant(_FLOATS, [7.0] * UNIT))
    codes = builder.trunc(builder.fptosi(levels, _INTS), _BYTES)
    even, odd = (_shuffled(builder, codes, codes, list(range(first, UNIT, 2))) for first in (0, 1))
    low = builder.and_(even, _constant(_PACKED, [15] * (UNIT // 2)))
    high = builder.shl(odd, _constant(_PACKED, [4] * (UNIT // 2)))
    _write(builder, builder.or_(low, high), address)


def _read_codes(builder: Any, address: Any) -> Any:
    """Codes, two a byte, as floats."""
    packed, four = _read(builder, address, _PACKED), _constant(_PACKED, [4] * (UNIT // 2))
    low, high = builder.ashr(builder.shl(packed, four), four), builder.ashr(packed, four)
    order = [i // 2 + UNIT // 2 * (i % 2) for i in range(UNIT)]
    return builder.sitofp(_shuffled(builder, low, high, order), _FLOATS)
