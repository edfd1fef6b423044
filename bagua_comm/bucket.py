"""Plans and buckets: the grouping of tensors for communication.

A `Plan` is pure data: equal on all ranks, hashable, and stored as JSON. A `Bucket` is one bucket of a plan with
its memory: a flat array, and a view of it for every tensor.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import math
import operator
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np

from .arrays import MOVABLE, Array, dtype_named
from .errors import ArrayError, BaguaError, UnsupportedError, shown

DEFAULT_BUCKET_BYTES = 10 * 2**20
"""Bagua's default."""


@dataclass(frozen=True)
class TensorSpec:
    """A tensor without its values.

    Raises:
        ArrayError: `name` is not a string, `shape` is not a sequence of sizes, or `memory` is not a string.
        UnsupportedError: Arrays of this dtype cannot be sent.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    memory: str = field(default="", repr=False)
    """The order of its elements in memory, as text; "" for that of their indices."""

    def __post_init__(self) -> None:
        for what, text in (("name", self.name), ("memory", self.memory)):
            if not isinstance(text, str):
                raise ArrayError(f"a tensor's {what} is {shown(text)}, expected a string")
        try:
            shape = tuple(operator.index(extent) for extent in self.shape)
        except TypeError:
            shape = (-1,)
        if min(shape, default=0) < 0 or math.prod(shape) >= 2**63:
            raise ArrayError(
                f"tensor {self.name!r}: shape is {shown(self.shape)}, expected sizes of at least 0, and less "
                "than 2**63 elements"
            )
        object.__setattr__(self, "shape", shape)
        if type(self.dtype) is not str or self.dtype not in MOVABLE:
            object.__setattr__(self, "dtype", self._dtype_name())

    def _dtype_name(self) -> str:
        """The name of a dtype that was given in another form: numpy.float32, numpy.dtype("float32"), "f4"."""
        given: object = self.dtype
        try:
            name = np.dtype(given).name if isinstance(given, (str, type, np.dtype)) else None
        except TypeError:
            name = None
        if name not in MOVABLE:
            raise UnsupportedError(
                f"tensor {self.name!r}: dtype {shown(given)} cannot be sent; expected a name such as 'float32'"
            )
        return str(name)

    @property
    def size(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        """Number of bytes."""
        return self.size * dtype_named(self.dtype).itemsize


@dataclass(frozen=True)
class BucketSpec:
    """Consecutive tensors of one dtype; `size` is their number of elements, padding included."""

    dtype: str
    tensors: tuple[TensorSpec, ...]
    size: int

    @property
    def nbytes(self) -> int:
        """Number of bytes, padding included."""
        return self.size * dtype_named(self.dtype).itemsize

    def slices(self) -> dict[str, slice]:
        """The slice of each tensor, by name."""
        ends = itertools.accumulate(tensor.size for tensor in self.tensors)
        return {t.name: slice(end - t.size, end) for t, end in zip(self.tensors, ends, strict=True)}

    def cut(self, flat: Array) -> dict[str, Array]:
        """Views of a flat array (or torch tensor): this bucket's tensors by name, in their shapes."""
        slices = self.slices()
        return {tensor.name: flat[slices[tensor.name]].reshape(tensor.shape) for tensor in self.tensors}


class Views(dict[str, Array]):
    """Views of flat arrays, by name. An item cannot be replaced by another array, which nothing would exchange.

    >>> views = Plan.pack([TensorSpec("w", (2,), "float32")]).cut([np.zeros(2, np.float32)])
    >>> views["w"][...] = [1, 2]
    >>> views["w"] = np.ones(2)
    Traceback (most recent call last):
    ...
    bagua_comm.errors.ArrayError: 'w' is a view of a bucket; write into it: views['w'][...] = values
    """

    def __setitem__(self, name: str, value: Array) -> None:
        if self.get(name) is not value:  # it is the same after `views[name] += x`
            raise ArrayError(f"{name!r} is a view of a bucket; write into it: views[{name!r}][...] = values")

    def update(self, *args: object, **kwargs: object) -> None:
        """Set several items; see `__setitem__`."""
        for name, value in dict(*args, **kwargs).items():
            self[name] = value

    def __ior__(self, other: object) -> Views:  # type: ignore[override,misc]
        self.update(other)
        return self

    def __reduce__(self) -> tuple[type, tuple[dict[str, Array]]]:
        return dict, (dict(self),)  # a copy is no view


