"""The source of the compiled kernels, for Numba; only the process that compiles them imports it (see `making`).

NumPy goes over memory once for every operation. Here all operations run on a strip of elements while it is in the
first-level cache, so that a call takes about as long as a copy. The bytes are those of `host`: float32 arithmetic
runs in the order written, without fused multiply-adds, and a division stays a division.

Why Numba: `pip install bagua-comm[fast]` is enough. Numba needs neither a compiler on the machine nor a wheel for
each platform, and it uses the vector instructions of the processor that it finds.

Kernels take integers and floats alone, among them addresses of contiguous memory. So one compiled function serves
all dtypes, and it needs nothing of Numba or Python when it runs: no objects, no memory to allocate, no errors.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar, cast

import numba
import numpy as np
from llvmlite import binding, ir
from numba.core import cgutils
from numba.extending import intrinsic

from ..arrays import Array
from .making import KERNELS

_STRIP = 2048
"""How many elements are worked on at a time: 8 KiB of float32."""

_FLOAT32, _FLOAT16, _BFLOAT16 = range(3)
_LARGEST = tuple(np.float32(largest) for largest in (2.0**128 - 2.0**104, 65504, 2.0**128 - 2.0**120))
"""The largest finite number of each kind of element."""

_EXACT = np.float32(2.0**23)
"""Up to this, float32 holds every integer exactly, also after 255 is added."""

_SIGN, _INFINITY, _NAN = np.uint32(0x80000000), np.uint32(0x7F800000), np.uint32(0x7FC00000)
_SMALLEST_NORMAL = 2.0**-126
_NOTHING = np.float32(-0.0)
"""The identity of float addition: -0.0 + x == x, also for x = -0.0."""

_UPPER = np.uint64(32)
_ZERO, _LEVELS = np.float32(0), np.float32(255)
_NOT_FINITE = 255
"""The exponent field of infinities and NaN."""

Function = TypeVar("Function", bound=Callable[..., Any])


# ---------------------------------------------------------------------------------------------------
# Compilation
# ---------------------------------------------------------------------------------------------------


_SEMANTICS = {"nogil": True, "error_model": "numpy"}
"""x / 0 is inf or NaN, as in NumPy."""


def _inner(function: Function) -> Function:
    """Compile a function that kernels call; Python cannot call it."""
    return cast(Function, numba.njit(**_SEMANTICS, no_cpython_wrapper=True, no_cfunc_wrapper=True)(function))


def _kernel(function: Function) -> Function:
    """A function that Python calls, once it is compiled by `object_code`."""
    _functions[function.__name__] = function
    return function


_functions: dict[str, Callable[..., Any]] = {}
_TYPES = {"i": numba.types.int64, "f": numba.types.float64}


def object_code(name: str) -> bytes:
    """Compile one of `KERNELS` to an object file for this processor.

    It defines a function of that name by Numba's convention: before the arguments come the addresses of a result
    and of an error. There is none unless a kind of elements does not exist, so nobody looks at what it returns.

    Raises:
        RuntimeError: The kernel needs something of Numba or Python, so that it would not work without them.
    """
    compiled = numba.cfunc(numba.types.void(*(_TYPES[letter] for letter in KERNELS[name])), **_SEMANTICS)(
        _functions[name]
    )
    module = binding.parse_assembly(compiled.inspect_llvm())
    module.link_in(_nothing_to_free())
    native = compiled.native_name.removeprefix("cfunc.")  # which is Numba's wrapper for C, and knows of Python
    for function in module.functions:
        if function.name == native:
            function.name = name
        elif not function.is_declaration:
            function.linkage = "internal"
    _drop_unused(module)
    needed = [f.name for f in module.functions if f.is_declaration and not f.name.startswith("llvm.")]
    if needed:
        raise RuntimeError(f"the kernel {name} needs {needed}")
    target = binding.Target.from_default_triple()
    machine = target.create_target_machine(
        cpu=binding.get_host_cpu_name(),
        features=binding.get_host_cpu_features().flatten(),
        opt=3,
        reloc="static" if target.name.startswith("x86") else "default",  # as Numba itself does
        codemodel="jitdefault",
        jit=True,
    )
    return cast(bytes, machine.emit_object(module))


def _nothing_to_free() -> Any:
    """What Numba calls when the last reference to an array's memory is gone: here it owns no memory."""
    module = ir.Module()
    kind = ir.FunctionType(ir.VoidType(), [ir.IntType(8).as_pointer()])
    builder = ir.IRBuilder(ir.Function(module, kind, "NRT_MemInfo_call_dtor").append_basic_block())
    builder.ret_void()
    return binding.parse_assembly(str(module))


