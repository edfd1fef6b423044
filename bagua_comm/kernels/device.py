"""Kernels on a CUDA device: the .cu files beside this one, through CuPy. `host` specifies what each computes.

A call enqueues its kernel on CuPy's current stream and returns without waiting. Arrays are contiguous. Only the
first call of a size allocates memory. NVRTC compiles a file once for each dtype; the binary is kept in
~/.cache/bagua_comm if only its owner can write there, else until the process ends.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import math
import threading
from collections.abc import Callable, Iterator, Sequence
from contextvars import ContextVar
from importlib.resources import files
from pathlib import Path
from typing import Any, NamedTuple

import cupy
import numpy as np

from ..arrays import Array, DType, Scratch, address, dtype_name
from ..files import cache_folder, is_own_file, private_folder, write_at_once
from ..recording import current, unrecorded

_THREADS = 256
_ACCESS_BYTES = 16
_HELD = 16
"""The number of elements that a thread of minmax.cu keeps in registers."""

_WARP, _MOST_ROWS, _MOST_CTAS = 32, 65535, 2**31 - 1

LARGEST_CTA = 512
"""The largest number of threads in a CTA; twice that would need more registers than a multiprocessor has."""


# ---------------------------------------------------------------------------------------------------
# Sums
# ---------------------------------------------------------------------------------------------------


def reduce_rows(rows: Array, out: Array, op: str) -> None:
    """See `host.reduce_rows`."""
    p, m = rows.shape
    defines = ["INTEGER"] if rows.dtype.kind in "iu" else []
    _flat("reduce.cu", f"reduce_{op}", (rows, out, p), m, rows.dtype, defines)


# ---------------------------------------------------------------------------------------------------
# Element-wise steps of algorithms and optimizers
# ---------------------------------------------------------------------------------------------------


def scale(x: Array, factor: float) -> None:
    """See `host.scale`."""
    _elementwise("scale", x, x, float(x.dtype.type(factor)))


def add(x: Array, y: Array, out: Array) -> None:
    """See `host.add`."""
    _elementwise("add", x, x, y, out)


def subtract(x: Array, y: Array, out: Array) -> None:
    """See `host.subtract`."""
    _elementwise("subtract", x, x, y, out)


def loss(x: Array, decoded: Array, factor: float, out: Array) -> None:
    """See `host.loss`."""
    _elementwise("loss", x, x, decoded, out, float(factor))


def midpoint(x: Array, y: Array, out: Array) -> None:
    """See `host.midpoint`."""
    _elementwise("midpoint", x, x, y, out)


def blend(x: Array, y: Array, weight: float, out: Array) -> None:
    """See `host.blend`."""
    _elementwise("blend", x, x, y, out, float(weight))


def ring_difference(x: Array, left: Array, right: Array, weight: Array, out: Array) -> None:
    """See `host.ring_difference`."""
    _elementwise("ring_difference", x, x, left, right, weight, out)


def move_half(x: Array, received: Array, sent: Array, out: Array) -> None:
    """See `host.move_half`."""
    _elementwise("move_half", x, x, received, sent, out)


def advance(x: Array, mean: Array, snapshot: Array) -> None:
    """See `host.advance`."""
    _elementwise("advance", x, x, mean, snapshot)


def add_scaled(x: Array, y: Array, factor: float) -> None:
    """See `host.add_scaled`."""
    _elementwise("add_scaled", x, x, y, float(factor))


def sgd_step(
    x: Array, g: Array, buffer: Array, *, lr: float, momentum: float, weight_decay: float, nesterov: bool
) -> None:
    """See `host.sgd_step`."""
    _elementwise("sgd_step", x, x, g, buffer, float(lr), float(momentum), float(weight_decay), int(nesterov))


def adam_moments(
    x: Array, g: Array, m: Array, v: Array, *, betas: tuple[float, float], weight_decay: float
) -> None:
    """See `host.adam_moments`."""
    _elementwise("adam_moments", x, x, g, m, v, *map(float, betas), float(weight_decay))


def adam_step(x: Array, m: Array, v: Array, *, lr: float, eps: float, corrections: tuple[float, float]) -> None:
    """See `host.adam_step`."""
    first, second = corrections
    _elementwise("adam_step", x, x, m, v, lr / first, math.sqrt(second), float(eps))


# ---------------------------------------------------------------------------------------------------
# Casts
# ---------------------------------------------------------------------------------------------------


def cast_encode(chunks: Array, wire: Array, sent: DType) -> None:
    """See `host.cast_encode`."""
    n, m = chunks.shape
    _cast("encode", (chunks, wire, n), m, n, wire, chunks.dtype, sent)


def cast_decode(wire: Array, out: Array, sent: DType) -> None:
    """See `host.cast_decode`."""
    n, m = out.shape
    _cast("decode", (wire, out, n), m, n, wire, out.dtype, sent)


def cast_combine(wire: Array, out: Array, count: int, dtype: DType, sent: DType, op: str) -> None:
    """See `host.cast_combine`."""
    _cast("combine", (wire, out, len(wire)), count, 1, wire, dtype, sent, int(op == "avg"))


def _cast(
    name: str, args: tuple[Any, ...], m: int, rows: int, wire: Array, dtype: DType, sent: DType, *more: int
) -> None:
    if m and rows:
        grid, args = (_ctas(m, dtype), min(rows, _MOST_ROWS)), (*args, m, wire.shape[1], *more)
        _launch("cast.cu", name, dtype_name(dtype), grid, (_THREADS,), args, f"WIRE={dtype_name(sent)}")


# ---------------------------------------------------------------------------------------------------
# Block fixed point
# ---------------------------------------------------------------------------------------------------


def fixed_exponents(x: Array, bounds: Array, fields: Array) -> None:
    """See `host.fixed_exponents`."""
    _fixed("exponents", x.dtype, bounds, (x, bounds, fields))


def fixed_add(x: Array, bounds: Array, fields: Array, bits: int, total: Array, *, first: bool) -> None:
    """See `host.fixed_add`."""
    _fixed("add", x.dtype, bounds, (x, bounds, fields, total, bits, int(first)))


def fixed_mean(total: Array, bounds: Array, fields: Array, bits: int, divisor: int, out: Array) -> None:
    """See `host.fixed_mean`."""
    _fixed("mean", out.dtype, bounds, (total, bounds, fields, out, bits, divisor))


def _fixed(name: str, dtype: DType, bounds: Array, args: tuple[Any, ...]) -> None:
    """Launch a kernel of fixed.cu: a warp for each block."""
    blocks = bounds.size - 1
    if blocks:
        warps = _THREADS // _WARP
        grid = (min(-(-blocks // warps), _MOST_CTAS),)
        _launch("fixed.cu", name, dtype_name(dtype), grid, (_WARP, warps), (*args, blocks))


# ---------------------------------------------------------------------------------------------------
# MinMaxUInt8
# ---------------------------------------------------------------------------------------------------


_LAYOUT = np.dtype(
    [
        (name, np.int64)
        for name in ("rows", "count", "block", "blocks", "segments", "all_segments", "start", "stride")
    ]
    + [("eps", np.float32)],
    align=True,
)
"""The struct `Layout` of minmax.cu."""


class Partition(NamedTuple):
    """The division of rows of elements, cut into blocks, among the threads of minmax.cu."""

    grid: tuple[int, int]
    cta: tuple[int, int]
    """Threads in a team, teams in a CTA."""

    segments: int
    """The number of segments in a block."""

    ranges: int
    """The number of ranges of segments in all."""

    layout: np.ndarray[Any, Any]
    """The bytes of a `_LAYOUT`, passed to a kernel by value: one argument instead of nine. As an array of one
    element without fields: for a dtype with fields, each launch would take 10 us more."""


@functools.lru_cache(maxsize=1024)
def partition_of(rows: int, count: int, block: int, start: int, stride: int, eps: float) -> Partition:
    """How minmax.cu divides `rows` of `count` elements; for the other arguments, see `_LAYOUT`."""
    block = min(block, count)
    blocks, threads = -(-count // block), -(-block // _HELD)
    team = min(1 << (threads - 1).bit_length(), LARGEST_CTA)
    segments = -(-threads // team)
    teams = _THREADS // team if team <= _WARP else 1
    ctas = -(-blocks * segments // teams)
    values = rows, count, block, blocks, segments, blocks * segments, start, stride, eps
    layout = np.array([values], _LAYOUT).view(np.dtype(f"V{_LAYOUT.itemsize}"))
    grid = (min(ctas, _MOST_CTAS), min(rows, _MOST_ROWS))
    return Partition(grid, (team, teams), segments, rows * blocks * segments, layout)


def minmax_encode(chunks: Array, wire: Array, start: int, block: int, eps: float) -> None:
    """See `host.minmax_encode`."""
    n, m = chunks.shape
    if n * m:
        _encode("encode", (chunks,), wire, partition_of(n, m, block, start, wire.shape[1], eps), chunks.dtype)


def minmax_combine(
    wire: Array, out: Array, count: int, dtype: DType, start: int, block: int, eps: float, op: str
) -> None:
    """See `host.minmax_combine`."""
    if count:
        partition = partition_of(1, count, block, start, out.shape[1], eps)
        _encode("combine", (wire, len(wire), int(op == "avg")), out, partition, dtype)


def minmax_decode(wire: Array, out: Array, start: int, block: int, eps: float) -> None:
    """See `host.minmax_decode`."""
    n, m = out.shape
    if n * m:
        partition = partition_of(n, m, block, start, wire.shape[1], eps)
        grid, cta, layout = partition.grid, partition.cta, partition.layout
        _launch("minmax.cu", "decode", dtype_name(out.dtype), grid, cta, (wire, out, layout))


def _encode(name: str, source: tuple[Any, ...], wire: Array, partition: Partition, dtype: DType) -> None:
    """Encode the `source` of kernel `name`, in two passes if a block is too long for a CTA."""
    grid, cta, layout, element = partition.grid, partition.cta, partition.layout, dtype_name(dtype)
    if partition.segments == 1:
        is_wide = name == "combine" and math.prod(cta) > _THREADS  # `combine` is compiled for fewer threads
        _launch("minmax.cu", f"{name}_wide" if is_wide else name, element, grid, cta, (*source, wire, layout))
        return
    recording = current()
    if recording is not None:
        recording.is_complete = False  # the memory for ranges is another one on other streams
    stream = cupy.cuda.get_current_stream()
    ranges = _scratch(wire.device.id, stream.ptr, threading.get_ident()).take(
        "ranges", (partition.ranges, 2), np.float32, like=wire
    )
    _launch("minmax.cu", f"{name}_ranges", element, grid, cta, (*source, ranges, layout))
    _launch("minmax.cu", f"{name}_segments", element, grid, cta, (*source, ranges, wire, layout))


@functools.cache
def _scratch(device: int, stream: int, thread: int) -> Scratch:
    """Scratch memory between kernels of a stream; one for each thread, since their launches may interleave.

    It is never freed, since a CUDA graph may have captured it. It takes 8 bytes for each 8192 elements of the
    longest array, for each stream address and thread id. Both are reused after their owner ends, so there are no
    more of them than were in use at one time.
    """
    return Scratch()


# ---------------------------------------------------------------------------------------------------
# Int4
# ---------------------------------------------------------------------------------------------------

_GROUP, _WARPS, _TILE = 32, 4, 4096

_INT4 = np.dtype([(name, np.int64) for name in ("rows", "count", "block", "blocks", "rotate", "start", "stride", "mask")])


@functools.lru_cache(maxsize=1024)
def _int4_partition(rows: int, count: int, block: int, rotate: int, start: int, stride: int, own: bool) -> Any:
    blocks = -(-count // block)
    layout = np.array([(rows, count, block, blocks, rotate, start, stride, 15)], _INT4).view(f"V{_INT4.itemsize}")
    cta = (_WARP, _WARPS) if own else (LARGEST_CTA,)
    ctas = -(-blocks // (_WARP * _WARPS)) if own else -(-blocks * block // _TILE)
    return (min(ctas, _MOST_CTAS), min(rows, _MOST_ROWS)), cta, layout


def int4_encode(chunks, wire, start, block, rotate, draws=None):
    n, m = chunks.shape
    if n * m:
        own = block == _GROUP and rotate == _GROUP
        _int4("encode", own, n, m, block, rotate, start, wire.shape[1], chunks.dtype, (chunks, wire), draws)


def int4_decode(wire, out, start, block, rotate):
    n, m = out.shape
    if n * m:
        own = block == _GROUP and rotate == _GROUP
        _int4("decode", own, n, m, block, rotate, start, wire.shape[1], out.dtype, (wire, out), None)


def int4_combine(wire, out, count, dtype, start, block, rotate, op, draws=None):
    if count:
        args = wire, len(wire), int(op == "avg"), out
        _int4("combine", block == _GROUP, 1, count, block, rotate, start, out.shape[1], dtype, args, draws)


def _int4(name, own, n, m, block, rotate, start, stride, dtype, args, draws):
    grid, cta, layout = _int4_partition(n, m, block, rotate, start, stride, own)
    more = ()
    if draws is not None:
        name += "_stochastic"
        more = draws.key & 0xffffffff, draws.key >> 32, draws.counter & 0xffffffff
    _launch("int4.cu", name if own else name.replace("code", "code_any").replace("combine", "combine_any"), dtype_name(dtype), grid, cta, (*args, layout, *more))


# ---------------------------------------------------------------------------------------------------
# Launches
# ---------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def before_launch(observer: Callable[[str], object]) -> Iterator[None]:
    """In the body of `with`, call `observer` with the name of each kernel just before this thread launches it.

    Threads started in the body are not observed. Observers may be nested; the outer one is called first.
    """
    token = _observers.set((*_observers.get(), observer))
    try:
        yield
    finally:
        _observers.reset(token)


_observers: ContextVar[tuple[Callable[[str], object], ...]] = ContextVar("observers of launches", default=())


def _elementwise(name: str, like: Array, *args: Any) -> None:
    _flat("elementwise.cu", name, args, like.size, like.dtype)


def _flat(
    file: str, name: str, args: Sequence[Any], count: int, dtype: DType, defines: Sequence[str] = ()
) -> None:
    """Launch a kernel with one thread for each 16 bytes of `count` elements."""
    if count:
        grid, args = (_ctas(count, dtype),), (*args, count)
        _launch(file, name, dtype_name(dtype), grid, (_THREADS,), args, *defines)


def _ctas(count: int, dtype: DType) -> int:
    return min(-(-count * dtype.itemsize // (_ACCESS_BYTES * _THREADS)), _MOST_CTAS)


def _launch(
    file: str,
    name: str,
    element: str,
    grid: tuple[int, ...],
    cta: tuple[int, ...],
    args: tuple[Any, ...],
    *defines: str,
) -> None:
    """Launch a kernel on the current device and stream."""
    kernel = _loaded(cupy.cuda.runtime.getDevice(), file, name, element, *defines)
    _observed(name, kernel, grid, cta, args)
    recording = current()
    if recording is not None:
        args = tuple(address(arg) if isinstance(arg, cupy.ndarray) else arg for arg in args)
        recording.steps.append(functools.partial(_observed, name, kernel, grid, cta, args))


def _observed(name: str, kernel: Any, grid: tuple[int, ...], cta: tuple[int, ...], args: tuple[Any, ...]) -> None:
    for observer in _observers.get():
        unrecorded(functools.partial(observer, name))  # a replay calls the observers again
    kernel(grid, cta, args)


@functools.cache
def _loaded(device: int, file: str, name: str, element: str, *defines: str) -> Any:
    # The function itself: CuPy's RawKernel would look it up for the current device at each launch.
    return _module(cupy.cuda.Device(device).compute_capability, file, element, *defines).get_function(name).kernel


@functools.cache
def _module(architecture: str, file: str, element: str, *defines: str) -> Any:
    # CuPy would compile `code=` with -ftz=true, which turns denormal numbers into zero.
    return cupy.RawModule(path=str(_compiled(architecture, file, compile_options(element, *defines))))


def _compiled(architecture: str, file: str, options: tuple[str, ...]) -> Path:
    """The binary of a .cu file for this architecture: from disk, or compiled by NVRTC."""
    code = source(file)
    what = repr((code, options, architecture, cupy.cuda.nvrtc.getVersion()))
    digest = hashlib.blake2b(what.encode(), digest_size=12).hexdigest()
    name = f"{Path(file).stem}-sm_{architecture}-{digest}.cubin"
    path = _cache_folder() / name
    if not is_own_file(path):
        binary, _ = cupy.cuda.compiler.compile_using_nvrtc(code, options, filename=file)
        binary = binary if isinstance(binary, bytes) else binary.encode()
        binary += b"\0"  # CuPy cuts off the last byte
        try:
            write_at_once(path, binary, mode=0o600)
        except OSError:  # such as a full disk
            path = private_folder() / name
            write_at_once(path, binary, mode=0o600)
    return path


@functools.cache
def _cache_folder() -> Path:
    return cache_folder("bagua_comm")


def source(file: str) -> str:
    """The text of a .cu file and of the header it includes."""
    folder = files(__package__)
    header = folder.joinpath("numbers.cuh").read_text()
    return folder.joinpath(file).read_text().replace('#include "numbers.cuh"', header)


def compile_options(element: str, *defines: str) -> tuple[str, ...]:
    """NVRTC's options: no fused multiply-add, so that the bytes are the host's."""
    return ("--std=c++17", "-fmad=false", f"-DELEMENT={element}", *(f"-D{define}" for define in defines))
