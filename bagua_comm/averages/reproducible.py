"""Reproducible sums: the bits depend on the addends alone.

Additions of floats round, so the last bits depend on the order of the addends. The order depends on the algorithm
of an allreduce, the number of ranks, the size of the array and the transport. Additions of integers do not round.
So every addend is rounded once, to a multiple of a unit that all ranks agree on, and the multiples are added as
int32, those of float64 as int64.

M addends, in blocks of neighbouring elements. For each block:

    f = the exponent field of float32, 0 to 255, of the largest |x| of all addends     one allreduce, MAX of uint8
    bits = 31 - ceil(log2 M)
    unit = 2^(max(f, 1) - 126 - bits)
    q = clip(rint(x / unit), 1 - 2^bits, 2^bits - 1)                                   for each addend
    S = sum of q                                                                       one allreduce, SUM of int32
    y = S unit, or S unit / M for the mean

Each rank sends the bytes of float32, one byte for each block, and 8 bytes to detect ranks with other settings.

The formula for float64 has the field of float64, 0 to 2047, in uint16; 63 in place of 31; 1022 in place of 126;
and int64. A rank sends the bytes of float64, two bytes for each block, and 8. Complex numbers are pairs of floats
of one block.

*Why the order has no effect.* The maximum of integers and, as long as it does not overflow, the sum of integers
do not depend on the order; q depends on x, f and M; and y on S, f and M.

*Why S does not overflow.* M <= 2^(31 - bits), so |S| <= M (2^bits - 1) <= 2^31 - M. The same holds for every
partial sum, in any order, and with 63 for 31.

*Error.* |x| < 2^(max(f, 1) - 126), so |x / unit| < 2^bits, and q is off by at most 1/2: by 2^-bits of the
largest |x| of the block. The clip acts only where M > 128. Else bits >= 24, and since float32 has 24 bits,
|x / unit| <= 2^bits - 2^(bits - 24), which is an integer. Where it acts, it keeps means of the largest finite
numbers finite; then q is off by at most 1. For float64, which has 53 bits, it acts where M > 1024.

*Compared with float32.* These are measured relative L2 errors, not bounds. A float32 sum of 8 addends in rank
order has a larger error than this one, in blocks of 128, if the values of a block are of similar size: normal,
Student-t(3), or with one lognormal scale for each block. If each element has its own lognormal scale, this sum
has the larger error from about sigma = 2 on, and in blocks of 64 from between 2.5 and 3 on.

*How y is rounded.* S / M is rounded to float64, multiplied by a power of two, which is exact, and rounded to
float32. That is the float32 nearest to S unit / M. Two roundings differ from one only if S / M is near the middle
between two neighbours of float32, but not on it, nearer than 2^-53 of itself. The middle is m 2^j with m < 2^25,
and S / M - m 2^j is a multiple of 2^min(j, 0) / M. With |S| < 2^31 and M <= 2^16, that is at least 2^-31 of S / M
if j >= 0, and 2^-42 if j < 0. float16 and bfloat16 are rounded once more, from float32. Zeros are +0.0.

*Shards.* Tensors are cut along their first dimension into one part for each of p ranks, ceil(rows / p) rows each,
and padded with zeros. Rank r keeps part r of every tensor; the parts of a rank lie together. Blocks are those of
the whole tensors, as `Reproducible` counts them, so units and sums do not depend on p:

    f of each block, over all its pieces and all ranks      one allreduce, MAX of uint8
    q of each element, with the unit of its block
    S of this rank's parts                                  one reduce-scatter, SUM of int32

So each rank sends (p - 1) / p of the bytes of float32, and two bytes for each block: half of an allreduce. For
float64 the types are uint16 and int64.

*How y is rounded to float64.* S / M is rounded to the nearest float64, and multiplied by a power of two. A
product of 2^-1022 or more is exact or overflows, so y is the float64 nearest to S unit / M. Below, it is rounded
again:

* A sum S unit is exact there, or S is. Let F be max(f, 1); then |S| < 2^(bits - F) where y is below 2^-1022. If
  F > bits - 52, float64 holds S. Else the unit is at most 2^-1074, of which all addends, and so their sum, are
  multiples: y needs no rounding. So a sum is rounded once everywhere.
* A mean of less than 2^-1022 may be rounded twice; it is off by less than 2^-1074.

S itself may need more bits than float64 has. If |S| < 2^53, S / M is one division of floats. Else let h be
floor(S / M), rounded to float64, and t = (S - h M) / M, a small integer over M; y / unit is fl(h + fl(t)), which
is S / M rounded once. For fl(t) is off by 2^-54 at most if |S / M| < 2^53, where |t| < 1, and 2^-43 at most
beyond, where |t| <= 2^10. But the difference of S / M and a middle between two neighbours that it is not on
is a multiple of 2^-16 / M, at least 2^-32 (|S / M| >= 2^37), or of 1 / M beyond 2^53.

*Infinity and NaN* have f = 255 or 2047, and so has their block on all ranks: all of it becomes NaN.

Source: rounding to an agreed unit before adding is the idea of Demmel and Nguyen, "Fast Reproducible
Floating-Point Summation", ARITH 2013; one exponent for a block of integers is block floating point, Wilkinson,
"Rounding Errors in Algebraic Processes", 1963.
"""

