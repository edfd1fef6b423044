"""DiLoCo: many local steps, then one step of an outer optimizer along the mean of the ranks' changes.

With a the anchor, the weights after the last outer step, and u the outer momentum, every H steps:

    d <- mean of (a - x) over the ranks        u <- mu u + d        a <- a - lr (d + mu u)        x <- a

Source: Douillard et al., "DiLoCo: Distributed Low-Communication Training of Language Models", arXiv 2311.08105.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar

from .. import arrays, kernels
from ..arrays import Array
from ..averages import Average, Exact, InPlace
from ..bucket import Bucket
from ..comm import Communicator
from ..errors import ArrayError
from .base import ALIKE, Payload, Point, Window, check_average, check_average_argument, check_integer


@dataclass
class Outer:
    """What `DiLoCo` keeps; the same bytes on all ranks."""

    anchor: Array = field(metadata=ALIKE)
    momentum: Array = field(metadata=ALIKE)
    average: InPlace
    steps: int = 0
    """Inner steps since the last outer one; 0 after an outer step."""


@dataclass(frozen=True)
class DiLoCo:
    """Train locally for `local_steps`, then step an outer Nesterov optimizer with the averaged change.

    Communicates once in `local_steps`. Ranks hold the same weights after an outer step, and differ between.

    Args:
        local_steps: Inner steps from one outer step to the next.
        outer_lr: Learning rate of the outer optimizer.
        outer_momentum: Its Nesterov momentum.
        average: How the changes are averaged; `Quantized()` sends a quarter of the bytes.

    Raises:
        ArrayError: An argument is out of range.
    """

    local_steps: int = 100
    outer_lr: float = 0.7
    outer_momentum: float = 0.9
    average: Average = field(default_factory=Exact)

    payload: ClassVar[Payload] = "weight"
    window: ClassVar[Window] = Window(Point.STEP, Point.FORWARD)

    def __post_init__(self) -> None:
        check_integer("DiLoCo", "local_steps", self.local_steps, least=1)
        if not self.outer_lr > 0 or not 0 <= self.outer_momentum < 1:
            raise ArrayError(
                f"DiLoCo: outer_lr is {self.outer_lr} and outer_momentum {self.outer_momentum}, "
                "expected outer_lr > 0 and 0 <= outer_momentum < 1"
            )
        check_average_argument("DiLoCo", self.average)

    def check(self, dtype: str) -> None:
        """What the average takes."""
        check_average(self.average, dtype)

    def init(self, bucket: Bucket, comm: Communicator) -> Outer:
        """See `Algorithm.init`. Collective."""
        return Outer(bucket.flat.copy(), arrays.zeros_like(bucket.flat), self.average.bind(comm))

    def exchange(self, bucket: Bucket, comm: Communicator, state: Outer) -> None:
        """Make an outer step in every `local_steps`-th step. Collective."""
        state.steps = (state.steps + 1) % self.local_steps
        if state.steps:
            return
        delta = comm.scratch.take("delta", bucket.flat.shape, bucket.flat.dtype, like=bucket.flat)
        kernels.of(delta).subtract(state.anchor, bucket.flat, out=delta)
        state.average(delta)
        kernels.of(delta).sgd_step(
            state.anchor,
            delta,
            state.momentum,
            lr=self.outer_lr,
            momentum=self.outer_momentum,
            weight_decay=0.0,
            nesterov=True,
        )

    def commit(self, bucket: Bucket, state: Outer) -> None:
        """x <- a, after an outer step."""
        if not state.steps:
            bucket.flat[...] = state.anchor
