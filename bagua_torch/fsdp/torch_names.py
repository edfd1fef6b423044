"""The parts of PyTorch's FSDP2 that this package uses, in one file, since a later PyTorch may change them.

Tried with PyTorch 2.11 and 2.13.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from copy import copy
from dataclasses import fields
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import nn
from torch.autograd import Variable
from torch.utils.hooks import RemovableHandle

if TYPE_CHECKING:
    from torch.distributed.fsdp._fully_shard._fsdp_param import FSDPParam
    from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup

TRIED = "2.11 and 2.13"
"""Versions of PyTorch with which this package was tried."""

try:
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.fsdp import FSDPModule
    from torch.distributed.fsdp._fully_shard import _fsdp_common as common
    from torch.distributed.fsdp._fully_shard._fsdp_api import AllGather, ReduceScatter
    from torch.distributed.fsdp._fully_shard._fsdp_common import DDPMeshInfo, FSDPMeshInfo, TrainingState
    from torch.distributed.tensor import DTensor
except ImportError as exc:
    raise ImportError(
        f"bagua_torch.fsdp: PyTorch {torch.__version__} lacks what it needs of FSDP2 ({exc}); it was tried with "
        f"PyTorch {TRIED}",
        name=exc.name,
    ) from exc

__all__ = ["AllGather", "DTensor", "DeviceMesh", "FSDPModule", "ReduceScatter"]
"""What is PyTorch's."""

_METHOD = object()


class _OneReplica:
    """Stands for the process group of a replica without others."""

    def size(self) -> int:
        return 1