from __future__ import annotations

import functools
import itertools
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from .. import arrays, kernels
from ..arrays import COMPLEX, FLOATS, INTEGERS, A, AnyArray, Array, LinearOp
from ..comm import Communicator
from ..comm.call import Call
from ..comm.weighted import weighted_mean
from ..comm.weights import multiply
from ..errors import ArrayError, UnsupportedError
from ..health.shifting import equal
from ..kernels.host import fixed_format
from .base import Average, Shards, check_shards

DTYPES = FLOATS | COMPLEX
MOST_ADDENDS = 2**16
"""Largest number of addends; it leaves at least 15 bits for each, or 47 of float64."""

BLOCK = 128
"""Default number of elements of a block."""


@dataclass(frozen=True)
class Reproducible(Average):
    """The mean, whose bits depend on the addends alone: see `reproducible_allreduce` for the formula.

    They do not depend on the order of the ranks, on the transport, on host or device, nor on how tensors are
    packed into buckets: in an algorithm, each tensor begins a new block. (If the average is called alone, as in a
    communication hook, only the array does.)

    With `addends`, the mean is that of `addends` microbatches, distributed to the ranks by `elastic.share`, and
    does not depend on the number of ranks either. The gradient of each microbatch is one addend: see
    `Engine.hold` and `bagua_torch.DistributedDataParallel.microbatches`. Until the mean is computed, each rank
    keeps a copy of the gradients for each of its microbatches but the last. On a device, the host waits for the
    other ranks before each mean, since they compare the numbers of their addends.

    Args:
        block: Number of neighbouring elements that share a unit. Smaller blocks have smaller errors, and cost
            more bytes: one for each block. With 128, the error is larger than that of float32 if scales inside a
            block are spread as widely as a lognormal distribution of sigma 2 or more.
        addends: Total number of addends of all ranks; None if each rank has one.

    Raises:
        ArrayError: `block` or `addends` is not a positive integer, or `addends` is above 65536.

    >>> from bagua_comm.testing import run_ranks
    >>> run_ranks(2, lambda comm: Reproducible().bind(comm)(np.array([0, comm.rank], np.float32)))[0]
    array([0. , 0.5], dtype=float32)
    """

    block: int = BLOCK
    addends: int | None = None
    is_reproducible = keeps_zeros = True

    def __post_init__(self) -> None:
        if type(self.block) is not int or self.block < 1:
            raise ArrayError(f"Reproducible: block is {self.block!r}, expected an int of at least 1")
        if self.addends is None:
            return
        if type(self.addends) is not int or not 1 <= self.addends <= MOST_ADDENDS:
            raise ArrayError(
                f"Reproducible: addends is {self.addends!r}, expected None or an int from 1 to {MOST_ADDENDS}"
            )

    def bind(self, comm: Communicator, like: Array | None = None, sizes: Sequence[int] | None = None) -> _Held:
        """See `Average.bind`.

        Args:
            comm: The ranks.
            like: An array like those to be averaged.
            sizes: Numbers of elements of the consecutive tensors in the array; the rest is padding. None if the
                array is one tensor.

        Raises:
            ArrayError: There are more ranks than addends.
        """
        addends = comm.size if self.addends is None else self.addends
        if not comm.size <= addends <= MOST_ADDENDS:
            raise ArrayError(
                f"{self}: there are {comm.size} ranks and {addends} addends, expected at least one addend for "
                f"each rank, and at most {MOST_ADDENDS}"
            )
        return _Held(self, comm, addends, sizes)

    def bind_shards(self, comm: Communicator, tensors: Sequence[tuple[int, int]] | None = None) -> Shards:
        """See `Average.bind_shards`. Of several `tensors`, shards have the bits of the whole tensors.

        With `addends`, each rank has an equal share of them: each call but the last of a share holds its array as
        an addend, and leaves zeros in `out`.

        Raises:
            ArrayError: There are more ranks than addends, or the ranks would not have equal shares.
        """
        if tensors is None:
            return super().bind_shards(comm)
        return ReproducibleShards(self, comm, tensors)

    def check(self, dtype: str) -> None:
        """Accept every floating-point and complex dtype."""
        if dtype not in DTYPES:
            raise UnsupportedError(
                f"{self} cannot average {dtype}, only {', '.join(sorted(DTYPES))}{way_out(dtype)}"
            )


