"""The costs of the exchange of a bucket: bytes on the wire, waiting and work of each task of the lane."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from ...algorithms import (
    Algorithm,
    AsyncModelAverage,
    Decentralized,
    DiLoCo,
    GradientAllReduce,
    LowPrecisionDecentralized,
    LowPrecisionOnePeer,
    QAdam,
    SparseLoCo,
    StreamingDiLoCo,
)
from ...algorithms.by_node import ByNode
from ...arrays import dtype_named
from ...averages import Average, ErrorFeedback, Exact, Hierarchical, Quantized, TopK
from ...averages.reproducible import Reproducible
from ...codecs import BFloat16, Codec, Float16, MinMaxUInt8
from ...errors import UnsupportedError
from ...kernels.host import fixed_format
from .inputs import Cluster, Method, Rates, TorchDDP

CHOICE = 4
"""Choosing the largest elements takes as long as encoding this number of arrays in eight bits, as measured."""

RECORDS = 8
"""Adding this number of records of the largest elements takes as long as decoding their array, as measured."""


class LaneTask(NamedTuple):
    """A task of the lane: it waits for the wire and works at the same time."""

    wire_s: float = 0.0
    work_s: float = 0.0
    """Seconds of work of one core, or of the device."""
    poll_s: float = 0.0
    """Seconds of polling, if a core is free; the task does not depend on it."""
    wire_bytes: float = 0
    node_bytes: float = 0


def bytes_sent(tasks: Sequence[LaneTask]) -> tuple[float, float]:
    """Bytes that a rank sends, and bytes that a node sends."""
    return sum(task.wire_bytes for task in tasks), sum(task.node_bytes for task in tasks)


class RankGroup(NamedTuple):
    """Ranks that exchange with each other, the same number on each node. Every rank is in one group."""

    size: int
    per_node: int


class BucketExchange(NamedTuple):
    """The tasks of one bucket: those of the lane, in order, and that of the training thread around them."""

    lane: list[LaneTask]
    trainer: LaneTask


def exchange_of(method: Method, n: int, costs: Costs) -> BucketExchange:
    """The tasks of a method for a bucket of `n` bytes."""
    everyone = RankGroup(costs.cluster.size, costs.cluster.ranks_per_node)
    work = costs.work
    trainer = work(copy=n)  # weights are copied to the lane
    match method:
        case TorchDDP(dtype=None):
            lane, trainer = [*costs.ring_allreduce(n, everyone), work(copy=2 * n)], LaneTask()
        case TorchDDP(dtype=str(dtype)):
            sent = n // dtype_named(costs.dtype).itemsize * dtype_named(dtype).itemsize
            casts = [costs.coding(Float16(), encode=n), costs.coding(Float16(), decode=n)]
            lane, trainer = [*costs.ring_allreduce(sent, everyone), *casts, work(copy=2 * n)], LaneTask()
        case GradientAllReduce(average):
            lane, trainer = costs.average(average, n, everyone), LaneTask()
        case QAdam(average=average):
            lane, trainer = [work(add=2 * n), *costs.average(average, n, everyone)], LaneTask()
        case Decentralized(peers="all"):
            lane = costs.average(Exact(), n, everyone)
        case Decentralized(peers="shift_one"):
            # The two halves of the ranks are on different nodes, except on a node in the middle.
            away = n if costs.cluster.nodes > 1 else 0
            lane = [costs.transfer(away, n - away, pairs=costs.cluster.ranks_per_node), work(add=2 * n)]
        case Decentralized():
            lane = [costs.to_one_peer(n), work(add=2 * n)]
        case LowPrecisionDecentralized(codec):
            both = costs.to_both_neighbours(costs.wire_nbytes(codec, n))
            lane = [work(add=4 * n), costs.coding(codec, encode=n), both]
            lane += 3 * [costs.coding(codec, decode=n), work(add=2 * n)]
        case LowPrecisionOnePeer(codec):
            lane = [work(add=2 * n), costs.coding(codec, encode=n)]
            lane += [costs.to_one_peer(costs.wire_nbytes(codec, n))]
            lane += 2 * [costs.coding(codec, decode=n), work(add=2 * n)]
            lane += [work(add=3 * n)]
        case ByNode((Decentralized() | LowPrecisionDecentralized() | LowPrecisionOnePeer()) as algorithm):
            node = RankGroup(costs.cluster.ranks_per_node, costs.cluster.ranks_per_node)
            chunk = costs.chunk(n, node.size)
            gather = [costs.allgather(chunk, node)] if node.size > 1 else []
            added = [work(add=n)] if node.size > 1 else []
            lane = [*gather, *added, *costs.among_nodes(algorithm, chunk), *gather]
        case AsyncModelAverage():
            lane, trainer = costs.average(Exact(), n, everyone), work(copy=n, add=3 * n)
        case DiLoCo(average=average):
            lane = [work(add=2 * n), *costs.average(average, n, everyone), work(add=4 * n)]
        case StreamingDiLoCo(average=average):
            lane, trainer = [*costs.average(average, n, everyone), work(add=4 * n)], work(add=4 * n)
        case SparseLoCo():
            lane = [work(add=2 * n), *costs.average(method.mean, n, everyone), work(add=2 * n)]
        case _:
            raise UnsupportedError(f"costmodel: the model does not know what {method!r} exchanges")
    return BucketExchange(lane, trainer)


@dataclass(frozen=True)
class Costs:
    """The costs of each operation on this cluster."""

    cluster: Cluster
    rates: Rates
    dtype: str

    # Averages ---------------------------------------------------------------------------------------

    def average(self, average: Average, n: int, group: RankGroup) -> list[LaneTask]:
        """Average `n` bytes over a group."""
        p = group.size
        if p == 1:
            return []
        match average:
            case Exact() if self.cluster.transport == "nccl":
                return self.ring_allreduce(n, group)
            case Exact():
                chunk = self.chunk(n, p)
                return [*self.reduce_scatter(None, n, group), self.work(copy=chunk), self.allgather(chunk, group)]
            case Reproducible(block=block):
                fields, sums = self.fields_and_sums(block, n, group)
                begin, middle = self.work(add=n), self.work(add=n, copy=sums)
                return [begin, *fields, middle, *self.average(Exact(), sums, group), self.work(add=sums, copy=n)]
            case Quantized(codec):
                chunk = self.wire_nbytes(codec, self.chunk(n, p))
                return [
                    self.coding(codec, encode=n),
                    self.exchange_with_all(chunk, group),
                    self.coding(codec, combine=n),
                    self.allgather(chunk, group),
                    self.coding(codec, decode=n),
                ]
            case ErrorFeedback(Quantized(codec) as inner, decay, _, kept):
                lost = [self.coding(codec, decode=2 * n), self.work(add=(6 if decay else 5) * n, copy=n)]
                return [self.work(add=2 * n), *self.average(inner, n, group), *lost, *self.held(kept, n)]
            case TopK():
                record = average.wire_nbytes(-(-n // dtype_named(self.dtype).itemsize))
                return [
                    self.coding(MinMaxUInt8(), encode=CHOICE * n),
                    self.allgather(record, group),
                    self.coding(MinMaxUInt8(), decode=(1 + p / RECORDS) * n),
                ]
            case ErrorFeedback(TopK() as sparse, decay, _, kept, retain):
                lost = [self.work(add=2 * n * ((decay > 0) + (retain < 1)))]
                return [self.work(add=2 * n), *self.average(sparse, n, group), *lost, *self.held(kept, n)]
            case Hierarchical(inner, inside=inside):
                node, across = RankGroup(group.per_node, group.per_node), RankGroup(p // group.per_node, 1)
                if node.size == 1:
                    return self.average(inner, n, across)
                chunk = self.chunk(n, node.size)
                if isinstance(inside, Quantized):
                    scatter = self.reduce_scatter(inside.codec, n, node)
                    gather = self.gather(inside.codec, chunk, node)
                else:
                    scatter = [self.allgather(chunk, node), self.work(add=n)]
                    gather = [self.allgather(chunk, node)]
                return [*scatter, *self.average(inner, chunk, across), *gather]
        raise UnsupportedError(f"costmodel: the model does not know what {average!r} exchanges")

    def fields_and_sums(self, block: int, n: int, group: RankGroup) -> tuple[list[LaneTask], int]:
        """The average of the fields of blocks, with which `Reproducible` begins, and the bytes of its sums."""
        dtype = dtype_named(self.dtype)
        count, form = -(-n // dtype.itemsize), fixed_format(dtype)
        return self.average(Exact(), -(-count // block) * form.field.itemsize, group), count * form.total.itemsize

    def reduce_scatter(self, codec: Codec | None, n: int, group: RankGroup) -> list[LaneTask]:
        """Reduce `n` bytes over a group, each rank a chunk."""
        chunk = self.chunk(n, group.size)
        if codec is not None:
            exchange = self.exchange_with_all(self.wire_nbytes(codec, chunk), group)
            return [self.coding(codec, encode=n), exchange, self.coding(codec, decode=n), self.work(add=n)]
        if self.cluster.transport == "nccl":
            return self.ring_allreduce(n, group)[:1]
        return [self.exchange_with_all(chunk, group), self.work(add=n)]

    def gather(self, codec: Codec | None, message: int, group: RankGroup) -> list[LaneTask]:
        """Gather `message` bytes of each rank of a group."""
        if codec is None:
            return [self.allgather(message, group)]
        return [
            self.coding(codec, encode=message),
            self.allgather(self.wire_nbytes(codec, message), group),
            self.coding(codec, decode=message * group.size),
        ]

    def among_nodes(self, algorithm: Algorithm, n: int) -> list[LaneTask]:
        """The tasks of `algorithm` for `n` bytes, if each rank exchanges with one rank of every other node."""
        k = self.cluster.ranks_per_node
        if self.cluster.nodes == 1:
            return []
        share = dataclasses.replace(
            self.cluster, ranks_per_node=1, bandwidth_gbit=self.cluster.bandwidth_gbit / k
        )
        exchange = exchange_of(algorithm, n, dataclasses.replace(self, cluster=share))
        return [task._replace(node_bytes=k * task.node_bytes) for task in [*exchange.lane, exchange.trainer]]

    def ring_allreduce(self, n: int, group: RankGroup) -> list[LaneTask]:
        """Reduce and gather `n` bytes along rings (or trees, over NCCL), adding while the next bytes arrive."""
        half = self.ring(n, group)
        return [half._replace(work_s=half.work_s + self.work(add=n).work_s), half]

    # Messages ---------------------------------------------------------------------------------------

    def exchange_with_all(self, message: float, group: RankGroup) -> LaneTask:
        """Each rank of a group sends `message` bytes to each other rank, all at once."""
        size, inside = group.size, group.per_node - 1
        away = size - 1 - inside
        pairs = self.cluster.ranks_per_node * away
        return self.transfer(away * message, inside * message, messages=size - 1, pairs=pairs)

    def allgather(self, message: float, group: RankGroup) -> LaneTask:
        """Each rank of a group receives `message` bytes from each other rank."""
        if self.cluster.transport == "nccl":
            return self.ring(message * group.size, group)
        return self.exchange_with_all(message, group)

    def ring(self, n: float, group: RankGroup) -> LaneTask:
        """Each rank of a group sends (p - 1) / p of `n` bytes, all chunks but one, to its successor."""
        p, k = group
        sent = self.chunk(n, p) * (p - 1)
        away = sent / k if p > k else 0  # a ring leaves each node once
        hops = math.ceil(math.log2(p)) if self.cluster.transport == "nccl" else p - 1
        pairs = self.cluster.ranks_per_node / k  # each group of the node's ranks has a ring of its own
        return self.transfer(away, sent - away, messages=hops, hops=hops, share=self.rates.ring, pairs=pairs)

    def to_one_peer(self, n: float) -> LaneTask:
        """Each rank sends `n` bytes on the one-peer exponential graph; the mean over its rounds."""
        c = self.cluster
        hops = [2**k for k in range((c.size - 1).bit_length())]
        leaving = [min(hop, c.ranks_per_node) / c.ranks_per_node if c.nodes > 1 else 0.0 for hop in hops]
        away = n * sum(leaving) / len(hops)
        return self.transfer(away, n - away, pairs=c.ranks_per_node * sum(leaving) / len(hops))

    def to_both_neighbours(self, n: float) -> LaneTask:
        """Each rank sends `n` bytes to both neighbours on a ring; two edges of the ring leave each node."""
        away = 2 * n / self.cluster.ranks_per_node if self.cluster.nodes > 1 else 0
        return self.transfer(away, 2 * n - away, messages=2, pairs=2)

    def transfer(
        self,
        away: float,
        inside: float,
        *,
        pairs: float,
        messages: int = 1,
        hops: int = 1,
        share: float | None = None,
    ) -> LaneTask:
        """Each rank sends `away` bytes to other nodes and `inside` bytes within its node, and receives as many.

        `pairs` pairs of ranks share the link of a node at once.
        """
        c, rates = self.cluster, self.rates
        link_s = (
            away * c.ranks_per_node / (c.reached_gbit(pairs) / 8 * 1e9 * (share or rates.direct)) if away else 0.0
        )
        inside_s = inside / (c.intra_gbs * 1e9)
        wait_s = hops * (c.latency_s if away else c.intra_latency_s)
        work_s = 2 * (messages * rates.message_s + away * rates.network_s_per_byte + inside / rates.copy)
        wire_s = wait_s + max(link_s, inside_s)
        poll_s = 0.0 if share else rates.polling * wire_s
        return LaneTask(wire_s, work_s, poll_s, away + inside, away * c.ranks_per_node)

    # Work -------------------------------------------------------------------------------------------

    def work(self, *, add: float = 0, copy: float = 0) -> LaneTask:
        """Read `add` bytes for arithmetic, and copy `copy` bytes."""
        return LaneTask(work_s=add / self.rates.add + copy / self.rates.copy)

    def coding(self, codec: Codec, *, encode: float = 0, decode: float = 0, combine: float = 0) -> LaneTask:
        """Encode, decode and combine these bytes of full-precision arrays."""
        rates = self.rates.cast if isinstance(codec, (Float16, BFloat16)) else self.rates.minmax
        return LaneTask(work_s=encode / rates.encode + decode / rates.decode + combine / rates.combine)

    def held(self, codec: Codec | None, n: int) -> list[LaneTask]:
        """Read and write a residual of `n` bytes that is kept encoded."""
        return [] if codec is None else [self.coding(codec, decode=n, encode=n)]

    def wire_nbytes(self, codec: Codec, n: int) -> int:
        """Bytes of an encoded chunk of `n` bytes."""
        dtype = dtype_named(self.dtype)
        return codec.wire_nbytes(-(-n // dtype.itemsize), dtype)

    def chunk(self, n: float, parts: int) -> int:
        """Bytes of one of `parts` equal chunks, in whole elements."""
        itemsize = dtype_named(self.dtype).itemsize
        return -(-int(n) // (itemsize * parts)) * itemsize

    # Time -------------------------------------------------------------------------------------------

    def time_alone(self, task: LaneTask) -> float:
        """Seconds of a task that runs alone."""
        return max(task.wire_s, task.work_s / min(1.0, self.cluster.cores_per_rank))

    def time_beside_compute(self, task: LaneTask) -> tuple[float, float]:
        """Seconds of a task beside computation, and the relative speed of computation meanwhile."""
        cores = self.cluster.cores_per_rank
        free = min(1.0, cores / 2)
        spent = max(task.wire_s, task.work_s / free)
        return spent, 1 - min(free, (task.work_s + task.poll_s) / spent) / cores if spent else 1.0

    def overlap(self, compute_s: float, tasks: Sequence[tuple[float, Sequence[LaneTask]]]) -> tuple[float, float]:
        """Seconds until computation and the lane have both ended, and seconds during which the lane is busy.

        Args:
            compute_s: Seconds of the computation alone.
            tasks: For each bucket in turn, the computation before it, and the tasks of the lane.
        """
        now = done = busy = 0.0
        for ready_s, bucket in tasks:
            if done < ready_s:
                now, done = now + ready_s - done, ready_s
            for task in bucket:
                spent, speed = self.time_beside_compute(task)
                if done + spent * speed <= compute_s:
                    done += spent * speed
                else:  # computation ends first; the rest of this task runs alone
                    left = max(0.0, compute_s - done) / speed
                    spent = left + (1 - left / spent) * self.time_alone(task)
                    done = compute_s
                now, busy = now + spent, busy + spent
        return now + max(0.0, compute_s - done), busy
