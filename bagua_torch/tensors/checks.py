"""Checks of a wrapper's module, optimizers and use. No check changes anything.

Arguments of PyTorch's wrapper are checked in `torch_arguments`.
"""

from __future__ import annotations

import inspect
from collections.abc import Collection, Mapping, Sequence
from itertools import zip_longest
from typing import NoReturn

import torch
import torch.distributed as dist
from torch import nn

from bagua_comm import Algorithm, ArrayError, CommError, CommMismatch, Communicator, UnsupportedError
from bagua_comm.algorithms.base import check_algorithm_argument, core_of, exchanges_weights
from bagua_comm.algorithms.combinators import Every
from bagua_comm.arrays import repeats
from bagua_comm.errors import shown

from ..arrays import as_array
from ..errors import MismatchError, MisuseError
from .flats import layout_of
from .model_state import ModelState
from .sharded import check_sharded

WRAPPER = "DistributedDataParallel"
"""The name in errors of the class whose arguments are checked."""


def names_to_ignore(module: nn.Module, names: Collection[str]) -> set[str]:
    """The parameters and buffers to ignore.

    These are `names`, the names that the module lists for PyTorch, and all names in parts of the module whose
    `stays_on_rank` is True, such as the experts of a MoE.

    Raises:
        ArrayError: `names` is one string, or the module has no parameter or buffer of such a name.
    """
    known = {name for name, _ in module.named_parameters(remove_duplicate=False)}
    known |= {name for name, _ in module.named_buffers(remove_duplicate=False)}
    unknown = sorted(set(names) - known)
    if isinstance(names, str) or unknown:
        raise ArrayError(
            f"DistributedDataParallel: params_and_buffers_to_ignore is {names!r}, expected names of the "
            "module's parameters and buffers" + (f"; there is no {unknown[0]!r}" if unknown else "")
        )
    local = [(f"{name}." if name else "", m) for name, m in module.named_modules() if hasattr(m, "stays_on_rank")]
    of_rank = {
        f"{prefix}{name}"
        for prefix, part in local
        if part.stays_on_rank
        for tensors in (part.named_parameters, part.named_buffers)
        for name, _ in tensors(remove_duplicate=False)
    }
    if _is_wrapper(module):
        return {*names, *of_rank}  # a wrapper of bagua_torch
    return {*names, *of_rank, *getattr(module, PYTORCHS_NAMES, ())}


PYTORCHS_NAMES = "_ddp_params_and_buffers_to_ignore"
"""The attribute of a module with the names that PyTorch's wrapper ignores."""


def _refuse(module: nn.Module) -> NoReturn:
    """Raise when PyTorch's wrapper reads the attribute: Accelerate and Trainer let it wrap ours implicitly."""
    raise UnsupportedError(
        "DistributedDataParallel: this module is wrapped by bagua_torch already, and is about to be wrapped by "
        "PyTorch's DistributedDataParallel once more, which would average gradients twice. Give Accelerate's "
        "prepare, Trainer(model=...) and PyTorch's wrapper the plain module, and register "
        "bagua_torch.comm_hook(average) on the result; or, with Accelerate, prepare everything but "
        "this module"
    )


refused_to_pytorchs_own = property(_refuse)
"""The value of `PYTORCHS_NAMES` in our wrapper."""


def _is_wrapper(module: nn.Module) -> bool:
    """Whether this is a wrapper of bagua_torch."""
    return inspect.getattr_static(module, PYTORCHS_NAMES, None) is refused_to_pytorchs_own


def parts_stay(module: nn.Module) -> bool:
    """Whether `stays_on_rank` is True for a part of the module, which may be empty on this rank."""
    return any(getattr(part, "stays_on_rank", False) for part in module.modules())


def check_same_layer(kind: str, numbers: Sequence[float]) -> None:
    """Raise `CommMismatch` unless all ranks call the same layer; `numbers` has the layer of each rank, (p,)."""
    for rank, number in enumerate(numbers):
        if number != numbers[0]:
            raise CommMismatch(
                f"{kind}: rank 0 calls layer {numbers[0]:.0f} of those made with this communicator, but rank "
                f"{rank} layer {number:.0f}; expected the same order of layers on all ranks"
            )


def check_type(module: object) -> None:
    """Raise `MisuseError` unless this is a module, in which no wrapper of this class has all parameters."""
    if not isinstance(module, nn.Module):
        raise MisuseError(f"DistributedDataParallel: module is {shown(module)}, expected a torch.nn.Module")
    count = len(list(module.parameters()))
    for name, part in module.named_modules():
        if _is_wrapper(part) and len(list(part.parameters())) == count:
            raise MisuseError(
                f"DistributedDataParallel: module {f'contains {name!r}, ' if name else 'is '}a "
                "DistributedDataParallel, which would be closed; give the plain module, its attribute `module`"
            )


