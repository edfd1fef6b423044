"""The kernels in which codecs spend their time, compiled by Numba; any other kernel is the one of `host`.

NumPy goes over memory once for every operation. Here all operations run on a strip of elements while it is in the
first-level cache, so that a call takes about as long as a copy. The bytes are those of `host`: float32 arithmetic
runs in the order written, without fused multiply-adds, and a division stays a division. Only a NaN in a result of
`reduce_rows` may differ: it is the canonical one, as on a device.

Why Numba: `pip install bagua-comm[fast]` is enough. Numba needs neither a compiler on the machine nor a wheel for
each platform. It uses the vector instructions of the processor that it finds, and it releases the GIL, which
matters because lanes are threads. A function is compiled at its first call, and kept on disk for later processes.

Kernels take addresses of contiguous memory instead of arrays. So each is compiled only once, for all dtypes, and
for read-only arrays too. Arrays whose elements are not aligned go to `host`.
"""

from __future__ import annotations

import contextlib
import platform
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeVar, cast

import numba
import numpy as np
from llvmlite import binding
from numba.extending import intrinsic

from ..arrays import Array, DType, address, dtype_name
from . import host

_STRIP = 2048
"""How many elements are worked on at a time: 8 KiB of float32."""

_FLOAT32, _FLOAT16, _BFLOAT16 = range(3)
_KINDS = {"float32": _FLOAT32, "float16": _FLOAT16, "bfloat16": _BFLOAT16}
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


def __getattr__(name: str) -> Any:
    return getattr(host, name)


# ---------------------------------------------------------------------------------------------------
# Compilation
# ---------------------------------------------------------------------------------------------------


_SEMANTICS = {"nogil": True, "error_model": "numpy"}
"""x / 0 is inf or NaN, as in NumPy."""


def _inner(function: Function) -> Function:
    """Compile a function that kernels call; Python cannot call it."""
    return cast(Function, numba.njit(**_SEMANTICS, no_cpython_wrapper=True, no_cfunc_wrapper=True)(function))


def _kernel(function: Function) -> Function:
    """Compile a kernel at its first call, or load what another process compiled."""
    # Numba keeps an index in one file and each compiled code in another. If two ranks write at once, the index
    # may be one rank's and the code the other's. So each index has one signature and is for one kind of
    # processor.
    function.__qualname__ += f"-{platform.machine()}-{binding.get_host_cpu_name()}"
    compiled = numba.njit(**_SEMANTICS)(function)
    with contextlib.suppress(RuntimeError):  # there is no folder to write to: each process compiles for itself
        compiled.enable_caching()

    def run(*arguments: Any) -> None:
        try:
            compiled(*arguments)
        except OSError:  # the disk is full: it was compiled, but could not be kept
            compiled(*arguments)

    return cast(Function, run)


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
# By integers: not every processor has instructions for float16, and NumPy's own functions are not vectorised.
# ---------------------------------------------------------------------------------------------------


@_inner
def _bits(x: Any) -> Any:
    return np.float32(x).view(np.uint32)


@_inner
def _float(bits: Any) -> Any:
    return np.uint32(bits).view(np.float32)


@_inner
def _from_float16(half: Any) -> Any:
    magnitude = np.uint32(half & 0x7FFF)
    normal = np.uint32((magnitude << 13) + (112 << 23))  # 127 - 15, the difference of the two biases of exponents
    not_finite = np.uint32((magnitude << 13) + (224 << 23))
    denormal = _bits(np.float32(magnitude) * np.float32(2.0**-24))
    bits = normal if magnitude >= 0x0400 else denormal
    bits = bits if magnitude < 0x7C00 else not_finite
    return _float(bits | np.uint32(half & 0x8000) << 16)


