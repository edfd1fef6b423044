"""Weighted means of arrays, for the calls that take a `weight`."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from .. import arrays
from ..arrays import COMPLEX, FLOATS, Array
from ..errors import ArrayError, UnsupportedError
from .call import Call
from .weights import Gathering, Weighting, agree, as_weight, multiply

A = TypeVar("A")


def weighted_mean(
    comm: Gathering,
    call: Call,
    out: object,
    weight: object,
    mean: Callable[[Array], object],
    *,
    shrinks: bool = True,
) -> Array:
    """Write the weighted mean of `call.x` over all ranks to `out`, a new array if it is None, and return it.

    Collective.

    Args:
        comm: The ranks.
        call: A call with the array of this rank, and with its "op".
        out: Where to put the result; may be the array.
        weight: The weight of this rank.
        mean: See `Weighting.average`.
        shrinks: See `Weighting.average`.

    Raises:
        ArrayError: `op` is not "avg", `out` does not fit, or the weight of a rank is not a finite number of at
            least 0.
        UnsupportedError: The array has integers.
    """
    if call.detail["op"] != "avg":
        raise ArrayError(
            f'{call.name}: op is {call.detail["op"]!r} beside a weight, expected "avg"; for a sum, multiply the '
            "arrays by their weights"
        )
    if (dtype := arrays.dtype_name(call.x.dtype)) not in FLOATS | COMPLEX:
        raise UnsupportedError(f"{call.name}: x is {dtype} beside a weight, expected a floating-point dtype")
    call.writes_to(out, call.x.shape)
    call.in_place()
    weighting = _agreed(comm, weight)
    if call.target is not call.x:
        call.target[...] = call.x
    weighting.average(call.target, mean, shrinks=shrinks)
    return call.result


def weigh(comm: Gathering, x: A, weight: float) -> A:
    """Return n w x / W, for any mean over the n ranks, with the weight w of this rank and the sum W of all.

    Collective. The plain mean of the results is the weighted mean of the arrays: for calls that have no argument
    `weight`, such as a reduce-scatter. It costs one allgather of 8 bytes from each rank. With weight 0 the result
    is zero, whatever `x` holds. float16 overflows where n w x / W does.

    Args:
        comm: The ranks.
        x: The array of this rank.
        weight: A finite number of at least 0.

    Raises:
        ArrayError: The weight of a rank is something else. Raised on all ranks.

    >>> import numpy as np
    >>> from bagua_comm.testing import run_ranks
    >>> def body(comm):
    ...     x = weigh(comm, np.full(2, 10.0 * comm.rank), weight=1 + 2 * comm.rank)
    ...     return comm.reduce_scatter(x, op="avg")
    >>> run_ranks(2, body)
    [array([7.5]), array([7.5])]
    """
    copied = arrays.as_array(x).copy()
    multiply(copied, _agreed(comm, weight).factors[-1])
    result: A = arrays.returned(x, copied)
    return result


def _agreed(comm: Gathering, weight: object) -> Weighting:
    """Return the factor of this rank, which has a weight. Collective."""
    weighting = agree(comm, [as_weight(weight)])
    assert weighting is not None
    return weighting
