"""Runs the program of a rank on all ranks of a cluster, with time.

Each rank has a training thread and a lane, which share its cores, and each node a link, which its ranks share.
Messages leave a node one after the other, at the rate of the link; a rank waits until all messages that it
expects have left the nodes of their senders, and for the latency. The events of all ranks are computed together,
one operation after the other, as arrays with an element for each rank. Where nothing is drawn at random, all
ranks do the same at the same time, and one of them is enough.

While computation and the lane both run, they share the cores as in the cost model: a busy lane takes up to one
core, and at most half of them.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from ...arrays import Array
from ..costmodel import Cluster, Rates
from .transport import Exchange, Op, Program

Vector: TypeAlias = "npt.NDArray[np.float64]"
"""A number for each rank; or a single one, if all ranks are equal."""

WHOLE = 0.55
"""The share of the rate that one process reaches if it sends and receives long messages whole, in place of in
pieces. It was fitted by hand to the steps of `LowPrecisionDecentralized` on 2 and 4 emulated hosts at 100 Mbit/s,
which took 1.7 times as long as their bytes; `benchmarks.training.simulator` does not count those as predicted."""

Factors: TypeAlias = Callable[[int], "Vector | float"]
"""By step: by how much the computation of each rank is slower than that of the job."""


@dataclasses.dataclass
class Timing:
    """The times of a replay."""

    step_s: float
    """Mean seconds of a step."""
    steps_s: list[float]
    """Seconds of each step, until the last rank has ended it."""
    communication_s: float
    """Mean seconds of a step during which the lane of a rank is busy."""


def replay(
    program: Program,
    cluster: Cluster,
    rates: Rates,
    *,
    ranks: int = 1,
    slower: Factors | None = None,
    links: Vector | float = 1.0,
    repeats: int = 1,
) -> Timing:
    """Run a program.

    Args:
        program: What each rank does.
        cluster: The ranks and links.
        rates: The costs of work.
        ranks: All ranks of the cluster; 1 if all are equal.
        slower: Factors on the time of computation.
        links: Factors on the bandwidth of each node's link, (nodes,).
        repeats: How often the steps of the program are repeated.
    """
    if ranks == 1:
        run: _Ranks = _OneRank(program, cluster, rates)
    else:
        run = _Ranks(program, cluster, rates, slower or (lambda step: 1.0), links)
    return run.rounds() if program.interval_s is not None else run.steps(repeats)


class _Ranks:
    """The state of all ranks while they run a program."""

    _later: Callable[[Array, Array], Array] = staticmethod(np.maximum)

    def __init__(
        self,
        program: Program,
        cluster: Cluster,
        rates: Rates,
        slower: Factors = lambda step: 1.0,
        links: Vector | float = 1.0,
    ) -> None:
        self._program, self._cluster, self._rates, self._slower = program, cluster, rates, slower
        self._now: Array = np.zeros(cluster.size)
        self._done: Array = np.zeros(cluster.size)
        self._end: Array = np.zeros(cluster.size)
        """When the lane's latest operation ended; how much computation was done then, and how much there is."""
        self._link_free: Array = np.zeros(cluster.nodes)
        self._links: Array = np.broadcast_to(np.asarray(links, float), cluster.nodes)
        cores = cluster.cores_per_rank
        self._free, self._alone = min(1.0, cores / 2), min(1.0, cores)
        self._busy: Array = np.zeros(cluster.size)
        self._left: dict[int, Array] = {}
        """When the messages of an exchange under way have left each rank's node."""

    # The training thread --------------------------------------------------------------------------------

    def steps(self, repeats: int) -> Timing:
        """Run the steps of the program, `repeats` times."""
        program, ended, step = self._program, [0.0], 0
        for _ in range(repeats):
            waiting: list[tuple[int, Array]] = []
            factor = self._slower(step)
            for op in program.trainer:
                match op[0]:
                    case "compute":
                        self._end = self._end + op[1] * factor
                    case "work":
                        self._end = self._end + self._work_s(op) / self._alone
                    case "submit":
                        waiting.append((op[1], self._end))
                    case "wait":
                        while waiting and waiting[0][0] <= op[1]:
                            self._run_task(*waiting.pop(0))
                    case "step":
                        step += 1
                        factor = self._slower(step)
                        ended.append(self._last())
            for task in waiting:
                self._run_task(*task)
        # The exchanges that the last step has left under way belong to the steps.
        last, count = self._last(), program.steps * repeats
        ended[-1] = last
        times = [after - before for before, after in itertools.pairwise(ended)]
        return Timing(last / count, times, float(np.mean(self._busy)) / count)

    def rounds(self) -> Timing:
        """Run one round of exchanges beside as many steps as it takes; no step waits for it."""
        program, ops = self._program, self._program.trainer
        first = ops.index(("step",))
        slower = np.mean([np.mean(self._slower(step)) for step in range(_DRAWN)])
        compute_s = float(slower * sum(op[1] for op in ops[:first] if op[0] == "compute"))
        begins = [op[1] for op in ops[:first] if op[0] == "submit"]
        copies_s = sum(self._work_s(op) for op in ops if op[0] == "work") / self._alone
        if not begins or not any(program.tasks[task] for task in begins):
            return Timing(compute_s, [compute_s], 0.0)
        self._end = self._end + np.inf  # training goes on meanwhile
        for task in begins:
            self._run_task(task, 0.0)
        round_s, computed_s = float(np.max(self._now)), float(np.min(self._done))
        interval_s = program.interval_s or 0.0
        if not compute_s:
            return Timing(round_s + copies_s, [round_s + copies_s], round_s)
        lost_s = round_s - computed_s
        count = max(1, int(np.ceil(max(computed_s, interval_s - lost_s) / compute_s)))
        step_s = compute_s + (lost_s + copies_s) / count
        return Timing(step_s, [step_s] * count, round_s / count)

    def _last(self) -> float:
        """When the last rank has computed all that it has begun, if its lane does nothing more."""
        return float(np.max(self._now + self._end - self._done))

    # The lane -------------------------------------------------------------------------------------------

    def _run_task(self, task: int, submitted: Array) -> None:
        """Run a task after the computation before its submission."""
        behind = self._later(submitted, self._done) - self._done
        self._now, self._done = self._now + behind, self._done + behind
        before = self._now
        for op in self._program.tasks[task]:
            match op[0]:
                case "work":
                    work_s = self._work_s(op)
                    self._spend(work_s / self._free, self._free, work_s / self._alone)
                case "begin":
                    self._begin(op[1])
                case "end":
                    self._finish(op[1])
        self._busy = self._busy + self._now - before

    def _spend(self, spent: Array, lane_cores: float, alone: Array) -> None:
        """Let the lane use `lane_cores` for `spent` seconds beside computation; `alone`, after it has ended."""
        speed = 1 - lane_cores / self._cluster.cores_per_rank
        done = self._done + spent * speed
        if (done <= self._end).all():
            self._now, self._done = self._now + spent, done
            return
        with np.errstate(invalid="ignore", divide="ignore"):
            first = (self._end - self._done) / speed
            rest = np.where(done <= self._end, 0.0, (1 - first / spent) * alone)
        self._now = self._now + np.where(done <= self._end, spent, first + rest)
        self._done = np.minimum(done, self._end)

    def _begin(self, number: int) -> None:
        """Queue the messages of an exchange on the links of the nodes."""
        exchange, c = self._program.exchanges[number], self._cluster
        left = self._now + exchange.inside_bytes / (c.intra_gbs * 1e9)
        if exchange.node_bytes:
            whole_s = self._link_s(exchange) / self._links
            by_node = self._now.reshape(c.nodes, -1)
            # The link is free for the first rank's messages, and the last rank's follow when it begins.
            free = np.maximum(self._link_free, by_node.min(axis=1)) + whole_s
            self._link_free = free = np.maximum(free, by_node.max(axis=1) + whole_s / c.ranks_per_node)
            left = np.maximum(left, np.repeat(free, c.ranks_per_node))
        self._left[number] = left

    def _link_s(self, exchange: Exchange) -> float:
        """Seconds in which the messages of an exchange leave a node."""
        c = self._cluster
        rate = (
            c.reached_gbit(exchange.pairs) / 8e-9 * (self._rates.ring if exchange.is_ring else self._rates.direct)
        )
        if exchange.is_whole:  # ranks of one node, each with a process of its own, fill the link together
            return exchange.node_bytes / min(rate, WHOLE * rate * c.ranks_per_node)
        return exchange.node_bytes / rate

    def _finish(self, number: int) -> None:
        """Wait for the messages of an exchange, and do the work that they cost."""
        exchange, c, rates = self._program.exchanges[number], self._cluster, self._rates
        away = exchange.node_bytes / c.ranks_per_node
        # Messages cost work on both sides; ranks of one node read each other's memory, so one copy is made.
        work_s = 2 * (exchange.messages * rates.message_s + away * rates.network_s_per_byte)
        work_s += exchange.inside_bytes / rates.copy
        self._spend(work_s / self._free, self._free, work_s / self._alone)
        latency_s = c.latency_s if exchange.node_bytes else c.intra_latency_s
        at = self._last_of(self._left.pop(number), exchange) + exchange.hops * latency_s
        wait_s = self._later(at, self._now) - self._now
        self._spend(wait_s, 0.0 if exchange.is_ring else min(self._free, rates.polling), wait_s)

    def _last_of(self, left: Array, exchange: Exchange) -> Array:
        """When the last message has left that each rank waits for."""
        k = self._cluster.ranks_per_node
        if exchange.group == "all":
            if exchange.peers is None:
                return np.full_like(left, left.max())
            return np.maximum.reduce([left, *(np.roll(left, -peer) for peer in exchange.peers)])
        table = left.reshape(-1, k)
        axis = 1 if exchange.group == "inside" else 0
        if exchange.peers is None:
            last = np.broadcast_to(table.max(axis=axis, keepdims=True), table.shape)
        else:
            last = np.maximum.reduce([table, *(np.roll(table, -peer, axis=axis) for peer in exchange.peers)])
        return np.ascontiguousarray(last).reshape(-1)

    # Work -----------------------------------------------------------------------------------------------

    def _work_s(self, op: Op) -> float:
        """Seconds of a core that work takes; see `shapes.Rate`."""
        _, name, nbytes = op
        family, _, kind = name.rpartition("_")
        rates: Any = self._rates
        if name not in ("add", "copy"):
            rates = rates.cast if family else rates.minmax
        return float(nbytes / getattr(rates, kind))