@_inner
def _to_float16(x: Any) -> Any:
    """Round half to even; NaN becomes the canonical NaN."""
    magnitude = np.uint32(_bits(x) & 0x7FFFFFFF)
    odd = np.uint32(magnitude >> 13) & 1
    normal = np.uint32(np.uint32(magnitude - (112 << 23) + 0xFFF + odd) >> 13)
    # In float32, the last place of 0.5 is the last place of a denormal float16.
    denormal = np.uint32(_bits(_float(magnitude) + np.float32(0.5)) - _bits(np.float32(0.5)))
    half = denormal if magnitude < 113 << 23 else normal
    half = min(half, np.uint32(0x7C00)) | np.uint32(np.uint32(_bits(x) >> 16) & 0x8000)
    return np.uint16(0x7E00) if magnitude > _INFINITY else np.uint16(half)


@_inner
def _from_bfloat16(half: Any) -> Any:
    return _float(np.uint32(half) << 16)


@_inner
def _to_bfloat16(x: Any) -> Any:
    """Round half to even; NaN becomes the canonical NaN."""
    bits = _bits(x)
    if np.uint32(bits & 0x7FFFFFFF) > _INFINITY:
        bits = _NAN
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
        magnitude = np.uint32(source[i] & 0x7FFFFFFF)
        kept = min(magnitude, largest) if magnitude < _INFINITY else magnitude
        target[i] = _NAN if magnitude > _INFINITY else kept | (source[i] & _SIGN)
    return scratch[: len(values)]


# ---------------------------------------------------------------------------------------------------
# Sums and casts
# ---------------------------------------------------------------------------------------------------


def reduce_rows(rows: Sequence[Array], out: Array, op: str) -> None:
    """See `host.reduce_rows`."""
    kind = _KINDS.get(dtype_name(out.dtype))
    if kind is None or kind == _FLOAT32 or op not in ("sum", "avg"):
        return host.reduce_rows(rows, out, op)
    places, target, nbytes = np.array([address(row) for row in rows]), address(out), out.nbytes
    if (
        any(row.strides != (out.itemsize,) for row in (out, *rows))
        or (np.bitwise_or.reduce(places) | target) % out.itemsize
    ):
        return host.reduce_rows(rows, out, op)
    return _sum_rows(kind, places, out.size, op == "avg", kind, kind, target, nbytes)


def cast_encode(chunks: Array, wire: Array, sent: DType) -> None:
    """See `host.cast_encode`."""
    (n, m), w, dtype = chunks.shape, wire.shape[1], chunks.dtype
    source, target = address(chunks), address(wire)
    if not (_takes(dtype, source) and _takes(sent, target | w)):
        return host.cast_encode(chunks, wire, sent)
    kind, wire_kind = _KINDS[dtype_name(dtype)], _KINDS[dtype_name(sent)]
    return _cast_rows(kind, source, m * dtype.itemsize, n, m, wire_kind, target, w)


def cast_decode(wire: Array, out: Array, sent: DType) -> None:
    """See `host.cast_decode`."""
    (n, m), w, dtype = out.shape, wire.shape[1], out.dtype
    source, target = address(wire), address(out)
    if not (_takes(dtype, target) and _takes(sent, source | w)):
        return host.cast_decode(wire, out, sent)
    kind, wire_kind = _KINDS[dtype_name(dtype)], _KINDS[dtype_name(sent)]
    return _cast_rows(wire_kind, source, w, n, m, kind, target, m * dtype.itemsize)


def cast_combine(wire: Array, out: Array, count: int, dtype: DType, sent: DType, op: str) -> None:
    """See `host.cast_combine`."""
    n, w = wire.shape
    source, target = address(wire), address(out)
    if not _takes(sent, source | target | w):
        return host.cast_combine(wire, out, count, dtype, sent, op)
    kind, wire_kind = _KINDS[dtype_name(dtype)], _KINDS[dtype_name(sent)]
    return _sum_rows(wire_kind, source + w * np.arange(n), count, op == "avg", kind, wire_kind, target, w)


def _takes(dtype: DType, places: int) -> bool:
    """Whether there are kernels for `dtype`, if the addresses and strides of rows give `places` when or-ed."""
    return dtype_name(dtype) in _KINDS and places % dtype.itemsize == 0


