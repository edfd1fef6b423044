"""The weight of this rank in the gradients of a backward pass of a sharded model."""

from __future__ import annotations

import weakref
from functools import partial

import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils.hooks import RemovableHandle

from bagua_comm import ArrayError, Communicator
from bagua_comm.comm.weights import LATE, SET_AFTER, Weigh, Weighting, agree_traced, weight_of_pass
from bagua_comm.execution.lane import Lane

from .passes import BackwardPasses


class PassWeights:
    """The weight of this rank in the next backward pass, which ranks exchange with its first reduction.

    With `Reproducible(addends=M)`, they exchange those of all passes of a step in the last of them.

    Args:
        passes: The backward passes.
        lane: Where all ranks exchange them if a reduction has fewer ranks, as on a mesh with replicas; else None.
    """

    def __init__(self, passes: BackwardPasses, lane: Lane[Communicator] | None = None) -> None:
        self._passes, self._lane = passes, lane
        self.now: float | None = None
        """The weight; None if there is none."""
        self._held: list[float | None] = []
        """The weights of earlier passes of the step."""
        self._is_open = self._is_late = self._in_each_pass = False
        self._agreed: Weighting | None = None

    def set(self, weight: object) -> None:
        """Set the weight.

        Raises:
            ArrayError: The backward pass has begun to reduce. The next exchange raises it on all ranks.
        """
        self._is_late |= self._is_open
        self.now = weight_of_pass(weight, has_begun=self._is_open)

    def check_used(self) -> None:
        """Before a step, raise `ArrayError` if the weight was set after the backward pass; see `set`."""
        if self.now is not None:
            self.now, self._is_late = None, True
            raise ArrayError(SET_AFTER)

    def weigh(self, comm: Communicator, held: int = 0, *, is_last: bool = True) -> Weigh | None:
        """Return the weights for a reduction of the running pass over `comm`; None if its mean is plain.

        Args:
            comm: The ranks.
            held: The number of earlier passes of the step whose gradients are held.
            is_last: Whether this one is the last of the step.
        """
        is_first, lane = not self._is_open, self._lane
        if is_first:
            self._in_each_pass |= self.now is not None or self._is_late
            self._mine = [*self._held[:held], self.now]
            self._is_open = self._passes.at_end(self._close, partial(self._close, ends=is_last))
        if not self._in_each_pass or not is_last:
            return None
        if is_first and self._is_late:
            self._mine, self._is_late = [LATE] * len(self._mine), False
        if lane is None:
            return partial(self._agree, comm, self._mine) if is_first else lambda: self._agreed
        if is_first:
            self._future = lane.submit(self._agree, lane.comm, self._mine)
        return partial(lane.result, self._future)

    def _agree(self, comm: Communicator, mine: list[float | None]) -> Weighting | None:
        self._agreed = agree_traced(comm, comm.tracer, mine)
        return self._agreed

    def _close(self, *, ends: bool | None = None) -> None:
        """End a pass, and with it perhaps the step; None if it raised, so that its gradients are lost."""
        if ends is not None:
            self._held = [] if ends else self._mine
        self._is_open, self.now = False, None


def watch_steps(model: nn.Module, weights: PassWeights) -> RemovableHandle:
    """Call `weights.check_used` before each step of an optimizer of `model`, of which no reference is kept."""
    watched = weakref.ref(model)

    def before_step(optimizer: torch.optim.Optimizer, *_: object) -> None:
        if weights.now is None or (found := watched()) is None:
            return
        parameters = set(map(id, found.parameters()))
        if any(id(p) in parameters for group in optimizer.param_groups for p in group["params"]):
            weights.check_used()

    return register_optimizer_step_pre_hook(before_step)
