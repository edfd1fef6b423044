"""The arithmetic of codecs and reductions, once for each kind of memory.

`host` (NumPy) is the specification: `compiled` (Numba) and `device` (CuPy and the .cu files) give the same bytes.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
from collections.abc import Iterator
from contextvars import ContextVar
from types import ModuleType
from typing import Literal

import numpy as np

from ..arrays import Array
from . import host


def of(x: Array) -> ModuleType:
    """The module whose kernels work where `x` lies."""
    return on_host() if isinstance(x, np.ndarray) else importlib.import_module(".device", __name__)


def on_host() -> ModuleType:
    """The module for NumPy arrays: the one that `use` has chosen, else the fastest that is installed."""
    return _chosen.get() or _fastest_on_host()


@contextlib.contextmanager
def use(name: Literal["host", "compiled"]) -> Iterator[None]:
    """Choose the kernels of NumPy arrays in the body of `with`, to compare the two or to rule one out.

    The choice holds in this thread and context (see `contextvars`); threads that start in the body do not
    inherit it.

    Raises:
        ImportError: `name` is "compiled", and Numba is not installed.

    >>> with use("host"):
    ...     of(np.zeros(1)) is host
    True
    """
    token = _chosen.set(host if name == "host" else importlib.import_module(f".{name}", __name__))
    try:
        yield
    finally:
        _chosen.reset(token)


_chosen: ContextVar[ModuleType | None] = ContextVar("kernels of NumPy arrays", default=None)


@functools.cache
def _fastest_on_host() -> ModuleType:
    """`compiled` where Numba can be imported, else `host`."""
    try:
        return importlib.import_module(".compiled", __name__)
    except ImportError:
        return host


__all__ = ["host", "of", "on_host", "use"]
