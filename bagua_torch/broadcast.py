"""Copying tensors, and the state of optimizers, from one rank to all others."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from bagua_comm import CommMismatch, Communicator

from .arrays import as_array, torch_stream


@torch.no_grad()
def broadcast_tensors(comm: Communicator, tensors: Sequence[torch.Tensor], *, root: int = 0) -> None:
    """Copy `root`'s tensors to all ranks, in place: one message for each dtype and kind of device.

    Collective. All ranks give tensors of the same shapes, dtypes and kinds of devices, in the same order. CUDA
    tensors are copied in the order of PyTorch's current stream.
    """
    if comm.size == 1:
        return
    kinds = {(str(tensor.dtype), tensor.device.type) for tensor in tensors}
    for kind in sorted(kinds):
        group = [tensor for tensor in tensors if (str(tensor.dtype), tensor.device.type) == kind]
        flat = torch.cat([tensor.detach().reshape(-1) for tensor in group])
        with torch_stream(flat.device):
            comm.broadcast(as_array(flat), root=root)
        for tensor, values in zip(group, torch.split(flat, [t.numel() for t in group]), strict=True):
            tensor.copy_(values.view_as(tensor))


def broadcast_optimizer(comm: Communicator, optimizer: torch.optim.Optimizer, *, root: int = 0) -> None:
    """Copy the state and the settings of `root`'s optimizer to all ranks.

    Collective. An optimizer that has not stepped yet gets a state here if `root`'s has one.

    Raises:
        CommMismatch: The ranks' optimizers are of different classes, or their groups have different sizes.
    """
    mine = (type(optimizer).__qualname__, [len(group["params"]) for group in optimizer.param_groups])
    for rank, theirs in enumerate(comm.allgather_object(mine)):
        if theirs != mine:
            raise CommMismatch(
                f"rank {comm.rank} and rank {rank} have different optimizers: {mine[0]} with groups of {mine[1]} "
                f"parameters, and {theirs[0]} with groups of {theirs[1]}"
            )
    if comm.size == 1:
        return
    state = broadcast_tree(comm, optimizer.state_dict(), root=root)
    if comm.rank != root:
        optimizer.load_state_dict(state)


def broadcast_tree(comm: Communicator, tree: Any, *, root: int = 0) -> Any:
    """Give all ranks root's nested dicts, lists and tuples, of tensors and other values.

    Collective. `tree` is ignored elsewhere than on `root`, which gets it back as it is.
    """
    tensors: list[torch.Tensor] = []

    def take(leaf: Any) -> Any:
        if not isinstance(leaf, torch.Tensor):
            return leaf
        tensors.append(leaf)
        return _Place(tuple(leaf.shape), leaf.dtype, leaf.device.type)

    def make(leaf: Any) -> Any:
        if not isinstance(leaf, _Place):
            return leaf
        device = f"cuda:{comm.device}" if leaf.device == "cuda" else leaf.device
        tensors.append(torch.empty(leaf.shape, dtype=leaf.dtype, device=device))
        return tensors[-1]

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
        return type(value)(map_leaves(inner, function) for inner in value)
    return function(value)


@dataclass(frozen=True)
class _Place:
    """Stands for a tensor while the structure around it is sent."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    device: str