def way_out(dtype: str) -> str:
    """The end of an error message: how to get sums of another dtype that do not depend on the order."""
    if dtype in INTEGERS:
        return "; sums of integers do not round, so allreduce has the same bits in any order"
    return ""


class _Held:
    """A bound `Reproducible`, with the addends that this rank holds until their mean is computed."""

    def __init__(
        self, settings: Reproducible, comm: Communicator, addends: int, sizes: Sequence[int] | None
    ) -> None:
        self._settings, self._comm, self._addends = settings, comm, addends
        self._sizes = None if sizes is None else tuple(sizes)
        self._held: list[Array] = []
        self._factors: Sequence[float] = ()
        """What the addends that are held are multiplied by before their mean; nothing for a plain one."""
        self._excess = 0
        """Number of addends beyond this rank's share that it was given to hold."""
        self._free: list[Array] = []

    def hold(self, x: Array) -> None:
        """Hold a copy of `x` as one addend of the next mean, and set `x` to zero.

        Raises:
            ArrayError: This rank holds all its addends but the last, which is averaged directly.
        """
        mine = self._shares[self._comm.rank]
        if len(self._held) + 1 >= mine:
            self._excess += 1
            due = f"rank {self._comm.rank} of {self._comm.size} has {mine} of {self._addends} addends"
            raise ArrayError(f"hold: {due}: {mine - 1} to hold, and one to average; got more")
        self._settings.check(arrays.dtype_name(x.dtype))
        room = self._free.pop() if self._free else arrays.empty_like(x)
        room[...] = x
        x[...] = 0
        self._held.append(room)

    def weigh_held(self, factors: Sequence[float]) -> None:
        """Multiply the addends that this rank holds by these factors before their mean."""
        self._factors = factors

    def __call__(self, x: Array) -> Array:
        """Average `x` and the addends that all ranks hold, in place.

        Collective.

        Raises:
            ArrayError: The ranks differ in their settings, or a rank has more or fewer addends than its share.
                Raised on all ranks. (On a device, if each rank has one addend, `hold` alone raises.)
        """
        call = Call(self._comm, "Reproducible", x)
        value = call.x
        self._settings.check(arrays.dtype_name(value.dtype))
        whole = arrays.contiguous(value).reshape(-1)
        flat = arrays.as_real(whole, "sum")
        parts = whole.itemsize // flat.itemsize
        sizes, block = tuple(parts * n for n in self._sizes or (whole.size,)), parts * self._settings.block
        given, excess = len(self._held) + 1, self._excess
        held, self._held, self._excess = self._held, [], 0
        for each, factor in zip(held, self._factors, strict=False):  # their numbers differ only in an error
            multiply(each, factor)
        self._factors = ()
        addends = [*(arrays.as_real(each.reshape(-1), "sum") for each in held), flat]
        shares, given = self._shares, given + excess
        wrong = None if given == shares[self._comm.rank] else given
        terms = _Terms(shares, block, sizes, arrays.dtype_name(flat.dtype), wrong)
        bounds = _bounds(self._comm, flat, sizes, block)
        with self._comm.tracer.span("Reproducible", addends=len(addends), bytes=flat.nbytes):
            _sum(self._comm, addends, bounds, terms, flat, divisor=self._addends)
        self._free = [*self._free, *held][: shares[self._comm.rank] - 1]
        if not arrays.same_memory(whole, value):
            value[...] = whole.reshape(value.shape)
        return x

    @property
    def _shares(self) -> tuple[int, ...]:
        """The present numbers of addends of the ranks."""
        return self._comm.flight.health.counts(self._comm.group, self._addends)


