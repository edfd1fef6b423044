"""One training step of one rank, from a forward pass to the optimizers' step: what is exchanged when."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from bagua_comm import Algorithm, Communicator, Point
from bagua_comm.engine import EngineCallbacks
from bagua_comm.objects.pickling import Live

from ..tensors import checks
from ..tensors.memory import BucketMemory
from ..tensors.model_state import ModelState
from . import unaveraged, unfreezing
from .accumulation import AveragedGradients
from .backward import BackwardWatch, queue_callback
from .buffers import SharedBuffers
from .engine import TorchEngine
from .exchange import BucketExchange
from .hooks import WeakCall
from .join import Join
from .spans import StageSpan
from .stage import Stage
from .unused import UnusedParameters
from .versions import WeightVersions


class TrainingStep(Live):
    """The present training step of a model: its stage, and the events that change it.

    Collective.

    Args:
        comm: The ranks.
        model: The parameters and buffers that all ranks share.
        optimizers: The optimizers of the model.
        algorithm: What to exchange and when.
        bucket_bytes: The size at which a bucket is closed.
        device: The device of the parameters.
        copies_buffers: Whether buffers are the same on all ranks.
        find_unused: Whether to remove gradients that no rank has computed.
        static: Whether the same parameters get a gradient in every step.
        in_buckets: Whether `p.grad` is a part of its bucket.
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
        copies_buffers: bool,
        find_unused: bool,
        static: bool,
        in_buckets: bool = True,
    ) -> None:
        self.comm, self.model, self.optimizers = comm, model, optimizers
        self.stage = Stage.IDLE
        self.averages = 0
        """Number of averaged backward passes."""
        self._averaging = True
        self._join: Join | None = None
        self._buffers = SharedBuffers(comm, model, enabled=copies_buffers)
        self._stepped: set[int] = set()  # ids of the optimizers that stepped since the last backward pass
        self._opens_late = False  # the latest forward pass ran in evaluation mode, and was not announced
        self._passes = 0  # averaged backward passes of this step
        self._called = False  # by the wrapper, in a forward pass whose backward passes are averaged
        self._running = False  # the same while the module runs
        self._opened = False  # by the wrapper, in a training forward pass whose module does not run yet
        self._stays = False  # a backward pass since the last step was not averaged
        self._accumulated = False  # a forward pass has continued the averaged step
        self._cleared = False  # the gradients of that step were cleared, and others accumulated
        self._late = False  # the last step was skipped, which the present pass of the next one has found
        self._closes = False  # an optimizer runs a closure
        self._used = False  # a forward pass went through the wrapper, or a backward pass was announced
        self._warned = False  # of a forward pass without a backward pass
        self._warned_local = False  # of a step by gradients that are not averaged
        self._fresh: set[str] = set()  # parameters without a gradient before the present backward pass
        self._trained = model.trained
        self._unused = UnusedParameters(comm, self._trained, find=find_unused, static=static)
        self.exchange = BucketExchange(
            comm,
            model,
            optimizers,
            algorithm,
            bucket_bytes,
            device,
            in_buckets=in_buckets,
            callbacks=self._callbacks(),
        )
        self.spans = {name: StageSpan(name, comm.tracer, device) for name in ("forward", "backward", "optimizer")}
        self.watch = BackwardWatch(
            self._trained,
            self.memory.names,
            began=self._begin_backward,
            before=self._before_gradient,
            after=self._send,
            ended=self._end_backward,
            reached=self._reach_output,
        )
        self._versions = WeightVersions(self._trained)
        self._gradients = AveragedGradients(self._trained)

    def _callbacks(self) -> EngineCallbacks:
        """Functions for the engine, which hold this object weakly."""
        return EngineCallbacks(WeakCall(self.complete))

    @property
    def engine(self) -> TorchEngine:
        """The engine that exchanges the buckets."""
        return self.exchange.engine

    @property
    def memory(self) -> BucketMemory:
        """The memory of the buckets."""
        return self.exchange.memory

    # Forward passes --------------------------------------------------------------------------------------

    def open(
        self, *, find_unused: bool, static: bool, copies_buffers: bool, between_steps: Callable[[], None]
    ) -> None:
        """Begin a forward pass of the wrapper.

        Collective.

        Args:
            find_unused: See the class.
            static: See the class.
            copies_buffers: See the class.
            between_steps: Called between the last step and a new one. It may replan.
        """
        self._unused.find, self._unused.static = find_unused, static
        self._buffers.enabled = copies_buffers
        training = self.model.module.training
        if training:
            self._check()
        self.watch.armed = self.averaging
        if self.averaging:
            self._opens_late = not training
            if training:
                self._buffers.due = True
                self._accumulated = self._accumulates()
                if not self._accumulated:
                    if self.stage in (Stage.IDLE, Stage.AVERAGED):
                        self._begin_step()
                        between_steps()
                        self.watch.armed = True  # a new plan disarms it
                        self._announce()
                    self._begin_forward()
        self._called, self._opened, self._used = self.averaging, training, True

    def expect_backward(self) -> None:
        """Average the next backward pass, whether or not it goes through an output of the wrapper. Collective."""
        self._used = True
        if not self.averaging or self.watch.armed or self._accumulates():
            return
        if self.stage in (Stage.IDLE, Stage.AVERAGED):
            self.finish()
            self._announce()
        self._begin_forward()
        self.watch.armed = True

    @property
    def averaging(self) -> bool:
        """Whether backward passes are averaged; False in `no_sync`."""
        return self._averaging

    @averaging.setter
    def averaging(self, value: bool) -> None:
        self._averaging, self._used = value, self._used or not value
        self.watch.leaves = not value or not self.hooked

    @property
    def hooked(self) -> bool:
        """Whether the module takes hooks; otherwise the wrapper calls `before_running` and `returned`."""
        return not isinstance(self.model.module, torch.jit.ScriptModule)

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """A context in which backward passes are not averaged."""
        before, self.averaging = self.averaging, False
        try:
            yield
        finally:
            self.averaging = before

    def _check(self, *, in_forward: bool = True) -> None:
        """Raise unless a training forward pass may begin; `join` counts it. Collective after unfreezing."""
        checks.check_open(self.stage is Stage.CLOSED)
        checks.check_backward_ended(self.watch.unfinished)
        if unfrozen := checks.check_unchanged(self.model):
            self._begin_to_train(unfrozen, late=not in_forward)
        self.exchange.reclaim()
        self.memory.check()
        if self.watch.strays and not self.optimizers and self.exchange.averages_gradients:
            unaveraged.check_none_stepped(self.watch.strays, self._trained)
        self.warn_if_stepped(stacklevel=12)  # the line that calls the wrapper
        if self._join is not None:
            self._join.forwards += 1

    def warn_if_stepped(self, *, stacklevel: int) -> None:
        """Without optimizers, whose steps are observed: warn once if one has stepped by local gradients."""
        if not self.watch.local or self.optimizers or self._warned_local:
            return
        if self.exchange.averages_gradients:
            self._warned_local = unaveraged.warn_if_stepped(
                self.watch.local, self._trained, stacklevel=stacklevel
            )

    def _begin_to_train(self, unfrozen: Mapping[str, torch.nn.Parameter], *, late: bool) -> None:
        """Train parameters that were frozen until now, in additional buckets; see `unfreezing`. Collective."""
        apart = self._join is not None or self.engine.stopped
        unfreezing.check_together(unfrozen, self.engine.algorithm, apart=apart, late=late)
        opened = self.stage not in (Stage.IDLE, Stage.AVERAGED)
        given = self._trained, self.optimizers, self.exchange.bucket_bytes
        unfreezing.agree(unfrozen, self.engine, *given, opened=opened)
        self.exchange.extend(unfrozen)
        self.watch.add(unfrozen, self.memory.names)
        self._versions = WeightVersions(self._trained)
        self._unused.restart()
        self.exchange.flatten()

    def _begin_step(self) -> None:
        """Begin a new step, or accumulate further into the same gradients. Collective."""
        self._check_outputs(None)
        self.watch.forget_outputs(reached=False)
        self.finish()
        self._passes = 0

    def finish(self) -> None:
        """End the last step, if only some optimizers stepped, or if this rank skipped it. Collective."""
        if self._stepped:
            self._end()
        self.complete()

    def _announce(self) -> None:
        """Announce a forward pass to the other ranks. Collective."""
        self.stage = Stage.REOPENED if self.stage is Stage.AVERAGED else Stage.OPEN
        if self._join is not None:
            freezes = not all(parameter.requires_grad for parameter in self._trained.values())
            self._join.announce(
                self.engine, active=True, copies=self._buffers.due, freezes=freezes, passes=self._passes
            )

    def _begin_forward(self) -> None:
        """Begin a training forward pass. Collective."""
        if self.stage is Stage.ANNOUNCED:
            self.stage = Stage.OPEN
        self.attach_states()
        self.engine.at(Point.FORWARD)
        self.exchange.note_new_weights()

    # Backward passes -------------------------------------------------------------------------------------

    def _reach_output(self) -> None:
        """A backward pass has reached an output. It may be a further pass through the same graph."""
        self._buffers.restore()
        queue_callback(self._leave_output)

    def _leave_output(self) -> None:
        """A backward pass through an output has ended."""
        if self._late:  # no gradient followed those of an inner pass
            self.watch.end()
        self._buffers.write()

    def _begin_backward(self) -> None:
        """Let autograd accumulate into the buckets. Collective if no training forward pass came before."""
        self.spans["backward"].begin()
        self._late |= self._accumulated and not self._accumulates()  # gradients were cleared since
        self._accumulated = False
        if self.stage not in (Stage.OPEN, Stage.REOPENED):
            self._open_late()
        self._versions.begin(self.memory.names)
        self._fresh |= self.memory.attach_all()

    def _open_late(self) -> None:
        """Announce a backward pass without a training forward pass before it. Collective.

        It goes through another output of a forward pass, or through one in evaluation mode.
        """
        further = self.stage is Stage.AVERAGED and not self._opens_late
        self._opens_late = False
        if self._accumulates() or (further and self.engine.payload == "weight"):
            return  # weights are exchanged once a step, and gradients stay on this rank
        self._check(in_forward=False)
        self._buffers.due |= self.model.module.training  # checkpointing runs parts of the module again
        if self.stage is not Stage.ANNOUNCED:
            if not further:
                self._begin_step()
            self._announce()
        self._begin_forward()

    def _before_gradient(self, name: str) -> None:
        """Let autograd accumulate into the bucket in a pass that is not averaged."""
        if not self._stays:
            self._stays = True
            self._cleared = self.stage is Stage.AVERAGED and not self._accumulates()
        if self._trained[name].grad is None:  # otherwise it may be in the bucket of another wrapper
            self.memory.attach(name)

    def _send(self, index: int) -> None:
        """Send a bucket whose gradients are complete."""
        self.memory.attach_bucket(index)  # create_graph=True replaces p.grad
        if self._join is not None and self._join.scale != 1 and self.engine.payload == "grad":
            # Turns the mean over all ranks into the mean over ranks with data. It is applied before sending, as
            # an algorithm may average more than these gradients.
            self.memory.flats["grad"][index].mul_(self._join.scale)
        self.engine.ready_bucket(index)

    def _end_backward(self, complete: set[str], inner: bool) -> None:
        """Send the remaining buckets, and wait for the averages; on a device, the host does not wait. Collective.

        Args:
            complete: The parameters that got a gradient.
            inner: Whether this pass runs within another backward pass.
        """
        self.spans["backward"].end(parameters=len(complete))
        stepped = self._versions.changed()
        late = self._late and not inner
        if late:  # not before, since the pass needs the weights of its forward pass
            self._end()
            self._buffers.due = True
            self._announce()
            self._begin_forward()  # which may change to gradients
        fresh = []
        if self.engine.payload == "grad" and (late or len(complete) < len(self._trained)):
            self._fresh |= self.memory.attach_all()
            fresh = sorted(self._fresh - complete)
            for index, names in enumerate(self.memory.names):
                if late or not complete.issuperset(names):
                    self._send(index)  # so that no rank waits for it
        elif self.engine.payload == "weight":
            fresh = sorted(self._fresh - complete)
        self._fresh.clear()
        self.engine.at(Point.BACKWARD)
        if self.engine.payload == "grad":
            self.memory.spread()
        self.exchange.note_new_weights()
        self.attach_states()
        self.stage = Stage.AVERAGED
        if self.engine.payload == "weight":
            self._gradients.note(self.memory.names)
        self.averages += 1
        self._stays = self._cleared = False
        self._stepped.clear()
        self.watch.forget_gradients()  # they were in the buckets, too
        if not self._late:  # otherwise when the outer pass ends
            self._fetch_buffers()
        if not inner:
            queue_callback(self._buffers.write)
        checks.check_not_stepped(stepped)
        freezes = None if self._join is None else self._join.freezes
        self._unused.end_pass(fresh, self._passes, self.engine, freezes=freezes, inner=inner)
        if self._unused.static:
            self._unused.compare(complete, self._passes, inner=inner)
        self._passes += not inner

    def _fetch_buffers(self) -> None:
        """At the end of a backward pass, get the buffers of one rank, if they are due. Collective."""
        if self.engine.communicates:
            if self._join is None:
                self._buffers.fetch_if(self._buffers.due, root=0)
            else:
                self._buffers.fetch_if(self._join.copies, root=self._join.active[0])

    def end_backward(self) -> None:
        """Complete a backward pass that reached no parameter. Collective."""
        if self.stage is Stage.OPEN:
            self.watch.end()

    # The optimizers' step --------------------------------------------------------------------------------

    def _before_optimizer_step(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        """Complete a backward pass that reached no parameter and so ran no hook, as other ranks do."""
        checks.check_not_within_backward()
        checks.check_backward_ended(self.watch.unfinished)
        self._closes = _has_closure(args, kwargs)
        if not (self._closes and self._awaits_backward()):
            self._check_outputs(optimizer)
            self.end_backward()
        if self.watch.strays and self.exchange.averages_gradients:
            unaveraged.check_averaged(self.watch.strays, self._trained, optimizer)
        if not self._closes:
            self._check_local(optimizer)
        self.engine.settle()  # if this step was counted already
        self.exchange.reclaim()
        self.spans["optimizer"].begin()

    def _check_local(self, optimizer: torch.optim.Optimizer) -> None:
        """Warn once if `optimizer` is about to step by gradients that no average of this step has."""
        if self._warned_local or not (self.watch.local or self.watch.left):
            return
        if self.watch.left and not self._used:
            self._warned_local = True
            unaveraged.warn_not_called(optimizer)
        elif self.exchange.averages_gradients or self._exchanges_no_weights():
            self._warned_local = unaveraged.warn_local(self.watch.local, self._trained, optimizer)

    def _awaits_backward(self) -> bool:
        """Whether a backward pass may still come: none has reached an output, or a forward pass has raised."""
        return not self.watch.outputs or not all(self.watch.outputs.values())

    def _exchanges_no_weights(self) -> bool:
        """Whether this step would exchange weights, but has had no backward pass that allows it."""
        alone = self.comm.size == 1 or self.engine.stopped or self.engine.payload == "grad"
        return not alone and self.stage not in (Stage.AVERAGED, Stage.REOPENED)

    def _check_outputs(self, optimizer: torch.optim.Optimizer | None) -> None:
        """Warn once if this rank has left out a backward pass, which puts it a step behind the others.

        Args:
            optimizer: The optimizer that is about to step; None if a forward pass is about to begin.
        """
        outputs = self.watch.outputs
        if self._warned or all(outputs.values()) or self.comm.size == 1 or self.engine.stopped:
            return
        # As many passes as outputs are made where a pass goes around them, after expect_backward().
        if self.stage is Stage.AVERAGED and len(outputs) > self._passes:
            self._warned = True
            # Without optimizers, steps are not counted.
            step = self.engine.step if self.optimizers else self.averages - 1
            unaveraged.warn_backward_left_out(self.comm.rank, step)
        elif self.stage is Stage.OPEN and optimizer is not None and self.exchange.averages_gradients:
            self._warned = True
            unaveraged.warn_zeros_averaged(self.comm.rank, self.engine.step, optimizer)

    def _after_optimizer_step(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        self.spans["optimizer"].end()
        self._closes = False
        if _has_closure(args, kwargs):  # which has made the backward pass, or none: other ranks have made theirs
            self._check_local(optimizer)
            self._check_outputs(optimizer)
            self.end_backward()
        averaged = self.stage in (Stage.AVERAGED, Stage.REOPENED)
        if not averaged and all(group.get("lr") == 0 for group in optimizer.param_groups):
            return  # PyTorch's checkpoints make such a step, so that the optimizer has its state
        self._stepped.add(id(optimizer))
        if len(self._stepped) == len(self.optimizers) and (averaged or self.engine.payload == "grad"):
            self._end()

    def _after_skipped_step(self, optimizer: torch.optim.Optimizer) -> None:
        """A GradScaler has left out a step on this rank: where others exchange their weights, it does so, too."""
        if self.engine.payload == "weight" and self.stage in (Stage.AVERAGED, Stage.REOPENED):
            self._stepped.add(id(optimizer))
            if len(self._stepped) == len(self.optimizers):
                self._end()

    def _end(self) -> None:
        self.stage = Stage.ANNOUNCED if self.stage in (Stage.REOPENED, Stage.ANNOUNCED) else Stage.IDLE
        self.watch.forget_outputs(reached=self.stage is Stage.ANNOUNCED)
        self._passes = 0
        self._stays = self._accumulated = self._cleared = self._late = False
        self._stepped.clear()
        self.exchange.reclaim()
        self._buffers.keep()
        self.engine.at(Point.STEP)
        self.exchange.note_new_weights()

    def _accumulates(self) -> bool:
        """Whether a further pass belongs to the averaged step, in which weights are exchanged once."""
        if self.stage is not Stage.AVERAGED or self.engine.payload != "weight" or self._stepped:
            return False
        return self._closes or not (self._cleared or self._gradients.cleared)

    def complete(self) -> None:
        """Where weights are exchanged, end a step that the optimizers skipped (with a GradScaler). Collective."""
        if self.stage is Stage.AVERAGED and self.engine.payload == "weight":
            self._end()

    def _complete_repeated(self) -> None:
        """End a further step by the same averaged gradients, before a graph needs its weights. Collective."""
        repeated = self.stage is Stage.IDLE and len(self._stepped) == len(self.optimizers) and not self._stays
        if repeated and self._stepped and self.engine.payload == "weight":
            self._end()

    def forget(self) -> None:
        """Drop the present step: the next pass begins a new one."""
        self.watch.reset()
        self.watch.forget_outputs(reached=False)
        self.watch.forget_gradients()
        self._buffers.due = False
        for span in self.spans.values():
            span.forget()
        self.stage = Stage.CLOSED if self.stage is Stage.CLOSED else Stage.IDLE
        self._passes = 0
        self._accumulated = self._cleared = self._late = self._closes = False
        self._stepped.clear()
        self.exchange.note_new_weights()

    def attach_states(self) -> None:
        """Share the algorithm's state with optimizers; repeat it after they have loaded a state."""
        if self.stage is Stage.CLOSED:
            self.exchange.detach_states()
        else:
            self.exchange.attach_states()


def _has_closure(args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Whether these arguments of `Optimizer.step`, the optimizer included, have a closure."""
    return any(callable(value) for value in (*args[1:], *kwargs.values()))
