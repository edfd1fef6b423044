"""The attributes and methods of PyTorch's DistributedDataParallel, for programs that use them on our wrapper.

Each one works, or is a key of `INSTEAD`: reading and setting it raises an error that says what to use.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any, NoReturn

import torch

from ..errors import MissingError

_JOIN = "enter ddp.join() in place of torch.distributed.algorithms.Join"
_ONE_DEVICE = "a process has one device here; torch.nn.parallel has this function"
OWN_REDUCER = "it belongs to PyTorch's reducer, in whose place ddp.engine averages"
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
        OWN_REDUCER,
    ),
}
"""Attributes of PyTorch's wrapper that are missing here, and what to use."""

SET_INSTEAD = {
    "algorithm": "call ddp.switch(algorithm), or ddp.replan(algorithm=...) for other settings",
    "bucket_bytes": "call ddp.replan(bucket_bytes=...)",
    "bucket_bytes_cap": "call ddp.replan(bucket_bytes=...)",
    "bucket_bytes_cap_list": "call ddp.replan(bucket_bytes=...)",
    "bucket_bytes_cap_default": "call ddp.replan(bucket_bytes=...)",
    "require_forward_param_sync": "set broadcast_buffers, since buffers are sent after the backward pass",
    "mixed_precision": "use torch.autocast, or convert the module",
    "reducer": OWN_REDUCER,
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


def settings(
    device: torch.device, inputs_to: torch.device | None, others: Mapping[str, Any], *, in_buckets: bool
) -> dict[str, object]:
    """The attributes of PyTorch's wrapper that keep their values, by name.

    Args:
        device: The device of the module.
        inputs_to: The device to which inputs are moved, if they are.
        others: Arguments without an effect here.
        in_buckets: Whether `p.grad` is a part of its bucket.
    """
    index = None if inputs_to is None else inputs_to.index
    return {
        "device": device,
        "device_type": device.type,
        "device_ids": None if index is None else [index],
        "output_device": index,
        "is_multi_device_module": False,
        "dim": int(others.get("dim", 0)),
        "batched_grad_copy": bool(others.get("batched_grad_copy", False)),
        "skip_all_reduce_unused_params": bool(others.get("skip_all_reduce_unused_params", False)),
        "gradient_as_bucket_view": in_buckets,
        "mixed_precision": None,
        "bucket_bytes_cap_list": [],  # all buckets have one size
        "bucket_bytes_cap_default": False,  # and the first one is no smaller
    }


class Reducer:
    """The methods of the reducer of PyTorch's wrapper that Accelerate, Lightning and PyTorch's pipelines call.

    Args:
        expect_backward: Averages the next backward pass.
    """

    def __init__(self, expect_backward: Callable[[], None]) -> None:
        self._expect_backward = expect_backward

    def prepare_for_forward(self) -> None:
        """Nothing: the forward pass of the wrapper does so."""

    def prepare_for_backward(self, tensors: Iterable[torch.Tensor]) -> None:
        """Average the next backward pass, though its forward pass was in `no_sync`. Collective."""
        self._expect_backward()

    def _rebuild_buckets(self) -> bool:
        """False: buckets stay as they are; `replan` changes them."""
        return False

    def _delay_all_reduce(self) -> None:
        """Nothing: a static graph is averaged in its first backward pass already."""

    def __getattr__(self, name: str) -> NoReturn:
        raise MissingError(f"the reducer of bagua_torch has no attribute '{name}'; ddp.engine averages gradients")
