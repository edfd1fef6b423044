"""Arrays of NumPy and CuPy, views of other libraries' arrays, and reusable scratch memory.

`Array` is a NumPy or a CuPy array. `as_array` views an array of another library as one, and `returned` converts a
result to the library of the argument, such as a tensor for a tensor. That imports no library: the caller already
has. CuPy and ml_dtypes are imported only for their own arrays.
"""

from __future__ import annotations

import functools
import hashlib
import importlib
import itertools
import math
import sys
from collections.abc import Hashable, Sequence
from types import ModuleType
from typing import Any, Literal, Protocol, TypeAlias, TypeGuard, TypeVar

import numpy as np
import numpy.typing as npt

from .errors import ArrayError, UnsupportedError
from .objects import refusals
from .objects.caching import BoundedCache

Array: TypeAlias = Any
DType: TypeAlias = np.dtype[Any]


class SupportsDLPack(Protocol):
    """An array of any library: NumPy, CuPy, PyTorch, JAX and others."""

    def __dlpack__(self) -> Any: ...


AnyArray: TypeAlias = SupportsDLPack | np.generic
"""The arrays that calls take, and NumPy's scalars."""

A = TypeVar("A", bound=AnyArray)
"""The type of an argument and of the result."""

S = TypeVar("S", bound=np.generic)
"""The type of the elements of a NumPy array."""

Elements: TypeAlias = np.ndarray[Any, np.dtype[S]] | S
"""NumPy arrays of any shape, and scalars. A result of another shape is an `NDArray[S]`."""

Op: TypeAlias = Literal["sum", "avg", "prod", "min", "max", "band", "bor", "bxor"]
"""A reduction."""

Counts: TypeAlias = Sequence[int] | None
"""Numbers of elements of the parts of each rank, (p,); equal ones if None."""

OpOrder: TypeAlias = Literal["rank", "any"]
"""The order in which floats are added and multiplied: rank order, or any order that MPI chooses."""

LinearOp: TypeAlias = Literal["sum", "avg"]
"""A linear reduction, as codecs and gradients need."""

INTEGERS = frozenset({f"{sign}int{bits}" for sign in ("", "u") for bits in (8, 16, 32, 64)})
FLOATS = frozenset({"float16", "bfloat16", "float32", "float64"})
REDUCED_PRECISION = frozenset({"float16", "bfloat16"})
COMPLEX = frozenset({"complex64", "complex128"})
MOVABLE = INTEGERS | FLOATS | COMPLEX | {"bool"}

_NAMES = {np.dtype(name): name for name in sorted(MOVABLE - {"bfloat16"})}

ARITHMETIC_OPS: tuple[Op, ...] = ("sum", "avg", "prod", "min", "max")
BITWISE_OPS: tuple[Op, ...] = ("band", "bor", "bxor")
UFUNCS: dict[str, np.ufunc] = {
    "sum": np.add,
    "avg": np.add,
    "prod": np.multiply,
    "min": np.minimum,
    "max": np.maximum,
    "band": np.bitwise_and,
    "bor": np.bitwise_or,
    "bxor": np.bitwise_xor,
}
"""NumPy's function for each reduction of two arrays; an average is divided afterwards."""


def bfloat16() -> DType:
    """NumPy's dtype for bfloat16, from ml_dtypes."""
    import ml_dtypes

    dtype: DType = np.dtype(ml_dtypes.bfloat16)
    return dtype


def dtype_named(name: str) -> DType:
    """The dtype of this name, "bfloat16" included."""
    return bfloat16() if name == "bfloat16" else np.dtype(name)


def is_movable(dtype: DType) -> bool:
    """Whether arrays of this dtype can be sent: numbers in native byte order."""
    return dtype in _NAMES or (dtype_name(dtype) == "bfloat16" and dtype.isnative)


@functools.lru_cache(maxsize=256)
def dtype_name(dtype: DType) -> str:
    """The name of a dtype, cached: NumPy takes microseconds to make `dtype.name`."""
    return str(dtype.name)