@_kernel
def _cast_rows(
    source_kind: int, source: int, source_stride: int, n: int, count: int, kind: int, target: int, stride: int
) -> None:
    """Cast n rows; zero the bytes after the elements in rows of `target`."""
    wide, saturated = np.empty(_STRIP, np.float32), np.empty(_STRIP, np.float32)
    for row in range(n):
        for at in range(0, count, _STRIP):
            where = source + row * source_stride + at * _itemsize(source_kind)
            values = _load(source_kind, where, min(_STRIP, count - at), wide)
            _store(kind, _saturate(kind, values, saturated), target + row * stride + at * _itemsize(kind))
        _clear(target + row * stride, count * _itemsize(kind), stride)


@_kernel
def _sum_rows(
    source_kind: int,
    places: Array,
    count: int,
    mean: bool,
    element_kind: int,
    kind: int,
    target: int,
    stride: int,
) -> None:
    """Add rows of 16-bit floats, round the sum to elements, cast these, and zero the bytes after them."""
    total, wide = np.empty(_STRIP, np.float32), np.empty(_STRIP, np.float32)
    for at in range(0, count, _STRIP):
        part = total[: min(_STRIP, count - at)]
        part[:] = _NOTHING
        for place in places:
            term = _load(source_kind, place + at * _itemsize(source_kind), len(part), wide)
            for i in range(len(part)):
                part[i] += term[i]
        if mean:
            _divide(part, len(places))
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


def fixed_exponents(x: Array, bounds: Array, fields: Array) -> None:
    """See `host.fixed_exponents`."""
    source = address(x)
    if not _takes(x.dtype, source):
        return host.fixed_exponents(x, bounds, fields)
    return _find_fields(_KINDS[dtype_name(x.dtype)], source, address(bounds), len(bounds) - 1, address(fields))


def fixed_add(x: Array, bounds: Array, fields: Array, bits: int, total: Array, *, first: bool) -> None:
    """See `host.fixed_add`."""
    source = address(x)
    if not _takes(x.dtype, source):
        return host.fixed_add(x, bounds, fields, bits, total, first=first)
    kind, blocks = _KINDS[dtype_name(x.dtype)], len(bounds) - 1
    return _add_fixed(kind, source, address(bounds), blocks, address(fields), bits, address(total), first)


def fixed_mean(total: Array, bounds: Array, fields: Array, bits: int, divisor: int, out: Array) -> None:
    """See `host.fixed_mean`."""
    target = address(out)
    if not _takes(out.dtype, target):
        return host.fixed_mean(total, bounds, fields, bits, divisor, out)
    kind, blocks = _KINDS[dtype_name(out.dtype)], len(bounds) - 1
    return _mean_of_fixed(kind, address(total), address(bounds), blocks, address(fields), bits, divisor, target)


# Blocks are short. LLVM makes quick loops over them only where each loop is in a function of its own, and where
# its arrays are at one place, not at one of two: so float32, which needs no conversion, has branches of its own.


@_kernel
def _find_fields(kind: int, x: int, bounds: int, blocks: int, fields: int) -> None:
    edges, found = _longs(bounds, blocks + 1), _bytes(fields, blocks)
    wide = np.empty(_STRIP, np.float32)
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
def _add_fixed(
    kind: int, x: int, bounds: int, blocks: int, fields: int, bits: int, total: int, first: bool
) -> None:
    edges, found = _longs(bounds, blocks + 1), _bytes(fields, blocks)
    wide, kept = np.empty(_STRIP, np.float32), np.int32(0 if first else -1)
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
def _mean_of_fixed(
    kind: int, total: int, bounds: int, blocks: int, fields: int, bits: int, divisor: int, target: int
) -> None:
    edges, found = _longs(bounds, blocks + 1), _bytes(fields, blocks)
    wide = np.empty(_STRIP, np.float32)
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


def weigh_blocks(words: Array, weights: Array, sums: Array, out: Array | None = None) -> None:
    """See `host.weigh_blocks`."""
    source, target = address(words), 0 if out is None else address(out)
    if (source | target) % words.itemsize:
        return host.weigh_blocks(words, weights, sums, out)
    return _weigh_blocks(source, len(words), address(weights), weights.shape[1], address(sums), target)


