"""The sum of all elements on all ranks, to bits that depend on the elements alone.

A dot product of a solver adds up elements that are distributed over the ranks. Its bits depend on the
distribution, since each rank adds up its own elements first, in an order that NumPy or BLAS chooses. Here each
element is rounded once, to a multiple of a unit, and multiples are added as integers:

    e = the least integer with |x| < 2^e for all x         one allgather of the extremes and numbers of elements
    unit = 2^(e - 80)
    q = rint(x / unit)                                      for each element, in limbs of int64
    S = sum of q                                            one allreduce, SUM of int64
    y = S unit, rounded once

*Limbs.* With n elements in all, a limb has b = 62 - ceil(log2 n) bits, and 80 bits take L = ceil(80 / b) limbs.
The first is x / (2^((L - 1) b) unit), rounded to an integer, and the rest is multiplied by 2^b for the next one.
Both steps are exact: the rest has no bit that x has not, and the product is one with a power of two. (What is
rounded because it is subnormal is far below 1/2.) As |x / unit| < 2^80, a limb is at most 2^b, and the sum of n
is at most 2^62. The last limb is rounded half to even, and so is q, since the limbs before it are even multiples
of its unit. So q does not depend on n.

*Error.* Elements that are multiples of the unit, whose last bit is at least 2^-80 of 2^e, are added exactly; if
all are, y is the correctly rounded sum, as that of `math.fsum`. Others are off by at most half a unit, so S unit
is off by at most n 2^-80 of the largest |x|. S is an integer of Python, so y is rounded once, also where it is
subnormal.

*Infinity and NaN.* The sum is what additions in any order give: NaN with a NaN or with both infinities, else the
infinity. A finite sum that is too large is an infinity, but no partial sum is. A sum of zero is +0.0. Real and
imaginary parts are sums of their own.

Source: cutting addends into pieces that are added exactly is the idea of Demmel and Nguyen, "Parallel
Reproducible Summation", IEEE Transactions on Computers 64(7), 2015.
"""

from __future__ import annotations

import math
from fractions import Fraction
from typing import Any

import numpy as np

from .. import arrays
from ..arrays import INTEGERS, AnyArray, Array, DType
from ..comm import Communicator
from ..comm.call import Call
from ..comm.public_methods import public_method
from ..errors import ArrayError, UnsupportedError
from ..kernels.host import fixed_format

BITS = 80
"""The bits of a multiple of the unit."""

_DTYPES = ("float32", "float64", "complex64", "complex128")

_PIECE = 1 << 13
"""The number of floats that are cut into limbs at a time: 64 KiB of float64."""


