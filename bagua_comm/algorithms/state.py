"""What algorithms keep between steps, by the names of tensors: for checkpoints and new plans.

A state is a dataclass of arrays, numbers and further dataclasses. An array whose last axis is as long as its
bucket is cut into pieces, one for each tensor; numbers go with every tensor of the bucket. Other arrays stay
whole: they go with the first tensor, and fit the same bucket only.

An array is a rank's own, unless its field is marked `ALIKE`: another rank cannot go on from it. Numbers are the
same on all ranks.
"""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import numpy as np

from .. import arrays
from ..arrays import Array, dtype_name
from ..bucket import Bucket, BucketSpec
from ..errors import ArrayError, UnsupportedError, shown

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


def check_names(names: Iterable[str], saved: object) -> None:
    """Raise unless `saved` has something for each of these tensors.

    Raises:
        ArrayError: It is no mapping of mappings, or a tensor is missing.
    """
    if not isinstance(saved, Mapping):
        raise ArrayError(f"'tensors' is a {type(saved).__name__}, expected a mapping from names of tensors")
    missing = [name for name in names if name not in saved]
    if missing:
        raise ArrayError(f"nothing was saved for {', '.join(map(repr, missing[:3]))}")
    for name, pieces in saved.items():
        if not isinstance(name, str) or not isinstance(pieces, Mapping):
            raise ArrayError(f"'tensors' has a {type(pieces).__name__} for {name!r}, expected a mapping")


def check_state(bucket: Bucket, state: Any, saved: Mapping[str, Mapping[str, Any]]) -> None:
    """Raise unless `load_state` can put `saved` in `state`. Changes nothing.

    Raises:
        ArrayError: Something is missing, or does not fit this bucket: a path, a type, a shape or a dtype.
    """
    fields = {path: value for path, _, _, value in _fields_of(state)}
    for tensor in bucket.views:
        unknown = [path for path in saved[tensor] if str(path).removesuffix(_WHOLE) not in fields]
        if unknown:
            wanted = ", ".join(map(repr, fields)) or "nothing"
            raise ArrayError(f"{tensor!r} has {unknown[0]!r}, expected {wanted}")
    for path, value in fields.items():
        found = {tensor: saved[tensor][path] for tensor in bucket.views if path in saved[tensor]}
        layouts = [saved[t][path + _WHOLE] for t in bucket.views if path + _WHOLE in saved[t]]
        if not found and value is None and not layouts:  # made at its first use, which had not come
            continue
        tensor = next(iter(found), next(iter(bucket.views)))
        if layouts and (list(found) != [tensor] or layouts != [_layout(bucket.spec)]):
            raise _not_movable(path, tensor)
        if value is None:
            value = bucket.flat
        if not hasattr(value, "dtype"):
            _check_number(path, value, {name: found.get(name) for name in bucket.views})
        elif layouts:
            _check_array(path, tensor, found[tensor], value, None if value is bucket.flat else value.shape)
        elif value.shape[-1:] != bucket.flat.shape:
            raise ArrayError(f"{path!r} is missing from {tensor!r}, expected an array of shape {value.shape}")
        else:
            for spec in bucket.spec.tensors:
                if spec.name in found or fields[path] is not None:
                    shape = (*value.shape[:-1], spec.size)
                    _check_array(path, spec.name, found.get(spec.name), value, shape)


def _check_number(path: str, mine: object, found: Mapping[str, Any]) -> None:
    """Raise unless all of `found` are one number, of the type of `mine`."""
    first = next(iter(found.values()))
    for tensor, value in found.items():
        fits = type(value) is type(mine) or (type(mine) is float and type(value) is int)
        if not fits:
            raise ArrayError(f"{path!r} of {tensor!r} is {shown(value)}, expected {_a(mine)} such as {mine!r}")
        if value != first and not (value != value and first != first):  # NaN is unlike itself
            raise ArrayError(f"{path!r} of {tensor!r} is {value!r}, expected {first!r}, as beside it")


def _check_array(path: str, tensor: str, piece: Any, like: Array, shape: tuple[int, ...] | None) -> None:
    """Raise unless `piece` has the dtype of `like` and this shape; any if None."""
    wanted = f"{like.dtype}" if shape is None else f"{like.dtype}{shape}"
    try:
        arrays.library(piece)
    except UnsupportedError:
        found = "missing" if piece is None else _a(piece)
        raise ArrayError(f"{path!r} of {tensor!r} is {found}, expected an array, {wanted}") from None
    if piece.dtype != like.dtype or (shape is not None and piece.shape != shape):
        raise ArrayError(f"{path!r} of {tensor!r} is {piece.dtype}{piece.shape}, expected {wanted}")


def _a(value: object) -> str:
    kind = type(value).__name__
    return f"an {kind}" if kind[0] in "aeiou" else f"a {kind}"


def own_of(bucket: Bucket, state: Any, saved: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """Where in `saved` arrays are that are the own ones of the rank that saved them."""
    alike = {path for path, _, field, _ in _fields_of(state) if field.metadata.get("alike")}
    pieces = ((tensor, path) for tensor in bucket.views for path in saved[tensor])
    return [p for tensor, p in pieces if p not in alike and hasattr(saved[tensor][p], "dtype")]


def checksum(*facts: object, saved: Mapping[str, Mapping[str, Any]]) -> str:
    """A hash of `facts` and of what was saved: numbers, and of arrays the shapes and dtypes."""
    kept = [
        (name, path, f"{dtype_name(value.dtype)}{value.shape}" if hasattr(value, "dtype") else repr(value))
        for name in sorted(saved)
        for path, value in sorted(saved[name].items())
    ]
    return hashlib.blake2b(repr((facts, kept)).encode(), digest_size=16).hexdigest()


def load_state(bucket: Bucket, state: Any, saved: Mapping[str, Mapping[str, Any]]) -> None:
    """Put back what `save_state` copied, also where the tensors lay in other buckets then.

    What comes from outside goes through `check_state` first.

    Raises:
        ArrayError: Something does not fit this bucket.
    """
    for path, owner, field, value in _fields_of(state):
        found = {tensor: saved[tensor][path] for tensor in bucket.views if path in saved[tensor]}
        if not found:
            continue
        tensor, piece = next(iter(found.items()))
        layout = saved[tensor].get(path + _WHOLE)
        if layout is not None and layout != _layout(bucket.spec):
            raise _not_movable(path, tensor)
        if value is None and hasattr(piece, "dtype"):  # made at its first use
            value = arrays.zeros_like(bucket.flat if layout is None else _moved(piece, bucket.flat))
            setattr(owner, field.name, value)
        if not hasattr(value, "dtype"):
            setattr(owner, field.name, piece)
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


def _fields_of(state: Any, prefix: str = "") -> Iterator[tuple[str, Any, dataclasses.Field[Any], Any]]:
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
            yield path, state, field, value
