"""Trees of plain values and arrays as JSON beside a list of arrays, and back, without pickle.

    {"weights": x, "lr": 0.1}   ->   {"dict": [["weights", {"array": 0}], ["lr", 0.1]]}   and   [x]

None, bool, int, finite floats, str and lists are plain JSON; everything else is an object with one tag. Types are
compared exactly: a subclass of dict or float is refused, because it would be restored as another type.
"""

from __future__ import annotations

import base64
import hashlib
import math
import struct
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any, Literal, NamedTuple

import numpy as np

from .. import arrays
from ..arrays import Array
from ..bucket import Flats, Views
from ..errors import ArrayError, UnsupportedError, shown

Json = Any
"""A value of the json module."""

Rule = Literal["first", "mean", "sum", "drop", "concatenate"]
"""How per-rank values are loaded on another number of ranks; see `Own`."""

RULES = ("first", "mean", "sum", "drop", "concatenate")
DEEPEST = 100
"""The largest depth: a deeper tree most likely contains itself."""

_MAPPINGS: dict[type, str] = {dict: "dict", OrderedDict: "OrderedDict", Counter: "Counter"}
_MADE: dict[str, Callable[[list[tuple[object, object]]], object]] = {
    "dict": dict,
    "OrderedDict": OrderedDict,
    "Counter": lambda pairs: Counter(dict(pairs)),
}
_JSON_INT = 1 << 63
_COMPARED = 2000
"""The longest text that ranks compare as it is; of a longer one they compare the ends and a digest."""
_SHOWN = 80
"""Characters of each of two texts in a message."""
_PATH = 400
"""Characters of a path in a message."""


@dataclass(frozen=True)
class Own:
    """Marks a per-rank value in a tree to save.

    Loaded on the same number of ranks, every rank gets its own value. On another number of ranks:

        None       refused, with the path in the tree
        "first"    every rank gets rank 0's
        "mean"     every rank gets the mean of all ranks' arrays; other values must be equal
        "sum"      every rank gets an equal share of the sum, which stays the same
        "drop"     every rank gets None, and recreates it

    Means and sums are of arrays of floats and complex numbers, computed in double precision. Integers must be
    equal for a mean, and are refused for a sum: count in an array of float64.

    With the rule "concatenate", the values are slabs of one array along `axis`, in the order of the ranks. Their
    lengths along the axis may differ, and may be 0. Whatever the number of ranks, also on the same number, each
    gets a slab of the length that it gives to `Checkpoints.load(like=...)`; or else of `numpy.array_split`.

    Args:
        value: A tree, or a part of one; for "concatenate" an array, or lists, tuples and dicts of arrays.
        reshape: The rule for another number of ranks.
        axis: The axis of "concatenate"; negative ones count from the last.

    Raises:
        ArrayError: `reshape` is not one of these; or it is "sum", and `value` has a number that is no such array;
            or `axis` is no integer, or given for another rule.

    >>> Own([1.0, 2.0], "first").reshape
    'first'
    """

    value: Any
    reshape: Rule | None = None
    axis: int = 0

    def __post_init__(self) -> None:
        if self.reshape is not None and self.reshape not in RULES:
            raise ArrayError(f"Own: reshape is {self.reshape!r}, expected None or one of {', '.join(RULES)}")
        if type(self.axis) is not int or (self.axis and self.reshape != "concatenate"):
            raise ArrayError(f'Own: axis is {shown(self.axis)}, expected an integer, with "concatenate" alone')
        if self.reshape == "sum" and (found := _not_summed(self.value)) is not None:
            raise ArrayError(
                f'Own: value has {found}, and "sum" shares arrays of floats and complex numbers alone; '
                "count in an array, as np.zeros(1)"
            )


def _not_summed(value: object, depth: int = 0) -> str | None:
    """The numbers of a tree, except arrays of floats and complex numbers."""
    if type(value) in (int, float, complex):
        return f"a plain {type(value).__name__}"
    dtype = getattr(value, "dtype", None)
    if dtype is not None:
        name = str(dtype).removeprefix("torch.")
        return None if name in arrays.FLOATS | arrays.COMPLEX else f"an array of {name}"
    items = value.values() if isinstance(value, dict) else value if isinstance(value, (list, tuple)) else ()
    found = (_not_summed(item, depth + 1) for item in items) if depth <= DEEPEST else ()
    return next(filter(None, found), None)


