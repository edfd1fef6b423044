"""Collectives derived from exchanges, for transports whose library has none.

They move each byte as few times as possible, by direct exchange between all pairs of ranks, and reduce in rank
order, in float32 where the dtype is narrower. Each chunk has one owner, which sends the same bytes to all ranks,
so that all hold bit-identical results. Over a network they go in pieces, so that receiving, adding and sending
overlap. Small arrays of many ranks take log2(p) rounds instead (`rounds`).

Functions that take a `Flow` are called once the ranks have agreed on the call.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from .. import arrays, kernels
from ..arrays import REDUCED_PRECISION, Array, Scratch
from ..topology import split_group
from . import rounds
from .flow import COLLECTIVE, Exchanger, Flow, RowExchanger
from .pipeline import Exact, chunk_bounds, exchange_rows, reduce_through


def allreduce(flow: Flow, x: Array, out: Array, op: str, scratch: Scratch) -> None:
    """`Transport.allreduce` by direct exchange: each rank reduces a chunk for all, or small arrays for itself.

    Collective.
    """
    x, out = x.reshape(-1), out.reshape(-1)
    if rounds.are_fewer(flow.transport, x.nbytes * flow.size):
        rounds.allreduce(flow, x, out, op, scratch)
    elif max(x.nbytes * (flow.size - 1), 1) <= flow.transport.at_once_bytes:
        rows: list[Array] = list(scratch.take("rows", (flow.size - 1, x.size), x.dtype, like=x))
        rows.insert(flow.rank, x)
        flow.allgather(x, rows)()
        kernels.of(out).reduce_rows(rows, out, op)
    else:
        bounds = chunk_bounds(x.size, flow.size)
        results = [out[chunk] for chunk in bounds]
        chunks, mine = [x[chunk] for chunk in bounds], results[flow.rank]
        reduce_through(flow, Exact(flow, chunks, mine, op, scratch, results))


def reduce_scatter(flow: Flow, chunks: Sequence[Array], out: Array, op: str, scratch: Scratch) -> None:
    """`Transport.reduce_scatter` of chunks, one for each rank, by direct exchange. Collective."""
    reduce_through(flow, Exact(flow, chunks, out.reshape(-1), op, scratch), gather=False)


def reduce(flow: Flow, x: Array, out: Array | None, root: int, op: str, scratch: Scratch) -> None:
    """`Transport.reduce`: each rank reduces a chunk, and sends it to `root`. Collective."""
    x = x.reshape(-1)
    if rounds.are_fewer(flow.transport, x.nbytes * flow.size):
        gathered = rounds.table(flow, x, scratch)
        if out is not None:
            kernels.of(out).reduce_rows(gathered, out.reshape(-1), op)
        return
    bounds = chunk_bounds(x.size, flow.size)
    mine = scratch.take("mine", x[bounds[flow.rank]].shape, x.dtype, like=x)
    reduce_scatter(flow, [x[chunk] for chunk in bounds], mine, op, scratch)
    if out is None:
        flow.transport.exchange([(root, mine)], [], tag=COLLECTIVE)
    else:
        out = out.reshape(-1)
        out[bounds[root]] = mine
        flow.transport.exchange([], [(p, out[bounds[p]]) for p in flow.others], tag=COLLECTIVE)


def allgather(flow: Flow, x: Array, out: Array) -> None:
    """`Transport.allgather` by direct exchange. Collective."""
    mine, table = x.reshape(-1), arrays.rows(out, flow.size)
    if rounds.are_fewer(flow.transport, out.nbytes):
        rounds.allgather(flow, mine, list(table))
        return
    exchange_rows(flow, [mine] * flow.size, table)


def alltoall(flow: Flow, x: Array, out: Array, scratch: Scratch) -> None:
    """`Transport.alltoall` by direct exchange. Collective."""
    source, target = arrays.rows(without_overlap(x, out, scratch), flow.size), arrays.rows(out, flow.size)
    exchange_rows(flow, source, target)


def scan(transport: RowExchanger, x: Array, out: Array, op: str, scratch: Scratch, *, exclusive: bool) -> None:
    """`Transport.scan` by two alltoalls: each rank reduces a chunk of the array for all ranks. Collective."""
    rank, size = transport.rank, transport.size
    if rounds.are_fewer(transport, x.nbytes * size):
        before = rounds.table(Flow(transport, None), x, scratch)[: rank + (not exclusive)]
        if len(before):
            kernels.of(x).reduce_rows(before, out.reshape(-1), op)
        return
    # (p, m) each: chunk r of this rank's array, and this rank's chunk of rank r's.
    chunks, mine = scratch.take("scan", (2, size, -(-x.size // size)), x.dtype, like=x)
    chunks.reshape(-1)[: x.size] = x.reshape(-1)
    transport.alltoall(chunks, mine)
    _accumulate(mine, op)
    if exclusive:
        chunks[1:] = mine[:-1]
        mine, chunks = chunks, mine
    transport.alltoall(mine, chunks)
    if rank > 0 or not exclusive:
        out.reshape(-1)[...] = chunks.reshape(-1)[: x.size]


def broadcast(transport: Exchanger, x: Array, root: int) -> None:
    """`Transport.broadcast` along a binomial tree. Collective."""
    rank, size = transport.rank, transport.size
    position = (rank - root) % size
    reach = 1
    while reach < size:  # ranks at positions below `reach` have it
        if position < reach <= size - 1 and position + reach < size:
            transport.exchange([((rank + reach) % size, x)], [], tag=COLLECTIVE)
        elif reach <= position < 2 * reach:
            transport.exchange([], [((rank - reach) % size, x)], tag=COLLECTIVE)
        reach *= 2


def barrier(transport: Exchanger) -> None:
    """`Transport.barrier` by dissemination: log2(p) rounds. Collective."""
    rank, size = transport.rank, transport.size
    token, answer, hop = np.zeros(1, np.uint8), np.zeros(1, np.uint8), 1
    while hop < size:
        ahead, behind = (rank + hop) % size, (rank - hop) % size
        transport.exchange([(ahead, token)], [(behind, answer)], tag=COLLECTIVE)
        hop *= 2


def members(transport: RowExchanger, color: int, key: int) -> list[int]:
    """The ranks that give the same `color`, ordered by (`key`, rank); see `Transport.split`. Collective."""
    table = np.empty((transport.size, 2), np.int64)
    transport.allgather(np.array([color, key], np.int64), table)
    return split_group(transport.rank, *table.T.tolist())


def without_overlap(x: Array, out: Array, scratch: Scratch) -> Array:
    """`x`, or a copy if it overlaps `out`."""
    if not arrays.overlap(x, out):
        return x
    copy: Array = scratch.take("copy", x.shape, x.dtype, like=x)
    copy[...] = x
    return copy


def _accumulate(table: Array, op: str) -> None:
    """Reduce in place, so that row r becomes the reduction of rows 0 to r."""
    reduce_rows = kernels.of(table).reduce_rows
    if op == "avg" or arrays.dtype_name(table.dtype) in REDUCED_PRECISION:
        for r in reversed(range(1, len(table))):  # each from the rows themselves, so that it is rounded once
            reduce_rows(table[: r + 1], table[r], op)
    else:
        for r in range(1, len(table)):
            reduce_rows(table[r - 1 : r + 1], table[r], op)
