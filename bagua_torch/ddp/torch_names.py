"""The attributes and methods of PyTorch's DistributedDataParallel, for programs that use them on our wrapper.

Each one works, or is a key of `INSTEAD`: reading and setting it raises an error that says what to use.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from bagua_comm import UnsupportedError

from ..errors import MissingError
from ..tensors import checks
from .wrapper_state import WrapperState

TorchWrapper = nn.parallel.DistributedDataParallel

_JOIN = "enter ddp.join() in place of torch.distributed.algorithms.Join"
_ONE_DEVICE = "a process has one device here; torch.nn.parallel has this function"
_OWN_REDUCER = "it belongs to PyTorch's reducer, in whose place ddp.engine averages"
_RECORDS = "ddp.counters and ddp.comm.tracer record what was exchanged and for how long"

INSTEAD = {
    "logger": f"{_RECORDS}, and ddp._get_ddp_logging_data() has the settings",
    "_set_ddp_runtime_logging_sample_rate": _RECORDS,
    "process_group": "there is no process group of its ranks; ddp.comm is their communicator",
    "device_mesh": "ddp.comm is the communicator of its ranks",
    "scatter": _ONE_DEVICE,
    "gather": _ONE_DEVICE,
    "to_kwargs": "give device_ids, and inputs are moved; or move them by .to()",
    "join_hook": _JOIN,
    "join_device": _JOIN,
    "join_process_group": _JOIN,
    "buffer_hook": "give broadcast_buffers=False, and send buffers by ddp.comm",
    "_register_buffer_comm_hook": "give broadcast_buffers=False, and send buffers by ddp.comm",
    "_register_builtin_comm_hook": "use register_comm_hook(None, Quantized(Float16())), for example",
    "_register_fused_optim": "call optimizer.step() after backward(); bagua_torch.fuse makes it fast",
    "_update_process_group": "close this one and wrap the module again, with another comm",
    "_remove_autograd_hooks": "call ddp.close()",
    "broadcast_bucket_size": "buffers are sent together",
    "use_side_stream_for_tensor_copies": "inputs are moved on the current stream",
    **dict.fromkeys(
        (
            *("_accum_grad_hooks", "_bucket_config", "_comm_hooks", "_ddp_sink_clone", "_has_rebuilt_buckets"),
            *("_delay_all_reduce_all_params", "_delay_all_reduce_params", "_delay_grad_buffer"),
            *("_delay_grad_views", "_lazy_init_ran", "_module_parameters", "_use_python_reducer"),
            *("_static_graph_delay_allreduce_enqueued",),
        ),
        _OWN_REDUCER,
    ),
}
"""Attributes of PyTorch's wrapper that are missing here, and what to use."""

_SET_INSTEAD = {
    "algorithm": "call ddp.switch(algorithm), or ddp.replan(algorithm=...) for other settings",
    "bucket_bytes": "call ddp.replan(bucket_bytes=...)",
    "bucket_bytes_cap": "call ddp.replan(bucket_bytes=...)",
    "bucket_bytes_cap_list": "call ddp.replan(bucket_bytes=...)",
    "bucket_bytes_cap_default": "call ddp.replan(bucket_bytes=...)",
    "require_forward_param_sync": "set broadcast_buffers, since buffers are sent after the backward pass",
    "mixed_precision": "use torch.autocast, or convert the module",
    "reducer": _OWN_REDUCER,
    **dict.fromkeys(
        (
            *("comm", "optimizers", "device", "device_ids", "device_type", "output_device", "dim"),
            *("is_multi_device_module", "parameters_to_ignore", "modules_buffers", "named_module_buffers"),
            *("gradient_as_bucket_view", "batched_grad_copy", "skip_all_reduce_unused_params"),
        ),
        "close this one and wrap the module again, with other arguments",
    ),
}
"""Attributes that can be read, and what to do instead of setting them."""


