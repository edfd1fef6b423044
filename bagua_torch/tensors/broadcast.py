"""Broadcast of tensors and of optimizer states."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch

from bagua_comm import CommMismatch, Communicator, UnsupportedError
from bagua_comm.checkpoint.optimizers import load_in_place, update_groups

from ..arrays import as_array, torch_stream
from . import sharded

T = TypeVar("T")


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
    """The values of `root`'s tensors, on all ranks, in one message for each dtype and device type.

    Collective. All ranks give tensors of the same shapes, dtypes and device types, in the same order. CUDA
    tensors are copied in the order of PyTorch's current stream.

    Returns:
        New tensors of the shapes of `tensors`; on `root`, `tensors` themselves.
    """
    if comm.size == 1:
        return tensors
    found: dict[int, torch.Tensor] = {}
    types = {(str(tensor.dtype), tensor.device.type) for tensor in tensors}
    for each in sorted(types):
        indices = [i for i, tensor in enumerate(tensors) if (str(tensor.dtype), tensor.device.type) == each]
        flat = torch.cat([tensors[i].detach().reshape(-1) for i in indices])
        with torch_stream(flat.device):
            comm.broadcast(as_array(flat), root=root)
        for i, values in zip(indices, torch.split(flat, [tensors[i].numel() for i in indices]), strict=True):
            found[i] = values.view_as(tensors[i])
    return tensors if comm.rank == root else [found[i] for i in range(len(tensors))]


def broadcast_optimizer(comm: Communicator, optimizer: torch.optim.Optimizer, *, root: int = 0) -> None:
    """Copy the state and the settings of `root`'s optimizer to all ranks.

    Collective. An optimizer that has not stepped yet gets a state if `root`'s has one. States keep the dtype that
    they have on `root`. `param_groups`, each group in it and `state` stay the same objects, so references to them
    stay valid. Only the settings of a ZeroRedundancyOptimizer are copied, since its states are sharded.

    Raises:
        CommMismatch: The ranks' optimizers are of different classes, or their groups have different sizes.
        UnsupportedError: `root`'s optimizer does not return its state, or another rank's does not load it.
    """
    is_sharded = sharded.is_sharded_optimizer(optimizer)
    mine = (type(optimizer).__qualname__, [len(group["params"]) for group in optimizer.param_groups])
    sends = comm.rank == root and not is_sharded
    state, problem = _state_of(optimizer) if sends else ({}, "")
    for rank, (theirs, _) in enumerate(ranks := comm.allgather_object((mine, problem))):
        if theirs != mine:
            raise CommMismatch(
                f"rank {comm.rank} and rank {rank} have different optimizers: {mine[0]} with groups of {mine[1]} "
                f"parameters, and {theirs[0]} with groups of {theirs[1]}"
            )
    _refuse(mine[0], [problem for _, problem in ranks], "does not return its state")
    if comm.size == 1:
        return
    if is_sharded:
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
    _refuse(mine[0], comm.allgather_object(problem), f"does not load the state of rank {root}")


def _state_of(optimizer: torch.optim.Optimizer) -> tuple[dict[str, Any], str]:
    """The state dict, and the reason why it cannot be sent, or an empty text."""
    try:
        state = optimizer.state_dict()
    except Exception as exc:  # of any class: it may come from a hook of the user
        return {}, f"{type(exc).__name__}: {exc}"
    layouts: set[torch.layout] = set()

    def look(leaf: object) -> None:
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


def broadcast_tree(comm: Communicator, tree: T, *, root: int = 0) -> T:
    """Broadcast nested dicts, lists and tuples of tensors and other values.

    Collective. `tree` is used on `root` alone, where it is returned unchanged. A tensor that occurs several times
    is one tensor on all ranks; a dense tensor keeps its strides.
    """
    tensors: list[torch.Tensor] = []
    numbers: dict[int, int] = {}

    def describe(leaf: object) -> object:
        if not isinstance(leaf, torch.Tensor):
            return leaf
        if id(leaf) not in numbers:
            numbers[id(leaf)] = len(tensors)
            tensors.append(leaf)
        strides = torch.empty_like(leaf, device="meta").stride()
        return _TensorInfo(numbers[id(leaf)], tuple(leaf.shape), strides, leaf.dtype, leaf.device.type)

    def make(leaf: object) -> object:
        if not isinstance(leaf, _TensorInfo):
            return leaf
        if leaf.number == len(tensors):
            device = f"cuda:{comm.device}" if leaf.device == "cuda" else leaf.device
            tensors.append(torch.empty_strided(leaf.shape, leaf.strides, dtype=leaf.dtype, device=device))
        return tensors[leaf.number]

    if comm.rank == root:
        comm.broadcast_object(map_leaves(tree, describe), root=root)
    else:
        tree = map_leaves(comm.broadcast_object(None, root=root), make)
    broadcast_tensors(comm, tensors, root=root)
    return tree


def map_leaves(value: object, function: Callable[[Any], object]) -> Any:
    """A copy of nested dicts, lists and tuples, with `function(leaf)` for every leaf.

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
class _TensorInfo:
    """The description of a tensor in a tree that is sent."""

    number: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: torch.dtype
    device: str
