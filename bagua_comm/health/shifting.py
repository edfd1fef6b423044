"""Shifting: the microbatches of a step move from ranks that are slow for long to the other ones.

A rank needs t_r seconds for a microbatch, the median of its last rows, and has n_r of them. A step takes as long
as the slowest rank, max of n_r t_r. That is least if each microbatch in turn is given to the rank that would be
done with it first (R. L. Graham, "Bounds on multiprocessing timing anomalies", 1969; exact for equal ones).
"""

from __future__ import annotations

import functools
import heapq
import statistics
import zlib
from collections import deque
from collections.abc import Sequence

from ..errors import ArrayError
from .change_points import ROWS
from .rows import Row

LEAST_GAIN = 0.05
"""Microbatches are shifted only if the step is shorter by this part of it."""


class Shares:
    """How many of the microbatches of a step each rank has.

    All ranks add the same rows in the same step, so that they come to the same numbers, and send nothing.

    Args:
        ranks: The number of ranks.
        is_weighed: Whether the mean of the ranks is right for unequal numbers, as far as is known.
    """

    def __init__(self, ranks: int, *, is_weighed: bool = True) -> None:
        self._ranks, self._is_weighed = ranks, is_weighed
        self._counts: tuple[int, ...] = ()
        self._known: list[float] = []
        """The times for an equal share, by rank, by which the latest decision was made."""
        self._unlike: list[int] = []
        """The ranks of which the latest rows say that they call `share` otherwise than rank 0."""
        self._times: deque[list[float]] = deque(maxlen=ROWS)
        """The times for an equal share, by rank, in the rows since the last decision."""

    def add(self, rows: Sequence[Row], *, weighed: bool) -> None:
        """Add rows that all ranks have, and whether their mean is right for unequal numbers of microbatches."""
        self._is_weighed = weighed
        self._unlike = [rank for rank, row in enumerate(rows) if row.counts != rows[0].counts]
        if self._counts and all(row.steps for row in rows):
            self._times.append([row.work_s for row in rows])

    def counts(self, microbatches: int) -> tuple[int, ...]:
        """Return the numbers of this many microbatches by rank, as they are now."""
        return self._counts if sum(self._counts) == microbatches else equal(microbatches, self._ranks)

    def part(self, rank: int) -> float:
        """Return how many microbatches a rank has, as a multiple of an equal share."""
        return self._counts[rank] * self._ranks / sum(self._counts) if self._counts else 1.0

    @property
    def digest(self) -> float:
        """A checksum of the present numbers of all ranks, for a row."""
        return float(zlib.crc32(repr(self._counts).encode()))

    def _check_calls(self) -> None:
        if self._unlike:
            raise ArrayError(
                f"share: ranks {self._unlike} call it otherwise than rank 0; expected the same number of "
                "microbatches and the same shift on all ranks, in each step"
            )

    def reset(self) -> None:
        """Give each rank an equal share again.

        Raises:
            ArrayError: The ranks call `share` with unlike arguments.
        """
        self._check_calls()
        self._counts, self._known = (), []
        self._times.clear()

    def shift(self, microbatches: int) -> tuple[int, ...]:
        """Return the numbers of microbatches for the next step, by rank.

        Raises:
            ArrayError: The ranks have no engine, its mean would not count all microbatches equally, or they call
                `share` with unlike arguments.
        """
        self._check_calls()
        if not self._is_weighed:
            raise ArrayError(
                "share: shift=True needs an Engine or a DistributedDataParallel on `comm` whose mean counts all "
                "microbatches equally, and the one made last does not, or there is none; set its weight in each "
                "step, `weight = len(mine)`, or average by GradientAllReduce(Reproducible(addends=M)). FSDP2 "
                "needs equal numbers: omit shift"
            )
        self._counts = self.counts(microbatches)
        if len(self._times) == ROWS:
            self._known = [statistics.median(of_rank) for of_rank in zip(*self._times, strict=True)]
            self._times.clear()
        if self._known:
            best = fastest(microbatches, self._known)
            if step_s(best, self._known) < (1 - LEAST_GAIN) * step_s(self._counts, self._known):
                self._counts = best
        return self._counts


@functools.lru_cache(maxsize=64)
def equal(microbatches: int, ranks: int) -> tuple[int, ...]:
    """Return the numbers of microbatches of `topology.share`, by rank."""
    return tuple(microbatches // ranks + (rank < microbatches % ranks) for rank in range(ranks))


def fastest(microbatches: int, times: Sequence[float]) -> tuple[int, ...]:
    """Return the numbers of microbatches with which the slowest rank is done first.

    Each has one at least, and twice the equal share at most: an average may hold a gradient for each.

    >>> fastest(10, [1.0, 1.0, 2.0])
    (4, 4, 2)
    """
    counts, done = [1] * len(times), [(2 * time, rank) for rank, time in enumerate(times)]
    heapq.heapify(done)
    most = -(-2 * microbatches // len(times))
    for _ in range(microbatches - len(times)):
        at, rank = heapq.heappop(done)
        counts[rank] += 1
        if counts[rank] < most:
            heapq.heappush(done, (at + times[rank], rank))
    return tuple(counts)


def step_s(counts: Sequence[int], times: Sequence[float]) -> float:
    """Return how long the slowest rank takes for its microbatches."""
    return max(count * time for count, time in zip(counts, times, strict=True))
