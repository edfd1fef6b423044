"""Training while nodes die: how many of its steps count.

A death ends the steps since the last commit, or the last checkpoint. Elastic training then continues in the same
processes, after a rendezvous; a spare gets the state from a survivor. Without it, the job starts again and reads
its checkpoint. A dead node comes back after its repair. With no spare left, training continues on fewer nodes.
"""

from __future__ import annotations

import heapq
import math
from dataclasses import dataclass
from typing import Literal, NamedTuple

import numpy as np

from ...errors import ArrayError
from ..costmodel import Cluster, Job, Method, Rates, TorchDDP
from ..costmodel.inputs import check_fields, check_range
from .simulation import Simulation

HOUR_S = 3600.0

STATE_OF_WEIGHTS = 3
"""Bytes of the state for each byte of the weights: weights, and two moments of Adam."""

MOST_EVENTS = 1_000_000
"""The largest expected number of deaths in all trials."""


@dataclass(frozen=True)
class Failures:
    """How often nodes die, and what happens then.

    The times of elastic recovery were measured with three processes, by `benchmarks.faults`
    (benchmarks/results/faults.json); the others are those of your cluster.

    Args:
        mtbf_hours: The mean time between failures of one node; times are drawn from an exponential distribution.
            Meta's training of Llama 3 had 419 unexpected interruptions of 16,384 GPUs in 54 days (arXiv
            2407.21783): 6,300 hours for a node of 8.
        recovery: "elastic" or "restart".
        spares: Nodes that wait for a death.
        repair_hours: The time until a dead node is back.
        commit_steps: Steps between two commits of elastic training.
        checkpoint_minutes: Minutes between two checkpoints, for "restart".
        detection_s: Seconds until a dead node is noticed. That of a dead host is measured; the death of a process
            is noticed at once.
        rendezvous_s: Seconds in which survivors form a new group.
        restart_s: Seconds in which a job starts again.
        commit_gbs: GB/s at which a commit copies the state in memory.
        storage_gbs: GB/s at which all nodes together write a checkpoint, or read it.

    Raises:
        ArrayError: An argument is out of range.
    """

    mtbf_hours: float = 6300.0
    recovery: Literal["elastic", "restart"] = "elastic"
    spares: int = 0
    repair_hours: float = 24.0
    commit_steps: int = 100
    checkpoint_minutes: float = 30.0
    detection_s: float = 2.13
    rendezvous_s: float = 0.1
    restart_s: float = 300.0
    commit_gbs: float = 5.6
    storage_gbs: float = 2.0

    def __post_init__(self) -> None:
        if self.recovery not in ("elastic", "restart"):
            raise ArrayError(f'Failures: recovery is {self.recovery!r}, expected "elastic" or "restart"')
        check_fields(self, 1e-3, 1e9, "mtbf_hours")
        check_fields(self, 1e-3, 1e6, "checkpoint_minutes")
        check_fields(self, 0, 1e6, "repair_hours", "detection_s", "rendezvous_s", "restart_s")
        check_fields(self, 1e-6, 1e6, "commit_gbs", "storage_gbs")
        check_fields(self, 0, 1_000_000, "spares", whole=True)
        check_fields(self, 1, 10**9, "commit_steps", whole=True)


class Goodput(NamedTuple):
    """The share of training that counts, in comparison with training that never fails and commits nothing."""

    share: float
    """The mean over the trials; 1 if nothing is lost."""
    least: float
    """The share of the worst trial."""
    samples_per_s: float
    """Steps that count, times the ranks that made them, a second."""
    deaths: float
    """Deaths in a trial, on average."""
    saving: float
    """The share of the time that commits or checkpoints take."""
    lost: float
    """The share of the time in steps that were lost."""
    down: float
    """The share of the time without training."""


class _Costs(NamedTuple):
    """The costs of a death and of a commit, in seconds."""

    save_s: float
    save_steps: float
    recover_s: float
    join_s: float
    """Seconds of the transfer of the state to a spare, or of the reading of a checkpoint."""


