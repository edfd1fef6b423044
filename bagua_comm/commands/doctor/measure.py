"""Latency and bandwidth between pairs of ranks, and differences between the clocks of hosts."""

from __future__ import annotations

import itertools
import time
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from ...comm import Communicator

ALL_PAIRS_S, PAIR_S = 5.0, 0.3
"""The time for all pairs together, and for one pair; it is exceeded on networks slower than 50 Mbit/s."""

MAX_MEASURED = 16
"""The most ranks that are measured in pairs."""

SMALL_BYTES, LARGE_BYTES = 1 << 16, 1 << 22
"""The least and the greatest size of a message that measures bandwidth."""

CLOCK_TRIPS = 8
"""The number of round trips to read a clock. The fastest counts."""


@dataclass(frozen=True, order=True)
class Pair:
    """The measurements of two ranks."""

    a: int
    b: int
    latency_s: float
    """Half of the shortest round trip of one byte."""
    bytes_per_s: float
    """The bandwidth of large messages in one direction, from the lower quartile of their times."""


def ranks_to_measure(size: int, firsts: list[int]) -> list[int]:
    """The ranks to measure in pairs: all; if they are too many, one on each host, then more.

    Args:
        size: The number of ranks.
        firsts: The first rank of each host.
    """
    if size <= MAX_MEASURED:
        return list(range(size))
    step = -(-len(firsts) // MAX_MEASURED)
    chosen = firsts[::step]
    others = [rank for rank in range(size) if rank not in chosen]
    return sorted([*chosen, *others[: MAX_MEASURED - len(chosen)]])


def measure_pairs(comm: Communicator, ranks: Sequence[int]) -> list[Pair]:
    """Measure each pair of these ranks, one after another; all ranks get all results.

    Collective.
    """
    pairs = list(itertools.combinations(ranks, 2))
    mine = []
    for a, b in pairs:
        comm.barrier()
        if comm.rank == a:
            mine.append(_lead(comm, b, min(PAIR_S, ALL_PAIRS_S / len(pairs))))
        elif comm.rank == b:
            _follow(comm, a)
    return sorted(pair for each in comm.allgather_object(mine) for pair in each)


def _lead(comm: Communicator, peer: int, seconds: float) -> Pair:
    _trips(comm, peer, 1, 3)  # the first message opens the connection
    latency = min(_trips(comm, peer, 1, 20))
    latency = min(latency, *_trips(comm, peer, 1, _clip(0.2 * seconds / (2 * latency), 2, 200)))
    per_byte = min(_trips(comm, peer, SMALL_BYTES, 2)) / SMALL_BYTES
    nbytes = _clip(0.1 * seconds / (2 * per_byte), SMALL_BYTES, LARGE_BYTES)
    # The fastest may be a burst that a rate limit lets pass; the median suffers on a busy host.
    times = sorted(_trips(comm, peer, nbytes, _clip(0.6 * seconds / (2 * per_byte * nbytes), 4, 20)))
    comm.send(np.zeros(2, np.int64), dest=peer)
    return Pair(comm.rank, peer, latency, nbytes / times[len(times) // 4])


def _trips(comm: Communicator, peer: int, nbytes: int, count: int) -> list[float]:
    """The times of `count` messages in one direction, as half of a round trip, in seconds."""
    comm.send(np.array([nbytes, count]), dest=peer)
    message, times = np.zeros(nbytes, np.uint8), []
    for _ in range(count):
        start = time.perf_counter()
        comm.send(message, dest=peer)
        comm.recv(message, source=peer)
        times.append(max((time.perf_counter() - start) / 2, 1e-9))
    return times


def _follow(comm: Communicator, peer: int) -> None:
    """Return all messages of the peer to it, until it announces none."""
    order = np.zeros(2, np.int64)
    while comm.recv(order, source=peer)[1]:
        message = np.zeros(order[0], np.uint8)
        for _ in range(order[1]):
            comm.recv(message, source=peer)
            comm.send(message, dest=peer)


def measure_clocks(comm: Communicator, ranks: Sequence[int]) -> dict[int, float]:
    """Return how many seconds the clock of each of these ranks is ahead of the first rank's clock.

    Collective.
    """
    first, *others = ranks
    ahead = {first: 0.0} if comm.rank == first else {}
    clock = np.zeros(1)
    for rank in others:
        if comm.rank == first:
            for _ in range(CLOCK_TRIPS):
                comm.recv(clock, source=rank)
                clock[0] = time.time()
                comm.send(clock, dest=rank)
        elif comm.rank == rank:
            answers = []
            for _ in range(CLOCK_TRIPS):
                start = time.time()
                comm.send(clock, dest=first)
                comm.recv(clock, source=first)
                end = time.time()
                answers.append((end - start, (start + end) / 2 - float(clock[0])))
            ahead[rank] = min(answers)[1]
    return {rank: value for each in comm.allgather_object(ahead) for rank, value in each.items()}


def _clip(value: float, least: int, most: int) -> int:
    return int(min(max(value, least), most))