class TorchNames(WrapperState):
    """Base of DistributedDataParallel: attributes and methods of PyTorch's wrapper."""

    _device: torch.device
    _inputs_to: torch.device | None
    _others: dict[str, Any]
    broadcast_buffers = True
    find_unused_parameters: bool
    static_graph: bool

    # PyTorch's functions mark the module and its parameters, which `checks.names_to_ignore` reads.
    _set_params_and_buffers_to_ignore_for_model = staticmethod(
        TorchWrapper._set_params_and_buffers_to_ignore_for_model
    )
    _get_data_parallel_params = staticmethod(TorchWrapper._get_data_parallel_params)
    _ddp_params_and_buffers_to_ignore = checks.refused_to_pytorchs_own

    def __getattr__(self, name: str) -> Any:
        """Look up missing attributes in the wrapped module, except those of PyTorch's wrapper."""
        try:
            return super().__getattr__(name)
        except AttributeError:
            module = super().__getattr__("module")
        text = f"'{type(self).__name__}' object has no attribute '{name}'"
        if name in INSTEAD or (hasattr(TorchWrapper, name) and not name.startswith("__")):
            raise MissingError(f"{text}; PyTorch's has one: here, {INSTEAD.get(name, _OWN_REDUCER)}")
        try:
            return getattr(module, name)
        except AttributeError as exc:
            raise AttributeError(f"{text}, and neither has its module, a {type(module).__name__}") from exc

    def __setattr__(self, name: str, value: Any) -> None:
        """Set an attribute of the wrapper; one that would have no effect raises, unless it keeps its value."""
        instead = _SET_INSTEAD.get(name) or INSTEAD.get(name)
        if instead is None and hasattr(TorchWrapper, name) and not hasattr(type(self), name):
            instead = _OWN_REDUCER
        if instead is not None:
            plain, now = isinstance(value, (type(None), bool, int, str, torch.device)), getattr(self, name, ...)
            if value is not now and not (plain and value == now):
                raise MissingError(f"'{type(self).__name__}' object: '{name}' cannot be set; {instead}")
        else:
            super().__setattr__(name, value)

    def __getstate__(self) -> Any:
        raise UnsupportedError("DistributedDataParallel: cannot be copied or pickled; copy its .module")

    @property
    def bucket_bytes(self) -> int:
        """The size at which a bucket is closed; `replan` changes it."""
        return self._steps.exchange.bucket_bytes

    @property
    def optimizers(self) -> list[torch.optim.Optimizer]:
        """The optimizers that were given."""
        return list(self._steps.optimizers)

    # Attributes of PyTorch's wrapper --------------------------------------------------------------------

    @property
    def require_backward_grad_sync(self) -> bool:
        """Whether backward passes are averaged; a forward pass reads it. `no_sync` sets it to False."""
        return self._steps.averaging

    @require_backward_grad_sync.setter
    def require_backward_grad_sync(self, value: bool) -> None:
        self._steps.averaging = bool(value)

    @property
    def require_forward_param_sync(self) -> bool:
        """The same as `require_backward_grad_sync`, since buffers are sent after averaged backward passes."""
        return self._steps.averaging

    @property
    def forward_sync_buffers(self) -> bool:
        """The new name of `broadcast_buffers`."""
        return self.broadcast_buffers

    @forward_sync_buffers.setter
    def forward_sync_buffers(self, value: bool) -> None:
        self.broadcast_buffers = value

    @property
    def device(self) -> torch.device:
        """The device of the module."""
        return self._device

    @property
    def device_type(self) -> str:
        """The type of `device`."""
        return self._device.type

    @property
    def device_ids(self) -> list[int] | None:
        """The index of `device`, if inputs are moved there."""
        return None if self._inputs_to is None else [self._inputs_to.index]

    @property
    def output_device(self) -> int | None:
        """The index of `device`, if inputs are moved there."""
        return None if self._inputs_to is None else self._inputs_to.index

    @property
    def is_multi_device_module(self) -> bool:
        """False: a module is on one device."""
        return False

    @property
    def dim(self) -> int:
        """The argument `dim`, which has no effect."""
        return int(self._others.get("dim", 0))

    @property
    def batched_grad_copy(self) -> bool:
        """The argument of this name, which has no effect."""
        return bool(self._others.get("batched_grad_copy", False))

    @property
    def skip_all_reduce_unused_params(self) -> bool:
        """The argument of this name, which has no effect."""
        return bool(self._others.get("skip_all_reduce_unused_params", False))

    @property
    def gradient_as_bucket_view(self) -> bool:
        """Whether `p.grad` is a part of its bucket."""
        return self._steps.memory.in_buckets

    @property
    def mixed_precision(self) -> None:
        """None: see torch.autocast."""
        return

    @property
    def bucket_bytes_cap(self) -> int:
        """PyTorch's name of `bucket_bytes`."""
        return self.bucket_bytes

    @property
    def bucket_bytes_cap_list(self) -> list[int]:
        """Empty: all buckets have one size."""
        return []

    @property
    def bucket_bytes_cap_default(self) -> bool:
        """False: the first bucket is as large as the others."""
        return False

    @property
    def parameters_to_ignore(self) -> set[str]:
        """PyTorch's name of `ignored_names`."""
        return set(self.ignored_names)

    @property
    def named_module_buffers(self) -> dict[str, torch.Tensor]:
        """The present buffers that are not ignored, by name."""
        return self._model.buffers()

    @property
    def modules_buffers(self) -> list[torch.Tensor]:
        """The present buffers that are not ignored."""
        return list(self._model.buffers().values())

    @property
    def process_group(self) -> dist.ProcessGroup:
        """The process group of torch.distributed with the same ranks: the one given, or the default one."""
        group, mine = self._others.get("process_group"), (self.comm.size, self.comm.rank)
        if (
            group is None
            and dist.is_available()
            and dist.is_initialized()
            and mine == (dist.get_world_size(), dist.get_rank())
        ):
            group = dist.group.WORLD
        if group is None:
            raise AttributeError("process_group")  # `__getattr__` says what to use
        return group  # type: ignore[no-any-return]

    @property
    def reducer(self) -> Reducer:
        """What frameworks call of PyTorch's reducer."""
        return Reducer(self)

    # Methods of PyTorch's wrapper -----------------------------------------------------------------------

    def expect_backward(self) -> None:
        """Average the next backward pass. Collective."""
        raise NotImplementedError

    def will_sync_module_buffers(self) -> bool:
        """Whether the next averaged step sends buffers."""
        return self._steps.averaging and self.broadcast_buffers and bool(self._model.buffers())

    def _set_static_graph(self) -> None:
        """See the argument `static_graph`."""
        self.static_graph = True

    def _set_ddp_sink_clone(self, val: bool) -> None:
        """Nothing: outputs are returned as they are, so that a loss may be changed in place."""

    def _check_reducer_finalized(self) -> None:
        """Raise `CommError` if a backward pass has begun and not ended."""
        checks.check_backward_ended(self._steps.watch.unfinished)

    def _get_ddp_logging_data(self) -> dict[str, str | int]:
        """The settings, by PyTorch's names; `counters` has what was exchanged."""
        trained, buckets = list(self._model.trained.values()), self._steps.engine.plan.buckets
        return {
            "world_size": self.comm.size,
            "rank": self.comm.rank,
            "module_name": type(self.module).__name__,
            "device_ids": ", ".join(map(str, self.device_ids or [])),
            "output_device": -1 if self.output_device is None else self.output_device,
            "is_multi_device_module": 0,
            "dtypes": ", ".join(sorted({str(p.dtype).removeprefix("torch.") for p in trained})),
            "num_parameter_tensors": len(trained),
            "total_parameter_size_bytes": sum(p.nbytes for p in trained),
            "bucket_cap_bytes": self.bucket_bytes,
            "bucket_sizes": ", ".join(str(bucket.nbytes) for bucket in buckets),
            "broadcast_buffers": int(self.broadcast_buffers),
            "find_unused_parameters": int(self.find_unused_parameters),
            "gradient_as_bucket_view": int(self.gradient_as_bucket_view),
            "has_sync_bn": int(any(isinstance(part, nn.SyncBatchNorm) for part in self.module.modules())),
            "comm_hook": str(self.algorithm),
        }


class Reducer:
    """What Accelerate, Lightning and PyTorch's pipelines call of the reducer of PyTorch's wrapper.

    Args:
        wrapper: The wrapper.
    """

    def __init__(self, wrapper: TorchNames) -> None:
        self._wrapper = wrapper

    def prepare_for_forward(self) -> None:
        """Nothing: the forward pass of the wrapper does so."""

    def prepare_for_backward(self, tensors: Iterable[torch.Tensor]) -> None:
        """Average the next backward pass, though its forward pass was in `no_sync`. Collective."""
        self._wrapper.expect_backward()

    def _rebuild_buckets(self) -> bool:
        """False: buckets stay as they are; `replan` changes them."""
        return False

    def _delay_all_reduce(self) -> None:
        """Nothing: a static graph is averaged in its first backward pass already."""

    def __getattr__(self, name: str) -> Any:
        raise MissingError(f"the reducer of bagua_torch has no attribute '{name}'; ddp.engine averages gradients")