def check_batch_norm(comm: Communicator, module: nn.Module) -> None:
    """Check that no `torch.nn.SyncBatchNorm` would silently normalize over the batch of its own rank."""
    name = next((name for name, part in module.named_modules() if isinstance(part, nn.SyncBatchNorm)), None)
    if name is not None and comm.size > 1 and not (dist.is_available() and dist.is_initialized()):
        raise MisuseError(
            f"{name or 'the module'} is a torch.nn.SyncBatchNorm, which normalizes over the ranks of a process "
            "group of torch.distributed, and there is none: each rank would normalize its own batch. Use "
            "bagua_torch.sync_batchnorm.convert(module, comm) in place of PyTorch's, for frozen layers, too; or, "
            "on GPUs, connect by bagua_torch.connect(process_group=True)"
        )


def check_module(comm: Communicator, model: ModelState) -> torch.device:
    """The device of the trained parameters.

    Raises:
        ArrayError: No parameter is trained, or one is lazy. A RuntimeError as well.
        UnsupportedError: The communicator cannot carry a parameter or a buffer, or they are on several devices,
            or not on the communicator's, or a part is spread over another number of ranks.
    """
    for name, part in model.module.named_modules():
        ranks = getattr(part, "ranks", comm.size) if getattr(part, "stays_on_rank", False) else comm.size
        if ranks != comm.size:
            raise UnsupportedError(
                f"DistributedDataParallel: {name!r} is spread over {ranks} ranks, expected all {comm.size} of "
                "this wrapper: otherwise ranks would hold copies of one part, and nothing would average them; "
                "give both the same communicator"
            )
    if not model.trained:
        raise MisuseError("DistributedDataParallel: the module has no parameter to train")
    for name, tensor in model.tensors().items():
        if nn.parameter.is_lazy(tensor):
            raise MisuseError(
                f"DistributedDataParallel: {name!r} is lazy; run the module once before wrapping it"
            )
        if hasattr(tensor, "device_mesh"):  # a DTensor
            raise UnsupportedError(
                f"DistributedDataParallel: {name!r} is a {type(tensor).__name__}, as of a module that is sharded "
                "or parallelized, expected whole parameters; for fully_shard call bagua_torch.fsdp.attach instead"
            )
        check_device(comm.device, name, tensor)
        try:
            comm.transport_for(as_array(tensor), call="DistributedDataParallel", name=repr(name))
        except UnsupportedError as exc:
            raise UnsupportedError(f"DistributedDataParallel: {name!r}: {exc}") from exc
    devices = {parameter.device for parameter in model.trained.values()}
    if len(devices) > 1:
        raise UnsupportedError(
            f"DistributedDataParallel: parameters are on several devices: {sorted(map(str, devices))}"
        )
    return devices.pop()


def check_device(mine: int | None, name: str, tensor: torch.Tensor) -> None:
    """Raise `UnsupportedError` if a tensor is on a CUDA device that is not the communicator's, `mine`."""
    if tensor.device.type != "cuda" or tensor.device.index == mine:
        return
    if mine is None:
        raise UnsupportedError(
            f"DistributedDataParallel: {name!r} is on {tensor.device}, but this communicator has no device; "
            "see `python -m bagua_comm info`"
        )
    raise UnsupportedError(
        f"DistributedDataParallel: {name!r} is on {tensor.device}, but this rank's communicator works on "
        f"cuda:{mine}; move the module there, or call torch.cuda.set_device({mine}) before the communicator is "
        "constructed"
    )


def listed(
    optimizers: torch.optim.Optimizer | Sequence[torch.optim.Optimizer] | None, owner: str = WRAPPER
) -> list[torch.optim.Optimizer]:
    """The optimizers in a list; none for None.

    Raises:
        ArrayError: They are neither an optimizer nor a sequence.
    """
    if optimizers is None:
        return []
    if isinstance(optimizers, torch.optim.Optimizer):
        return [optimizers]
    try:
        return list(optimizers)
    except TypeError:
        hint = ""
        if hasattr(optimizers, "exchange"):
            hint = "; give an algorithm as algorithm=..., after the optimizers"
        raise ArrayError(
            f"{owner}: optimizers is {shown(optimizers)}, expected an optimizer of torch.optim, "
            f"or a list of them{hint}"
        ) from None


