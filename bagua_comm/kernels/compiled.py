"""Kernels compiled by Numba (see `numba`), for the functions in which codecs spend their time; else `host`'s.

The bytes are those of `host`. The functions here pass the addresses of arrays to the compiled ones, which take
contiguous memory and run without the GIL, so that other threads, such as lanes, go on. Arrays whose elements are
not aligned go to `host`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from ..arrays import Array, DType, address, dtype_name
from . import host
from .host import Draws
from .numba.signatures import Function

_CODES = {"float32": 0, "float16": 1, "bfloat16": 2}
"""The number of an element dtype in the arguments of compiled functions."""

DTYPES = tuple(_CODES)
"""The element dtypes that have compiled kernels."""


class _Functions:
    """Namespace of the compiled functions, filled by `install`."""

    def __getattr__(self, name: str) -> Function:
        raise AttributeError(f"the kernel {name} is not loaded: call kernels.compile_now() before")


_run = _Functions()


def install(functions: dict[str, Function]) -> None:
    """Use these compiled functions, one for each name of `signatures.KERNELS`."""
    vars(_run).update(functions)


def __getattr__(name: str) -> Any:
    return getattr(host, name)


def reduce_rows(rows: Sequence[Array], out: Array, op: str) -> None:
    """See `host.reduce_rows`."""
    element = _CODES.get(dtype_name(out.dtype))
    if element is None or element == _CODES["float32"] or op not in ("sum", "avg"):
        return host.reduce_rows(rows, out, op)
    addresses, target, nbytes = np.array([address(row) for row in rows]), address(out), out.nbytes
    if (
        any(row.strides != (out.itemsize,) for row in (out, *rows))
        or (np.bitwise_or.reduce(addresses) | target) % out.itemsize
    ):
        return host.reduce_rows(rows, out, op)
    return _run.sum_rows(
        element, address(addresses), len(addresses), out.size, op == "avg", element, element, target, nbytes
    )


def cast_encode(chunks: Array, wire: Array, sent: DType) -> None:
    """See `host.cast_encode`."""
    (n, m), w, dtype = chunks.shape, wire.shape[1], chunks.dtype
    source, target = address(chunks), address(wire)
    if not (_supports(dtype, source) and _supports(sent, target | w)):
        return host.cast_encode(chunks, wire, sent)
    element, wire_element = _CODES[dtype_name(dtype)], _CODES[dtype_name(sent)]
    return _run.cast_rows(element, source, m * dtype.itemsize, n, m, wire_element, target, w)


def cast_decode(wire: Array, out: Array, sent: DType) -> None:
    """See `host.cast_decode`."""
    (n, m), w, dtype = out.shape, wire.shape[1], out.dtype
    source, target = address(wire), address(out)
    if not (_supports(dtype, target) and _supports(sent, source | w)):
        return host.cast_decode(wire, out, sent)
    element, wire_element = _CODES[dtype_name(dtype)], _CODES[dtype_name(sent)]
    return _run.cast_rows(wire_element, source, w, n, m, element, target, m * dtype.itemsize)


def cast_combine(wire: Array, out: Array, count: int, dtype: DType, sent: DType, op: str) -> None:
    """See `host.cast_combine`."""
    n, w = wire.shape
    source, target = address(wire), address(out)
    if not _supports(sent, source | target | w):
        return host.cast_combine(wire, out, count, dtype, sent, op)
    element, wire_element = _CODES[dtype_name(dtype)], _CODES[dtype_name(sent)]
    addresses = source + w * np.arange(n)
    return _run.sum_rows(
        wire_element, address(addresses), n, count, op == "avg", element, wire_element, target, w
    )


def _supports(dtype: DType, addresses: int) -> bool:
    """Whether rows of `dtype` with these addresses and strides, or-ed, have compiled kernels."""
    return dtype_name(dtype) in _CODES and addresses % dtype.itemsize == 0


# Block fixed point of float64 is `host`'s, ten times as slow as these kernels of float32 (6 ns an element, not
# 0.5). Large arrays of float64 are seldom averaged, and loops for a second set of types would double the code.


def fixed_exponents(x: Array, bounds: Array, fields: Array) -> None:
    """See `host.fixed_exponents`."""
    source = address(x)
    if not _supports(x.dtype, source):
        return host.fixed_exponents(x, bounds, fields)
    return _run.find_fields(
        _CODES[dtype_name(x.dtype)], source, address(bounds), len(bounds) - 1, address(fields)
    )


def fixed_add(x: Array, bounds: Array, fields: Array, bits: int, total: Array, *, first: bool) -> None:
    """See `host.fixed_add`."""
    source = address(x)
    if not _supports(x.dtype, source):
        return host.fixed_add(x, bounds, fields, bits, total, first=first)
    element, blocks = _CODES[dtype_name(x.dtype)], len(bounds) - 1
    return _run.add_fixed(element, source, address(bounds), blocks, address(fields), bits, address(total), first)


def fixed_mean(total: Array, bounds: Array, fields: Array, bits: int, divisor: int, out: Array) -> None:
    """See `host.fixed_mean`."""
    target = address(out)
    if not _supports(out.dtype, target):
        return host.fixed_mean(total, bounds, fields, bits, divisor, out)
    element, blocks = _CODES[dtype_name(out.dtype)], len(bounds) - 1
    return _run.mean_of_fixed(
        element, address(total), address(bounds), blocks, address(fields), bits, divisor, target
    )


def checksum_blocks(words: Array, weights: Array, sums: Array, out: Array | None = None) -> None:
    """See `host.checksum_blocks`."""
    source, target = address(words), 0 if out is None else address(out)
    if (source | target) % words.itemsize:
        return host.checksum_blocks(words, weights, sums, out)
    return _run.checksum_blocks(source, len(words), address(weights), weights.shape[1], address(sums), target)


def loss(x: Array, decoded: Array, factor: float, out: Array) -> None:
    """See `host.loss`."""
    if not _are_rows(x, decoded, out):
        return host.loss(x, decoded, factor, out)
    element = _CODES[dtype_name(out.dtype)]
    return _run.encoding_errors(element, address(x), address(decoded), address(out), out.size, float(factor), 0.0)


def decayed_loss(x: Array, decoded: Array, decay: float, out: Array) -> None:
    """See `host.decayed_loss`."""
    if not _are_rows(x, decoded, out):
        return host.decayed_loss(x, decoded, decay, out)
    element = _CODES[dtype_name(out.dtype)]
    return _run.encoding_errors(element, address(x), address(decoded), address(out), out.size, 1.0, float(decay))


def _are_rows(*arrays: Array) -> bool:
    """Whether compiled kernels can take these arrays of one size and dtype element by element."""
    dtype = arrays[-1].dtype
    return all(x.dtype == dtype and x.strides == (x.itemsize,) and _supports(dtype, address(x)) for x in arrays)


# A block is cut to the length of a row: an int may have any size, the integers of a kernel have 64 bits.


def minmax_encode(chunks: Array, wire: Array, start: int, block: int, eps: float) -> None:
    """See `host.minmax_encode`."""
    (n, m), w, dtype, between = chunks.shape, wire.shape[1], chunks.dtype, chunks.strides[0]
    source, target = chunks.__array_interface__["data"][0], wire.__array_interface__["data"][0]
    element, pitch = _CODES.get(dtype_name(dtype)), between // dtype.itemsize
    if element is None or (source | between | target | w) % dtype.itemsize:
        return host.minmax_encode(chunks, wire, start, block, eps)
    return _run.encode_rows(element, source, pitch, n, m, target, w, start, min(block, m or 1), float(eps))


def minmax_decode(wire: Array, out: Array, start: int, block: int, eps: float) -> None:
    """See `host.minmax_decode`."""
    (n, m), w, dtype, between = out.shape, wire.shape[1], out.dtype, out.strides[0]
    source, target = wire.__array_interface__["data"][0], out.__array_interface__["data"][0]
    element, pitch = _CODES.get(dtype_name(dtype)), between // dtype.itemsize
    if element is None or (source | between | target | w) % dtype.itemsize:
        return host.minmax_decode(wire, out, start, block, eps)
    return _run.decode_rows(element, source, n, m, target, pitch, w, start, min(block, m or 1), float(eps))


def minmax_combine(
    wire: Array, out: Array, count: int, dtype: DType, start: int, block: int, eps: float, op: str
) -> None:
    """See `host.minmax_combine`."""
    n, w = wire.shape
    source, target = wire.__array_interface__["data"][0], out.__array_interface__["data"][0]
    element = _CODES.get(dtype_name(dtype))
    if element is None or (source | target | w) % dtype.itemsize:
        return host.minmax_combine(wire, out, count, dtype, start, block, eps, op)
    return _run.combine_rows(
        element, source, n, op == "avg", count, target, w, start, min(block, count or 1), float(eps)
    )


def int4_encode(
    chunks: Array, wire: Array, start: int, block: int, rotate: int, draws: Draws | None = None
) -> None:
    """See `host.int4_encode`."""
    (n, m), w, dtype, between = chunks.shape, wire.shape[1], chunks.dtype, chunks.strides[0]
    source, target = address(chunks), address(wire)
    if not _supports(dtype, source | between) or target % 2:
        return host.int4_encode(chunks, wire, start, block, rotate, draws)
    element, pitch = _CODES[dtype_name(dtype)], between // dtype.itemsize
    return _run.encode_int4(element, source, pitch, n, m, target, w, start, block, rotate, *_random(draws))


def int4_decode(wire: Array, out: Array, start: int, block: int, rotate: int) -> None:
    """See `host.int4_decode`."""
    (n, m), w, dtype, between = out.shape, wire.shape[1], out.dtype, out.strides[0]
    source, target = address(wire), address(out)
    if not _supports(dtype, target | between) or source % 2:
        return host.int4_decode(wire, out, start, block, rotate)
    element, pitch = _CODES[dtype_name(dtype)], between // dtype.itemsize
    return _run.decode_int4(element, source, n, m, target, pitch, w, start, block, rotate)


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
    """See `host.int4_combine`."""
    n, w = wire.shape
    source, target = address(wire), address(out)
    if (source | target) % 2:
        return host.int4_combine(wire, out, count, dtype, start, block, rotate, op, draws)
    return _run.combine_int4(source, n, op == "avg", count, target, w, start, block, *_random(draws))


def top_k_encode(x: Array, wire: Array, chunk: int, keep: int, bits: int) -> None:
    """See `host.top_k_encode`."""
    source, target = address(x), address(wire)
    if not _supports(x.dtype, source) or target % 4:
        return host.top_k_encode(x, wire, chunk, keep, bits)
    layout, element = host.top_k_layout(x.size, chunk, keep, bits), _CODES[dtype_name(x.dtype)]
    values, terms = np.empty(layout.entries, np.float32), np.empty(layout.entries if bits == 2 else 0)
    memory = address(values), address(terms)
    return _run.encode_top_k(element, source, x.size, chunk, keep, bits, target, *layout[-3:], *memory)


def top_k_sum(wires: Sequence[Array], out: Array, chunk: int, keep: int, bits: int, op: str) -> None:
    """See `host.top_k_sum`."""
    addresses, target = np.array([address(wire) for wire in wires]), address(out)
    if not _supports(out.dtype, target) or np.bitwise_or.reduce(addresses) % 4:
        return host.top_k_sum(wires, out, chunk, keep, bits, op)
    layout, element = host.top_k_layout(out.size, chunk, keep, bits), _CODES[dtype_name(out.dtype)]
    settings = out.size, chunk, keep, bits, layout.values, layout.indices
    divisor = host.TOP_K_DIVISORS[op]
    return _run.sum_top_k(element, address(addresses), len(wires), divisor, *settings, target)


def top_k_subtract(x: Array, wire: Array, chunk: int, keep: int, bits: int) -> None:
    """See `host.top_k_subtract`."""
    source, target = address(wire), address(x)
    if not _supports(x.dtype, target) or source % 4:
        return host.top_k_subtract(x, wire, chunk, keep, bits)
    layout, element = host.top_k_layout(x.size, chunk, keep, bits), _CODES[dtype_name(x.dtype)]
    return _run.subtract_top_k(element, target, x.size, chunk, keep, bits, source, layout.values, layout.indices)


def _random(draws: Draws | None) -> tuple[int, int, int, int]:
    """Whether codes are rounded stochastically, the halves of the key, and the first counter."""
    return (0, 0, 0, 0) if draws is None else (1, *draws.words)