_DRAWN = 100
"""The number of steps over which the computation of ranks that do not wait for each other is averaged."""


class _OneRank(_Ranks):
    """A rank for all, which are equal. Numbers in place of arrays take a twentieth of the time."""

    _later = staticmethod(max)

    def __init__(self, program: Program, cluster: Cluster, rates: Rates) -> None:
        super().__init__(program, cluster, rates)
        self._now = self._done = self._end = self._busy = self._link_free = 0.0

    def _spend(self, spent: float, lane_cores: float, alone: float) -> None:
        speed = 1 - lane_cores / self._cluster.cores_per_rank
        done = self._done + spent * speed
        if done <= self._end:
            self._now, self._done = self._now + spent, done
        else:
            first = (self._end - self._done) / speed
            self._now, self._done = self._now + first + (1 - first / spent) * alone, self._end

    def _begin(self, number: int) -> None:
        exchange = self._program.exchanges[number]
        left = self._now + exchange.inside_bytes / (self._cluster.intra_gbs * 1e9)
        if exchange.node_bytes:
            self._link_free = max(self._link_free, self._now) + self._link_s(exchange)
            left = max(left, self._link_free)
        self._left[number] = left

    def _last_of(self, left: float, exchange: Exchange) -> float:
        return left


def wire_bytes(program: Program) -> tuple[float, float]:
    """Bytes that a rank sends, and bytes that a node sends, in a step."""
    began = [program.exchanges[op[1]] for task in program.tasks for op in task if op[0] == "begin"]
    sent, left = sum(each.wire_bytes for each in began), sum(each.node_bytes for each in began)
    return sent / program.steps, left / program.steps
