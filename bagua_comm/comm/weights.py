"""Weights of ranks in a mean: factors that each rank multiplies its array by, so that a plain mean is weighted.

With the weights w_r of n ranks, and their sum W:

    g = sum of w_r g_r / W = mean of f_r g_r        f_r = n w_r / W

So the ranks exchange their weights, 8 bytes each, and then average f_r g_r. No average knows of weights: exact or
coded, sparse, by node, with error feedback. A residual of error feedback has the unit of f_r g_r, that of the
result, so a weight that changes does not scale earlier errors. Equal weights have the factor 1, and the bits of
the plain mean. Each product is rounded once.

A rank with weight 0 averages zeros, whatever its array holds. float16 could overflow, since a factor may be n. So
its factors are divided by a power of two that makes them at most 1, and the mean is multiplied by it, exactly.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Hashable, Sequence
from typing import NamedTuple, Protocol, SupportsFloat, TypeAlias, cast

import numpy as np

from .. import kernels
from ..arrays import Array, Counts, as_real
from ..errors import ArrayError, CommMismatch, warn
from ..trace import Tracer

MISSING = -math.inf
"""What a rank sends that has no weight."""
PARTLY, LATE, NO_NUMBER, _RAISED, NEGATIVE = (-sys.float_info.max / each for each in (1, 2, 4, 8, 16))
"""What a rank sends that has no weight of some steps, or none for another reason in `_WRONG`."""

SET_AFTER = "weight: it was set after the backward pass, which did not use it; set it before"
_EXPECTED = "expected a finite number of at least 0"
_ADVICE = "set one on all ranks before each backward pass, 0 on a rank without data; or on none"
_WRONG = {
    PARTLY: "has none in some steps since the last exchange",
    LATE: "has set one after its backward pass had begun",
    NO_NUMBER: f"has set something that is no number, {_EXPECTED}",
    NEGATIVE: f"has set a negative one in some step, {_EXPECTED}",
    _RAISED: "has raised in the function that returns its weight",
}
_ALL_ZERO = "all weights are 0"


class Gathering(Protocol):
    """A communicator, to its weights: `Communicator` is one."""

    rank: int
    size: int
    agreed: set[Hashable]

    def allgather(self, x: Array, *, counts: Counts = None) -> Array:
        """See `Communicator.allgather`. Collective."""


class Weighting(NamedTuple):
    """The factors of this rank in one weighted mean; made by `agree`."""

    factors: tuple[float, ...]
    """One for each addend of this rank: one, except with `Reproducible(addends=M)`."""
    largest: float
    """The largest factor of all ranks; 0 if all weights are."""

    def average(self, x: Array, mean: Callable[[Array], object], *, shrinks: bool = True) -> None:
        """Replace `x` with the weighted mean over all ranks.

        Collective. If all weights are 0, `x` becomes zero without `mean`, so that residuals wait for another one.

        Args:
            x: A contiguous array of floating-point or complex numbers.
            mean: Averages an array over all ranks, in place. Collective.
            shrinks: Whether float16 is kept from overflowing; False if `mean` adds a residual, in a fixed unit.
        """
        if not self.largest:
            x[...] = 0
            return
        narrow = shrinks and x.dtype == np.float16
        exponent = max(math.ceil(math.log2(self.largest)), 0) if narrow else 0
        multiply(x, math.ldexp(self.factors[-1], -exponent))
        mean(x)
        multiply(x, 2.0**exponent)


Weigh: TypeAlias = Callable[[], Weighting | None]
"""Returns the factors of this rank in a mean; called where the mean is made. Collective."""


def multiply(x: Array, factor: float) -> None:
    """Multiply a contiguous array in place; by 0, whatever it holds becomes zero."""
    if not factor:
        x[...] = 0
    elif factor != 1 and x.size:
        real = as_real(x, "sum").reshape(-1)
        kernels.of(real).scale(real, factor)


def as_weight(value: object) -> float:
    """Convert a weight, or the element of an array or a tensor, to a float that `agree` refuses if it is none."""
    try:
        item = getattr(value, "item", None)
        number = value if item is None else item()
        if isinstance(number, (str, bytes, complex)):
            return NO_NUMBER
        found = float(cast(SupportsFloat, number))
    except (TypeError, ValueError, RuntimeError):
        return NO_NUMBER
    except OverflowError:
        return math.inf
    return math.nan if found == MISSING else found


def weight_of_pass(value: object, *, has_begun: bool) -> float | None:
    """Convert a weight as `as_weight`, or None; raise `ArrayError` if its backward pass has begun."""
    if has_begun:
        raise ArrayError(
            "weight: the backward pass has begun; set the weight of its gradients before, on all ranks"
        )
    return None if value is None else as_weight(value)


def mean_in_place(
    weighting: Weighting | None, x: Array, mean: Callable[[Array], object], *, shrinks: bool = True
) -> None:
    """Replace `x` with its mean over all ranks, a plain one if `weighting` is None; see `Weighting.average`.

    Collective.
    """
    if weighting is None:
        mean(x)
    else:
        weighting.average(x, mean, shrinks=shrinks)


def agree(comm: Gathering, mine: Sequence[float | None], counts: Sequence[int] | None = None) -> Weighting | None:
    """Exchange the weights of all ranks, and return the factors of this one; None if no rank has a weight.

    Collective.

    Args:
        comm: The ranks.
        mine: The weights of the addends of this rank; None for one without.
        counts: The numbers of addends of all ranks; the same on each if None.

    Raises:
        ArrayError: A weight is not a finite number of at least 0, or some addends have none. Raised on all ranks.
    """
    sent = np.array([MISSING if weight is None else weight for weight in mine])
    try:
        weights = comm.allgather(sent, counts=counts).reshape(-1).tolist()
    except CommMismatch as exc:
        exc.args = (f"{exc.args[0]}; rank {comm.rank} was sending the weight of its mean: {_ADVICE}",)
        raise
    if all(weight == MISSING for weight in weights):
        return None
    owners = np.repeat(np.arange(comm.size), len(mine) if counts is None else counts).tolist()
    for rank, weight in zip(owners, weights, strict=True):
        if weight == MISSING:
            raise ArrayError(f"weight: rank {rank} has none, and other ranks have one; {_ADVICE}")
        if weight in _WRONG:
            raise ArrayError(f"weight: rank {rank} {_WRONG[weight]}; {_ADVICE}")
        if not 0 <= weight < math.inf:
            raise ArrayError(f"weight: rank {rank} has {weight}, {_EXPECTED}")
    unit = math.frexp(max(weights))[1]  # so that the sum is finite
    total = math.fsum(math.ldexp(weight, -unit) for weight in weights)
    if not total:
        if comm.rank == 0 and _ALL_ZERO not in comm.agreed:
            comm.agreed.add(_ALL_ZERO)
            warn(f"weight: {_ALL_ZERO}, so the mean is 0: no rank has data for this step")
        return Weighting((0.0,) * len(mine), 0.0)

    def factor(weight: float) -> float:
        return len(weights) * math.ldexp(weight, -unit) / total

    first = owners.index(comm.rank)
    own = weights[first : first + len(mine)]
    return Weighting(tuple(map(factor, own)), factor(max(weights)))


def agree_traced(
    comm: Gathering, tracer: Tracer, mine: Sequence[float | None], counts: Sequence[int] | None = None
) -> Weighting | None:
    """`agree`, as a span. Collective."""
    with tracer.span("weights of ranks"):
        return agree(comm, mine, counts)


def agree_by(comm: Gathering, weight: Callable[[], float | None] | None) -> Weighting | None:
    """Exchange the weights that a function returns, as by `agree`; without the function, no rank has one.

    Collective, with a function. If it raises, all ranks raise `ArrayError`.
    """
    if weight is None:
        return None
    try:
        found = weight()
    except Exception:
        agree(comm, [_RAISED])  # so that no rank waits for this one
        raise
    return agree(comm, [None if found is None else as_weight(found)])


def check_weight_argument(owner: str, weight: object) -> None:
    """Raise `ArrayError` unless `weight` is a function, or None."""
    if weight is not None and not callable(weight):
        raise ArrayError(f"{owner}: weight is {weight!r}, expected a function that returns the weight of a step")
