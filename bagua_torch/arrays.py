"""Tensors as arrays and back, through DLPack: shared memory, never a copy."""

from __future__ import annotations

import torch
from torch.utils.dlpack import from_dlpack

from bagua_comm import UnsupportedError, arrays
from bagua_comm.arrays import Array

_DTYPES = {
    torch.bool: "bool",
    torch.uint8: "uint8",
    torch.int8: "int8",
    torch.int16: "int16",
    torch.int32: "int32",
    torch.int64: "int64",
    torch.float16: "float16",
    torch.bfloat16: "bfloat16",
    torch.float32: "float32",
    torch.float64: "float64",
    torch.complex64: "complex64",
    torch.complex128: "complex128",
}


def dtype_name(tensor: torch.Tensor) -> str:
    """The name of a tensor's dtype, as NumPy has it.

    Raises:
        UnsupportedError: Arrays have no such dtype.
    """
    name = _DTYPES.get(tensor.dtype)
    if name is None:
        raise UnsupportedError(f"tensors of {tensor.dtype} cannot be carried")
    return name


def as_array(tensor: torch.Tensor) -> Array:
    """View a tensor as a NumPy array (CPU) or CuPy array (CUDA). Shares memory; never copies.

    bfloat16, which DLPack does not carry into NumPy, goes by way of its bits.

    Raises:
        UnsupportedError: The tensor is sparse, on another kind of device, or of a dtype without arrays.

    >>> x = torch.zeros(3, dtype=torch.bfloat16)
    >>> as_array(x)[1] = 2
    >>> x
    tensor([0., 2., 0.], dtype=torch.bfloat16)
    """
    name = dtype_name(tensor)
    if tensor.layout is not torch.strided:
        raise UnsupportedError(f"tensors of layout {tensor.layout} cannot be carried, only dense ones")
    if tensor.device.type not in ("cpu", "cuda"):
        raise UnsupportedError(f"a tensor is on {tensor.device}, expected cpu or cuda")
    tensor = tensor.detach()
    if name == "bfloat16":
        return arrays.as_array(tensor.view(torch.int16)).view(arrays.bfloat16())
    return arrays.as_array(tensor)


def as_tensor(array: Array) -> torch.Tensor:
    """View a NumPy or CuPy array as a tensor. Shares memory; never copies.

    >>> import numpy as np
    >>> x = np.zeros(2)
    >>> as_tensor(x).fill_(1)
    tensor([1., 1.], dtype=torch.float64)
    >>> x
    array([1., 1.])
    """
    if array.dtype.name == "bfloat16":
        return from_dlpack(array.view("int16")).view(torch.bfloat16)
    return from_dlpack(array)
