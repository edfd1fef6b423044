"""Load state dicts into PyTorch optimizers in place: groups and states stay the same objects.

`Optimizer.load_state_dict` makes new dicts: a program that holds `optimizer.param_groups[0]`, as an outer
optimizer does, would then set a learning rate without effect. It also casts floating-point states to the
dtype of their parameter, though an optimizer may keep float32 for a parameter in bfloat16.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

from ..arrays import is_tensor
from ..errors import ArrayError

Restore: TypeAlias = Callable[[Any, Any], Any]
"""Maps a tensor as loaded by the optimizer, and as saved, to the tensor to keep."""


def is_optimizer(value: object) -> bool:
    """Whether a value has parameter groups, as PyTorch's optimizers and their wrappers have."""
    return isinstance(getattr(value, "param_groups", None), list) and hasattr(value, "load_state_dict")


def is_sharded(value: object) -> bool:
    """Whether a value is PyTorch's ZeroRedundancyOptimizer, where each rank holds only a share of the states."""
    module = sys.modules.get("torch.distributed.optim.zero_redundancy_optimizer")
    return module is not None and isinstance(value, module.ZeroRedundancyOptimizer)


def check_settings(name: str, optimizer: Any, saved: Any) -> None:
    """Raise `ArrayError` if a state is of an optimizer of another class, whose step would lack settings.

    Settings that only one of both has are no error, as schedulers and releases of PyTorch add some: an optimizer
    of another class both lacks some and has others.

    Args:
        name: The name under which the optimizer was saved.
        optimizer: The optimizer to load into.
        saved: The argument of its `load_state_dict`.
    """
    groups = saved.get("param_groups") if isinstance(saved, Mapping) else None
    expected = getattr(optimizer, "defaults", None)
    if not isinstance(groups, list) or not isinstance(expected, Mapping):
        return
    known = {*_NOT_SETTINGS, *expected}.union(*optimizer.param_groups)
    for group in groups:
        if not isinstance(group, Mapping):
            return
        missing = [key for key in expected if key not in group]
        others = [key for key in group if key not in known]
        if missing and others:
            raise ArrayError(
                f"load: {name!r} was saved from an optimizer with {', '.join(map(repr, others))}, but "
                f"{type(optimizer).__name__} has {', '.join(map(repr, missing))} instead; load it into an "
                "optimizer of the class that saved it, or leave it out to start with a new one"
            )


_NOT_SETTINGS = {
    "params",
    "param_names",
    "initial_lr",
    "max_lr",
    "min_lr",
    "base_momentum",
    "max_momentum",
    "swa_lr",
}
"""Keys of a group that PyTorch and its schedulers add to the settings of any optimizer."""


def with_dtype(loaded: Any, saved: Any) -> Any:
    """The saved tensor with the device and strides of the loaded one: a `Restore` for the same parameters."""
    return loaded.to(saved.dtype).copy_(saved)


def load_in_place(optimizer: Any, saved: Mapping[str, Any], restore: Restore | None = None) -> None:
    """Call `optimizer.load_state_dict(saved)`, and copy the result into the former objects.

    These are the list `param_groups`, each group, `state`, each parameter's entry in it, and each tensor whose
    dtype, device and layout stay; of the optimizer and of optimizers inside it.

    Args:
        optimizer: The optimizer.
        saved: The argument of its `load_state_dict`.
        restore: Called for each tensor of a parameter's state whose dtype or device changed in loading; None
            keeps the change.
    """
    before = [
        _OptimizerState(each, each.param_groups, list(each.param_groups), each.state, dict(each.state))
        for each in _family(optimizer)
    ]
    try:
        optimizer.load_state_dict(saved)
        if restore is not None:
            _restore(optimizer, saved, restore)
    finally:
        _put_back(before)


def update_groups(groups: Iterable[dict[str, Any]], settings: Iterable[Mapping[str, Any]]) -> None:
    """Change the settings of groups; parameters, and tensors among the settings, stay the same objects."""
    pairs = list(zip(groups, settings, strict=True))
    alone = _Pairs((old, new) for group, given in pairs for old, new in _paired(dict(group), given))
    for group, given in pairs:
        values = alone.into(dict(group), {**given, "params": group["params"]})
        group.clear()
        group.update(values)


class _OptimizerState(NamedTuple):
    """An optimizer, and the objects in it that a program may hold."""

    optimizer: Any
    groups: list[dict[str, Any]]
    each_group: list[dict[str, Any]]
    state: Any
    entries: dict[Any, Any]


def _family(optimizer: Any) -> list[Any]:
    """The optimizer and all optimizers inside it, each once."""
    found: list[Any] = []
    left = [optimizer]
    while left:
        each = left.pop()
        if is_optimizer(each) and hasattr(each, "state") and not any(each is other for other in found):
            found.append(each)
            for value in getattr(each, "__dict__", {}).values():
                left += value if isinstance(value, (list, tuple)) else [value]
    return found