def check_optimizers(
    optimizers: Sequence[torch.optim.Optimizer],
    trained: Mapping[str, torch.Tensor],
    algorithm: Algorithm,
    owner: str = WRAPPER,
) -> None:
    """Raise `ArrayError` unless the optimizers step all trained parameters, and fit the algorithm.

    Raise `UnsupportedError` if one of them is sharded over the ranks, or needs sparse gradients, and does not fit
    the algorithm.
    """
    check_algorithm_argument(owner, "algorithm", algorithm)
    owned: set[int] = set()
    wanted = {id(parameter) for parameter in trained.values()}
    for number, optimizer in enumerate(optimizers):
        if not isinstance(optimizer, torch.optim.Optimizer):
            raise ArrayError(
                f"{owner}: optimizers is {shown(optimizers)}, expected optimizers of "
                "torch.optim; give all other arguments by name"
            )
        if any(optimizer is earlier for earlier in optimizers[:number]):
            raise ArrayError(
                f"{owner}: optimizer {number} ({type(optimizer).__name__}) is in the list twice, and a step ends "
                "when each has stepped; give it once"
            )
        mine = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
        if not mine & wanted:
            raise ArrayError(
                f"{owner}: optimizer {number} ({type(optimizer).__name__}) has none of the "
                "parameters that are averaged. If it steps only experts or ignored parameters, leave it out of "
                "the list; otherwise, was the module copied after the optimizer was made?"
            )
        if isinstance(optimizer, torch.optim.SparseAdam) and any(p.payload == "grad" for p in algorithm.phases):
            raise UnsupportedError(
                f"{owner}: optimizer {number} ({type(optimizer).__name__}) takes only "
                f"sparse gradients, but {algorithm} averages dense ones; give torch.optim.Adam, or an algorithm "
                "that exchanges only weights, such as Decentralized or DiLoCo"
            )
        owned |= mine
    missing = [name for name, parameter in trained.items() if id(parameter) not in owned]
    if optimizers and missing:
        raise ArrayError(
            f"{owner}: no optimizer given steps {', '.join(map(repr, missing[:3]))}"
            f"{' and others' if len(missing) > 3 else ''}; give all optimizers, or freeze such parameters"
        )
    check_sharded(optimizers, algorithm)
    phases = algorithm.phases
    counting = len(phases) > 1 or exchanges_weights(algorithm) or any(isinstance(p, Every) for p in phases)
    if counting and not optimizers:
        raise ArrayError(f"{owner}: {algorithm} depends on steps: give the optimizers")
    for phase in phases:
        if phase.lends:
            _check_sharing(optimizers, phase)


def _check_sharing(optimizers: Sequence[torch.optim.Optimizer], algorithm: Algorithm) -> None:
    """Raise `ArrayError` unless all optimizers share the algorithm's state, and have the same settings."""
    shared = algorithm.lends
    if not optimizers:
        raise ArrayError(
            f"DistributedDataParallel: {algorithm} needs an optimizer that shares its {shared}, such as "
            "bagua_torch.QAdamOptimizer: give it"
        )
    for optimizer in optimizers:
        if getattr(optimizer, "shares_state", "") != shared:
            raise ArrayError(
                f"DistributedDataParallel: {type(algorithm).__name__} averages the {shared} of an optimizer that "
                f"shares it, such as bagua_torch.QAdamOptimizer, but the optimizer is {type(optimizer).__name__}"
            )
        optimizer.check_algorithm(core_of(algorithm))  # type: ignore[attr-defined]


def check_ranks(
    comm: Communicator, model: ModelState, optimizers: Sequence[torch.optim.Optimizer], *, tuned: bool
) -> None:
    """Compare the modules of all ranks, before values are sent.

    Collective.

    Raises:
        CommMismatch: Modules differ, or the memory formats of a parameter, or the numbers of optimizers, or only
            some ranks have a tuner. A RuntimeError as well.
    """
    mine: dict[str, object] = {
        "the number of optimizers": len(optimizers),
        "the tuner": "given" if tuned else "not given",
    }
    for name, t in model.tensors().items():
        kind = f"{str(t.dtype).removeprefix('torch.')}{list(t.shape)}"
        memory = f", {in_memory(t)}" if name in model.trained else ""
        mine[repr(name)] = f"{kind}, {'trained' if t.requires_grad else 'not trained'}{memory}"
    compare("DistributedDataParallel", comm, mine)


def compare(owner: str, comm: Communicator, mine: Mapping[str, object]) -> None:
    """Compare named values of all ranks, in their order.

    Collective.

    Raises:
        CommMismatch: They differ; the same on all ranks. A RuntimeError as well.
    """
    rows = comm.allgather_object(list(mine.items()))
    for rank, theirs in enumerate(rows):
        for (name, here), (other, there) in zip_longest(rows[0], theirs, fillvalue=("nothing more", None)):
            if name != other:
                raise MismatchError(f"{owner}: ranks differ: rank 0 has {name} where rank {rank} has {other}")
            if here != there:
                raise MismatchError(
                    f"{owner}: ranks differ: {name} is {here} on rank 0, and {there} on rank {rank}; give the "
                    "same on all ranks"
                )