class Flats(list[Array]):
    """A flat array for each bucket. An item cannot be replaced by another array, which nothing would exchange.

    >>> weights = Plan.pack([TensorSpec("w", (2,), "float32")]).allocate()
    >>> weights[0] -= 1
    >>> weights[0] = weights[0] - 1
    Traceback (most recent call last):
    ...
    bagua_comm.errors.ArrayError: item 0 is a bucket's memory; write into it: flats[0][...] = x or flats[0] -= x
    """

    def __setitem__(self, index: Any, value: Any) -> None:
        if isinstance(index, slice):
            old, new = list(range(len(self)))[index], list(value)
            if len(old) == len(new):
                for position, each in zip(old, new, strict=True):
                    self[position] = each
                return
            index = old[0] if old else len(self)
        elif self[index] is value:  # as after `flats[index] -= x`
            return
        item = f"flats[{index}]"
        raise ArrayError(f"item {index} is a bucket's memory; write into it: {item}[...] = x or {item} -= x")

    def __reduce_ex__(self, protocol: object) -> tuple[type, tuple[list[Array]]]:
        return list, (list(self),)  # a copy is no memory of a bucket


@dataclass(frozen=True)
class Plan:
    """The buckets of a model's tensors, in the order of their exchange.

    >>> specs = [TensorSpec("b", (3,), "float32"), TensorSpec("a", (2, 2), "float32")]
    >>> plan = Plan.pack(specs, bucket_bytes=1024, alignment=8)
    >>> [(bucket.size, [t.name for t in bucket.tensors]) for bucket in plan.buckets]
    [(8, ['b', 'a'])]
    >>> Plan.from_json(plan.to_json()) == plan
    True
    """

    buckets: tuple[BucketSpec, ...]
    alignment: int = 1

    @classmethod
    def pack(
        cls,
        specs: Iterable[TensorSpec],
        *,
        bucket_bytes: int = DEFAULT_BUCKET_BYTES,
        alignment: int = 1,
        groups: Sequence[Hashable] | None = None,
    ) -> Plan:
        """Fill buckets with `specs`, given in the order in which the tensors become ready.

        A bucket holds one dtype and is closed when it has `bucket_bytes` or more; its size is then
        rounded up to a multiple of `alignment` elements. Buckets are in the order of
        their last tensor.

        Args:
            specs: The tensors.
            bucket_bytes: The size at which a bucket is closed, in bytes.
            alignment: The size of a bucket is a multiple of this number of elements; zeros fill it up. Any number
                gives correct averages. With `32 * comm.size` the parts of a bucket that the ranks reduce are of
                one size and aligned in memory, which algorithms with a codec compute faster. The flat arrays of
                another number of ranks then have other sizes: save tensors by name, as `cut` returns them.
            groups: A value for each tensor: tensors with different values share no bucket. All algorithms of this
                library have `groups(specs)`, which returns what they need, or None.

        Raises:
            ArrayError: Two tensors have one name, a number is not positive, or `groups` is of another length.
        """
        for name, number in (("bucket_bytes", bucket_bytes), ("alignment", alignment)):
            if number < 1:
                raise ArrayError(f"Plan.pack: {name} is {number}, expected a positive number")
        specs = list(specs)
        names = [spec.name for spec in specs]
        if len(set(names)) < len(names):
            twice = sorted({name for name in names if names.count(name) > 1})
            raise ArrayError(f"Plan.pack: names must differ, but several tensors are called {', '.join(twice)}")

        if groups is not None and len(groups) != len(specs):
            raise ArrayError(f"Plan.pack: groups has {len(groups)} values, expected {len(specs)}, one per tensor")

        closed: list[tuple[int, list[TensorSpec]]] = []
        filling: dict[Hashable, list[TensorSpec]] = {}
        last: dict[Hashable, int] = {}
        nbytes: dict[Hashable, int] = {}
        for position, spec in enumerate(specs):
            key = (spec.dtype, None if groups is None else groups[position])
            bucket = filling.setdefault(key, [])
            bucket.append(spec)
            last[key] = position
            nbytes[key] = nbytes.get(key, 0) + spec.nbytes
            if nbytes[key] >= bucket_bytes:
                nbytes[key] = 0
                closed.append((position, filling.pop(key)))
        closed += [(last[key], bucket) for key, bucket in filling.items()]
        return cls(
            tuple(
                BucketSpec(tensors[0].dtype, tuple(tensors), _aligned(tensors, alignment))
                for _, tensors in sorted(closed, key=lambda item: item[0])
            ),
            alignment,
        )

    @property
    def nbytes(self) -> int:
        """Bytes of all buckets, padding included."""
        return sum(bucket.nbytes for bucket in self.buckets)

    def allocate(self) -> list[Array]:
        """Zeroed NumPy memory for the buckets: a list with one flat array for each.

        Write into an array: `flats[0][...] = x` or `flats[0] -= x`. Putting another array in its place raises
        `ArrayError`.
        """
        return Flats(np.zeros(bucket.size, dtype_named(bucket.dtype)) for bucket in self.buckets)

    def cut(self, storage: Sequence[Array]) -> dict[str, Array]:
        """Views of the buckets' flat arrays (or torch tensors): all tensors by name, in their shapes.

        Write into a view: `views["w"][...] = x`. Putting another array in its place raises `ArrayError`.
        """
        pairs = zip(self.buckets, storage, strict=True)
        return Views({name: view for bucket, flat in pairs for name, view in bucket.cut(flat).items()})

    def to_json(self) -> str:
        """The plan as JSON."""
        return json.dumps(asdict(self, dict_factory=_without_empty_memory), separators=(",", ":"))

    @classmethod
    def from_json(cls, text: str) -> Plan:
        """The plan that `to_json` wrote.

        Raises:
            ArrayError: The text was not written by `to_json`, or is not a plan: two tensors have one name, or the
                bucket of a tensor is too small or has another dtype.
            UnsupportedError: A tensor has a dtype that cannot be sent.
        """
        try:
            data = json.loads(text)
            plan = cls(
                tuple(
                    BucketSpec(bucket["dtype"], tuple(TensorSpec(**t) for t in bucket["tensors"]), bucket["size"])
                    for bucket in data["buckets"]
                ),
                data["alignment"],
            )
        except BaguaError:
            raise
        except Exception as exc:  # such as a RecursionError, for brackets without end
            raise ArrayError(f"Plan.from_json: the text is not what Plan.to_json wrote: {exc!r}") from exc
        plan._check()
        return plan

    def _check(self) -> None:
        """Check that `pack` could have made this plan; raise `ArrayError` if not."""
        _check_size("alignment", self.alignment, least=1)
        for i, bucket in enumerate(self.buckets):
            _check_size(
                f"the size of bucket {i}", bucket.size, least=sum(tensor.size for tensor in bucket.tensors)
            )
            if not bucket.tensors or any(tensor.dtype != bucket.dtype for tensor in bucket.tensors):
                raise ArrayError(
                    f"Plan.from_json: bucket {i} has no tensors, or tensors of other dtypes than its own"
                )
        names = [tensor.name for bucket in self.buckets for tensor in bucket.tensors]
        if len(set(names)) < len(names):
            raise ArrayError("Plan.from_json: two tensors have one name")

    def digest(self) -> str:
        """A short hash that is equal for equal plans, also in different processes."""
        return hashlib.blake2b(self.to_json().encode(), digest_size=16).hexdigest()


