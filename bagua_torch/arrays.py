"""Conversion between tensors and arrays by DLPack. Both share memory; the order of PyTorch's streams is kept."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch

from bagua_comm import UnsupportedError, arrays
from bagua_comm.arrays import Array
from bagua_comm.execution import cuda

DTYPE_NAMES: dict[torch.dtype, str] = {getattr(torch, name): name for name in sorted(arrays.MOVABLE)}
"""The dtypes that NumPy and CuPy have too, and their names."""


def dtype_name(tensor: torch.Tensor) -> str:
    """NumPy's name for the dtype of a tensor.

    Raises:
        UnsupportedError: NumPy and CuPy have no such dtype.
    """
    name = DTYPE_NAMES.get(tensor.dtype)
    if name is None:
        raise UnsupportedError(
            f"a tensor has {tensor.dtype}, which NumPy and CuPy lack; pass one of another dtype, or its bytes, "
            "x.view(torch.uint8)"
        )
    return name


def torch_stream(device: torch.device) -> AbstractContextManager[None]:
    """A context in which calls on CUDA tensors of `device` are in the order of PyTorch's current stream.

    bagua_comm works in the order of CuPy's current stream, which differs from PyTorch's within
    `torch.cuda.stream(...)`. The host does not wait. On the CPU this does nothing.

    >>> with torch_stream(torch.device("cpu")):
    ...     pass
    """
    return _ON_HOST if device.type == "cpu" else _on_device(device)


_ON_HOST = nullcontext()


@contextmanager
def _on_device(device: torch.device) -> Iterator[None]:
    with torch.cuda.device(device):
        cuda.use_device(torch.cuda.current_device())
        with cuda.use_address(torch.cuda.current_stream().cuda_stream):
            yield


def cupy_stream(device: torch.device) -> AbstractContextManager[object]:
    """A context in which PyTorch's current stream of `device` is CuPy's. On the CPU this does nothing.

    Raises:
        UnsupportedError: CuPy uses per-thread default streams.
    """
    if device.type == "cpu":
        return _ON_HOST
    address = cuda.current_address()
    if address in cuda.DEFAULT_STREAMS:  # ExternalStream would make a stream of PyTorch's pool
        return torch.cuda.stream(torch.cuda.default_stream(device))
    external: Any = torch.cuda.ExternalStream  # torch leaves it untyped
    return torch.cuda.stream(external(address, device))


def as_array(tensor: torch.Tensor) -> Array:
    """View a tensor as a NumPy array (CPU) or CuPy array (CUDA). Shares memory; never copies.

    The array is detached: gradients do not flow through operations on it. If CuPy's current stream is not
    PyTorch's, it waits for PyTorch's. The calls of a communicator take tensors directly, and return tensors.

    Raises:
        UnsupportedError: The tensor is sparse, on another kind of device, or of a dtype without arrays; or it is
            on a CUDA device, and CuPy uses per-thread default streams.

    >>> x = torch.zeros(3, dtype=torch.bfloat16)
    >>> as_array(x)[1] = 2
    >>> x
    tensor([0., 2., 0.], dtype=torch.bfloat16)
    """
    dtype_name(tensor)
    if tensor.device.type == "cuda":
        cuda.current_address()  # raises if CuPy's stream cannot be PyTorch's
    return arrays.tensor_as_array(tensor.detach(), torch)


def as_tensor(array: Array) -> torch.Tensor:
    """View a NumPy or CuPy array as a tensor. Shares memory; never copies.

    If PyTorch's current stream is not CuPy's, it waits for CuPy's.

    >>> import numpy as np
    >>> x = np.zeros(2)
    >>> as_tensor(x).fill_(1)
    tensor([1., 1.], dtype=torch.float64)
    >>> x
    array([1., 1.])
    """
    tensor: torch.Tensor = arrays.as_tensor(array, torch)
    return tensor
