"""Errors of encoding, in which error feedback spends its time; see `host.elementwise`."""

from __future__ import annotations

import numba
import numpy as np

from .codegen import STRIP, kernel, scratch
from .numbers import ZERO, itemsize, load, store


@kernel
def encoding_errors(
    element: int, x: int, decoded: int, target: int, count: int, factor: float, decay: float
) -> None:
    """Store decay target + factor (x - decoded), or 0 where that is not finite; without decay, read no target."""
    wide, other = numba.carray(scratch(STRIP), (STRIP,)), numba.carray(scratch(STRIP), (STRIP,))
    earlier, errors = numba.carray(scratch(STRIP), (STRIP,)), numba.carray(scratch(STRIP), (STRIP,))
    for at in range(0, count, STRIP):
        length, offset = min(STRIP, count - at), at * itemsize(element)
        exact = load(element, x + offset, length, wide)
        coded = load(element, decoded + offset, length, other)
        part = errors[:length]
        if decay:
            kept = load(element, target + offset, length, earlier)
            for i in range(length):
                lost = kept[i] * np.float32(decay) + (exact[i] - coded[i])
                part[i] = lost if abs(lost) < np.float32(np.inf) else ZERO
        else:
            for i in range(length):
                lost = (exact[i] - coded[i]) * np.float32(factor)
                part[i] = lost if abs(lost) < np.float32(np.inf) else ZERO
        store(element, part, target + offset)
