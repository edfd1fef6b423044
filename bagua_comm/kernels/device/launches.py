"""How kernels are compiled and launched. NVRTC compiles a .cu file once for each dtype.

The binary is kept in ~/.cache/bagua_comm if only its owner can write there, else until the process ends.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextvars import ContextVar
from importlib.resources import files
from pathlib import Path

import cupy
import numpy as np
import numpy.typing as npt

from ...arrays import Array, DType, address, check_device, dtype_name
from ...execution.cuda import SharedScratch
from ...execution.recording import current, unrecorded
from ...system.files import cache_folder, is_own_file, private_folder, write_at_once

THREADS, WARP = 256, 32
"""The usual number of threads in a CTA, and that in a warp."""

LARGEST_CTA = 512
"""The largest number of threads in a CTA; twice that would need more registers than a multiprocessor has."""

_ACCESS_BYTES = 16
_MOST_ROWS, _MOST_CTAS = 65535, 2**31 - 1


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


def struct(*names: str, floats: Sequence[str] = ()) -> Callable[..., npt.NDArray[np.void]]:
    """A struct of a .cu file: a function of its values that returns a kernel's argument, passed by value.

    The argument is an array of one element without fields: for a dtype with fields, each launch would take 10 us
    more.

    Args:
        names: The names of its integers, of 64 bits.
        floats: The names of float32 numbers after them.
    """
    fields = [(name, np.int64) for name in names] + [(name, np.float32) for name in floats]
    dtype = np.dtype(fields, align=True)
    passed = np.dtype(f"V{dtype.itemsize}")
    return lambda *values: np.array([values], dtype).view(passed)


def launch_flat(
    file: str, name: str, args: Sequence[object], count: int, dtype: DType, defines: Sequence[str] = ()
) -> None:
    """Launch a kernel with one thread for each 16 bytes of `count` elements."""
    if count:
        grid, args = grid_of(ctas_of(count, dtype)), (*args, count)
        launch(file, name, dtype_name(dtype), grid, (THREADS,), args, *defines)


def ctas_of(count: int, dtype: DType) -> int:
    """The number of CTAs with one thread for each 16 bytes of `count` elements."""
    return -(-count * dtype.itemsize // (_ACCESS_BYTES * THREADS))


def grid_of(ctas: int, rows: int = 1) -> tuple[int, int]:
    """A grid of CTAs for each row, or as many as CUDA allows; kernels go on with the rest."""
    return min(ctas, _MOST_CTAS), min(rows, _MOST_ROWS)


def launch(
    file: str,
    name: str,
    element: str,
    grid: tuple[int, ...],
    cta: tuple[int, ...],
    args: tuple[object, ...],
    *defines: str,
) -> None:
    """Launch a kernel on the current device and stream.

    Raises:
        ArrayError: An array is on another device.
    """
    device = cupy.cuda.runtime.getDevice()
    for arg in args:
        if isinstance(arg, cupy.ndarray) and arg.data.device_id != device:
            check_device(name, "an array", arg)
    kernel = loaded(device, file, name, element, *defines)
    _observe(name)
    kernel(grid, cta, args)
    recording = current()
    if recording is not None:
        recording.steps.append(_Launch(name, kernel, grid, cta, args))


def _observe(name: str) -> None:
    for observer in _observers.get():
        unrecorded(functools.partial(observer, name))  # a replay calls the observers again


class _Launch:
    """A launch to be repeated, with its arguments in memory as the driver reads them.

    It takes the host half as long as a launch by CuPy, which converts the arguments each time. It holds the
    addresses of arrays, and keeps no array alive.
    """

    def __init__(
        self,
        name: str,
        kernel: cupy.cuda.Function,
        grid: tuple[int, ...],
        cta: tuple[int, ...],
        args: tuple[object, ...],
    ) -> None:
        self._name, self._kernel = name, kernel
        self._values = [np.array(address(arg) if isinstance(arg, cupy.ndarray) else arg) for arg in args]
        self._pointers = np.array([value.ctypes.data for value in self._values], np.uintp)
        self._extents = *(*grid, 1, 1)[:3], *(*cta, 1, 1)[:3]
        self._table = self._pointers.ctypes.data

    def __call__(self) -> None:
        _observe(self._name)
        stream = cupy.cuda.get_current_stream().ptr
        cupy.cuda.driver.launchKernel(self._kernel.ptr, *self._extents, 0, stream, self._table, 0)


def between_kernels(key: str, shape: tuple[int, ...], dtype: npt.DTypeLike, wire: Array) -> Array:
    """An uninitialised array through which a kernel passes results to later ones that write to `wire`.

    It belongs to the memory of `wire`, and is freed with it. Calls that write there come one after the other in
    any case, also those on several streams and in CUDA graphs. So a captured call allocates nothing if one was
    made before. If `wire` lies in a scratch, it is memory of that scratch, whose users are ordered too: where a
    wire is in there changes as the scratch grows. A call that has such an array is not replayed: replays may come
    on other streams, and the memory of a wire is in the order of one.
    """
    recording = current()
    if recording is not None:
        recording.is_complete = False
    scratch = SharedScratch.of(wire)
    if scratch is not None:
        return scratch.take(f"between kernels: {key}", shape, dtype, like=wire)
    root = wire if wire.base is None else wire.base
    found = _between.get(id(root))
    if found is None:
        found = _between[id(root)] = {}
        weakref.finalize(root, _free, _between, id(root)).atexit = False
    place = address(wire)
    if place not in found:
        found[place] = SharedScratch()
    return found[place].take(key, shape, dtype, like=wire)


_between: dict[int, dict[int, SharedScratch]] = {}
"""The memory of `between_kernels`: of an array that owns its memory, by its id, and of an address in it."""


def _free(between: dict[int, dict[int, SharedScratch]], root: int) -> None:
    for scratch in between.pop(root).values():
        scratch.clear()


@functools.cache
def loaded(device: int, file: str, name: str, element: str, *defines: str) -> cupy.cuda.Function:
    """A kernel of a .cu file on a device, compiled for the dtype that is called `element`."""
    # The function itself: CuPy's RawKernel would look it up for the current device at each launch.
    return _module(cupy.cuda.Device(device).compute_capability, file, element, *defines).get_function(name).kernel


@functools.cache
def _module(architecture: str, file: str, element: str, *defines: str) -> cupy.RawModule:
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
