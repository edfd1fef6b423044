"""Communication graphs and the placement of ranks: pure functions of (rank, size, step).

Every function gives the result of one rank; the tests show that the results of all ranks fit together.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterable, Sequence
from numbers import Integral
from typing import NamedTuple, TypeVar

from .errors import ArrayError, shown

L = TypeVar("L", bound=Hashable)


class Neighbours(NamedTuple):
    """The two peers of a rank on a ring."""

    left: int
    right: int


class Shift(NamedTuple):
    """The destination and the source of a rank in one step of a directed graph."""

    dest: int
    source: int


def ring(rank: int, size: int) -> Neighbours:
    """The neighbours of a rank on a ring: the same peer twice with two ranks, itself with one.

    >>> ring(0, 4)
    Neighbours(left=3, right=1)
    """
    _check(rank, size)
    return Neighbours((rank - 1) % size, (rank + 1) % size)


def shift_one(rank: int, size: int, step: int) -> int:
    """The peer of `rank` when the lower half of the ranks is paired with the upper, shifted by one each step.

    Pairs are mutual, and in size / 2 steps a rank is paired once with every rank of the other half. The pairing
    is Bagua's `shift_one` peer selection, for r < n/2: ((s + r) mod ((n + 1) div 2)) + n/2.

    Raises:
        ArrayError: An odd number of ranks cannot be paired.

    >>> [shift_one(r, 4, step=0) for r in range(4)], [shift_one(r, 4, step=1) for r in range(4)]
    ([2, 3, 0, 1], [3, 2, 1, 0])
    """
    _check(rank, size)
    if size % 2:
        raise ArrayError(
            f'shift_one pairs ranks, so it needs an even number of them; got {size} (use peers="all")'
        )
    half = size // 2
    if rank < half:
        return (step + rank) % half + half
    return (rank - half - step) % half


def one_peer_exponential(rank: int, size: int, step: int) -> Shift:
    """Peers on the one-peer exponential graph: send 2^(step mod log2 size) ranks ahead.

    With a power-of-two size, averaging with the received values over log2(size) steps gives the exact
    mean of all ranks. Source: Ying et al., "Exponential Graph is Provably Efficient for Decentralized
    Deep Training", arXiv 2110.13363.

    >>> [one_peer_exponential(0, 8, step).dest for step in range(4)]
    [1, 2, 4, 1]
    """
    _check(rank, size)
    if size == 1:
        return Shift(0, 0)
    hop = 2 ** (step % (size - 1).bit_length())
    return Shift((rank + hop) % size, (rank - hop) % size)


def balanced_dims(size: int, dims: Sequence[int]) -> tuple[int, ...]:
    """Complete the lengths of a Cartesian grid of `size` ranks: `dims`, where 0 stands for a length to choose.

    The lengths are as close to each other as possible, the larger ones first, as `MPI_Dims_create` has it.

    Raises:
        ArrayError: `dims` are not integers of at least 0, or there is no such grid.

    >>> balanced_dims(12, (0, 0)), balanced_dims(12, (0, 3, 0)), balanced_dims(8, (0, 0, 0))
    ((4, 3), (2, 3, 2), (2, 2, 2))
    """
    given = list(dims) if isinstance(dims, Iterable) else []
    if not given or not all(isinstance(n, Integral) and n >= 0 for n in given):
        raise ArrayError(f"dims is {shown(dims)}, expected a number of ranks for each axis; 0 to choose it")
    product, free = math.prod(n for n in given if n), given.count(0)
    if size % product or (size != product and not free):
        raise ArrayError(
            f"dims {tuple(given)} make {product} ranks{' times those to choose' if free else ''}, but there are "
            f"{size}; give 0 for an axis, and its length is chosen"
        )
    chosen = iter(_factors(size // product, free))
    return tuple(int(n) or next(chosen) for n in given)


def _factors(number: int, count: int) -> tuple[int, ...]:
    """The `count` factors of a number that are closest to each other, the largest first."""
    if count < 2:
        return (number,)
    divisors = [n for n in range(1, number + 1) if number % n == 0]
    found = [(n, *_factors(number // n, count - 1)) for n in divisors]
    return min(factors for factors in found if factors[0] >= factors[1])


class Place(NamedTuple):
    """The position of a rank: the index of its node, its rank there, and the number of ranks there."""

    node: int
    local_rank: int
    local_size: int


def place(rank: int, labels: Sequence[object]) -> Place:
    """The position of `rank`, given the label of every rank's node, such as its host name.

    Nodes are numbered in the order of their first rank.

    >>> [place(r, ["a", "b", "a"]) for r in range(3)]
    [Place(node=0, local_rank=0, local_size=2), Place(node=1, local_rank=0, local_size=1),
     Place(node=0, local_rank=1, local_size=2)]
    """
    _check(rank, len(labels))
    mine = labels[rank]
    return Place(
        node=list(dict.fromkeys(labels)).index(mine),
        local_rank=list(labels[:rank]).count(mine),
        local_size=list(labels).count(mine),
    )


def ranks_by(labels: Iterable[L]) -> dict[L, list[int]]:
    """The ranks with each label, given the label of every rank; the label of the lowest rank first.

    >>> ranks_by(["a", "b", "a"])
    {'a': [0, 2], 'b': [1]}
    """
    found: dict[L, list[int]] = {}
    for rank, label in enumerate(labels):
        found.setdefault(label, []).append(rank)
    return found


def split_group(rank: int, colors: Sequence[int], keys: Sequence[int]) -> list[int]:
    """The ranks with the color of `rank`, ordered by (key, rank) as `MPI_Comm_split` has it.

    >>> split_group(0, [5, 7, 5], keys=[2, 0, 1])
    [2, 0]
    """
    group = [other for other, color in enumerate(colors) if color == colors[rank]]
    return sorted(group, key=lambda other: (keys[other], other))


def share(count: int, rank: int, size: int) -> range:
    """The range of `count` items for `rank`: consecutive, as of `numpy.array_split`.

    The first count % size ranks have one item more than the others.

    >>> [list(share(7, rank, 3)) for rank in range(3)]
    [[0, 1, 2], [3, 4], [5, 6]]
    """
    _check(rank, size)
    length, longer = divmod(count, size)
    return range(rank * length + min(rank, longer), (rank + 1) * length + min(rank + 1, longer))


def hosts(together: Sequence[int], names: Sequence[str]) -> list[int]:
    """For each rank, the first rank on its host.

    Two ranks are on one host if either source says so: MPI misses a shared host under some launchers, and names
    may differ where containers share memory.

    Args:
        together: For each rank, the first rank that shares memory with it, according to MPI.
        names: The host name of each rank.

    >>> hosts([0, 1, 2, 2], ["a", "a", "b", "c"])
    [0, 0, 2, 2]
    """
    parents = list(range(len(names)))

    def root(rank: int) -> int:
        while parents[rank] != rank:
            parents[rank] = parents[parents[rank]]
            rank = parents[rank]
        return rank

    first_of: dict[str, int] = {}
    for rank, (other, name) in enumerate(zip(together, names, strict=True)):
        for neighbour in (other, first_of.setdefault(name, rank)):
            low, high = sorted((root(rank), root(neighbour)))
            parents[high] = low
    return [root(rank) for rank in range(len(names))]


def _check(rank: int, size: int) -> None:
    if not 0 <= rank < size:
        raise ArrayError(f"rank is {rank}, expected 0 <= rank < {size}")