def container_type(value: object) -> type:
    """The type of a value; list and dict for what `Plan.allocate` and `Plan.cut` return."""
    kind = type(value)
    return list if kind is Flats else dict if kind is Views else kind


class Leaf(NamedTuple):
    """An array of a tree."""

    path: str
    """Its path, with complete keys; distinct for each array of the tree."""
    array: Array
    rule: Rule | None
    """The rule of its `Own`; None outside of one."""


class Slab(NamedTuple):
    """A rank's part of an array that is distributed along an axis."""

    path: str
    array: Array
    axis: int
    begin: int | None = None
    """Its first index along the axis; None where that follows from the lengths of all ranks' slabs."""
    total: int = 0
    """The length of the whole array along the axis, if `begin` is known."""

    @property
    def kind(self) -> str:
        """Its `slab_text`, which is the same for all slabs of an array."""
        return slab_text(arrays.dtype_name(self.array.dtype), self.array.shape, self.axis)

    @property
    def length(self) -> int:
        """The length along the axis."""
        return int(self.array.shape[self.axis])

    @property
    def whole(self) -> str:
        """A text of the whole array, if `begin` is known."""
        shape = [*self.array.shape]
        shape[self.axis] = self.total
        return f"{arrays.dtype_name(self.array.dtype)}{shape}, sharded along axis {self.axis}"


def slab_text(dtype: str, shape: Sequence[int], axis: int) -> str:
    """A text of a slab of an array, without the length along the axis.

    >>> slab_text("float64", (2, 5, 3), 1)
    'a slab float64[2, *, 3]'
    """
    lengths = ("*" if n == axis else str(length) for n, length in enumerate(shape))
    return f"a slab {dtype}[{', '.join(lengths)}]"


class Packed(NamedTuple):
    """A tree in parts: shared and per-rank values."""

    tree: Json
    shared: list[Leaf]
    own_trees: list[Json]
    """The tree of every `Own`, in the order of the tree."""
    own: list[Leaf]
    slabs: list[Slab]
    """Distributed arrays: in an `Own` with the rule "concatenate", or sharded ones. Their tree is shared."""
    values: list[tuple[str, str]]
    """The path of every shared node, and a text for comparison."""

    @property
    def leaves(self) -> list[Leaf]:
        """All arrays: shared and per-rank ones, then slabs, with the rule "concatenate"."""
        return [*self.shared, *self.own, *(Leaf(each.path, each.array, "concatenate") for each in self.slabs)]


ToArray = Callable[[object], "tuple[str, Array | Slab] | None"]
"""Returns the tag and the array, or the slab, of a value of another library; None for other values."""
FromArray = Callable[[str, Array], object]
"""Restores such a value from its tag and a NumPy array."""


def as_tagged(value: object) -> tuple[str, Array] | None:
    """The tag and the array of a NumPy or CuPy array or scalar, or of an object with `__dlpack__`."""
    if isinstance(value, np.generic):
        return "scalar", np.asarray(value)
    if isinstance(value, np.ndarray) or hasattr(value, "__dlpack__"):
        return "array", arrays.as_array(value)
    return None


def from_tagged(tag: str, array: Array) -> object:
    """Restore an argument of `as_tagged`; a tensor is restored as an array."""
    return array[()] if tag == "scalar" else array


def pack(tree: object, to_array: ToArray = as_tagged) -> Packed:
    """Separate a tree into JSON and arrays.

    Raises:
        UnsupportedError: It holds a value that is neither plain nor an array; the message names its path.
        ArrayError: It is nested too deeply, or has an `Own` inside an `Own`.
    """
    return _Packer(to_array).pack(tree)


