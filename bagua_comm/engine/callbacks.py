"""Functions that an engine calls in the program that trains by it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass


def _nothing() -> None:
    """Do nothing."""


@dataclass(frozen=True)
class EngineCallbacks:
    """Functions that an engine calls once it has been constructed.

    `bagua_torch.DistributedDataParallel` gives its own; an engine alone needs none.
    """

    complete_step: Callable[[], None] = _nothing
    """End a step in which the optimizer did not step. Collective."""
    make_equal: Callable[[], None] | None = None
    """Replace the weights with their mean over all ranks, and the optimizers with rank 0's. Collective.

    It raises on all ranks if one of them cannot. None: the engine averages the weights in its storage."""
    detach: Callable[[], None] = _nothing
    """Stop using the engine, without any communication, because it has been aborted."""
