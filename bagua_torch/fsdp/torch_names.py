"""What this package uses of PyTorch's FSDP2, in this file alone, since a later PyTorch may change it.

Tried with PyTorch 2.11 and 2.13.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import fields
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.autograd import Variable

TRIED = "2.11 and 2.13"
"""Versions of PyTorch with which this package was tried."""

try:
    from torch.distributed.fsdp import FSDPModule
    from torch.distributed.fsdp._fully_shard import _fsdp_common as common
    from torch.distributed.fsdp._fully_shard._fsdp_api import AllGather, ReduceScatter
    from torch.distributed.fsdp._fully_shard._fsdp_common import DDPMeshInfo, FSDPMeshInfo, TrainingState
except ImportError as exc:
    raise ImportError(
        f"bagua_torch.fsdp: PyTorch {torch.__version__} lacks what it needs of FSDP2 ({exc}); it was tried with "
        f"PyTorch {TRIED}",
        name=exc.name,
    ) from exc

__all__ = [
    "AllGather",
    "FSDPModule",
    "ReduceScatter",
    "Unit",
    "after_backward",
    "observe_forward",
    "op_of",
    "sharded_modules",
    "units_of",
]


class Unit:
    """The parameters that one call of `fully_shard` has grouped: one all-gather, one reduce-scatter.

    Args:
        name: The name of its module in the model.
        module: The module.
        group: PyTorch's object of these parameters.
    """

    def __init__(self, name: str, module: Any, group: Any) -> None:
        self.name, self._module, self._group = name, module, group
        self._before = group._all_gather_comm, group._reduce_scatter_comm
        self._unused = getattr(group, "reduce_scatter_unused_params", None)
        self._meshes = group.mesh_info, group.post_forward_mesh_info
        self._hook: Callable[[torch.Tensor], None] | None = None

    @property
    def process_groups(self) -> list[dist.ProcessGroup]:
        """The ranks over which it is sharded; then those over which it is after forward, if that differs.

        Empty for a module of `replicate`, which is not sharded.
        """
        return [info.shard_process_group for info in self._meshes if isinstance(info, FSDPMeshInfo)]

    @property
    def replicas(self) -> dist.ProcessGroup | None:
        """The ranks that keep the same shard, of a mesh of two dimensions; None on another mesh."""
        info = self._meshes[0]
        return info.replicate_process_group if isinstance(info, DDPMeshInfo) else None

    @property
    def gather_dtypes(self) -> list[torch.dtype]:
        """The different dtypes in which parameters are gathered."""
        cast = self._group.mp_policy.param_dtype
        found = (p.sharded_param.dtype for p in self._group.fsdp_params)
        return [*dict.fromkeys(cast if cast and dtype.is_floating_point else dtype for dtype in found)]

    @property
    def reduce_dtypes(self) -> list[torch.dtype]:
        """The different dtypes in which gradients are reduced; PyTorch itself refuses more than one."""
        policy = self._group.mp_policy
        cast = policy.reduce_dtype or policy.param_dtype
        return [*dict.fromkeys(cast or p.sharded_param.dtype for p in self._trained)]

    @property
    def gradient_numel(self) -> int:
        """Number of elements of the gradients of all trainable parameters, with the padding of shards."""
        ranks: int = self.process_groups[0].size()
        return ranks * self.shard_numel

    @property
    def shard_numel(self) -> int:
        """Number of elements of a rank's shards of these gradients, with their padding."""
        return int(sum(math.prod(p.padded_sharded_param_size) for p in self._trained))

    @property
    def gradient_rows(self) -> list[tuple[int, int]]:
        """The number of rows, along the first dimension, and of elements of a row of each trained parameter."""
        return [(p._orig_size[0], math.prod(p._orig_size[1:])) for p in self._trained]

    @property
    def is_sharded_by_rows(self) -> bool:
        """Whether all parameters are sharded along their first dimension."""
        return all(p.fsdp_placement.dim == 0 for p in self._group.fsdp_params)

    @property
    def version(self) -> int:
        """A number that grows when the optimizer, or another, changes trained parameters."""
        return sum(p.sharded_param._version for p in self._trained)

    @property
    def device(self) -> torch.device:
        """The device that computes and communicates, even if shards are kept elsewhere."""
        found: torch.device = self._group.device
        return found

    @property
    def parameters(self) -> list[tuple[str, tuple[int, ...], bool]]:
        """The name of each parameter in the module that holds it, its whole shape, and whether it is trained."""
        return [
            (p._module_info.param_name, tuple(p._orig_size), p.sharded_param.requires_grad)
            for p in self._group.fsdp_params
        ]

    @property
    def shards(self) -> list[torch.Tensor]:
        """The shard of each parameter on this rank."""
        return [p.sharded_param.to_local() for p in self._group.fsdp_params]

    @property
    def averages_replicas(self) -> bool:
        """Whether a backward pass averages over replicas, as `set_requires_all_reduce` has set it."""
        return bool(self._group.all_reduce_grads)

    @property
    def divide_factor(self) -> float | None:
        """The divisor that the user has set for gradients; None for the number of ranks."""
        factor: float | None = self._group.gradient_divide_factor
        return factor

    @property
    def has_gradients(self) -> bool:
        """Whether an earlier backward pass has left gradients."""
        return any(p.sharded_param.grad is not None for p in self._trained)

    @property
    def is_in_forward(self) -> bool:
        """Whether the parameters are gathered for a forward pass."""
        return bool(self._group._training_state == TrainingState.FORWARD)

    def prefetch(self) -> bool:
        """Begin to gather the parameters for a forward pass; returns whether they had to be. Collective."""
        if self._group._all_gather_result is not None or self._group.is_unsharded:
            return False
        self._group._prefetch_unshard(self._group, "forward")
        return True

    def drop_gathered(self) -> None:
        """Forget the parameters that `prefetch` gathers, so that the next use gathers them again."""
        self._group._all_gather_result = None

    def reads_at_once(self, reduced: torch.Tensor) -> bool:
        """Whether PyTorch may read the result of a reduce-scatter before the backward pass ends.

        It does to average it over replicas, to divide it after a sum, to cast it, to copy it to another device,
        to add it to gradients, and to call hooks of parameters. Otherwise the gradients are views of it.
        """
        group, dtype = self._group, reduced.dtype
        if group._all_reduce_hook is not None or isinstance(group.mesh_info, DDPMeshInfo):
            return True
        if group.force_sum_reduction_for_comms or dtype not in (torch.float32, torch.bfloat16):
            return True
        return any(
            p.orig_dtype != dtype
            or p.offload_to_cpu
            or p.sharded_param.grad is not None
            or getattr(p.sharded_param, "_post_accumulate_grad_hooks", None)
            for p in self._trained
        )

    @property
    def _trained(self) -> list[Any]:
        return [p for p in self._group.fsdp_params if p.sharded_param.requires_grad]

    def use(self, gather: AllGather, reduce: ReduceScatter, *, include_unused: bool) -> None:
        """Have PyTorch communicate by these, and reduce zeros for parameters without a gradient if asked to."""
        self._module.set_custom_all_gather(gather)
        self._module.set_custom_reduce_scatter(reduce)
        if include_unused and self._unused is not None:
            self._module.set_reduce_scatter_unused_params(True)

    def use_for_replicas(self, average: Callable[[torch.Tensor], None]) -> None:
        """Have `average` reduce the shards of gradients over replicas, instead of PyTorch's all-reduce.

        PyTorch always makes its own for a group on a mesh with replicas, and calls the hook afterwards. So the
        group gets the mesh without the replicas; its parameters keep theirs.
        """
        info, after = self._meshes
        settings = {each.name: getattr(info, each.name) for each in fields(FSDPMeshInfo) if each.init}
        only_shards = FSDPMeshInfo(**settings)
        if hasattr(info, "reduce_scatter_process_group"):
            only_shards.reduce_scatter_process_group = info.reduce_scatter_process_group
        self._group.mesh_info = only_shards
        self._group.post_forward_mesh_info = only_shards if after is info else after
        self._module.set_all_reduce_hook(average)

    def use_alone(self, reduce: Callable[[torch.Tensor], None]) -> None:
        """Have `reduce` change gradients on a single rank, where PyTorch calls no reduce-scatter."""
        self._hook = reduce
        self._module.set_all_reduce_hook(reduce)

    def restore(self) -> None:
        """Have PyTorch communicate as before."""
        if self._group.mesh_info is not self._meshes[0]:
            self._group.mesh_info, self._group.post_forward_mesh_info = self._meshes
            self._group._all_reduce_hook = None
        if self._hook is not None and self._group._all_reduce_hook is self._hook:
            self._group._all_reduce_hook = None
        self._group._all_gather_comm, self._group._reduce_scatter_comm = self._before
        if self._unused is not None:
            self._group.reduce_scatter_unused_params = self._unused

    @property
    def is_custom(self) -> bool:
        """Whether it communicates by custom functions already."""
        ours = (
            type(each).__module__ for each in (self._group._all_gather_comm, self._group._reduce_scatter_comm)
        )
        return any(not module.startswith("torch.") for module in ours)

    @property
    def has_hook(self) -> bool:
        """Whether `set_all_reduce_hook` has set a function."""
        return self._group._all_reduce_hook is not None