@_kernel
def _weigh_blocks(words: int, count: int, weights: int, size: int, sums: int, out: int) -> None:
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


# Below, a block is no longer than a row: an int may be of any size, the integers of a kernel have 64 bits.


def minmax_encode(chunks: Array, wire: Array, start: int, block: int, eps: float) -> None:
    """See `host.minmax_encode`."""
    (n, m), w, dtype = chunks.shape, wire.shape[1], chunks.dtype
    source, target = chunks.__array_interface__["data"][0], wire.__array_interface__["data"][0]
    kind = _KINDS.get(dtype_name(dtype))
    if kind is None or (source | target | w) % dtype.itemsize:
        return host.minmax_encode(chunks, wire, start, block, eps)
    return _encode_rows(kind, source, n, m, target, w, start, min(block, m or 1), float(eps))


def minmax_decode(wire: Array, out: Array, start: int, block: int, eps: float) -> None:
    """See `host.minmax_decode`."""
    (n, m), w, dtype = out.shape, wire.shape[1], out.dtype
    source, target = wire.__array_interface__["data"][0], out.__array_interface__["data"][0]
    kind = _KINDS.get(dtype_name(dtype))
    if kind is None or (source | target | w) % dtype.itemsize:
        return host.minmax_decode(wire, out, start, block, eps)
    return _decode_rows(kind, source, n, m, target, w, start, min(block, m or 1), float(eps))


def minmax_combine(
    wire: Array, out: Array, count: int, dtype: DType, start: int, block: int, eps: float, op: str
) -> None:
    """See `host.minmax_combine`."""
    n, w = wire.shape
    source, target = wire.__array_interface__["data"][0], out.__array_interface__["data"][0]
    kind = _KINDS.get(dtype_name(dtype))
    if kind is None or (source | target | w) % dtype.itemsize:
        return host.minmax_combine(wire, out, count, dtype, start, block, eps, op)
    return _combine_rows(
        kind, source, n, op == "avg", count, target, w, start, min(block, count or 1), float(eps)
    )


class _Wire(NamedTuple):
    """The layout of encoded rows."""

    kind: int
    elements: int
    stride: int
    start: int
    block: int
    eps: Any


class _Sum(NamedTuple):
    """How many rows of a wire to add (0: encode elements as they are), and whether to divide by their number."""

    rows: int
    mean: bool


class _Levels(NamedTuple):
    """Decoding constants of a block."""

    scale: Any
    lower: Any
    fill: Any
    largest: Any
    constant: bool
    plain: bool


@_kernel
def _encode_rows(
    kind: int, x: int, n: int, count: int, wire: int, stride: int, start: int, block: int, eps: float
) -> None:
    """Encode n rows of elements."""
    layout = _Wire(kind, count, stride, start, block, np.float32(eps))
    wide, pair = np.empty(_STRIP, np.float32), np.empty(2, np.float32)
    for row in range(n):
        source, target = x + row * count * _itemsize(kind), wire + row * stride
        for begin in range(0, count, block):
            _encode_block(layout, source, _Sum(0, False), begin, target, wide, pair)
        _clear_padding(layout, target)


@_kernel
def _combine_rows(
    kind: int,
    wires: int,
    n: int,
    mean: bool,
    count: int,
    wire: int,
    stride: int,
    start: int,
    block: int,
    eps: float,
) -> None:
    """Decode n rows of `wires`, add them, and encode the sum."""
    layout = _Wire(kind, count, stride, start, block, np.float32(eps))
    total, pair = np.empty(_STRIP, np.float32), np.empty(2, np.float32)
    for begin in range(0, count, block):
        _encode_block(layout, wires, _Sum(n, mean), begin, wire, total, pair)
    _clear_padding(layout, wire)


