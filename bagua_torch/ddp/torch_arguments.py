"""Arguments of PyTorch's DistributedDataParallel, so that calls of it work unchanged."""

from __future__ import annotations

import difflib
import operator
from collections.abc import Collection, Mapping, Sequence
from typing import Any, SupportsIndex

import torch
import torch.distributed as dist

from bagua_comm import ArrayError, UnsupportedError

HARMLESS = ("check_reduction", "dim", "skip_all_reduce_unused_params", "batched_grad_copy")
"""Arguments without an effect here."""

REFUSED = {
    "mixed_precision": "use torch.autocast, or convert the module",
    "device_mesh": "give comm, as comm.split makes one",
    "bucket_cap_mb_list": "give bucket_bytes, or a tuner",
    "delay_all_reduce_named_params": "give params_and_buffers_to_ignore, and average them in a hook",
    "param_to_hook_all_reduce": "give params_and_buffers_to_ignore, and average them in a hook",
}
"""Unsupported arguments, and the alternative to each."""


def check_others(
    others: Mapping[str, Any], *, ranks: int, device: torch.device, own: Collection[str] = ()
) -> None:
    """Check other arguments of PyTorch's wrapper: each must have no effect here, or a fitting value.

    Args:
        others: The arguments, by name.
        ranks: The number of ranks.
        device: The device of the module.
        own: The names of the other arguments, to suggest one in place of an unknown name.

    Raises:
        ArrayError: `output_device` is not the module's device.
        UnsupportedError: An argument is not supported; the message names the alternative.
        TypeError: There is no such argument.
    """
    for name, value in others.items():
        if name == "output_device":
            if value is not None and _device(value) != device:
                raise ArrayError(
                    f"DistributedDataParallel: output_device is {value}, but the module is on {device}"
                )
        elif name == "process_group":
            _check_group(value, ranks)
        elif name in REFUSED:
            if value is not None:
                raise UnsupportedError(f"DistributedDataParallel: {name} is not supported; {REFUSED[name]}")
        elif name not in HARMLESS:
            close = difflib.get_close_matches(name, [*own, *HARMLESS, "output_device", "process_group"], n=1)
            hint = f"; did you mean {close[0]!r}?" if close else ""
            raise TypeError(f"DistributedDataParallel: there is no argument {name!r}{hint}")


def device_of_inputs(
    device_ids: Sequence[int | torch.device] | None, device: torch.device
) -> torch.device | None:
    """The device to which inputs are moved before the module runs; None if they are not moved.

    Raises:
        ArrayError: `device_ids` lists more than one device, or a device that is not the module's.
    """
    if not device_ids:
        return None
    if len(device_ids) > 1 or device.type == "cpu" or _device(device_ids[0]) != device:
        raise ArrayError(
            f"DistributedDataParallel: device_ids is {list(device_ids)}, but the module is on {device}; expected "
            "None or, for a module on a CUDA device, that one"
        )
    return device


def moved(inputs: Any, device: torch.device) -> Any:
    """A copy of nested dicts, lists and tuples, with all tensors on `device`.

    >>> moved(([torch.zeros(2)], {"mask": None}), torch.device("meta"))
    ([tensor(..., device='meta', size=(2,))], {'mask': None})
    """
    if isinstance(inputs, torch.Tensor):
        return inputs.to(device, non_blocking=True)
    if isinstance(inputs, dict):
        return type(inputs)((key, moved(value, device)) for key, value in inputs.items())
    if isinstance(inputs, tuple) and hasattr(inputs, "_fields"):
        return type(inputs)(*(moved(value, device) for value in inputs))
    if isinstance(inputs, (list, tuple)):
        return type(inputs)(moved(value, device) for value in inputs)
    return inputs


def bytes_of_cap(bucket_bytes: int | None, bucket_cap_mb: float | None, default: int) -> int:
    """The size of buckets in bytes, from one of two arguments or the default.

    Raises:
        ArrayError: Both are given, `bucket_bytes` is no integer, or one is not positive.
    """
    if bucket_bytes is not None and not isinstance(bucket_bytes, SupportsIndex):
        raise ArrayError(
            f"DistributedDataParallel: bucket_bytes is {bucket_bytes!r}, expected a number of bytes, an int; "
            "bucket_cap_mb is in MiB"
        )
    if bucket_bytes is not None and operator.index(bucket_bytes) < 1:
        raise ArrayError(
            f"DistributedDataParallel: bucket_bytes is {bucket_bytes}, expected a positive number of bytes"
        )
    if bucket_cap_mb is None:
        return default if bucket_bytes is None else operator.index(bucket_bytes)
    if bucket_bytes is not None:
        raise ArrayError("DistributedDataParallel: give bucket_bytes or bucket_cap_mb, not both")
    if not bucket_cap_mb > 0:
        raise ArrayError(f"DistributedDataParallel: bucket_cap_mb is {bucket_cap_mb}, expected a positive number")
    return max(1, int(bucket_cap_mb * 2**20))


def _device(value: int | str | torch.device) -> torch.device:
    return torch.device("cuda", value) if isinstance(value, int) else torch.device(value)


def _check_group(group: object, ranks: int) -> None:
    if group is None:
        return
    everyone = list(range(ranks))  # on ranks outside of a group PyTorch gives a number instead
    mine = dist.get_process_group_ranks(group) if isinstance(group, dist.ProcessGroup) else None
    if mine != everyone or dist.get_world_size() != ranks:
        raise UnsupportedError(
            "DistributedDataParallel: process_group is not the group of all ranks; give comm, which "
            "bagua_torch.connect() makes from the default group, and comm.split from a part of it"
        )
