"""QAdam: Adam that averages its momentum through a codec, not the gradient, once its variance is frozen.

    steps 1 to W:   g <- mean of g                 m <- b1 m + (1 - b1) g       v <- b2 v + (1 - b2) g^2
    steps after W:  m <- Q-mean of b1 m + (1 - b1) g_local                      v stays

The optimizer does the rest: `bagua_comm.optim.QAdam` for flat arrays, or `bagua_torch.QAdamOptimizer`. It updates
the same array `momentum` as the exchange.
Source: 1-bit Adam, Tang et al., arXiv 2102.02888, with eight bits as in Bagua (arXiv 2107.01499).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar

from .. import arrays, kernels
from ..arrays import Array
from ..averages import Average, Exact, InPlace, Quantized
from ..averages.base import check_average_argument
from ..bucket import Bucket
from ..comm import Communicator
from ..comm.weights import multiply
from ..errors import ArrayError, CommError
from .base import (
    REPLICATED,
    Algorithm,
    Point,
    Window,
    check_floating,
    check_integer,
)
from .residuals import average_in_place, bind_average


@dataclass
class Momentum:
    """State of `QAdam`."""

    momentum: Array = field(metadata=REPLICATED)
    """Adam's first moment; the optimizer uses the same array."""
    exact: InPlace
    average: InPlace
    averaged_in: int = -1
    """The last step whose gradient is in the averaged momentum; -1 before the first."""


@dataclass(frozen=True)
class QAdam(Algorithm):
    """Average gradients exactly for `warmup_steps`, then average Adam's momentum, quantized.

    After the warm-up, gradients are not averaged, and clipping them has no effect. To accumulate gradients, use
    `no_sync` in all passes but the last one. All parameters share one `beta1`.

    In a step without communication (`Engine.stop`, `every`), a rank trains as its optimizer alone does: after
    the warm-up its own gradient goes into its momentum, and the variance stays frozen.

    Args:
        warmup_steps: Number of steps, at least 1, before the variance is frozen; about a fifth of all steps.
        beta1: Adam's decay rate of the momentum.
        average: The average of the momentum.

    Raises:
        ArrayError: An argument is out of range.
    """

    warmup_steps: int = 100
    beta1: float = 0.9
    average: Average = field(default_factory=Quantized)

    payload = "grad"
    window = Window(Point.GRADIENT, Point.BACKWARD)
    lends: ClassVar[str] = "momentum"

    def __post_init__(self) -> None:
        check_integer("QAdam", "warmup_steps", self.warmup_steps, least=1)
        if not 0 <= self.beta1 < 1:
            raise ArrayError(f"QAdam: beta1 is {self.beta1}, expected 0 <= beta1 < 1")
        check_average_argument("QAdam", self.average)

    @property
    def weighs(self) -> bool:
        """See `Algorithm`; that of the average."""
        return self.average.weighs

    def check(self, dtype: str) -> None:
        """Supports the floating-point dtypes of the average."""
        check_floating(self, dtype)
        self.average.check(dtype)

    def init(self, bucket: Bucket, comm: Communicator) -> Momentum:
        """See `Algorithm.init`. Collective."""
        exact, average = (bind_average(a, comm, bucket) for a in (Exact(), self.average))
        return Momentum(arrays.zeros_like(bucket.flat), exact, average)

    def exchange(self, bucket: Bucket, comm: Communicator, state: Momentum) -> None:
        """Average the gradient during the warm-up, then the momentum. Collective."""
        if comm.context.weighting is not None:  # momenta are equal on all ranks, so gradients alone are weighed
            multiply(bucket.flat, comm.context.weighting.factors[-1])
        if bucket.step < self.warmup_steps:
            state.exact(bucket.flat)
            return
        self._add_gradient(bucket, state)
        average_in_place(state.average, state.momentum, bucket)

    def skip(self, bucket: Bucket, state: Momentum) -> None:
        """Add the gradient to this rank's momentum, after the warm-up."""
        if bucket.step >= self.warmup_steps:
            self._add_gradient(bucket, state)

    def _add_gradient(self, bucket: Bucket, state: Momentum) -> None:
        """m <- b1 m + (1 - b1) g, once in a step."""
        if state.averaged_in == bucket.step:
            raise CommError(
                "QAdam: the momentum was averaged already in this step; accumulate gradients without averaging "
                "(no_sync), and tell the engine about every step (Engine.at)"
            )
        state.averaged_in = bucket.step
        kernels.of(state.momentum).blend(state.momentum, bucket.flat, self.beta1, out=state.momentum)
