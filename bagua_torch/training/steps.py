"""The training of a model by a wrapper: hooks on the module and the optimizers, and changes between steps."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch

from bagua_comm import Algorithm, ArrayError
from bagua_comm.algorithms.base import exchanges_weights
from bagua_comm.comm.public_methods import public_method
from bagua_comm.engine import EngineCallbacks

from .hooks import Hooks, WeakCall, release_when_gone
from .join import Join
from .optimizers import sharing_optimizers
from .stage import Stage
from .step import TrainingStep


class TrainingSteps(TrainingStep):
    """The training steps of a model.

    Collective. `attach_to` registers the hooks that report them, which hold this object weakly.
    """

    def _callbacks(self) -> EngineCallbacks:
        return EngineCallbacks(
            WeakCall(self.complete), make_equal=_make_equal_of(self), detach=WeakCall(self.detach)
        )

    # Changes between steps --------------------------------------------------------------------------------

    def switch(self, algorithm: Algorithm) -> None:
        """Continue with another algorithm, after the engine of the last one was closed. Collective."""
        self._buffers.due = True  # the same on all ranks, whatever number of steps each made while stopped
        self.exchange.switch(algorithm)
        self.watch.regroup(self.memory.names)
        self.attach_states()

    def replan(self, bucket_bytes: int, algorithm: Algorithm) -> None:
        """Continue with other buckets, and the same algorithm with other settings. Collective."""
        self.exchange.replan(bucket_bytes, algorithm)
        self.watch.regroup(self.memory.names)
        self.attach_states()
        self.exchange.flatten()

    def close(self) -> None:
        """Finish the present step, remove the hooks and close the engine. Idempotent. Collective."""
        if self.stage is Stage.CLOSED:
            return
        try:
            self.warn_if_stepped(stacklevel=7)  # the line that calls close()
            self.complete()
            together = not self.engine.stopped
            self.engine.close()
            self.exchange.note_new_weights()
            if together:
                self._share_buffers()
        finally:
            self.detach()

    def stop(self) -> None:
        """Finish the present step, and exchange nothing until `resume`. Idempotent. Collective."""
        if not self.engine.stopped:
            self.complete()
            self.engine.stop()
            self.exchange.note_new_weights()
            self._share_buffers()

    def resume(self) -> None:
        """Continue after `stop`. A step that this rank has not finished ends. Collective."""
        if self.engine.stopped:
            self.finish()
            self.engine.resume()
            self.watch.forget_gradients()  # each rank was alone with them
            self._buffers.due = True  # the same on all ranks, whatever number of steps each has made

    def detach(self) -> None:
        """Remove everything from the module and the optimizers. Nothing is sent to other ranks."""
        if self.stage is Stage.CLOSED:
            return
        self.stage = Stage.CLOSED
        self._release.detach()
        self.watch.remove()
        self._hooks.remove()
        self.exchange.detach_states()

    def copy_buffers(self, *, enabled: bool | None = None) -> None:
        """Copy rank 0's buffers to all ranks, if `copies_buffers`; `enabled` sets that. Collective."""
        if enabled is not None:
            self._buffers.enabled = enabled
        self._buffers.copy()

    def _share_buffers(self) -> None:
        """Copy rank 0's buffers where an algorithm may have left them different. Collective.

        `due` does not decide this, as it may differ between ranks: after steps in `join`, and while stopped.
        """
        if exchanges_weights(self.engine.algorithm):
            self.copy_buffers()

    def make_equal(self) -> None:
        """Set the weights of all ranks to their mean, and buffers and optimizers to rank 0's. Collective."""
        self.exchange.average_weights()
        self.copy_buffers()
        self.model.copy_optimizers(self.comm, self.optimizers)
        self.attach_states()

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

        def copy_buffers() -> None:
            self._fetch_buffers()
            self._buffers.keep()

        def exchanged() -> None:
            self.attach_states()
            self._passes = join.passes
            self._unused.follow_pass(self._passes, self.engine, freezes=join.freezes)

        self.complete()
        last = join.follow(self.engine, self.memory, copy_buffers=copy_buffers, exchanged=exchanged)
        self._buffers.due = True  # the same on all ranks, whatever number of steps each has made
        self.exchange.note_new_weights()
        return last

    # The module and the optimizers --------------------------------------------------------------------------

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def before_running(self, *_: Any) -> None:
        """Before the module runs: settle, and end a repeated step whose weights a new graph would need.

        Collective only in training passes: evaluations, and saves, may run on some ranks alone.
        """
        if self.model.module.training and torch.is_grad_enabled():
            self._complete_repeated()
            self.warn_if_stepped(stacklevel=10)  # the line that calls the module
        self.settle()
        if self._opened:
            self._opened = False
            self.spans["forward"].begin()
        else:
            self.spans["forward"].forget()  # of a pass that has failed

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def settle(self, *_: Any) -> None:
        """Before the module runs, saves or loads: write back the results of exchanges since the last step."""
        self._running, self._called = self._called, False
        if not (self.model.module.training or self._accumulates()):
            self.complete()
        self.engine.settle()
        self.exchange.note_new_weights()
        self._buffers.keep()

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def returned(self, _module: Any, _args: Any, output: Any) -> None:
        """After the module has returned `output`: watch for backward passes that go through it."""
        if not torch.is_grad_enabled():
            return
        self.spans["forward"].end()
        if self._running:
            self.watch.arm_at(output, expected=self.model.module.training)
        else:
            self.watch.leave_at(output)

    def _before_loading(self, *_: Any) -> None:
        self.settle()
        self.watch.forget_gradients()  # of weights that are replaced
        self.engine.expect_weights()

    def attach_to(self, wrapper: Any) -> None:
        """Register the hooks on the module, or on `wrapper` if it takes none, and on the optimizers."""
        self._hooks = Hooks()
        before, after = self._before_optimizer_step, self._after_optimizer_step
        skipped = self._after_skipped_step
        self._hooks.on_optimizers(self.optimizers, before=before, after=after, skipped=skipped)
        if self.hooked:
            self._hooks.on_module(
                self.model.module,
                running=self.before_running,
                saving=self.settle,
                loading=self._before_loading,
                returned=self.returned,
            )
        else:
            self.watch.leaves = True  # outputs of the wrapper cannot be distinguished from others
            wrapper.register_state_dict_pre_hook(WeakCall(self.settle))
            wrapper.register_load_state_dict_pre_hook(WeakCall(self._before_loading))
        self._release = release_when_gone(
            self, self.watch, sharing_optimizers(self.optimizers), self._trained.values()
        )
        self.exchange.flatten()


def _make_equal_of(steps: TrainingSteps) -> Callable[[], None]:
    """Return a function that calls `steps.make_equal`, and holds `steps` weakly. Collective.

    It raises on all ranks if a rank has deleted them: the weights would stay different.
    """
    reference, comm = weakref.ref(steps), steps.comm

    def make_equal() -> None:
        steps = reference()
        gone = np.flatnonzero(comm.allgather(np.array(steps is None)))
        if steps is None or gone.size:
            raise ArrayError(
                f"the weights differ between ranks, but rank {gone[0]} has deleted the wrapper of this engine, "
                "which averages them; keep the DistributedDataParallel on all ranks while its engine is used"
            )
        steps.make_equal()

    return make_equal