def _without_empty_memory(items: list[tuple[str, object]]) -> dict[str, object]:
    return {key: value for key, value in items if key != "memory" or value}


@dataclass
class Bucket:
    """One bucket of a plan, with its memory."""

    index: int
    spec: BucketSpec
    flat: Array
    """All tensors and the padding, one-dimensional."""
    views: dict[str, Array] = field(init=False)
    """The tensors, by name and in their shapes. Share memory with `flat`."""
    padding: Array = field(init=False)
    """The elements after the tensors."""
    step: int = 0
    """The training step of its latest exchange, counted from 0."""
    plan: Plan | None = field(default=None, repr=False)
    """The plan of which it is a bucket; None for a bucket alone."""

    def __post_init__(self) -> None:
        wanted = dtype_named(self.spec.dtype)
        if self.flat.shape != (self.spec.size,) or self.flat.dtype != wanted:
            raise ArrayError(
                f"bucket {self.index}: its storage is {self.flat.dtype}{self.flat.shape}, "
                f"expected {wanted}({self.spec.size},)"
            )
        self.views = self.spec.cut(self.flat)
        self.padding = self.flat[sum(tensor.size for tensor in self.spec.tensors) :]

    def clear_padding(self, x: Array) -> None:
        """Set the padding in `x`, an array like `flat`, to zero.

        A codec that rotates leaves errors there, and checkpoints hold no padding.
        """
        if self.padding.size:
            x[-self.padding.size :] = 0

    @property
    def nbytes(self) -> int:
        """Bytes of `flat`."""
        return self.spec.nbytes


def make_buckets(plan: Plan, storage: Sequence[Array]) -> list[Bucket]:
    """Make the buckets of `plan` with the flat arrays in `storage`, one for each.

    Raises:
        ArrayError: There are more or fewer arrays than buckets, or one does not fit.
    """
    if len(storage) != len(plan.buckets):
        raise ArrayError(f"storage has {len(storage)} arrays, expected {len(plan.buckets)}")
    pairs = zip(plan.buckets, storage, strict=True)
    return [Bucket(i, spec, flat, plan=plan) for i, (spec, flat) in enumerate(pairs)]


def _check_size(what: str, value: object, *, least: int) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or not least <= value < 2**63:
        raise ArrayError(f"Plan.from_json: {what} is {shown(value)}, expected an integer of at least {least}")


def _aligned(tensors: list[TensorSpec], alignment: int) -> int:
    return -(-sum(tensor.size for tensor in tensors) // alignment) * alignment
