"""Speeds of the links between nodes, measured on demand while training: one message at a time on each link."""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator, Sequence

import numpy as np

from ..comm import Communicator

LEAST_BYTES, MOST_BYTES = 2**16, 2**19
"""Bounds of the size of a message; the largest takes 42 ms at 100 Mbit/s."""

MESSAGES = 3
"""The number of messages over each link, of which the median counts."""

SLOW = 1.5
"""A link is slow if a message takes this many times as long as at the start."""


def size_of_messages(comm: Communicator, exchanged: float) -> int:
    """Return the bytes of a message with which links are to be measured, the same on all ranks. Collective.

    Those of the largest exchange of a rank, within bounds: where training sends little, so does the measurement.

    Args:
        comm: The ranks.
        exchanged: The bytes that this rank sends in an exchange of training.
    """
    return int(np.clip(comm.allgather(np.array([exchanged])).max(), LEAST_BYTES, MOST_BYTES))


def measure_links(comm: Communicator, nodes: Sequence[int], nbytes: int) -> np.ndarray:
    """Return the seconds of `nbytes` from each node to each other one; row: sender, column: receiver.

    Collective. `nodes` has the node of each rank; the first rank of a node measures. In a turn, a node sends to
    one other node and receives from another one, so that no two messages share a direction of a link, nor a
    connection, on which they may go one after the other. All ranks begin a message together: else a rank that
    still waits for a slow one would begin late, and its own link would seem slow.
    """
    first = {node: nodes.index(node) for node in sorted(set(nodes))}
    leaders, seconds = list(first.values()), np.full(len(first), np.nan)
    leads = comm.rank in leaders
    mine, n = leaders.index(comm.rank) if leads else 0, len(leaders)
    x, out = np.zeros((2, nbytes if leads else 0), np.uint8)
    for distance, senders in turns(n):
        sends, receives = leads and mine in senders, leads and (mine - distance) % n in senders
        times = []
        for _ in range(MESSAGES):
            comm.barrier()
            began = time.perf_counter()
            arrives = comm.irecv(out, source=leaders[(mine - distance) % n]) if receives else None
            leaves = comm.isend(x, dest=leaders[(mine + distance) % n]) if sends else None
            if arrives is not None:
                arrives.result()  # the other one may take longer
                times.append(time.perf_counter() - began)
            if leaves is not None:
                leaves.result()
        if times:
            seconds[mine - distance] = statistics.median(times)
    return np.ascontiguousarray(comm.allgather(seconds)[leaders].T)


def turns(nodes: int) -> Iterator[tuple[int, range]]:
    """Yield, for each turn, how far nodes send, as the difference of their numbers, and which ones do.

    >>> [*turns(4)]
    [(1, range(0, 4)), (2, range(0, 2)), (2, range(2, 4)), (3, range(0, 4))]
    """
    for distance in range(1, nodes):
        if 2 * distance == nodes:  # two nodes would send to each other
            yield distance, range(distance)
            yield distance, range(distance, nodes)
        else:
            yield distance, range(nodes)


def slow_links(factors: np.ndarray, names: Sequence[str]) -> dict[str, float]:
    """Return what is slow, with its factor: all that a node sends or receives, or the link between two nodes.

    Args:
        factors: How many times as long a message takes as at the start; row: sender, column: receiver.
        names: The names of the nodes.

    >>> slow_links(np.array([[np.nan, 1.1, 1.0], [2.0, np.nan, 1.8], [1.0, 0.9, np.nan]]), "abc")
    {'what b sends': 1.9}
    >>> slow_links(np.array([[np.nan, 2.0], [1.0, np.nan]]), "ab")
    {'the link from a to b': 2.0}
    """
    found, rest = {}, factors > SLOW
    for axis, does in ((1, "sends"), (0, "receives")):
        for node, of_node in enumerate(factors if axis else factors.T):
            factor = float(np.nanmedian(of_node))
            if len(factors) > 2 and factor > SLOW and np.nanmin(of_node) > (1 + SLOW) / 2:
                found[f"what {names[node]} {does}"] = round(factor, 2)
                (rest if axis else rest.T)[node] = False
    for sender, receiver in np.argwhere(rest):
        found[f"the link from {names[sender]} to {names[receiver]}"] = round(float(factors[sender, receiver]), 2)
    return found