def reproducible_allreduce(
    comm: Communicator,
    x: A,
    out: A | None = None,
    *,
    op: LinearOp = "sum",
    block: int = BLOCK,
    weight: float | None = None,
) -> A:
    """Sum or average `x` over all ranks, to bits that depend on these arrays alone.

    Collective. `x` has the same shape on every rank, any size and shape, and a floating-point or complex dtype.
    `out` may be `x`. The result does not depend on the order of the arrays among the ranks, on the transport, or
    on host or device memory. It costs a byte for each block and 8 bytes more than `Communicator.allreduce` of
    float32, another pass over the array, and a second, small allreduce. To add up the elements of an array as
    well, as in a dot product, see `reproducible_sum`.

    Every block of `block` elements has a unit, a power of two: with f, the exponent field of the largest
    magnitude in the block on all ranks, and bits = 31 - ceil(log2 p) on p ranks, it is
    2^(max(f, 1) - 126 - bits). Elements are rounded to multiples of it, half to even, which are added as int32;
    the sum is rounded to float32, and then to the dtype. So the error of every addend is at most 2^-bits of the
    largest one in its block, before these last roundings. For float64, 63 takes the place of 31, 1022 that of
    126, and int64 that of int32. Both parts of a complex number share the unit. A block with an infinity or a NaN
    becomes NaN. The documentation of the module has the proofs.

    Args:
        comm: The ranks, at most 65536.
        x: The array of this rank.
        out: Where to put the result; a new array if None.
        op: "sum" or "avg".
        block: Number of neighbouring elements that share a unit.
        weight: The weight of `x` in the mean; see `Communicator.allreduce`.

    Raises:
        ArrayError: `out` does not fit `x`, `op` is not "sum" or "avg", or `block` is not a positive integer.
        UnsupportedError: The dtype is another, such as int64, or no transport takes such an array.

    >>> from bagua_comm.testing import run_ranks
    >>> tiny = np.float32(2**-24)
    >>> values = np.array([1, tiny, tiny, -1], np.float32)  # 1 + tiny is 1 in float32
    >>> run_ranks(4, lambda comm: float(reproducible_allreduce(comm, values[comm.rank]) / tiny))
    [2.0, 2.0, 2.0, 2.0]
    """
    if op not in ("sum", "avg"):
        raise ArrayError(f'reproducible_allreduce: op is {op!r}, expected "sum" or "avg"')
    settings, call = Reproducible(block), Call(comm, "reproducible_allreduce", x, op=op)
    settings.check(arrays.dtype_name(call.x.dtype))
    if weight is not None:

        def mean(y: Array) -> object:
            return reproducible_allreduce(comm, y, y, op="avg", block=block)

        weighted: A = weighted_mean(comm, call, out, weight, mean)
        return weighted
    call.writes_to(out, call.x.shape)
    call.in_place()
    call.contiguous()
    flat, target = (arrays.as_real(each.reshape(-1), op) for each in (call.x, call.target))
    block *= call.x.itemsize // flat.itemsize
    bounds = _bounds(comm, flat, (flat.size,), block)
    with comm.tracer.span("reproducible_allreduce", op=op, bytes=flat.nbytes):
        terms = _Terms((1,) * comm.size, block, (flat.size,), arrays.dtype_name(flat.dtype))
        _sum(comm, [flat], bounds, terms, target, divisor=comm.size if op == "avg" else 1)
    result: A = call.result
    return result


