"""The algorithm to begin with between sites: the one that communicates most, among those that hardly wait for it.

The candidates average gradients in every step, or changes of weights every so many steps: at once, beside further
steps, in fewer bits, and the largest alone. Fewer steps between exchanges come first; among as many, more precise
averages, and averages without delay. The largest alone come last, since trainings ended behind DiLoCo with them.
The first of which a training waits less than a share of its time is chosen.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from ..algorithms import Algorithm, ByteGrad, DiLoCo, GradientAllReduce, SparseLoCo, StreamingDiLoCo
from ..algorithms.diloco import OuterAlgorithm
from ..averages import Hierarchical, Quantized
from ..codecs import Int4
from .costmodel import Cluster, Job, Prediction, Rates, predict
from .costmodel.comparison import applies
from .costmodel.inputs import MOST_FLOWS

LEAST_WAITING = 0.05
"""The share of the time of a step that may be exposed communication."""

LOCAL_STEPS = (10, 30, 100, 300)
"""Steps between two exchanges: DiLoCo's paper has up to 500, and SparseLoCo's up to 250."""

FRAGMENTS, DELAY = (4, 16, 64), 5
"""Of `StreamingDiLoCo`: the paper sees no loss with delays of up to five steps."""


Choice = tuple[Algorithm, Prediction]


def candidates(cluster: Cluster) -> Iterator[Algorithm]:
    """The algorithms for sites, in the order in which they are preferred."""
    two_levels = cluster.has_two_levels
    exact = GradientAllReduce(Hierarchical()) if two_levels else GradientAllReduce()
    yield exact
    yield GradientAllReduce(Hierarchical(Quantized())) if two_levels else ByteGrad()
    for local_steps in LOCAL_STEPS:
        yield DiLoCo(local_steps)
        yield DiLoCo(local_steps, average=Quantized())
        for average in (Quantized(), Quantized(Int4())):
            for fragments in FRAGMENTS:
                if fragments <= local_steps:
                    yield StreamingDiLoCo(local_steps, fragments, DELAY, average=average)
    for local_steps in LOCAL_STEPS:
        sparse = SparseLoCo(local_steps)
        yield replace(sparse, average=Hierarchical(sparse.mean)) if two_levels else sparse


def exposed_share(prediction: Prediction) -> float:
    """The share of the time of a step in which training waits for communication."""
    return prediction.exposed_s / prediction.step_s if prediction.step_s else 0.0


def most_communication(
    job: Job, cluster: Cluster, rates: Rates | None = None, least_waiting: float = LEAST_WAITING
) -> Choice | None:
    """The first of `candidates` whose steps wait less than this share of the time; None if all wait longer.

    >>> job, rates = Job(400_000_000, 0.1, 0.2), Rates.gpu()
    >>> most_communication(job, Cluster(4, bandwidth_gbit=100, transport="nccl"), rates)[0]
    GradientAllReduce(average=Exact())
    >>> slow = Cluster(4, bandwidth_gbit=0.5, latency_s=0.05, transport="nccl")
    >>> most_communication(job, slow, rates)[0].local_steps
    30
    """
    return _first(candidates(cluster), job, cluster, rates, least_waiting)


def between_replicas(
    job: Job, cluster: Cluster, rates: Rates | None = None, least_waiting: float = LEAST_WAITING
) -> Choice | None:
    """The first with local steps between the replicas of a sharded model, one inside each node of several ranks.

    The ranks of a node share its link, and exchange their shards at once: together they send what one rank would
    send of the whole model. That one rank would code all of it is an upper bound. Exchanges inside nodes are not
    in the prediction.

    >>> slow = Cluster(2, ranks_per_node=8, bandwidth_gbit=1, latency_s=0.05, transport="nccl")
    >>> type(between_replicas(Job(400_000_000, 0.1, 0.2), slow, Rates.gpu())[0]).__name__
    'StreamingDiLoCo'
    """
    if not cluster.has_two_levels:
        return None
    flows = min(cluster.flows * cluster.ranks_per_node, MOST_FLOWS)
    alone = replace(cluster, ranks_per_node=1, flows=flows)
    local = (each for each in candidates(alone) if isinstance(each, OuterAlgorithm))
    return _first(local, job, alone, rates, least_waiting)


def _first(
    algorithms: Iterator[Algorithm], job: Job, cluster: Cluster, rates: Rates | None, least_waiting: float
) -> Choice | None:
    for algorithm in algorithms:
        if not applies(algorithm, job, cluster):
            continue
        prediction = predict(algorithm, job, cluster, rates)
        if exposed_share(prediction) < least_waiting:
            return algorithm, prediction
    return None
