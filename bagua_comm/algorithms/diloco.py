"""DiLoCo: many local steps, then one step of an outer optimizer along the mean of the ranks' changes.

Every H steps, with a the weights after the last outer step (the anchor), x the weights now, and u the outer
momentum:

    d <- mean of (a - x) over the ranks        u <- mu u + d        a <- a - lr (d + mu u)        x <- a

The paper trains language models with AdamW in the local steps, H = 500, lr = 0.7 and mu = 0.9.

Source: Douillard et al., "DiLoCo: Distributed Low-Communication Training of Language Models", arXiv 2311.08105.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar

from .. import arrays, kernels
from ..arrays import Array
from ..averages import Average, Exact, InPlace
from ..averages.base import check_average_argument
from ..bucket import Bucket
from ..comm import Communicator
from ..errors import ArrayError
from .base import (
    REPLICATED,
    Algorithm,
    Point,
    State,
    StepWeights,
    Window,
    check_floating,
    check_integer,
)
from .residuals import average_in_place, bind_average, clear_residuals


@dataclass
class Outer:
    """State of `DiLoCo`. The arrays have the same bytes on all ranks."""

    anchor: Array = field(metadata=REPLICATED)
    momentum: Array = field(metadata=REPLICATED)
    average: InPlace
    steps: int = 0
    """Number of inner steps since the last outer step."""
    weights: StepWeights = field(default_factory=StepWeights)


class OuterAlgorithm(Algorithm):
    """Local steps, then a step of an outer optimizer: what `DiLoCo` and its relatives have in common."""

    local_steps: int
    outer_lr: float
    outer_momentum: float
    average: Average

    payload = "weight"
    window: Window = Window(Point.STEP, Point.FORWARD)
    equal_start: ClassVar[bool] = True  # anchors are the same on all ranks

    @property
    def mean(self) -> Average:
        """The average of the changes."""
        return self.average

    @property
    def weighs(self) -> bool:
        """See `Algorithm`; that of the average."""
        return self.mean.weighs

    def __post_init__(self) -> None:
        owner = type(self).__name__
        check_integer(owner, "local_steps", self.local_steps, least=1)
        if not self.outer_lr > 0 or not 0 <= self.outer_momentum < 1:
            raise ArrayError(
                f"{owner}: outer_lr is {self.outer_lr} and outer_momentum {self.outer_momentum}, "
                "expected outer_lr > 0 and 0 <= outer_momentum < 1"
            )
        check_average_argument(owner, self.average)

    def check(self, dtype: str) -> None:
        """Supports the floating-point dtypes of the average."""
        check_floating(self, dtype)
        self.mean.check(dtype)

    def communicates(self, step: int, state: State) -> bool:
        """Whether the next step is an outer one."""
        return bool((state.steps + 1) % self.local_steps == 0)

    def exchange(self, bucket: Bucket, comm: Communicator, state: State) -> None:
        """Make an outer step if this is the last of `local_steps` inner steps. Collective."""
        state.steps = (state.steps + 1) % self.local_steps
        if not state.steps:
            delta: Array = comm.scratch.take("delta", bucket.flat.shape, bucket.flat.dtype, like=bucket.flat)
            kernels.of(delta).subtract(state.anchor, bucket.flat, out=delta)
            self._average(delta, bucket, comm, state)
            self._step_outer(state, delta)

    def _average(self, delta: Array, bucket: Bucket, comm: Communicator, state: State) -> None:
        """Average changes of weights, in place, with the weights of the ranks if they have some. Collective."""
        weighting = comm.context.weighting
        average_in_place(state.average, delta, bucket, weighting, feeds=self.mean.has_residual)

    def commit(self, bucket: Bucket, state: State) -> None:
        """x <- a, after an outer step."""
        if not state.steps:
            bucket.flat[...] = state.anchor

    def _step_outer(self, state: State, delta: Array) -> None:
        """Step the outer optimizer along the mean change: u and a of the equations above."""
        lr, mu = self.outer_lr, self.outer_momentum
        run = kernels.of(delta)
        run.sgd_step(state.anchor, delta, state.momentum, lr=lr, momentum=mu, weight_decay=0.0, nesterov=True)

    def restart(self, bucket: Bucket, state: State) -> None:
        """a <- x, u <- 0, and no residual; no step counts any more."""
        state.anchor[...] = bucket.flat
        state.weights.sum = None
        state.momentum[...] = 0
        clear_residuals(state.average)


@dataclass(frozen=True)
class DiLoCo(OuterAlgorithm):
    """Train locally for `local_steps`, then step an outer Nesterov optimizer with the averaged change.

    Communicates in one of `local_steps` steps. Weights are equal on all ranks after an outer step, and differ
    between outer steps. The inner optimizer is that of the training loop: AdamW in the paper.

    Args:
        local_steps: Number of inner steps between two outer steps.
        outer_lr: Learning rate of the outer optimizer.
        outer_momentum: Nesterov momentum of the outer optimizer. A change that lasts is multiplied by
            outer_lr / (1 - outer_momentum) in the long run: 1.4 by default. The paper's 0.9 multiplies it by 7,
            which needs many outer steps, and small inner ones.
        average: How the changes are averaged; `Quantized()` sends a quarter of the bytes.

    Raises:
        ArrayError: An argument is out of range.
    """

    local_steps: int = 100
    outer_lr: float = 0.7
    outer_momentum: float = 0.5
    average: Average = field(default_factory=Exact)

    def init(self, bucket: Bucket, comm: Communicator) -> Outer:
        """See `Algorithm.init`. Collective."""
        average = bind_average(self.average, comm, bucket)
        return Outer(bucket.flat.copy(), arrays.zeros_like(bucket.flat), average)