_ADVICE = (
    "; distribute microbatches by elastic.share, and hold each but the last (Engine.hold, "
    "DistributedDataParallel.microbatches)"
)

CHECKSUM_BYTES = 8
"""Size of the checksum of the settings, which the agreement on exponents carries to detect unequal ones."""


class _Terms(NamedTuple):
    """The settings that must be equal on all ranks, and the error of this rank in them."""

    shares: tuple[int, ...]
    """Numbers of addends, by rank."""
    block: int
    sizes: tuple[int, ...]
    dtype: str
    given: int | None = None
    """Number of addends of this rank if it differs from its share; else None."""

    @property
    def addends(self) -> int:
        """The number of addends of all ranks."""
        return sum(self.shares)

    def agree(self, comm: Communicator) -> None:
        """Compare the settings among the ranks, on the host, for arrays on a device. Collective.

        A comparison makes the host wait for the other ranks. So equal settings are compared once, and the numbers
        of addends, which may differ in each call, only if ranks hold addends: with one for each rank, `hold` has
        raised already.

        Raises:
            ArrayError: The ranks differ in their settings, or a rank has a wrong number of addends. Raised on all
                ranks.
        """
        settings, holds = self._replace(given=None), self.addends > comm.size
        if settings in comm.agreed and not holds:
            return
        mine = self if holds else settings
        checksum = _checksum(mine, comm.rank)
        agreed = comm.allreduce(checksum, op="max").tobytes() == checksum.tobytes()
        if mine.given is not None or not agreed:
            raise ArrayError(mine.complaint(comm))
        comm.agreed.add(settings)

    def complaint(self, comm: Communicator) -> str:
        """Return what is wrong, in the same words on all ranks. Collective."""
        settings: list[_Terms] = comm.allgather_object(self)
        for rank, each in enumerate(settings):
            if each[:4] != settings[0][:4]:
                pairs = enumerate(zip(settings[0].sizes, each.sizes, strict=False))
                at = next((i for i, (expected, size) in pairs if size != expected), None)
                return (
                    f"Reproducible: ranks differ: rank 0 has {settings[0]._settings(at)}, but rank {rank} has "
                    f"{each._settings(at)}; give all ranks the same `addends`, `block` and tensors"
                )
        wrong = [each._of(comm, rank) for rank, each in enumerate(settings) if each.given is not None]
        return "; ".join(wrong) + _ADVICE

    def _of(self, comm: Communicator, rank: int) -> str:
        due = f"rank {rank} of {comm.size} has {self.shares[rank]} of {self.addends} addends"
        return f"Reproducible: {due}, but has {self.given}"

    def _settings(self, at: int | None) -> str:
        size = "" if at is None else f", {self.sizes[at]} elements in tensor {at}"
        tensors = f"{len(self.sizes)} tensors of {self.dtype}{size}"
        shifted = f" {self.shares}" if self.shares != equal(self.addends, len(self.shares)) else ""
        return f"{self.addends} addends{shifted} in blocks of {self.block}, in {tensors}"


@functools.lru_cache(maxsize=1024)
def _checksum(terms: _Terms, rank: int) -> Array:
    """Return the CRC of the settings and its complement, 8 bytes; it differs on each rank with a wrong count."""
    wrong = "" if terms.given is None else f"rank {rank} has {terms.given}"
    there = np.frombuffer(zlib.crc32(f"{terms[:4]} {wrong}".encode()).to_bytes(4, "little"), np.uint8)
    return np.concatenate([there, 255 - there])


