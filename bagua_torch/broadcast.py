"""Making tensors, and the state of optimizers, those of one rank everywhere."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from bagua_comm import CommMismatch, Communicator

from .arrays import as_array, torch_stream


@torch.no_grad()
def broadcast_tensors(comm: Communicator, tensors: Sequence[torch.Tensor], *, root: int = 0) -> None:
    """Copy `root`'s tensors to all ranks, in place: one message for each dtype and kind of device.

    Collective. Same shapes, dtypes and kinds of devices, in the same order, on all ranks. CUDA tensors go in the
    order of PyTorch's current stream.
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
    """Make the state and the settings of `optimizer` those of `root` on all ranks.

    Collective. An optimizer that has not stepped yet may get a state here.

    Raises:
        CommMismatch: The ranks' optimizers are of different kinds, or have other groups of parameters.
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
    tensors: list[torch.Tensor] = []
    at_root = _take_tensors(optimizer.state_dict(), tensors) if comm.rank == root else None
    state = comm.broadcast_object(at_root, root=root)
    if comm.rank != root:
        _make_tensors(state, tensors, comm.device)
    broadcast_tensors(comm, tensors, root=root)
    if comm.rank != root:
        optimizer.load_state_dict(_put_tensors(state, tensors))


@dataclass(frozen=True)
class _Place:
    """Stands for a tensor while its surroundings travel."""

    index: int
    shape: tuple[int, ...]
    dtype: torch.dtype
    device: str


def _take_tensors(value: Any, tensors: list[torch.Tensor]) -> Any:
    """`value` with places for the tensors in it, which are appended to `tensors`."""
    if isinstance(value, torch.Tensor):
        tensors.append(value)
        return _Place(len(tensors) - 1, tuple(value.shape), value.dtype, value.device.type)
    return _mapped(value, lambda inner: _take_tensors(inner, tensors))


def _make_tensors(value: Any, tensors: list[torch.Tensor], index: int | None) -> None:
    """Append a tensor for every place in `value`; CUDA tensors on the device of this index."""
    if isinstance(value, _Place):
        device = f"cuda:{index}" if value.device == "cuda" else value.device
        tensors.append(torch.empty(value.shape, dtype=value.dtype, device=device))
    _mapped(value, lambda inner: _make_tensors(inner, tensors, index))


def _put_tensors(value: Any, tensors: list[torch.Tensor]) -> Any:
    """`value` with `tensors` in their places."""
    if isinstance(value, _Place):
        return tensors[value.index]
    return _mapped(value, lambda inner: _put_tensors(inner, tensors))


def _mapped(value: Any, function: Any) -> Any:
    if isinstance(value, dict):
        return {key: function(inner) for key, inner in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)(function(inner) for inner in value)
    return value
