"""The arithmetic under codecs and reductions, once per kind of memory.

`host` (NumPy) is the specification: whatever computes the same thing elsewhere gives the same bytes.
"""

from __future__ import annotations

from types import ModuleType

from ..arrays import Array, library
from ..errors import UnsupportedError
from . import host


def of(x: Array) -> ModuleType:
    """The module whose kernels work where `x` lies."""
    if library(x) == "numpy":
        return host
    raise UnsupportedError("there are no kernels for CuPy arrays yet; pass NumPy arrays")


__all__ = ["host", "of"]
