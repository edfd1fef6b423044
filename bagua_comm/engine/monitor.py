"""The health of a training, while it runs: rows of step times, which ranks gather beside exchanges.

    step_ended       each step of this rank
    gather_rows      every few exchanges of the first bucket, right before it; microbatches are shifted by the
                     rows before
    (on the lane)    change points in them; the links between nodes are measured if all ranks wait longer

Every rank has the same rows, so that all come to the same result, and nothing more is sent.
"""

from __future__ import annotations

import logging
import math
import statistics
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager

import numpy as np

from ..comm import Communicator
from ..execution.lane import Lane, ThreadLane
from ..health.change_points import HISTORY, ROWS, Series, relative_to_others
from ..health.rows import BUSY, Row, StepTimes, Usage
from ..health.slow import Slow
from ..logs import log_on_root
from .links import measure_links, size_of_messages, slow_links

STEPS = 5
"""The least number of steps in a row."""

ROW_S = 0.25
"""The least time of a row: shorter ones show the noise of the operating system, and cost more."""

FIRST_ROW = 5
"""The number of the exchange with which the first row is sent."""

BUSY_ROWS = 2 * ROWS
"""The number of successive rows after which a rank is slow whose processor others have: often, that passes."""

LINK_ROWS = 20
"""The number of rows between two measurements of links, while all ranks wait longer."""