class Unit:
    """The parameters that one call of `fully_shard` has grouped: one all-gather, one reduce-scatter.

    Args:
        name: The name of its module in the model.
        group: PyTorch's object of these parameters.
    """

    def __init__(self, name: str, group: FSDPParamGroup) -> None:
        self.name, self._group = name, group
        self._meshes = group.mesh_info, group.post_forward_mesh_info
        self._changes: list[tuple[str, object, object]] = []
        """Attributes of `group` that this has set, with the values before and since; `_METHOD` for a method."""
        self._hooks: list[RemovableHandle] = []

    def _set(self, name: str, value: object) -> None:
        """Set an attribute of PyTorch's object, or replace a method, until `restore`."""
        self._changes.append((name, vars(self._group).get(name, _METHOD), value))
        setattr(self._group, name, value)

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
        return self.process_groups[0].size() * self.shard_numel

    @property
    def shard_numel(self) -> int:
        """Number of elements of a rank's shards of these gradients, with their padding."""
        return sum(math.prod(p.padded_sharded_param_size) for p in self._trained)

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
    def shard_version(self) -> int:
        """A number that grows when anybody changes a parameter, or this rank's shard of it."""
        return sum(_version_of(p.sharded_param) for p in self._group.fsdp_params)

    @property
    def gradient_versions(self) -> list[int | None]:
        """A number for each gradient, which grows when somebody changes it; None if there is none."""
        gradients = [p.sharded_param.grad for p in self._trained]
        return [None if each is None else _version_of(each) for each in gradients]

    @property
    def device(self) -> torch.device:
        """The device that computes and communicates, even if shards are kept elsewhere."""
        return self._group.device

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
        sharded: list[Any] = [p.sharded_param for p in self._group.fsdp_params]
        return [each.to_local() for each in sharded]

    def trained_shards(self, model: nn.Module) -> dict[str, TrainedShard]:
        """The parameters that are trained, by their names in the model that contains this unit."""
        names = {id(parameter): name for name, parameter in model.named_parameters()}
        return {names[id(p.sharded_param)]: TrainedShard(p) for p in self._trained}

    @property
    def partial_gradients(self) -> torch.Tensor | None:
        """The sum of shards of gradients whose average over replicas `set_requires_all_reduce` has postponed."""
        return self._group._partial_reduce_output

    @property
    def divide_factor(self) -> float | None:
        """The divisor that the user has set for gradients; None for the number of ranks."""
        return self._group.gradient_divide_factor

    @property
    def has_gradients(self) -> bool:
        """Whether an earlier backward pass has left gradients."""
        return any(p.sharded_param.grad is not None for p in self._trained)

    @property
    def is_in_forward(self) -> bool:
        """Whether the parameters are gathered for a forward pass."""
        return self._group._training_state == TrainingState.FORWARD

    def prefetch(self) -> bool:
        """Begin to gather the parameters for a forward pass; returns whether they had to be. Collective."""
        if self._group._all_gather_result is not None or self._group.is_unsharded:
            return False
        self._group._prefetch_unshard(self._group, "forward")
        return True

    def reshard(self) -> None:
        """Free the parameters that a forward pass without a backward pass has gathered and left so."""
        self._group.reshard()

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
    def _trained(self) -> list[FSDPParam]:
        return [p for p in self._group.fsdp_params if p.sharded_param.requires_grad]

    def use(self, gather: AllGather, reduce: ReduceScatter, *, include_unused: bool) -> None:
        """Have PyTorch communicate by these, and reduce zeros for parameters without a gradient if asked to."""
        self._set("_all_gather_comm", gather)
        self._set("_reduce_scatter_comm", reduce)
        if include_unused and hasattr(self._group, "reduce_scatter_unused_params"):
            self._set("reduce_scatter_unused_params", True)
            self._before("post_backward", self._fill_unused)

    def on_reset(self, call: Callable[[], None]) -> None:
        """Call a function when `FSDPModule.reset_iter_state` gives up a step, if this PyTorch has it."""
        if hasattr(self._group, "_reset_iter_state"):
            self._before("_reset_iter_state", call)

    def _before(self, method: str, call: Callable[[], None]) -> None:
        """Call a function before a method of PyTorch's object."""
        former = getattr(self._group, method)

        def both(*args: object) -> None:
            call()
            former(*args)

        self._set(method, both)

    def _fill_unused(self) -> None:
        """Give parameters without a gradient one of zeros, if others keep theirs in the dtype of reductions.

        They do if earlier passes have not reduced them. PyTorch's zeros have the dtype of the parameters, and it
        refuses gradients of different dtypes.
        """
        group, trained = self._group, self._trained
        if not group.reduce_grads or all(p.unsharded_accumulated_grad is None for p in trained):
            return
        for p in trained:
            parameter = getattr(p, "_unsharded_param", None)
            if parameter is not None and p.unsharded_accumulated_grad is None and parameter.grad is None:
                p.unsharded_accumulated_grad = torch.zeros_like(parameter, dtype=p.reduce_dtype)

    def leave_out_replicas(self) -> FSDPMeshInfo:
        """Have PyTorch average gradients over the shards of this replica alone; returns their mesh.

        The group gets the mesh without the replicas; its parameters keep theirs.
        """
        info, after = self._meshes
        settings = {each.name: getattr(info, each.name) for each in fields(FSDPMeshInfo) if each.init}
        only_shards = FSDPMeshInfo(**settings)
        if hasattr(info, "reduce_scatter_process_group"):
            only_shards.reduce_scatter_process_group = info.reduce_scatter_process_group
        self._set("mesh_info", only_shards)
        if after is info:
            self._set("post_forward_mesh_info", only_shards)
        return only_shards

    def use_for_replicas(self, average: Callable[[torch.Tensor], None]) -> None:
        """Have `average` reduce the shards of gradients over replicas, instead of PyTorch's all-reduce.

        PyTorch always makes its own for a group on a mesh with replicas, and calls the hook afterwards. So the
        replicas are left out. A pass that postpones the average has one replica, so that PyTorch itself keeps its
        gradients.
        """
        only_shards = self.leave_out_replicas()
        self._set("_all_reduce_hook", average)
        postponing: Any = copy(self._meshes[0])
        postponing.replicate_process_group = _OneReplica()
        group, post_backward = self._group, self._group.post_backward

        def in_its_mesh(*args: object) -> None:
            if not group.all_reduce_grads:
                group.mesh_info = postponing
            try:
                post_backward(*args)
            finally:
                group.mesh_info = only_shards

        self._set("post_backward", in_its_mesh)

    def use_alone(self, reduce: Callable[[torch.Tensor], None]) -> None:
        """Have `reduce` change gradients on a single rank, where PyTorch calls no reduce-scatter."""
        self._set("_all_reduce_hook", reduce)

    @property
    def hook_was_replaced(self) -> bool:
        """Whether `set_all_reduce_hook` has replaced what averages gradients here."""
        ours = [since for name, _, since in self._changes if name == "_all_reduce_hook"]
        return bool(ours) and self._group._all_reduce_hook is not ours[-1]

    def before_forward(self, call: Callable[[], None]) -> None:
        """Call a function before a module of this unit runs, and before PyTorch gathers for it."""
        for module in self._group.modules:
            self._hooks.append(module.register_forward_pre_hook(_uncompiled(call), prepend=True))

    def restore(self) -> None:
        """Have PyTorch communicate as before. What others have set since stays."""
        group = self._group
        for name, before, since in reversed(self._changes):
            if getattr(group, name) is not since:
                continue
            if before is _METHOD:
                delattr(group, name)
            else:
                setattr(group, name, before)
        self._changes.clear()
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()

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


