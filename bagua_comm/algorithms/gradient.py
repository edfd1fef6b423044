"""Averages of gradients during the backward pass: g <- (1/p) sum of g over the ranks, or a mean with weights."""

from __future__ import annotations

from dataclasses import dataclass, field

from ..averages import Average, Exact, InPlace, Quantized
from ..averages.base import check_average_argument
from ..bucket import Bucket
from ..codecs import MinMaxUInt8
from ..comm import Communicator
from ..errors import ArrayError
from .base import HOLD_HINT, Algorithm, Point, Window
from .residuals import average_in_place, bind_average


@dataclass
class _State:
    """State of `GradientAllReduce`: its bound average, which may keep residuals."""

    average: InPlace


@dataclass(frozen=True)
class GradientAllReduce(Algorithm):
    """Average the gradients of each bucket as soon as they are complete.

    Args:
        average: How to average: `Exact()`, `Reproducible()`, `Quantized(codec)`, `ErrorFeedback(inner)` or
            `Hierarchical(inner)`.
    """

    average: Average = field(default_factory=Exact)

    payload = "grad"
    window = Window(Point.GRADIENT, Point.BACKWARD)

    def __post_init__(self) -> None:
        check_average_argument("GradientAllReduce", self.average)

    def check(self, dtype: str) -> None:
        """Supports the dtypes of the average."""
        self.average.check(dtype)

    def init(self, bucket: Bucket, comm: Communicator) -> _State:
        """See `Algorithm.init`. Collective."""
        return _State(bind_average(self.average, comm, bucket))

    def hold(self, bucket: Bucket, state: _State) -> None:
        """Keep the gradients as one addend of the next mean, and leave zeros; see `Reproducible`."""
        hold = getattr(state.average, "hold", None)
        if hold is None:
            raise ArrayError(f"hold: {self.average} keeps no addends; {HOLD_HINT} does")
        bucket.padding[...] = 0
        hold(bucket.flat)

    def exchange(self, bucket: Bucket, comm: Communicator, state: _State) -> None:
        """g <- mean of g. Collective."""
        feeds, weighting = self.average.has_residual, comm.context.weighting
        average_in_place(state.average, bucket.flat, bucket, weighting, feeds=feeds)

    @property
    def weighs(self) -> bool:
        """See `Algorithm`; that of the average."""
        return self.average.weighs

    @property
    def addends(self) -> int | None:
        """See `Algorithm`; those of the average."""
        return self.average.addends


def ByteGrad() -> GradientAllReduce:  # noqa: N802 - the algorithm's name
    """Bagua's ByteGrad: average the gradients through eight-bit codes. Source: arXiv 2107.01499.

    For one rank on each node, where bandwidth is the bottleneck. Where several ranks share the link of a node,
    `GradientAllReduce(Hierarchical(Quantized()))` sends less over it, and `ByteGrad()` may be slower than exact.
    """
    return GradientAllReduce(Quantized(MinMaxUInt8()))
