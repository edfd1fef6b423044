"""Errors and warnings about gradients that an optimizer uses although they are not averaged."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence

import torch
from torch import nn

from bagua_comm.errors import warn

from ..errors import MisuseError
from .backward import BackwardWatch
from .exchange import BucketExchange
from .stage import Stage


class UnaveragedGradients:
    """Raises an error, or warns once, if an optimizer steps by gradients of this rank that no average has.

    Args:
        watch: Observes the backward passes.
        exchange: The buckets that are averaged.
    """

    def __init__(self, watch: BackwardWatch, exchange: BucketExchange) -> None:
        self._watch, self._exchange = watch, exchange
        self._trained, self._optimizers = exchange.model.trained, exchange.optimizers
        self.used = False
        """Whether a forward pass went through the wrapper, or a backward pass was announced."""
        self._warned = False  # of a forward pass without a backward pass
        self._warned_local = False  # of a step by gradients that are not averaged

    def check_forward(self) -> None:
        """Before a training forward pass: check the steps of optimizers that are not observed.

        Raises:
            ArrayError: One has stepped a parameter by a gradient that is only partly averaged.
        """
        if self._watch.strays and not self._optimizers and self._exchange.averages_gradients:
            for name in self._changed(self._watch.strays):
                raise _stray(name, "was stepped")
        self.warn_if_stepped()

    def warn_if_stepped(self) -> None:
        """Without optimizers, whose steps are observed: warn once if one has stepped by local gradients."""
        if not self._watch.local or self._optimizers or self._warned_local:
            return
        if self._exchange.averages_gradients:
            for name in self._changed(self._watch.local):
                self._warn_local(f"{name!r} was stepped")
                return

    def check_step(self, optimizer: torch.optim.Optimizer) -> None:
        """Raise `ArrayError` if `optimizer` would step a parameter whose gradient is only partly averaged."""
        if self._watch.strays and self._exchange.averages_gradients:
            for name in self._of_step(self._watch.strays, optimizer):
                raise _stray(name, "is about to be stepped")

    def warn_of_local(self, optimizer: torch.optim.Optimizer, stage: Stage) -> None:
        """Warn once if `optimizer` is about to step by gradients that no average of this step has."""
        if self._warned_local or not (self._watch.local or self._watch.left):
            return
        if self._watch.left and not self.used:
            self._warned_local = True
            warn(
                f"DistributedDataParallel: {type(optimizer).__name__} steps, but no forward pass has gone "
                "through the wrapper, so nothing is averaged, and the ranks train apart. Call the wrapper, as in "
                "ddp(x), instead of the module; or make passes that belong to this rank in no_sync"
            )
        elif self._exchange.averages_gradients or self._exchanges_no_weights(stage):
            for name in self._of_step(self._watch.local, optimizer):
                self._warn_local(f"{type(optimizer).__name__} steps {name!r}")
                return

    def _exchanges_no_weights(self, stage: Stage) -> bool:
        """Whether this step would exchange weights, but has had no backward pass that allows it."""
        alone = self._exchange.alone or self._exchange.engine.payload == "grad"
        return not alone and stage not in (Stage.AVERAGED, Stage.REOPENED)

    def warn_of_outputs(
        self, stage: Stage, passes: int, averages: int, optimizer: torch.optim.Optimizer | None
    ) -> None:
        """Warn once if this rank has left out a backward pass, which puts it a step behind the others.

        Args:
            stage: The stage of the step.
            passes: The number of its averaged backward passes.
            averages: The number of all averaged backward passes.
            optimizer: The optimizer that is about to step; None if a forward pass is about to begin.
        """
        outputs, exchange = self._watch.outputs, self._exchange
        if self._warned or all(outputs.values()) or exchange.alone:
            return
        step, rank = exchange.engine.step, exchange.comm.rank
        # As many passes as outputs are made where a pass goes around them, after expect_backward().
        if stage is Stage.AVERAGED and len(outputs) > passes:
            self._warned = True
            if not self._optimizers:  # steps are not counted
                step = averages - 1
            warn(
                f"DistributedDataParallel: in step {step}, rank {rank} made more training forward passes than "
                "backward passes. If other ranks made a backward pass for each, this rank is a step behind them "
                "from now on: it averages gradients of other batches than they do, and they wait for it at the "
                "end. Make the backward pass on all ranks or on none; without one, run the forward pass under "
                "torch.no_grad(), or call ddp.end_backward(), which averages zeros"
            )
        elif stage is Stage.OPEN and optimizer is not None and exchange.averages_gradients:
            self._warned = True
            warn(
                f"DistributedDataParallel: in step {step}, {type(optimizer).__name__} steps on rank {rank} after "
                "a forward pass without a backward pass, so zeros are averaged in place of its gradients. Call "
                "backward() on all ranks; or ddp.end_backward() before the optimizer's step, if zeros are meant"
            )

    def _of_step(self, names: Iterable[str], optimizer: torch.optim.Optimizer) -> Iterator[str]:
        """The parameters among `names` that the next step of `optimizer` changes."""
        owned = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
        trained = self._trained
        return (name for name in names if trained[name].grad is not None and id(trained[name]) in owned)

    def _changed(self, versions: Mapping[str, int]) -> Iterator[str]:
        """The parameters that no longer have these versions."""
        return (name for name, version in versions.items() if self._trained[name]._version != version)

    def _warn_local(self, what: str) -> None:
        self._warned_local = True
        warn(
            f"DistributedDataParallel: {what} by a gradient of this rank alone, so weights differ between ranks: "
            "since the last average, a backward pass went through an output of the module itself, or its forward "
            "pass was in no_sync. Call the wrapper, as in ddp(x), in place of the module; make the last backward "
            "pass before each step outside of no_sync; to train apart on purpose, call ddp.stop() before"
        )


def _stray(name: str, verb: str) -> MisuseError:
    return MisuseError(
        f"DistributedDataParallel: {name!r} {verb} by a gradient that is not averaged: after the last average, "
        "a backward pass went through no tensor that a forward pass of this wrapper returned. Call the module "
        "through the wrapper, as in ddp(x), and return all tensors of which a loss is made; or call "
        "expect_backward() before that backward pass; or run it in no_sync, to keep it on this rank"
    )


class WeightVersions:
    """Detects an optimizer that steps within a backward pass, before gradients are averaged.

    Compares the versions of parameters at the end of a pass with those at its beginning. Reading a version takes
    0.1 us. All versions are read only if a parameter has a hook that might step it; otherwise one of each bucket,
    since an optimizer within the pass steps most parameters.

    Args:
        parameters: The parameters, by name. They have the hooks of the wrapper.
    """

    def __init__(self, parameters: Mapping[str, nn.Parameter]) -> None:
        self._parameters = parameters
        self._hooks = [parameter._post_accumulate_grad_hooks or {} for parameter in parameters.values()]
        self._own = len(self._hooks)
        self._before: dict[str, int] = {}

    def begin(self, buckets: Sequence[Sequence[str]]) -> None:
        """Record versions at the beginning of a pass; `buckets` has the names of each bucket."""
        hooked = sum(map(len, self._hooks)) != self._own
        names = self._parameters if hooked else [names[0] for names in buckets]
        self._before = {name: self._parameters[name]._version for name in names}

    def changed(self) -> str | None:
        """The name of a parameter changed since `begin`, or None."""
        before, self._before = self._before, {}
        for name, version in before.items():
            if self._parameters[name]._version != version:
                return name
        return None
