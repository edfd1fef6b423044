"""The arithmetic of codecs and reductions, once for each kind of memory.

`host` (NumPy) is the specification: `compiled` (Numba) and `device` (CuPy and the .cu files) give the same bytes.
"""

from __future__ import annotations

import functools
import importlib
from types import ModuleType

import numpy as np

from ..arrays import Array
from . import host


def of(x: Array) -> ModuleType:
    """The module whose kernels work where `x` lies."""
    return on_host() if isinstance(x, np.ndarray) else importlib.import_module(".device", __name__)


@functools.cache
def on_host() -> ModuleType:
    """`compiled` where Numba can be imported, else `host`."""
    try:
        return importlib.import_module(".compiled", __name__)
    except ImportError:
        return host


__all__ = ["host", "of", "on_host"]
