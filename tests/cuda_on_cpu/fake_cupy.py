"""Stands in for `cupy` on a machine without a GPU: the part of CuPy 14 that this project uses.

Its memory is the host's. Every operation on it is enqueued on a stream of the `Machine`, which decides when it
runs. Operations that CuPy would do silently and slowly, such as reaching into another device, are errors here.
"""

from __future__ import annotations

import math
import types
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import numpy as np

from . import fake_cuda as cuda
from .build import Kernels
from .machine import Block, Memory, Operation, running

__version__ = "14.2.0"


# Arrays -------------------------------------------------------------------------------------------------


class ndarray:
    """A NumPy array that only streams may touch, and the device memory that it lies in."""

    __hash__ = None

    def __init__(self, shape: Any, dtype: Any = float) -> None:
        shape, dtype = _shape(shape), np.dtype(dtype)
        memory = running().allocate(math.prod(shape) * dtype.itemsize, cuda.get_current_stream()._queue)
        self._set(memory, memory.block.bytes.view(dtype).reshape(shape), None)

    def _set(self, memory: Memory, host: np.ndarray, base: ndarray | None) -> None:
        self._memory, self._host, self.base = memory, host, base
        self.shape, self.dtype, self.strides = host.shape, host.dtype, host.strides
        self.size, self.nbytes, self.ndim, self.itemsize = host.size, host.nbytes, host.ndim, host.itemsize

    def _part(self, host: np.ndarray) -> ndarray:
        """Wrap `host`, which lies in the memory of this array."""
        return _over(self._memory, host, self if self.base is None else self.base)

    @property
    def flags(self) -> types.SimpleNamespace:
        flags = self._host.flags
        return types.SimpleNamespace(
            c_contiguous=flags.c_contiguous, f_contiguous=flags.f_contiguous, owndata=self.base is None
        )

    @property
    def data(self) -> cuda.MemoryPointer:
        block = self._memory.block
        return cuda.MemoryPointer(self._memory, self._host.ctypes.data - block.start if block.start else 0)

    @property
    def device(self) -> cuda.Device:
        return cuda.Device(self._memory.block.device)

    # Views need no device.

    def reshape(self, *shape: Any, order: str = "C") -> ndarray:
        host = self._host.reshape(*shape, order=order)
        if np.may_share_memory(host, self._host) or not self.size:
            return self._part(host)
        return self.copy().reshape(*shape, order=order)

    def ravel(self, order: str = "C") -> ndarray:
        return self.reshape(-1, order=order)

    def view(self, dtype: Any = None) -> ndarray:
        return self._part(self._host.view() if dtype is None else self._host.view(dtype))

    def _at(self, slices: Any) -> np.ndarray:
        slices = slices if isinstance(slices, tuple) else (slices,)
        basic = all(isinstance(each, (int, np.integer, slice, type(None), type(Ellipsis))) for each in slices)
        assert basic, f"index {slices!r}: this CuPy has basic indices only"
        return self._host[slices if Ellipsis in slices else (*slices, ...)]

    def __getitem__(self, slices: Any) -> ndarray:
        return self._part(self._at(slices))

    def __len__(self) -> int:
        return len(self._host)

    def __iter__(self) -> Iterator[ndarray]:
        return (self[i] for i in range(len(self)))

    # Work on the current stream.

    def __setitem__(self, slices: Any, value: Any) -> None:
        target = self._at(slices)
        if isinstance(value, np.ndarray) and value.shape:
            raise TypeError("Unsupported type <class 'numpy.ndarray'>")
        arrays = (self, value) if isinstance(value, ndarray) else (self,)
        source = np.broadcast_to(value._host if isinstance(value, ndarray) else value, target.shape)
        _enqueue("copy" if len(arrays) == 2 else "memset", lambda: np.copyto(target, source, "unsafe"), arrays)

    def fill(self, value: Any) -> None:
        self[...] = value

    def copy(self, order: str = "C") -> ndarray:
        out = empty(self.shape, self.dtype)
        out[...] = self
        return out

    # To and from the host.

    def get(self, stream: Any = None, order: str = "C", out: Any = None, blocking: bool = True) -> np.ndarray:
        return self._get("ndarray.get", stream, out, blocking)

    def _get(self, call: str, stream: Any = None, out: Any = None, blocking: bool = True) -> np.ndarray:
        if out is None:
            out = np.empty(self.shape, self.dtype)
        if not isinstance(out, np.ndarray):
            raise TypeError("Only numpy.ndarray can be obtained fromcupy.ndarray")
        if out.dtype != self.dtype:
            raise TypeError(f"{out.dtype} array cannot be obtained from {self.dtype} array")
        if out.shape != self.shape:
            raise ValueError(f"Shape mismatch. Expected shape: {self.shape}, actual shape: {out.shape}")
        if not out.flags.c_contiguous:
            raise RuntimeError("`out` cannot be specified when copying to non-contiguous ndarray")
        if not self.size:
            return out
        pinned = _pinned(out)
        target, source = out if pinned is None else _typed(pinned[1], out), self._host
        operation = _enqueue("copy to host", lambda: np.copyto(target, source), [self], pinned, stream)
        if pinned is None and not blocking:
            call += " to pageable memory"
        if pinned is None or blocking:
            running().wait([operation], call)
        return out

    def set(self, arr: np.ndarray, stream: cuda.Stream | None = None) -> None:
        if not isinstance(arr, np.ndarray):
            raise TypeError("Only numpy.ndarray can be set to cupy.ndarray")
        if self.dtype != arr.dtype:
            raise TypeError(f"{arr.dtype} array cannot be set to {self.dtype} array")
        if self.shape != arr.shape:
            raise ValueError(f"Shape mismatch. Old shape: {self.shape}, new shape: {arr.shape}")
        if not self.flags.c_contiguous:
            raise RuntimeError("Cannot set to non-contiguous array")
        pinned = _pinned(arr) if arr.flags.c_contiguous else None
        if pinned is None and self.size:  # the driver copies it aside first, and may wait for the stream to do so
            running().note_host_sync("ndarray.set from pageable memory")
        source, target = arr.copy() if pinned is None else _typed(pinned[1], arr), self._host
        _enqueue("copy from host", lambda: np.copyto(target, source), [self], pinned, stream)

    def item(self) -> Any:
        return self._get("ndarray.item").item()

    def tolist(self) -> Any:
        return self._get("ndarray.tolist").tolist()

    def __float__(self) -> float:
        return float(self._get("float(ndarray)"))

    def __int__(self) -> int:
        return int(self._get("int(ndarray)"))

    def __bool__(self) -> bool:
        return bool(self._get("bool(ndarray)"))

    def __repr__(self) -> str:  # CuPy's repr would synchronise, and so change the state that a debugger shows
        return f"<{self.dtype}{list(self.shape)} on device {self._memory.block.device}>"

    def __array__(self, dtype: Any = None) -> np.ndarray:
        raise TypeError(
            "Implicit conversion to a NumPy array is not allowed. Please use `.get()` to construct a NumPy array"
            " explicitly."
        )

    def __dlpack_device__(self) -> tuple[int, int]:
        return 1, 0  # a CPU tensor plays a CUDA tensor

    def __dlpack__(
        self, *, stream: Any = None, max_version: Any = None, dl_device: Any = None, copy: Any = None
    ) -> Any:
        running().settle(cuda.get_current_stream()._queue.tail)  # the reader's stream would wait for this one
        return self._host.__dlpack__(max_version=max_version)

    def __eq__(self, value: object) -> Any:
        raise NotImplementedError("this CuPy has no arithmetic")


