"""The encoding of a sample in a store, with its type and a checksum.

    8 bytes     xxh3 of the key and of all that follows
    1 byte      the form: 0 a tree, 1 a pickle
    4 bytes     the length of the head, little-endian
    head        msgpack; an array or a tensor in it is {offset, dtype, shape}
    the rest    the bytes of the arrays and tensors, in C order

A tree consists of None, bool, int, float, complex, str, bytes, list, tuple, dict, NumPy's scalars and arrays, and
PyTorch's tensors. It is restored with the same types (bytearray and memoryview as bytes), and its arrays and
tensors are new, C-contiguous and writable.
"""

from __future__ import annotations

import importlib
import pickle
import struct
import sys
from collections.abc import Callable
from contextlib import suppress
from typing import Any, Literal, TypeAlias

import numpy as np

from ..arrays import Array, dtype_named, is_tensor
from ..errors import ArrayError, UnsupportedError

Form: TypeAlias = Literal["tree", "pickle"]

FORMS = ("tree", "pickle")

_HEAD = struct.Struct("<BI")
_SUM = struct.Struct("<Q")
_TUPLE, _ARRAY, _SCALAR, _INT, _COMPLEX, _TENSOR = range(1, 7)


class DamagedError(ValueError):
    """The bytes differ from what was written; the sample is then loaded again."""


def library(name: str, user: str) -> Any:
    """A library of the extra "data", which is imported when it is needed.

    Raises:
        ImportError: It is not installed.
    """
    try:
        return importlib.import_module(name)
    except ImportError as exc:
        raise ImportError(f"{user} needs {name}: pip install 'bagua-comm[data]'") from exc


def checksum(*parts: bytes | memoryview) -> int:
    """The 64-bit xxh3 hash of some bytes."""
    state = library("xxhash", "a cache").xxh3_64()
    for part in parts:
        state.update(part)
    found: int = state.intdigest()
    return found


def encode(value: Any, key: bytes, form: Form = "tree") -> bytes:
    """The bytes of a value.

    Raises:
        UnsupportedError: A tree cannot hold it, or it cannot be pickled.
    """
    arrays: list[Any] = []
    if form == "pickle":
        try:
            head = pickle.dumps(value, protocol=5)
        except Exception as exc:
            raise UnsupportedError(f"a {type(value).__name__} cannot be pickled: {exc}") from exc
    else:
        head = _tree(value, arrays)
    body: list[Any] = [_HEAD.pack(FORMS.index(form), len(head)), head, *arrays]
    return b"".join([_SUM.pack(checksum(key, *body)), *body])


def decode(data: bytes, key: bytes, form: Form = "tree") -> Any:
    """The value that was encoded for this key; a pickle only if `form` is "pickle".

    Raises:
        DamagedError: The bytes differ from what was written for this key, or are a refused pickle.
    """
    view = memoryview(data)
    if len(view) < _SUM.size + _HEAD.size:
        raise DamagedError(f"only {len(view)} bytes")
    if _SUM.unpack_from(view)[0] != checksum(key, view[_SUM.size :]):
        raise DamagedError("the checksum differs")
    kind, length = _HEAD.unpack_from(view, _SUM.size)
    start = _SUM.size + _HEAD.size
    head, rest = view[start : start + length], view[start + length :]
    if kind >= len(FORMS) or (FORMS[kind] == "pickle" and form != "pickle"):
        raise DamagedError(f"a value of kind {kind}, where {form} was expected")
    try:
        return pickle.loads(head) if FORMS[kind] == "pickle" else _untree(head, rest)
    except Exception as exc:  # intact, but written by another version of a library or of a class
        raise DamagedError(f"cannot be read: {type(exc).__name__}: {exc}") from exc


