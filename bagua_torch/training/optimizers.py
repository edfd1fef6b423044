"""What steps do to optimizers: lend what an algorithm keeps, and lay out the parameters of fused ones."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

from bagua_comm.algorithms.base import complete, core_of

from ..engine import TorchEngine
from ..fused import FusedOptimizer
from ..memory import BucketMemory


def sharing_optimizers(optimizers: Sequence[torch.optim.Optimizer]) -> list[Any]:
    """The optimizers that can borrow."""
    return [optimizer for optimizer in optimizers if getattr(optimizer, "shares_state", "")]


def lend(
    optimizers: Sequence[torch.optim.Optimizer], trained: Mapping[str, nn.Parameter], engine: TorchEngine | None
) -> None:
    """Let optimizers use what the algorithm of `engine` lends, or take it back if `engine` is None.

    From now on, or again after they have loaded a state.
    """
    borrowers = sharing_optimizers(optimizers)
    if not borrowers:
        return
    lent = "" if engine is None else complete(engine.phase).lends
    tensors = {trained[name]: tensor for name, tensor in engine.lent().items()} if engine and lent else {}
    for optimizer in borrowers:
        if engine is not None and optimizer.shares_state == lent:
            step = engine.buckets[0].step
            optimizer.attach(trained.values(), tensors, algorithm=core_of(engine.phase), step=step)
        else:
            optimizer.detach(trained.values())


def flatten(
    optimizers: Sequence[torch.optim.Optimizer], trained: Mapping[str, nn.Parameter], memory: BucketMemory
) -> None:
    """Let fused optimizers move parameters now, so that all forward passes find them at the same addresses.

    A matrix product on the CPU may round by the address of a weight. A rank that joins in the middle of a
    training must compute what the others compute.
    """
    fused = [optimizer for optimizer in optimizers if isinstance(optimizer, FusedOptimizer)]
    if fused:
        fresh = memory.attach_all()
        for optimizer in fused:
            optimizer.flatten()
        for name in fresh:
            trained[name].grad = None
