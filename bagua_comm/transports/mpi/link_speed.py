"""The speed of the links between hosts, which decides from which size on arrays are worth encoding.

Every rank receives from a rank of another host while all others do the same, so that ranks of one host share its
link as they do in a collective. All ranks learn the speed of the slowest one.
"""

from __future__ import annotations

import math
import time
from collections import defaultdict
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from mpi4py import MPI

from ..flow import COLLECTIVE
from . import tuning
from .endpoint import Endpoint
from .messages import Messages


class LinkSpeed(NamedTuple):
    """The speed and latency of the slowest link between two hosts."""

    bytes_s: float
    """Bytes per second that a rank receives; infinite on one host."""
    latency_s: float
    """Seconds of a message of one byte."""

    @property
    def quantize_bytes(self) -> int:
        """The size in bytes from which eight bits pay: a power of two.

        >>> LinkSpeed(1.25e6, 1e-4).quantize_bytes, LinkSpeed(1.25e9, 1e-4).quantize_bytes
        (2048, 131072)
        """
        pays = self.bytes_s * (tuning.ENCODED_CALL_S + self.latency_s)
        if self.bytes_s > tuning.SLOW_BYTES_S or pays >= tuning.QUANTIZE_BYTES:
            return tuning.QUANTIZE_BYTES
        return max(tuning.EAGER_BYTES, 1 << max(0, math.ceil(math.log2(pays))))


def measure_links(endpoint: Endpoint, messages: Messages, hosts: Sequence[str]) -> LinkSpeed:
    """Measure the links between the hosts of all ranks; `hosts` has the host of each rank.

    Collective. The result is the same on all ranks. It takes a few messages of `tuning.PROBE_BYTES`.
    """
    slowest = LinkSpeed(math.inf, 0.0)
    if len(set(hosts)) == 1:
        return slowest
    receiver, sender = partners(hosts, endpoint.rank)
    x, out = np.zeros((2, tuning.PROBE_BYTES), np.uint8)

    def exchange_s(nbytes: int) -> float:
        sends = [] if receiver is None else [(receiver, x[:nbytes])]
        recvs = [] if sender is None else [(sender, out[:nbytes])]
        start = time.perf_counter()
        messages.exchange(sends, recvs, tag=COLLECTIVE)
        return time.perf_counter() - start if recvs else 0.0

    exchange_s(1)  # opens the connections
    latency_s = min(exchange_s(1) for _ in range(tuning.PROBES_OF_LATENCY))
    shortest_s = math.inf
    for i in range(tuning.PROBES_OF_SPEED):
        shortest_s = min(shortest_s, max(exchange_s(tuning.PROBE_BYTES) - latency_s, 1e-9))
        slowest = _slowest(endpoint, LinkSpeed(tuning.PROBE_BYTES / shortest_s, latency_s))
        is_fast = slowest.quantize_bytes == tuning.QUANTIZE_BYTES
        if is_fast or (i + 1) * tuning.PROBE_BYTES / slowest.bytes_s > tuning.PROBING_S:
            break
    return slowest


def partners(hosts: Sequence[str], rank: int) -> tuple[int | None, int | None]:
    """The ranks of other hosts that `rank` sends to and receives from; None if there is none for it.

    No two ranks send to the same one, and all links between a host and the others are used at once.

    >>> partners(["a", "a", "b", "b"], 1), partners(["a", "a", "a", "b"], 2)
    ((3, 3), (None, 3))
    """
    ranks_on: dict[str, list[int]] = defaultdict(list)
    for other, host in enumerate(hosts):
        ranks_on[host].append(other)
    order = [other for ranks in ranks_on.values() for other in ranks]
    most, place = max(map(len, ranks_on.values())), order.index(rank)
    ends = (order[(place + most) % len(order)], order[(place - most) % len(order)])
    receiver, sender = (end if hosts[end] != hosts[rank] else None for end in ends)
    return receiver, sender


def _slowest(endpoint: Endpoint, mine: LinkSpeed) -> LinkSpeed:
    """The smallest speed and the largest latency of all ranks. Collective."""
    table = np.zeros((endpoint.size, 2))
    table[endpoint.rank] = mine
    endpoint.complete(lambda: endpoint.comm.Iallgather(MPI.IN_PLACE, [table, MPI.BYTE]), table)
    return LinkSpeed(float(table[:, 0].min()), float(table[:, 1].max()))