def _restore(optimizer: Any, saved: Mapping[str, Any], restore: Restore) -> None:
    """Undo casts in the states of parameters, if `saved` has the form of PyTorch's own optimizers."""
    entries, groups = saved.get("state"), saved.get("param_groups")
    if not isinstance(entries, dict) or not isinstance(groups, list):
        return
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    numbers = [number for group in groups for number in group["params"]]
    for number, parameter in zip(numbers, parameters, strict=False):
        if number in entries and parameter in optimizer.state:
            optimizer.state[parameter] = _restored(optimizer.state[parameter], entries[number], restore)


def _restored(loaded: Any, saved: Any, restore: Restore) -> Any:
    if is_tensor(loaded) and is_tensor(saved):
        same = loaded.dtype == saved.dtype and loaded.device == saved.device
        return loaded if same or loaded.shape != saved.shape else restore(loaded, saved)
    if isinstance(loaded, dict) and isinstance(saved, dict):
        return {key: _restored(value, saved.get(key), restore) for key, value in loaded.items()}
    if type(loaded) in (list, tuple) and type(saved) is type(loaded) and len(saved) == len(loaded):
        return type(loaded)(_restored(*pair, restore) for pair in zip(loaded, saved, strict=True))
    return loaded


def _put_back(before: list[_OptimizerState]) -> None:
    alone = _Pairs(
        pair
        for held in before
        for old, new in (
            (held.each_group, held.optimizer.param_groups),
            (held.entries, dict(held.optimizer.state)),
        )
        for pair in _paired(old, new)
    )
    old_of: dict[int, tuple[Any, Any]] = {}  # by the id of its replacement, kept alive here
    for held in before:
        groups, state = held.optimizer.param_groups, held.optimizer.state
        if groups is not held.groups:
            old_of[id(groups)] = groups, held.groups
        if state is not held.state:
            old_of[id(state)] = state, held.state
    for held in before:
        groups, state = held.optimizer.param_groups, held.optimizer.state
        if groups is not held.groups and len(groups) == len(held.each_group):
            held.groups[:] = [_filled(*pair, alone) for pair in zip(held.each_group, groups, strict=True)]
            held.optimizer.param_groups = held.groups
        if state is not held.state:
            values = {key: _filled(held.entries.get(key), value, alone) for key, value in state.items()}
            held.state.clear()
            held.state.update(values)
            held.optimizer.state = held.state
        for name, value in list(getattr(held.optimizer, "__dict__", {}).items()):
            if id(value) in old_of:  # another name for them
                setattr(held.optimizer, name, old_of[id(value)][1])


def _filled(old: Any, new: Any, alone: _Pairs) -> Any:
    """The dict `old` with the contents of `new`; `new` if there was none."""
    if old is new or not isinstance(old, dict) or not isinstance(new, dict):
        return alone.into(old, new)
    values = alone.into(dict(old), new)
    old.clear()
    old.update(values)
    return old


class _Pairs:
    """Pairs of tensors in which the new one can be copied into the old: neither occurs in another pair.

    Args:
        pairs: The old tensor, or None, and the new one, for each position in all trees.
    """

    def __init__(self, pairs: Iterable[tuple[Any, Any]]) -> None:
        each = {(id(old), id(new)): (old, new) for old, new in pairs}
        olds, news = Counter(old for old, _ in each), Counter(new for _, new in each)
        self._alone = {
            ids: pair for ids, pair in each.items() if olds[ids[0]] == news[ids[1]] == 1 and _are_alike(*pair)
        }

    def into(self, old: Any, new: Any) -> Any:
        """The tree `new`, with the tensors of `old` where they can be reused."""
        if old is new:
            return old
        if is_tensor(new):
            if (id(old), id(new)) not in self._alone:
                return new
            old.detach().copy_(new.detach())
            return old
        if type(new) is dict:
            mine = old if isinstance(old, dict) else {}
            return {key: self.into(mine.get(key), value) for key, value in new.items()}
        if type(new) in (list, tuple):
            return type(new)(self.into(*pair) for pair in zip(_as_long(old, new), new, strict=True))
        return new


def _paired(old: Any, new: Any) -> Iterator[tuple[Any, Any]]:
    """Each tensor of a tree `new`, with the value at its position in `old`."""
    if is_tensor(new):
        yield old, new
    elif type(new) is dict:
        mine = old if isinstance(old, dict) else {}
        for key, value in new.items():
            yield from _paired(mine.get(key), value)
    elif type(new) in (list, tuple):
        for one, other in zip(_as_long(old, new), new, strict=True):
            yield from _paired(one, other)


def _as_long(old: Any, new: Sequence[Any]) -> Sequence[Any]:
    return old if type(old) is type(new) and len(old) == len(new) else [None] * len(new)


def _are_alike(old: Any, new: Any) -> bool:
    """Whether a tensor equals another one in all but its values."""
    if not is_tensor(old) or old.layout != new.layout or "strided" not in str(old.layout):
        return False
    same = old.dtype == new.dtype and old.device == new.device and old.shape == new.shape
    return same and bool(old.stride() == new.stride()) and not old.is_inference()
