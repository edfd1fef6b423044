"""Trees of plain values and arrays as JSON beside a list of arrays, and back, without pickle.

    {"weights": x, "lr": 0.1}   ->   {"dict": [["weights", {"array": 0}], ["lr", 0.1]]}   and   [x]

None, bool, int, finite floats, str and lists are JSON's own; everything else is an object with one tag. Types are
compared exactly: a subclass of dict or float is refused, because it would come back as something else.
"""

from __future__ import annotations

import base64
import math
import struct
from collections import Counter, OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import numpy as np

from .. import arrays
from ..arrays import Array
from ..errors import ArrayError, UnsupportedError
from .texts import compared, distinct, place, whole

Json = Any
"""What the json module writes and reads."""

Rule = Literal["first", "mean", "sum", "drop"]
"""How what differs between ranks comes to another number of ranks; see `Own`."""

RULES = ("first", "mean", "sum", "drop")
DEEPEST = 100
"""More levels than this are refused: such a tree most likely contains itself."""

_MAPPINGS: dict[type, str] = {dict: "dict", OrderedDict: "OrderedDict", Counter: "Counter"}
_MADE: dict[str, Callable[[list[tuple[Any, Any]]], Any]] = {
    "dict": dict,
    "OrderedDict": OrderedDict,
    "Counter": lambda pairs: Counter(dict(pairs)),
}
_JSON_INT = 1 << 63


@dataclass(frozen=True)
class Own:
    """Marks, in a tree to save, what belongs to this rank and may differ from the other ranks'.

    Loaded on the same number of ranks, every rank finds its own again. On another number of ranks:

        None       refused, with the place in the tree
        "first"    every rank gets rank 0's
        "mean"     every rank gets the mean of all ranks' arrays; other values must be equal
        "sum"      every rank gets an equal share of the sum, so that the sum stays what it was
        "drop"     every rank gets None, and makes it anew

    Means and sums are of floats and complex numbers, computed in double precision; integers must be equal.

    Args:
        value: A tree, or a part of one.
        reshape: What happens on another number of ranks.

    Raises:
        ArrayError: `reshape` is something else.

    >>> Own([1.0, 2.0], "first").reshape
    'first'
    """

    value: Any
    reshape: Rule | None = None

    def __post_init__(self) -> None:
        if self.reshape is not None and self.reshape not in RULES:
            raise ArrayError(f"Own: reshape is {self.reshape!r}, expected None or one of {', '.join(RULES)}")


class Leaf(NamedTuple):
    """An array of a tree."""

    path: str
    """Its place, with whole keys; no other array of the tree has the same."""
    array: Array


class Packed(NamedTuple):
    """A tree in parts: what all ranks share, and what is this rank's own."""

    tree: Json
    shared: list[Leaf]
    own_trees: list[Json]
    """One for every `Own`, in the order of the tree."""
    own: list[Leaf]
    values: list[tuple[str, str]]
    """The place of every node that all ranks share, and a text that differs where the node does."""


ToArray = Callable[[Any], "tuple[str, Array] | None"]
"""Gives the tag and the array of a value of another library, or None if it is none."""
FromArray = Callable[[str, Array], Any]
"""Gives back such a value from its tag and an array of NumPy."""


def as_tagged(value: Any) -> tuple[str, Array] | None:
    """The tag and the array of an array or a scalar of NumPy or CuPy, or of what has `__dlpack__`."""
    if isinstance(value, np.generic):
        return "scalar", np.asarray(value)
    if isinstance(value, np.ndarray) or hasattr(value, "__dlpack__"):
        return "array", arrays.as_array(value)
    return None


def from_tagged(tag: str, array: Array) -> Any:
    """What `as_tagged` took; a tensor comes back as an array."""
    return array[()] if tag == "scalar" else array