def _over(memory: Memory, host: np.ndarray, base: ndarray | None = None) -> ndarray:
    x = ndarray.__new__(ndarray)
    x._set(memory, host, base)
    return x


def _shape(shape: Any) -> tuple[int, ...]:
    return tuple(shape) if isinstance(shape, (tuple, list)) else (int(shape),)


def _typed(data: np.ndarray, like: np.ndarray) -> np.ndarray:
    return data.view(like.dtype).reshape(like.shape)


def _pinned(host: np.ndarray) -> tuple[Block, np.ndarray] | None:
    """The block of pinned memory in which `host` lies, and these bytes; None if `host` is pageable."""
    try:
        block, data = running().find(host.ctypes.data, host.nbytes)
    except AssertionError:
        return None
    return (block, data) if block and block.device is None else None


def _enqueue(
    name: str,
    run: Callable[[], None],
    arrays: Iterable[ndarray],
    pinned: tuple[Block, np.ndarray] | None = None,
    stream: cuda.Stream | None = None,
) -> Operation:
    blocks = [x._memory.block for x in arrays] + ([] if pinned is None else [pinned[0]])
    return running().enqueue((stream or cuda.get_current_stream())._queue, name, run, blocks=blocks)


def empty(shape: Any, dtype: Any = float, order: str = "C") -> ndarray:
    return ndarray(shape, dtype)


def zeros(shape: Any, dtype: Any = float, order: str = "C") -> ndarray:
    return full(shape, 0, dtype)


def full(shape: Any, fill_value: Any, dtype: Any = None, order: str = "C") -> ndarray:
    out = empty(shape, np.asarray(fill_value).dtype if dtype is None else dtype)
    out.fill(fill_value)
    return out