def _tree(value: object, arrays: list[object]) -> bytes:
    """The head of a tree; the bytes of its arrays and tensors are appended to `arrays`."""
    msgpack = library("msgpack", "a cache")
    end = 0

    def pack(x: Any) -> bytes:
        packed: bytes = msgpack.packb(x, default=other, strict_types=True, unicode_errors="surrogatepass")
        return packed

    def other(x: Any) -> Any:
        """Encode a value that msgpack does not support."""
        nonlocal end
        kind = type(x)
        if kind is tuple:
            return msgpack.ExtType(_TUPLE, pack(list(x)))
        if kind is np.ndarray or is_tensor(x):
            code, name, raw = _parts_of_array(x) if kind is np.ndarray else _parts_of_tensor(x)
            arrays.append(raw.data)
            end += raw.size
            return msgpack.ExtType(code, pack([end - raw.size, name, list(x.shape)]))
        if isinstance(x, np.generic):
            return msgpack.ExtType(_SCALAR, pack([_dtype_name(x.dtype), x.tobytes()]))
        if kind is int:
            return msgpack.ExtType(_INT, x.to_bytes(x.bit_length() // 8 + 1, "little", signed=True))
        if kind is complex:
            return msgpack.ExtType(_COMPLEX, struct.pack("<dd", x.real, x.imag))
        raise _Unsupported(f"a {kind.__module__}.{kind.__qualname__}")

    try:
        return pack(value)
    except _Unsupported as exc:
        raise UnsupportedError(
            f"{_place(value, pack)} is {exc}, which a cache cannot store: use plain trees of numbers, str, "
            'bytes, arrays and tensors, or choose form="pickle", which runs code from the store'
        ) from None
    except (ValueError, RecursionError, OverflowError) as exc:
        raise UnsupportedError(f"a cache cannot store this {type(value).__name__}: {exc}") from exc


class _Unsupported(Exception):  # noqa: N818 - never leaves this module
    """A value has a part that a tree cannot hold; the text says what it is."""


def _place(x: Any, pack: Callable[[Any], bytes], path: str = "the value") -> str:
    """The place in a tree of the first part that cannot be packed."""
    parts: list[tuple[object, str]] = []
    if type(x) is dict:
        for key, part in x.items():
            parts += [(key, f"a key of {path}"), (part, f"{path}[{key!r}]")]
    elif type(x) in (list, tuple):
        parts = [(part, f"{path}[{number}]") for number, part in enumerate(x)]
    for part, there in parts:
        try:
            pack(part)
        except _Unsupported:
            return _place(part, pack, there)
    return path


def _dtype_name(dtype: np.dtype[Any]) -> str:
    if not dtype.hasobject and dtype.names is None and dtype.subdtype is None:
        if dtype.kind != "V" and np.dtype(dtype.str) == dtype:
            return str(dtype.str)
        with suppress(ArrayError, UnsupportedError, TypeError, AttributeError):
            if dtype_named(dtype.name) == dtype:
                return str(dtype.name)
    raise _Unsupported(f"an array of {dtype}")


def _parts_of_array(x: Array) -> tuple[int, str, Array]:
    """The type in msgpack of an array, its dtype, and its bytes, in C order."""
    return _ARRAY, _dtype_name(x.dtype), np.ascontiguousarray(x).reshape(-1).view(np.uint8)


def _parts_of_tensor(x: Any) -> tuple[int, str, Array]:
    """The type in msgpack of a tensor, its dtype, and its bytes, in C order.

    Raises:
        _Unsupported: It is no dense tensor of the CPU without a gradient; with the call that makes it one.
    """
    torch = sys.modules["torch"]
    if type(x) is not torch.Tensor:
        raise _Unsupported(f"a {type(x).__module__}.{type(x).__qualname__} (plain: x.as_subclass(torch.Tensor))")
    if x.device.type != "cpu":
        raise _Unsupported(f"a tensor on {x.device} (on the CPU: x.cpu())")
    if x.requires_grad:
        raise _Unsupported("a tensor that requires a gradient (without it: x.detach())")
    if x.layout is not torch.strided or x.is_quantized:
        raise _Unsupported("a tensor that is sparse or quantized (otherwise: x.to_dense(), x.dequantize())")
    try:
        flat = x.resolve_conj().resolve_neg().contiguous().reshape(-1)
        return _TENSOR, str(x.dtype).removeprefix("torch."), flat.view(torch.uint8).numpy()
    except (RuntimeError, TypeError):
        raise _Unsupported(f"a tensor of {x.dtype}") from None


def _dtype(name: str) -> np.dtype[Any]:
    return np.dtype(name) if name[0] in "<>|=" else dtype_named(name)


def _untree(head: memoryview, rest: memoryview) -> object:
    msgpack = library("msgpack", "a cache")

    def unpack(data: bytes | memoryview) -> Any:
        return msgpack.unpackb(data, ext_hook=ext, strict_map_key=False, unicode_errors="surrogatepass")

    def ext(code: int, data: bytes) -> Any:
        if code == _TUPLE:
            return tuple(unpack(data))
        if code in (_ARRAY, _TENSOR):
            offset, name, shape = unpack(data)
            if code == _ARRAY:
                made: Any = np.empty(shape, _dtype(name))
                raw = made.reshape(-1).view(np.uint8)
            else:
                torch = importlib.import_module("torch")  # whoever reads a tensor has it
                made = torch.empty(shape, dtype=getattr(torch, name))
                raw = made.reshape(-1).view(torch.uint8).numpy()
            raw[:] = rest[offset : offset + raw.size]
            return made
        if code == _SCALAR:
            name, raw = unpack(data)
            dtype = _dtype(name)
            return np.frombuffer(raw, dtype)[0] if dtype.itemsize else dtype.type()
        if code == _INT:
            return int.from_bytes(data, "little", signed=True)
        if code == _COMPLEX:
            return complex(*struct.unpack("<dd", data))
        raise DamagedError(f"an unknown type {code}")

    return unpack(head)
