"""The weight of this rank in the gradients of a backward pass of a sharded model."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TypeAlias

from bagua_comm import ArrayError, Communicator
from bagua_comm.comm.weights import Weighting, agree, as_weight

from .passes import BackwardPasses

Weigh: TypeAlias = Callable[[], Weighting | None]
"""Returns the factor of this rank, where the reduction runs. Collective."""


class PassWeights:
    """The weight of this rank in the next backward pass, which ranks exchange with its first reduction.

    Args:
        passes: The backward passes.
    """

    def __init__(self, passes: BackwardPasses) -> None:
        self._passes = passes
        self.now: float | None = None
        """The weight; None if there is none."""
        self._is_open = self._in_each_pass = False
        self._agreed: Weighting | None = None

    def set(self, weight: object) -> None:
        """Set the weight; raise `ArrayError` if the backward pass has begun to reduce."""
        if self._is_open:
            raise ArrayError(
                "weight: the backward pass has begun; set the weight of its gradients before, on all ranks"
            )
        self.now = as_weight(weight)

    def weigh(self, comm: Communicator) -> Weigh | None:
        """Return the weights for a reduction of the running pass over `comm`; None if its mean is plain."""
        is_first = not self._is_open
        if is_first:
            self._in_each_pass |= self.now is not None
            self._is_open = self._passes.at_end(self._close, self._close)
        if not self._in_each_pass:
            return None
        return partial(self._agree, comm, self.now) if is_first else lambda: self._agreed

    def _agree(self, comm: Communicator, mine: float | None) -> Weighting | None:
        with comm.tracer.span("weights of ranks"):
            self._agreed = agree(comm, [mine])
        return self._agreed

    def _close(self) -> None:
        self._is_open, self.now = False, None
