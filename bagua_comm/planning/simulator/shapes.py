"""Arrays that have a shape and no values: the work on them is recorded in place of being done.

The averages, algorithms and collectives of this library run on such arrays as on any other. So a program of one
rank is recorded from the code that trains, for models and numbers of ranks that no machine here has. The memory
of an array is never written, so that it occupies none.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, Literal, TypeAlias

import numpy as np
import numpy.typing as npt

from ...arrays import Array, DType
from ..costmodel.costs import CHOICE, RECORDS

Rate: TypeAlias = Literal[
    "encode", "decode", "combine", "cast_encode", "cast_decode", "cast_combine", "add", "copy"
]
"""The work that a number of bytes is for; see `costmodel.Rates`."""

Note: TypeAlias = Callable[[Rate, float], None]
"""Records work on a number of bytes."""

_note: ContextVar[Note | None] = ContextVar("where work on shapes is recorded", default=None)


@contextmanager
def noting(note: Note) -> Iterator[None]:
    """Record work on shapes by `note` in the body of `with`."""
    token = _note.set(note)
    try:
        yield
    finally:
        _note.reset(token)


def _work(rate: Rate, nbytes: float) -> None:
    note = _note.get()
    if note is not None and nbytes:
        note(rate, nbytes)


class Shapes(np.ndarray[tuple[int, ...], DType]):
    """An array without values. Views of it are such arrays as well."""

    def __array_namespace__(self, *, api_version: str | None = None) -> Any:
        return _Namespace

    def view(self, *args: Any, **kwargs: Any) -> Any:
        """View it with another dtype; it stays an array without values."""
        if args == (np.ndarray,):
            return self
        return super().view(*args, **kwargs)

    def __setitem__(self, key: Any, value: object) -> None:
        target = self[key]
        _work("copy", target.nbytes)

    def copy(self, order: Any = "C") -> Shapes:
        """A new array of the same shape."""
        _work("copy", self.nbytes)
        return np.empty(self.shape, self.dtype, order).view(Shapes)

    def __array_ufunc__(self, ufunc: np.ufunc, method: str, *inputs: object, **kwargs: Any) -> Any:
        read = [x for x in inputs if isinstance(x, np.ndarray)]
        _work("add", sum(x.nbytes for x in read))
        out = kwargs.get("out")
        if out is not None:
            return out[0]
        return np.empty(np.broadcast_shapes(*(x.shape for x in read)), read[0].dtype).view(Shapes)


class _Namespace:
    """The functions of NumPy that the library calls on an array's own library."""

    @staticmethod
    def empty(shape: int | tuple[int, ...], dtype: npt.DTypeLike = np.float64) -> Shapes:
        return np.empty(shape, dtype).view(Shapes)

    zeros = empty
    may_share_memory = staticmethod(np.may_share_memory)


class Kernels:
    """Stands in for a module of kernels, and records the work of each."""

    def __getattr__(self, name: str) -> Callable[..., None]:
        return lambda *args, **kwargs: _run(name, args, kwargs)


def _run(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    arrays = [x for x in (*args, *kwargs.values()) if isinstance(x, np.ndarray)]
    family, _, step = name.rpartition("_")
    cast = "cast_" if family == "cast" else ""
    match step:
        case "encode" if family == "top_k":
            _work("encode", CHOICE * args[0].nbytes)
        case "encode":
            _work(f"{cast}encode", args[0].nbytes)  # type: ignore[arg-type]
        case "decode":
            _work(f"{cast}decode", args[1].nbytes)  # type: ignore[arg-type]
        case "combine":
            count, dtype = kwargs.get("count") or args[2], kwargs.get("dtype") or args[3]
            _work(f"{cast}combine", len(args[0]) * count * np.dtype(dtype).itemsize)  # type: ignore[arg-type]
        case "sum" if family == "top_k":
            _work("decode", (1 + len(args[0]) / RECORDS) * args[1].nbytes)
        case "rows":
            _work("add", sum(row.nbytes for row in args[0]))
        case _:
            out = kwargs.get("out")
            _work("add", sum(x.nbytes for x in arrays if x is not out))


def of_size(size: int, dtype: npt.DTypeLike) -> Array:
    """A flat array without values."""
    return np.empty(size, dtype).view(Shapes)
