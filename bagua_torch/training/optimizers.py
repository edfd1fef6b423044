"""Optimizers in a training step: state that they share with an algorithm, and the memory of fused ones."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

from bagua_comm.algorithms.base import core_of

from ..optimizers import FusedOptimizer
from ..tensors.memory import BucketMemory
from .engine import TorchEngine


def sharing_optimizers(optimizers: Sequence[torch.optim.Optimizer]) -> list[Any]:
    """The optimizers that can share state with an algorithm."""
    return [optimizer for optimizer in optimizers if getattr(optimizer, "shares_state", "")]


def attach_states(
    optimizers: Sequence[torch.optim.Optimizer], trained: Mapping[str, nn.Parameter], engine: TorchEngine | None
) -> None:
    """Attach optimizers to the state of the algorithm of `engine`; detach them if `engine` is None.

    Repeat it after an optimizer has loaded a state.
    """
    sharing = sharing_optimizers(optimizers)
    if not sharing:
        return
    name = "" if engine is None else engine.phase.lends
    tensors = {trained[key]: tensor for key, tensor in engine.shared_state().items()} if engine and name else {}
    for optimizer in sharing:
        if engine is not None and optimizer.shares_state == name:
            step = engine.buckets[0].step
            optimizer.attach(trained.values(), tensors, algorithm=core_of(engine.phase), step=step)
        else:
            optimizer.detach(trained.values())


def flatten(
    optimizers: Sequence[torch.optim.Optimizer], trained: Mapping[str, nn.Parameter], memory: BucketMemory
) -> None:
    """Let fused optimizers move parameters now, so that all forward passes find them at the same addresses.

    A matrix product on the CPU may round by the address of a weight. A rank that joins in the middle of a
    training must compute the same as the other ranks.
    """
    fused = [optimizer for optimizer in optimizers if isinstance(optimizer, FusedOptimizer)]
    if fused:
        fresh = memory.attach_all()
        for optimizer in fused:
            optimizer.flatten()
        for name in fresh:
            trained[name].grad = None