def _sum(
    comm: Communicator, mine: Sequence[Array], bounds: Array, terms: _Terms, out: Array, *, divisor: int
) -> None:
    """Add the arrays `mine` of all ranks, one for each addend, and divide by `divisor`. Collective."""
    blocks, on_host, field = len(bounds) - 1, isinstance(out, np.ndarray), fixed_format(out.dtype).field
    extra = CHECKSUM_BYTES // field.itemsize if on_host else 0
    agreed = comm.scratch.take("fields", (blocks + extra,), field, like=out)
    fields, checksum = agreed[:blocks], agreed[blocks:]
    fields[...] = 0
    for x in mine:
        kernels.of(x).fixed_exponents(x, bounds, fields)
    if on_host:
        checksum[...] = _checksum(terms, comm.rank).view(field)
    else:
        terms.agree(comm)
    comm.allreduce(agreed, out=agreed, op="max")
    # Each field is the maximum over the ranks: one and its complement are unchanged only if all ranks agree.
    if on_host and (terms.given is not None or checksum.tobytes() != _checksum(terms, comm.rank).tobytes()):
        raise ArrayError(terms.complaint(comm))
    call = Call(comm, "reproducible_allreduce", mine[-1], addends=terms.addends)
    call.target = out
    code = _FixedPoint(mine, bounds, fields, terms.addends, divisor)
    call.run(lambda _, out: call.transport.allreduce_encoded(code, out))


class _FixedPoint:
    """The encoding of addends as multiples of the units. See `Encoding`."""

    def __init__(self, mine: Sequence[Array], bounds: Array, fields: Array, addends: int, divisor: int) -> None:
        self._mine, self._bounds, self._fields, self._divisor = mine, bounds, fields, divisor
        form = fixed_format(mine[0].dtype)
        self.dtype, self._bits = form.total, form.bits(addends)
        self._run = kernels.of(fields)

    def encode(self, piece: slice, out: Array) -> None:
        """Write the sum of this rank's addends."""
        bounds, fields = self._blocks(piece)
        for i, x in enumerate(self._mine):
            self._run.fixed_add(x[piece], bounds, fields, self._bits, out, first=i == 0)

    def decode(self, total: Array, piece: slice, out: Array) -> None:
        """Write the sum or the mean."""
        self._run.fixed_mean(total, *self._blocks(piece), self._bits, self._divisor, out)

    def _blocks(self, piece: slice) -> tuple[Array, Array]:
        """Return the bounds of the blocks of a piece, relative to its start, and their exponent fields."""
        bounds, fields = self._bounds, self._fields
        if piece.stop - piece.start == self._mine[0].size:
            return bounds, fields
        first = int(bounds.searchsorted(piece.start, "right")) - 1
        end = max(int(bounds.searchsorted(piece.stop, "left")), first)
        inside = bounds[first : end + 1] - piece.start
        inside[0], inside[-1] = 0, piece.stop - piece.start
        return inside, fields[first:end]


def _bounds(comm: Communicator, like: Array, sizes: tuple[int, ...], block: int) -> Array:
    """Return the bounds of the blocks of tensors of these sizes and of the padding; cached by `comm`."""
    key = "Reproducible", sizes, like.size, block, arrays.library(like)
    found = comm.call_cache.get(key)
    if found is None:
        block = min(block, max(like.size, 1))
        ends = np.cumsum([0, *sizes, like.size - sum(sizes)])
        starts = [np.arange(a, b, block) for a, b in itertools.pairwise(ends)]
        host = np.concatenate([*starts, ends[-1:]]).astype(np.int64)
        found = host
        if not isinstance(like, np.ndarray):
            found = comm.scratch.take(f"{key}", host.shape, np.int64, like=like)
            found.set(host)
        comm.call_cache[key] = found
    return found


# Shards ---------------------------------------------------------------------------------------------


