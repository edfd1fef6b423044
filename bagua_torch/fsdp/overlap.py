"""Gathers on one lane and reductions on another, while a sharded model computes on a CPU.

PyTorch waits for the `Work` that an all-gather returns, when a module needs its parameters. In the backward pass
it asks for those of the next module in advance; in the forward pass `Prefetch` does. A reduce-scatter returns no
`Work`: PyTorch makes its result the gradients, and mostly does not read them. So they are complete when the
backward pass ends, as on GPUs.
"""

from __future__ import annotations

import time
from collections import deque
from concurrent.futures import Future

import torch
import torch.distributed as dist
from torch import nn

from bagua_comm import Communicator
from bagua_comm.engine.monitor import HealthMonitor
from bagua_comm.execution.lane import Lane

from .passes import BackwardPasses
from .torch_names import Unit, observe_forward, running_backward

IN_FLIGHT = 2
"""Most reductions that have not ended, each of which keeps the gradients of a module in memory."""


class Gathering(dist.Work):
    """An all-gather on a lane. PyTorch waits for it before the module computes.

    Args:
        lane: The lane.
        future: The task.
        unit: What is gathered.
        prefetch: Called with `unit` when it is gathered.
    """

    def __init__(self, lane: Lane[Communicator], future: Future[object], unit: Unit, prefetch: Prefetch) -> None:
        super().__init__()
        self._lane, self._future = lane, future
        self._unit, self._prefetch = unit, prefetch

    def wait(self, timeout: object = None) -> bool:
        """Wait for the end, and raise the error if there was one; begin the gather that follows."""
        self._lane.result(self._future)
        self._prefetch.follow(self._unit)
        return True


class Prefetch:
    """Gathers the parameters of the module that runs next, in the order of the last forward pass.

    All ranks gather in the same order, so that all predict the same. What was gathered but not used is dropped
    when the forward pass ends, before an optimizer can change the parameters; that module is not predicted again.
    So it is with parameters that the pass changes before it uses them, on all ranks. A pass that raises
    predicts nothing: the next one follows the order of the pass before.

    Args:
        model: The model; its forward passes are observed.
    """

    def __init__(self, model: nn.Module) -> None:
        self._former: list[Unit] = []
        """The units that the last forward pass gathered, in order."""
        self._order: list[Unit] = []
        """The units that this pass has gathered so far."""
        self._at, self._is_running = 0, False
        self._in_advance: dict[Unit, int] = {}
        """Units gathered in advance and not used yet, with the versions of their shards."""
        self._unused: set[Unit] = set()
        """Parameters that were gathered and not used."""
        self._stop = observe_forward(model, self._begin, self._end)

    def _begin(self) -> None:
        self._end(self._is_running)
        self._former, self._order, self._at, self._is_running = self._order, [], 0, True

    def _end(self, raised: bool) -> None:
        self._is_running = False
        for unit in self._in_advance:
            unit.drop_gathered()
        if raised:
            self._order = self._former
        else:
            self._unused.update(self._in_advance)
        self._in_advance.clear()

    def check(self, unit: Unit) -> None:
        """Before a unit is used: drop what was gathered in advance if its parameters have changed since."""
        if unit in self._in_advance and self._in_advance[unit] != unit.shard_version:
            del self._in_advance[unit]
            self._unused.add(unit)
            unit.drop_gathered()

    def follow(self, unit: Unit) -> None:
        """Begin the gather that followed that of `unit` in the last forward pass. Collective."""
        self._in_advance.pop(unit, None)
        if not (self._is_running and unit.is_in_forward):
            return
        self._order.append(unit)
        if unit not in self._former[self._at :]:
            return
        self._at = self._former.index(unit, self._at) + 1
        for following in self._former[self._at : self._at + 1]:
            if following not in self._unused and following.prefetch():
                self._in_advance[following] = following.shard_version

    def close(self) -> None:
        """Observe no more."""
        self._end(self._is_running)
        self._stop()


class Reductions:
    """The reductions of a backward pass that have not ended.

    An error is raised when the pass ends, not earlier: until then this rank gathers as the others do, which would
    wait for it. If the pass raises, they end before its caller goes on, as PyTorch's do.

    Args:
        passes: The backward passes.
        health: Compares the times of passes between ranks, before the first reduction; None if nothing does.
    """

    def __init__(self, passes: BackwardPasses, health: HealthMonitor | None = None) -> None:
        self._passes, self._health = passes, health
        self._pass, self._passed, self._began_ns = -1, 0, 0
        """The number of the latest pass, how many there were before, and the time of its first reduction."""
        self._pending: deque[tuple[Lane[Communicator], Future[None]]] = deque()
        self._error: Exception | None = None

    def begin(self) -> bool:
        """Wait when the running backward pass ends, before what is to be done then; returns whether one runs."""
        number = running_backward()
        if number is not None and number != self._pass and self._health is not None:
            self._pass, now_ns = number, time.perf_counter_ns()
            self._health.step_ended(self._passed, self._began_ns, now_ns)
            self._passed, self._began_ns = self._passed + 1, now_ns
            self._health.gather_rows()
        return self._passes.at_end(self._end_all, self.wait)

    def add(self, lane: Lane[Communicator], future: Future[None]) -> None:
        """Wait for a task at the end of the backward pass; and now for early ones, of which it keeps few.

        Outside of a pass, wait now: pipeline stages reduce there, and read the results at once.
        """
        self._pending.append((lane, future))
        if not self.begin():
            self.wait()
        self._end_all(IN_FLIGHT)

    def wait(self) -> None:
        """Wait for all, and raise the first error among them."""
        self._end_all()
        error, self._error = self._error, None
        if error is not None:
            raise error

    def _end_all(self, latest: int = 0) -> None:
        while len(self._pending) > latest:
            lane, future = self._pending.popleft()
            try:
                lane.result(future)
            except Exception as exc:
                self._error = self._error or exc


def invalidate(x: torch.Tensor) -> None:
    """Fill a result with NaN until it is computed, so that nobody who reads it too early computes with it."""
    x.fill_(torch.nan)
