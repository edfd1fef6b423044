"""Hooks that hold a wrapper weakly, so only the user keeps it alive, and the end of older wrappers."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from contextlib import suppress
from typing import Any

import numpy as np
import torch
from torch import nn

from bagua_comm import ArrayError, CommError, Communicator

from .backward import BackwardWatch, WeakCall, watches_of


def weak_call_on_all(method: Callable[[], None], comm: Communicator) -> Callable[[], None]:
    """A function that calls a method and holds its object weakly.

    Collective. It raises on all ranks if a rank has deleted the object.
    """
    reference = weakref.WeakMethod(method)

    def call() -> None:
        present = reference()
        gone = np.flatnonzero(comm.allgather(np.array(present is None)))
        if present is None or gone.size:
            raise ArrayError(
                f"the weights differ between ranks, but rank {gone[0]} has deleted the wrapper of this engine, "
                "which averages them; keep the DistributedDataParallel on all ranks while its engine is used"
            )
        present()

    return call


def remove_dead_hooks(module: nn.Module) -> None:
    """Remove the hooks of deleted wrappers from `module` and its optimizers."""
    for hook in [*module._forward_pre_hooks.values(), *module._forward_hooks.values()]:
        if isinstance(hook, WeakCall):
            hook.remove_if_dead()


def end_older(module: nn.Module, comm: Communicator) -> None:
    """End earlier wrappers of the parameters of `module`.

    Collective. Those that exist on all ranks are closed. Ranks may delete a wrapper at different times: one that
    is missing on a rank is detached on the others, and its communicator stays open.
    """
    older = _older(module)
    remove_dead_hooks(module)
    closable = sorted(name for name, steps in older.items() if steps.comm is comm)
    common = set(closable).intersection(*comm.allgather_object(closable))
    for name in closable:
        if name in common:
            # A wrapper whose exchanges have failed cannot end properly; the new one begins regardless.
            with suppress(CommError):
                older[name].close()
    for steps in older.values():
        steps.detach()


def _older(module: nn.Module) -> dict[str, Any]:
    """Every existing `TrainingSteps` of the same parameters, by the name of a parameter.

    Those that share only some of the parameters are excluded: they continue.
    """
    parameters = {id(parameter) for parameter in module.parameters()}
    older: dict[str, Any] = {}
    for name, parameter in module.named_parameters():
        for watch in watches_of(parameter):
            steps: Any = watch.owner
            if steps is None or steps in older.values():
                continue
            theirs = steps.model.module
            if theirs is module or {id(p) for p in theirs.parameters()} == parameters:
                older[name] = steps
    return older


def release_when_gone(
    owner: object,
    watch: BackwardWatch,
    sharing: Iterable[Any],
    parameters: Iterable[torch.Tensor],
) -> weakref.finalize[[], object]:
    """When `owner` is deleted on this rank, remove its hooks on parameters, and its sharing of optimizer state.

    Nothing is sent. The hooks of modules and optimizers do nothing any more and stay: one of them may be running
    then, and PyTorch does not allow its removal.

    Args:
        owner: The steps of a wrapper.
        watch: Their watch.
        sharing: The optimizers that share state with their algorithm.
        parameters: Their parameters.
    """
    optimizers, own = list(map(weakref.ref, sharing)), list(map(weakref.ref, parameters))

    def release() -> None:
        watch.remove()
        present = [p for p in (reference() for reference in own) if p is not None]
        for optimizer in (reference() for reference in optimizers):
            if optimizer is not None:
                optimizer.detach(present)

    finalizer = weakref.finalize(owner, release)
    finalizer.atexit = False
    return finalizer
