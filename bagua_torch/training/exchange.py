"""The buckets of a model, and the engine that exchanges them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from bagua_comm import Algorithm, Communicator, Plan
from bagua_comm.algorithms.base import core_of, needs_groups
from bagua_comm.engine import EngineCallbacks
from bagua_comm.objects.pickling import Live
from bagua_comm.trace import ExchangeCounters

from ..optimizers import FusedOptimizer
from ..tensors.broadcast import broadcast_tensors
from ..tensors.memory import BucketMemory, pack, specs_of
from ..tensors.model_state import ModelState
from .engine import TorchEngine, average_tensors


class BucketExchange(Live):
    """The memory of a model's buckets, and the engine that exchanges them.

    Collective.

    Args:
        comm: The ranks.
        model: The parameters and buffers that all ranks share.
        optimizers: The optimizers of the model.
        algorithm: What to exchange and when.
        bucket_bytes: The size at which a bucket is closed.
        device: The device of the parameters.
        in_buckets: Whether `p.grad` is a part of its bucket.
        callbacks: Functions of the training program for each engine.
    """

    def __init__(
        self,
        comm: Communicator,
        model: ModelState,
        optimizers: Sequence[torch.optim.Optimizer],
        algorithm: Algorithm,
        bucket_bytes: int,
        device: torch.device,
        *,
        in_buckets: bool,
        callbacks: EngineCallbacks,
    ) -> None:
        self.comm, self.model, self.optimizers, self.device = comm, model, optimizers, device
        self.bucket_bytes = bucket_bytes
        self._callbacks = callbacks
        self.sharing: list[Any] = [each for each in optimizers if getattr(each, "shares_state", "")]
        """The optimizers that can share state with an algorithm."""
        self._past = ExchangeCounters()  # of earlier engines
        self.memory = BucketMemory(model.trained, self.plan_for(algorithm, bucket_bytes), in_buckets=in_buckets)
        self._start(algorithm)

    def plan_for(self, algorithm: Algorithm, bucket_bytes: int) -> Plan:
        """The buckets in which the parameters are packed for this algorithm."""
        return pack(self.model.trained, algorithm, bucket_bytes, self.comm.size)

    def plan_to_switch(self, algorithm: Algorithm) -> Plan:
        """The buckets with which `switch` continues: the present ones, unless `algorithm` needs groups."""
        plan = self.plan_for(algorithm, self.bucket_bytes)
        return plan if needs_groups(algorithm, specs_of(self.model.trained)) else self.memory.plan

    def _start(self, algorithm: Algorithm) -> None:
        """Construct the engine for `algorithm`, and allocate missing memory. Collective."""
        self.memory.provide({phase.payload for phase in algorithm.phases})
        self.engine = TorchEngine(self.comm, algorithm, self.memory, self.device, self._callbacks)

    @property
    def counters(self) -> ExchangeCounters:
        """The sums over all engines so far."""
        return self._past + self.engine.counters

    @property
    def alone(self) -> bool:
        """Whether this rank trains as a single process: there are no others, or the engine is stopped."""
        return self.comm.size == 1 or self.engine.stopped

    @property
    def averages_gradients(self) -> bool:
        """Whether this step averages gradients over several ranks."""
        return self.comm.size > 1 and self.engine.payload == "grad" and self.engine.communicates

    def switch(self, algorithm: Algorithm) -> None:
        """Continue with another algorithm, after the engine of the last one was closed. Collective."""
        self._past += self.engine.counters
        plan = self.plan_to_switch(algorithm)
        if plan != self.memory.plan:
            self.reclaim()
            memory = BucketMemory(self.model.trained, plan, in_buckets=self.memory.in_buckets)
            memory.copy(self.memory)
            self.memory = memory
        weight = self.engine.mean_weights.unused
        self._start(algorithm)
        self.flatten()
        self.attach_states()
        if weight is not None:
            self.engine.weight = weight

    def replan(self, bucket_bytes: int, algorithm: Algorithm) -> None:
        """Continue with other buckets, and the same algorithm with other settings. Collective."""
        self.reclaim()
        plan = self.plan_for(algorithm, bucket_bytes)
        memory = BucketMemory(self.model.trained, plan, in_buckets=self.memory.in_buckets)
        for payload in {phase.payload for phase in algorithm.phases}:
            memory.allocate(payload)
        self.engine.move(memory, algorithm)
        memory.replace(self.memory)
        self.memory, self.bucket_bytes = memory, bucket_bytes
        self.attach_states()
        self.flatten()

    def extended_plan(self, unfrozen: Mapping[str, nn.Parameter]) -> Plan:
        """The present buckets, and additional ones for these parameters."""
        more = pack(unfrozen, self.engine.algorithm, self.bucket_bytes, self.comm.size)
        return replace(self.memory.plan, buckets=(*self.memory.plan.buckets, *more.buckets))

    def extend(self, unfrozen: Mapping[str, nn.Parameter]) -> None:
        """Add buckets for parameters that were frozen until now. Collective."""
        if not self.engine.awaits(unfrozen):  # otherwise loaded weights, which may differ between ranks
            broadcast_tensors(self.comm, list(unfrozen.values()), root=0)
        self.model.train(unfrozen)
        self.memory.extend(self.extended_plan(unfrozen))
        self.engine.extend()
        self.flatten()

    def hold(self) -> None:
        """Keep the gradients in `p.grad` as one addend of the next mean, and set them to zero."""
        self.memory.collect()
        self.engine.hold()
        self.memory.spread()

    def average_weights(self) -> None:
        """Set the weights of all ranks to their mean. Collective."""
        average_tensors(self.comm, self.model.trained.values(), self.device)
        self.engine.keep_weights()

    def reclaim(self) -> None:
        """Move weights back to the buckets, before an exchange, if user code has replaced their memory."""
        if self.memory.strayed:
            self.engine.settle()
            self.memory.reclaim()

    def attach_states(self) -> None:
        """Let optimizers share the state of the algorithm; repeat it after they have loaded a state."""
        if not self.sharing:
            return
        engine, trained = self.engine, self.model.trained
        phase, shared = engine.phase, engine.shared_state()
        tensors = {trained[name]: tensor for name, tensor in shared.items()}
        for optimizer in self.sharing:
            if optimizer.shares_state == phase.lends:
                step = engine.buckets[0].step
                optimizer.attach(trained.values(), tensors, algorithm=core_of(phase), step=step)
            else:
                optimizer.detach(trained.values())

    def detach_states(self) -> None:
        """Give optimizers states of their own from now on."""
        for optimizer in self.sharing:
            optimizer.detach(self.model.trained.values())
        self.sharing.clear()

    def flatten(self) -> None:
        """Let fused optimizers move parameters now, so that all forward passes find them at the same addresses.

        A matrix product on the CPU may round by the address of a weight. A rank that joins in the middle of a
        training must compute the same as the other ranks.
        """
        fused = [optimizer for optimizer in self.optimizers if isinstance(optimizer, FusedOptimizer)]
        if fused:
            fresh = self.memory.attach_all()
            for optimizer in fused:
                optimizer.flatten()
            for name in fresh:
                self.model.trained[name].grad = None
