"""Bound averages of algorithms, and the residuals that move to another average when settings change.

An average with error feedback keeps a residual and adds it to later arrays. If it is replaced by an average
without error feedback, the residual is added once, to the next array.
"""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from .. import arrays, kernels
from ..arrays import Array
from ..averages import Average, InPlace
from ..averages.error_feedback import Residual
from ..bucket import Bucket
from ..comm import Communicator
from ..comm.weights import Weighting
from .base import HANDED_OVER, SAME_PATH, TRANSIENT


@dataclass
class Bound:
    """A bound average without a residual for whole arrays, and the residual of the average before it."""

    average: InPlace = field(metadata=SAME_PATH)
    residual: Array | None = field(default=None, metadata=HANDED_OVER)
    """The addend of the next array."""
    spent: Array | None = field(default=None, metadata=TRANSIENT)
    """The addend of the last array. A device may read it until the step has ended."""

    def __call__(self, x: Array) -> Array:
        """Average `x` in place. Collective."""
        self.spent, self.residual = self.residual, None
        if self.spent is not None:
            kernels.of(x).add(x, self.spent, out=x)
        return self.average(x)

    @property
    def hold(self) -> Any:
        """The `hold` of the average; None if it has none."""
        return getattr(self.average, "hold", None)

    @property
    def weigh_held(self) -> Callable[[Sequence[float]], object] | None:
        """The `weigh_held` of the average; None if it has none."""
        return getattr(self.average, "weigh_held", None)


def bind_average(average: Average, comm: Communicator, bucket: Bucket) -> InPlace:
    """Bind `average` to `comm`, for arrays of the shape, dtype and library of the bucket's.

    Collective. Besides `comm`, `bind` gets the arguments that it accepts: `like`, the array of the bucket, and
    `sizes`, the numbers of elements of its tensors. The result has a field `residual` for checkpoints and new
    plans.
    """
    parameters = inspect.signature(average.bind).parameters
    options: dict[str, object] = {}
    if "like" in parameters or any(p.kind is p.VAR_KEYWORD for p in parameters.values()):
        options["like"] = bucket.flat
    if "sizes" in parameters:
        options["sizes"] = [tensor.size for tensor in bucket.spec.tensors]
    bind: Callable[..., InPlace] = average.bind
    bound = bind(comm, **options)
    return bound if hasattr(bound, "residual") else Bound(bound)


def average_in_place(
    average: InPlace, x: Array, bucket: Bucket, weighting: Weighting | None = None, *, feeds: bool = False
) -> None:
    """Average `x`, and leave zeros in the padding of `x` and of a residual. Collective.

    Args:
        average: The result of `bind_average`.
        x: An array like the bucket's.
        bucket: The bucket.
        weighting: The weight of this rank in the mean; None for a plain mean.
        feeds: Whether the average has a residual, the same on all ranks.
    """
    if weighting is None:
        average(x)
    else:
        weigh_held: Callable[[Sequence[float]], object] | None = getattr(average, "weigh_held", None)
        if weigh_held is not None:
            weigh_held(weighting.factors[:-1])
        weighting.average(x, average, shrinks=not feeds)
    if not bucket.padding.size:
        return
    bucket.clear_padding(x)
    across = getattr(getattr(average, "average", None), "across", None)  # of `Hierarchical`
    for each in (average, across):
        feedback = getattr(each, "state", None)
        if isinstance(feedback, Residual):  # its `residual` would decode one that is encoded
            if feedback.size == bucket.flat.size:
                feedback.clear_end(bucket.padding.size)
        elif (residual := getattr(each, "residual", None)) is not None and residual.shape == bucket.flat.shape:
            bucket.clear_padding(residual)


def gather_residuals(bucket: Bucket, state: object) -> None:
    """Turn residuals of averages among nodes (`Hierarchical`), of a chunk, into residuals of the whole bucket.

    In this form any average can use them. The sum over all means is the same, up to rounding. Means are counted
    from zero on, for `ErrorFeedback(reset_every)`, since other settings have no place for the count.
    """
    for residual in _residuals_in(state):
        residual.means = None
    for bound in _bounds_in(state):
        levels: Any = bound.average
        lost: Array | None = getattr(getattr(levels, "across", None), "residual", None)
        if lost is None:
            continue
        addend = arrays.zeros_like(bucket.flat)
        first = levels.intra.rank * lost.size  # a rank without a chunk has a residual of size 0
        mine = addend[first : first + lost.size]
        # A residual is added to a mean over nodes, weighted by their sizes; an array, to a mean over ranks.
        mine[...] = lost[: mine.size] * levels.sizes.largest
        bound.residual = addend if bound.residual is None else bound.residual + addend
        levels.across.residual = None


def clear_residuals(state: object) -> None:
    """Forget the errors of earlier averages in a state. What counts averages, alike on all ranks, continues."""
    if not dataclasses.is_dataclass(state):
        return
    for entry in dataclasses.fields(state):
        if entry.name == "residual" and entry.metadata.get("reshape"):
            setattr(state, entry.name, None)
        else:
            clear_residuals(getattr(state, entry.name))


def _residuals_in(state: object) -> Iterator[Residual]:
    """Iterate over the residuals of error feedback in a state."""
    if isinstance(state, Residual):
        yield state
    elif dataclasses.is_dataclass(state):
        for entry in dataclasses.fields(state):
            if not entry.metadata.get("transient"):
                yield from _residuals_in(getattr(state, entry.name))


def _bounds_in(state: object) -> Iterator[Bound]:
    """Iterate over the bound averages of whole buckets in a state."""
    if isinstance(state, Bound):
        yield state
    elif dataclasses.is_dataclass(state):
        for entry in dataclasses.fields(state):
            if not entry.metadata.get("chunk"):
                yield from _bounds_in(getattr(state, entry.name))