class ReproducibleShards:
    """A reproducible reduce-scatter of tensors; see `Reproducible.bind_shards`."""

    def __init__(self, settings: Reproducible, comm: Communicator, tensors: Sequence[tuple[int, int]]) -> None:
        settings.bind(comm)  # checks the number of addends
        self.addends = comm.size if settings.addends is None else settings.addends
        if self.addends % comm.size:
            raise ArrayError(
                f"{settings}: {self.addends} addends on {comm.size} ranks, expected a multiple, since all ranks "
                "of a sharded model run the same number of passes"
            )
        self.share = self.addends // comm.size
        self._settings, self._comm = settings, comm
        self._held: list[Array] = []
        starts, blocks, sizes = _pieces(tensors, comm.size, settings.block)
        self.size = sum(sizes)
        """Number of elements of all parts of all ranks, padding included."""
        self._bounds, self._blocks = np.append(starts, self.size), blocks
        first = sum(sizes[: comm.rank])
        self._own = slice(*np.searchsorted(starts, [first, first + sizes[comm.rank]]))
        """The pieces of this rank's parts."""

    @property
    def held(self) -> int:
        """Number of addends that this rank holds."""
        return len(self._held)

    def drop(self, keep: int = 0) -> None:
        """Hold the first `keep` addends, and no others."""
        del self._held[keep:]

    def weigh_held(self, factors: Sequence[float]) -> None:
        """Multiply the addends that this rank holds by these factors."""
        for each, factor in zip(self._held, factors, strict=True):
            multiply(each, factor)

    def __call__(self, x: AnyArray, out: AnyArray, op: str) -> AnyArray:
        """Hold `x` while addends are missing, else add all, and write this rank's parts of the result.

        Collective.
        """
        value, target = check_shards("Reproducible", ("x", x), ("out", out), self._comm.size, op)
        if value.size != self.size:
            raise ArrayError(
                f"Reproducible: x has {value.size} elements, expected {self.size}, those of the tensors"
            )
        self._settings.check(arrays.dtype_name(value.dtype))
        if self.held + 1 < self.share:
            self._held.append(value.copy())
            target[...] = 0
            return out
        addends, self._held = [*self._held, value], []
        with self._comm.tracer.span("Reproducible", addends=self.share, bytes=value.nbytes):
            self._add(addends, target, self.addends if op == "avg" else 1)
        return out

    def _add(self, addends: Sequence[Array], out: Array, divisor: int) -> None:
        *addends, out = (arrays.as_real(each, "sum") for each in (*addends, out))
        comm, x, run = self._comm, addends[-1], kernels.of(addends[-1])
        form, parts = fixed_format(x.dtype), x.size // max(self.size, 1)
        bits = form.bits(self.addends)
        bounds = _like(parts * self._bounds, x)
        pieces = _like(np.zeros(len(self._blocks), form.field), x)
        for each in addends:
            run.fixed_exponents(each, bounds, pieces)
        fields = np.zeros(int(self._blocks.max(initial=0)) + 1, form.field)
        np.maximum.at(fields, self._blocks, arrays.to_host(pieces))
        comm.allreduce(fields, out=fields, op="max")
        pieces = _like(fields[self._blocks], x)
        totals = comm.scratch.take("totals", (x.size,), form.total, like=x)
        for i, each in enumerate(addends):
            run.fixed_add(each, bounds, pieces, bits, totals, first=i == 0)
        mine = comm.scratch.take("total", (out.size,), form.total, like=x)
        comm.reduce_scatter(totals, out=mine, op="sum")
        own = self._own
        bounds = _like(parts * (self._bounds[own.start : own.stop + 1] - self._bounds[own.start]), x)
        run.fixed_mean(mine, bounds, pieces[own], bits, divisor, out)


def _pieces(tensors: Sequence[tuple[int, int]], ranks: int, block: int) -> tuple[Array, Array, list[int]]:
    """Return where each piece of a block begins in the array of all parts, its block, and the sizes of ranks.

    Padding is a block of its own, the first.
    """
    starts, blocks, sizes, at = [np.zeros(0, np.int64)], [np.zeros(0, np.int64)], list[int](), 0
    for rank in range(ranks):
        before, begun = at, 1
        for rows, width in tensors:
            part = -(-rows // ranks)
            first, last = (min(end, rows) * width for end in (rank * part, (rank + 1) * part))
            edges = np.arange(first // block * block, last, block) if last > first else np.zeros(0, np.int64)
            starts.append(at + np.maximum(edges - first, 0))
            blocks.append(begun + edges // block)
            if last - first < part * width:
                starts.append(np.array([at + last - first]))
                blocks.append(np.array([0]))
            at, begun = at + part * width, begun + -(-rows * width // block)
        sizes.append(at - before)
    return np.concatenate(starts).astype(np.int64), np.concatenate(blocks), sizes


def _like(host: Array, x: Array) -> Array:
    """A host array in the memory of `x`."""
    if isinstance(x, np.ndarray):
        return host
    made = arrays.empty(host.shape, host.dtype, like=x)
    made.set(host)
    return made
