"""Ranks on a Cartesian grid, and the halos of arrays that are split over it.

The halos of one axis after the other are exchanged, each over the whole length of the other axes. So the second
axis passes on what the first one has brought, and corners come from the diagonal neighbours. Along an axis, each
rank sends first down and then up, and receives first from above and then from below. Messages between two ranks
match in order, so this is right also where both neighbours are one rank. A rank that is its own neighbour copies.

A part of an array that is not contiguous is copied to scratch memory before it is sent, and from there after it
was received. What must be equal on neighbours is compared when it is new on an axis. In a correct program it is
new on all ranks of a line at once, so a repeated exchange sends halos alone. A rank that refuses its array cannot
know whether its neighbours compare. So descriptions, and its error in place of one, are messages like halos: a
neighbour that waits for a halo finds another size, as this rank does, and each takes in what the other has sent.
Where halos have just that size, the two could be taken for each other: along such an axis all exchanges compare.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterable, Sequence
from contextlib import suppress
from operator import contains
from typing import Any, NamedTuple

import numpy as np

from .. import arrays, topology
from ..arrays import A, Array
from ..errors import ArrayError, BaguaError, CommMismatch, shown
from ..objects.caching import BoundedCache
from .arguments import as_argument, check_writable
from .call import Call
from .communicator import Communicator
from .prepared import PreparedCall
from .public_methods import public_method

_NAME = "exchange_halos"

_TEXT_BYTES = 509
"""Size of a description; a prime, so that few halos have it."""

_INSTEAD = f"a rank whose array is wrong, or new to it alone, sends {_TEXT_BYTES} bytes in place of a halo"
"""Explains a message of another size."""

_FAILED = "! "
"""Begins, in place of a description, the error of a rank."""

_KEPT = 256
"""How many descriptions an axis remembers, and how many exchanges a grid keeps prepared."""


class Sides(NamedTuple):
    """The two ranks at a distance along an axis; None beyond an open edge. MPI calls them source and dest."""

    low: int | None
    high: int | None


class _Description(NamedTuple):
    """What neighbours along an axis must have in common."""

    text: str
    is_kept: bool = True
    """Whether they need not compare it again; not where a halo is as long as a description."""


class _Step(NamedTuple):
    """A message each way: a part of the array to the neighbour on one side, a halo from that on the other."""

    dest: int | None
    source: int | None
    inner: tuple[slice, ...]
    """The elements to send."""
    halo: tuple[slice, ...]
    """The elements to fill."""
    copies: tuple[Array, ...] | None
    """Memory for either; None if no copy is needed."""


class Grid:
    """The ranks of a communicator on a Cartesian grid, in row-major order, as `MPI_Cart_create` places them.

    Collective. It sends by `comm`, which must stay open, and needs no `close`.

    Args:
        comm: The communicator; that of a lane for exchanges beside the caller.
        dims: The number of ranks along each axis; 0 to choose it, as `MPI_Dims_create` does.
        periodic: Whether the last rank along an axis is followed by the first one; one for each axis, or for all.

    Attributes:
        dims: The number of ranks along each axis.
        periodic: Whether each axis is periodic.
        coords: The place of this rank along each axis.

    Raises:
        ArrayError: `comm` is no communicator, `dims` do not fit the number of ranks, or `periodic` does not fit
            `dims`.
        CommMismatch: Ranks give different arguments.

    >>> from bagua_comm.testing import run_ranks
    >>> def body(comm):
    ...     grid = Grid(comm, (0, 0), periodic=(True, False))
    ...     return grid.coords, tuple(grid.shift(0)), tuple(grid.shift(1))
    >>> run_ranks(4, body)[1]
    ((0, 1), (3, 3), (0, None))
    """

    def __init__(self, comm: Communicator, dims: Sequence[int], periodic: bool | Sequence[bool] = False) -> None:
        if not isinstance(comm, Communicator):
            raise ArrayError(f"Grid: comm is {shown(comm)}, expected a Communicator; for a lane pass lane.comm")
        self.comm = comm
        arguments: dict[str, Any] = {"dims": shown(dims), "periodic": shown(periodic)}
        try:
            lengths = topology.balanced_dims(comm.size, dims)
            rings = tuple(map(bool, _integers("periodic", periodic, len(lengths))))
            arguments = {"dims": lengths, "periodic": rings}
        except ArrayError as exc:
            raise ArrayError(f"Grid: {exc}") from None
        finally:  # also if this rank's are wrong: those of the others may not be
            call = Call(comm, "Grid", **arguments)
            call.run(lambda *_: call.compare())
        self.dims, self.periodic = lengths, rings
        self.coords = tuple(int(each) for each in np.unravel_index(comm.rank, self.dims))
        self._agreed: list[BoundedCache[_Description, bool]] = [BoundedCache(_KEPT) for _ in self.dims]
        """For each axis, descriptions that neighbours have compared. The same on all ranks of a line."""
        self._prepared: BoundedCache[Hashable, tuple[PreparedCall, list[_Description]]] = BoundedCache(_KEPT)
        """Exchanges of arrays that are alike, with the description for each axis."""

    def shift(self, axis: int, step: int = 1) -> Sides:
        """Return the ranks `step` places below and above this one along an axis; None beyond an open edge.

        On a periodic axis of two ranks both are the same rank; of one, both are this rank.

        Raises:
            ArrayError: `axis` is not an axis of the grid, or `step` is not an integer.
        """
        for name, value in (("axis", axis), ("step", step)):
            if not isinstance(value, (int, np.integer)):
                raise ArrayError(f"shift: {name} is {shown(value)}, expected an integer")
        if not -len(self.dims) <= axis < len(self.dims):
            raise ArrayError(
                f"shift: axis is {axis}, expected one of the {len(self.dims)} of the grid, from 0 on"
            )
        axis %= len(self.dims)
        here, length, stride = self.coords[axis], self.dims[axis], math.prod(self.dims[axis + 1 :])

        def rank_at(place: int) -> int | None:
            place = place % length if self.periodic[axis] else place
            return self.comm.rank + int(place - here) * stride if 0 <= place < length else None

        return Sides(rank_at(here - step), rank_at(here + step))

    def exchange_halos(
        self,
        array: A,
        width: int | Sequence[int] = 1,
        axes: Sequence[int] | None = None,
        *,
        timeout_s: float | None = None,
    ) -> A:
        """Fill the halo of `array` with elements of the neighbours, corners included; return `array`.

        All ranks of the grid call it. The halo is the first and the last `width` elements along each axis that
        the grid splits. Beyond an open edge there is no neighbour, and the halo stays as it is. The array may
        have any strides. Parts of neighbours may differ in length along the axis that is split between them, and
        in nothing else. This is compared when it is new, and each time with `connect(check=True)`.

        Args:
            array: This rank's part, halo included.
            width: The width of the halo on either side; one for each axis of the grid, or for all. 0 leaves an
                axis out.
            axes: For each axis of the grid, the axis of the array that it splits; by default the first ones.
            timeout_s: How long the call may wait for neighbours, in place of the limit of the communicator.

        Raises:
            ArrayError: The array has fewer dimensions than the grid, its inner part is narrower than the halo, it
                does not fit that of a neighbour, it cannot be written to, or another argument is wrong. Raised on
                the neighbours as well, before an element is sent, in an exchange that is compared. Ranks further
                away complete the exchange; or they wait for a neighbour that has raised, until that aborts or
                closes the communicator, or for the time limit.
            CommMismatch: A neighbour has sent another number of bytes. In an exchange that is not compared, this
                is what both neighbours of a rank that raises `ArrayError` get, at once. NCCL compares no sizes:
                there, that rank and its neighbours wait as ranks further away do.
            UnsupportedError: No transport moves such an array.

        >>> from bagua_comm.testing import run_ranks
        >>> def body(comm):
        ...     column = np.array([-1, 10 * comm.rank, 10 * comm.rank + 1, -1])
        ...     return Grid(comm, [comm.size], periodic=True).exchange_halos(column).tolist()
        >>> run_ranks(2, body)
        [[11, 0, 1, 10], [1, 10, 11, 0]]
        """
        try:
            x = as_argument(_NAME, "array", array)
            check_writable(_NAME, "array", array, x)
            if type(x) is not np.ndarray:
                arrays.check_device(_NAME, "array", x, self.comm.device)
                self.comm.scratch.follow()
            width = width if isinstance(width, int) else _integers(f"{_NAME}: width", width, len(self.dims))
            axes = axes if axes is None else _integers(f"{_NAME}: axes", axes, len(self.dims))
            key = (type(x), x.dtype, x.shape, x.strides, width, axes)
            prepared = self._prepared.get(key)
            if prepared is None:
                prepared = self._prepared[key] = self._prepare(x, width, axes)
        except BaguaError as exc:
            problem = _Description(_FAILED + str(exc).removeprefix(f"{_NAME}: "))
            with suppress(BaguaError):
                self._compare([problem] * len(self.dims), timeout_s)
            raise
        call, descriptions = prepared
        if self.comm.check or not all(map(contains, self._agreed, descriptions)):
            self._compare(descriptions, timeout_s)
        call.run(self.comm, x, x, timeout_s)
        return array

    def _prepare(
        self, x: Array, width: int | tuple[int, ...], axes: tuple[int, ...] | None
    ) -> tuple[PreparedCall, list[_Description]]:
        """Check the arguments of an exchange, and prepare it for arrays like `x`."""
        widths = (width,) * len(self.dims) if isinstance(width, int) else width
        axes = _checked(x, self.dims, widths, axes or tuple(range(len(self.dims))))
        take, payload = self.comm.scratch.take, 0
        lines: list[list[_Step]] = []
        for axis, (n, split) in enumerate(zip(widths, axes, strict=True)):
            (low, high), end, before = self.shift(axis), x.shape[split], (slice(None),) * split
            steps: list[_Step] = []
            for dest, source, start, beyond in ((low, high, n, end - n), (high, low, end - 2 * n, 0)):
                inner, halo = ((*before, slice(i, i + n)) for i in (start, beyond))
                part, copies = x[inner], None
                if not arrays.is_contiguous(part):
                    keys = f"halo out {len(steps)}", f"halo in {len(steps)}"
                    copies = tuple(take(key, part.shape, x.dtype, like=x) for key in keys)
                steps.append(_Step(dest, source, inner, halo, copies))
                payload += part.nbytes if dest is not None else 0
            lines += [steps] if n else []
        call = Call(self.comm, _NAME, x, "array", payload=payload, width=widths, axes=axes).unchecked()
        exchange, rank = call.transport.exchange, self.comm.rank

        def move(x: Array, _: Array) -> None:
            for steps in lines:
                sends, recvs, copied = [], [], []
                for dest, source, inner, halo, copies in steps:
                    if dest == source == rank:
                        x[halo] = x[inner]
                        continue
                    out, into = copies or (x[inner], x[halo])
                    if dest is not None:
                        if copies:
                            out[...] = x[inner]
                        sends.append((dest, out))
                    if source is not None:
                        recvs.append((source, into))
                        copied += [(halo, into)] if copies else []
                if sends or recvs:
                    try:
                        exchange(sends, recvs)
                    except CommMismatch as exc:
                        exc.args = (f"{exc}; {_INSTEAD}",)
                        raise
                for halo, into in copied:
                    x[halo] = into

        return call.prepared(move), [
            _description(x, axis, n, f"width={widths}, axes={axes}") for axis, n in zip(axes, widths, strict=True)
        ]

    @public_method("Grid.exchange_halos")
    def _compare(self, descriptions: Sequence[_Description], timeout_s: float | None) -> None:
        """Raise `ArrayError`, as the neighbour does, if a description is new and differs from that of one.

        All are sent before one is waited for, so that no neighbour misses an error.
        """
        sends: list[tuple[int, Array]] = []
        tables: list[tuple[int, Array]] = []
        for axis, (description, agreed) in enumerate(zip(descriptions, self._agreed, strict=True)):
            if description in agreed and not self.comm.check:
                continue
            row = arrays.text_row(description.text, _TEXT_BYTES)
            peers = [peer for peer in self.shift(axis) if peer is not None and peer != self.comm.rank]
            sends += [(peer, row) for peer in peers]
            tables += [(peer, np.stack([row, row])) for peer in peers]
        recvs = [(peer, table[1]) for peer, table in tables]
        call = Call(self.comm, _NAME, timeout_s=timeout_s).unchecked()
        call.run(
            lambda *_: call.transport.exchange(sends, recvs)
        )  # as halos are: either is found in place of the other
        for source, table in tables:
            mine, other = arrays.texts_of(table)
            if other.startswith(_FAILED):
                raise ArrayError(f"{_NAME}: on rank {source}: {other.removeprefix(_FAILED)}")
            if other != mine:
                raise ArrayError(
                    f"{_NAME}: rank {self.comm.rank} gives {mine}, but its neighbour, rank {source}, {other}; "
                    "expected the same, but for the length *, along the axis that is split between them"
                )
        for description, agreed in zip(descriptions, self._agreed, strict=True):
            if description.is_kept:
                agreed[description] = True


def _checked(x: Array, dims: tuple[int, ...], widths: tuple[int, ...], axes: tuple[int, ...]) -> tuple[int, ...]:
    """Return `axes`, counted from 0; raise `ArrayError` unless all arguments of an exchange fit."""
    wanted = f"one for each axis of the grid {dims}"
    if x.ndim < len(dims):
        raise ArrayError(f"{_NAME}: array has shape {x.shape}, expected as many dimensions, {wanted}")
    split = tuple(int(axis) % x.ndim for axis in axes if -x.ndim <= axis < x.ndim)
    if len(set(split)) != len(dims):
        raise ArrayError(f"{_NAME}: axes are {axes}, expected different axes of shape {x.shape}, {wanted}")
    for width, axis in zip(widths, split, strict=True):
        if width < 0:
            raise ArrayError(f"{_NAME}: width is {width}, expected at least 0")
        if x.shape[axis] < 3 * width:
            raise ArrayError(
                f"{_NAME}: array has {x.shape[axis]} elements along axis {axis}, expected at least {3 * width}: "
                f"{width} inside, and {width} of the halo on either side; use fewer ranks along this axis"
            )
    return split


def _description(x: Array, axis: int, width: int, arguments: str) -> _Description:
    """What neighbours along an axis of the array, with a halo of this width there, must have in common."""
    others = [n for each, n in enumerate(x.shape) if each != axis]
    shape = ", ".join("*" if each == axis else str(n) for each, n in enumerate(x.shape))
    text = f"{arrays.library(x)} {arrays.dtype_name(x.dtype)}[{shape}] with {arguments}"
    return _Description(text, is_kept=width * math.prod(others) * x.itemsize != _TEXT_BYTES)


def _integers(what: str, values: Any, count: int) -> tuple[int, ...]:
    """Return `values` as integers, as many as `count`; one stands for all."""
    found = tuple(values) if isinstance(values, Iterable) else (values,) * count
    if len(found) != count or not all(isinstance(each, (int, np.integer, np.bool_)) for each in found):
        raise ArrayError(f"{what} is {shown(values)}, expected {count} integers, one for each axis of the grid")
    return found
