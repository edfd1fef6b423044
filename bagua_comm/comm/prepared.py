"""Prepared calls, which run again after a check of the arrays alone."""

from __future__ import annotations

import functools
from collections.abc import Hashable
from typing import Any, Literal, TypeAlias

import numpy as np

from ..arrays import Array
from ..transports.base import Move
from .arguments import EMPTY
from .base import CommBase
from .course import Course

Fills: TypeAlias = Literal["out", "x", "nothing"]
"""The argument that a call fills on this rank."""

_READY, _OWN, _WRITABLE = 0x101, 0x4, 0x400
"""Bits of NumPy's `flags.num`: the array is contiguous and aligned; owns its memory; can be written to."""


def run_if_known(
    comm: CommBase, name: str, arguments: Hashable, x: Any, out: Any, timeout_s: float | None
) -> Any:
    """Run a call on contiguous host arrays if the communicator has a prepared one.

    Returns:
        The array that was filled. None, and nothing was done, if there is no prepared call or these arrays need
        more checks or copies.
    """
    if type(x) is not np.ndarray:
        return None
    try:
        call: PreparedCall | None = comm.call_cache.get((name, arguments, x.dtype, x.shape))
    except TypeError:  # an argument of a wrong type, which cannot be hashed
        return None
    if call is None:
        return None
    target = call.output(x, out)
    if target is None:
        return None
    call.execute(comm, call.move, x, target, timeout_s)
    return target


class PreparedCall(Course):
    """A call that can be run again, on other arrays of its dtype and shape.

    Args:
        call: The first call.
        move: Sends and receives; takes `x` and the array to fill.
        fills: The argument that it fills.
        shape: The shape of `out`.
    """

    __slots__ = ("_fills", "_shape", "move", "signature")

    def __init__(self, call: Course, move: Move, fills: Fills, shape: tuple[int, ...]) -> None:
        self.name, self.head, self.transport, self.move = call.name, call.head, call.transport, move
        self.signature = functools.partial(str, call.signature())
        self.dtype, self.payload, self.checked = call.dtype, call.payload, call.checked
        self.source = EMPTY if call.source is EMPTY else None  # else `x`; its array is not kept
        self._fills, self._shape, self._wire_bytes = fills, shape, -1

    def output(self, x: Array, out: Any) -> Any:
        """Return the array that a call on these arrays fills; None if they need more checks or copies."""
        numbers = x.flags.num
        if numbers & _READY != _READY:
            return None
        if self._fills == "nothing":
            return EMPTY
        if self._fills == "x":
            return x if numbers & _WRITABLE else None
        if out is x:
            return x if numbers & _WRITABLE and self._shape == x.shape else None
        if out is None:
            return np.empty(self._shape, self.dtype)
        if type(out) is not np.ndarray or out.dtype != self.dtype or out.shape != self._shape:
            return None
        others = out.flags.num
        ready = others & (_READY | _WRITABLE) == _READY | _WRITABLE
        return out if ready and (numbers & others & _OWN or not np.may_share_memory(x, out)) else None