@public_method("reproducible_sum")
def reproducible_sum(comm: Communicator, x: AnyArray) -> Any:
    """Add up all elements of the arrays of all ranks, to bits that depend on the elements alone.

    Collective. Ranks may have arrays of different shapes, and of no elements. The result does not depend on how
    the elements are distributed over the ranks, on their order, on the number of ranks or on the transport. It is
    the exact sum, rounded once, if no element has a bit below 2^-80 of the largest one; each other element is off
    by that much at most. So a dot product of a solver is `reproducible_sum(comm, x * y)`. It takes two small
    calls and a few passes over the array, which is copied to the host if it is on a device.

    Args:
        comm: The ranks.
        x: The array of this rank, of float32, float64, complex64 or complex128; the same dtype on all ranks.

    Returns:
        The sum, of the dtype of `x`, the same on all ranks: a scalar of NumPy, or a tensor of no dimensions for a
        tensor. Zero is +0.0. NaN and infinities give what additions in any order give.

    Raises:
        ArrayError: The ranks differ in their dtypes.
        UnsupportedError: The dtype is another.

    >>> from bagua_comm.testing import run_ranks
    >>> parts = [np.array([1e16, 1.0]), np.array([]), np.array([-1e16])]
    >>> run_ranks(3, lambda comm: float(reproducible_sum(comm, parts[comm.rank])))
    [1.0, 1.0, 1.0]
    """
    call = Call(comm, "reproducible_sum", x)
    dtype = arrays.dtype_name(call.x.dtype)
    if dtype not in _DTYPES:
        hint = "; plain sums of integers are exact, comm.allreduce(x.sum())" if dtype in INTEGERS else ""
        hint = "; convert it, x.astype('float32')" if dtype in arrays.REDUCED_PRECISION else hint
        raise UnsupportedError(
            f"reproducible_sum: x has dtype {dtype}, expected one of {', '.join(_DTYPES)}{hint}"
        )
    call.writes_to(None, ())
    with comm.tracer.span("reproducible_sum", bytes=call.x.nbytes):
        flat = arrays.contiguous(arrays.to_host(call.x)).reshape(-1)
        real = arrays.as_real(flat, "sum")
        sums = _sums(comm, real.reshape(-1, flat.itemsize // real.itemsize).T, dtype)
        call.target[...] = np.array(sums, real.dtype).view(flat.dtype)[0]
    return call.result[()]


def _sums(comm: Communicator, rows: Array, dtype: str) -> list[object]:
    """Add up each row over all ranks: the numbers, or their real and their imaginary parts. Collective."""
    count, lows, highs = _agree(comm, rows, dtype)
    exponents = [math.frexp(max(-low, high))[1] for low, high in zip(lows, highs, strict=True)]
    width = 62 - (max(count, 1) - 1).bit_length()
    limbs = [_limbs(row, exponent, width) for row, exponent in zip(rows, exponents, strict=True)]
    sums: list[object] = []
    for i, totals in enumerate(comm.allreduce(np.array(limbs)).tolist()):
        extremes = lows[i] + highs[i]
        if math.isfinite(extremes):
            whole = sum(total << place * width for place, total in enumerate(reversed(totals)))
            sums.append(_rounded(whole, exponents[i] - BITS, rows.dtype))
        else:  # the smallest or the largest element is NaN or infinite, and their sum is that of all
            sums.append(math.nan if math.isnan(extremes) else extremes)
    return sums


def _agree(comm: Communicator, rows: Array, dtype: str) -> tuple[int, list[float], list[float]]:
    """Return the number of elements of all ranks, and the smallest and the largest of each row, or 0. Collective.

    Raises:
        ArrayError: The ranks differ in their dtypes. Raised on all ranks.
    """
    mine = np.zeros(6)
    mine[:2] = _DTYPES.index(dtype), rows.shape[1]
    mine[2 : 2 + 2 * len(rows)] = [extreme(row, initial=0) for row in rows for extreme in (np.min, np.max)]
    facts = comm.allgather(mine)
    kinds = [_DTYPES[int(kind)] for kind in facts[:, 0]]
    for rank, kind in enumerate(kinds):
        if kind != kinds[0]:
            raise ArrayError(
                f"reproducible_sum: ranks differ: rank 0 has x of {kinds[0]}, but rank {rank} of {kind}; convert "
                "all to one dtype, x.astype(...)"
            )
    used = facts[:, 2 : 2 + 2 * len(rows)]
    return int(facts[:, 1].sum()), used[:, ::2].min(0).tolist(), used[:, 1::2].max(0).tolist()


def _limbs(row: Array, exponent: int, width: int) -> Array:
    """The sums of the limbs of these numbers, which are below 2^exponent; the first limb is the highest."""
    sums = np.zeros(-(-BITS // width), np.int64)
    power = np.array([BITS - (sums.size - 1) * width - exponent])
    with np.errstate(all="ignore"):
        for at in range(0, row.size, _PIECE):
            rest = row[at : at + _PIECE].astype(np.float64)
            for factor in fixed_format(rest.dtype).powers(power):
                rest *= factor
            for i in range(sums.size):
                limb = np.rint(rest)
                sums[i] += limb.astype(np.int64).sum()
                rest -= limb
                rest *= 2.0**width
    return sums


def _rounded(total: int, exponent: int, dtype: DType) -> object:
    """The float of `dtype` that is nearest to total 2^exponent, half to even; infinite if that is too large."""
    form = fixed_format(dtype)
    last = max(abs(total).bit_length() - form.digits, 1 - form.digits - form.offset - exponent, 0)
    with np.errstate(over="ignore"):
        return np.ldexp(dtype.type(round(Fraction(total, 1 << last))), exponent + last)
