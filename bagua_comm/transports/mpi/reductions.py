"""The reductions that MPI may be asked for: those that it computes as NumPy does."""

from __future__ import annotations

import functools

import numpy as np
from mpi4py import MPI

from ... import kernels

OPS = {
    "sum": MPI.SUM,
    "prod": MPI.PROD,
    "min": MPI.MIN,
    "max": MPI.MAX,
    "band": MPI.BAND,
    "bor": MPI.BOR,
    "bxor": MPI.BXOR,
}

REDUCTIONS = [(f"{sign}int{bits}", op) for sign in ("", "u") for bits in (32, 64) for op in OPS]
"""The reductions that MPI may be asked for. Shorter integers are not among them: Open MPI's vector code saturates
sums of these, and its scalar code, which adds the rest of an array, does not."""


@functools.cache
def is_sound(dtype: str, op: str) -> bool:
    """Whether this process' MPI reduces as NumPy does, numbers of any size and overflows included."""
    random = np.random.default_rng(0)
    limits = np.iinfo(dtype)
    for count in (1, 7, 67):  # less than a vector, and vectors and a rest
        x, y = (random.integers(limits.min, limits.max, count, dtype, endpoint=True) for _ in range(2))
        expected = np.empty_like(x)
        kernels.host.reduce_rows([x, y], expected, op)
        OPS[op].Reduce_local(x, y)
        if y.tobytes() != expected.tobytes():
            return False
    return True
