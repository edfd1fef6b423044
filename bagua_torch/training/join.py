"""Uneven data: a rank that has no more batches takes part in the exchanges of those that have."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from bagua_comm import Communicator, Point
from bagua_comm.algorithms.base import with_defaults

from ..engine import TorchEngine
from ..errors import EarlyEndError
from ..memory import BucketMemory, KeptGradients
from ..sharded import check_join


@dataclass
class Join:
    """Which ranks have data left, and what a rank without data does meanwhile.

    Args:
        comm: The ranks.
        optimizers: The optimizers of the model.
        divide_by_initial_size: Whether sums of gradients are divided by the number of all ranks.
        throws: Whether all ranks are to stop as soon as one has ended.
        stopping: Called before the error that makes a rank stop is raised.
    """

    comm: Communicator
    optimizers: Sequence[torch.optim.Optimizer]
    divide_by_initial_size: bool
    throws: bool
    stopping: Callable[[], None]
    active: list[int] = field(default_factory=list)
    """The ranks that had data left in the latest step."""
    scale: float = 1.0
    """The factor of gradients, by which their mean over all ranks becomes the mean over the active ones."""
    forwards: int = 0
    """The training forward passes that this rank made here."""
    copies: bool = False
    """Whether buffers are due at the end of the latest step that a rank with data has announced."""
    freezes: bool = False
    """Whether parameters are frozen in that step."""
    passes: int = 0
    """How many backward passes of the same step came before, on ranks with data."""

    def __post_init__(self) -> None:
        if self.comm.size > 1 and not self.throws:
            check_join(self.optimizers)

    def announce(
        self,
        engine: TorchEngine,
        *,
        active: bool,
        copies: bool = False,
        freezes: bool = False,
        passes: int = 0,
    ) -> None:
        """Tell the other ranks whether this one has data, and learn which of them have.

        Collective. What ranks that have data say of their step becomes known to all.

        Raises:
            EarlyEndError: Some ranks have ended and some have not, and all are to stop then.
        """
        table = self.comm.allgather(np.array([active, engine.step, copies, freezes, passes]))
        self.active = [rank for rank in range(self.comm.size) if table[rank, 0]]
        if self.throws and 0 < len(self.active) < self.comm.size:
            self.stopping()
            ended = [rank for rank in range(self.comm.size) if rank not in self.active]
            who = f"rank {ended[0]} has" if len(ended) == 1 else f"ranks {ended} have"
            raise EarlyEndError(
                f"join: {who} no more batches, so all ranks stop, as throw_on_early_termination says"
            )
        self.copies, self.freezes = bool(table[:, 2].any()), bool(table[:, 3].any())
        self.passes = int(table[:, 4].max())
        if self.active and not self.divide_by_initial_size:
            self.scale = self.comm.size / len(self.active)
        while not active and engine.step < table[:, 1].max():
            if with_defaults(engine.phase).lends:
                for optimizer in self.optimizers:  # what it borrows is its own to keep
                    optimizer.step()
            else:
                engine.at(Point.STEP)

    def follow(
        self,
        engine: TorchEngine,
        memory: BucketMemory,
        *,
        copy_buffers: Callable[[], None],
        exchanged: Callable[[], None],
    ) -> list[int]:
        """Take part in the exchanges of ranks that have data left, until none has. `p.grad` is then as it was.

        Collective.

        Args:
            engine: Exchanges the buckets.
            memory: The memory of the buckets.
            copy_buffers: Called when the backward pass of a step has ended.
            exchanged: Called at the end of each step.

        Returns:
            The ranks that took part in the last exchange, if this rank had ended before it.
        """
        before = KeptGradients(memory)
        last: list[int] = []
        zeroed_in = -1
        while True:
            self.announce(engine, active=False)
            if not self.active:
                break
            last = self.active
            engine.at(Point.FORWARD)
            if engine.payload == "grad":
                # A further backward pass of the same step adds to the averages that are in the buckets.
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
            copy_buffers()
            if engine.payload == "weight":
                # Ranks that have data may wait for this exchange before they announce their next step.
                engine.at(Point.STEP)
            exchanged()
        before.put_back()
        return last

    def furthest(self, last: Sequence[int], steps: int) -> int:
        """The rank whose weights all ranks are to have at the end.

        Collective. Weights may differ even if no rank had to wait for another one: after steps in `no_sync`, say.

        Args:
            last: What `follow` returned.
            steps: How many optimizer steps this rank made by itself.
        """
        table = self.comm.allgather_object((last, steps, self.forwards))
        candidates = {rank for ranks, _, _ in table for rank in ranks} or range(self.comm.size)
        return max(candidates, key=lambda rank: (*table[rank][1:], -rank))