def library(x: Array) -> str:
    """Name the library `x` belongs to: "numpy" or "cupy".

    Raises:
        UnsupportedError: `x` is neither.
    """
    if isinstance(x, np.ndarray):
        return "numpy"
    cupy = sys.modules.get("cupy")
    if cupy is not None and isinstance(x, cupy.ndarray):
        return "cupy"
    raise UnsupportedError(f"expected a NumPy or CuPy array, got {refusals.type_name(x)}")


def namespace(x: Array) -> ModuleType:
    """The module of `x`: numpy or cupy; for a subclass of NumPy's array, what it names itself."""
    if type(x) is not np.ndarray and isinstance(x, np.ndarray):
        own: ModuleType | None = getattr(x, "__array_namespace__", lambda: None)()
        return own or np
    return sys.modules[library(x)]


def as_array(x: Any) -> Array:
    """View `x` as a NumPy or CuPy array. Shares memory with `x`; never copies.

    Takes NumPy and CuPy arrays, NumPy scalars, PyTorch tensors, and anything with `__dlpack__` in host or CUDA
    memory.

    Raises:
        UnsupportedError: `x` belongs to no library known here, or its memory or dtype cannot be viewed.
    """
    if type(x) is np.ndarray:
        return x
    if isinstance(x, np.ma.MaskedArray):
        raise UnsupportedError("a masked array would lose its mask; pass its data and its mask separately")
    if isinstance(x, np.ndarray):
        return x.view(np.ndarray)
    if isinstance(x, np.generic):
        return np.asarray(x)
    cupy = sys.modules.get("cupy")
    if cupy is not None and isinstance(x, cupy.ndarray):
        return x
    if is_tensor(x):
        return tensor_as_array(x, sys.modules["torch"])
    if not hasattr(x, "__dlpack__"):
        raise UnsupportedError(refusals.of_type(x))
    try:
        device = int(x.__dlpack_device__()[0])
        if device == _HOST:
            return _host_as_array(x)
        if device == _CUDA:
            return importlib.import_module("cupy").from_dlpack(x)
    except Exception as exc:
        raise UnsupportedError(refusals.of_failure(x, exc)) from exc
    raise UnsupportedError(refusals.of_memory(x, device))


def is_tensor(x: object) -> TypeGuard[Any]:
    """Whether `x` is a tensor of PyTorch."""
    tensors = getattr(sys.modules.get("torch"), "Tensor", None)  # a module of that name may lack it (yet)
    return tensors is not None and isinstance(x, tensors)


_HOST, _CUDA = 1, 2
"""DLPack's device types."""


def _host_as_array(x: Any) -> Array:
    if str(getattr(x, "dtype", "")) != "bfloat16":
        return np.from_dlpack(x)
    value = np.asarray(x)  # DLPack carries no bfloat16 into NumPy
    value.flags.writeable = False  # it may be a copy
    return value


def has_memory(x: object) -> bool:
    """Whether the elements of a tensor of PyTorch are in memory; those of a DTensor, for instance, are not.

    DLPack gives such a tensor the address 0, and NumPy then makes new memory, of any contents.
    """
    return is_tensor(x) and (x.numel() == 0 or x.data_ptr() != x.storage_offset() * x.itemsize)


def tensor_as_array(tensor: Any, torch: ModuleType) -> Array:
    """View a tensor of PyTorch as an array; see `as_array`."""
    is_bfloat16 = tensor.dtype is torch.bfloat16
    try:
        if (is_bfloat16 or tensor.is_cuda) and (tensor.requires_grad or tensor.is_neg()):
            raise BufferError("its memory alone would lose its history or its sign")
        if not has_memory(tensor):
            tensor = _waited_for(tensor)
        lent = tensor.view(torch.int16) if is_bfloat16 else tensor  # its bits: only PyTorch has the dtype
        if tensor.is_cuda:
            with torch.cuda.device(tensor.get_device()):  # PyTorch exports tensors of its current device
                value = importlib.import_module("cupy").from_dlpack(lent)
        else:
            value = lent.numpy()
    except Exception as exc:
        raise UnsupportedError(refusals.of_tensor(tensor, exc)) from exc
    return value.view(bfloat16()) if is_bfloat16 else value