class HealthMonitor:
    """Finds slow ranks and links, on the lane of an engine.

    Args:
        lane: The lane. Without a thread of its own, ranks would wait for rows, and none are sent.
        logger: Receives a line when something becomes slow, and when that ends; on rank 0.
        lanes: Other lanes for whose tasks training waits, without an engine.
    """

    def __init__(
        self, lane: Lane[Communicator], logger: logging.Logger, lanes: Sequence[Lane[Communicator]] = ()
    ) -> None:
        self._lane, self._logger, self._lanes = lane, logger, lanes
        comm = lane.comm
        self._flight = comm.flight
        self._log, self._members = comm.flight.health.open(comm.group), comm.flight.groups[comm.group]
        self.is_on = comm.size > 1 and isinstance(lane, ThreadLane)
        """Whether ranks send rows."""
        self._exchanges, self._due, self._sent_at = 0, FIRST_ROW, 0
        """Numbers of exchanges: so far, when the next row is sent, and when the last one was."""
        self._has_data = True
        self._steps: list[StepTimes] = []
        self._step = self._end_ns = self._waited_ns = 0
        self._used = Usage.now()
        self._sent: Future[int] | None = None
        self._begins: deque[int] = deque(maxlen=HISTORY)
        """The steps with which the latest rows begin."""
        self._restart()
        self._waiting = Series(least=0.1, growth=1.3, at_once=math.inf)
        """How long all ranks wait, as a multiple of their own work: a slow link, or a slow algorithm."""
        self._links, self._measured = np.array(math.inf), 0
        """Seconds of a message over each link at the start, the least of so many measurements; see `links`."""
        self._rows_until_links = self._message = 0
        self._sent_before = self._sent_bytes()

    def _sent_bytes(self) -> int:
        """The bytes that exchanges have sent, also those of communicators inside and across nodes."""
        counters = [lane.comm.counters for lane in (self._lane, *self._lanes)]  # lanes may share them
        return sum(each.total().wire_bytes for each in {id(each): each for each in counters}.values())

    def _restart(self) -> None:
        """Compare the ranks as if no row had come."""
        self._ranks = [Series(least=1.25, growth=1.25, at_once=1.3) for _ in self._members]
        """The times of each rank as multiples of those of the others."""

    def step_ended(self, step: int, began_ns: int, end_ns: int) -> None:
        """Note step number `step` of this rank; times by `time.perf_counter_ns`."""
        self._step, waited_ns = step, self._flight.waited_ns + sum(lane.waited_ns for lane in self._lanes)
        if self._end_ns and len(self._steps) < 4096:
            waiting_s = (waited_ns - self._waited_ns) / 1e9
            own_s = max((end_ns - self._end_ns) / 1e9 - waiting_s, 0.0)
            self._steps.append(StepTimes(own_s, waiting_s, min((began_ns - self._end_ns) / 1e9, own_s)))
        self._end_ns, self._waited_ns = end_ns, waited_ns

    def gather_rows(self, *, weighed: bool = False) -> None:
        """Gather the rows of all ranks on the lane, if they are due. Called right before an exchange on it.

        Collective.

        Args:
            weighed: Whether the mean of the exchange fits unequal numbers of microbatches.
        """
        self._exchanges += 1
        if self._exchanges < self._due or not self.is_on:
            return
        if self._sent is not None:
            self._due = self._sent_at + self._lane.result(self._sent)  # done since the bucket after it
            self._sent = None
            self._log.shares.add(list(self._log.latest.rows.values()), weighed=weighed)
            if self._exchanges < self._due:
                return
        used = Usage.now()
        steps = self._steps if self._has_data else []
        shares = self._log.shares
        of_shares = shares.part(self._lane.comm.rank), shares.digest
        row = Row.of(self._step, self._lane.comm.node, steps, used.since(self._used), *of_shares)
        self._steps, self._used = [], used
        self._sent = self._lane.submit(self._gather, row, self._exchanges - self._sent_at)
        self._sent_at = self._exchanges

    @contextmanager
    def without_data(self) -> Iterator[None]:
        """Compare no steps of this rank meanwhile, which has no batches, as in `join`."""
        self._has_data = False
        try:
            yield
        finally:
            self._has_data = True

    def end(self) -> None:
        """End what is slow, since ranks gather no more rows: the engine is closed, or goes on in rounds.

        The lane is idle.
        """
        for slow in self._log.latest.slow:
            self._log.end(slow.what, self._step)
        self._restart()

    def close(self) -> None:
        """Keep the results until another engine begins."""
        self.end()
        self._log.is_closed = True

    def _gather(self, row: Row, exchanges: int) -> int:
        """Gather the rows of the last `exchanges`; return after how many the next one is due.

        Collective. The result is the same on all ranks.
        """
        comm = self._lane.comm
        rows = [Row(*numbers) for numbers in comm.allgather(np.array(row.numbers())).tolist()]
        self._log.add_rows(self._members, rows)
        if all(each.steps for each in rows):
            self._begins.append(int(rows[0].step - rows[0].steps) + 1)
            self._compare_ranks(rows)
            self._compare_links(rows)
        found = [each for each in rows if each.steps]
        if not found:
            return exchanges
        steps = statistics.median(each.steps for each in found)
        seconds = statistics.median(each.seconds for each in found)
        return math.ceil(max(STEPS * exchanges / steps, ROW_S * exchanges / max(seconds, 1e-3)))

    def _compare_ranks(self, rows: Sequence[Row]) -> None:
        times = relative_to_others([each.work_s for each in rows])
        for rank, (series, factor) in enumerate(zip(self._ranks, times, strict=True)):
            world, cause = self._members[rank], ""
            if factor > series.limit:
                cause = rows[rank].cause([*rows[:rank], *rows[rank + 1 :]])
            if count := series.add(factor, BUSY_ROWS if cause == BUSY else ROWS):
                what, step = f"rank {world}", self._begins[-count]
                if series.is_slow:
                    self._begin(Slow(what, (world,), step, factor, cause))
                else:
                    self._end(what, step)

    def _compare_links(self, rows: Sequence[Row]) -> None:
        """Measure the links between nodes at first, and while all ranks wait longer than before."""
        nodes = [int(each.node) for each in rows]
        if len(set(nodes)) == 1:
            return
        names = [f"node {node} (rank {self._members[nodes.index(node)]})" for node in sorted(set(nodes))]
        own_s = statistics.median(each.own_s for each in rows)
        changed = self._waiting.add(min(each.waiting_s for each in rows) / max(own_s, 1e-6))
        self._rows_until_links -= 1
        slow: dict[str, float] = {}
        if not self._message:
            exchanged = (self._sent_bytes() - self._sent_before) / self._exchanges
            self._message = size_of_messages(self._lane.comm, exchanged)
        if self._measured < ROWS:  # a start is noisy
            self._links = np.minimum(self._links, measure_links(self._lane.comm, nodes, self._message))
            self._measured += 1
        elif self._waiting.is_slow and (changed or self._rows_until_links <= 0):
            self._rows_until_links = LINK_ROWS
            factors = measure_links(self._lane.comm, nodes, self._message) / self._links
            if slow_links(factors, names):  # again, since a measurement has outliers, too
                again = measure_links(self._lane.comm, nodes, self._message)
                factors = np.minimum(factors, again / self._links)
            slow = slow_links(factors, names)
        elif not changed:
            return
        known = {each.what for each in self._log.latest.slow if not each.ranks}
        for what in sorted(known - slow.keys()):
            self._end(what, self._begins[-1])
        for what in sorted(slow.keys() - known):
            self._begin(Slow(what, (), self._begins[-max(changed, 1)], slow[what]))

    def _begin(self, slow: Slow) -> None:
        self._log.begin(slow)
        log_on_root(self._logger, self._lane.comm.rank, "%s", slow)

    def _end(self, what: str, step: int) -> None:
        log_on_root(self._logger, self._lane.comm.rank, "%s", self._log.end(what, step))
