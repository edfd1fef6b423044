"""Parts of a `State`: their conversion to trees that `checkpoint.trees` packs, and back into the same objects.

object        has `state_dict` and `load_state_dict`: modules, optimizers, schedulers, samplers
array         of NumPy or CuPy, or a tensor: restored in place
plain value   anything else that a checkpoint can hold: replaced
container     a list, tuple or dict of all these: replaced by one with the same objects and arrays
Own(...)      one of these that is private to its rank
"""

from __future__ import annotations

import sys
from collections import OrderedDict
from collections.abc import Callable, Container, Iterable, Iterator
from typing import Any, NamedTuple, TypeAlias

import numpy as np

from ... import arrays
from ...arrays import Array
from ...checkpoint.optimizers import (
    is_optimizer,
    is_sharded_optimizer,
    load_in_place,
    other_class,
    with_dtype,
)
from ...checkpoint.trees import DEEPEST, Own, Packed, Slab, as_tagged, container_type, from_tagged, pack
from ...errors import ArrayError, UnsupportedError
from .shards import as_sharded, is_sharded, slab_of

Memory: TypeAlias = tuple[int, int]
"""The address and the bytes of an array."""
_AGAIN = "make the same model again"


def packed(tree: object) -> Packed:
    """Pack a tree, with tensors as arrays.

    Raises:
        UnsupportedError: A leaf is neither a plain value nor an array; the message has its path.
        ArrayError: The tree is nested too deep, or has an `Own` inside an `Own`.
    """
    return pack(tree, _to_array)


def restored(tag: str, array: Array) -> object:
    """Convert a tagged array to a value of a tree; a `trees.FromArray`."""
    if tag == "sharded":
        return array
    if tag == "tensor":
        return arrays.as_tensor(array, sys.modules["torch"])
    return from_tagged(tag, array)


def _to_array(value: object) -> tuple[str, Array | Slab] | None:
    if isinstance(value, Slab):
        return "sharded", value
    if is_sharded(value):
        return "sharded", slab_of(value)
    if arrays.is_tensor(value):
        return "tensor", arrays.as_array(value.detach().resolve_conj().resolve_neg())
    return as_tagged(value)


class Part:
    """One part of a state.

    Args:
        name: The name of the part.
        given: The value that the user gave.

    Raises:
        ArrayError: It is an `Own` without a rule, or with the rule "concatenate".
        UnsupportedError: It cannot be saved; the message has the path of the problem. Or it is an optimizer that
            is sharded over the ranks.
    """

    def __init__(self, name: str, given: object) -> None:
        if isinstance(given, Own) and given.reshape is None:
            raise ArrayError(
                f"State: {name} is an Own without a rule, but the number of ranks may change; give one: "
                'Own(value, "first"), "mean", "sum" or "drop"'
            )
        self.name = name
        self._own = given if isinstance(given, Own) else None
        self.value: Any = given.value if isinstance(given, Own) else given
        self._kept: object = None
        """The value when `tree` was called last, with containers of its own: what is restored in place."""
        self.sharded: list[str] = []
        """A text of each sharded array that was given; the same on all ranks."""
        self._objects: frozenset[str] | None = None
        """The paths of the objects that were given."""
        self.is_object = _is_object(f"State: {name}", self.value)
        self.is_array = not self.is_object and _is_array(self.value)
        _check_whole(f"State: {name}", self.value)
        try:
            tree = packed(self.tree())
            if any(slab.begin is None for slab in tree.slabs):
                raise ArrayError('a rank that dies takes its slab of "concatenate" along; use Checkpoints for it')
            if len(tree.own_trees) != self.is_own:
                raise ArrayError("it has an Own inside; mark the whole of it, or make it two parts")
            self.sharded = [f"{slab.path.replace('tree', name, 1)}, {slab.whole}" for slab in tree.slabs]
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

    def tree(self) -> object:
        """The part as a tree, which shares memory with the object.

        Raises:
            UnsupportedError: An object was put into it later.
        """
        found: list[str] = []
        kept, bare = _split(self.name, self.value, found)
        if self._objects is None:
            self._objects = frozenset(found)
        if new := sorted(set(found) - self._objects):
            raise UnsupportedError(
                f"{new[0]} is an object that was put into the state later; a process that joins would have none "
                "to restore: give it to State(...)"
            )
        self._kept = kept
        return bare if self._own is None else Own(bare, self._own.reshape)

    def memory(self, saved: object) -> Iterator[tuple[Memory, object]]:
        """The memory of each array that `load` may assign to, with the array that was saved."""
        return _memory(self._kept, saved.value if isinstance(saved, Own) else saved)

    def targets(self, saved: object) -> list[tuple[Slab, Slab]]:
        """Each slab in a result of `tree`, with the slab that this rank has of that tensor now.

        Raises:
            ArrayError: There is no such tensor now, or one of another shape or dtype; or it is an optimizer of
                another class.
        """
        found: list[tuple[Slab, Slab]] = []

        def note(path: str, leaf: object, like: object) -> object:
            if isinstance(leaf, Slab):
                found.append((leaf, _target(path, leaf, like)))
            elif arrays.is_tensor(leaf) and arrays.is_tensor(like) and leaf.dtype != like.dtype:
                raise ArrayError(f"{path} was committed as {leaf.dtype}, but is {like.dtype} now; {_AGAIN}")
            return leaf

        if (text := other_class(self.value, saved)) is not None:
            raise ArrayError(f"{self.name} {text}; make it of the same class again")
        _with_slabs(self.name, saved, _likeness(self.value), note)
        return found

    def with_shards(self, saved: object, slabs: Iterator[Slab]) -> object:
        """A result of `tree` with the tensors of `targets` in place of slabs, of the memory of these slabs."""

        def shard(path: str, leaf: object, like: object) -> object:
            if not isinstance(leaf, Slab):
                return leaf
            tensor = like.parameter if isinstance(like, _StatesOf) else like
            assert is_sharded(tensor)
            return as_sharded(next(slabs), tensor)

        return _with_slabs(self.name, saved, _likeness(self.value), shard)

    def load(self, saved: Any, conflicts: Container[Memory] = ()) -> None:
        """Restore a result of `tree`. Dropped objects and arrays, for which it is None, are left unchanged.

        Args:
            saved: The result of `tree`.
            conflicts: See `conflicts_of`.
        """
        saved = saved.value if isinstance(saved, Own) else saved
        if not self.is_array:
            self.value = _restored(self._kept, saved, conflicts)
        elif saved is not None:
            ours, shape = tuple(self.value.shape), tuple(saved.shape)
            if ours != shape:
                raise ArrayError(f"State: {self.name} has shape {ours}, but {shape} was committed")
            _assign(self.value, saved)


