"""The array arguments of calls: conversion, checks, and outputs."""

from __future__ import annotations

import inspect
import math
import re
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from .. import arrays
from ..arrays import Array, as_array
from ..errors import ArrayError, UnsupportedError, shown
from ..objects import refusals
from ..transports.base import Transport

EMPTY: Array = np.empty(0, np.uint8)
"""The array of calls that take none."""


GIVEN = "given"
"""Stands for counts in the records of a call: all numbers would be p times as long on each of p ranks."""


class Output(NamedTuple):
    """Where the result of a call goes."""

    out: object
    """The `out` argument; None if none was given."""
    value: Array
    """`out` as an array; a new array if none was given."""
    target: Array
    """The array that the transport fills: `value` if that is contiguous, else a contiguous copy."""


NO_OUTPUT = Output(None, EMPTY, EMPTY)


def as_argument(call: str, name: str, x: object) -> Array:
    """View argument `name` of `call` as an array.

    Raises:
        UnsupportedError: It is not an array.
    """
    try:
        return as_array(x)
    except UnsupportedError as exc:
        raise UnsupportedError(f"{call}: {name}: {exc}") from exc


def transport_for(
    transports: Sequence[Transport], call: str, name: str, x: Array, device: int | None
) -> Transport:
    """Return the first transport that moves `x`, argument `name` of `call`.

    Raises:
        ArrayError: It is not on `device`, that of the communicator.
        UnsupportedError: No transport moves such arrays.
    """
    if not arrays.is_movable(x.dtype):
        raise UnsupportedError(
            f"{call}: {name} has dtype {x.dtype}, expected integers, floats, bool or complex in native byte "
            f"order; {refusals.of_dtype(x.dtype)}"
        )
    for transport in transports:
        if transport.moves(x):
            arrays.check_device(call, name, x, device)
            return transport
    names = ", ".join(transport.name for transport in transports)
    raise UnsupportedError(
        f"{call}: {name} is a {arrays.library(x)} array, but this communicator's transports ({names}) do not "
        "move such arrays"
    )


def resolve_output(
    call: str, name: str, out: Any | None, shape: tuple[int, ...], like: Array, *, any_shape: bool = False
) -> Output:
    """Return the output of `call`: `out`, or a new array of `shape` if it is None.

    With `any_shape`, an `out` of any shape with the same number of elements will do.

    Raises:
        ArrayError: `out` does not fit the shape, or `like` in dtype, library and device, or cannot be written to.
        UnsupportedError: `out` is not an array.
    """
    if out is None:
        target = arrays.empty(shape, like.dtype, like=like)
        return Output(None, target, target)
    if isinstance(out, str):
        raise UnsupportedError(
            f"{call}: {name} is {shown(out)}, expected an array; is it the operation: op={shown(out)}?"
        )
    value = out if type(out) is type(like) else as_argument(call, name, out)
    fits = value.size == math.prod(shape) if any_shape else value.shape == shape
    if not fits:
        wanted = f"{math.prod(shape)} elements" if any_shape else f"{shape}"
        raise ArrayError(f"{call}: {name} has shape {value.shape}, expected {wanted}")
    if value.dtype != like.dtype:
        raise ArrayError(f"{call}: {name} has dtype {value.dtype}, expected {like.dtype}")
    if type(value) is not type(like) and arrays.library(value) != arrays.library(like):
        raise ArrayError(f"{call}: {name} is a {arrays.library(value)} array, expected {arrays.library(like)}")
    arrays.check_device(call, name, value)
    check_writable(call, name, out, value)
    target = value if arrays.is_contiguous(value) else arrays.empty(value.shape, value.dtype, like=value)
    return Output(out, value, target)


def check_writable(call: str, name: str, x: object, value: Array) -> None:
    """Raise `ArrayError` unless `value`, the array of argument `x`, can be written to."""
    if isinstance(x, np.generic) or (isinstance(value, np.ndarray) and not value.flags.writeable):
        raise ArrayError(f"{call}: {name} {refusals.of_target(x)}")
    if not value.flags.c_contiguous and arrays.repeats(value.shape, value.strides, value.itemsize):
        raise ArrayError(f"{call}: {name} has several elements in one place of memory; pass a copy of it")