def _waited_for(x: object) -> object:
    """Return the tensor that a result of a functional collective of torch.distributed stands for."""
    if is_tensor(x) and hasattr(x, "trigger_wait"):
        return x.trigger_wait()
    raise BufferError(
        "has no memory of its own, or it was freed; pass a plain tensor: of a DTensor, x.to_local()"
    )


def returned(x: Any, result: Array) -> Any:
    """Convert `result`, a new array, to the library of `x`. Shares memory where the library allows it.

    An array of a library that has no `__array_namespace__` stays a NumPy or CuPy array.
    """
    if isinstance(x, np.generic):
        return result[()]
    if isinstance(x, np.ndarray):
        return result
    if is_tensor(x):
        return as_tensor(result, sys.modules["torch"])
    if not hasattr(x, "__array_namespace__"):
        return result
    library = x.__array_namespace__()
    if dtype_name(result.dtype) == "bfloat16":
        return library.asarray(result)
    return library.from_dlpack(result)


def as_tensor(x: Array, torch: ModuleType) -> Any:
    """View a NumPy or CuPy array as a tensor of PyTorch. Shares memory; never copies."""
    if dtype_name(x.dtype) == "bfloat16":
        return as_tensor(x.view(np.int16), torch).view(torch.bfloat16)
    return torch.from_dlpack(x)


def is_contiguous(x: Array) -> bool:
    """Whether `x` is one C-ordered piece of memory and, on the host, its elements are aligned.

    For instance, elements of `numpy.frombuffer(data, np.float32, offset=1)` are not; MPI has no type for them.
    """
    flags = x.flags
    return bool(flags.c_contiguous and (not isinstance(x, np.ndarray) or flags.aligned))


def contiguous(x: Array) -> Array:
    """`x` itself if it is contiguous; else a contiguous copy."""
    return x if is_contiguous(x) else x.copy(order="C")


def to_host(x: Array) -> Array:
    """`x` itself if it is in host memory; else a copy there, for which the host waits."""
    return x if isinstance(x, np.ndarray) else x.get()


def digest(x: Array) -> bytes:
    """A 128-bit BLAKE2 hash of the dtype, shape and bytes of `x`."""
    found = hashlib.blake2b(f"{dtype_name(x.dtype)}{x.shape}".encode(), digest_size=16)
    found.update(memoryview(as_bytes(contiguous(to_host(x)))))
    return found.digest()


def empty(shape: tuple[int, ...], dtype: npt.DTypeLike, *, like: Array) -> Array:
    """A new uninitialised array of the library that `like` belongs to."""
    return namespace(like).empty(shape, dtype)


def empty_like(x: Array) -> Array:
    """A new uninitialised array of the shape, dtype and library of `x`."""
    return namespace(x).empty(x.shape, x.dtype)


def zeros_like(x: Array) -> Array:
    """A new array of zeros, of the shape, dtype and library of `x`."""
    return namespace(x).zeros(x.shape, x.dtype)


def overlap(a: Array, b: Array) -> bool:
    """Whether the memory of two arrays may overlap (by their bounds, so interleaved arrays count)."""
    if isinstance(a, np.ndarray) and isinstance(b, np.ndarray):
        if a.base is None and b.base is None:  # both own their memory
            return a is b and a.size > 0
        return np.may_share_memory(a, b)
    if library(a) != library(b):
        return False
    return bool(namespace(a).may_share_memory(a, b))


def share_elements(a: Array, b: Array) -> bool:
    """Whether two arrays share an element; `overlap` on a device, or where that is too hard to compute."""
    if not overlap(a, b):
        return False
    try:
        return not isinstance(a, np.ndarray) or np.shares_memory(a, b, max_work=10_000)  # type: ignore[arg-type]
    except np.exceptions.TooHardError:
        return True


def repeats(shape: Sequence[int], strides: Sequence[int], width: int = 1) -> bool:
    """Whether elements of an array share memory, as after `numpy.broadcast_to`, or in overlapping windows.

    Args:
        shape: The lengths of the axes.
        strides: The strides of the axes, in elements or in bytes.
        width: The size of an element, in that unit.
    """
    end = width  # of the memory that the axes so far cover
    for stride, n in sorted((abs(stride), n) for n, stride in zip(shape, strides, strict=True) if n > 1):
        if stride < end:
            return 0 not in shape
        end += stride * (n - 1)
    return False


