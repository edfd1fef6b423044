"""Comparison of results with the expected ones."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from bagua_comm.arrays import Array


def count_wrong(actual: Array | None, expected: Array) -> int:
    """Number of elements that differ; all of them, if the result is missing or has another size.

    >>> count_wrong(np.array([1.0, 2.0, np.nan]), np.array([1.0, 3.0, 4.0]))
    2
    """
    if actual is None or actual.size != expected.size:
        return int(expected.size)
    return int(np.count_nonzero(actual.reshape(-1) != expected.reshape(-1)))


def relative_error(actual: Array | None, expected: Array) -> float:
    """|actual - expected| / |expected| in the L2 norm; infinite where the result is missing.

    >>> relative_error(np.array([3.0, 5.0]), np.array([3.0, 4.0]))
    0.2
    """
    if actual is None or actual.size != expected.size:
        return float("inf")
    # Not through BLAS: its threads spin for a while, beside the next timed call.
    distance = np.square(np.subtract(actual, expected.reshape(actual.shape), dtype=np.float64)).sum()
    return float(np.sqrt(distance / np.square(expected).sum())) if distance else 0.0


@dataclass(frozen=True)
class Check:
    """A check of results.

    Args:
        title: The column of its numbers.
        judge: From the result and the expected one: a number for a call on a rank, 0 if the result is right.
        over_ranks: Reduction of the numbers of all ranks.
    """

    title: str
    judge: Callable[[Array | None, Array], float]
    over_ranks: Callable[..., Any]

    def total(self, faults: Array) -> float:
        """The number for the worst call, from (p, iterations)."""
        return float(self.over_ranks(faults, axis=0).max())


WRONG = Check("#wrong", count_wrong, np.sum)
ERROR = Check("error", relative_error, np.max)


def poison(x: Array) -> None:
    """Fill a contiguous array with bytes 0xFF (NaN, -1), so that no former result is left there."""
    x.reshape(-1).view(np.uint8).fill(0xFF)
