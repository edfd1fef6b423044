"""A training step on this rank, from one forward pass to the optimizers' step: what is exchanged when.

Whatever happens in a step comes in here: the wrapper says that a forward pass begins, the watch follows the
backward pass, and hooks tell of the optimizers.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from enum import Enum
from typing import Any

import torch

from bagua_comm import Algorithm, Communicator, Point
from bagua_comm.algorithms.base import complete, core_of, phases_of
from bagua_comm.pickling import Live
from bagua_comm.trace import ExchangeCounters

from . import checks
from .backward import BackwardWatch
from .contents import Contents
from .engine import BackwardSpan, TorchEngine, average_tensors
from .flats import lay_out_state
from .fused import FusedOptimizer
from .join import Join
from .memory import BucketMemory, pack
from .unused import UnusedParameters
from .wrapping import WeakCall, release


class Stage(Enum):
    """How far this rank is in a training step.

    A training forward pass opens a step, the end of its backward pass averages it, and the optimizers end it:

        IDLE -> OPEN -> AVERAGED -> IDLE

    Gradients may be averaged several times before the optimizers step: AVERAGED -> OPEN_AGAIN -> AVERAGED. If the
    optimizers step before that further backward pass, OPEN_AGAIN -> TOLD; the next forward pass opens the step.
    """

    IDLE = "no training forward pass since the optimizers stepped"
    OPEN = "the other ranks know of a forward pass; its backward pass has not ended"
    AVERAGED = "the backward pass has ended; the optimizers may step"
    OPEN_AGAIN = "averaged, and the other ranks know of a further forward pass"
    TOLD = "the optimizers stepped; the other ranks know of a forward pass that this rank made before"
    CLOSED = "this wrapper exchanges nothing any more"


class TrainingSteps(Live):
    """The steps in which a model is trained: hooks, buckets and engine, and how far the present step is.

    Collective. It hangs its hooks on the module and the optimizers, which hold it weakly.

    Args:
        comm: The ranks.
        contents: What is trained.
        optimizers: The optimizers of the model.
        algorithm: What to exchange and when.
        bucket_bytes: The size at which a bucket is closed.
        device: Where the parameters are.
        find_unused: Whether to take away gradients that no rank has computed.
        static: Whether the same parameters get a gradient in every step.
        in_buckets: Whether gradients lie in their buckets.
    """

    def __init__(
        self,
        comm: Communicator,
        contents: Contents,
        optimizers: Sequence[torch.optim.Optimizer],
        algorithm: Algorithm,
        bucket_bytes: int,
        device: torch.device,
        *,
        find_unused: bool,
        static: bool,
        in_buckets: bool = True,
    ) -> None:
        self.comm, self.contents, self.optimizers, self.device = comm, contents, optimizers, device
        self.stage = Stage.IDLE
        self.averages = 0
        """How many backward passes were averaged."""
        self.join: Join | None = None
        """Which ranks have data left, in `join`."""
        self.find_unused, self.static = find_unused, static
        self._stepped: set[int] = set()  # optimizers that stepped since the last backward pass
        self.opens_late = False
        """Whether the latest forward pass ran in evaluation mode, and so told no other rank of itself."""
        self._fresh: set[str] = set()  # parameters without a gradient before the backward pass under way
        self._trained = contents.trained
        self._unused = UnusedParameters(comm, self._trained)
        plan = pack(self._trained, bucket_bytes, comm.size)
        self.memory = BucketMemory(self._trained, plan, in_buckets=in_buckets)
        self._past = ExchangeCounters()
        """Of the engines before this one."""
        self.start(algorithm)
        self.span = BackwardSpan(comm.tracer, device)
        self.watch = BackwardWatch(
            self._trained,
            self.memory.names,
            began=self._begin_backward,
            before=self._before_gradient,
            after=self._send,
            ended=self._end_backward,
        )
        self._hooks: list[Any] = []
        self._attach()
        self._lay_out()

    def start(self, algorithm: Algorithm) -> None:
        """Make the engine for `algorithm`, and what memory it needs.

        Collective.
        """
        self.memory.provide({phase.payload for phase in phases_of(algorithm)})
        self.engine = TorchEngine(self.comm, algorithm, self.memory, self.device)
        self.engine.wrapper = weakref.ref(self)
        self.memory.commits = 0

    def switch(self, algorithm: Algorithm) -> None:
        """Go on with another algorithm, once the engine of the last one is closed.

        Collective.
        """
        self._past += self.engine.counters
        self.start(algorithm)
        self._lay_out()

    @property
    def counters(self) -> ExchangeCounters:
        """What all engines so far have exchanged."""
        return self._past + self.engine.counters

    def move(self, bucket_bytes: int, algorithm: Algorithm) -> None:
        """Go on with other buckets, and the same algorithm with other settings.

        Collective.
        """
        self._reclaim()
        plan = pack(self._trained, bucket_bytes, self.comm.size)
        memory = BucketMemory(self._trained, plan, in_buckets=self.memory.in_buckets)
        for payload in {phase.payload for phase in phases_of(algorithm)}:
            memory.allocate(payload)
        self.engine.move(memory, algorithm)
        memory.replace(self.memory)
        self.memory = memory
        self.watch.regroup(memory.names)
        self.note_new_weights()
        self.lend()
        self._lay_out()

    def close(self) -> None:
        """Finish what is under way, remove the hooks and free the engine. Closing twice does nothing.

        Collective.
        """
        if self.stage is Stage.CLOSED:
            return
        try:
            self.complete()
            self.engine.close()
            self.note_new_weights()
        finally:
            self.detach()

    def detach(self) -> None:
        """Leave the module and the optimizers to themselves; the other ranks hear nothing of it."""
        if self.stage is Stage.CLOSED:
            return
        self.stage = Stage.CLOSED
        self._release.detach()
        self.watch.remove()
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()
        self.lend()

    # What happens in a step, in this order ----------------------------------------------------------------

    def check(self) -> None:
        """Raise unless a training forward pass may begin; `join` counts it."""
        checks.check_open(self.stage is Stage.CLOSED)
        checks.check_backward_ended(self.watch.unfinished)
        checks.check_unchanged(self.contents)
        self._reclaim()
        self.memory.check()
        if self.join is not None:
            self.join.forwards += 1

    def finish(self) -> None:
        """End the step before, if only some of the optimizers stepped, or if it was left out on this rank."""
        if self._stepped:
            self._end()
        self.complete()

    def open(self, *, copy_buffers: bool) -> None:
        """Tell the other ranks of a forward pass, and take over the buffers of one.

        Collective. Once per backward pass: what an earlier forward pass saved for it must not change.
        """
        self.stage = Stage.OPEN_AGAIN if self.stage is Stage.AVERAGED else Stage.OPEN
        if self.join is not None:
            self.join.announce(self.engine, active=True)
        if copy_buffers and not self.engine.stopped:
            root = self.join.active[0] if self.join is not None else 0
            self.contents.copy_buffers(self.comm, root=root)

    def begin_forward(self) -> None:
        """A training forward pass begins. Collective."""
        if self.stage is Stage.TOLD:
            self.stage = Stage.OPEN
        self.lend()
        self.engine.at(Point.FORWARD)
        self.note_new_weights()

    def _begin_backward(self) -> None:
        """Let autograd accumulate into the buckets. Collective after a forward pass in evaluation mode."""
        self.span.begin()
        if self.opens_late:  # the step is one of training after all
            self.opens_late = False
            self._open_late()
        self._fresh |= self.memory.attach_all()

    def _open_late(self) -> None:
        """Tell the other ranks of a forward pass in evaluation mode, now that its backward pass has begun.

        Collective. Buffers stay as they are: evaluation mode changes none.
        """
        if self.stage in (Stage.OPEN, Stage.OPEN_AGAIN):
            return  # by a training forward pass before
        self.check()
        if self.stage is not Stage.TOLD:
            self.finish()
            self.open(copy_buffers=False)
        self.begin_forward()

    def _before_gradient(self, name: str) -> None:
        """Let autograd accumulate into the bucket in a pass that averages nothing, too."""
        if self._trained[name].grad is None:  # else it may be in the bucket of another wrapper
            self.memory.attach(name)

    def _send(self, index: int) -> None:
        """Hand a bucket to the engine whose gradients are complete."""
        self.memory.attach_bucket(index)  # create_graph=True replaces p.grad
        if self.join is not None and self.join.scale != 1 and self.engine.payload == "grad":
            # The mean over all ranks becomes the mean over those that have data: before the gradients are sent,
            # as an algorithm may average more than these.
            self.memory.flats["grad"][index].mul_(self.join.scale)
        self.engine.ready_bucket(index)

    def _end_backward(self, complete: set[str], inner: bool) -> None:
        """Send what is left, and wait for the averages; on a device, the host does not wait. Collective.

        Args:
            complete: The parameters that got a gradient.
            inner: Whether another backward pass started this one and goes on.
        """
        self.span.end(parameters=len(complete))
        fresh = []
        if self.engine.payload == "grad" and len(complete) < len(self._trained):
            self._fresh |= self.memory.attach_all()
            fresh = sorted(self._fresh - complete)
            for index, names in enumerate(self.memory.names):
                if not complete.issuperset(names):
                    self._send(index)  # so that no rank waits for it
        self._fresh.clear()
        self.engine.at(Point.BACKWARD)
        if self.engine.payload == "grad":
            self.memory.spread()
        self.note_new_weights()
        self.lend()
        self.stage = Stage.AVERAGED
        self.averages += 1
        self._stepped.clear()
        self._forget_unused(fresh, inner=inner)
        if self.static:
            self._unused.compare(complete, inner=inner)

    def hold(self) -> None:
        """Keep the gradients in `p.grad` as one addend of the next mean, and leave zeros."""
        self.memory.collect()
        self.engine.hold()
        self.memory.spread()

    def _forget_unused(self, fresh: Sequence[str], *, inner: bool = False) -> None:
        if self.engine.payload == "grad" and (self.find_unused or self.static) and not self.engine.stopped:
            self._unused.forget(fresh, static=self.static, inner=inner)

    def end_backward(self) -> None:
        """Complete a backward pass that reached no parameter. Collective."""
        if self.stage is Stage.OPEN:
            self.watch.end()

    def _before_optimizer_step(self, *_: Any) -> None:
        """A backward pass that reached no parameter ran no hook: complete it, as other ranks do."""
        checks.check_backward_ended(self.watch.unfinished)
        self.end_backward()
        self.engine.settle()  # if this step was counted already
        self._reclaim()

    def _after_optimizer_step(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        self._stepped.add(id(optimizer))
        averaged = self.stage in (Stage.AVERAGED, Stage.OPEN_AGAIN)
        if len(self._stepped) == len(self.optimizers) and (averaged or self.engine.payload == "grad"):
            self._end()

    def _end(self) -> None:
        self.stage = Stage.TOLD if self.stage in (Stage.OPEN_AGAIN, Stage.TOLD) else Stage.IDLE
        self._stepped.clear()
        self._reclaim()
        self.engine.at(Point.STEP)
        self.note_new_weights()

    def complete(self) -> None:
        """Where weights are exchanged, end a step in which the optimizers did not step (a GradScaler found inf).

        Collective.
        """
        if self.stage is Stage.AVERAGED and self.engine.payload == "weight":
            self._end()

    def make_equal(self) -> None:
        """Make the weights of all ranks their mean, and buffers and optimizers rank 0's.

        Collective.
        """
        average_tensors(self.comm, self._trained.values(), self.device)
        self.contents.copy_buffers(self.comm)
        self.contents.copy_optimizers(self.comm, self.optimizers)
        self.lend()

    def forget(self) -> None:
        """What comes next is a new step."""
        self.watch.reset()
        self.span.forget()
        self.stage = Stage.CLOSED if self.stage is Stage.CLOSED else Stage.IDLE
        self._stepped.clear()
        self.note_new_weights()

    def follow(self, join: Join, *, copy_buffers: bool) -> list[int]:
        """Take part in the steps of ranks that have data left; see `Join.follow`. Collective."""

        def buffers(root: int) -> None:
            if copy_buffers:
                self.contents.copy_buffers(self.comm, root=root)

        def exchanged() -> None:
            self.lend()
            self._forget_unused(list(self._trained))

        self.complete()
        last = join.follow(self.engine, self.memory, copy_buffers=buffers, exchanged=exchanged)
        self.note_new_weights()
        return last

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def _settle(self, *_: Any) -> None:
        """Before the module runs, saves or loads: write back what was exchanged since the last step."""
        if not self.contents.module.training:
            self.complete()
        self.engine.settle()
        self.note_new_weights()

    def _reclaim(self) -> None:
        """Before weights are exchanged: have them in the buckets, where somebody has moved them."""
        if self.memory.strayed:
            self.engine.settle()
            self.note_new_weights()
            self.memory.reclaim()

    def note_new_weights(self) -> None:
        """Tell autograd of weights that the engine has written."""
        self.memory.note(self.engine.commits)

    def lend(self) -> None:
        """Let optimizers use what the algorithm lends; from now on, or again after they have loaded a state."""
        lent = "" if self.stage is Stage.CLOSED else complete(self.engine.phase).lends
        tensors = {self._trained[name]: tensor for name, tensor in self.engine.lent().items()} if lent else {}
        for optimizer in self._borrowers():
            if optimizer.borrows == lent:
                step = self.engine.buckets[0].step
                optimizer.borrow(self._trained.values(), tensors, lender=core_of(self.engine.phase), step=step)
            else:
                optimizer.give_back(self._trained.values())

    def _borrowers(self) -> list[Any]:
        return [optimizer for optimizer in self.optimizers if getattr(optimizer, "borrows", "")]

    def _lay_out(self) -> None:
        """Let fused optimizers move parameters now, so that all forward passes find them at the same places.

        A matrix product on the CPU may round by the address of a weight. A rank that joins in the middle of a
        training must compute what the others compute.
        """
        fused = [optimizer for optimizer in self.optimizers if isinstance(optimizer, FusedOptimizer)]
        if fused:
            fresh = self.memory.attach_all()
            for optimizer in fused:
                optimizer.lay_out()
            for name in fresh:
                self._trained[name].grad = None

    def _attach(self) -> None:
        """Hang the hooks on the module and the optimizers."""

        def hook(method: Any) -> WeakCall:
            return WeakCall(method, self._hooks)

        for optimizer in self.optimizers:
            self._hooks.append(optimizer.register_step_pre_hook(hook(self._before_optimizer_step)))
            self._hooks.append(optimizer.register_step_post_hook(hook(self._after_optimizer_step)))
            self._hooks.append(optimizer.register_load_state_dict_post_hook(lay_out_state))
        for register in (
            self.contents.module.register_forward_pre_hook,
            self.contents.module.register_state_dict_pre_hook,
            self.contents.module.register_load_state_dict_pre_hook,
        ):
            self._hooks.append(register(hook(self._settle)))
        # What must be undone once nobody holds the wrapper, whenever that happens on this rank.
        borrowers = [weakref.ref(optimizer) for optimizer in self._borrowers()]
        parameters = [weakref.ref(parameter) for parameter in self._trained.values()]
        self._release = weakref.finalize(self, release, self.watch, borrowers, parameters)
        self._release.atexit = False