def same_memory(a: Array, b: Array) -> bool:
    """Whether two contiguous arrays start at one address and have one size."""
    return a is b or (address(a) == address(b) and a.nbytes == b.nbytes)


def address(x: Array) -> int:
    """The address of the first element of `x`."""
    if isinstance(x, np.ndarray):
        return int(x.__array_interface__["data"][0])
    return int(x.data.ptr)


def check_device(call: str, name: str, x: Array, device: int | None = None) -> None:
    """Check that `x`, argument `name` of `call`, is on the current device of this thread; host arrays pass.

    Args:
        call: The call that an error names.
        name: The argument that an error names.
        x: An array.
        device: The device of the communicator, which must be the current one; None if any will do.

    Raises:
        ArrayError: It is on another device.
    """
    if isinstance(x, np.ndarray):
        return
    current, mine = sys.modules["cupy"].cuda.runtime.getDevice(), x.data.device_id
    expected, whose = (
        (current, "the current one of this thread") if device is None else (device, "its communicator's")
    )
    if mine != expected:
        raise ArrayError(
            f"{call}: {name} is on CUDA device {mine}, expected device {expected}, {whose}; copy it there, or "
            "use a process for each device"
        )
    if current != expected:
        raise ArrayError(
            f"{call}: the current CUDA device of this thread is {current}, expected {expected}, {whose}; make "
            f"the call inside `with cupy.cuda.Device({expected}):`"
        )


def as_bytes(x: Array) -> Array:
    """View contiguous `x` as a row of bytes."""
    return x.reshape(-1).view(np.uint8)


def as_buffer(x: Array) -> Array:
    """View contiguous host array `x` as one that exports a buffer: bfloat16 as its bytes."""
    return x if x.dtype.kind != "V" else as_bytes(x)