def units_of(model: nn.Module) -> Iterator[Unit]:
    """All groups of parameters that `fully_shard` has made in a model, in the order of its modules.

    Raises:
        ValueError: A module has several, sharded over different meshes, as `shard_placement_fn` can make them.
    """
    for name, (module, groups) in _groups_of(model).items():
        if len(groups) > 1:
            raise ValueError(name)
        yield from (Unit(name, module, group) for group in groups)


def sharded_modules(model: nn.Module) -> list[str]:
    """The names of all modules of which `fully_shard` has grouped parameters, in the order of the modules."""
    return list(_groups_of(model))


def _groups_of(model: nn.Module) -> dict[str, tuple[Any, list[Any]]]:
    """Each module with groups of parameters by name, and PyTorch's objects of these, each once."""
    found: dict[str, tuple[Any, list[Any]]] = {}
    seen: set[int] = set()
    for name, module in model.named_modules():
        if not isinstance(module, FSDPModule):
            continue
        state = module._get_fsdp_state()
        groups = getattr(state, "_fsdp_param_groups", None)
        if groups is None:  # PyTorch 2.11
            groups = [state._fsdp_param_group] if state._fsdp_param_group is not None else []
        new = [group for group in groups if id(group) not in seen]  # `fully_shard` of a list of modules
        seen.update(map(id, new))
        if new:
            found[name] = module, new
    return found


def op_of(op: Any) -> str:
    """The reduction that PyTorch asks for: "sum", "avg", "premul_sum" or the name of another one."""
    reduce_op: Any = dist.ReduceOp
    for name in ("AVG", "SUM", "PREMUL_SUM"):
        if op == getattr(reduce_op, name):
            return name.lower()
    return str(op)


def after_backward(call: Callable[[], None]) -> None:
    """Call a function at the end of the backward pass that is running."""
    engine: Any = Variable._execution_engine
    engine.queue_callback(call)


def observe_forward(model: nn.Module, begin: Callable[[], None], end: Callable[[], None]) -> Callable[[], None]:
    """Call `begin` before each forward pass of a model, and `end` after it, also if it raises.

    Returns a function that ends this.
    """
    uncompiled: Any = getattr(common, "_dynamo_disable", lambda function: function)

    def before(*_: Any) -> None:
        begin()

    def after(*_: Any) -> None:
        end()

    hooks = [
        model.register_forward_pre_hook(uncompiled(before), prepend=True),
        model.register_forward_hook(uncompiled(after), always_call=True),
    ]

    def stop() -> None:
        for hook in hooks:
            hook.remove()

    return stop
