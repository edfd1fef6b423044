"""Who trains, in which place, and who keeps whose copy: pure functions, the same on every process."""

from __future__ import annotations

from collections.abc import Hashable, Sequence


def choose(alive: Sequence[int], before: Sequence[int], wanted: int) -> list[int]:
    """The numbers of the processes that train, in the order of their ranks.

    Those who trained go on. If others can take all free places, they take those of the dead, so that nobody's
    rank changes; otherwise those who are left move together, and the others come behind them.

    Args:
        alive: The numbers of all living processes.
        before: The numbers of those who trained, dead or alive, by rank; empty at the start.
        wanted: How many train, if there are as many.

    >>> choose([0, 2, 3, 4], before=[0, 1, 2], wanted=3)
    [0, 3, 2]
    >>> choose([0, 2, 3], before=[0, 1, 2, 3], wanted=4)
    [0, 2, 3]
    """
    others = [number for number in sorted(alive) if number not in before]
    stay = [number for number in before if number in alive]
    free = max(0, wanted - len(stay))
    if before and len(stay) + min(free, len(others)) == len(before):
        return [number if number in alive else others.pop(0) for number in before]
    return stay + others[:free]


def buddies(hosts: Sequence[Hashable]) -> list[int]:
    """For every rank, the rank that keeps a copy of what is its own: on another host, if there is one.

    The ranks of a host spread over those of the next host; on one host it is the next rank.

    >>> buddies(["a", "a", "b", "b"])
    [2, 3, 0, 1]
    >>> buddies(["a", "a", "a"])
    [1, 2, 0]
    """
    ranks_of: dict[Hashable, list[int]] = {}
    for rank, host in enumerate(hosts):
        ranks_of.setdefault(host, []).append(rank)
    if len(ranks_of) == 1:
        return [(rank + 1) % len(hosts) for rank in range(len(hosts))]
    order = list(ranks_of)
    found = [0] * len(hosts)
    for index, host in enumerate(order):
        there = ranks_of[order[(index + 1) % len(order)]]
        for place, rank in enumerate(ranks_of[host]):
            found[rank] = there[place % len(there)]
    return found
