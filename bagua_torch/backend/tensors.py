"""Tensors of a call as arrays, and its reduction."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import numpy as np
import torch
import torch.distributed as dist

from bagua_comm import ArrayError, UnsupportedError, arrays
from bagua_comm.arrays import Array, Op, check_reduction
from bagua_comm.comm.arguments import check_writable

from ..arrays import DTYPE_NAMES, as_array, dtype_name, torch_stream

Tensors: TypeAlias = Sequence[torch.Tensor]
Given: TypeAlias = torch.Tensor | Tensors
"""The tensor of this rank; or a list of one for each device of the process, or of several for one call."""

Lists: TypeAlias = Tensors | Sequence[Tensors]
"""One tensor for each rank; or a list of such a list."""

HOST = torch.device("cpu")

_REDUCTIONS: dict[Any, Op] = {
    dist.ReduceOp.SUM: "sum",
    dist.ReduceOp.AVG: "avg",
    dist.ReduceOp.PRODUCT: "prod",
    dist.ReduceOp.MIN: "min",
    dist.ReduceOp.MAX: "max",
    dist.ReduceOp.BAND: "band",
    dist.ReduceOp.BOR: "bor",
    dist.ReduceOp.BXOR: "bxor",
}
"""Our names of PyTorch's reductions."""

_BOOLS = {np.dtype(bool)}
_OF_BOOLS: dict[Op, Op] = {op: op for op in ("min", "max", "band", "bor", "bxor")} | {"sum": "max", "prod": "min"}


def as_list(call: str, tensors: Given) -> list[torch.Tensor]:
    """Return the tensors of a call, which may be one tensor or a list.

    Raises:
        ArrayError: There is none.
    """
    found = [tensors] if isinstance(tensors, torch.Tensor) else list(tensors)
    if not found:
        raise ArrayError(f"{call}: the list of tensors is empty")
    return found


def only(call: str, values: Any) -> Any:
    """Return the single element of a list that has one for each device of a process, or a tensor itself.

    Raises:
        UnsupportedError: The list has several, or none.
    """
    if isinstance(values, torch.Tensor):
        return values
    if len(values) != 1:
        raise UnsupportedError(f"{call}: there are {len(values)} tensors of this rank, expected one")
    return values[0]


def with_list(call: str, tensor: Given, tensors: Any) -> tuple[torch.Tensor, Tensors]:
    """Return the tensor of a rank, and its list of one tensor for each rank; [] if it gives none.

    Both are given as they are, or each in a list of one element.
    """
    if isinstance(tensor, torch.Tensor):
        return tensor, tensors
    return only(call, tensor), only(call, tensors) if tensors else []


def one_of_each(call: str, tensors: Tensors, size: int, move: Callable[..., Array]) -> list[Array]:
    """Return a list of one tensor for each rank as arrays.

    Raises:
        ArrayError: Their number is another one, or their dtypes differ.
    """
    if len(tensors) != size:
        raise ArrayError(f"{call}: a list has {len(tensors)} tensors, expected {size}, one for each rank")
    if len({tensor.dtype for tensor in tensors}) > 1:
        raise ArrayError(f"{call}: the tensors of a list have several dtypes, expected one")
    return [move(call, tensor) for tensor in tensors]


def dense(call: str, tensor: torch.Tensor) -> Array:
    """Return a tensor as an array, which shares its memory.

    Raises:
        UnsupportedError: It is sparse, or its dtype or its device are not supported.
    """
    if not isinstance(tensor, torch.Tensor):
        raise UnsupportedError(f"{call}: a {type(tensor).__name__} was given, expected a tensor")
    if tensor.layout is not torch.strided:
        raise UnsupportedError(f"{call}: a tensor has layout {tensor.layout}, expected a dense tensor")
    if tensor.is_conj() or tensor.is_neg():
        raise UnsupportedError(f"{call}: a tensor is lazy; pass x.resolve_conj().resolve_neg()")
    if tensor.device.type == "cuda":
        with torch_stream(tensor.device):  # else CuPy's stream, on which a model may compute, waits for PyTorch's
            return as_array(tensor)
    if tensor.device.type != "cpu" or tensor.dtype is torch.bfloat16 or not arrays.has_memory(tensor):
        return as_array(tensor)
    dtype_name(tensor)
    return np.from_dlpack(tensor.detach())  # tensor.numpy() would keep FSDP from freeing its memory


def any_dtype(call: str, tensor: torch.Tensor) -> Array:
    """Like `dense`, for calls that only move elements: those of a dtype without arrays are viewed as bytes."""
    if isinstance(tensor, torch.Tensor) and _is_byte(tensor):
        return dense(call, tensor.detach().view(torch.uint8))
    return dense(call, tensor)


def _is_byte(tensor: torch.Tensor) -> bool:
    """Whether its elements are of one byte, of a dtype that NumPy lacks, such as float8_e4m3fn."""
    return tensor.dtype.itemsize == 1 and tensor.dtype not in DTYPE_NAMES and not tensor.is_quantized


def filled(call: str, tensor: torch.Tensor, move: Callable[..., Array] = any_dtype) -> Array:
    """Like `move`, for a tensor that a call fills.

    Raises:
        ArrayError: Elements of it share memory.
    """
    x = move(call, tensor)
    if 0 in tensor.stride():
        check_writable(call, "a tensor", tensor, x)
    return x


