"""Averages of weights beside training, which never waits for other ranks.

    s <- x        r <- mean of s over the ranks (however long that takes)        x <- x + r - s

Changes that training made to x meanwhile are kept. A round begins and ends after optimizer steps, on the training
thread, so that weights never change during a forward or backward pass, and no lock is needed.
Source: the asynchronous model average of Bagua (arXiv 2107.01499).
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from .. import kernels
from ..arrays import Array
from ..bucket import Bucket
from ..comm import Communicator
from ..errors import ArrayError
from .base import TRANSIENT, Algorithm, Rounds, check_floating, check_integer
from .gradient import GradientAllReduce


@dataclass
class Snapshot:
    """State of `AsyncModelAverage` during a round."""

    weight: Array = field(metadata=TRANSIENT)
    mean: Array = field(metadata=TRANSIENT)


@dataclass(frozen=True)
class AsyncModelAverage(Algorithm):
    """Average a snapshot of the weights, and add the change to the weights when it arrives.

    Every rank trains at its own speed. Weights differ between ranks: before evaluation, call `Engine.stop` on all
    ranks, then average them.

    Args:
        interval_s: Minimum number of seconds between the beginnings of two rounds.
        warmup_steps: Number of steps that average gradients before the first round.

    Raises:
        ArrayError: An argument is negative.
    """

    interval_s: float = 0.5
    warmup_steps: int = 0

    payload = "weight"

    def __post_init__(self) -> None:
        check_integer("AsyncModelAverage", "warmup_steps", self.warmup_steps, least=0)
        if not isinstance(self.interval_s, (int, float)) or not self.interval_s >= 0:
            raise ArrayError(
                f"AsyncModelAverage: interval_s is {self.interval_s!r}, expected a number of at least 0"
            )

    @property
    def window(self) -> Rounds:  # type: ignore[override]
        """Rounds beside training."""
        return Rounds(self.interval_s)

    @property
    def phases(self) -> tuple[Algorithm, ...]:
        """Gradient averaging first, if there is a warm-up; then this algorithm without it."""
        if not self.warmup_steps:
            return (self,)
        return GradientAllReduce(), replace(self, warmup_steps=0)

    def phase(self, step: int) -> Algorithm:
        """Gradient averaging during the warm-up, then rounds."""
        return self.phases[0 if step < self.warmup_steps else -1]

    def check(self, dtype: str) -> None:
        """Supports floating-point dtypes."""
        check_floating(self, dtype)

    def init(self, bucket: Bucket, comm: Communicator) -> Snapshot:
        """See `Algorithm.init`. Collective."""
        return Snapshot(bucket.flat.copy(), bucket.flat.copy())

    def begin(self, bucket: Bucket, state: Snapshot) -> None:
        """s <- x."""
        state.weight[...] = bucket.flat

    def exchange(self, bucket: Bucket, comm: Communicator, state: Snapshot) -> None:
        """r <- mean of s. Collective."""
        comm.allreduce(state.weight, out=state.mean, op="avg")

    def commit(self, bucket: Bucket, state: Snapshot) -> None:
        """x <- x + r - s."""
        kernels.of(bucket.flat).advance(bucket.flat, state.mean, state.weight)
