"""A training step on this rank, from one forward pass to the optimizers' step: what is exchanged when.

Whatever happens in a step comes in here: the wrapper says that a forward pass begins, the watch follows the
backward pass, and hooks tell of the optimizers.
"""

from __future__ import annotations

import weakref
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from bagua_comm import Algorithm, Communicator, Point
from bagua_comm.algorithms.base import exchanges_weights, phases_of
from bagua_comm.pickling import Live
from bagua_comm.trace import ExchangeCounters

from .. import checks
from ..broadcast import broadcast_tensors
from ..engine import BackwardSpan, TorchEngine, average_tensors
from ..memory import BucketMemory, extended, pack
from ..model_state import Contents
from . import unfreezing
from .backward import BackwardWatch, at_the_end_of_the_pass
from .buffers import SharedBuffers
from .hooks import Hooks, WeakCall, release_when_gone
from .join import Join
from .optimizers import flatten, lend, sharing_optimizers
from .stage import Stage
from .unused import UnusedParameters
from .versions import WeightVersions


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
        self.copies_buffers = True
        """Whether buffers are to be alike on all ranks."""
        self.buffers = SharedBuffers(comm, contents)
        self._stepped: set[int] = set()  # optimizers that stepped since the last backward pass
        self.opens_late = False
        """Whether the latest forward pass ran in evaluation mode, and so told no other rank of itself."""
        self.passes = 0
        """How many backward passes of this step were averaged."""
        self.called = self._called = False
        """Whether the module is called by the wrapper, in a forward pass whose backward passes are averaged."""
        self.hooked = not isinstance(contents.module, torch.jit.ScriptModule)
        """Whether the module takes hooks; else the wrapper calls `settle` and `returned`."""
        self._fresh: set[str] = set()  # parameters without a gradient before the backward pass under way
        self._trained, self.bucket_bytes = contents.trained, bucket_bytes
        self.unused = UnusedParameters(comm, self._trained, find=find_unused, static=static)
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
            came=self._come_by,
        )
        self._versions = WeightVersions(self._trained)
        self._hooks = Hooks()
        self._attach()
        self._flatten()

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
        self.buffers.due = True  # ranks agree, however many steps each has made while stopped
        self.start(algorithm)
        self._flatten()

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
        self.memory, self.bucket_bytes = memory, bucket_bytes
        self.watch.regroup(memory.names)
        self.note_new_weights()
        self.lend()
        self._flatten()

    def _begin_to_train(self, unfrozen: Mapping[str, torch.nn.Parameter], *, late: bool) -> None:
        """Train parameters that were frozen until now, in further buckets; see `unfreezing`. Collective."""
        apart = self.join is not None or self.engine.stopped
        unfreezing.check_together(unfrozen, self.engine.algorithm, apart=apart, late=late)
        opened = self.stage not in (Stage.IDLE, Stage.AVERAGED)
        given = self._trained, self.optimizers, self.bucket_bytes
        unfreezing.agree(unfrozen, self.engine, *given, opened=opened)
        if not self.engine.awaits(unfrozen):  # else their weights were loaded, and may differ between ranks
            broadcast_tensors(self.comm, list(unfrozen.values()), root=0)
        self.contents.train(unfrozen)
        self.memory.extend(extended(self.memory.plan, unfrozen, self.bucket_bytes, self.comm.size))
        self.engine.extend()
        self.watch.add(unfrozen, self.memory.names)
        self._versions = WeightVersions(self._trained)
        self.unused.begin_anew()
        self.note_new_weights()
        self._flatten()

    def close(self) -> None:
        """Finish what is under way, remove the hooks and free the engine. Closing twice does nothing.

        Collective.
        """
        if self.stage is Stage.CLOSED:
            return
        try:
            self.complete()
            together = not self.engine.stopped
            self.engine.close()
            self.note_new_weights()
            if together:
                self.share_buffers()
        finally:
            self.detach()

    def stop(self) -> None:
        """Finish what is under way, and exchange nothing until `resume`; stopping twice does nothing.

        Collective.
        """
        if not self.engine.stopped:
            self.complete()
            self.engine.stop()
            self.note_new_weights()
            self.share_buffers()

    def resume(self) -> None:
        """Go on after `stop`.

        Collective. A step that this rank has not ended meanwhile ends, since other ranks may have none to end.
        """
        if self.engine.stopped:
            self.finish()
            self.engine.resume()
            self.buffers.due = True  # on all ranks, however many steps each has made

    def detach(self) -> None:
        """Leave the module and the optimizers to themselves; the other ranks hear nothing of it."""
        if self.stage is Stage.CLOSED:
            return
        self.stage = Stage.CLOSED
        self._release.detach()
        self.watch.remove()
        self._hooks.remove()
        self.lend()

    # What happens in a step, in this order ----------------------------------------------------------------

    def check(self, *, in_forward: bool = True) -> None:
        """Raise unless a training forward pass may begin; `join` counts it. Collective after unfreezing."""
        checks.check_open(self.stage is Stage.CLOSED)
        checks.check_backward_ended(self.watch.unfinished)
        if unfrozen := checks.check_unchanged(self.contents):
            self._begin_to_train(unfrozen, late=not in_forward)
        self._reclaim()
        self.memory.check()
        if self.watch.strays and not self.optimizers and self._averages_gradients:
            checks.check_none_stepped(self.watch.strays, self._trained)
        if self.join is not None:
            self.join.forwards += 1

    def begin_step(self) -> None:
        """What comes next is a new step, or the same gradients accumulated further. Collective."""
        self.finish()
        self.passes = 0

    def finish(self) -> None:
        """End the step before, if only some of the optimizers stepped, or if it was left out on this rank."""
        if self._stepped:
            self._end()
        self.complete()

    def open(self) -> None:
        """Tell the other ranks of a forward pass. Collective."""
        self.stage = Stage.OPEN_AGAIN if self.stage is Stage.AVERAGED else Stage.OPEN
        if self.join is not None:
            freezes = not all(parameter.requires_grad for parameter in self._trained.values())
            self.join.announce(
                self.engine, active=True, copies=self.buffers.due, freezes=freezes, passes=self.passes
            )

    def begin_forward(self) -> None:
        """A training forward pass begins. Collective."""
        if self.stage is Stage.TOLD:
            self.stage = Stage.OPEN
        self.lend()
        self.engine.at(Point.FORWARD)
        self.note_new_weights()

    def _come_by(self) -> None:
        """A backward pass has come to an output; it may be a further one of its forward pass."""
        self.buffers.give_back()
        at_the_end_of_the_pass(self.buffers.put)

    def _begin_backward(self) -> None:
        """Let autograd accumulate into the buckets. Collective if no training forward pass came before."""
        self.span.begin()
        if self.stage not in (Stage.OPEN, Stage.OPEN_AGAIN):
            self._open_late()
        self._versions.begin(self.memory.names)
        self._fresh |= self.memory.attach_all()

    def _open_late(self) -> None:
        """Tell the other ranks of a backward pass that has begun without a training forward pass of its own.

        Collective. It comes through another output of a forward pass, or after one in evaluation mode.
        """
        further = self.stage is Stage.AVERAGED and not self.opens_late
        self.opens_late = False
        if further and self.engine.payload == "weight":
            return  # weights are exchanged once in a step, and gradients stay on this rank
        self.check(in_forward=False)
        self.buffers.due |= self.contents.module.training  # checkpoints run parts of the module once more
        if self.stage is not Stage.TOLD:
            if not further:
                self.begin_step()
            self.open()
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
        stepped = self._versions.changed()
        fresh = []
        if self.engine.payload == "grad" and len(complete) < len(self._trained):
            self._fresh |= self.memory.attach_all()
            fresh = sorted(self._fresh - complete)
            for index, names in enumerate(self.memory.names):
                if not complete.issuperset(names):
                    self._send(index)  # so that no rank waits for it
        elif self.engine.payload == "weight":
            fresh = sorted(self._fresh - complete)
        self._fresh.clear()
        self.engine.at(Point.BACKWARD)
        if self.engine.payload == "grad":
            self.memory.spread()
        self.note_new_weights()
        self.lend()
        self.stage = Stage.AVERAGED
        self.averages += 1
        self._stepped.clear()
        self.watch.strays.clear()  # the buckets held those, too
        self._fetch_buffers()
        if not inner:
            at_the_end_of_the_pass(self.buffers.put)
        checks.check_not_stepped(stepped)
        freezes = None if self.join is None else self.join.freezes
        self.unused.end_pass(fresh, self.passes, self.engine, freezes=freezes, inner=inner)
        if self.unused.static:
            self.unused.compare(complete, self.passes, inner=inner)
        self.passes += not inner

    def _fetch_buffers(self) -> None:
        """At the end of a backward pass, get the buffers of one rank, if they are due and ranks exchange at all.

        Collective.
        """
        if self.copies_buffers and self.engine.communicates:
            if self.join is None:
                self.buffers.fetch_if(self.buffers.due, root=0)
            else:
                self.buffers.fetch_if(self.join.copies, root=self.join.active[0])

    def copy_buffers(self) -> None:
        """Give all ranks the buffers of rank 0, if they are to be alike. Collective."""
        if self.copies_buffers:
            self.buffers.copy()

    def share_buffers(self) -> None:
        """Do so where an algorithm may have left them apart. Collective.

        Whether they are due may differ between ranks: after steps in `join`, and while they were stopped.
        """
        if exchanges_weights(self.engine.algorithm):
            self.copy_buffers()

    def hold(self) -> None:
        """Keep the gradients in `p.grad` as one addend of the next mean, and leave zeros."""
        self.memory.collect()
        self.engine.hold()
        self.memory.spread()

    @property
    def _averages_gradients(self) -> bool:
        return self.comm.size > 1 and self.engine.payload == "grad" and self.engine.communicates

    def end_backward(self) -> None:
        """Complete a backward pass that reached no parameter. Collective."""
        if self.stage is Stage.OPEN:
            self.watch.end()

    def _before_optimizer_step(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        """A backward pass that reached no parameter ran no hook: complete it, as other ranks do."""
        checks.check_not_within_backward()
        checks.check_backward_ended(self.watch.unfinished)
        self.end_backward()
        if self.watch.strays and self._averages_gradients:
            checks.check_averaged(self.watch.strays, self._trained, optimizer)
        self.engine.settle()  # if this step was counted already
        self._reclaim()

    def _after_optimizer_step(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        self._stepped.add(id(optimizer))
        averaged = self.stage in (Stage.AVERAGED, Stage.OPEN_AGAIN)
        if len(self._stepped) == len(self.optimizers) and (averaged or self.engine.payload == "grad"):
            self._end()

    def _end(self) -> None:
        self.stage = Stage.TOLD if self.stage in (Stage.OPEN_AGAIN, Stage.TOLD) else Stage.IDLE
        self.passes = 0
        self._stepped.clear()
        self._reclaim()
        self.buffers.keep()
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
        self.copy_buffers()
        self.contents.copy_optimizers(self.comm, self.optimizers)
        self.lend()

    def forget(self) -> None:
        """What comes next is a new step."""
        self.watch.reset()
        self.watch.strays.clear()
        self.buffers.due = False
        self.span.forget()
        self.stage = Stage.CLOSED if self.stage is Stage.CLOSED else Stage.IDLE
        self.passes = 0
        self._stepped.clear()
        self.note_new_weights()

    def follow(self, join: Join) -> list[int]:
        """Take part in the steps of ranks that have data left; see `Join.follow`. Collective."""

        def buffers() -> None:
            self._fetch_buffers()
            self.buffers.keep()

        def exchanged() -> None:
            self.lend()
            self.passes = join.passes
            self.unused.follow_pass(self.passes, self.engine, freezes=join.freezes)

        self.complete()
        last = join.follow(self.engine, self.memory, copy_buffers=buffers, exchanged=exchanged)
        self.buffers.due = True  # ranks agree, however many steps each has made
        self.note_new_weights()
        return last

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def settle(self, *_: Any) -> None:
        """Before the module runs, saves or loads: write back what was exchanged since the last step."""
        self._called, self.called = self.called, False
        if not self.contents.module.training:
            self.complete()
        self.engine.settle()
        self.note_new_weights()
        self.buffers.keep()

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def returned(self, _module: Any, _args: Any, output: Any) -> None:
        """The module has returned `output`: learn of backward passes that go through it."""
        if not torch.is_grad_enabled():
            return
        if self._called:
            self.watch.arm_at(output)
        else:
            self.watch.leave_at(output)

    def _before_loading(self, *_: Any) -> None:
        self.settle()
        self.watch.strays.clear()  # no gradient has to do with the weights that come

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
        lend(self.optimizers, self._trained, None if self.stage is Stage.CLOSED else self.engine)

    def _flatten(self) -> None:
        flatten(self.optimizers, self._trained, self.memory)

    def attach_to(self, wrapper: Any) -> None:
        """Hang on `wrapper` the hooks that its module does not take: it settles before it saves or loads."""
        if not self.hooked:
            wrapper.register_state_dict_pre_hook(WeakCall(self.settle))
            wrapper.register_load_state_dict_pre_hook(WeakCall(self._before_loading))

    def _attach(self) -> None:
        """Hang the hooks on the module and the optimizers."""
        before, after = self._before_optimizer_step, self._after_optimizer_step
        self._hooks.on_optimizers(self.optimizers, before=before, after=after)
        if self.hooked:
            methods = {"settle": self.settle, "returned": self.returned, "loading": self._before_loading}
            self._hooks.on_module(self.contents.module, **methods)
        else:
            self.watch.leaves = True  # which outputs are the wrapper's cannot be told from those of others
        self._release = release_when_gone(
            self, self.watch, sharing_optimizers(self.optimizers), self._trained.values()
        )
