"""Load state dicts into PyTorch optimizers in place: groups and states stay the same objects.

`Optimizer.load_state_dict` makes new dicts: a program that holds `optimizer.param_groups[0]`, as an outer
optimizer does, would then set a learning rate without effect. It also casts floating-point states to the
dtype of their parameter, though an optimizer may keep float32 for a parameter in bfloat16.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple, Protocol, TypeAlias, TypeGuard

from ..arrays import is_tensor

Restore: TypeAlias = Callable[[object, object], object]
"""Maps a tensor as loaded by the optimizer, and as saved, to the tensor to keep."""


class Optimizer(Protocol):
    """An optimizer of PyTorch, or a wrapper of one."""

    param_groups: list[dict[str, Any]]
    state: Any

    def load_state_dict(self, saved: Any, /) -> object:
        """Load a state dict."""


def is_optimizer(value: object) -> TypeGuard[Optimizer]:
    """Whether a value has parameter groups, as PyTorch's optimizers and their wrappers have."""
    return isinstance(getattr(value, "param_groups", None), list) and hasattr(value, "load_state_dict")


def is_sharded_optimizer(value: object) -> bool:
    """Whether a value is PyTorch's ZeroRedundancyOptimizer, where each rank holds only a share of the states."""
    module = sys.modules.get("torch.distributed.optim.zero_redundancy_optimizer")
    return module is not None and isinstance(value, module.ZeroRedundancyOptimizer)


def other_class(optimizer: Any, saved: Any) -> str | None:
    """A text if a state is of an optimizer of another class, whose step would lack settings; or None.

    Settings that only one of both has are no error, as schedulers and releases of PyTorch add some: an optimizer
    of another class both lacks some and has others.

    Args:
        optimizer: The optimizer to load into.
        saved: The argument of its `load_state_dict`.
    """
    groups = saved.get("param_groups") if isinstance(saved, Mapping) else None
    expected = getattr(optimizer, "defaults", None)
    if not is_optimizer(optimizer) or not isinstance(groups, list) or not isinstance(expected, Mapping):
        return None
    known = {*_NOT_SETTINGS, *expected}.union(*optimizer.param_groups)
    for group in groups:
        if not isinstance(group, Mapping):
            return None
        missing = [key for key in expected if key not in group]
        others = [key for key in group if key not in known]
        if missing and others:
            return (
                f"was saved from an optimizer with {', '.join(map(repr, others))}, but "
                f"{type(optimizer).__name__} has {', '.join(map(repr, missing))} instead"
            )
    return None


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


def load_in_place(optimizer: Optimizer, saved: Mapping[str, Any], restore: Restore | None = None) -> None:
    """Call `optimizer.load_state_dict(saved)`, and put the result into the former objects.

    These are the list `param_groups`, each group, `state`, and each parameter's entry in it; of the optimizer and
    of optimizers inside it.

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


def update_groups(groups: Iterable[dict[str, Any]], settings: Iterable[Mapping[str, object]]) -> None:
    """Change the settings of groups; the groups and their parameters stay the same objects."""
    for group, given in zip(groups, settings, strict=True):
        _filled(group, {**given, "params": group["params"]})


class _OptimizerState(NamedTuple):
    """An optimizer, and the objects in it that a program may hold."""

    optimizer: Optimizer
    groups: list[dict[str, Any]]
    each_group: list[dict[str, Any]]
    state: Any
    entries: dict[object, object]


def _family(optimizer: object) -> list[Optimizer]:
    """The optimizer and all optimizers inside it, each once."""
    found: list[Optimizer] = []
    left = [optimizer]
    while left:
        each = left.pop()
        if is_optimizer(each) and hasattr(each, "state") and not any(each is other for other in found):
            found.append(each)
            for value in getattr(each, "__dict__", {}).values():
                left += value if isinstance(value, (list, tuple)) else [value]
    return found


def _restore(optimizer: Optimizer, saved: Mapping[str, Any], restore: Restore) -> None:
    """Undo casts in the states of parameters, if `saved` has the form of PyTorch's own optimizers."""
    entries, groups = saved.get("state"), saved.get("param_groups")
    if not isinstance(entries, dict) or not isinstance(groups, list):
        return
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    numbers = [number for group in groups for number in group["params"]]
    for number, parameter in zip(numbers, parameters, strict=False):
        if number in entries and parameter in optimizer.state:
            optimizer.state[parameter] = _restored(optimizer.state[parameter], entries[number], restore)


def _restored(loaded: Any, saved: Any, restore: Restore) -> object:
    if is_tensor(loaded) and is_tensor(saved):
        same = loaded.dtype == saved.dtype and loaded.device == saved.device
        return loaded if same or loaded.shape != saved.shape else restore(loaded, saved)
    if isinstance(loaded, dict) and isinstance(saved, dict):
        return {key: _restored(value, saved.get(key), restore) for key, value in loaded.items()}
    if type(loaded) in (list, tuple) and type(saved) is type(loaded) and len(saved) == len(loaded):
        return type(loaded)(_restored(*pair, restore) for pair in zip(loaded, saved, strict=True))
    return loaded


def _put_back(before: list[_OptimizerState]) -> None:
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
            held.groups[:] = [_filled(*pair) for pair in zip(held.each_group, groups, strict=True)]
            held.optimizer.param_groups = held.groups
        if state is not held.state:
            values = {key: _filled(held.entries.get(key), value) for key, value in state.items()}
            held.state.clear()
            held.state.update(values)
            held.optimizer.state = held.state
        for name, value in list(getattr(held.optimizer, "__dict__", {}).items()):
            if id(value) in old_of:  # another name for them
                setattr(held.optimizer, name, old_of[id(value)][1])


def _filled(old: object, new: object) -> Any:
    """The dict `old` with the contents of `new`; `new` if there was none."""
    if old is new or not isinstance(old, dict) or not isinstance(new, dict):
        return new
    old.clear()
    old.update(new)
    return old
