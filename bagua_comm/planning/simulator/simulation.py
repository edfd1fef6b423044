"""The simulation of training steps."""

from __future__ import annotations

import functools
from collections.abc import Hashable
from dataclasses import dataclass
from typing import NamedTuple, cast

import numpy as np

from ...errors import ArrayError, UnsupportedError
from ..costmodel import Cluster, Job, Method, Rates
from ..costmodel.inputs import check_fields, check_range
from ..costmodel.prediction import check_fit
from .replay import Timing, replay, wire_bytes
from .tracing import trace
from .transport import Program

MOST_RANKS, MOST_REPEATS = 1 << 14, 10_000
"""The largest number of ranks, and of simulated steps."""


@dataclass(frozen=True)
class Variation:
    """How much ranks and links differ, as drawn at random.

    Args:
        compute: The standard deviation of the logarithm of the time that a rank computes in a step; about its
            relative deviation. Drawn for each rank and step.
        rare: The share of steps of a rank that take `rare_factor` times as long, as by garbage collection or a
            neighbour on the machine.
        rare_factor: By how much these are longer.
        slow: The share of ranks whose computation is `slow_factor` times as long in all steps.
        slow_factor: By how much it is longer.
        links: The standard deviation of the logarithm of the bandwidth of a node's link; it keeps its bandwidth.

    Raises:
        ArrayError: An argument is out of range.
    """

    compute: float = 0.0
    rare: float = 0.0
    rare_factor: float = 2.0
    slow: float = 0.0
    slow_factor: float = 1.5
    links: float = 0.0

    def __post_init__(self) -> None:
        check_fields(self, 0, 2, "compute", "links")
        check_fields(self, 0, 1, "rare", "slow")
        check_fields(self, 1, 1000, "rare_factor", "slow_factor")

    @property
    def is_none(self) -> bool:
        """Whether all ranks and all links are equal."""
        return not (self.compute or self.rare or self.slow or self.links)


class Simulation(NamedTuple):
    """The time and the bytes of a training step, averaged over the simulated steps."""

    step_s: float
    compute_s: float
    """Seconds of the step without communication, on a rank that is not slow."""
    communication_s: float
    """Seconds during which the lane is busy."""
    wire_bytes: float
    """Bytes that a rank sends to other ranks."""
    node_bytes: float
    """Bytes that a node sends to other nodes."""
    longest_s: float
    """The time that 95 % of the steps stay below."""
    steps: int
    """The number of simulated steps."""


def simulate(
    method: Method,
    job: Job,
    cluster: Cluster,
    rates: Rates | None = None,
    *,
    variation: Variation | None = None,
    steps: int = 20,
    seed: int = 0,
) -> Simulation:
    """Simulate training `job` on `cluster` with an algorithm, after its warm-up.

    Ranks that are all equal are represented by one of them.

    Args:
        method: The algorithm, of this library or your own; or `TorchDDP`.
        job: The training step of a rank.
        cluster: The ranks and links.
        rates: The costs of work; the defaults of `Rates` if None.
        variation: How much ranks and links differ; None if they are equal.
        steps: The least number of steps to simulate, where something is drawn at random.
        seed: The seed of what is drawn; the same seed gives the same result.

    Raises:
        ArrayError: The algorithm does not support this number of ranks, or an argument is out of range.
        UnsupportedError: The algorithm does not support the dtype of the job, or does with arrays what cannot be
            recorded.

    >>> from bagua_comm import ByteGrad, GradientAllReduce
    >>> job, cluster = Job(100_000_000, 0.1, 0.2), Cluster(nodes=64, bandwidth_gbit=1)
    >>> exact, eight_bits = (simulate(each, job, cluster) for each in (GradientAllReduce(), ByteGrad()))
    >>> round(exact.step_s / eight_bits.step_s, 1), round(exact.wire_bytes / eight_bits.wire_bytes, 1)
    (2.7, 3.9)
    """
    check_fit(method, job, cluster)
    check_range("simulate", "steps", steps, 1, MOST_REPEATS, whole=True)
    check_range("simulate", "seed", seed, 0, 2**63 - 1, whole=True)
    if cluster.size > MOST_RANKS:
        raise ArrayError(f"simulate: cluster has {cluster.size} ranks, expected at most {MOST_RANKS}")
    variation, rates = variation or Variation(), rates or Rates()
    program = _traced(method, job, cluster)
    if variation.is_none:
        timing = replay(program, cluster, rates)
        count = program.steps
    else:
        repeats = -(-steps // program.steps)
        timing, count = _varied(program, cluster, rates, variation, repeats, seed), repeats * program.steps
    sent, by_node = wire_bytes(program)
    if program.interval_s is not None and timing.steps_s:  # of a round, which takes several steps
        sent, by_node = sent / len(timing.steps_s), by_node / len(timing.steps_s)
    longest_s = float(np.quantile(timing.steps_s, 0.95)) if timing.steps_s else timing.step_s
    return Simulation(timing.step_s, job.compute_s, timing.communication_s, sent, by_node, longest_s, count)


def _varied(
    program: Program, cluster: Cluster, rates: Rates, variation: Variation, repeats: int, seed: int
) -> Timing:
    """Run a program on ranks and links that differ as drawn."""
    rng, size, v = np.random.default_rng(seed), cluster.size, variation
    always = np.where(rng.random(size) < v.slow, v.slow_factor, 1.0)
    links = np.exp(v.links * rng.standard_normal(cluster.nodes))

    def slower(step: int) -> np.ndarray[tuple[int], np.dtype[np.float64]]:
        drawn = np.random.default_rng((seed, step))
        rare = np.where(drawn.random(size) < v.rare, v.rare_factor, 1.0)
        return always * rare * np.exp(v.compute * drawn.standard_normal(size))

    return replay(program, cluster, rates, ranks=size, slower=slower, links=links, repeats=repeats)


@functools.lru_cache(maxsize=256)
def _cached(method: Hashable, job: Job, cluster: Cluster) -> Program:
    return trace(cast(Method, method), job, cluster)


def _traced(method: Method, job: Job, cluster: Cluster) -> Program:
    """The program of a rank; that of an earlier simulation, if its messages do not depend on what has changed."""
    try:
        return _cached(cast(Hashable, method), job, cluster)
    except TypeError as exc:
        if "unhashable" in str(exc):
            return trace(method, job, cluster)
        raise UnsupportedError(f"simulate: {method!r} cannot be simulated: {exc}") from exc
