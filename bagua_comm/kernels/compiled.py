"""The kernels in which codecs spend their time, compiled (see `loops`); any other kernel is the one of `host`.

The bytes are those of `host`. The functions here learn where arrays lie, and call the compiled ones. Those take
addresses of contiguous memory, and run without the GIL, which matters because lanes are threads. Arrays whose
elements are not aligned go to `host`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from ..arrays import Array, DType, address, dtype_name
from . import host
from .making import Function

_KINDS = {"float32": 0, "float16": 1, "bfloat16": 2}
"""The number by which the compiled functions know a dtype of elements."""

DTYPES = tuple(_KINDS)
"""The names of the dtypes of elements."""


class _Functions:
    """The compiled functions, once they are there."""

    def __getattr__(self, name: str) -> Function:
        raise AttributeError(f"the kernel {name} is not loaded: call kernels.compile_now() before")


_run = _Functions()


def take(functions: dict[str, Function]) -> None:
    """Use these compiled functions, those of `making.KERNELS`."""
    vars(_run).update(functions)


def __getattr__(name: str) -> Any:
    return getattr(host, name)


def reduce_rows(rows: Sequence[Array], out: Array, op: str) -> None:
    """See `host.reduce_rows`."""
    kind = _KINDS.get(dtype_name(out.dtype))
    if kind is None or kind == _KINDS["float32"] or op not in ("sum", "avg"):
        return host.reduce_rows(rows, out, op)
    places, target, nbytes = np.array([address(row) for row in rows]), address(out), out.nbytes
    if (
        any(row.strides != (out.itemsize,) for row in (out, *rows))
        or (np.bitwise_or.reduce(places) | target) % out.itemsize
    ):
        return host.reduce_rows(rows, out, op)
    return _run.sum_rows(kind, address(places), len(places), out.size, op == "avg", kind, kind, target, nbytes)


def cast_encode(chunks: Array, wire: Array, sent: DType) -> None:
    """See `host.cast_encode`."""
    (n, m), w, dtype = chunks.shape, wire.shape[1], chunks.dtype
    source, target = address(chunks), address(wire)
    if not (_takes(dtype, source) and _takes(sent, target | w)):
        return host.cast_encode(chunks, wire, sent)
    kind, wire_kind = _KINDS[dtype_name(dtype)], _KINDS[dtype_name(sent)]
    return _run.cast_rows(kind, source, m * dtype.itemsize, n, m, wire_kind, target, w)


def cast_decode(wire: Array, out: Array, sent: DType) -> None:
    """See `host.cast_decode`."""
    (n, m), w, dtype = out.shape, wire.shape[1], out.dtype
    source, target = address(wire), address(out)
    if not (_takes(dtype, target) and _takes(sent, source | w)):
        return host.cast_decode(wire, out, sent)
    kind, wire_kind = _KINDS[dtype_name(dtype)], _KINDS[dtype_name(sent)]
    return _run.cast_rows(wire_kind, source, w, n, m, kind, target, m * dtype.itemsize)


def cast_combine(wire: Array, out: Array, count: int, dtype: DType, sent: DType, op: str) -> None:
    """See `host.cast_combine`."""
    n, w = wire.shape
    source, target = address(wire), address(out)
    if not _takes(sent, source | target | w):
        return host.cast_combine(wire, out, count, dtype, sent, op)
    kind, wire_kind = _KINDS[dtype_name(dtype)], _KINDS[dtype_name(sent)]
    places = source + w * np.arange(n)
    return _run.sum_rows(wire_kind, address(places), n, count, op == "avg", kind, wire_kind, target, w)


def _takes(dtype: DType, places: int) -> bool:
    """Whether there are kernels for `dtype`, if the addresses and strides of rows give `places` when or-ed."""
    return dtype_name(dtype) in _KINDS and places % dtype.itemsize == 0


def fixed_exponents(x: Array, bounds: Array, fields: Array) -> None:
    """See `host.fixed_exponents`."""
    source = address(x)
    if not _takes(x.dtype, source):
        return host.fixed_exponents(x, bounds, fields)
    return _run.find_fields(
        _KINDS[dtype_name(x.dtype)], source, address(bounds), len(bounds) - 1, address(fields)
    )


def fixed_add(x: Array, bounds: Array, fields: Array, bits: int, total: Array, *, first: bool) -> None:
    """See `host.fixed_add`."""
    source = address(x)
    if not _takes(x.dtype, source):
        return host.fixed_add(x, bounds, fields, bits, total, first=first)
    kind, blocks = _KINDS[dtype_name(x.dtype)], len(bounds) - 1
    return _run.add_fixed(kind, source, address(bounds), blocks, address(fields), bits, address(total), first)


def fixed_mean(total: Array, bounds: Array, fields: Array, bits: int, divisor: int, out: Array) -> None:
    """See `host.fixed_mean`."""
    target = address(out)
    if not _takes(out.dtype, target):
        return host.fixed_mean(total, bounds, fields, bits, divisor, out)
    kind, blocks = _KINDS[dtype_name(out.dtype)], len(bounds) - 1
    return _run.mean_of_fixed(
        kind, address(total), address(bounds), blocks, address(fields), bits, divisor, target
    )


def weigh_blocks(words: Array, weights: Array, sums: Array, out: Array | None = None) -> None:
    """See `host.weigh_blocks`."""
    source, target = address(words), 0 if out is None else address(out)
    if (source | target) % words.itemsize:
        return host.weigh_blocks(words, weights, sums, out)
    return _run.weigh_blocks(source, len(words), address(weights), weights.shape[1], address(sums), target)


# Below, a block is no longer than a row: an int may be of any size, the integers of a kernel have 64 bits.


def minmax_encode(chunks: Array, wire: Array, start: int, block: int, eps: float) -> None:
    """See `host.minmax_encode`."""
    (n, m), w, dtype = chunks.shape, wire.shape[1], chunks.dtype
    source, target = chunks.__array_interface__["data"][0], wire.__array_interface__["data"][0]
    kind = _KINDS.get(dtype_name(dtype))
    if kind is None or (source | target | w) % dtype.itemsize:
        return host.minmax_encode(chunks, wire, start, block, eps)
    return _run.encode_rows(kind, source, n, m, target, w, start, min(block, m or 1), float(eps))


def minmax_decode(wire: Array, out: Array, start: int, block: int, eps: float) -> None:
    """See `host.minmax_decode`."""
    (n, m), w, dtype = out.shape, wire.shape[1], out.dtype
    source, target = wire.__array_interface__["data"][0], out.__array_interface__["data"][0]
    kind = _KINDS.get(dtype_name(dtype))
    if kind is None or (source | target | w) % dtype.itemsize:
        return host.minmax_decode(wire, out, start, block, eps)
    return _run.decode_rows(kind, source, n, m, target, w, start, min(block, m or 1), float(eps))


def minmax_combine(
    wire: Array, out: Array, count: int, dtype: DType, start: int, block: int, eps: float, op: str
) -> None:
    """See `host.minmax_combine`."""
    n, w = wire.shape
    source, target = wire.__array_interface__["data"][0], out.__array_interface__["data"][0]
    kind = _KINDS.get(dtype_name(dtype))
    if kind is None or (source | target | w) % dtype.itemsize:
        return host.minmax_combine(wire, out, count, dtype, start, block, eps, op)
    return _run.combine_rows(
        kind, source, n, op == "avg", count, target, w, start, min(block, count or 1), float(eps)
    )
