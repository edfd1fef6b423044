"""Checkpoints of models, optimizers, schedulers and samplers, over `bagua_comm.Checkpoints`.

What is a rank's own follows from the algorithm. Where gradients are averaged, all ranks have the same weights and
optimizer states: these are written once, a part by each rank. Where weights are exchanged, they differ between
ranks: each rank writes its own, and on another number of ranks all begin with their mean. Buffers differ, since
every rank runs the module on its own data; what the algorithm keeps is as `bagua_comm.checkpoint.engines` says.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from torch import nn

import bagua_comm
from bagua_comm import ArrayError, Communicator, Own
from bagua_comm.algorithms.base import exchanges_weights
from bagua_comm.arrays import Array
from bagua_comm.checkpoint import Loaded
from bagua_comm.checkpoint.optimizers import is_optimizer, load_in_place, with_dtype
from bagua_comm.checkpoint.trees import as_tagged, from_tagged
from bagua_comm.pickling import Live

from . import sharded
from .arrays import as_array, as_tensor, torch_stream
from .ddp import DistributedDataParallel


class Checkpoints(Live):
    """Checkpoints of PyTorch objects in a folder that all ranks share; see `bagua_comm.Checkpoints`.

    Collective.

        with Checkpoints("runs/7", ddp.comm) as checkpoints:
            if checkpoints.latest() is not None:
                first = checkpoints.load(model=ddp, optimizer=optimizer).step
            for step in range(first, steps):
                ...
                checkpoints.save(step + 1, model=ddp, optimizer=optimizer, epoch=epoch)

    Args:
        folder: Where checkpoints are, in a file system that all ranks share.
        comm: The ranks.
        keep: How many of the newest to keep; None keeps all.
        stall_s: How long a disk may be silent before a save or a load fails, in seconds.

    Raises:
        ArrayError: An argument is out of range, or differs between ranks.
    """

    def __init__(
        self, folder: str | Path, comm: Communicator, *, keep: int | None = 3, stall_s: float = 600.0
    ) -> None:
        self._checkpoints = _OfTensors(folder, comm, keep=keep, stall_s=stall_s)
        self._device = torch.device("cpu" if comm.device is None else f"cuda:{comm.device}")

    def save(self, step: int, *, wait: bool = False, **objects: Any) -> None:
        """Save objects as the checkpoint of a step; call it between two steps.

        Collective. Returns when their tensors have been copied; a thread writes them. See
        `bagua_comm.Checkpoints.save`.

        Args:
            step: A number of at least 0.
            wait: Return when the checkpoint is complete.
            objects: What to save, by name. Anything with `state_dict`, or a tree of tensors, arrays and plain
                values. In `Own(...)` what belongs to this rank, such as the state of a generator.
                A DataLoader with workers takes batches from a sampler ahead, which would be left out after
                loading: there save what `sampler.state_dict(steps)` gives for the steps that were made.

        Raises:
            ArrayError: There is nothing to save.
            CheckpointError: The last save failed, or with `wait` this one; on all ranks alike.
            CommMismatch: Ranks give different objects, or plain values in them differ; the place is named.
            UnsupportedError: An object holds something that a checkpoint cannot; the place is named.
        """
        with torch_stream(self._device):
            models = [each for each in map(_bare, objects.values()) if isinstance(each, DistributedDataParallel)]
            tree = {name: _tree_of(each, models) for name, each in objects.items()}
            self._checkpoints.save(step, tree, wait=wait)

    def load(self, step: int | None = None, *, fallback: bool = False, **objects: Any) -> Loaded:
        """Load the checkpoint of a step, or the one that was saved last, into objects.

        Collective. The objects are made as they were for the training that saved them; the number of ranks may
        be another.

        Args:
            step: Its step; None for the one that was saved last.
            fallback: If that one is damaged, warn, and take the one saved before it.
            objects: Where to load what was saved under the same names.

        Returns:
            The step and, in `tree`, everything that was saved under other names: values as they were, and of
            objects their state dicts.

        Raises:
            ArrayError: There is no such checkpoint, or nothing in it has one of these names.
            CheckpointError: It is damaged or foreign, or holds what cannot come to this number of ranks.
            RuntimeError: An object does not take its state, as PyTorch says it; earlier ones are loaded already.
        """
        loaded = self._checkpoints.load(step, fallback=fallback)
        tree = dict(loaded.tree)
        missing = [name for name in objects if name not in tree]
        if missing:
            raise ArrayError(
                f"load: the checkpoint of step {loaded.step} has no {', '.join(map(repr, missing))}, only "
                f"{', '.join(map(repr, tree))}"
            )
        for name in sorted(objects, key=lambda name: _order(objects[name])):
            _load_into(name, _bare(objects[name]), tree.pop(name))
        rest = {name: saved["state"] if _is_state(saved) else saved["value"] for name, saved in tree.items()}
        return loaded._replace(tree=rest)

    def wait(self) -> None:
        """Wait until the save under way is complete; see `bagua_comm.Checkpoints.wait`. Collective."""
        self._checkpoints.wait()

    def latest(self, *, fallback: bool = False) -> int | None:
        """The step of the checkpoint that was saved last, or None; see `bagua_comm.Checkpoints.latest`.

        Collective.
        """
        return self._checkpoints.latest(fallback=fallback)

    def close(self) -> None:
        """Wait for the save under way, and free the threads; closing twice does nothing.

        Collective.
        """
        self._checkpoints.close()

    def __enter__(self) -> Checkpoints:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._checkpoints.__exit__(kind, error, traceback)


class _OfTensors(bagua_comm.Checkpoints):
    """Trees may hold tensors, which come back as tensors on the CPU."""

    @staticmethod
    def _to_array(value: Any) -> tuple[str, Array] | None:
        if isinstance(value, torch.Tensor):
            return "tensor", as_array(value.detach().resolve_conj().resolve_neg())
        return as_tagged(value)

    @staticmethod
    def _from_array(tag: str, array: Array) -> Any:
        return as_tensor(array) if tag == "tensor" else from_tagged(tag, array)


# Objects as trees ------------------------------------------------------------------------------------------


def _bare(value: Any) -> Any:
    return value.value if isinstance(value, Own) else value


def _tree_of(value: Any, models: list[DistributedDataParallel]) -> dict[str, Any]:
    """What is saved of an object; `models` are those that are saved with it."""
    bare = _bare(value)
    if isinstance(bare, DistributedDataParallel):
        if bare is not value:
            raise ArrayError("save: a DistributedDataParallel knows what is a rank's own; give it without Own")
        return {"state": _tree_of_ddp(bare)}
    if not hasattr(bare, "state_dict"):
        return {"value": value}
    if sharded.is_sharded(bare):
        return {"state": Own(sharded.state_of(bare)), "dtypes": _dtypes_of(bare)}
    state: Any = bare.state_dict()
    if isinstance(bare, nn.Module):
        state = _with_metadata(state)
    if bare is not value:
        return {"state": Own(state, value.reshape)}
    if isinstance(bare, torch.optim.Optimizer):
        stepped = {id(p) for group in bare.param_groups for p in group["params"]}
        for model in models:
            ignored = {id(p) for name, p in model.module.named_parameters() if name in model.ignored_names}
            here = bool(stepped & {id(p) for p in model.module.parameters()})
            if stepped & ignored or (here and model.parts_stay):
                return {"state": Own(state), "dtypes": Own(_dtypes_of(bare))}
            if here and exchanges_weights(model.algorithm):
                return {"state": Own(state, "mean"), "dtypes": _dtypes_of(bare)}
        return {"state": state, "dtypes": _dtypes_of(bare)}
    return {"state": state}


def _dtypes_of(optimizer: torch.optim.Optimizer) -> list[str]:
    """The dtypes of its parameters: where they are the same again, states keep the dtypes that they had."""
    return [str(p.dtype) for group in optimizer.param_groups for p in group["params"]]


def _is_state(saved: Mapping[str, Any]) -> bool:
    return "state" in saved


def _with_metadata(state: Mapping[str, Any]) -> dict[str, Any]:
    versions = {name: dict(facts) for name, facts in getattr(state, "_metadata", {}).items()}
    return {"entries": dict(state), "versions": versions}


def _module_state(saved: Mapping[str, Any]) -> OrderedDict[str, Any]:
    state = OrderedDict(saved["entries"])
    state._metadata = OrderedDict(saved["versions"])  # type: ignore[attr-defined]
    return state


def _tree_of_ddp(model: DistributedDataParallel) -> dict[str, Any]:
    """Call it on all ranks between steps."""
    engine = model.tree_of_engine()  # writes back what was exchanged; before weights are read
    module = model.module
    state = _with_metadata(module.state_dict())
    weights = {name for name, _ in module.named_parameters(remove_duplicate=False)}
    parts: dict[str, dict[str, Any]] = {"weights": {}, "buffers": {}, "ignored": {}}
    for name, value in state["entries"].items():
        part = "ignored" if name in model.ignored_names else "weights" if name in weights else "buffers"
        parts[part][name] = value
    names: Any = list(state["entries"])
    versions: Any = state["versions"]
    if model.parts_stay:  # they are others on each rank, or there are none, and so are their names
        names, versions = Own(names), Own(versions)
    return {
        "weights": Own(parts["weights"], "mean") if exchanges_weights(model.algorithm) else parts["weights"],
        "buffers": Own(parts["buffers"], "first" if model.broadcast_buffers else "mean"),
        "ignored": Own(parts["ignored"]) if parts["ignored"] or model.parts_stay else {},
        "names": names,
        "versions": versions,
        "engine": engine,
    }


# And back --------------------------------------------------------------------------------------------------


def _order(value: Any) -> int:
    """Optimizers before models, which lend them momenta; others last."""
    kinds = (torch.optim.Optimizer, DistributedDataParallel, nn.Module)
    return next((n for n, kind in enumerate(kinds) if isinstance(_bare(value), kind)), len(kinds))


def _load_into(name: str, target: Any, saved: Mapping[str, Any]) -> None:
    if not _is_state(saved) or not hasattr(target, "load_state_dict"):
        what = "an object's state" if _is_state(saved) else "a plain value"
        raise ArrayError(
            f"load: {name!r} was saved as {what}, which does not go into a {type(target).__name__}; without this "
            "name it is in the `tree` that load returns"
        )
    state = saved["state"]
    if state is None:
        return  # Own(..., "drop") on another number of ranks: it stays as it was made
    wrapped = isinstance(state, dict) and "engine" in state
    if isinstance(target, DistributedDataParallel):
        if not wrapped:
            raise ArrayError(f"load: {name!r} was saved from a plain module; load it into `.module`")
        target.load_tree(_merged(state), state["engine"])
    elif isinstance(target, nn.Module):
        target.load_state_dict(_merged(state) if wrapped else _module_state(state))
    elif is_optimizer(target):
        restore = with_dtype if saved.get("dtypes") == _dtypes_of(target) else None
        load = sharded.load_state if sharded.is_sharded(target) else load_in_place
        load(target, state, restore)
    else:
        target.load_state_dict(state)


def _merged(saved: Mapping[str, Any]) -> OrderedDict[str, Any]:
    """The state dict of a wrapped module."""
    entries = {**saved["weights"], **saved["buffers"], **saved["ignored"]}
    ordered = {name: entries[name] for name in saved["names"]}
    return _module_state({"entries": ordered, "versions": saved["versions"]})