def conflicts_of(pairs: Iterable[tuple[Memory, object]]) -> set[Memory]:
    """Memory that several arrays share, for which different values were saved: none is restored in place."""
    first: dict[Memory, object] = {}
    conflicts = set()
    for memory, saved in pairs:
        other = first.setdefault(memory, saved)
        if other is not saved and _as_array(other).tobytes() != _as_array(saved).tobytes():
            conflicts.add(memory)
    return conflicts


def _split(path: str, value: Any, objects: list[str], depth: int = 0) -> tuple[Any, ...]:
    """Return `value` with containers of its own, and with state dicts in place of objects; add their paths."""
    kind: Any = container_type(value)
    if depth <= DEEPEST and kind in (list, tuple):
        pairs = [_split(f"{path}[{n}]", item, objects, depth + 1) for n, item in enumerate(value)]
        return kind(pair[0] for pair in pairs), kind(pair[1] for pair in pairs)
    if depth <= DEEPEST and kind in (dict, OrderedDict):
        split = {key: _split(f"{path}[{key!r}]", item, objects, depth + 1) for key, item in value.items()}
        return tuple(kind((key, pair[side]) for key, pair in split.items()) for side in (0, 1))
    if _is_object(path, value):
        _check_whole(path, value)
        objects.append(path)
        return value, value.state_dict()
    return value, value


class _StatesOf(NamedTuple):
    """The states of an optimizer for a parameter, which have its shape, perhaps of another dtype."""

    parameter: object


def _likeness(value: Any) -> object:
    """The tensors of a value, where its tree has them; in place of an optimizer's states a `_StatesOf`."""
    if is_optimizer(value):
        return {"state": dict(enumerate(_StatesOf(p) for group in value.param_groups for p in group["params"]))}
    if _is_object("", value):
        return value.state_dict()
    if isinstance(value, dict):
        return {key: _likeness(item) for key, item in value.items()}
    return [*map(_likeness, value)] if isinstance(value, (list, tuple)) else value


def _with_slabs(
    path: str, saved: object, like: object, convert: Callable[[str, object, object], object]
) -> object:
    """A tree with `convert(path, leaf, tensor)` in place of its leaves; the tensors are those of `like`."""
    if isinstance(saved, Slab) or not isinstance(saved, (dict, list, tuple)):
        return convert(path, saved, like)
    found = {
        key: _with_slabs(f"{path}[{key!r}]", item, _inside(like, key), convert)
        for key, item in (saved.items() if isinstance(saved, dict) else enumerate(saved))
    }
    if not isinstance(saved, dict):
        return type(saved)(found.values())
    filled = saved.copy()
    filled.update(found)
    return filled


def _inside(like: object, key: object) -> object:
    """The item of `like` under a key; any state of a parameter is a `_StatesOf` it."""
    if isinstance(like, _StatesOf):
        return like
    items = dict(enumerate(like)) if isinstance(like, (list, tuple)) else like
    return items.get(key) if isinstance(items, dict) else None


