"""The reductions that MPI computes as NumPy does."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Collection, Iterator

import numpy as np
from mpi4py import MPI

from ... import kernels
from ...arrays import Array, DType

OPS = {
    "sum": MPI.SUM,
    "avg": MPI.SUM,  # divided afterwards
    "prod": MPI.PROD,
    "min": MPI.MIN,
    "max": MPI.MAX,
    "band": MPI.BAND,
    "bor": MPI.BOR,
    "bxor": MPI.BXOR,
}

INTEGERS = [(f"{sign}int{bits}", op) for sign in ("", "u") for bits in (32, 64) for op in OPS if op != "avg"]
"""The reductions of integers that MPI may compute. Shorter integers are excluded: Open MPI's vector code
saturates their sums, and its scalar code, which adds the rest of an array, does not."""

FLOATS = [(f"float{bits}", op) for bits in (32, 64) for op in ("sum", "prod", "min", "max")]
"""The reductions of floats that MPI may compute, where the order does not matter."""

REDUCTIONS = INTEGERS + FLOATS


@functools.cache
def is_sound(dtype: str, op: str) -> bool:
    """Whether this process' MPI reduces two arrays as NumPy does, including overflows, infinities and NaN."""
    random = np.random.default_rng(0)
    for count in (1, 7, 67):  # less than a vector, and vectors and a rest
        for x, y in _operands(random, np.dtype(dtype), count):
            expected = np.empty_like(x)
            kernels.host.reduce_rows([x, y], expected, op)
            OPS[op].Reduce_local(x, y)
            if not np.array_equal(y, expected, equal_nan=y.dtype.kind == "f"):
                return False
    return True


def in_any_order(sound: Collection[tuple[str, str]]) -> tuple[frozenset[tuple[DType, str]], bool]:
    """The reductions, (dtype, op), that MPI makes of the sound ones in any order, and whether there are floats.

    An average of floats is a sum that is divided afterwards.
    """
    averages = {(dtype, "avg") for dtype, op in sound if op == "sum" and dtype.startswith("float")}
    return frozenset((np.dtype(dtype), op) for dtype, op in {*sound, *averages}), bool(averages)


def _operands(random: np.random.Generator, dtype: DType, count: int) -> Iterator[Array]:
    """Pairs of arrays, (2, count) each."""
    if dtype.kind == "f":
        yield random.standard_normal((2, count)).astype(dtype)
        ends = np.array([np.nan, np.inf, -np.inf, np.finfo(dtype).max, 1, 0], dtype)
        for x, y in itertools.product(ends, repeat=2):
            yield np.array([[x] * count, [y] * count])
    else:
        limits = np.iinfo(dtype)
        yield random.integers(limits.min, limits.max, (2, count), dtype, endpoint=True)