def check_mutable(call: str, name: str, x: object, value: Array) -> None:
    """Raise `ArrayError` if arrays of the type of `x` are always read-only: no rank could receive into one."""
    read_only = isinstance(value, np.ndarray) and not value.flags.writeable
    if isinstance(x, np.generic) or (read_only and not isinstance(x, np.ndarray)):
        raise ArrayError(f"{call}: {name} {refusals.of_target(x)}")


def check_apart(call: str, written: Sequence[Array], read: Sequence[Array]) -> None:
    """Raise `ArrayError` if an array that is written to overlaps another array."""
    extents = [(*arrays.extent(x), True) for x in written if x.size]
    extents += [(*arrays.extent(x), False) for x in read if x.size]
    end_of_all = end_of_written = 0
    for start, end, is_written in sorted(extents):
        if start < (end_of_all if is_written else end_of_written):
            raise ArrayError(f"{call}: an array that is written to overlaps another array")
        end_of_all = max(end_of_all, end)
        end_of_written = max(end_of_written, end) if is_written else end_of_written


def is_same(a: Array, b: Array) -> bool:
    """Whether two arrays are views of the same elements in the same order."""
    return a is b or (arrays.extent(a) == arrays.extent(b) and a.strides == b.strides)


def hint_of(error: BaseException, owner: type) -> str:
    """What to write instead, if Python refused the arguments of a method of `owner`; "" for most other errors.

    Code that expects the process group of PyTorch gets a hint as well.

    >>> class Owner:
    ...     def send(self, x, *, dest): ...
    >>> hint_of(TypeError("Owner.send() takes 2 positional arguments but 3 were given"), Owner)
    'give dest by name: send(..., dest=...)'
    """
    if isinstance(error, (ValueError, RuntimeError)) and "Default process group has not been init" in str(error):
        return "bagua_torch.connect(process_group=True) makes the process group of torch.distributed as well"
    refused = (
        r"(\w+\.(\w+))\(\) (?:takes .* positional arguments? but|got an unexpected keyword argument '(\w+)')"
    )
    found = re.match(refused, str(error)) if isinstance(error, TypeError) else None
    if found is None or getattr(getattr(owner, found[2], None), "__qualname__", "") != found[1]:
        return ""
    parameters = inspect.signature(getattr(owner, found[2])).parameters.values()
    if found[3] in ("sendtag", "recvtag"):
        return "tag= is one number, or one text, for both sides"
    if found[3] is not None:
        return f"the arguments of {found[2]} are {', '.join(each.name for each in list(parameters)[1:])}"
    named = [each.name for each in parameters if each.kind is each.KEYWORD_ONLY]
    names = [name for name in named if name not in ("tag", "timeout_s")]
    shown_as = ", ".join(f"{name}=..." for name in names or ["timeout_s"])
    return f"give {' and '.join(names or ['timeout_s'])} by name: {found[2]}(..., {shown_as})"


def check_counts(
    call: str, name: str, counts: Sequence[int], ranks: int, x: Array | None = None, *, own: int | None = None
) -> list[int]:
    """Return `counts` as integers, one for each of `ranks`.

    `x` must have sum(counts) elements or, if `own` is a rank, counts[own].
    """
    found = list(counts) if np.iterable(counts) else []
    if len(found) != ranks or not all(isinstance(n, (int, np.integer)) and n >= 0 for n in found):
        wanted = f"{ranks} integers of at least 0, the number of elements of each rank"
        raise ArrayError(f"{call}: {name} is {found or counts}, expected {wanted}")
    if x is not None and own is not None and x.size != found[own]:
        raise ArrayError(f"{call}: x has {x.size} elements, expected {name}[{own}] = {found[own]}")
    if x is not None and own is None and x.size != sum(found):
        raise ArrayError(f"{call}: x has {x.size} elements, expected {sum(found)}, the sum of {name}")
    return [int(n) for n in found]


def even_chunk(call: str, x: Array, ranks: int) -> int:
    """Return the length of a rank's chunk of `x`; raise unless chunks are equal."""
    if x.ndim == 0 or x.shape[0] % ranks:
        cure = "counts= and out_counts=" if call == "alltoall" else "counts="
        raise ArrayError(
            f"{call}: x has shape {x.shape}, expected a first dimension divisible by {ranks} ranks; "
            f"or give {cure}, the length of each rank's part"
        )
    return int(x.shape[0]) // ranks