@_kernel
def _decode_rows(
    kind: int, wire: int, n: int, count: int, out: int, stride: int, start: int, block: int, eps: float
) -> None:
    """Decode n rows."""
    layout = _Wire(kind, count, stride, start, block, np.float32(eps))
    wide, pair = np.empty(_STRIP, np.float32), np.empty(2, np.float32)
    for row in range(n):
        source, target = wire + row * stride, out + row * count * _itemsize(kind)
        for begin in range(0, count, block):
            levels = _read_levels(layout, source, begin, pair)
            end = min(begin + block, count)
            for at in range(begin, end, _STRIP):
                where, length = target + at * _itemsize(kind), min(_STRIP, end - at)
                values = _floats(where, length) if kind == _FLOAT32 else wide[:length]
                _decode(_bytes(source + start + at, length), levels, False, values)
                if kind != _FLOAT32:
                    _store(kind, values, where)


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
def _strip(
    layout: Any, source: int, summed: Any, begin: int, at: int, count: int, scratch: Array, pair: Array
) -> Array:
    """`count` elements from `at` on, in the block that begins at `begin`: as they are, or summed over rows."""
    if summed.rows == 0:
        return _load(layout.kind, source + at * _itemsize(layout.kind), count, scratch)
    total = scratch[:count]
    total[:] = _NOTHING
    for row in range(summed.rows):
        wire = source + row * layout.stride
        _decode(_bytes(wire + layout.start + at, count), _read_levels(layout, wire, begin, pair), True, total)
    if summed.mean:
        _divide(total, summed.rows)
    _round(layout.kind, total)
    return total


@_inner
def _extremes(values: Array, signed_most: Any, most: Any, least: Any) -> Any:
    """Update three extremes of the bits of floats by `values`: one as signed integers, two as unsigned."""
    bits, signed = values.view(np.uint32), values.view(np.int32)
    for i in range(len(values)):
        signed_most = max(signed_most, signed[i])
        most = max(most, bits[i])
        least = min(least, bits[i])
    return signed_most, most, least


@_inner
def _ends(signed_most: Any, most: Any, least: Any) -> Any:
    """Min and max of the floats whose bits have these extremes; NaN if any is not finite, and zeros are +0.0."""
    # The bits of positive floats ascend with them, those of negative ones descend and, unsigned, are above.
    low = _float(most if most >= _SIGN else least) + _ZERO
    high = _float(signed_most if signed_most >= 0 else least) + _ZERO
    if not (np.isfinite(low) and np.isfinite(high)):
        low = high = _float(_NAN)
    return low, high


@_inner
def _encode_block(
    layout: Any, source: int, summed: Any, begin: int, row: int, scratch: Array, pair: Array
) -> None:
    end = min(begin + layout.block, layout.elements)
    signed_most, most, least = np.int32(-(2**31)), np.uint32(0), np.uint32(0xFFFFFFFF)
    for at in range(begin, end, _STRIP):
        values = _strip(layout, source, summed, begin, at, min(_STRIP, end - at), scratch, pair)
        signed_most, most, least = _extremes(values, signed_most, most, least)
    low, high = pair[0], pair[1] = _ends(signed_most, most, least)
    _store(layout.kind, pair, _header(layout, row, begin))
    scale, lower = _scale_and_lower(low, high, layout.eps)
    for at in range(begin, end, _STRIP):
        if end - begin > _STRIP:  # a single strip is still in `values`
            values = _strip(layout, source, summed, begin, at, min(_STRIP, end - at), scratch, pair)
        _quantize(values, low, scale, lower, _bytes(row + layout.start + at, len(values)))


@_inner
def _quantize(values: Array, low: Any, scale: Any, lower: Any, codes: Array) -> None:
    """Encode: code = clip(rint(x * scale) - lower, 0, 255), or 0 where that is not a number."""
    if not (np.isfinite(low) and np.isfinite(scale) and np.isfinite(lower)):
        codes[:] = 0
    elif np.rint(low * scale) - lower >= 0 and abs(lower) < _EXACT:  # then no code needs clipping: see `host`
        for i in range(len(values)):
            codes[i] = np.uint8(np.int32(np.rint(values[i] * scale) - lower))
    else:
        for i in range(len(values)):
            codes[i] = np.uint8(min(max(np.rint(values[i] * scale) - lower, _ZERO), _LEVELS))
