"""The arithmetic under codecs and reductions, once per kind of memory.

`host` (NumPy) is the specification: `device` (CuPy and the .cu files) gives the same bytes.
"""

from __future__ import annotations

import importlib
from types import ModuleType

from ..arrays import Array, library
from . import host


def of(x: Array) -> ModuleType:
    """The module whose kernels work where `x` lies."""
    return host if library(x) == "numpy" else importlib.import_module(".device", __name__)


__all__ = ["host", "of"]
