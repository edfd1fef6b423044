"""What algorithms keep between steps, by the names of tensors: for checkpoints and new plans.

A state is a dataclass of arrays, numbers and further dataclasses. An array whose last axis is as long as its
bucket is cut into pieces, one for each tensor; numbers go with every tensor of the bucket. Other arrays stay
whole: they go with the first tensor, and fit the same bucket only.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import numpy as np

from .. import arrays
from ..arrays import Array
from ..bucket import Bucket, BucketSpec
from ..errors import ArrayError

Saved = dict[str, dict[str, Any]]
"""For every tensor's name: its pieces and numbers, by where they were found in the state."""


def keeps(state: Any) -> bool:
    """Whether there is anything in `state` that a checkpoint would hold, now or after some steps."""
    return any(True for _ in _fields_of(state))


def save_state(bucket: Bucket, state: Any) -> Saved:
    """Copy what `state` holds for the tensors of `bucket`."""
    saved: Saved = {name: {} for name in bucket.views}
    for path, _, _, value in _fields_of(state):
        if value is None:
            continue
        if not hasattr(value, "dtype"):
            pieces = dict.fromkeys(saved, value)
        elif value.shape[-1:] == bucket.flat.shape:
            pieces = {name: value[..., where].copy() for name, where in bucket.spec.slices().items()}
        else:
            saved[next(iter(saved))][path + _WHOLE] = _layout(bucket.spec)
            pieces = {next(iter(saved)): value.copy()}
        for name, piece in pieces.items():
            saved[name][path] = piece
    return saved


def check_movable(saved: Mapping[str, Mapping[str, Any]], specs: Iterable[BucketSpec]) -> None:
    """Raise unless what `save_state` copied fits buckets of these `specs`.

    Raises:
        ArrayError: An array belongs to a bucket as a whole, and that is none of them.
    """
    layouts = [_layout(spec) for spec in specs]
    for tensor, pieces in saved.items():
        for path in pieces:
            if path.endswith(_WHOLE) and pieces[path] not in layouts:
                raise _not_movable(path.removesuffix(_WHOLE), tensor)


def _not_movable(path: str, tensor: str) -> ArrayError:
    return ArrayError(f"{path!r} of {tensor!r} belongs to its bucket as a whole, and cannot move to another")


def load_state(bucket: Bucket, state: Any, saved: Mapping[str, Mapping[str, Any]]) -> None:
    """Put back what `save_state` copied, also where the tensors lay in other buckets then.

    Raises:
        ArrayError: A tensor is missing, or something does not fit this bucket.
    """
    missing = [name for name in bucket.views if name not in saved]
    if missing:
        raise ArrayError(f"load_state: nothing was saved for {', '.join(map(repr, missing[:3]))}")
    for path, owner, name, value in _fields_of(state):
        found = {tensor: saved[tensor][path] for tensor in bucket.views if path in saved[tensor]}
        if not found:
            continue
        tensor, piece = next(iter(found.items()))
        layout = saved[tensor].get(path + _WHOLE)
        if layout is not None and layout != _layout(bucket.spec):
            raise _not_movable(path, tensor)
        if value is None and hasattr(piece, "dtype"):  # made at its first use
            value = arrays.zeros_like(bucket.flat if layout is None else _moved(piece, bucket.flat))
            setattr(owner, name, value)
        if not hasattr(value, "dtype"):
            setattr(owner, name, piece)
        elif layout is None and value.shape[-1:] == bucket.flat.shape:
            for tensor, where in bucket.spec.slices().items():
                value[..., where] = _moved(found.get(tensor, 0), value)
        elif piece.shape == value.shape:
            value[...] = _moved(piece, value)
        else:
            raise ArrayError(f"load_state: {path!r} has shape {piece.shape}, expected {value.shape}")


def _moved(piece: Any, like: Array) -> Any:
    """`piece` where `like` is, on the host or on the device; the host waits if it must move."""
    if not hasattr(piece, "dtype") or arrays.library(piece) == arrays.library(like):
        return piece
    if isinstance(like, np.ndarray):
        return piece.get()
    there = arrays.empty(piece.shape, piece.dtype, like=like)
    there.set(piece)
    return there


_WHOLE = " of"
"""Added to the path of an array that stays whole, for the bucket that it belongs to."""


def _layout(spec: BucketSpec) -> list[Any]:
    return [spec.size, *(tensor.name for tensor in spec.tensors)]


def _fields_of(state: Any, prefix: str = "") -> Iterator[tuple[str, Any, str, Any]]:
    """(path, owner, field, value) of all that a state keeps."""
    settings = getattr(type(state), "__dataclass_params__", None)
    if settings is None or settings.frozen:  # what is frozen is no state
        return
    for field in dataclasses.fields(state):
        value, path = getattr(state, field.name), prefix + field.name
        if field.metadata.get("transient"):
            continue
        if dataclasses.is_dataclass(value):
            yield from _fields_of(value, f"{path}.")
        elif value is None or isinstance(value, (bool, int, float)) or hasattr(value, "dtype"):
            yield path, state, field.name, value