class _Packer:
    def __init__(self, to_array: ToArray) -> None:
        self._to_array = to_array
        self._packed = Packed(None, [], [], [], [], [])
        self._inside: str | None = None
        """The path of the `Own` that is being packed."""
        self._axis: int | None = None
        """The axis of that `Own`, if its rule is "concatenate"."""
        self._rule: Rule | None = None

    def pack(self, tree: object) -> Packed:
        return self._packed._replace(tree=self._encode(tree, "tree", 0))

    def _encode(self, value: Any, path: str, depth: int) -> Json:
        if depth > DEEPEST:
            raise ArrayError(f"{path[:60]}... is nested in more than {DEEPEST} levels; does it contain itself?")
        kind = container_type(value)
        if kind is Own:
            return self._encode_own(value, path, depth)
        if kind is list or kind is tuple:
            items = [self._encode(item, f"{path}[{n}]", depth + 1) for n, item in enumerate(value)]
            self._note(path, f"a {kind.__name__} of {len(items)}")
            return items if kind is list else {"tuple": items}
        if kind in _MAPPINGS:
            keys = [_plain(key, f"a key of {shortened(path)}", 0) for key in value]
            names = distinct(value)
            self._note(path, f"a {kind.__name__} of {', '.join(names) or 'nothing'}")
            items = [
                self._encode(item, f"{path}[{name}]", depth + 1)
                for name, item in zip(names, value.values(), strict=True)
            ]
            return {_MAPPINGS[kind]: [list(pair) for pair in zip(keys, items, strict=True)]}
        try:
            tagged = self._to_array(value)
        except UnsupportedError as exc:
            raise UnsupportedError(f"{shortened(path)}: {exc}") from exc
        if tagged is None:
            plain = _plain(value, path, depth)
            if self._axis is not None:
                raise ArrayError(f'{shortened(path)} is {shown(value)}: "concatenate" expects arrays alone')
            self._note(path, whole(value))
            return plain
        tag, array = tagged
        if isinstance(array, Slab):
            if self._inside is not None:
                raise ArrayError(f"{shortened(path)} is sharded, so it has no rule of an Own; give it without")
            return self._encode_slab(tag, array._replace(path=path))
        if not arrays.is_movable(array.dtype):
            raise UnsupportedError(
                f"{shortened(path)} is an array of {array.dtype}, expected numbers in native byte order or bool"
            )
        if self._axis is not None:
            if not -array.ndim <= self._axis < array.ndim:
                shape = tuple(array.shape)
                raise ArrayError(f"{shortened(path)} has the shape {shape}, and no axis {self._axis}")
            return self._encode_slab(tag, Slab(path, array, self._axis % array.ndim))
        self._note(path, f"{arrays.dtype_name(array.dtype)}{list(array.shape)}")
        leaves = self._packed.shared if self._inside is None else self._packed.own
        leaves.append(Leaf(path, array, self._rule))
        return {tag: len(leaves) - 1}

    def _encode_own(self, value: Own, path: str, depth: int) -> Json:
        if self._inside is not None:
            raise ArrayError(
                f"{shortened(path)} is an Own inside the Own at {shortened(self._inside)}; mark it once"
            )
        self._note(path, f"Own(reshape={value.reshape!r})")
        self._inside, self._rule = path, value.reshape
        self._axis = value.axis if value.reshape == "concatenate" else None
        try:
            tree = self._encode(value.value, path, depth + 1)
            if self._axis is not None:
                return tree
        finally:
            self._inside = self._axis = self._rule = None
        self._packed.own_trees.append(tree)
        return {"own": len(self._packed.own_trees) - 1, "reshape": value.reshape, "path": path}

    def _encode_slab(self, tag: str, slab: Slab) -> Json:
        self._note(slab.path, slab.kind)
        self._packed.slabs.append(slab)
        return {"slab": len(self._packed.slabs) - 1, "tag": tag}

    def _note(self, path: str, text: str) -> None:
        if self._inside is None or self._axis is not None:
            self._packed.values.append((path, compared(text)))


def _plain(value: Any, path: str, depth: int) -> Json:
    kind = type(value)
    if value is None or kind is bool or kind is str:
        return value
    if kind is int:
        return value if -_JSON_INT <= value < _JSON_INT else {"int": hex(value)}
    if kind is float:
        return value if math.isfinite(value) else {"float": struct.pack(">d", value).hex()}
    if kind is complex:
        return {"complex": struct.pack(">dd", value.real, value.imag).hex()}
    if kind is bytes:
        return {"bytes": base64.b64encode(value).decode()}
    if kind is tuple and depth < DEEPEST:  # as a key
        return {"tuple": [_plain(item, path, depth + 1) for item in value]}
    cure = "; pass its state_dict()" if callable(getattr(value, "state_dict", None)) else ""
    raise UnsupportedError(
        f"{shortened(path)} is a {kind.__module__}.{kind.__qualname__}, which a checkpoint cannot hold; expected "
        f"arrays, None, bool, int, float, complex, str, bytes, and lists, tuples and dicts of these{cure}"
    )


