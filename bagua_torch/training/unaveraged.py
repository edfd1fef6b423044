"""Errors and warnings about gradients that an optimizer uses although they are not averaged."""

from __future__ import annotations

import warnings
from collections.abc import Collection, Mapping

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
    owned = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
    for name in strays:
        if trained[name].grad is not None and id(trained[name]) in owned:
            raise _stray(name, "is about to be stepped")


def check_none_stepped(strays: Mapping[str, int], trained: Mapping[str, nn.Parameter]) -> None:
    """As `check_averaged`, after a step of an unknown optimizer; `strays` has earlier versions."""
    for name, version in strays.items():
        if trained[name]._version != version:
            raise _stray(name, "was stepped")


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
        stacklevel=5,  # the line that calls optimizer.step()
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