def _drop_unused(module: Any) -> None:
    """Remove what no function that is seen from outside needs."""
    machine = binding.Target.from_default_triple().create_target_machine()
    builder = binding.create_pass_builder(machine, binding.create_pipeline_tuning_options())
    passes = binding.create_new_module_pass_manager()
    passes.add_global_dead_code_eliminate_pass()
    passes.run(module, builder)


# ---------------------------------------------------------------------------------------------------
# Memory
# ---------------------------------------------------------------------------------------------------


@intrinsic  # type: ignore[untyped-decorator]
def _pointer(_: Any, address: Any, dtype: Any) -> Any:
    """An integer as a pointer to elements of `dtype`."""
    kind = numba.types.CPointer(dtype.dtype)
    return kind(address, dtype), lambda context, builder, signature, values: builder.inttoptr(
        values[0], context.get_value_type(kind)
    )


@intrinsic  # type: ignore[untyped-decorator]
def _scratch(_: Any) -> Any:
    """A pointer to `_STRIP` floats on the stack."""

    def code(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        strip = cgutils.alloca_once(builder, ir.ArrayType(ir.FloatType(), _STRIP))
        strip.align = 64
        return builder.bitcast(strip, ir.FloatType().as_pointer())

    return numba.types.CPointer(numba.types.float32)(), code


@_inner
def _floats(where: int, count: int) -> Array:
    return numba.carray(_pointer(where, np.float32), (count,))


@_inner
def _halves(where: int, count: int) -> Array:
    """The bits of `count` elements of float16 or bfloat16."""
    return numba.carray(_pointer(where, np.uint16), (count,))


@_inner
def _bytes(where: int, count: int) -> Array:
    return numba.carray(_pointer(where, np.uint8), (count,))


@_inner
def _ints(where: int, count: int) -> Array:
    return numba.carray(_pointer(where, np.int32), (count,))


@_inner
def _longs(where: int, count: int) -> Array:
    return numba.carray(_pointer(where, np.int64), (count,))


@_inner
def _words(where: int, count: int) -> Array:
    return numba.carray(_pointer(where, np.uint64), (count,))


@_inner
def _itemsize(kind: int) -> int:
    return 4 if kind == _FLOAT32 else 2


# ---------------------------------------------------------------------------------------------------
# Conversions
#
# A processor without instructions for float16 has no compiled kernels: LLVM calls functions of C in their place,
# which are not there when kernels are loaded and compared with NumPy's.
# ---------------------------------------------------------------------------------------------------


@intrinsic  # type: ignore[untyped-decorator]
def _extended(_: Any, half: Any) -> Any:
    """The bits of a float16, as float32."""

    def code(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        return builder.fpext(builder.bitcast(values[0], ir.HalfType()), ir.FloatType())

    return numba.types.float32(numba.types.uint16), code


@intrinsic  # type: ignore[untyped-decorator]
def _truncated(_: Any, x: Any) -> Any:
    """The bits of a float32, rounded to float16."""

    def code(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        return builder.bitcast(builder.fptrunc(values[0], ir.HalfType()), ir.IntType(16))

    return numba.types.uint16(numba.types.float32), code


@_inner
def _bits(x: Any) -> Any:
    return np.float32(x).view(np.uint32)


@_inner
def _float(bits: Any) -> Any:
    return np.uint32(bits).view(np.float32)


@_inner
def _from_float16(half: Any) -> Any:
    return _extended(np.uint16(half))


@_inner
def _to_float16(x: Any) -> Any:
    """Round half to even; NaN becomes the canonical NaN."""
    return _finite_to_float16(x) if x == x else np.uint16(0x7E00)


@_inner
def _finite_to_float16(x: Any) -> Any:
    """Round what is not NaN."""
    return _truncated(np.float32(x))


@_inner
def _from_bfloat16(half: Any) -> Any:
    return _float(np.uint32(half) << 16)


@_inner
def _to_bfloat16(x: Any) -> Any:
    """Round half to even; NaN becomes the canonical NaN."""
    return _finite_to_bfloat16(x if x == x else _float(_NAN))


@_inner
def _finite_to_bfloat16(x: Any) -> Any:
    """Round what is not NaN."""
    bits = _bits(x)
    return np.uint16(np.uint32(bits + 0x7FFF + (np.uint32(bits >> 16) & 1)) >> 16)


@_inner
def _load(kind: int, where: int, count: int, scratch: Array) -> Array:
    """`count` elements in float32: in place if they are float32, else converted in `scratch`."""
    if kind == _FLOAT32:
        return _floats(where, count)
    halves, wide = _halves(where, count), scratch[:count]
    if kind == _FLOAT16:
        for i in range(count):
            wide[i] = _from_float16(halves[i])
    else:
        for i in range(count):
            wide[i] = _from_bfloat16(halves[i])
    return wide


@_inner
def _store(kind: int, values: Array, where: int) -> None:
    """Round `values` to elements of a kind, and write them."""
    count = len(values)
    floats, halves = _floats(where, count), _halves(where, count)
    if kind == _FLOAT32:
        for i in range(count):
            floats[i] = values[i]
    elif kind == _FLOAT16:
        for i in range(count):
            halves[i] = _to_float16(values[i])
    else:
        for i in range(count):
            halves[i] = _to_bfloat16(values[i])


@_inner
def _round(kind: int, values: Array) -> None:
    """Round `values` to an element dtype, in place."""
    if kind == _FLOAT16:
        for i in range(len(values)):
            values[i] = _from_float16(_to_float16(values[i]))
    elif kind == _BFLOAT16:
        for i in range(len(values)):
            values[i] = _from_bfloat16(_to_bfloat16(values[i]))


@_inner
def _saturate(kind: int, values: Array, scratch: Array) -> Array:
    """A copy in `scratch` whose finite values stay finite in an element dtype, and whose NaN are canonical."""
    source, target = values.view(np.uint32), scratch[: len(values)].view(np.uint32)
    largest = _bits(_LARGEST[kind])
    for i in range(len(source)):
        target[i] = _saturated(source[i], largest)
    return scratch[: len(values)]


@_inner
def _saturated(bits: Any, largest: Any) -> Any:
    magnitude = np.uint32(bits & 0x7FFFFFFF)
    kept = min(magnitude, largest) if magnitude < _INFINITY else magnitude
    return _NAN if magnitude > _INFINITY else np.uint32(kept | (bits & _SIGN))


@_inner
def _cast_halves(source_kind: int, source: int, kind: int, target: int, count: int) -> None:
    """Cast elements of 16 bits to others: finite values stay finite, and NaN become canonical."""
    halves, casts = _halves(source, count), _halves(target, count)
    if source_kind == kind:
        infinity = np.uint16(0x7C00 if kind == _FLOAT16 else 0x7F80)
        nan = np.uint16(0x7E00 if kind == _FLOAT16 else 0x7FC0)
        for i in range(count):
            half = halves[i]
            casts[i] = nan if np.uint16(half & np.uint16(0x7FFF)) > infinity else half
    elif kind == _FLOAT16:
        largest = _bits(_LARGEST[_FLOAT16])
        for i in range(count):
            casts[i] = _finite_to_float16(_float(_saturated(_bits(_from_bfloat16(halves[i])), largest)))
    else:  # no float16 is too large
        for i in range(count):
            casts[i] = _to_bfloat16(_from_float16(halves[i]))


# ---------------------------------------------------------------------------------------------------
# Sums and casts
# ---------------------------------------------------------------------------------------------------


@_kernel
def cast_rows(
    source_kind: int, source: int, source_stride: int, n: int, count: int, kind: int, target: int, stride: int
) -> None:
    """Cast n rows; zero the bytes after the elements in rows of `target`."""
    wide, saturated = numba.carray(_scratch(), (_STRIP,)), numba.carray(_scratch(), (_STRIP,))
    for row in range(n):
        if source_kind != _FLOAT32 and kind != _FLOAT32:
            _cast_halves(source_kind, source + row * source_stride, kind, target + row * stride, count)
            _clear(target + row * stride, 2 * count, stride)
            continue
        for at in range(0, count, _STRIP):
            where = source + row * source_stride + at * _itemsize(source_kind)
            values = _load(source_kind, where, min(_STRIP, count - at), wide)
            _store(kind, _saturate(kind, values, saturated), target + row * stride + at * _itemsize(kind))
        _clear(target + row * stride, count * _itemsize(kind), stride)


@_kernel
def sum_rows(
    source_kind: int,
    places: int,
    n: int,
    count: int,
    mean: int,
    element_kind: int,
    kind: int,
    target: int,
    stride: int,
) -> None:
    """Add rows of 16-bit floats, round the sum to elements, cast these, and zero the bytes after them."""
    total, wide = numba.carray(_scratch(), (_STRIP,)), numba.carray(_scratch(), (_STRIP,))
    for at in range(0, count, _STRIP):
        part = total[: min(_STRIP, count - at)]
        part[:] = _NOTHING
        for place in _longs(places, n):
            term = _load(source_kind, place + at * _itemsize(source_kind), len(part), wide)
            for i in range(len(part)):
                part[i] += term[i]
        if mean:
            _divide(part, n)
        _round(element_kind, part)
        _store(kind, _saturate(kind, part, wide), target + at * _itemsize(kind))
    _clear(target, count * _itemsize(kind), stride)


@_inner
def _divide(values: Array, divisor: int) -> None:
    for i in range(len(values)):
        values[i] /= np.float32(divisor)


@_inner
def _clear(row: int, begin: int, end: int) -> None:
    """Zero the bytes from `begin` to `end` of a row."""
    _bytes(row + begin, end - begin)[:] = 0


# ---------------------------------------------------------------------------------------------------
# Block fixed point
# ---------------------------------------------------------------------------------------------------


# Blocks are short. LLVM makes quick loops over them only where each loop is in a function of its own, and where
# its arrays are at one place, not at one of two: so float32, which needs no conversion, has branches of its own.


@_kernel
def find_fields(kind: int, x: int, bounds: int, blocks: int, fields: int) -> None:
    """Raise the exponent fields of blocks to those of their largest elements."""
    edges, found = _longs(bounds, blocks + 1), _bytes(fields, blocks)
    wide = numba.carray(_scratch(), (_STRIP,))
    for block in range(blocks):
        most = np.uint32(0)
        for at in range(edges[block], edges[block + 1], _STRIP):
            count, where = min(_STRIP, edges[block + 1] - at), x + at * _itemsize(kind)
            if kind == _FLOAT32:
                most = max(most, _largest_magnitude(_floats(where, count)))
            else:
                most = max(most, _largest_magnitude(_load(kind, where, count, wide)))
        found[block] = max(found[block], np.uint8(most >> 23))


@_inner
def _largest_magnitude(values: Array) -> Any:
    bits, most = values.view(np.uint32), np.uint32(0)
    for i in range(len(bits)):
        most = max(most, np.uint32(bits[i] & 0x7FFFFFFF))
    return most


@_kernel
def add_fixed(
    kind: int, x: int, bounds: int, blocks: int, fields: int, bits: int, total: int, first: int
) -> None:
    """Add the multiples of its unit that elements are to the sums of each block."""
    edges, found = _longs(bounds, blocks + 1), _bytes(fields, blocks)
    wide, kept = numba.carray(_scratch(), (_STRIP,)), np.int32(0 if first else -1)
    # From 24 bits on this is rounded to 2^bits, which no number reaches, since float32 has 24 bits.
    limit = np.float32((1 << bits) - 1)
    for block in range(blocks):
        field = np.int64(found[block])
        power = 126 + bits - max(field, 1)
        left, right = _power_of_2(power // 2), _power_of_2(power - power // 2)
        for at in range(edges[block], edges[block + 1], _STRIP):
            count, where = min(_STRIP, edges[block + 1] - at), x + at * _itemsize(kind)
            sums = _ints(total + at * 4, count)
            if field == _NOT_FINITE:
                _keep(sums, kept)
            elif kind == _FLOAT32:
                _add_multiples(_floats(where, count), left, right, limit, kept, sums)
            else:
                _add_multiples(_load(kind, where, count, wide), left, right, limit, kept, sums)


@_inner
def _add_multiples(values: Array, left: Any, right: Any, limit: Any, kept: Any, sums: Array) -> None:
    """Add clipped multiples to `sums`, of which the bits in `kept` are kept: all or none."""
    for i in range(len(sums)):
        q = np.int32(min(max(np.rint(values[i] * left * right), -limit), limit))
        sums[i] = np.int32((sums[i] & kept) + q)


@_inner
def _keep(sums: Array, kept: Any) -> None:
    for i in range(len(sums)):
        sums[i] = np.int32(sums[i] & kept)


@_kernel
def mean_of_fixed(
    kind: int, total: int, bounds: int, blocks: int, fields: int, bits: int, divisor: int, target: int
) -> None:
    """Turn sums of multiples into the mean elements."""
    edges, found = _longs(bounds, blocks + 1), _bytes(fields, blocks)
    wide = numba.carray(_scratch(), (_STRIP,))
    for block in range(blocks):
        field = np.int64(found[block])
        for at in range(edges[block], edges[block + 1], _STRIP):
            count, where = min(_STRIP, edges[block + 1] - at), target + at * _itemsize(kind)
            sums = _ints(total + at * 4, count)
            if kind == _FLOAT32:
                _mean_strip(sums, field, bits, divisor, _floats(where, count))
            else:
                _mean_strip(sums, field, bits, divisor, wide[:count])
                _store(kind, wide[:count], where)


@_inner
def _mean_strip(sums: Array, field: int, bits: int, divisor: int, values: Array) -> None:
    # 2^power in float64, by its bits.
    unit = np.int64((max(field, 1) - 126 - bits + 1023) << 52).view(np.float64)
    factor = unit / np.float64(divisor)
    if field == _NOT_FINITE:
        values[:] = _float(_NAN)
    elif divisor & (divisor - 1) == 0 and factor >= _SMALLEST_NORMAL:
        # A product with a power of two is exact, or overflows: so it may be rounded before.
        _round_and_multiply(sums, np.float32(factor), values)
    else:
        _divide_and_multiply(sums, np.float64(divisor), unit, values)


@_inner
def _round_and_multiply(sums: Array, factor: Any, values: Array) -> None:
    for i in range(len(sums)):
        values[i] = np.float32(sums[i]) * factor


@_inner
def _divide_and_multiply(sums: Array, divisor: Any, unit: Any, values: Array) -> None:
    for i in range(len(sums)):
        values[i] = np.float32(np.float64(sums[i]) / divisor * unit)


@_inner
def _power_of_2(power: Any) -> Any:
    """2^power in float32, by its bits; it is a normal number."""
    return _float(np.uint32(power + 127) << 23)


# ---------------------------------------------------------------------------------------------------
# Checksums
# ---------------------------------------------------------------------------------------------------


@_kernel
def weigh_blocks(words: int, count: int, weights: int, size: int, sums: int, out: int) -> None:
    """Sum words with weights, block by block, and copy them if `out` is not 0."""
    blocks = -(-count // size)
    pair, found = _words(weights, 2 * size), _words(sums, blocks)
    v, w = pair[:size], pair[size:]
    for block in range(blocks):
        begin = block * size
        part = _words(words + begin * 8, min(size, count - begin))
        total = np.uint64(0)
        if out == 0:
            for i in range(len(part)):
                total += v[i] * part[i] + w[i] * (part[i] >> _UPPER)
        else:
            copied = _words(out + begin * 8, len(part))
            for i in range(len(part)):
                word = part[i]
                copied[i] = word
                total += v[i] * word + w[i] * (word >> _UPPER)
        found[block] = total


# ---------------------------------------------------------------------------------------------------
# MinMaxUInt8
# ---------------------------------------------------------------------------------------------------


class _Wire(NamedTuple):
    """The layout of encoded rows."""

    kind: int
    elements: int
    stride: int
    start: int
    block: int
    eps: Any


class _Levels(NamedTuple):
    """Decoding constants of a block."""

    scale: Any
    lower: Any
    fill: Any
    largest: Any
    constant: bool
    plain: bool


@_kernel
def encode_rows(
    kind: int, x: int, n: int, count: int, wire: int, stride: int, start: int, block: int, eps: float
) -> None:
    """Encode n rows of elements."""
    layout = _Wire(kind, count, stride, start, block, np.float32(eps))
    pair = numba.carray(_scratch(), (2,))
    for row in range(n):
        source, target = x + row * count * _itemsize(kind), wire + row * stride
        for begin in range(0, count, block):
            where, length = source + begin * _itemsize(kind), min(block, count - begin)
            if kind == _FLOAT32:
                _encode_floats(layout, _floats(where, length).view(np.uint32), begin, target, pair)
            elif kind == _FLOAT16:
                _encode_halves(layout, _halves(where, length), _from_float16, begin, target, pair)
            else:
                _encode_halves(layout, _halves(where, length), _from_bfloat16, begin, target, pair)
        _clear_padding(layout, target)


@_kernel
def combine_rows(
    kind: int,
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
    layout = _Wire(kind, count, stride, start, block, np.float32(eps))
    total, pair = numba.carray(_scratch(), (_STRIP,)), numba.carray(_scratch(), (2,))
    for begin in range(0, count, block):
        _encode_sum(layout, wires, n, mean, begin, wire, total, pair)
    _clear_padding(layout, wire)


@_kernel
def decode_rows(
    kind: int, wire: int, n: int, count: int, out: int, stride: int, start: int, block: int, eps: float
) -> None:
    """Decode n rows."""
    layout = _Wire(kind, count, stride, start, block, np.float32(eps))
    pair = numba.carray(_scratch(), (2,))
    for row in range(n):
        source, target = wire + row * stride, out + row * count * _itemsize(kind)
        for begin in range(0, count, block):
            levels = _read_levels(layout, source, begin, pair)
            where, length = target + begin * _itemsize(kind), min(block, count - begin)
            codes = _bytes(source + start + begin, length)
            if kind == _FLOAT32:
                _decode(codes, levels, False, _floats(where, length))
            elif kind == _FLOAT16:
                _decode_rounded(codes, levels, _to_float16, _finite_to_float16, _halves(where, length))
            else:
                _decode_rounded(codes, levels, _to_bfloat16, _finite_to_bfloat16, _halves(where, length))


@_inner
def _clear_padding(layout: Any, row: int) -> None:
    blocks = -(-layout.elements // layout.block)
    _clear(row, blocks * 2 * _itemsize(layout.kind), layout.start)
    _clear(row, layout.start + layout.elements, layout.stride)


@_inner
def _header(layout: Any, row: int, begin: int) -> Any:
    """The address of the pair (min, max) of the block that begins at element `begin`."""
    return row + begin // layout.block * 2 * _itemsize(layout.kind)


@_inner
def _scale_and_lower(low: Any, high: Any, eps: Any) -> Any:
    scale = np.float32(255 / np.float64(high - low + eps))
    return scale, np.rint(high * scale) - _LEVELS


@_inner
def _read_levels(layout: Any, row: int, begin: int, pair: Array) -> Any:
    ends = _load(layout.kind, _header(layout, row, begin), 2, pair)
    low, high = ends[0], ends[1]
    scale, lower = _scale_and_lower(low, high, layout.eps)
    # NaN or an overflown range gives NaN; a zero range or an overflown `upper` gives min.
    constant = not (np.isfinite(scale) and np.isfinite(lower) and scale > 0)
    fill = low if scale > 0 else _float(_NAN)
    largest = _LARGEST[layout.kind]
    plain = not constant and max(-low, high) + layout.eps <= largest / np.float32(2)
    return _Levels(scale, lower, fill, largest, constant, plain)


@_inner
def _decode(codes: Array, levels: Any, adding: bool, out: Array) -> None:
    """Decode: x' = (code + lower) / scale, kept finite; added to `out` if `adding`."""
    scale, lower, largest = levels.scale, levels.lower, levels.largest
    if levels.plain and adding:
        for i in range(len(out)):
            out[i] += (np.float32(codes[i]) + lower) / scale
    elif levels.plain:
        for i in range(len(out)):
            out[i] = (np.float32(codes[i]) + lower) / scale
    else:
        for i in range(len(out)):
            value = min(max((np.float32(codes[i]) + lower) / scale, -largest), largest)
            value = levels.fill if levels.constant else value
            out[i] = out[i] + value if adding else value


@_inner
def _decode_rounded(codes: Array, levels: Any, rounded: Any, finite_rounded: Any, out: Array) -> None:
    """Decode to elements of 16 bits, whose bits two functions give: of any float32, and of what is not NaN."""
    scale, lower, largest = levels.scale, levels.lower, levels.largest
    if levels.plain:
        for i in range(len(out)):
            out[i] = finite_rounded((np.float32(codes[i]) + lower) / scale)
    else:
        for i in range(len(out)):
            value = min(max((np.float32(codes[i]) + lower) / scale, -largest), largest)
            out[i] = rounded(levels.fill if levels.constant else value)


@_inner
def _sum_strip(
    layout: Any, wires: int, n: int, mean: int, begin: int, at: int, total: Array, pair: Array
) -> None:
    """Sum elements of n rows, from `at` on, in the block that begins at `begin`, into `total`."""
    total[:] = _NOTHING
    for row in range(n):
        wire = wires + row * layout.stride
        codes = _bytes(wire + layout.start + at, len(total))
        _decode(codes, _read_levels(layout, wire, begin, pair), True, total)
    if mean:
        _divide(total, n)
    _round(layout.kind, total)


@_inner
def _extremes(bits: Array, signed: Array, signed_most: Any, most: Any, least: Any) -> Any:
    """Update three extremes of the bits of floats: one of them as signed integers, two as unsigned."""
    for i in range(len(bits)):
        signed_most = signed[i] if signed[i] > signed_most else signed_most
        most = bits[i] if bits[i] > most else most
        least = bits[i] if bits[i] < least else least
    return signed_most, most, least


@_inner
def _ends(signed_most: Any, most: Any, least: Any, sign: Any, value: Any) -> Any:
    """Min and max of the floats whose bits have these extremes; NaN if any is not finite, and zeros are +0.0.

    Args:
        signed_most: The largest as signed integers.
        most: The largest as unsigned integers.
        least: The smallest as unsigned integers.
        sign: The bit of the sign.
        value: A function that gives the float32 of some bits.
    """
    # The bits of positive floats ascend with them, those of negative ones descend and, unsigned, are above.
    low = value(most if most >= sign else least) + _ZERO
    high = value(signed_most if signed_most >= 0 else least) + _ZERO
    if not (np.isfinite(low) and np.isfinite(high)):
        low = high = _float(_NAN)
    return low, high


@_inner
def _encode_floats(layout: Any, bits: Array, begin: int, row: int, pair: Array) -> None:
    """Encode elements of float32, all those of a block."""
    most = _extremes(bits, bits.view(np.int32), np.int32(-(2**31)), np.uint32(0), np.uint32(0xFFFFFFFF))
    low, high = _ends(most[0], most[1], most[2], _SIGN, _float)
    scale, lower = _write_ends(layout, low, high, begin, row, pair)
    _quantize(bits, _float, low, scale, lower, _bytes(row + layout.start + begin, len(bits)))


@_inner
def _encode_halves(layout: Any, bits: Array, value: Any, begin: int, row: int, pair: Array) -> None:
    """Encode elements of 16 bits, all those of a block; `value` gives the float32 of their bits."""
    most = _extremes(bits, bits.view(np.int16), np.int16(-(2**15)), np.uint16(0), np.uint16(0xFFFF))
    low, high = _ends(most[0], most[1], most[2], np.uint16(0x8000), value)
    scale, lower = _write_ends(layout, low, high, begin, row, pair)
    _quantize(bits, value, low, scale, lower, _bytes(row + layout.start + begin, len(bits)))


@_inner
def _encode_sum(
    layout: Any, wires: int, n: int, mean: int, begin: int, row: int, scratch: Array, pair: Array
) -> None:
    """Encode the sum of a block of n rows of `wires`."""
    end = min(begin + layout.block, layout.elements)
    most = np.int32(-(2**31)), np.uint32(0), np.uint32(0xFFFFFFFF)
    for at in range(begin, end, _STRIP):
        total = scratch[: min(_STRIP, end - at)]
        _sum_strip(layout, wires, n, mean, begin, at, total, pair)
        most = _extremes(total.view(np.uint32), total.view(np.int32), most[0], most[1], most[2])
    low, high = _ends(most[0], most[1], most[2], _SIGN, _float)
    scale, lower = _write_ends(layout, low, high, begin, row, pair)
    for at in range(begin, end, _STRIP):
        total = scratch[: min(_STRIP, end - at)]
        if end - begin > _STRIP:  # a single strip is still in `total`
            _sum_strip(layout, wires, n, mean, begin, at, total, pair)
        codes = _bytes(row + layout.start + at, len(total))
        _quantize(total.view(np.uint32), _float, low, scale, lower, codes)


@_inner
def _write_ends(layout: Any, low: Any, high: Any, begin: int, row: int, pair: Array) -> Any:
    """Write the pair of a block; returns its scale and lower level."""
    pair[0], pair[1] = low, high
    _store(layout.kind, pair, _header(layout, row, begin))
    return _scale_and_lower(low, high, layout.eps)


@_inner
def _quantize(bits: Array, value: Any, low: Any, scale: Any, lower: Any, codes: Array) -> None:
    """Encode: code = clip(rint(x * scale) - lower, 0, 255), or 0 where that is not a number."""
    if not (np.isfinite(low) and np.isfinite(scale) and np.isfinite(lower)):
        codes[:] = 0
    elif np.rint(low * scale) - lower >= 0 and abs(lower) < _EXACT:  # then no code needs clipping: see `host`
        for i in range(len(bits)):
            codes[i] = np.uint8(np.int32(np.rint(value(bits[i]) * scale) - lower))
    else:
        for i in range(len(bits)):
            codes[i] = np.uint8(min(max(np.rint(value(bits[i]) * scale) - lower, _ZERO), _LEVELS))
