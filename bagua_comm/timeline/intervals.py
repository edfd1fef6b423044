"""Sets of time, as sorted lists of disjoint intervals."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterable
from itertools import accumulate
from typing import TypeAlias

Interval: TypeAlias = tuple[int, int]


def union(intervals: Iterable[Interval]) -> list[Interval]:
    """The time that is in any of `intervals`.

    >>> union([(5, 7), (0, 2), (1, 3), (7, 8)])
    [(0, 3), (5, 8)]
    """
    joined: list[Interval] = []
    for start, end in sorted(intervals):
        if joined and start <= joined[-1][1]:
            joined[-1] = joined[-1][0], max(end, joined[-1][1])
        else:
            joined.append((start, end))
    return joined


def intersection(a: list[Interval], b: list[Interval]) -> list[Interval]:
    """The time that is in both.

    >>> intersection([(0, 4), (6, 9)], [(2, 7), (8, 10)])
    [(2, 4), (6, 7), (8, 9)]
    """
    common, i, j = [], 0, 0
    while i < len(a) and j < len(b):
        start, end = max(a[i][0], b[j][0]), min(a[i][1], b[j][1])
        if start < end:
            common.append((start, end))
        if a[i][1] < b[j][1]:
            i += 1
        else:
            j += 1
    return common


def length(intervals: Iterable[Interval]) -> int:
    """The length of disjoint intervals.

    >>> length([(0, 3), (5, 8)])
    6
    """
    return sum(end - start for start, end in intervals)


def covered(intervals: list[Interval]) -> Callable[[int, int], int]:
    """Return a function of two times: how much of the time between them is in disjoint, sorted intervals.

    >>> between = covered([(0, 3), (5, 8)])
    >>> between(2, 6), between(3, 5), between(-1, 9)
    (2, 0, 6)
    """
    starts = [start for start, _ in intervals]
    sums = list(accumulate((end - start for start, end in intervals), initial=0))

    def before(time: int) -> int:
        i = bisect_right(starts, time)
        return sums[i] - max(0, intervals[i - 1][1] - time) if i else 0

    return lambda start, end: before(end) - before(start)