def _target(path: str, saved: Slab, like: object) -> Slab:
    """The slab that this rank has of a tensor of which `saved` was committed."""
    tensor = like.parameter if isinstance(like, _StatesOf) else like
    now = slab_of(tensor) if is_sharded(tensor) else None
    was, found = saved.whole, "no sharded tensor" if now is None else now.whole
    compared = [text.partition("[")[2] if tensor is not like else text for text in (was, found)]
    if now is None or compared[0] != compared[1]:
        raise ArrayError(f"{path} was committed as {was}, but is {found} now; {_AGAIN}")
    return now


def _memory(kept: Any, saved: object) -> Iterator[tuple[Memory, object]]:
    if isinstance(saved, (list, tuple)) and isinstance(kept, (list, tuple)):
        for each, value in zip(kept, saved, strict=False):
            yield from _memory(each, value)
    elif isinstance(saved, dict) and _is_object("", kept):
        yield from _memory(kept.state_dict(), saved)
    elif isinstance(saved, dict) and isinstance(kept, dict):
        for key, value in saved.items():
            yield from _memory(kept.get(key), value)
    elif _is_array(kept) and _is_array(saved):
        yield _memory_of(kept), saved


def _memory_of(x: object) -> Memory:
    array = _as_array(x)
    return arrays.address(array), int(array.nbytes)


def _as_array(x: object) -> Array:
    return arrays.as_array(x.detach() if arrays.is_tensor(x) else x)


def _restored(kept: object, saved: object, conflicts: Container[Memory]) -> object:
    """The value that was saved, made of the objects and arrays that were kept, where these fit."""
    if isinstance(saved, (list, tuple)) and type(kept) is type(saved):
        rest = saved[len(kept) :]
        return type(saved)([*(_restored(k, s, conflicts) for k, s in zip(kept, saved, strict=False)), *rest])
    if isinstance(saved, dict) and type(kept) is type(saved):
        return type(saved)((key, _restored(kept.get(key), value, conflicts)) for key, value in saved.items())
    if _is_object("", kept):
        if saved is not None:
            _load(kept, saved)
        return kept
    if _is_array(kept):
        if saved is None:
            return kept
        if _is_array(saved) and _fits(kept, saved) and _memory_of(kept) not in conflicts:
            _assign(kept, saved)
            return kept
    return saved


def _load(target: Any, saved: Any) -> None:
    """Load a state dict into its object."""
    if is_optimizer(target):
        load_in_place(target, saved, with_dtype)
        return
    versions = getattr(target.state_dict(), "_metadata", None)
    if versions is not None:  # of a module, which PyTorch stores as an attribute
        saved._metadata = versions
    target.load_state_dict(saved)


def _check_whole(path: str, value: object) -> None:
    """Raise `UnsupportedError` if `value` is an optimizer that is sharded over the ranks."""
    if is_sharded_optimizer(value):
        raise UnsupportedError(
            f"{path} is a {type(value).__name__}, of which each rank holds the states of its "
            "share alone: when a rank dies, they are lost, and on another number of ranks the shares differ. "
            "Give a plain optimizer, which every rank has as a whole; or train without elastic.run, and save "
            "this one by bagua_torch.Checkpoints"
        )


def _is_object(name: str, value: object) -> bool:
    if isinstance(value, type):
        raise UnsupportedError(f"{name} is the class {value.__qualname__}; give an object of it")
    saves, loads = (callable(getattr(value, method, None)) for method in ("state_dict", "load_state_dict"))
    if saves != loads:
        has, lacks = ("state_dict", "load_state_dict") if saves else ("load_state_dict", "state_dict")
        raise UnsupportedError(f"{name} is a {type(value).__name__} with {has} but without {lacks}")
    return saves


def _is_array(value: object) -> bool:
    return arrays.is_tensor(value) or (not isinstance(value, np.generic) and as_tagged(value) is not None)


def _fits(target: Any, saved: Any) -> bool:
    """Whether `target` can be assigned to, and has the dtype and the shape of `saved`."""
    if arrays.is_tensor(target):
        writable = not target.is_inference() and (0 not in target.stride() or target.numel() < 2)
    else:
        flags = getattr(target, "flags", None)  # JAX's arrays have none, and CuPy's no `writeable`
        writable = flags is not None and getattr(flags, "writeable", True)
    return writable and target.dtype == saved.dtype and tuple(target.shape) == tuple(saved.shape)


def _assign(target: object, saved: object) -> None:
    """Assign to an array or a tensor, in place."""
    if arrays.is_tensor(target):
        target.detach().copy_(saved if arrays.is_tensor(saved) else arrays.as_tensor(saved, sys.modules["torch"]))
        return
    array = arrays.as_array(target)
    if isinstance(array, np.ndarray):
        array[...] = saved
    else:
        with array.device:  # no communicator has selected a device yet
            array[...] = arrays.namespace(array).asarray(saved)