def rows(x: Array, n: int) -> Array:
    """View contiguous `x` as `n` equal rows, (n, size // n)."""
    return x.reshape(n, x.size // n)


def parts(x: Array, counts: Sequence[int]) -> list[Array]:
    """View contiguous `x` as consecutive parts of these sizes."""
    flat, ends = x.reshape(-1), itertools.accumulate(counts)
    return [flat[end - count : end] for count, end in zip(counts, ends, strict=True)]


def text_row(text: str, nbytes: int) -> Array:
    """The first `nbytes` bytes of `text`, zero-padded; for a table of the texts of all ranks."""
    return np.frombuffer(text.encode()[:nbytes].ljust(nbytes, b"\0"), np.uint8).copy()


def texts_of(table: Array) -> list[str]:
    """The texts in the rows of a table; see `text_row`.

    >>> texts_of(np.stack([text_row("allreduce", 12), text_row("barrier", 12)]))
    ['allreduce', 'barrier']
    """
    return [row.tobytes().rstrip(b"\0").decode(errors="replace") for row in table]


def extent(x: Array) -> tuple[int, int]:
    """The addresses at which the memory of `x` begins and ends, gaps included."""
    start = address(x)
    if x.flags.c_contiguous:
        return start, start + x.nbytes
    steps = [(length - 1) * stride for length, stride in zip(x.shape, x.strides, strict=True)] if x.size else []
    low, high = start + sum(min(step, 0) for step in steps), start + sum(max(step, 0) for step in steps)
    return low, high + (x.itemsize if x.size else 0)


def as_real(x: Array, op: str) -> Array:
    """View complex numbers as real and imaginary parts if `op` works on each part alone; else `x` itself."""
    if x.dtype.kind != "c" or op == "prod":
        return x
    return x.reshape(-1).view(np.float32 if x.dtype.itemsize == 8 else np.float64)


def check_reduction(call: str, op: str, dtype: DType) -> None:
    """Check that `op` is a reduction of `dtype`.

    Raises:
        ArrayError: `op` is not a reduction.
        UnsupportedError: There is no such reduction for this dtype.
    """
    if op not in ARITHMETIC_OPS and op not in BITWISE_OPS:
        wanted = ", ".join(ARITHMETIC_OPS + BITWISE_OPS)
        name = {"mean": "avg", "average": "avg"}.get(str(op).lower(), str(op).lower())
        hint = f"; did you mean op={name!r}?" if name in ARITHMETIC_OPS + BITWISE_OPS else ""
        if not isinstance(op, str):
            hint = "; ops are strings: MPI.SUM is op='sum'"
        raise ArrayError(f"{call}: op is {op!r}, expected one of {wanted}{hint}")
    name = dtype_name(dtype)
    if name in INTEGERS or (name in FLOATS and op in ARITHMETIC_OPS):
        return
    if name in COMPLEX:
        if op in ("sum", "avg", "prod"):
            return
        hint = "; reduce magnitudes, or a view of its real and imaginary parts" if op in ("min", "max") else ""
    elif name == "bool":
        hint = "; reduce a view of it as uint8, by min (all), max (any) or bor"
    else:
        hint = ""
    raise UnsupportedError(f"{call}: there is no op={op!r} for {name}{hint}")


_VIEWS, _KEPT = 256, 4096
"""The number of views that a `Scratch` caches, and of values that it keeps."""


class _StreamOrder(Protocol):
    """See `cuda.StreamOrder`."""

    settled: Any

    def follow(self) -> None: ...


class Scratch:
    """Reusable working memory: one grow-only buffer per key, so that a repeated call allocates nothing.

    An array is valid until `take` is called with the same key. A scratch belongs to one communicator or
    transport, and is used by one thread at a time. On a device it is used on one stream; see also
    `cuda.SharedScratch`.

    >>> scratch = Scratch()
    >>> a = scratch.take("wire", (2, 8), np.uint8, like=np.empty(0))
    >>> b = scratch.take("wire", (4,), np.float32, like=np.empty(0))
    >>> b.shape, np.shares_memory(a, b)
    ((4,), True)
    """

    _order: _StreamOrder | None = None

    def __init__(self) -> None:
        self._buffers: dict[tuple[str, bool], Array] = {}
        self._outgrown: list[Array] = []
        """Former device buffers, which a CUDA graph may have captured."""
        self._views: BoundedCache[Hashable, Array] = BoundedCache(_VIEWS)
        """Views returned before: to make one of a device array takes microseconds."""
        self._kept: BoundedCache[Hashable, Any] = BoundedCache(_KEPT)

    def take(self, key: str, shape: tuple[int, ...], dtype: npt.DTypeLike, *, like: Array) -> Array:
        """An uninitialised array of `shape`, in memory kept for `key` and the library of `like`."""
        on_host = isinstance(like, np.ndarray)
        if not on_host:
            self.follow()
        place = (key, on_host)
        wanted = (place, shape, dtype)
        if wanted in self._views:
            return self._views[wanted]
        dtype = np.dtype(dtype)
        nbytes = math.prod(shape) * dtype.itemsize
        buffer = self._buffers.get(place)
        if buffer is None or buffer.nbytes < nbytes:
            room = nbytes
            if not on_host:
                # A power of two, so that all former buffers together are smaller than this one.
                room = 1 << max(nbytes - 1, 0).bit_length()
                self._outgrown += [] if buffer is None else [buffer]
            buffer = self._buffers[place] = self._allocated(room, like)
            self._views.clear()
            self._kept.clear()
        self._views[wanted] = view = buffer[:nbytes].view(dtype).reshape(shape)
        return view

    def follow(self) -> None:
        """Order the current stream of a device after the work on other streams that uses this memory."""
        order = self._order
        if order is not None and sys.modules["cupy"].cuda.get_current_stream() is not order.settled:
            order.follow()

    def keep(self, key: Hashable, value: object) -> None:
        """Keep a value that depends on the addresses of this memory, until memory is allocated anew."""
        self._kept[key] = value

    def kept(self, key: Hashable) -> Any:
        """The value kept for a key; None if there is none."""
        return self._kept.get(key)

    def _allocated(self, nbytes: int, like: Array) -> Array:
        """New memory of the library of `like`."""
        buffer: Array = namespace(like).empty(nbytes, np.uint8)
        return buffer

    def clear(self) -> None:
        """Free all memory."""
        self._views.clear()
        self._kept.clear()
        self._buffers.clear()
        self._outgrown.clear()