class Unpacker:
    """Restores trees from JSON and arrays.

    Args:
        array_at: Returns the array with a number.
        own: Returns the value for an `Own`, from its number, its rule and its path.
        from_array: See `FromArray`.
        slab_at: Returns this rank's part of the distributed array with a number.
    """

    def __init__(
        self,
        array_at: Callable[[int], Array],
        own: Callable[[int, Rule | None, str], object] | None = None,
        from_array: FromArray = from_tagged,
        slab_at: Callable[[int], Array] | None = None,
    ) -> None:
        self._array_at, self._own, self._from_array, self._slab_at = array_at, own, from_array, slab_at

    def unpack(self, node: Json) -> Any:
        """Restore the tree of `node`.

        Raises:
            ValueError: `pack` does not make such a node.
        """
        if isinstance(node, list):
            return [self.unpack(item) for item in node]
        if not isinstance(node, dict):
            return node
        tag, content = next(iter(node.items()))
        if tag in _MADE:
            return _MADE[tag]([(self.unpack(key), self.unpack(item)) for key, item in content])
        if tag == "tuple":
            return tuple(self.unpack(item) for item in content)
        if tag == "own" and self._own is not None:
            return self._own(content, node["reshape"], node["path"])
        if tag == "slab" and self._slab_at is not None:
            return self._from_array(node["tag"], self._slab_at(content))
        if tag in ("int", "float", "complex", "bytes"):
            return _from_text(tag, content)
        if tag in ("array", "scalar", "tensor"):
            return self._from_array(tag, self._array_at(content))
        raise ValueError(f"unknown kind of value {tag!r}")


def _from_text(tag: str, text: str) -> object:
    if tag == "int":
        return int(text, 16)
    if tag == "bytes":
        return base64.b64decode(text, validate=True)
    numbers = struct.unpack(">d" if tag == "float" else ">dd", bytes.fromhex(text))
    return numbers[0] if tag == "float" else complex(*numbers)


# Texts of keys and values: complete for identification, shortened for messages -----------------------------


def distinct(values: Iterable[object]) -> list[str]:
    """A distinct text for each key of a dict.

    >>> distinct(["a", 1, float("nan"), float("nan")])
    ["'a'", '1', 'nan', 'nan#2']
    """
    found: dict[str, int] = {}  # text -> number of keys
    for value in values:
        text = unlike = whole(value)
        while unlike in found:
            found[text] += 1
            unlike = f"{text}#{found[text]}"
        found[unlike] = 1
    return list(found)


def whole(value: object) -> str:
    """The repr of `value`, also of an integer with more digits than Python converts."""
    try:
        return repr(value)
    except ValueError:
        if isinstance(value, tuple):
            return f"({', '.join(map(whole, value))},)"
        return hex(value) if isinstance(value, int) else object.__repr__(value)


def compared(text: str) -> str:
    """A text that ranks compare in place of `text`: not much longer than `_COMPARED`, and distinct."""
    if len(text) <= _COMPARED:
        return text
    digest = hashlib.blake2b(text.encode(errors="surrogatepass"), digest_size=8).hexdigest()
    half = _COMPARED // 2
    return f"{text[:half]}...{text[-half:]} ({len(text)} characters, {digest})"


def differing_parts(mine: str, other: str) -> tuple[str, str]:
    """Two different texts, for a message: if one is long, the surroundings of the first difference.

    >>> differing_parts("short", "shore")
    ('short', 'shore')
    >>> [len(text) for text in differing_parts("a" * 500 + "x" + "b" * 500, "a" * 500 + "y" + "b" * 500)]
    [86, 86]
    """
    if max(len(mine), len(other)) <= _SHOWN:
        return mine, other
    pairs = enumerate(zip(chain(mine, [None]), chain(other, [None]), strict=False))
    first = next((n for n, (a, b) in pairs if a != b), 0)
    begin = max(0, first - _SHOWN // 2)
    return _part(mine, begin), _part(other, begin)


def _part(text: str, begin: int) -> str:
    end = begin + _SHOWN
    return f"{'...' if begin else ''}{text[begin:end]}{'...' if end < len(text) else ''}"


def shortened(path: str) -> str:
    """A path for a message: without its middle if it is very long."""
    return path if len(path) <= _PATH else f"{path[: _PATH // 2]}...{path[-_PATH // 2 :]}"
