"""Stands in for `cupyx`: pinned memory."""

from __future__ import annotations

import ctypes
import math
from typing import Any

import numpy as np

from .machine import running


def empty_pinned(shape: Any, dtype: Any = float, order: str = "C") -> np.ndarray:
    shape, dtype = shape if isinstance(shape, tuple) else (shape,), np.dtype(dtype)
    memory = running().allocate(math.prod(shape) * dtype.itemsize, None)
    owner = (ctypes.c_ubyte * len(memory.block.bytes)).from_address(memory.block.start)
    owner.memory = memory  # both are freed with the last array over them
    return np.ndarray(shape, dtype, buffer=owner)
