"""Parts of a `State`: their conversion to trees that `checkpoint.trees` packs, and back into the same objects.

object        has `state_dict` and `load_state_dict`: modules, optimizers, schedulers, samplers
array         of NumPy or CuPy, or a tensor: restored in place
plain value   anything else that a checkpoint can hold: replaced
Own(...)      one of these that is private to its rank
"""

from __future__ import annotations

import sys
from typing import Any

import numpy as np

from ... import arrays
from ...arrays import Array
from ...checkpoint.optimizers import is_optimizer, is_sharded, load_in_place, with_dtype
from ...checkpoint.trees import Own, Packed, as_tagged, from_tagged, pack
from ...errors import ArrayError, UnsupportedError


def packed(tree: Any) -> Packed:
    """Pack a tree, with tensors as arrays.

    Raises:
        UnsupportedError: A leaf is neither a plain value nor an array; the message has its path.
        ArrayError: The tree is nested too deep, or has an `Own` inside an `Own`.
    """
    return pack(tree, _to_array)


def restored(tag: str, array: Array) -> Any:
    """Convert a tagged array to a value of a tree; a `trees.FromArray`."""
    if tag == "tensor":
        return arrays.as_tensor(array, sys.modules["torch"])
    return from_tagged(tag, array)


def _to_array(value: Any) -> tuple[str, Array] | None:
    if arrays.is_tensor(value):
        return "tensor", arrays.as_array(value.detach().resolve_conj().resolve_neg())
    return as_tagged(value)


class Part:
    """One part of a state.

    Args:
        name: The name of the part.
        given: The value that the user gave.

    Raises:
        ArrayError: It is an `Own` without a rule.
        UnsupportedError: It cannot be saved; the message has the path of the problem. Or it is an optimizer that
            is sharded over the ranks.
    """

    def __init__(self, name: str, given: Any) -> None:
        if isinstance(given, Own) and given.reshape is None:
            raise ArrayError(
                f"State: {name} is an Own without a rule, but the number of ranks may change; give one: "
                'Own(value, "first"), "mean", "sum" or "drop"'
            )
        self.name = name
        self._own = given if isinstance(given, Own) else None
        self.value: Any = given.value if isinstance(given, Own) else given
        if is_sharded(self.value):
            raise UnsupportedError(
                f"State: {name} is a {type(self.value).__name__}, of which each rank holds the states of its "
                "share alone: when a rank dies, they are lost, and on another number of ranks the shares differ. "
                "Give a plain optimizer, which every rank has as a whole; or train without elastic.run, and save "
                "this one by bagua_torch.Checkpoints"
            )
        self.is_object = _is_object(name, self.value)
        self.is_array = not self.is_object and _is_array(self.value)
        try:
            if len(packed(self.tree()).own_trees) != self.is_own:
                raise ArrayError("it has an Own inside; mark the whole of it, or make it two parts")
        except (ArrayError, UnsupportedError) as exc:
            raise type(exc)(f"State: {name} cannot be kept: {exc}") from exc

    @property
    def is_own(self) -> bool:
        """Whether it is private to its rank."""
        return self._own is not None

    @property
    def is_plain(self) -> bool:
        """Whether it is a plain value, which users may replace."""
        return not self.is_object and not self.is_array

    def tree(self) -> Any:
        """The part as a tree, which shares memory with the object."""
        bare = self.value.state_dict() if self.is_object else self.value
        return bare if self._own is None else Own(bare, self._own.reshape)

    def load(self, saved: Any) -> None:
        """Restore a result of `tree`. Dropped objects and arrays, for which it is None, are left unchanged."""
        saved = saved.value if isinstance(saved, Own) else saved
        if self.is_object:
            if saved is not None and is_optimizer(self.value):
                load_in_place(self.value, saved, with_dtype)
            elif saved is not None:
                self.value.load_state_dict(_with_metadata(saved, self.value))
        elif self.is_array:
            if saved is not None:
                _assign(self.name, self.value, saved)
        else:
            self.value = saved


def _is_object(name: str, value: Any) -> bool:
    if isinstance(value, type):
        raise UnsupportedError(f"State: {name} is the class {value.__qualname__}; give an object of it")
    saves, loads = (callable(getattr(value, method, None)) for method in ("state_dict", "load_state_dict"))
    if saves != loads:
        has, lacks = ("state_dict", "load_state_dict") if saves else ("load_state_dict", "state_dict")
        raise UnsupportedError(f"State: {name} is a {type(value).__name__} with {has} but without {lacks}")
    return saves


def _is_array(value: Any) -> bool:
    return arrays.is_tensor(value) or (not isinstance(value, np.generic) and as_tagged(value) is not None)


def _assign(name: str, target: Any, saved: Any) -> None:
    """Assign to an array or a tensor, in place."""
    shape = tuple(saved.shape)
    if tuple(target.shape) != shape:
        raise ArrayError(f"State: {name} has shape {tuple(target.shape)}, but {shape} was committed")
    if arrays.is_tensor(target):
        target.detach().copy_(saved if arrays.is_tensor(saved) else arrays.as_tensor(saved, sys.modules["torch"]))
        return
    array = arrays.as_array(target)
    if isinstance(array, np.ndarray):
        array[...] = saved
    else:
        with array.device:  # no communicator has selected a device yet
            array[...] = arrays.namespace(array).asarray(saved)


def _with_metadata(saved: Any, target: Any) -> Any:
    """The state dict of a module with its version metadata, which PyTorch stores as an attribute."""
    versions = getattr(target.state_dict(), "_metadata", None)
    if versions is not None:
        saved._metadata = versions
    return saved
