"""The inputs, outputs and call of each collective: one `Case` each."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from bagua_comm import Codec, Communicator, quantized_allreduce
from bagua_comm.arrays import FLOATS, UFUNCS, Array, DType

from ..bench.checking import ERROR, WRONG, Check
from ..bench.timing import allreduce_factor, chunks_factor, root_factor

# ---------------------------------------------------------------------------------------------------
# What a call works on
# ---------------------------------------------------------------------------------------------------

_PERIOD = 13


@dataclass(frozen=True)
class Setting:
    """The arguments of one call, and the rank that makes it."""

    rank: int
    size: int
    count: int
    """Elements of the array, or of one of its p chunks, as nccl-tests count them."""
    dtype: DType
    op: str
    root: int
    in_place: bool = False

    @cached_property
    def is_float(self) -> bool:
        """Whether an average is rounded rather than truncated."""
        return self.dtype.name in FLOATS

    def chunk(self, x: Array) -> Array:
        """View this rank's chunk of `x`, (p * count,)."""
        return x[self.rank * self.count : (self.rank + 1) * self.count]

    def values(self, rank: int, count: int) -> Array:
        """Small integers, different for each rank, that repeat: their sums are exact in every dtype."""
        return _repeated(self._period(rank).astype(self.dtype), count)

    def reduced(self, count: int) -> Array:
        """The exact reduction of all ranks' `values`."""
        total = UFUNCS[self.op].reduce([self._period(rank) for rank in range(self.size)])
        if self.op == "avg":
            total = total / self.size if self.is_float else total // self.size
        return _repeated(total.astype(self.dtype), count)

    def _period(self, rank: int) -> Array:
        values = (np.arange(_PERIOD) + 5 * rank) % _PERIOD
        return 1 + values % 2 if self.op == "prod" else values

    def normal(self, rank: int) -> Array:
        """Normally distributed numbers, as gradients roughly are."""
        x = np.random.default_rng(rank).standard_normal(self.count, dtype=np.float32)
        return x.astype(self.dtype, copy=False)

    def reduced_normal(self) -> Array:
        """The float64 sum or mean of all ranks' `normal`."""
        total = np.zeros(self.count)
        for rank in range(self.size):
            total += self.normal(rank)
        return total / self.size if self.op == "avg" else total


def _repeated(period: Array, count: int) -> Array:
    return np.tile(period, -(-count // _PERIOD))[:count]


# ---------------------------------------------------------------------------------------------------
# The collectives
# ---------------------------------------------------------------------------------------------------

Ours = Callable[[Communicator, Setting, Array, Any], Any]
OUT_OF_PLACE, IN_PLACE = "out-of-place", "in-place"
FORMS = (OUT_OF_PLACE, IN_PLACE)


@dataclass(frozen=True)
class Case:
    """A collective: its input, its expected output, its call, and its bus bandwidth.

    Args:
        name: The operation.
        given: This rank's input.
        expected: This rank's result; None if it gets none.
        in_place: The arguments `x` and `out` of an in-place call, made from those of the out-of-place form.
        ours: Our call; returns the result.
        bus_factor: Bus bandwidth / algorithm bandwidth, from the number of ranks.
        chunks: Whether the size is that of p chunks, of which `count` is one.
        reduces: Whether there is an `op`.
        rooted: Whether there is a `root`.
        forms: Out of place, in place, or both.
        check: The check of a result.
        codec: The codec on the wire; None if elements are sent as they are.
    """

    name: str
    given: Callable[[Setting], Array]
    expected: Callable[[Setting], Array | None]
    in_place: Callable[[Setting, Array, Any], tuple[Array, Array]]
    ours: Ours
    bus_factor: Callable[[int], float]
    chunks: bool = False
    reduces: bool = False
    rooted: bool = False
    forms: tuple[str, ...] = FORMS
    check: Check = WRONG
    codec: Codec | None = None

    @property
    def title(self) -> str:
        """The operation, and its codec."""
        return f"{self.name} {self.codec}" if self.codec else self.name

    @property
    def exact(self) -> str:
        """The operation that gives the exact result."""
        return self.name.removeprefix("quantized_")


def _whole(s: Setting, x: Array, out: Any) -> tuple[Array, Array]:
    return x, x


ALLREDUCE = Case(
    "allreduce",
    given=lambda s: s.values(s.rank, s.count),
    expected=lambda s: s.reduced(s.count),
    in_place=_whole,
    ours=lambda comm, s, x, out: comm.allreduce(x, out, op=s.op),
    bus_factor=allreduce_factor,
    reduces=True,
)

ALLGATHER = Case(
    "allgather",
    given=lambda s: s.values(s.rank, s.count),
    expected=lambda s: np.concatenate([s.values(rank, s.count) for rank in range(s.size)]),
    in_place=lambda s, x, out: (s.chunk(out), out),
    ours=lambda comm, s, x, out: comm.allgather(x, out),
    bus_factor=chunks_factor,
    chunks=True,
)

REDUCE_SCATTER = Case(
    "reduce_scatter",
    given=lambda s: s.values(s.rank, s.size * s.count),
    expected=lambda s: s.chunk(s.reduced(s.size * s.count)),
    in_place=lambda s, x, out: (x, s.chunk(x)),
    ours=lambda comm, s, x, out: comm.reduce_scatter(x, out, op=s.op),
    bus_factor=chunks_factor,
    chunks=True,
    reduces=True,
)

ALLTOALL = Case(
    "alltoall",
    given=lambda s: s.values(s.rank, s.size * s.count),
    expected=lambda s: np.concatenate([s.chunk(s.values(rank, s.size * s.count)) for rank in range(s.size)]),
    in_place=_whole,
    ours=lambda comm, s, x, out: comm.alltoall(x, out),
    bus_factor=chunks_factor,
    chunks=True,
)

BROADCAST = Case(
    "broadcast",
    given=lambda s: s.values(s.rank, s.count),
    expected=lambda s: s.values(s.root, s.count),
    in_place=_whole,
    ours=lambda comm, s, x, out: comm.broadcast(out, root=s.root),
    bus_factor=root_factor,
    rooted=True,
    forms=(IN_PLACE,),
)

REDUCE = Case(
    "reduce",
    given=lambda s: s.values(s.rank, s.count),
    expected=lambda s: s.reduced(s.count) if s.rank == s.root else None,
    in_place=_whole,
    ours=lambda comm, s, x, out: comm.reduce(x, out, root=s.root, op=s.op),
    bus_factor=root_factor,
    reduces=True,
    rooted=True,
)


def quantized(codec: Codec) -> Case:
    """The quantized allreduce through `codec`."""
    return Case(
        "quantized_allreduce",
        given=lambda s: s.normal(s.rank),
        expected=Setting.reduced_normal,
        in_place=_whole,
        ours=lambda comm, s, x, out: quantized_allreduce(comm, x, out, codec=codec, op=s.op),
        bus_factor=allreduce_factor,
        reduces=True,
        check=ERROR,
        codec=codec,
    )


EXACT = {case.name: case for case in (ALLREDUCE, ALLGATHER, REDUCE_SCATTER, ALLTOALL, BROADCAST, REDUCE)}
