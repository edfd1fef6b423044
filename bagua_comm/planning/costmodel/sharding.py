"""The prediction of a step of a sharded model (FSDP2), and the ways to communicate that `advise` compares."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, NamedTuple

from ...averages import Average, ErrorFeedback, Exact, Hierarchical, Quantized
from ...averages.reproducible import Reproducible
from ...codecs import Codec
from ...errors import ArrayError, UnsupportedError
from .costs import Costs, LaneTask, RankGroup, bytes_sent
from .inputs import Cluster, Job, Prediction, Rates


@dataclass(frozen=True)
class Sharded:
    """How a model that PyTorch's `fully_shard` has sharded communicates.

    Args:
        reduce: How gradients are reduced, as in `bagua_torch.fsdp.attach`; None for PyTorch's own.
        gather: How parameters are gathered, as there; None for PyTorch's own.
        replicas: How gradients are averaged over replicas, as there; None for PyTorch's own.
        by_node: Whether shards are those of a node, and each node has a replica of the model, as on a mesh of two
            dimensions; otherwise shards are those of all ranks.

    Raises:
        ArrayError: `gather` cannot gather, or there is `replicas`, but no replica.
    """

    reduce: Average | None = None
    gather: Exact | Quantized | Hierarchical | None = None
    replicas: Average | None = None
    by_node: bool = False

    def __post_init__(self) -> None:
        inner = self.gather.inner if isinstance(self.gather, Hierarchical) else self.gather
        if not isinstance(inner, (Exact, Quantized, type(None))):
            raise ArrayError(
                f"Sharded: gather is {self.gather}, expected Exact(), Quantized(codec), Hierarchical of one of "
                "these, or None"
            )
        if self.replicas is not None and not self.by_node:
            raise ArrayError(f"Sharded: replicas is {self.replicas}, but by_node is False; expected None")


SHARDED: Mapping[str, Sharded] = MappingProxyType(
    {
        "pytorch": Sharded(),
        "exact": Sharded(Exact(), Exact()),
        "two-levels": Sharded(Hierarchical(), Hierarchical()),
        "gradients": Sharded(Quantized(), Exact()),
        "two-levels-gradients": Sharded(Hierarchical(Quantized()), Hierarchical()),
        "both": Sharded(Quantized(), Quantized()),
        "two-levels-both": Sharded(Hierarchical(Quantized()), Hierarchical(Quantized())),
        "pytorch-replicas": Sharded(by_node=True),
        "exact-replicas": Sharded(Exact(), Exact(), Exact(), by_node=True),
        "bytes-replicas": Sharded(Exact(), Exact(), Quantized(), by_node=True),
    }
)
"""The ways that `advise_sharded` compares; of those with equal shards, the one with the smallest error first."""


class ShardedAdvice(NamedTuple):
    """A way to communicate, its short name, and its prediction."""

    name: str
    method: Sharded
    prediction: Prediction
    state_bytes: float
    """Bytes of the parameters, their gradients and two moments of Adam on a rank."""


def advise_sharded(job: Job, cluster: Cluster, rates: Rates | None = None) -> list[ShardedAdvice]:
    """Predict the step of each way of `SHARDED` that applies to this job and cluster; the shortest comes first.

    Two levels and replicas are left out if all ranks are on one node, or each node has one rank.

    >>> [each.name for each in advise_sharded(Job(100_000_000, 0.1, 0.2), Cluster(4, bandwidth_gbit=1))]
    ['both', 'gradients', 'exact', 'pytorch']
    """
    found: list[ShardedAdvice] = []
    for name, method in SHARDED.items():
        if _applies(method, job, cluster):
            shards = cluster.ranks_per_node if method.by_node else cluster.size
            prediction = predict_sharded(method, job, cluster, rates)
            found.append(ShardedAdvice(name, method, prediction, 4 * job.model_bytes / shards))
    return sorted(found, key=lambda advice: advice.prediction.step_s)


def _applies(method: Sharded, job: Job, cluster: Cluster) -> bool:
    if not cluster.has_two_levels and (method.by_node or isinstance(method.gather, Hierarchical)):
        return False
    try:
        for average in (method.reduce, method.gather, method.replicas):
            if average is not None:
                average.check(job.dtype)
    except UnsupportedError:
        return False
    return True


def predict_sharded(method: Sharded, job: Job, cluster: Cluster, rates: Rates | None = None) -> Prediction:
    """Predict the step time and bytes of training `job`, sharded, on `cluster`.

    The buckets of the job stand for the modules that are sharded one by one; the last one, whose gradients are
    complete last, for the root, which PyTorch does not reshard after the forward pass. Over NCCL the exchanges
    run beside computation; else computation waits for them.

    Raises:
        UnsupportedError: The model does not know the exchange of an average.

    >>> job, cluster = Job(100_000_000, 0.1, 0.2, bucket_bytes=100_000_000), Cluster(4, bandwidth_gbit=1)
    >>> predict_sharded(Sharded(Exact(), Exact()), job, cluster).wire_bytes  # a single module: gathered once
    150000000
    """
    costs = Costs(cluster, rates or Rates(), job.dtype)
    sizes, shares = zip(*job.buckets(), strict=True)
    gathers, reductions = zip(*(_exchanges(method, nbytes, costs) for nbytes in sizes), strict=True)
    forward = [(0.0, gather) for gather in reversed(gathers)]
    backward = [(0.0, gather) for gather in gathers[:-1]]
    reduced = [(share * job.backward_s, tasks) for share, tasks in zip(shares, reductions, strict=True)]
    tasks = [task for _, each in [*forward, *backward, *reduced] for task in each]
    if cluster.transport == "nccl":
        forward_s, busy_s = costs.overlap(job.forward_s, forward)
        backward_s, also_s = costs.overlap(job.backward_s, _alternating(backward, reduced))
        step_s, communication_s = forward_s + backward_s + job.optimizer_s, busy_s + also_s
    else:
        communication_s = sum(map(costs.time_alone, tasks))
        step_s = job.compute_s + communication_s
    return Prediction(step_s, job.compute_s, communication_s, *bytes_sent(tasks))


_Tasks = Sequence[tuple[float, Sequence[LaneTask]]]


def _alternating(gathers: _Tasks, reduced: _Tasks) -> list[tuple[float, Sequence[LaneTask]]]:
    """The tasks of a backward pass: a module is gathered before the gradients of the one before are reduced."""
    merged = [*gathers[:1]]
    for i, each in enumerate(reduced):
        merged += [*gathers[i + 1 : i + 2], each]
    return merged


def _exchanges(method: Sharded, n: int, costs: Costs) -> tuple[list[LaneTask], list[LaneTask]]:
    """The gather and the reduction of a module of `n` bytes that is sharded by one call."""
    c = costs.cluster
    group = RankGroup(c.ranks_per_node if method.by_node else c.size, c.ranks_per_node)
    chunk = costs.chunk(n, group.size)
    gather = _gather(method.gather, chunk, group, costs) if group.size > 1 else []
    reduce = _reduce(method.reduce, n, group, costs) if group.size > 1 else []
    if method.by_node and c.nodes > 1:
        across, average = RankGroup(c.nodes, 1), method.replicas
        reduce += (
            costs.ring_allreduce(chunk, across) if average is None else costs.average(average, chunk, across)
        )
    return gather, reduce


def _gather(method: object, message: int, group: RankGroup, costs: Costs) -> list[LaneTask]:
    """Gather `message` bytes of each rank."""
    match method:
        case None:
            return [costs.ring(message * group.size, group)]
        case Hierarchical(inner, inside=inside):
            codec = _codec_of(inner) or _codec_of(inside)
            node, across = RankGroup(group.per_node, group.per_node), RankGroup(group.size // group.per_node, 1)
            sent = message if codec is None else costs.wire_nbytes(codec, message)
            moved = [costs.allgather(sent, across), costs.allgather(sent * across.size, node)]
            whole = message * group.size
            if codec is None:
                return [*moved, costs.work(copy=whole)]
            return [costs.coding(codec, encode=message), *moved, costs.coding(codec, decode=whole)]
    return costs.gather(_codec_of(method), message, group)


def _reduce(method: Any, n: int, group: RankGroup, costs: Costs) -> list[LaneTask]:
    """Reduce `n` bytes, each rank its chunk."""
    match method:
        case None:  # gloo's reduce-scatter is an allreduce for each rank
            both = costs.ring_allreduce(n, group)
            return both[:1] if costs.cluster.transport == "nccl" else both
        case Exact() | Quantized():
            return costs.reduce_scatter(_codec_of(method), n, group)
        case ErrorFeedback(Quantized(codec), decay, _, kept):
            lost = [costs.coding(codec, decode=n), costs.work(add=(6 if decay else 5) * n, copy=n)]
            return [*costs.reduce_scatter(codec, n, group), *lost, *costs.held(kept, n)]
        case Reproducible(block=block):
            fields, sums = costs.fields_and_sums(block, n, group)
            return [costs.work(add=n), *fields, costs.work(add=n), *costs.reduce_scatter(None, sums, group)]
        case Hierarchical((Exact() | Quantized()) as inner, inside=inside):
            node, across = RankGroup(group.per_node, group.per_node), RankGroup(group.size // group.per_node, 1)
            chunk = costs.chunk(n, node.size)
            within = costs.reduce_scatter(_codec_of(inside), n, node)
            return [costs.work(copy=n), *within, *costs.reduce_scatter(_codec_of(inner), chunk, across)]
    return costs.average(method, n, group)


def _codec_of(method: object) -> Codec | None:
    return method.codec if isinstance(method, Quantized) else None