def pack(tree: Any, to_array: ToArray = as_tagged) -> Packed:
    """Take a tree apart.

    Raises:
        UnsupportedError: It holds something that is no plain value and no array; the message has its place.
        ArrayError: It is nested too deep, or has an `Own` inside an `Own`.
    """
    return _Packer(to_array).pack(tree)


class _Packer:
    def __init__(self, to_array: ToArray) -> None:
        self._to_array = to_array
        self._packed = Packed(None, [], [], [], [])
        self._inside: str | None = None
        """The place of the `Own` that is being packed."""

    def pack(self, tree: Any) -> Packed:
        return self._packed._replace(tree=self._encode(tree, "tree", 0))

    def _encode(self, value: Any, path: str, depth: int) -> Json:
        if depth > DEEPEST:
            raise ArrayError(f"{path[:60]}... is nested in more than {DEEPEST} levels; does it contain itself?")
        kind = type(value)
        if kind is Own:
            return self._encode_own(value, path, depth)
        if kind is list or kind is tuple:
            items = [self._encode(item, f"{path}[{n}]", depth + 1) for n, item in enumerate(value)]
            self._note(path, f"a {kind.__name__} of {len(items)}")
            return items if kind is list else {"tuple": items}
        if kind in _MAPPINGS:
            keys = [_plain(key, f"a key of {place(path)}", 0) for key in value]
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
            raise UnsupportedError(f"{place(path)}: {exc}") from exc
        if tagged is None:
            plain = _plain(value, path, depth)
            self._note(path, whole(value))
            return plain
        tag, array = tagged
        if not arrays.is_movable(array.dtype):
            raise UnsupportedError(
                f"{place(path)} is an array of {array.dtype}, expected numbers in native byte order or bool"
            )
        self._note(path, f"{arrays.dtype_name(array.dtype)}{list(array.shape)}")
        leaves = self._packed.shared if self._inside is None else self._packed.own
        leaves.append(Leaf(path, array))
        return {tag: len(leaves) - 1}

    def _encode_own(self, value: Own, path: str, depth: int) -> Json:
        if self._inside is not None:
            raise ArrayError(f"{place(path)} is an Own inside the Own at {place(self._inside)}; mark it once")
        self._note(path, f"Own(reshape={value.reshape!r})")
        self._inside = path
        try:
            self._packed.own_trees.append(self._encode(value.value, path, depth + 1))
        finally:
            self._inside = None
        return {"own": len(self._packed.own_trees) - 1, "reshape": value.reshape, "path": path}

    def _note(self, path: str, text: str) -> None:
        if self._inside is None:
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
    raise UnsupportedError(
        f"{place(path)} is a {kind.__module__}.{kind.__qualname__}, which a checkpoint cannot hold; expected "
        "arrays, None, bool, int, float, complex, str, bytes, and lists, tuples and dicts of these"
    )


class Unpacker:
    """Puts trees together again.

    Args:
        array_at: Gives the array with a number.
        own: Gives what stands in the place of an `Own`, from its number, its rule and its path.
        from_array: Makes arrays what they were.
    """

    def __init__(
        self,
        array_at: Callable[[int], Array],
        own: Callable[[int, Rule | None, str], Any] | None = None,
        from_array: FromArray = from_tagged,
    ) -> None:
        self._array_at, self._own, self._from_array = array_at, own, from_array

    def unpack(self, node: Json) -> Any:
        """The tree that became `node`.

        Raises:
            ValueError: It is not what `pack` makes.
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
        if tag in ("int", "float", "complex", "bytes"):
            return _from_text(tag, content)
        if tag in ("array", "scalar", "tensor"):
            return self._from_array(tag, self._array_at(content))
        raise ValueError(f"unknown kind of value {tag!r}")


def _from_text(tag: str, text: str) -> Any:
    if tag == "int":
        return int(text, 16)
    if tag == "bytes":
        return base64.b64decode(text, validate=True)
    numbers = struct.unpack(">d" if tag == "float" else ">dd", bytes.fromhex(text))
    return numbers[0] if tag == "float" else complex(*numbers)