class TrainedShard:
    """A parameter that is trained, of which this rank has a shard.

    A shard is padded with rows of zeros to the shape that it has on all ranks.

    Args:
        parameter: PyTorch's object of it.
    """

    def __init__(self, parameter: FSDPParam) -> None:
        self._parameter = parameter

    @property
    def parameter(self) -> DTensor:
        """The sharded parameter, as optimizers have it."""
        return self._parameter.sharded_param  # type: ignore[return-value]  # torch says a parameter

    @property
    def local(self) -> torch.Tensor:
        """The shard of this rank, without padding."""
        return self.parameter._local_tensor

    @property
    def padded(self) -> torch.Tensor:
        """The same with its padding."""
        return self._parameter._sharded_param_data.view(self._parameter.padded_sharded_param_size)

    def unpadded(self, padded: torch.Tensor) -> torch.Tensor:
        """The part of a tensor of the shape of `padded` that is no padding, in the same memory."""
        rows = self.local.shape[0] if self.local.numel() else 0
        return padded if padded.shape == self.local.shape else padded.narrow(0, 0, rows)

    def move_to(self, padded: torch.Tensor) -> None:
        """Keep the shard in this memory from now on, which has its values already."""
        self._parameter._sharded_param_data = padded.view(-1)
        self.parameter._local_tensor = self.unpadded(padded)

    def sharded(self, flat: torch.Tensor) -> DTensor:
        """A tensor that is sharded as the parameter is, over flat memory of a shard with its padding."""
        local = self.unpadded(flat.view(self._parameter.padded_sharded_param_size))
        return _sharded_like(self.parameter, local)


def of_this_replica(tensor: object) -> object:
    """A sharded tensor on the mesh of this replica alone, over the same memory; others are returned as they are.

    The first dimension of its mesh is that of the replicas; others are of shards, and of tensor parallelism.
    """
    if not isinstance(tensor, DTensor) or tensor.device_mesh.ndim == 1:
        return tensor
    mesh = tensor.device_mesh
    assert mesh.mesh_dim_names is not None
    return _sharded_like(tensor, tensor.to_local().detach(), mesh[mesh.mesh_dim_names[1:]])


def _sharded_like(tensor: DTensor, local: torch.Tensor, mesh: DeviceMesh | None = None) -> DTensor:
    """A tensor of the shape of another one, over this rank's part, on another mesh or on that of the other."""
    placements = tensor.placements if mesh is None else tensor.placements[-mesh.ndim :]
    return DTensor.from_local(
        local, mesh or tensor.device_mesh, placements, run_check=False, shape=tensor.shape, stride=tensor.stride()
    )


def units_of(model: nn.Module) -> Iterator[Unit]:
    """All groups of parameters that `fully_shard` has made in a model, in the order of its modules.

    Raises:
        ValueError: A module has several, sharded over different meshes, as `shard_placement_fn` can make them.
    """
    for name, groups in _groups_of(model).items():
        if len(groups) > 1:
            raise ValueError(name)
        yield from (Unit(name, group) for group in groups)


def sharded_modules(model: nn.Module) -> list[str]:
    """The names of all modules of which `fully_shard` has grouped parameters, in the order of the modules."""
    return list(_groups_of(model))


def _groups_of(model: nn.Module) -> dict[str, list[FSDPParamGroup]]:
    """PyTorch's groups of parameters by the names of their modules, each once."""
    found: dict[str, list[FSDPParamGroup]] = {}
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
            found[name] = new
    return found


def _version_of(tensor: Any) -> int:
    """A number that grows when a sharded tensor is changed, as a whole or by its local tensor."""
    found: int = tensor._version + tensor._local_tensor._version
    return found


def op_of(op: object) -> str:
    """The reduction that PyTorch asks for: "sum", "avg", "premul_sum" or the name of another one."""
    for name in ("AVG", "SUM", "PREMUL_SUM"):
        if op == getattr(dist.ReduceOp, name):
            return name.lower()
    return str(op)


class _Watch:
    """Learns how a backward pass ends: it is called, or deleted without a call if the pass raises."""

    def __init__(self, ends: Callable[[bool], None]) -> None:
        self._ends: Callable[[bool], None] | None = ends

    def __call__(self) -> None:
        ends, self._ends = self._ends, None
        assert ends is not None
        ends(False)

    def __del__(self) -> None:
        if self._ends is not None:
            self._ends(True)


def running_backward() -> int | None:
    """The number of the backward pass that this thread runs; None outside of passes."""
    number = torch._C._current_graph_task_id()
    return None if number < 0 else number


def observe_backward(ends: Callable[[bool], None]) -> None:
    """Call `ends(raised)` when the running backward pass ends, before the caller of `backward()` goes on."""
    Variable._execution_engine.queue_callback(_Watch(ends))


def _uncompiled(call: Callable[..., None]) -> Any:
    """A hook that calls a function, without arguments."""
    disable: Any = getattr(common, "_dynamo_disable", lambda function: function)
    return disable(lambda *_: call())


def observe_forward(
    model: nn.Module, begin: Callable[[], None], end: Callable[[bool], None]
) -> Callable[[], None]:
    """Call `begin` before each forward pass of a model, and `end(raised)` after it.

    Returns a function that ends this.
    """
    disable: Any = getattr(common, "_dynamo_disable", lambda function: function)

    def after(module: nn.Module, arguments: object, output: object) -> None:
        end(output is None)

    hooks = [
        model.register_forward_pre_hook(_uncompiled(begin), prepend=True),
        model.register_forward_hook(disable(after), always_call=True),
    ]

    def stop() -> None:
        for hook in hooks:
            hook.remove()

    return stop
