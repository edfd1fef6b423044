"""Uneven data: a rank without batches takes part in the exchanges of ranks that have some."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from bagua_comm import Communicator, Point

from ..errors import EarlyEndError
from ..tensors.memory import SavedGradients
from .buffers import SharedBuffers
from .engine import TorchEngine
from .exchange import BucketExchange
from .unused import UnusedParameters


@dataclass
class Join:
    """The ranks that have data left, and the exchanges of ranks without data.

    Args:
        comm: The ranks.
        optimizers: The optimizers of the model.
        divide_by_initial_size: Whether sums of gradients are divided by the number of all ranks.
        throws: Whether all ranks stop as soon as one has ended.
        stopping: Called before the error that stops a rank is raised.
    """

    comm: Communicator
    optimizers: Sequence[torch.optim.Optimizer]
    divide_by_initial_size: bool
    throws: bool
    stopping: Callable[[], None]
    active: list[int] = field(default_factory=list)
    """The ranks that had data left in the latest step."""
    scale: float = 1.0
    """The factor that turns the mean of gradients over all ranks into the mean over active ranks."""
    forwards: int = 0
    """The number of training forward passes of this rank in the context."""
    copies: bool = False
    """Whether buffers are due at the end of the latest announced step."""
    freezes: bool = False
    """Whether parameters are frozen in that step."""
    passes: int = 0
    """The number of earlier backward passes of the same step, on ranks with data."""
    weighs: bool = False
    """Whether ranks with data have set weights in that step, or in one before."""

    def announce(
        self,
        engine: TorchEngine,
        *,
        active: bool,
        copies: bool = False,
        freezes: bool = False,
        passes: int = 0,
    ) -> None:
        """Exchange which ranks have data, and the arguments of their step.

        Collective.

        Raises:
            EarlyEndError: With `throws`, some ranks have ended and some have not.
        """
        weighs = engine.mean_weights.are_due
        table = self.comm.allgather(np.array([active, engine.step, copies, freezes, passes, weighs]))
        self.active = [rank for rank in range(self.comm.size) if table[rank, 0]]
        if self.throws and 0 < len(self.active) < self.comm.size:
            self.stopping()
            ended = [rank for rank in range(self.comm.size) if rank not in self.active]
            who = f"rank {ended[0]} has" if len(ended) == 1 else f"ranks {ended} have"
            raise EarlyEndError(
                f"join: {who} no more batches, so all ranks stop, as throw_on_early_termination says"
            )
        self.copies, self.freezes = bool(table[:, 2].any()), bool(table[:, 3].any())
        self.passes, self.weighs = int(table[:, 4].max()), bool(table[:, 5].any())
        if self.active and not self.divide_by_initial_size:  # with weights, ranks without data have the weight 0
            self.scale = 1.0 if self.weighs else self.comm.size / len(self.active)
        while not active and engine.step < table[:, 1].max():
            if engine.phase.lends:
                for optimizer in self.optimizers:  # also updates the shared state
                    optimizer.step()
            else:
                engine.at(Point.STEP)

    def follow(self, exchange: BucketExchange, buffers: SharedBuffers, unused: UnusedParameters) -> list[int]:
        """Take part in the exchanges of ranks that have data left, until none has. Restores `p.grad`.

        Collective.

        Returns:
            The ranks that took part in the last exchange, if this rank had ended before it.
        """
        before = SavedGradients(exchange.memory)
        with exchange.engine.health.without_data():
            last = self._follow(exchange, buffers, unused)
        before.restore()
        buffers.due = True  # the same on all ranks, whatever number of steps each has made
        return last

    def _follow(self, exchange: BucketExchange, buffers: SharedBuffers, unused: UnusedParameters) -> list[int]:
        engine, memory = exchange.engine, exchange.memory
        last: list[int] = []
        zeroed_in = -1
        while True:
            self.announce(engine, active=False)
            if not self.active:
                break
            last = self.active
            if self.weighs:
                engine.weight = 0
            engine.at(Point.FORWARD)
            if engine.payload == "grad":
                # Another backward pass of the same step adds to the averages in the buckets.
                accumulates = zeroed_in == engine.step and bool(self.optimizers)
                zeroed_in = engine.step
                keep = accumulates and self.divide_by_initial_size
                for parameter in memory.parameters.values():
                    parameter.grad = None
                for part in memory.gradients:
                    part.give(zeros=not keep)
                for index in range(len(memory.names)):
                    engine.ready_bucket(index)
            engine.at(Point.BACKWARD)
            if engine.communicates:
                self.fetch(buffers)
            buffers.keep()
            if engine.payload == "weight":
                # Ranks that have data may wait for this exchange before they announce their next step.
                engine.at(Point.STEP)
            exchange.attach_states()
            unused.follow_pass(self.passes, engine, freezes=self.freezes)
        return last

    def fetch(self, buffers: SharedBuffers) -> None:
        """At the end of a backward pass, get the buffers of a rank that has data, if they are due. Collective."""
        buffers.fetch_if(self.copies, root=self.active[0])

    def furthest(self, last: Sequence[int], steps: int) -> int:
        """The rank whose weights all ranks get at the end.

        Collective. Weights may differ even if all ranks ended together, as after steps in `no_sync`.

        Args:
            last: The result of `follow`.
            steps: The number of optimizer steps that this rank made with its own data.
        """
        table = self.comm.allgather_object((last, steps, self.forwards))
        candidates = {rank for ranks, _, _ in table for rank in ranks} or range(self.comm.size)
        return max(candidates, key=lambda rank: (*table[rank][1:], -rank))