def check_memory(parameters: Mapping[str, nn.Parameter]) -> None:
    """Raise `UnsupportedError` if elements of a parameter share memory."""
    for name, parameter in parameters.items():
        if repeats(parameter.shape, parameter.stride()):
            raise UnsupportedError(
                f"DistributedDataParallel: {name!r} of shape {tuple(parameter.shape)} has elements that share "
                "memory, as `expand` makes them; expected memory for each element: make it contiguous, or "
                "expand it in the forward pass"
            )


def in_memory(parameter: torch.Tensor) -> str:
    """The memory format of a parameter in its bucket, as text; it must be the same on all ranks."""
    if repeats(parameter.shape, parameter.stride()):
        return "of elements that share memory"
    return layout_of(parameter).memory or "contiguous"


def check_unchanged(model: ModelState) -> dict[str, nn.Parameter]:
    """Check, before a training forward pass, that the module still has the parameters that were wrapped.

    Returns:
        The parameters that have been unfrozen.

    Raises:
        ArrayError: A parameter was added or replaced.
        UnsupportedError: An optimizer would step within the backward pass.
    """
    unfrozen = {} if model.unchanged else _unfrozen(model)
    for name, parameter in model.trained.items():
        # torch.distributed.optim sets this attribute; the optimizer would step before gradients are averaged.
        if hasattr(parameter, "_in_backward_optimizers"):
            raise UnsupportedError(
                f"DistributedDataParallel: {name!r} has an optimizer that steps within the backward pass; "
                "call optimizer.step() after backward(), when gradients are averaged"
            )
    return unfrozen


def _unfrozen(model: ModelState) -> dict[str, nn.Parameter]:
    """The parameters that were unfrozen. Raise `ArrayError` if one that is not ignored was added or replaced."""
    unfrozen: dict[str, nn.Parameter] = {}
    trained = {id(p) for p in model.trained.values()}
    for name, parameter in model.module.named_parameters():
        if id(parameter) in trained or not parameter.requires_grad or name in model.ignored:
            continue
        if not isinstance(parameter, nn.Parameter):
            continue  # set by torch.func.functional_call for this call
        before = model.all.get(name)
        if before is None:
            raise ArrayError(
                f"DistributedDataParallel: {name!r} was added after the module was wrapped; close this one and "
                "wrap the module again"
            )
        if before is not parameter:
            raise ArrayError(
                f"DistributedDataParallel: {name!r} is another parameter than when the module was wrapped; "
                "close this one and wrap the module again. Give torch.func.functional_call tensors that are "
                "not nn.Parameter; their gradients stay on this rank"
            )
        unfrozen[name] = parameter
    return unfrozen


def check_may_freeze(name: str, algorithm: Algorithm) -> None:
    """Raise `UnsupportedError` if `algorithm` cannot omit a parameter that is frozen after wrapping."""
    shared = algorithm.lends
    if shared:
        raise UnsupportedError(
            f"DistributedDataParallel: {name!r} was frozen after the module was wrapped, but {algorithm} "
            f"continues averaging its {shared}, which would move it; freeze it before wrapping, or use another "
            "algorithm"
        )


def check_may_begin(name: str, algorithm: Algorithm) -> None:
    """Raise `UnsupportedError` if `algorithm` cannot begin to train a parameter later than others."""
    for phase in algorithm.phases:
        if shared := phase.lends:
            raise UnsupportedError(
                f"DistributedDataParallel: {name!r} was unfrozen after the module was wrapped, but {phase} has "
                f"averaged the {shared} of all parameters since its first step; close this one and wrap the "
                "module again, or use another algorithm"
            )


def check_open(closed: bool) -> None:
    """Raise `CommError` if the wrapper is closed."""
    if closed:
        raise CommError(
            "DistributedDataParallel: closed, or its module was wrapped again; it would train without the "
            "other ranks"
        )


def check_backward_ended(unfinished: bool) -> None:
    """Raise `CommError` if a backward pass has begun and not ended."""
    if unfinished:
        raise CommError(
            "DistributedDataParallel: the last backward pass did not end, because it raised; close this one and "
            "wrap the module again, or load a checkpoint"
        )


def check_not_within_backward() -> None:
    """Raise `UnsupportedError` if an optimizer is about to step within a backward pass."""
    if torch._C._current_graph_task_id() != -1:
        check_not_stepped("a parameter")


def check_not_stepped(name: str | None) -> None:
    """Raise `UnsupportedError` if `name`, of a parameter that changed in the backward pass, is not None."""
    if name is not None:
        raise UnsupportedError(
            f"DistributedDataParallel: {name} was stepped within the backward pass, before its gradient was "
            "averaged; call optimizer.step() after backward(), and not in a hook of the parameter"
        )
