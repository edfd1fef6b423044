"""Checks of the arguments of `attach`: which models and methods fit together, and whether ranks have the same."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn

from bagua_comm import Algorithm, ArrayError, Average, Communicator, UnsupportedError
from bagua_comm.algorithms.diloco import OuterAlgorithm
from bagua_comm.averages.base import check_average_argument
from bagua_comm.codecs.base import codecs_in

from ..arrays import dtype_name
from ..tensors.checks import compare
from .torch_names import Unit, units_of

NAME = "bagua_torch.fsdp.attach"


@contextmanager
def argument(name: str, average: Average) -> Iterator[None]:
    """Say in errors which argument of `attach` cannot be bound."""
    try:
        yield
    except (ArrayError, UnsupportedError) as exc:
        hint = f"; replicas={average} averages replicas" * (name == "reduce" and average.has_residual)
        raise type(exc)(f"{NAME}: {name} is {average}: {exc}{hint}") from exc


def checked_units(
    model: nn.Module, reduce: Average, gather: Average, replicas: Average | Algorithm | None
) -> list[Unit]:
    """Return the units of a model; raise unless they can be reduced and gathered by these methods."""
    if isinstance(replicas, Algorithm) and not isinstance(replicas, OuterAlgorithm):
        raise UnsupportedError(
            f"{NAME}: replicas is {replicas}, expected an average, or DiLoCo, StreamingDiLoCo or SparseLoCo, by "
            "which replicas train locally and average the changes of their weights"
        )
    average = None if isinstance(replicas, Algorithm) else replicas
    for name, method in (("reduce", reduce), ("gather", gather), ("replicas", average)):
        if method is not None:
            check_average_argument(NAME, method, name)
    if not isinstance(model, nn.Module):
        raise ArrayError(f"{NAME}: model is a {type(model).__name__}, expected a module")
    try:
        units = list(units_of(model))
    except ValueError as exc:
        raise UnsupportedError(
            f"{NAME}: module {exc.args[0]!r} has parameters on several meshes (shard_placement_fn), for which "
            "PyTorch does not support custom communication; shard its parts by calls of their own"
        ) from exc
    if not units:
        raise ArrayError(
            f"{NAME}: the model has no sharded parameters; call torch.distributed.fsdp.fully_shard on it first"
        )
    for unit in units:
        _check_unit(unit, reduce, gather)
        if replicas is not None:
            _check_replicas(unit, replicas)
    return units


def _described(unit: Unit) -> str:
    """The module of a unit, for messages."""
    return f"module {unit.name!r}" if unit.name else "the root module"


def _check_replicas(unit: Unit, replicas: Average | Algorithm) -> None:
    what = _described(unit)
    if unit.replicas is None:
        raise ArrayError(
            f"{NAME}: replicas is {replicas}, but {what} has none; give fully_shard a mesh of two dimensions, "
            "(replicas, shards)"
        )
    if unit.has_hook:
        raise ArrayError(f"{NAME}: replicas is {replicas}, but set_all_reduce_hook was called for {what}")
    if any(shard.is_meta for shard in unit.shards):
        raise ArrayError(
            f"{NAME}: {what} has parameters on the meta device, which cannot be copied to the replicas; "
            "initialize them first"
        )
    for dtype in unit.reduce_dtypes if isinstance(replicas, Average) else ():
        replicas.check(_name_of(dtype))


def check_hook(unit: Unit) -> None:
    """Raise `ArrayError` if a hook that was set since `attach` replaces an average."""
    if unit.hook_was_replaced:
        what = _described(unit)
        raise ArrayError(
            f"{NAME}: set_all_reduce_hook was called for {what} since then, and replaces its average; close the "
            "handle, or leave the hook out"
        )


def _check_unit(unit: Unit, reduce: Average, gather: Average) -> None:
    what = _described(unit)
    if not unit.process_groups:
        raise UnsupportedError(
            f"{NAME}: {what} is replicated, not sharded; use fully_shard, or bagua_torch.DistributedDataParallel"
        )
    if unit.is_custom:
        raise ArrayError(f"{NAME}: {what} has custom communication already; close the handle of the earlier call")
    if reduce.is_reproducible:
        if not unit.is_sharded_by_rows:
            raise UnsupportedError(
                f"{NAME}: {what} has parameters that shard_placement_fn shards along another dimension than the "
                f"first, which {reduce} does not take; use another average"
            )
        if reduce.addends is not None and unit.replicas is not None:
            raise UnsupportedError(
                f"{NAME}: reduce is {reduce}, but {what} has replicas, whose addends it would not count; leave "
                "addends out, or shard over all ranks"
            )
        if unit.has_hook and unit.process_groups[0].size() == 1:
            raise ArrayError(f"{NAME}: reduce is {reduce}, but set_all_reduce_hook was called for {what}")
    if any(codecs_in(gather)):
        dtypes = unit.gather_dtypes
        if len(dtypes) > 1:
            names = ", ".join(sorted(map(str, dtypes)))
            raise UnsupportedError(
                f"{NAME}: {what} has parameters of several dtypes ({names}), which are gathered as bytes; use "
                "gather=Exact(), shard them by calls of their own, or give MixedPrecisionPolicy(param_dtype=...)"
            )
        gather.check(_name_of(dtypes[0]))
    for dtype in unit.reduce_dtypes:
        reduce.check(_name_of(dtype))


def _name_of(dtype: torch.dtype) -> str:
    return dtype_name(torch.empty(0, dtype=dtype))


def compare_units(comm: Communicator, units: list[Unit], **arguments: object) -> None:
    """Raise `MismatchError` on all ranks unless all have the same units and arguments. Collective."""
    found = {
        _described(unit): f"{unit.parameters} on {unit.device.type}, "
        f"gathered in {unit.gather_dtypes}, reduced in {unit.reduce_dtypes}"
        for unit in units
    }
    compare(NAME, comm, {**{name: str(each) for name, each in arguments.items()}, **found})
