"""Checkpoints of models, optimizers, schedulers and samplers, over `bagua_comm.Checkpoints`.

The algorithm determines which state differs between ranks. Where gradients are averaged, all ranks have the same
weights and optimizer states: these are written once, a part by each rank. Where weights are exchanged, they
differ: each rank writes its weights, and another number of ranks starts from their mean. Buffers differ, since
every rank runs the module on its data. For the state of algorithms see `bagua_comm.checkpoint.engines`.
"""

from __future__ import annotations

import dataclasses
from collections import OrderedDict
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

import bagua_comm
from bagua_comm import ArrayError, Own
from bagua_comm.algorithms.base import exchanges_weights
from bagua_comm.arrays import Array
from bagua_comm.checkpoint import Loaded
from bagua_comm.checkpoint.optimizers import Optimizer, is_optimizer, load_in_place, other_class, with_dtype
from bagua_comm.checkpoint.trees import as_tagged, from_tagged
from bagua_comm.comm.public_methods import public_method

from ..arrays import as_array, as_tensor, torch_stream
from ..entry import errors_on_all
from ..tensors import sharded
from .wrapper import DistributedDataParallel


class Checkpoints(bagua_comm.Checkpoints):
    """Checkpoints of PyTorch objects in a folder that all ranks share; see `bagua_comm.Checkpoints`.

    Collective.

        with Checkpoints("runs/7", ddp.comm) as checkpoints:
            if checkpoints.latest() is not None:
                first = checkpoints.load(model=ddp, optimizer=optimizer).step
            for step in range(first, steps):
                ...
                checkpoints.save(step + 1, model=ddp, optimizer=optimizer, epoch=epoch)

    Args:
        folder: The folder of checkpoints, in a file system that all ranks share.
        comm: The ranks.
        keep: The number of newest checkpoints to keep; None keeps all.
        stall_s: Seconds without progress of a disk after which a save or a load fails.

    Raises:
        ArrayError: An argument is out of range, or differs between ranks.
    """

    @staticmethod
    def _to_array(value: object) -> tuple[str, Array] | None:
        if isinstance(value, torch.Tensor):
            return "tensor", as_array(value.detach().resolve_conj().resolve_neg())
        return as_tagged(value)

    @staticmethod
    def _from_array(tag: str, array: Array) -> object:
        return as_tensor(array) if tag == "tensor" else from_tagged(tag, array)

    @public_method("Checkpoints.save")
    def save(  # type: ignore[override]
        self, step: int, *, wait: bool = False, **objects: object
    ) -> None:
        """Save objects as the checkpoint of a step; call it between two steps.

        Collective. Returns when their tensors have been copied; a thread writes them. See
        `bagua_comm.Checkpoints.save`.

        Args:
            step: A number of at least 0.
            wait: Return when the checkpoint is complete.
            objects: The objects to save, by name: anything with `state_dict`, or a tree of tensors, arrays and
                plain values. Wrap per-rank state, such as that of a generator, in `Own(...)`.
                The workers of a DataLoader draw batches from a sampler in advance, which would be skipped after
                loading: save `sampler.state_dict(steps)` for the number of steps made.

        Raises:
            ArrayError: There is nothing to save.
            CheckpointError: The last save failed, or with `wait` this one; on all ranks.
            CommMismatch: Ranks give different objects, or plain values in them differ; the error has the path.
            UnsupportedError: An object has a value that a checkpoint cannot hold; the error has the path.
        """
        device = self._comm.device
        with torch_stream(torch.device("cpu" if device is None else f"cuda:{device}")):
            models = [each for each in map(_bare, objects.values()) if isinstance(each, DistributedDataParallel)]
            tree = {name: _tree_of(each, models) for name, each in objects.items()}
            super().save(step, tree, wait=wait)

    @public_method("Checkpoints.load")
    def load(
        self,
        step: int | None = None,
        *,
        fallback: bool = False,
        like: Any = None,
        **objects: Any,
    ) -> Loaded:
        """Load the checkpoint of a step, or the latest one, into objects.

        Collective. Construct the objects as in the training that saved them; the number of ranks may differ.

        Args:
            step: The step; None for the latest checkpoint.
            fallback: If it is damaged, warn, and load the one saved before it.
            like: A dict of `Own(slab, "concatenate")` by the names under which they were saved; see
                `bagua_comm.Checkpoints.load`. They are loaded into `tree`.
            objects: The objects to load into, by the names under which they were saved.

        Returns:
            The step and, in `tree`, everything that was saved under other names: values, and the state dicts of
            objects.

        Raises:
            ArrayError: There is no such checkpoint, or it lacks one of these names; or an optimizer was saved
                from one of another class, with other settings. Nothing is loaded then.
            CheckpointError: It is damaged or foreign, or has state that does not load on this number of ranks.
            RuntimeError: An object refuses its state; earlier objects are loaded already.
        """
        slabs = {name: {"value": each} for name, each in (like or {}).items()}
        loaded = super().load(step, fallback=fallback, like=slabs)
        tree = dict(loaded.tree)
        missing = [name for name in objects if name not in tree]
        if missing:
            raise ArrayError(
                f"load: the checkpoint of step {loaded.step} has no {', '.join(map(repr, missing))}, only "
                f"{', '.join(map(repr, tree))}"
            )
        with errors_on_all(self._comm):
            for name, target in objects.items():
                text = other_class(_bare(target), tree[name]["state"]) if _is_state(tree[name]) else None
                if text is not None:
                    raise ArrayError(
                        f"load: {name!r} {text}; load it into an optimizer of the class that saved it, or leave "
                        "it out to start with a new one"
                    )
        for name in sorted(objects, key=lambda name: _order(objects[name])):
            _load_into(name, _bare(objects[name]), tree.pop(name))
        rest = {name: saved["state"] if _is_state(saved) else saved["value"] for name, saved in tree.items()}
        return loaded._replace(tree=rest)


