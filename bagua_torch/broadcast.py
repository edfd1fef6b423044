"""Copying tensors, and the state of optimizers, from one rank to all others."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from bagua_comm import CommMismatch, Communicator, UnsupportedError
from bagua_comm.checkpoint.optimizers import load_in_place, update_groups

from . import sharded
from .arrays import as_array, torch_stream


@torch.no_grad()
def broadcast_tensors(comm: Communicator, tensors: Sequence[torch.Tensor], *, root: int = 0) -> None:
    """Copy `root`'s tensors to all ranks, in place; see `broadcast_values`.

    Collective.
    """
    for tensor, value in zip(tensors, broadcast_values(comm, tensors, root=root), strict=True):
        if value is not tensor:
            tensor.copy_(value)


@torch.no_grad()
def broadcast_values(
    comm: Communicator, tensors: Sequence[torch.Tensor], *, root: int = 0
) -> Sequence[torch.Tensor]:
    """What `root`'s tensors hold, on all ranks: one message for each dtype and kind of device.

    Collective. All ranks give tensors of the same shapes, dtypes and kinds of devices, in the same order. CUDA
    tensors are copied in the order of PyTorch's current stream.

    Returns:
        New tensors of the shapes of `tensors`; on `root`, `tensors` themselves.
    """
    if comm.size == 1:
        return tensors
    found: dict[int, torch.Tensor] = {}
    kinds = {(str(tensor.dtype), tensor.device.type) for tensor in tensors}
    for kind in sorted(kinds):
        places = [i for i, tensor in enumerate(tensors) if (str(tensor.dtype), tensor.device.type) == kind]
        flat = torch.cat([tensors[i].detach().reshape(-1) for i in places])
        with torch_stream(flat.device):
            comm.broadcast(as_array(flat), root=root)
        for i, values in zip(places, torch.split(flat, [tensors[i].numel() for i in places]), strict=True):
            found[i] = values.view_as(tensors[i])
    return tensors if comm.rank == root else [found[i] for i in range(len(tensors))]


def broadcast_optimizer(comm: Communicator, optimizer: torch.optim.Optimizer, *, root: int = 0) -> None:
    """Copy the state and the settings of `root`'s optimizer to all ranks.

    Collective. An optimizer that has not stepped yet gets a state here if `root`'s has one. States keep the dtype
    that they have on `root`. `param_groups`, each group in it and `state` stay the same objects, so a program may
    hold them. Of a ZeroRedundancyOptimizer, whose states are each rank's own, the settings alone are copied.

    Raises:
        CommMismatch: The ranks' optimizers are of different classes, or their groups have different sizes.
        UnsupportedError: `root`'s optimizer does not give its state, or another rank's does not take it.
    """
    own = sharded.is_sharded(optimizer)
    mine = (type(optimizer).__qualname__, [len(group["params"]) for group in optimizer.param_groups])
    state, problem = None, ""
    if comm.rank == root and not own:
        state, problem = _state_of(optimizer)
    for rank, (theirs, _) in enumerate(ranks := comm.allgather_object((mine, problem))):
        if theirs != mine:
            raise CommMismatch(
                f"rank {comm.rank} and rank {rank} have different optimizers: {mine[0]} with groups of {mine[1]} "
                f"parameters, and {theirs[0]} with groups of {theirs[1]}"
            )
    _refuse(mine[0], [problem for _, problem in ranks], "does not give its state")
    if comm.size == 1:
        return
    if own:
        groups = [{key: value for key, value in g.items() if key != "params"} for g in optimizer.param_groups]
        groups = broadcast_tree(comm, groups, root=root)
        if comm.rank != root:
            update_groups(optimizer.param_groups, groups)
        return
    state = broadcast_tree(comm, state, root=root)
    if comm.rank != root:
        try:
            load_in_place(optimizer, state, lambda _, sent: sent)
        except Exception as exc:  # of any class: it may come from a hook of the user
            problem = f"{type(exc).__name__}: {exc}"
    _refuse(mine[0], comm.allgather_object(problem), f"does not take the state of rank {root}")


def _state_of(optimizer: torch.optim.Optimizer) -> tuple[dict[str, Any] | None, str]:
    """The state dict, and why it cannot be sent; empty if it can."""
    try:
        state = optimizer.state_dict()
    except Exception as exc:  # of any class: it may come from a hook of the user
        return None, f"{type(exc).__name__}: {exc}"
    layouts: set[torch.layout] = set()

    def look(leaf: Any) -> None:
        if isinstance(leaf, torch.Tensor):
            layouts.add(leaf.layout)

    map_leaves(state, look)
    others = layouts - {torch.strided}
    return state, f"a tensor in it is {others.pop()}, expected torch.strided" if others else ""


def _refuse(name: str, problems: Sequence[str], what: str) -> None:
    """Raise `UnsupportedError` on all ranks if one has a problem."""
    for rank, problem in enumerate(problems):
        if problem:
            raise UnsupportedError(f"the {name} of rank {rank} {what}: {problem}")


def broadcast_tree(comm: Communicator, tree: Any, *, root: int = 0) -> Any:
    """Give all ranks root's nested dicts, lists and tuples, of tensors and other values.

    Collective. `tree` is ignored elsewhere than on `root`, which gets it back as it is. A tensor that is there
    several times is one tensor on all ranks; one that is dense keeps its strides.
    """
    tensors: list[torch.Tensor] = []
    numbers: dict[int, int] = {}

    def take(leaf: Any) -> Any:
        if not isinstance(leaf, torch.Tensor):
            return leaf
        if id(leaf) not in numbers:
            numbers[id(leaf)] = len(tensors)
            tensors.append(leaf)
        strides = torch.empty_like(leaf, device="meta").stride()
        return _Place(numbers[id(leaf)], tuple(leaf.shape), strides, leaf.dtype, leaf.device.type)

    def make(leaf: Any) -> Any:
        if not isinstance(leaf, _Place):
            return leaf
        if leaf.number == len(tensors):
            device = f"cuda:{comm.device}" if leaf.device == "cuda" else leaf.device
            tensors.append(torch.empty_strided(leaf.shape, leaf.strides, dtype=leaf.dtype, device=device))
        return tensors[leaf.number]

    if comm.rank == root:
        comm.broadcast_object(map_leaves(tree, take), root=root)
    else:
        tree = map_leaves(comm.broadcast_object(None, root=root), make)
    broadcast_tensors(comm, tensors, root=root)
    return tree


def map_leaves(value: Any, function: Callable[[Any], Any]) -> Any:
    """A copy of nested dicts, lists and tuples, with `function(leaf)` in the place of every leaf.

    >>> map_leaves({"a": [1, 2], "b": (3,)}, str)
    {'a': ['1', '2'], 'b': ('3',)}
    """
    if isinstance(value, dict):
        return {key: map_leaves(inner, function) for key, inner in value.items()}
    if isinstance(value, (list, tuple)):
        inner = [map_leaves(each, function) for each in value]
        return type(value)._make(inner) if hasattr(value, "_make") else type(value)(inner)
    return function(value)


@dataclass(frozen=True)
class _Place:
    """Stands for a tensor while the structure around it is sent."""

    number: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: torch.dtype
    device: str