def check_size(call: str, x: Array, size: int) -> None:
    """Raise `ArrayError` unless an array has this number of elements."""
    if x.size != size:
        raise ArrayError(f"{call}: a tensor of this rank has {x.size} elements, expected {size}")


def check_dtypes(call: str, *xs: Array) -> None:
    """Raise `ArrayError` unless all arrays have the same dtype."""
    if len({x.dtype for x in xs}) > 1:
        raise ArrayError(f"{call}: the dtypes differ: {', '.join(dict.fromkeys(str(x.dtype) for x in xs))}")


def reduction(call: str, wanted: Any, xs: Sequence[Array]) -> tuple[Op, list[Array]]:
    """Return our name of a reduction of PyTorch, None for the sum, and the arrays to reduce by it.

    Bools are reduced as bytes: their sum is "or", and their product "and", as over NCCL.

    Raises:
        UnsupportedError: There is no such reduction, or not of this dtype.
    """
    wanted = getattr(wanted, "op", wanted)
    op = "sum" if wanted is None else _REDUCTIONS.get(wanted)
    if op is None:
        names = ", ".join(each.name for each in _REDUCTIONS)
        raise UnsupportedError(f"{call}: op is {wanted.name}, expected one of {names}")
    if call == "reduce_scatter":
        check_dtypes(call, *xs)
    dtypes = {x.dtype for x in xs}
    if dtypes == _BOOLS and op in _OF_BOOLS:
        return _OF_BOOLS[op], [x.view(np.uint8) for x in xs]
    for dtype in dtypes:
        check_reduction(call, op, dtype)
    return op, list(xs)


def check_root(call: str, root: int, size: int) -> None:
    """Raise `ArrayError` unless the root is a rank of the group."""
    if not 0 <= root < size:
        raise ArrayError(f"{call}: the root is rank {root} of the group, expected one from 0 to {size - 1}")


def device_of(tensors: Any) -> torch.device:
    """Return the device of the first tensor in nested lists; the host if there is none."""
    while isinstance(tensors, (list, tuple)):
        if not tensors:
            return HOST
        tensors = tensors[0]
    device: torch.device = tensors.device
    return device


def pairs(call: str, outputs: Given, inputs: Given) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Return the outputs of a call with their inputs.

    Raises:
        ArrayError: Their numbers differ.
    """
    outs, xs = as_list(call, outputs), as_list(call, inputs)
    if len(outs) != len(xs):
        raise ArrayError(f"{call}: there are {len(outs)} outputs, expected {len(xs)}, one for each input")
    return list(zip(outs, xs, strict=True))


def elements(call: str, name: str, x: Array, rows: Sequence[int] | None, size: int) -> list[int]:
    """Return the numbers of elements of `x` for each rank, from numbers of rows; of equal ones without them.

    Raises:
        ArrayError: They do not fit `x`.
    """
    length = x.shape[0] if x.ndim else 1
    if not rows:
        if length % size:
            raise ArrayError(f"{call}: a tensor has {length} rows, expected a number divisible by {size} ranks")
        rows = [length // size] * size
    if len(rows) != size or sum(rows) != length or min(rows) < 0:
        raise ArrayError(f"{call}: {name} is {list(rows)}, expected {size} numbers with sum {length}")
    width = x.size // length if length else 0
    return [width * n for n in rows]


def copying(target: torch.Tensor, buffer: torch.Tensor) -> Callable[[], None]:
    """Return a function that copies `buffer`, on the host, to `target`; another thread may call it.

    On a CUDA device, it copies in the order of the stream that is current now, so after the work that the caller
    has submitted for `target`. The copy is complete when it returns.
    """
    stream = torch.cuda.current_stream(target.device) if target.device.type == "cuda" else None

    def copy() -> None:
        with torch.cuda.stream(stream):  # does nothing without a stream
            target.copy_(buffer)
        if stream is not None:
            stream.synchronize()

    return copy


def row(size: int, like: Array) -> Array:
    """Return a new array of `size` elements."""
    return arrays.empty((size,), like.dtype, like=like)


def joined(parts: Sequence[Array]) -> Array:
    """Return the elements of all parts in one new array."""
    buffer = row(sum(part.size for part in parts), parts[0])
    for part, target in zip(parts, arrays.parts(buffer, [part.size for part in parts]), strict=True):
        target[...] = part.reshape(-1)
    return buffer


def apart(xs: Sequence[Array]) -> list[Array]:
    """Return these arrays, but a copy in place of one that has come before."""
    before: set[tuple[object, ...]] = set()
    found = []
    for x in xs:
        place = arrays.address(x), x.shape, x.strides
        found.append(x.copy() if place in before else x)
        before.add(place)
    return found


def flat(x: Array) -> Array:
    """Return the elements of `x` in one dimension; shares memory with `x` if that is contiguous."""
    return arrays.contiguous(x).reshape(-1)


def divided(buffer: Array, targets: Sequence[Array]) -> None:
    """Copy the elements of `buffer` to `targets`, one after another."""
    for target, part in zip(targets, arrays.parts(buffer, [target.size for target in targets]), strict=True):
        target[...] = part.reshape(target.shape)