def arange(start: Any, stop: Any = None, step: Any = 1, dtype: Any = None) -> ndarray:
    return asarray(np.arange(start, stop, step, dtype) if stop is not None else np.arange(start, dtype=dtype))


def asarray(a: Any, dtype: Any = None, order: Any = None, *, copy: Any = None, blocking: bool = False) -> ndarray:
    if isinstance(a, ndarray):
        assert dtype in (None, a.dtype), "this CuPy does not convert"
        return a
    host = np.array(a, dtype)  # CuPy stages it in pinned memory
    out = empty(host.shape, host.dtype)
    target = out._host
    _enqueue("copy from host", lambda: np.copyto(target, host), [out])
    return out


def ascontiguousarray(a: ndarray, dtype: Any = None) -> ndarray:
    return a if a.flags.c_contiguous else a.copy()


def asnumpy(a: Any, stream: Any = None, order: str = "C", out: Any = None, *, blocking: bool = True) -> Any:
    return a._get("asnumpy", stream, out, blocking) if isinstance(a, ndarray) else np.asarray(a)


def may_share_memory(a: ndarray, b: ndarray, max_work: Any = None) -> bool:
    return np.may_share_memory(a._host, b._host)


def from_dlpack(array: Any, *, device: Any = None, copy: Any = None) -> ndarray:
    """Treat an array in host memory as device memory at the same address."""
    host = array if isinstance(array, np.ndarray) else np.from_dlpack(array)
    return _over(running().share(host), host)


def get_default_memory_pool() -> cuda.MemoryPool:
    return cuda.MemoryPool()


# Kernels ------------------------------------------------------------------------------------------------


class RawModule:
    def __init__(self, code: str | None = None, *, path: str | None = None) -> None:
        if code is not None or not isinstance(path, str):
            raise TypeError("path is a str; `code` would be compiled with -ftz=true")
        self.code, self.options, self._architecture = cuda._loaded(path)
        self._kernels: Kernels | None = None

    def get_function(self, name: str) -> RawKernel:
        cuda._check_architecture(self._architecture)
        self._kernels = self._kernels or Kernels(self.code, self.options)
        return RawKernel._of(self._kernels, name, self._architecture)


class RawKernel:
    @classmethod
    def _of(cls, kernels: Kernels, name: str, architecture: str) -> RawKernel:
        kernel = cls.__new__(cls)
        kernel._kernels, kernel.name, kernel._architecture = kernels, name, architecture
        kernel.ptr = id(kernel)
        cuda._functions[kernel.ptr] = kernel
        return kernel

    def _arguments_at(self, pointers: int) -> tuple:
        return tuple(self._kernels.arguments_at(self.name, pointers))

    @property
    def kernel(self) -> RawKernel:
        """The function on the current device, which launches as this does."""
        return self

    def __call__(self, grid: tuple, block: tuple, args: tuple, *, shared_mem: int = 0, stream: Any = None) -> Any:
        if not isinstance(grid, tuple) or not isinstance(block, tuple):
            raise TypeError(f"grid and block are tuples, not {grid!r} and {block!r}")
        grid, block = (tuple(max(1, n) for n in (*extent, 1, 1)[:3]) for extent in (grid, block))
        limits = (2**31 - 1, 65535, 65535, 1024, 1024, 64)
        if math.prod(block) > 1024 or shared_mem > 48 * 1024 or any(map(int.__gt__, grid + block, limits)):
            raise RuntimeError(f"CUDA_ERROR_INVALID_VALUE: grid {grid}, block {block}, {shared_mem} shared bytes")
        cuda._check_architecture(self._architecture)  # the kernel is loaded on the current device
        what = f"kernel {self.name}"
        arrays = [arg for arg in args if isinstance(arg, ndarray)]
        blocks = [array._memory.block for array in arrays]
        values, kernels, machine = [_kernel_argument(arg) for arg in args], self._kernels, running()

        def run() -> None:
            kernels.launch(what.removeprefix("kernel "), grid, block, values, order=machine.order)
            for each in blocks:
                each.check_guard(what)

        _enqueue(what, run, arrays, stream=stream)


def _kernel_argument(arg: Any) -> Any:
    """The argument as CuPy passes it: 64 bits for an int or float, one byte for a bool, a scalar unchanged."""
    if isinstance(arg, ndarray):
        return int(arg.data.ptr)
    if isinstance(arg, np.ndarray):
        if arg.size != 1:
            raise TypeError(f"You are trying to pass a numpy.ndarray of shape {arg.shape} as a kernel parameter.")
        return arg.reshape(-1)[0]
    if isinstance(arg, bool):
        return np.bool_(arg)
    if not isinstance(arg, (int, float, np.generic)):
        raise TypeError(f"Unsupported type {type(arg)}")
    return arg
