"""SparseLoCo: many local steps, then a step along the mean of the largest changes of each rank.

Every H steps, with a the weights after the last outer step (the anchor), x the weights of a rank, e what the rank
has not sent yet, and Q the choice and the coding of `TopK`:

    e <- b e + a - x        s = Q(e)        e <- e - s        a <- a - lr (mean of s over the ranks)        x <- a

There is no outer momentum, since e is one. The paper trains language models with AdamW in the local steps, and
sends the 64 largest of 4,096 elements in 2 bits, with b = 0.95 and lr = 1.

Source: Sarfi et al., "Communication Efficient LLM Pre-training with SparseLoCo", arXiv 2508.15706.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from .. import kernels
from ..arrays import Array
from ..averages import Average, ErrorFeedback, InPlace, TopK
from ..averages.base import check_average_argument, with_changed
from ..averages.error_feedback import check_retain
from ..averages.top_k import check_top_k
from ..bucket import Bucket
from ..comm import Communicator
from ..errors import ArrayError
from .base import REPLICATED, StepWeights, check_integer
from .diloco import OuterAlgorithm
from .residuals import bind_average, clear_residuals


@dataclass
class SparseOuter:
    """State of `SparseLoCo`. The anchor has the same bytes on all ranks; what is unsent is in the average."""

    anchor: Array = field(metadata=REPLICATED)
    average: InPlace
    steps: int = 0
    """Number of inner steps since the last outer step."""
    weights: StepWeights = field(default_factory=StepWeights)


@dataclass(frozen=True)
class SparseLoCo(OuterAlgorithm):
    """Train locally for `local_steps`, then move by the mean of the largest changes; keep the others for later.

    Communicates in one of `local_steps` steps, 112 bytes for 4,096 weights by default, 146 times less than
    float32. Weights are equal on all ranks after an outer step, and differ between outer steps. The inner
    optimizer is that of the training loop: AdamW in the paper. What was not sent is a rank's own, one more copy
    of the weights; on another number of ranks, each begins with the mean of it.

    Args:
        local_steps: Number of inner steps between two outer steps.
        chunk: See `TopK`.
        keep: See `TopK`.
        bits: See `TopK`.
        decay: The part of the unsent changes that is kept until the next outer step, from 0 to 1.
        outer_lr: The factor of the mean of the changes.
        average: Averages the changes in place of `ErrorFeedback(TopK(...), retain=decay)`, whose settings must
            then be left out. With several ranks on each node, `Hierarchical(ErrorFeedback(TopK(), retain=0.95))`
            sends sparse changes between nodes only.
        whole_below: See `TopK`.
        divide: See `TopK`. The paper divides by all, and its authors' code by the senders.

    Raises:
        ArrayError: An argument is out of range, or `average` is given together with settings of the default one.
    """

    local_steps: int = 30
    chunk: int = 4096
    keep: int = 64
    bits: Literal[2, 16, 32] = 2
    decay: float = 0.95
    outer_lr: float = 1.0
    average: Average | None = None  # type: ignore[assignment]
    whole_below: int = 0
    divide: Literal["all", "senders"] = "all"

    def __repr__(self) -> str:
        """The settings, of the last two those that are not defaults: so checkpoints of earlier versions load."""
        return with_changed(self, "whole_below", "divide")

    def __post_init__(self) -> None:
        check_integer("SparseLoCo", "local_steps", self.local_steps, least=1)
        check_top_k("SparseLoCo", self.chunk, self.keep, self.bits, self.whole_below, self.divide)
        check_retain("SparseLoCo", "decay", self.decay)
        if not self.outer_lr > 0:
            raise ArrayError(f"SparseLoCo: outer_lr is {self.outer_lr!r}, expected a number above 0")
        if self.average is not None:
            check_average_argument("SparseLoCo", self.average)
            self._check_defaults()

    def _check_defaults(self) -> None:
        for name in ("chunk", "keep", "bits", "decay", "whole_below", "divide"):
            if getattr(self, name) != getattr(SparseLoCo, name):
                raise ArrayError(
                    f"SparseLoCo: {name} is {getattr(self, name)!r} beside average={self.average!r}, expected "
                    "one of the two; set it in the average"
                )

    @property
    def mean(self) -> Average:
        """The average of the changes."""
        if self.average is not None:
            return self.average
        sparse = TopK(self.chunk, self.keep, self.bits, self.whole_below, self.divide)
        return ErrorFeedback(sparse, retain=self.decay)

    def init(self, bucket: Bucket, comm: Communicator) -> SparseOuter:
        """See `Algorithm.init`. Collective."""
        return SparseOuter(bucket.flat.copy(), bind_average(self.mean, comm, bucket))

    def _step_outer(self, state: SparseOuter, delta: Array) -> None:
        """Move the anchor along the mean change."""
        kernels.of(delta).add_scaled(state.anchor, delta, -self.outer_lr)

    def restart(self, bucket: Bucket, state: SparseOuter) -> None:
        """a <- x, e <- 0; no step counts any more."""
        state.anchor[...] = bucket.flat
        state.weights.sum = None
        clear_residuals(state.average)
