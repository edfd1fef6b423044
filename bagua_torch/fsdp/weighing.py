"""The weight of this rank in the gradients of a backward pass of a sharded model."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TypeAlias

from bagua_comm import Communicator
from bagua_comm.comm.weights import Weighting, agree, weight_of_pass
from bagua_comm.execution.lane import Lane

from .passes import BackwardPasses

Weigh: TypeAlias = Callable[[], Weighting | None]
"""Returns the factor of this rank, where the reduction runs. Collective."""


class PassWeights:
    """The weight of this rank in the next backward pass, which ranks exchange with its first reduction.

    Args:
        passes: The backward passes.
        lane: Where all ranks exchange them if a reduction has fewer ranks, as on a mesh with replicas; else None.
    """

    def __init__(self, passes: BackwardPasses, lane: Lane[Communicator] | None = None) -> None:
        self._passes, self._lane = passes, lane
        self.now: float | None = None
        """The weight; None if there is none."""
        self._is_open = self._in_each_pass = False
        self._agreed: Weighting | None = None

    def set(self, weight: object) -> None:
        """Set the weight; raise `ArrayError` if the backward pass has begun to reduce."""
        self.now = weight_of_pass(weight, has_begun=self._is_open)

    def weigh(self, comm: Communicator) -> Weigh | None:
        """Return the weights for a reduction of the running pass over `comm`; None if its mean is plain."""
        is_first, lane = not self._is_open, self._lane
        if is_first:
            self._in_each_pass |= self.now is not None
            self._is_open = self._passes.at_end(self._close, self._close)
        if not self._in_each_pass:
            return None
        if lane is None:
            return partial(self._agree, comm, self.now) if is_first else lambda: self._agreed
        if is_first:
            self._future = lane.submit(self._agree, lane.comm, self.now)
        return partial(lane.result, self._future)

    def _agree(self, comm: Communicator, mine: float | None) -> Weighting | None:
        with comm.tracer.span("weights of ranks"):
            self._agreed = agree(comm, [mine])
        return self._agreed

    def _close(self) -> None:
        self._is_open, self.now = False, None
