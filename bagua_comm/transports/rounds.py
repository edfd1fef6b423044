"""Collectives on small arrays in log2(p) rounds, in which each rank sends one message.

An allgather doubles the number of arrays that a rank holds in every round (Bruck et al. 1997,
https://doi.org/10.1109/71.642949). A reduction gathers the arrays and adds them in rank order, so that its bits
are those of the other algorithms. The maximum of integers, and other reductions in which an array may count
twice, need no table of p arrays: in round k each rank combines its result with that of the rank 2^k before it
(dissemination, as in Hensgen, Finkel and Manber's barrier).

Direct exchange (`derived`) sends p - 1 messages, in one round: it takes less time among few ranks, and the same
bytes are sent.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from .. import arrays, kernels
from ..arrays import Array, Scratch
from .flow import Exchanger, Flow

SMALL_BYTES = 1 << 14
"""The largest table of the arrays of all ranks that is gathered in rounds."""

_IDEMPOTENT = frozenset({"min", "max", "band", "bor"})


def are_fewer(transport: Exchanger, nbytes: int) -> bool:
    """Whether arrays of all ranks, `nbytes` together, should be gathered in rounds; the same on all ranks."""
    return transport.size > transport.few_ranks and nbytes <= SMALL_BYTES


def allgather(flow: Flow, mine: Array, into: Sequence[Array]) -> None:
    """Gather flat arrays, which may differ in size: into[r] gets that of rank r.

    Collective. All ranks know the sizes of all arrays. `mine` is that of this rank, and may be into[rank].
    """
    rank, size = flow.rank, flow.size
    order = [(rank + i) % size for i in range(size)]
    ends = [0, *itertools.accumulate(into[r].size for r in order)]
    held = arrays.empty((ends[-1],), mine.dtype, like=mine)  # in this order; this rank's comes first
    held[: ends[1]] = mine
    hop = 1
    while hop < size:  # ranks hold `hop` arrays, from their own on
        count = min(hop, size - hop)
        sent, received = held[: ends[count]], held[ends[hop] : ends[hop + count]]
        flow.begin([((rank - hop) % size, sent)], [((rank + hop) % size, received)])()
        hop *= 2
    for i, r in enumerate(order):
        if into[r] is not mine:
            into[r][...] = held[ends[i] : ends[i + 1]]


def table(flow: Flow, x: Array, scratch: Scratch) -> Array:
    """The arrays of all ranks, (p, m). Collective."""
    rows: Array = scratch.take("gathered", (flow.size, x.size), x.dtype, like=x)
    allgather(flow, x.reshape(-1), list(rows))
    return rows


def allreduce(flow: Flow, x: Array, out: Array, op: str, scratch: Scratch) -> None:
    """Reduce flat `x` over all ranks into `out`, in rank order where the order matters. Collective."""
    if op in _IDEMPOTENT and x.dtype.kind in "iub":
        _disseminate(flow, x, out, op, scratch)
    else:
        kernels.of(out).reduce_rows(table(flow, x, scratch), out, op)


def _disseminate(flow: Flow, x: Array, out: Array, op: str, scratch: Scratch) -> None:
    rank, size, hop = flow.rank, flow.size, 1
    rows = scratch.take("combined", (2, x.size), x.dtype, like=x)
    mine, other = rows
    mine[...] = x
    while hop < size:  # `mine` covers `hop` ranks, up to this one
        flow.begin([((rank + hop) % size, mine)], [((rank - hop) % size, other)])()
        kernels.of(out).reduce_rows(rows, mine, op)
        hop *= 2
    out[...] = mine
