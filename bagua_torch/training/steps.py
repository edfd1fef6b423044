"""The training steps of one rank, from a forward pass to the optimizers' step: what is exchanged when."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils.hooks import RemovableHandle

from bagua_comm import Algorithm, Communicator, Point
from bagua_comm.algorithms.base import exchanges_weights
from bagua_comm.comm.public_methods import public_method
from bagua_comm.engine import EngineCallbacks
from bagua_comm.objects.pickling import Live

from ..tensors import checks
from ..tensors.flats import lay_out_state
from ..tensors.memory import BucketMemory
from ..tensors.model_state import ModelState
from . import unfreezing
from .backward import BackwardWatch, EagerWeakCall, WeakCall, queue_callback
from .buffers import SharedBuffers
from .engine import TorchEngine
from .exchange import BucketExchange
from .hooks import release_when_gone, weak_call_on_all
from .join import Join
from .scaling import on_skipped_step
from .spans import StageSpan
from .stage import Accumulation, Stage, StepOptions
from .unaveraged import UnaveragedGradients, WeightVersions
from .unused import UnusedParameters


class TrainingSteps(Live):
    """The training steps of a model: the stage of the present one, and the events that change it.

    Collective. `attach_to` registers the hooks that report the events, which hold this object weakly.

    Args:
        comm: The ranks.
        model: The parameters and buffers that all ranks share.
        optimizers: The optimizers of the model.
        algorithm: What to exchange and when.
        bucket_bytes: The size at which a bucket is closed.
        device: The device of the parameters.
        options: What the user has chosen, and may change between steps.
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
        options: StepOptions,
        *,
        in_buckets: bool = True,
    ) -> None:
        self.comm, self.model, self.optimizers, self._options = comm, model, optimizers, options
        self.stage = Stage.IDLE
        self.averages = 0
        """Number of averaged backward passes."""
        self._averaging = True
        self._join: Join | None = None
        self.buffers = SharedBuffers(comm, model, options)
        # By id, since the last backward pass; False for an optimizer whose step a scaler left out.
        self._stepped: dict[int, bool] = {}
        self._opens_late = False  # the latest forward pass ran in evaluation mode, and was not announced
        self._passes = 0  # averaged backward passes of this step
        self._called = False  # by the wrapper, in a forward pass whose backward passes are averaged
        self._running = False  # the same while the module runs
        self._opened = False  # by the wrapper, in a training forward pass whose module does not run yet
        self._closes = False  # an optimizer runs a closure
        self._fresh: set[str] = set()  # parameters without a gradient before the present backward pass
        self._trained = model.trained
        self._unused = UnusedParameters(comm, self._trained, options)
        callbacks = EngineCallbacks(
            complete_step=WeakCall(self.complete),
            make_equal=weak_call_on_all(self.make_equal, comm),
            wrote=WeakCall(self._note_new_weights),
            detach=WeakCall(self.detach),
        )
        self.exchange = BucketExchange(
            comm, model, optimizers, algorithm, bucket_bytes, device, in_buckets=in_buckets, callbacks=callbacks
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
        self._accumulation = Accumulation(self._trained)
        self._unaveraged = UnaveragedGradients(self.watch, self.exchange)
        self._hooks: list[RemovableHandle] = []

    @property
    def engine(self) -> TorchEngine:
        """The engine that exchanges the buckets."""
        return self.exchange.engine

    @property
    def memory(self) -> BucketMemory:
        """The memory of the buckets."""
        return self.exchange.memory

    def _note_new_weights(self) -> None:
        self.memory.note_new_weights()

    # Forward passes --------------------------------------------------------------------------------------

    def open(self, between_steps: Callable[[], None]) -> None:
        """Begin a forward pass of the wrapper.

        Collective.

        Args:
            between_steps: Called between the last step and a new one. It may replan.
        """
        training = self.model.module.training
        if training:
            self._check()
        self.watch.armed = self.averaging
        if self.averaging:
            self._opens_late = not training
            if training:
                self.buffers.due = True
                continues = self._accumulation.continued = self._accumulates()
                if not continues:
                    if self.stage in (Stage.IDLE, Stage.AVERAGED):
                        self._begin_step()
                        between_steps()
                        self.watch.armed = True  # a new plan disarms it
                        self._announce()
                    self._begin_forward()
        self._called, self._opened, self._unaveraged.used = self.averaging, training, True

    def expect_backward(self) -> None:
        """Average the next backward pass, whether or not it goes through an output of the wrapper. Collective."""
        self._unaveraged.used = True
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
        self._averaging = value
        self._unaveraged.used |= not value
        self.watch.leaves = not value or not self.hooked

    @property
    def hooked(self) -> bool:
        """Whether the module takes hooks; otherwise the wrapper calls `before_running` and `returned`."""
        return not isinstance(self.model.module, torch.jit.ScriptModule)

    def _check(self, *, in_forward: bool = True) -> None:
        """Raise unless a training forward pass may begin; `join` counts it. Collective after unfreezing."""
        checks.check_open(self.stage is Stage.CLOSED)
        checks.check_backward_ended(self.watch.unfinished)
        if unfrozen := checks.check_unchanged(self.model):
            self._begin_to_train(unfrozen, late=not in_forward)
        self.exchange.reclaim()
        self.memory.check()
        self._unaveraged.check_forward()
        if self._join is not None:
            self._join.forwards += 1

    def _begin_to_train(self, unfrozen: Mapping[str, torch.nn.Parameter], *, late: bool) -> None:
        """Train parameters that were frozen until now, in additional buckets; see `unfreezing`. Collective."""
        apart = self._join is not None or self.engine.stopped
        opened = self.stage not in (Stage.IDLE, Stage.AVERAGED)
        unfreezing.check(unfrozen, self.exchange, apart=apart, late=late, opened=opened)
        self.exchange.extend(unfrozen)
        self.watch.add(unfrozen, self.memory.names)
        self._versions = WeightVersions(self._trained)
        self._unused.restart()

    def _begin_step(self) -> None:
        """Begin a new step, or accumulate further into the same gradients. Collective."""
        self._warn_of_outputs(None)
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
                self.engine, active=True, copies=self.buffers.due, freezes=freezes, passes=self._passes
            )

    def _begin_forward(self) -> None:
        """Begin a training forward pass. Collective."""
        if self.stage is Stage.ANNOUNCED:
            self.stage = Stage.OPEN
        self.exchange.attach_states()
        self.engine.at(Point.FORWARD)

    # Backward passes -------------------------------------------------------------------------------------

    def _reach_output(self) -> None:
        """A backward pass has reached an output. It may be a further pass through the same graph."""
        self.buffers.restore()
        queue_callback(self._leave_output)

    def _leave_output(self) -> None:
        """A backward pass through an output has ended."""
        if self._accumulation.late:  # no gradient followed those of an inner pass
            self.watch.end()
        self.buffers.write()

    def _begin_backward(self) -> None:
        """Let autograd accumulate into the buckets. Collective if no training forward pass came before."""
        self.spans["backward"].begin()
        if self._accumulation.continued:
            self._accumulation.continued = False
            self._accumulation.late |= not self._accumulates()  # gradients were cleared since
        if self.stage not in (Stage.OPEN, Stage.REOPENED):
            self._open_late()
        self._accumulation.begin_averaging(self.engine.mean_weights)
        self._versions.begin(self.memory.names)
        self._fresh |= self.memory.attach_all()
        self.engine.begin_backward()

    def _open_late(self) -> None:
        """Announce a backward pass without a training forward pass before it. Collective.

        It goes through another output of a forward pass, or through one in evaluation mode.
        """
        further = self.stage is Stage.AVERAGED and not self._opens_late
        self._opens_late = False
        if self._accumulates() or (further and self.engine.payload == "weight"):
            return  # weights are exchanged once a step, and gradients stay on this rank
        self._check(in_forward=False)
        self.buffers.due |= self.model.module.training  # checkpointing runs parts of the module again
        if self.stage is not Stage.ANNOUNCED:
            if not further:
                self._begin_step()
            self._announce()
        self._begin_forward()

    def _before_gradient(self, name: str) -> None:
        """Let autograd accumulate into the bucket in a pass that is not averaged."""
        if not self._accumulation.stays:
            self._accumulation.forget_weight(self.engine.mean_weights)
            self._accumulation.stays = True
            self._accumulation.cleared = self.stage is Stage.AVERAGED and not self._accumulates()
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
        late = self._accumulation.late and not inner
        if late:  # not before, since the pass needs the weights of its forward pass
            self._end()
            self.buffers.due = True
            self._announce()
            self._begin_forward()  # which may change to gradients
        fresh, engine, memory = [], self.engine, self.memory
        payload = engine.payload
        if payload == "grad" and (late or len(complete) < len(self._trained)):
            self._fresh |= memory.attach_all()
            fresh = sorted(self._fresh - complete)
            for index, names in enumerate(memory.names):
                if late or not complete.issuperset(names):
                    self._send(index)  # so that no rank waits for it
        elif payload == "weight":
            fresh = sorted(self._fresh - complete)
        self._fresh.clear()
        engine.at(Point.BACKWARD)
        if payload == "grad":
            memory.spread()
        self.exchange.attach_states()
        self.stage = Stage.AVERAGED
        self.averages += 1
        noted = payload == "weight" or engine.mean_weights.now is not None
        self._accumulation.average(memory.names if noted else ())
        self._stepped.clear()
        self.watch.forget_gradients()  # they were in the buckets, too
        if not self._accumulation.late and engine.communicates:  # otherwise when the outer pass ends
            if self._join is None:
                self.buffers.fetch_if(self.buffers.due, root=0)
            else:
                self._join.fetch(self.buffers)
        if not inner:
            queue_callback(self.buffers.write)
        checks.check_not_stepped(stepped)
        freezes = None if self._join is None else self._join.freezes
        self._unused.end_pass(fresh, self._passes, engine, freezes=freezes, inner=inner)
        if self._options.static:
            self._unused.compare(complete, self._passes, inner=inner)
        self._passes += not inner

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
        outputs = self.watch.outputs.values()  # none, if a forward pass has raised
        if not self._closes or (outputs and all(outputs)):  # otherwise a backward pass may still come
            self._warn_of_outputs(optimizer)
            self.end_backward()
        self._unaveraged.check_step(optimizer)
        if not self._closes:
            self._unaveraged.warn_of_local(optimizer, self.stage)
            if self.stage is Stage.AVERAGED:
                self.engine.mean_weights.check_used()
        self.engine.settle()  # if this step was counted already
        self.exchange.reclaim()
        self.spans["optimizer"].begin()

    def _warn_of_outputs(self, optimizer: torch.optim.Optimizer | None) -> None:
        self._unaveraged.warn_of_outputs(self.stage, self._passes, self.averages, optimizer)

    def _after_optimizer_step(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        self.spans["optimizer"].end()
        self._closes = False
        if _has_closure(args, kwargs):  # which has made the backward pass, or none: other ranks have made theirs
            self._unaveraged.warn_of_local(optimizer, self.stage)
            self._warn_of_outputs(optimizer)
            self.end_backward()
        averaged = self.stage in (Stage.AVERAGED, Stage.REOPENED)
        if not averaged and all(group.get("lr") == 0 for group in optimizer.param_groups):
            return  # PyTorch's checkpoints make such a step, so that the optimizer has its state
        self._count(optimizer, ends=averaged or self.engine.payload == "grad")

    def _after_skipped_step(self, optimizer: torch.optim.Optimizer) -> None:
        """A GradScaler has left out a step on this rank: where others exchange their weights, it does so, too."""
        if self.engine.payload == "weight" and self.stage in (Stage.AVERAGED, Stage.REOPENED):
            self._count(optimizer, made=False)

    def _count(self, optimizer: torch.optim.Optimizer, *, ends: bool = True, made: bool = True) -> None:
        """Count the step of an optimizer, `made` or left out by a GradScaler; the last one `ends` the step."""
        self._stepped[id(optimizer)] = made
        if ends and len(self._stepped) == len(self.optimizers):
            self._end()

    def _end(self) -> None:
        if self.stage is Stage.IDLE or (self.optimizers and not any(self._stepped.values())):
            self.engine.mean_weights.skip()
        self.stage = Stage.ANNOUNCED if self.stage in (Stage.REOPENED, Stage.ANNOUNCED) else Stage.IDLE
        self.watch.forget_outputs(reached=self.stage is Stage.ANNOUNCED)
        self._passes = 0
        self._accumulation.reset()
        self._stepped.clear()
        self.exchange.reclaim()
        self.buffers.keep()
        self.engine.at(Point.STEP)

    def _accumulates(self) -> bool:
        """Whether a further pass belongs to the averaged step, in which weights are exchanged once."""
        if self.stage is not Stage.AVERAGED or self.engine.payload != "weight" or self._stepped:
            return False
        return self._closes or not (self._accumulation.cleared or self._accumulation.given_up)

    def complete(self) -> None:
        """Where weights are exchanged, end a step that the optimizers skipped (with a GradScaler). Collective."""
        if self.stage is Stage.AVERAGED and self.engine.payload == "weight":
            self._end()

    def _complete_repeated(self) -> None:
        """End a further step by the same averaged gradients, before a graph needs its weights. Collective."""
        all_stepped = 0 < len(self._stepped) == len(self.optimizers)
        repeated = self.stage is Stage.IDLE and all_stepped and not self._accumulation.stays
        if repeated and self.engine.payload == "weight":
            self._end()

    def forget(self) -> None:
        """Drop the present step: the next pass begins a new one."""
        self.watch.reset()
        self.watch.forget_outputs(reached=False)
        self.watch.forget_gradients()
        self.buffers.due = False
        for span in self.spans.values():
            span.forget()
        self.stage = Stage.CLOSED if self.stage is Stage.CLOSED else Stage.IDLE
        self._passes = 0
        self._closes = False
        self._accumulation.reset()
        self._stepped.clear()

    # Changes between steps --------------------------------------------------------------------------------

    def switch(self, algorithm: Algorithm) -> None:
        """Continue with another algorithm, after the engine of the last one was closed. Collective."""
        self.buffers.due = True  # the same on all ranks, whatever number of steps each made while stopped
        self.exchange.switch(algorithm)
        self.watch.regroup(self.memory.names)

    def replan(self, bucket_bytes: int, algorithm: Algorithm) -> None:
        """Continue with other buckets, and the same algorithm with other settings. Collective."""
        self.exchange.replan(bucket_bytes, algorithm)
        self.watch.regroup(self.memory.names)

    def close(self) -> None:
        """Finish the present step, remove the hooks and close the engine. Idempotent. Collective."""
        if self.stage is Stage.CLOSED:
            return
        try:
            self._unaveraged.warn_if_stepped()
            self.complete()
            together = not self.engine.stopped
            self.engine.close()
            if together:
                self._share_buffers()
        finally:
            self.detach()

    def stop(self) -> None:
        """Finish the present step, and exchange nothing until `resume`. Idempotent. Collective."""
        if not self.engine.stopped:
            self.complete()
            self.engine.stop()
            self._share_buffers()

    def resume(self) -> None:
        """Continue after `stop`. A step that this rank has not finished ends. Collective."""
        if self.engine.stopped:
            self.finish()
            self.engine.resume()
            self.watch.forget_gradients()  # each rank was alone with them
            self.buffers.due = True  # the same on all ranks, whatever number of steps each has made

    def detach(self) -> None:
        """Remove everything from the module and the optimizers. Nothing is sent to other ranks."""
        if self.stage is Stage.CLOSED:
            return
        self.stage = Stage.CLOSED
        self._release.detach()
        self.watch.remove()
        for handle in self._hooks:
            handle.remove()
        self._hooks.clear()
        self.exchange.detach_states()

    def _share_buffers(self) -> None:
        """Copy rank 0's buffers where an algorithm may have left them different. Collective.

        `due` does not decide this, as it may differ between ranks: after steps in `join`, and while stopped.
        """
        if exchanges_weights(self.engine.algorithm):
            self.buffers.copy()

    def make_equal(self) -> None:
        """Set the weights of all ranks to their mean, and buffers and optimizers to rank 0's. Collective."""
        self.exchange.average_weights()
        self.buffers.copy()
        self.model.copy_optimizers(self.comm, self.optimizers)
        self.exchange.attach_states()

    @contextmanager
    def join(self, *, divide_by_initial_size: bool, throws: bool) -> Iterator[None]:
        """A context for uneven data; see `DistributedDataParallel.join`. Collective."""
        join = Join(self.comm, self.optimizers, divide_by_initial_size, throws=throws, stopping=self.forget)
        self._join, began = join, self.engine.step
        try:
            yield
            made = self.engine.step - began
            last = self._follow(join)
            if self.engine.payload == "grad":
                root = join.furthest(last, made)
                self.model.copy_all(self.comm, self.optimizers, root=root)
        finally:
            self._join = None

    @property
    def joined(self) -> bool:
        """Whether a `join` context is active."""
        return self._join is not None

    @public_method("DistributedDataParallel.join")
    def _follow(self, join: Join) -> list[int]:
        """Take part in the steps of ranks with data; see `Join.follow`. Collective."""
        self.complete()
        return join.follow(self.exchange, self.buffers, self._unused)

    # The module and the optimizers --------------------------------------------------------------------------

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def before_running(self, *_: object) -> None:
        """Before the module runs: settle, and end a repeated step whose weights a new graph would need.

        Collective only in training passes: evaluations, and saves, may run on some ranks alone.
        """
        if self.model.module.training and torch.is_grad_enabled():
            self._complete_repeated()
            self._unaveraged.warn_if_stepped()
        self.settle()
        if self._opened:
            self._opened = False
            self.spans["forward"].begin()
        else:
            self.spans["forward"].forget()  # of a pass that has failed

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def settle(self, *_: object) -> None:
        """Before the module runs, saves or loads: write back the results of exchanges since the last step."""
        self._running, self._called = self._called, False
        if not (self.model.module.training or self._accumulates()):
            self.complete()
        self.engine.settle()
        self.buffers.keep()

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def returned(self, _module: object, _args: object, output: object) -> None:
        """After the module has returned `output`: watch for backward passes that go through it."""
        if not torch.is_grad_enabled():
            return
        self.spans["forward"].end()
        if self._running:
            self.watch.arm_at(output, expected=self.model.module.training)
        else:
            self.watch.leave_at(output)

    def _before_loading(self, *_: object) -> None:
        self.settle()
        self.watch.forget_gradients()  # of weights that are replaced
        self.engine.expect_weights()

    def attach_to(self, wrapper: Any) -> None:
        """Register the hooks on the module, or on `wrapper` if it takes none, and on the optimizers."""
        hooks = self._hooks
        module: Any = self.model.module  # torch leaves some of these methods untyped
        for optimizer in self.optimizers:
            hooks += [
                on_skipped_step(optimizer, WeakCall(self._after_skipped_step)),
                optimizer.register_step_pre_hook(WeakCall(self._before_optimizer_step, hooks)),
                optimizer.register_step_post_hook(WeakCall(self._after_optimizer_step, hooks)),
                optimizer.register_load_state_dict_post_hook(lay_out_state),
            ]
        if self.hooked:
            hooks += [
                module.register_forward_pre_hook(WeakCall(self.before_running, hooks)),
                module.register_forward_hook(EagerWeakCall(self.returned, hooks)),
                module.register_state_dict_pre_hook(WeakCall(self.settle, hooks)),
            ]
            for part in module.modules():  # each of them may be loaded alone
                if not isinstance(part, torch.jit.ScriptModule):
                    hooks.append(part.register_load_state_dict_pre_hook(WeakCall(self._before_loading, hooks)))
        else:
            self.watch.leaves = True  # outputs of the wrapper cannot be distinguished from others
            wrapper.register_state_dict_pre_hook(WeakCall(self.settle))
            wrapper.register_load_state_dict_pre_hook(WeakCall(self._before_loading))
        self._release = release_when_gone(self, self.watch, self.exchange.sharing, self._trained.values())
        self.exchange.flatten()


def _has_closure(args: Sequence[object], kwargs: Mapping[str, object]) -> bool:
    """Whether these arguments of `Optimizer.step`, the optimizer included, have a closure."""
    return any(callable(value) for value in (*args[1:], *kwargs.values()))