def goodput(
    simulation: Simulation,
    method: Method,
    job: Job,
    cluster: Cluster,
    failures: Failures | None = None,
    rates: Rates | None = None,
    *,
    hours: float = 720.0,
    trials: int = 20,
    seed: int = 0,
) -> Goodput:
    """Draw the deaths of nodes in some hours of training, and count the steps that are left.

    Args:
        simulation: The step, from `simulate`; it is as long on fewer nodes.
        method: Its algorithm. Where weights differ between ranks, a commit sends them to another node.
        job: Its job.
        cluster: Its cluster.
        failures: How nodes die.
        rates: The costs of work.
        hours: Hours of training.
        trials: How often it is repeated with other deaths.
        seed: The seed of what is drawn.

    Raises:
        ArrayError: An argument is out of range.

    >>> from bagua_comm import GradientAllReduce
    >>> from bagua_comm.planning.simulator import simulate
    >>> job, cluster = Job(100_000_000, 0.1, 0.2), Cluster(nodes=512, bandwidth_gbit=10)
    >>> exact = simulate(GradientAllReduce(), job, cluster)
    >>> both = [Failures(recovery=name, spares=4) for name in ("elastic", "restart")]
    >>> [round(goodput(exact, GradientAllReduce(), job, cluster, each).share, 2) for each in both]
    [1.0, 0.97]
    """
    failures = failures or Failures()
    check_range("goodput", "hours", hours, 1e-3, 1e6)
    check_range("goodput", "trials", trials, 1, 10_000, whole=True)
    check_range("goodput", "seed", seed, 0, 2**63 - 1, whole=True)
    expected = trials * hours * cluster.nodes / failures.mtbf_hours
    if expected > MOST_EVENTS:
        raise ArrayError(
            f"goodput: {expected:.3g} deaths are expected in {trials} trials of {hours:g} hours, more than "
            f"{MOST_EVENTS:g}; give fewer hours or trials"
        )
    if not simulation.step_s > 0:
        raise ArrayError("goodput: the step of the simulation takes no time, so steps cannot be counted")
    costs = _costs(simulation, method, job, cluster, failures, rates or Rates())
    found = [
        _Trial(simulation.step_s, cluster.nodes, failures, costs, np.random.default_rng((seed, i))).run(hours)
        for i in range(trials)
    ]
    whole = hours * HOUR_S
    shares = [trial.node_steps * simulation.step_s / (cluster.nodes * whole) for trial in found]
    share = float(np.mean(shares))

    def mean(name: str) -> float:
        return float(np.mean([getattr(trial, name) for trial in found]))

    return Goodput(
        share,
        float(min(shares)),
        share * cluster.size / simulation.step_s,
        mean("deaths"),
        mean("saving_s") / whole,
        mean("lost_s") / whole,
        mean("down_s") / whole,
    )


def _costs(
    simulation: Simulation, method: Method, job: Job, cluster: Cluster, failures: Failures, rates: Rates
) -> _Costs:
    state = STATE_OF_WEIGHTS * job.model_bytes
    link = cluster.reached_gbit() / 8e-9 * rates.direct
    if failures.recovery == "restart" or cluster.nodes == 1:  # a single node leaves no survivor
        stored_s = state / (failures.storage_gbs * 1e9)
        steps = failures.checkpoint_minutes * 60 / simulation.step_s
        return _Costs(stored_s, max(1.0, steps), failures.detection_s + failures.restart_s + stored_s, 0.0)
    private = not isinstance(method, TorchDDP) and method.phases[-1].drifts
    sent_s = cluster.ranks_per_node * state / link if private and cluster.nodes > 1 else 0.0
    save_s = state / (failures.commit_gbs * 1e9) + sent_s
    rounds = math.ceil(math.log2(max(2, cluster.size)))
    recover_s = failures.detection_s + failures.rendezvous_s + 2 * rounds * cluster.latency_s
    return _Costs(save_s, float(failures.commit_steps), recover_s, state / link)


class _Trial:
    """Some hours of training, with deaths that are drawn."""

    def __init__(
        self, step_s: float, nodes: int, failures: Failures, costs: _Costs, rng: np.random.Generator
    ) -> None:
        self._step_s, self._nodes, self._failures, self._costs, self._rng = step_s, nodes, failures, costs, rng
        self._alive, self._spares, self._now, self._steps = nodes, failures.spares, 0.0, 0.0
        self._repairs: list[float] = []
        self.node_steps = self.saving_s = self.lost_s = self.down_s = 0.0
        self.deaths = 0

    def run(self, hours: float) -> _Trial:
        """Train, and return this trial."""
        end = hours * HOUR_S
        death = self._next_death()
        while self._now < end:
            repair = self._repairs[0] if self._repairs else math.inf
            self._train(min(death, repair, end))
            if self._now >= end:
                break
            if repair <= death:
                heapq.heappop(self._repairs)
                self._repaired()
            else:
                self._die()
            death = self._next_death()  # of as many nodes as there are now; exponential times have no memory
        return self

    def _next_death(self) -> float:
        if not self._alive:
            return math.inf
        return self._now + float(self._rng.exponential(self._failures.mtbf_hours * HOUR_S / self._alive))

    def _train(self, until: float) -> None:
        """Train until then, and commit now and then."""
        passed = max(0.0, until - self._now)
        self._now += passed
        if not self._alive:
            self.down_s += passed
            return
        each_s = self._step_s + self._costs.save_s / self._costs.save_steps
        steps = passed / each_s
        self._steps += steps
        self.node_steps += steps * self._alive
        self.saving_s += passed - steps * self._step_s

    def _die(self) -> None:
        self.deaths += 1
        lost = min(self._steps % self._costs.save_steps, self._steps)
        self.node_steps -= lost * self._alive
        self.lost_s += lost * self._step_s
        self._steps = 0.0
        heapq.heappush(self._repairs, self._now + self._failures.repair_hours * HOUR_S)
        self._alive -= 1
        joins = self._spares > 0
        if joins:
            self._spares, self._alive = self._spares - 1, self._alive + 1
        self._pause(self._costs.recover_s + joins * self._costs.join_s)

    def _repaired(self) -> None:
        """A node is back: it trains, if one is missing; else it waits as a spare."""
        if self._alive == self._nodes:
            self._spares += 1
            return
        self._alive += 1
        planned_s = self._costs.recover_s - self._failures.detection_s
        self._pause(planned_s + self._costs.join_s + self._costs.save_s)
        self._steps = 0.0

    def _pause(self, seconds: float) -> None:
        self._now += seconds
        self.down_s += seconds