# Objects as trees ------------------------------------------------------------------------------------------


def _bare(value: Any) -> Any:
    return value.value if isinstance(value, Own) else value


def _tree_of(value: object, models: list[DistributedDataParallel]) -> dict[str, object]:
    """The saved tree of an object; `models` are the models saved with it."""
    bare = _bare(value)
    if isinstance(bare, DistributedDataParallel):
        if bare is not value:
            raise ArrayError("save: a DistributedDataParallel knows its per-rank state; give it without Own")
        return {"state": _tree_of_ddp(bare)}
    if not hasattr(bare, "state_dict"):
        return {"value": value}
    if sharded.is_sharded_optimizer(bare):
        return {"state": Own(sharded.state_of(bare)), "dtypes": _dtypes_of(bare)}
    state: Any = bare.state_dict()
    if isinstance(bare, nn.Module):
        state = _with_metadata(state)
    if isinstance(value, Own):
        return {"state": dataclasses.replace(value, value=state)}
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


def _dtypes_of(optimizer: Optimizer) -> list[str]:
    """The dtypes of its parameters: if they are the same on loading, states keep their dtypes."""
    return [str(p.dtype) for group in optimizer.param_groups for p in group["params"]]


def _is_state(saved: Mapping[str, object]) -> bool:
    return "state" in saved


def _with_metadata(state: Mapping[str, object]) -> dict[str, Any]:
    versions = {name: dict(facts) for name, facts in getattr(state, "_metadata", {}).items()}
    return {"entries": dict(state), "versions": versions}


def _module_state(saved: Mapping[str, Any]) -> OrderedDict[str, object]:
    state: OrderedDict[str, object] = OrderedDict(saved["entries"])
    state._metadata = OrderedDict(saved["versions"])  # type: ignore[attr-defined]
    return state


def _tree_of_ddp(model: DistributedDataParallel) -> dict[str, object]:
    """The saved tree of a wrapped model. Call it on all ranks between steps."""
    engine = model.tree_of_engine()  # writes back exchanged weights, before they are read
    module = model.module
    state = _with_metadata(module.state_dict())
    weights = {name for name, _ in module.named_parameters(remove_duplicate=False)}
    parts: dict[str, dict[str, object]] = {"weights": {}, "buffers": {}, "ignored": {}}
    for name, value in state["entries"].items():
        part = "ignored" if name in model.ignored_names else "weights" if name in weights else "buffers"
        parts[part][name] = value
    names: object = list(state["entries"])
    versions: object = state["versions"]
    if model.parts_stay:  # they differ between ranks, and so do their names
        names, versions = Own(names), Own(versions)
    return {
        "weights": Own(parts["weights"], "mean") if exchanges_weights(model.algorithm) else parts["weights"],
        "buffers": Own(parts["buffers"], "first" if model.broadcast_buffers else "mean"),
        "ignored": Own(parts["ignored"]) if parts["ignored"] or model.parts_stay else {},
        "names": names,
        "versions": versions,
        "engine": engine,
    }


# Trees as objects ------------------------------------------------------------------------------------------


def _order(value: object) -> int:
    """Optimizers before models, which share state with them; others last."""
    types = (torch.optim.Optimizer, DistributedDataParallel, nn.Module)
    return next((n for n, each in enumerate(types) if isinstance(_bare(value), each)), len(types))


def _load_into(name: str, target: Any, saved: Mapping[str, Any]) -> None:
    if not _is_state(saved) or not hasattr(target, "load_state_dict"):
        what = "an object's state" if _is_state(saved) else "a plain value"
        raise ArrayError(
            f"load: {name!r} was saved as {what}, which does not load into a {type(target).__name__}; without "
            "this name it is in the `tree` that load returns"
        )
    state = saved["state"]
    if state is None:
        return  # Own(..., "drop") on another number of ranks: keep the initial state
    wrapped = isinstance(state, dict) and "engine" in state
    if isinstance(target, DistributedDataParallel):
        if not wrapped:
            raise ArrayError(f"load: {name!r} was saved from a plain module; load it into `.module`")
        target.load_tree(_merged(state), state["engine"])
    elif isinstance(target, nn.Module):
        target.load_state_dict(_merged(state) if wrapped else _module_state(state))
    elif is_optimizer(target):
        restore = with_dtype if saved.get("dtypes") == _dtypes_of(target) else None
        load = sharded.load_state if sharded.is_sharded_optimizer(target) else load_in_place
        load(target, state, restore)
    else:
        target.load_state_dict(state)


def _merged(saved: Mapping[str, Any]) -> OrderedDict[str, object]:
    """The state dict of a wrapped module."""
    entries = {**saved["weights"], **saved["buffers"], **saved["ignored"]}
    ordered = {name: entries[name] for name in saved["names"]}
    return _module_state({"entries": ordered, "versions": saved["versions"]})
