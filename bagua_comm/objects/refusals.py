"""Error messages for unsupported arrays; each ends with what to pass instead."""

from __future__ import annotations

from typing import Any

import numpy as np


def type_name(x: object) -> str:
    """The full name of the type of `x`."""
    return f"{type(x).__module__}.{type(x).__qualname__}"


def of_type(x: object) -> str:
    """Error message for an `x` that is not an array and has no `__dlpack__`."""
    name = type_name(x)
    if hasattr(x, "toarray") and hasattr(x, "nnz"):
        return (
            f"a sparse matrix ({name}) is several arrays; pass x.toarray(), or its arrays one by one: data, "
            "indices and indptr of a CSR or CSC matrix, data, row and col of a COO matrix"
        )
    expected = f"expected a NumPy or CuPy array or something with __dlpack__, got {name}"
    if x is None:
        return f"{expected}; every rank gives an array, also to receive; objects go by broadcast_object and such"
    if isinstance(x, (int, float, complex, list, tuple)):
        return f"{expected}; wrap it with numpy.asarray"
    if isinstance(x, (bytes, bytearray, memoryview)):
        return f"{expected}; view it with numpy.frombuffer(x, numpy.uint8)"
    if isinstance(x, (str, dict, set, frozenset)):
        return f"{expected}; send it as an object, as by comm.broadcast_object, send_object or gather_object"
    if hasattr(x, "to_numpy"):  # pandas, Polars, xarray
        return f"{expected}; pass x.to_numpy()"
    if hasattr(x, "numpy"):  # TensorFlow
        return f"{expected}; pass x.numpy()"
    if hasattr(x, "__array__") or hasattr(x, "__array_interface__"):
        return f"{expected}; wrap it with numpy.asarray"
    return expected


def of_tensor(tensor: Any, reason: Exception) -> str:
    """Error message for a PyTorch tensor that cannot be viewed, for this `reason`."""
    layout = str(tensor.layout)
    if tensor.is_meta:
        problem = 'is on meta, so it has no data; make one with data, torch.empty_like(x, device="cpu")'
    elif not (tensor.is_cpu or tensor.is_cuda):
        problem = f"is on {tensor.device}, expected cpu or cuda; pass x.cpu()"
    elif tensor.is_nested:
        problem = "is nested, so it is several tensors; pass those of x.unbind() one by one"
    elif "sparse" in layout:
        problem = (
            f"is sparse (layout {layout}), so it is several tensors; pass x.to_dense(), or its tensors one by "
            "one, such as x.indices() and x.values()"
        )
    elif layout != "torch.strided":
        problem = f"has layout {layout}; pass x.to_dense()"
    elif tensor.requires_grad:
        problem = (
            "requires grad, and no gradient would flow through the call; pass x.detach(), which shares its "
            "memory, or call bagua_torch.functional, through which gradients flow"
        )
    elif tensor.is_conj():
        problem = "is a lazy conjugate of its memory; pass x.resolve_conj()"
    elif tensor.is_neg():
        problem = "is a lazy negative of its memory; pass x.resolve_neg()"
    elif tensor.is_quantized:
        problem = f"is quantized ({tensor.dtype}); pass x.int_repr() or x.dequantize()"
    elif isinstance(reason, BufferError):
        problem = str(reason)
    elif tensor.dtype.itemsize == 1:
        problem = f"has dtype {tensor.dtype}, which NumPy does not have; pass its bytes, x.view(torch.uint8)"
    else:
        problem = f"of {tensor.dtype} cannot be viewed as an array: {reason}"
    return f"this torch.Tensor {problem}"


def of_failure(x: object, reason: Exception) -> str:
    """Error message for an `x` whose library fails to export its memory, for this `reason`."""
    if type(x).__name__.endswith("Tracer"):  # JAX's, in jit and grad
        return f"this {type_name(x)} stands for an array without memory; call this outside of traced functions"
    return f"cannot view this {type_name(x)} through DLPack: {reason}"


def of_memory(x: object, device: int) -> str:
    """Error message for an `x` in memory of this DLPack device type."""
    return (
        f"pass a copy on the host: this {type_name(x)} is in memory of DLPack device type {device}; expected "
        "host (1) or CUDA (2)"
    )


def of_dtype(dtype: np.dtype[np.generic]) -> str:
    """Advice on an array of this dtype, which cannot be sent."""
    kind = dtype.kind
    if kind == "O":
        return "pass x.astype(float) if these are numbers, or send it as an object, with comm.broadcast_object"
    if kind in "Mm":
        return "pass x.view(numpy.int64)"
    if kind in "UST":
        return "send it as an object, as by comm.broadcast_object, send_object or gather_object"
    if dtype.names is not None:
        return "pass its fields one by one, x[name], or its bytes, x.view(numpy.uint8)"
    if not dtype.isnative:
        return 'pass x.astype(x.dtype.newbyteorder("="))'
    if kind == "f" and dtype.itemsize > 8:
        return "pass x.astype(numpy.float64)"
    if kind == "c" and dtype.itemsize > 16:
        return "pass x.astype(numpy.complex128)"
    return "pass its bytes, x.view(numpy.uint8)"


def of_target(x: object) -> str:
    """Error message for an `x` that cannot be written to."""
    if isinstance(x, np.generic):
        return "is a NumPy scalar, which cannot be written to; use a 0-d array"
    if isinstance(x, np.ndarray):
        return "is read-only; pass a writable array"
    return (
        f"is a read-only {type_name(x)}; pass a writable NumPy array, numpy.array(x), or no out, so that "
        "the call makes its result"
    )
