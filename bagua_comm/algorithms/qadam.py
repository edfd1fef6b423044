"""QAdam: Adam whose momentum, not its gradient, is averaged through a codec once its variance is frozen.

    steps 1 to W:   g <- mean of g                 m <- b1 m + (1 - b1) g       v <- b2 v + (1 - b2) g^2
    steps after W:  m <- Q-mean of b1 m + (1 - b1) g_local                      v stays

The optimizer does the rest: `bagua_comm.optim.QAdam` on flat arrays, `bagua_torch.QAdamOptimizer`. It changes
the same `momentum` as the exchange.
Source: 1-bit Adam, Tang et al., arXiv 2102.02888, with eight bits as in Bagua (arXiv 2107.01499).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar

from .. import arrays, kernels
from ..arrays import Array
from ..averages import Average, Exact, InPlace, Quantized
from ..bucket import Bucket
from ..comm import Communicator
from ..errors import ArrayError, CommError
from .base import ALIKE, Payload, Point, Window, check_average, check_average_argument, check_integer


@dataclass
class Momentum:
    """What `QAdam` keeps."""

    momentum: Array = field(metadata=ALIKE)
    """Adam's first moment; the optimizer's own, too."""
    exact: InPlace
    average: InPlace
    averaged_in: int = -1
    """The latest training step in which the momentum was averaged."""


@dataclass(frozen=True)
class QAdam:
    """Average gradients exactly for `warmup_steps`, then average Adam's momentum, quantized.

    In the second part gradients stay as the rank made them, so clipping them has no effect there; accumulate
    gradients without averaging (`no_sync`). All parameters share one `beta1`.

    Args:
        warmup_steps: Steps, at least 1, before the variance is frozen; about a fifth of all.
        beta1: Adam's.
        average: How the momentum is averaged.

    Raises:
        ArrayError: An argument is out of range.
    """

    warmup_steps: int = 100
    beta1: float = 0.9
    average: Average = field(default_factory=Quantized)

    payload: ClassVar[Payload] = "grad"
    window: ClassVar[Window] = Window(Point.GRADIENT, Point.BACKWARD)
    lends: ClassVar[str] = "momentum"

    def __post_init__(self) -> None:
        check_integer("QAdam", "warmup_steps", self.warmup_steps, least=1)
        if not 0 <= self.beta1 < 1:
            raise ArrayError(f"QAdam: beta1 is {self.beta1}, expected 0 <= beta1 < 1")
        check_average_argument("QAdam", self.average)

    def check(self, dtype: str) -> None:
        """What the average takes."""
        check_average(self.average, dtype)

    def init(self, bucket: Bucket, comm: Communicator) -> Momentum:
        """See `Algorithm.init`. Collective."""
        return Momentum(arrays.zeros_like(bucket.flat), Exact().bind(comm), self.average.bind(comm))

    def exchange(self, bucket: Bucket, comm: Communicator, state: Momentum) -> None:
        """Average the gradient, then the momentum. Collective."""
        if bucket.step < self.warmup_steps:
            state.exact(bucket.flat)
            return
        if state.averaged_in == bucket.step:
            raise CommError(
                "QAdam: the momentum was averaged already in this step; accumulate gradients without averaging "
                "(no_sync), and tell the engine of every step"
            )
        m, g, beta1 = state.momentum, bucket.flat, self.beta1
        kernels.of(m).blend(m, g, beta1, out=m)  # m <- beta1 m + (1 - beta1) g
        state.average(m)
        state.averaged_in = bucket.step
