"""Errors and warnings about gradients that an optimizer uses although they are not averaged."""

from __future__ import annotations

import warnings
from collections.abc import Collection, Iterable, Iterator, Mapping

import torch
from torch import nn

from ..errors import MisuseError


def check_averaged(
    strays: Collection[str], trained: Mapping[str, nn.Parameter], optimizer: torch.optim.Optimizer
) -> None:
    """Raise `ArrayError` if `optimizer` would step a parameter whose gradient is only partly averaged.

    Args:
        strays: The parameters that got a gradient since the last average.
        trained: The parameters by name.
        optimizer: The optimizer that is about to step.
    """
    for name in _of_step(strays, trained, optimizer):
        raise _stray(name, "is about to be stepped")


def check_none_stepped(strays: Mapping[str, int], trained: Mapping[str, nn.Parameter]) -> None:
    """As `check_averaged`, after a step of an unknown optimizer; `strays` has earlier versions."""
    for name in _changed(strays, trained):
        raise _stray(name, "was stepped")


def _of_step(
    names: Iterable[str], trained: Mapping[str, nn.Parameter], optimizer: torch.optim.Optimizer
) -> Iterator[str]:
    """The parameters among `names` that the next step of `optimizer` changes."""
    owned = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
    return (name for name in names if trained[name].grad is not None and id(trained[name]) in owned)


def _changed(versions: Mapping[str, int], trained: Mapping[str, nn.Parameter]) -> Iterator[str]:
    """The parameters that no longer have these versions."""
    return (name for name, version in versions.items() if trained[name]._version != version)


def _stray(name: str, verb: str) -> MisuseError:
    return MisuseError(
        f"DistributedDataParallel: {name!r} {verb} by a gradient that is not averaged: after the last average, "
        "a backward pass went through no tensor that a forward pass of this wrapper returned. Call the module "
        "through the wrapper, as in ddp(x), and return all tensors of which a loss is made; or call "
        "expect_backward() before that backward pass; or run it in no_sync, to keep it on this rank"
    )


def warn_not_called(optimizer: torch.optim.Optimizer) -> None:
    """Warn that `optimizer` steps although no forward pass has gone through the wrapper."""
    warnings.warn(
        f"DistributedDataParallel: {type(optimizer).__name__} steps, but no forward pass has gone through the "
        "wrapper, so nothing is averaged, and the ranks train apart. Call the wrapper, as in ddp(x), instead of "
        "the module; or make passes that belong to this rank in no_sync",
        stacklevel=6,  # the line that calls optimizer.step()
    )


def warn_local(
    local: Iterable[str], trained: Mapping[str, nn.Parameter], optimizer: torch.optim.Optimizer
) -> bool:
    """Warn if `optimizer` is about to step parameters in `local`, whose gradients stay on this rank.

    Returns:
        Whether it has warned.
    """
    name = next(_of_step(local, trained, optimizer), None)
    if name is not None:
        _warn_local(f"{type(optimizer).__name__} steps {name!r}", stacklevel=7)
    return name is not None


def warn_if_stepped(local: Mapping[str, int], trained: Mapping[str, nn.Parameter], *, stacklevel: int) -> bool:
    """As `warn_local`, after a step of an unknown optimizer; `local` has earlier versions."""
    name = next(_changed(local, trained), None)
    if name is not None:
        _warn_local(f"{name!r} was stepped", stacklevel=stacklevel)
    return name is not None


def _warn_local(what: str, *, stacklevel: int) -> None:
    warnings.warn(
        f"DistributedDataParallel: {what} by a gradient of this rank alone, so weights differ between ranks: "
        "since the last average, a backward pass went through an output of the module itself, or its forward "
        "pass was in no_sync. Call the wrapper, as in ddp(x), in place of the module; make the last backward "
        "pass before each step outside of no_sync; to train apart on purpose, call ddp.stop() before",
        stacklevel=stacklevel,
    )


def warn_backward_left_out(rank: int, step: int) -> None:
    """Warn that a rank has left out a backward pass in the step that ends."""
    warnings.warn(
        f"DistributedDataParallel: in step {step}, rank {rank} made more training forward passes than backward "
        "passes. If other ranks made a backward pass for each, this rank is a step behind them from now on: it "
        "averages gradients of other batches than they do, and they wait for it at the end. Make the backward "
        "pass on all ranks or on none; without one, run the forward pass under torch.no_grad(), or call "
        "ddp.end_backward(), which averages zeros",
        stacklevel=6,  # the line that calls optimizer.step()
    )


def warn_zeros_averaged(rank: int, step: int, optimizer: torch.optim.Optimizer) -> None:
    """Warn that `optimizer` steps after a forward pass without a backward pass on this rank."""
    warnings.warn(
        f"DistributedDataParallel: in step {step}, {type(optimizer).__name__} steps on rank {rank} after a "
        "forward pass without a backward pass, so zeros are averaged in place of its gradients. Call backward() "
        "on all ranks; or ddp.end_backward() before the optimizer's step, if zeros are meant",
        stacklevel=6,  # the line that calls optimizer.step()
    )
