"""The parts of arrays that ranks have, and need.

slices_of   the division of shared arrays among the ranks that write them, equal by bytes
cover       which of the parts that exist make up a part that a rank needs, in files and in memory
"""

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


class Piece(NamedTuple):
    """Indices `begin` to `end` along the axis of a distributed array, which the part with this number has."""

    part: int
    begin: int
    end: int


def cover(begin: int, end: int, parts: Sequence[tuple[int, int]]) -> list[Piece]:
    """The pieces that make up the indices `begin` to `end`, in order, each of the first part that has it.

    They end before `end` if no part has what follows.

    >>> [tuple(piece) for piece in cover(2, 9, [(0, 4), (4, 8), (0, 8), (8, 12)])]
    [(0, 2, 4), (1, 4, 8), (3, 8, 9)]
    """
    pieces: list[Piece] = []
    while begin < end:
        found = next((n for n, (low, high) in enumerate(parts) if low <= begin < high), None)
        if found is None:
            break
        pieces.append(Piece(found, begin, min(end, parts[found][1])))
        begin = pieces[-1].end
    return pieces


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
