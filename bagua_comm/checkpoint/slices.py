"""The division of shared arrays among the ranks that write them: equal by bytes, in the order of the tree."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

WHOLE_BELOW = 64 << 10
"""The smallest size of an array that is cut, in bytes."""


class Slice(NamedTuple):
    """Elements `begin` to `end` of the flat array with this number."""

    array: int
    begin: int
    end: int


def slices_of(sizes: Sequence[tuple[int, int]], ranks: int) -> list[list[Slice]]:
    """The slices of every rank. Together they cover every array once, including empty ones.

    Args:
        sizes: Number of elements and bytes of an element, of every array.
        ranks: Number of ranks.

    >>> [[tuple(each) for each in part] for part in slices_of([(100_000, 4), (10, 8)], 2)]
    [[(0, 0, 50010)], [(0, 50010, 100000), (1, 0, 10)]]
    """
    total = sum(count * itemsize for count, itemsize in sizes)
    cuts = [total * rank // ranks for rank in range(1, ranks)] + [total + 1]
    parts: list[list[Slice]] = [[] for _ in range(ranks)]
    rank = start = 0
    for n, (count, itemsize) in enumerate(sizes):
        while start >= cuts[rank]:
            rank += 1
        stop, begin, last = start + count * itemsize, 0, rank
        while count * itemsize >= WHOLE_BELOW and stop > cuts[last]:
            end = -(-(cuts[last] - start) // itemsize)
            if end > begin:
                parts[last].append(Slice(n, begin, end))
            begin, last = end, last + 1
        if begin < count or not count:
            parts[last].append(Slice(n, begin, count))
        start = stop
    return parts
