"""The choice between the ways in which a collective on host arrays can be made.

Route                  Ranks and arrays
copy                   one rank
MPI's, in any order    `set_order("any")`: reductions that MPI computes as NumPy does, of larger arrays
small messages         arrays of a few KiB (`SmallCall`)
shared memory          larger arrays of ranks on one host: read in place (`DirectCalls`), or through the window
MPI's, of integers     reductions of middle size, which have no order
gathered by MPI        reductions of middle size, reduced here in rank order
MPI's                  broadcasts, and allgather and alltoall of middle size
derived                all others (`derived`)

Ranks agree on the call before all routes but the first; small messages and shared memory carry a number of the
call.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Hashable, Sequence
from typing import Any, NamedTuple, TypeAlias

import numpy as np

from ... import kernels
from ...arrays import Array, DType, OpOrder, Scratch, dtype_name, rows
from ...objects.caching import BoundedCache
from .. import derived
from ..flow import Flow, Move
from . import tuning
from .agreement import Agreement, call_name
from .endpoint import Endpoint
from .messages import copy
from .native import Native
from .peer_memory import UNREADABLE, DirectCalls
from .reductions import in_any_order
from .small_messages import Fill, SmallCall, copy_rows

AgreedMove: TypeAlias = Callable[[Any, Array, Array], object]
"""Moves the bytes of a call: takes what the ranks have agreed on, this rank's array, and the array to fill."""


class Ways(NamedTuple):
    """The ways in which one collective can be made; see the table at the head of the module."""

    fill: Fill | None
    """Computes the result of this rank from small arrays of all ranks; None if it has no result."""
    direct: AgreedMove
    """Reads the arrays of other ranks, at the addresses on which they agree."""
    native: AgreedMove
    """MPI's own; takes a `Flow`, as `derived` does."""
    derived: AgreedMove
    windowed: Move | None = None
    """Through the window; None for calls that only move arrays."""
    by_chunk: bool = False
    """Whether `fill` takes this rank's chunk of the arrays."""


class Route(NamedTuple):
    """How ranks agree on a collective, and how its bytes then move."""

    agree: Callable[[Array, Array], object]
    """Takes `x` and the array to fill; raises on all ranks if calls differ. Returns what `move` needs."""
    move: AgreedMove

    def run(self, x: Array, out: Array) -> None:
        """Make the call. Collective."""
        self.move(self.agree(x, out), x, out)


class Routes:
    """Chooses how the collectives of one communicator are made.

    Args:
        endpoint: Waits for MPI and for the window.
        agreement: Compares calls between ranks.
        native: MPI's own collectives.
        scratch: Memory for tables and for arrays that must be copied first.
    """

    def __init__(self, endpoint: Endpoint, agreement: Agreement, native: Native, scratch: Scratch) -> None:
        self._endpoint, self._agreement, self._native, self._scratch = endpoint, agreement, native, scratch
        self._rank, self._size = endpoint.rank, endpoint.size
        self._reduced_by_mpi: frozenset[tuple[DType, str]] = frozenset()
        """The reductions, (dtype, op), that are MPI's own; none of floats where they are added in rank order."""
        self.direct: DirectCalls | None = None
        """Calls by reading memory; None unless all ranks share a window, and each may read that of all others."""
        self._moves: BoundedCache[Hashable, Move] = BoundedCache(tuning.TABLES)

    def use_memory(self, direct: DirectCalls | None) -> None:
        """Read larger arrays in the memory of other ranks from now on; None not to."""
        self._moves.clear()
        self.direct = direct

    def set_order(self, order: OpOrder) -> bool:
        """Reduce in this order from now on; returns whether floats are added in rank order."""
        self._moves.clear()
        self._reduced_by_mpi, has_floats = in_any_order(self._endpoint.world.sound if order == "any" else ())
        return not has_floats

    def are_small(self, x: Array) -> bool:
        """Whether arrays of the size of `x` are gathered on all ranks in one round."""
        window, size = self._endpoint.window, self._size
        if window is not None:
            return bool(x.nbytes <= min(tuning.SHOWN_BYTES // size, window.slot_bytes))
        return bool(x.nbytes <= tuning.EAGER_BYTES and x.nbytes * size <= tuning.NATIVE_BYTES)

    def small(self, call: str, x: Array, fill: Fill | None) -> Move:
        """The route of a call on small arrays such as `x`; its name says all that `fill` depends on."""
        key = call, x.shape, x.dtype
        move = self._moves.get(key)
        if move is None:
            move = self._moves[key] = SmallCall(self._endpoint, self._agreement, call, x, fill).run
        return move

    def choose(self, name: str, x: Array, op: str = "", root: int | None = None) -> Move:
        """The route of a collective on arrays such as `x`; takes the array of this rank and the array to fill."""
        key = name, op, root, x.shape, x.dtype
        move = self._moves.get(key)
        if move is None:
            move = self._moves[key] = self._route(name, x, op, root)
        return move

    def _route(self, name: str, x: Array, op: str, root: int | None) -> Move:
        if self._size == 1:
            return copy
        call, small = call_name(name, op, root), self.are_small(x)
        if name == "barrier":
            return self.small(call, x, None)
        ways = self._ways(x, op, -1 if root is None else root)[name]
        # Small arrays are gathered, which takes less time. Large ones MPI does not `reduce`: Open MPI begins the
        # next 8 KiB only when it is asked again.
        largest = tuning.NATIVE_BYTES if name == "reduce" else tuning.MESSAGE_BYTES
        if (x.dtype, op) in self._reduced_by_mpi and not small and x.nbytes <= largest:
            return self._after_agreement(f"{call} in any order", ways.native)
        direct = None if name in tuning.ALLREDUCE_LIKE else self.direct
        is_read = direct is not None and x.nbytes > direct.copied_bytes
        if small and not is_read:
            shown = name != "broadcast" or self._rank == root
            return SmallCall(
                self._endpoint, self._agreement, call, x, ways.fill, by_chunk=ways.by_chunk, shown=shown
            ).run
        if self._endpoint.window is not None:
            return self._in_shared_memory(name, call, x, ways, root)
        integers = x.dtype.kind in "iu" and (x.dtype.name, op) in self._endpoint.world.sound
        if integers and x.nbytes <= tuning.NATIVE_BYTES:
            return self._after_agreement(call, ways.native)
        received = x.nbytes * (self._size if name in ("allreduce", "allgather") else 1)
        if root is None and received <= tuning.NATIVE_BYTES:
            return self._after_agreement(call, self._gathered_by_mpi(name, op) if op else ways.native)
        return self._after_agreement(call, ways.derived, by_messages=root is None)

    def _ways(self, x: Array, op: str, root: int) -> dict[str, Ways]:
        """The ways of each collective on arrays such as `x`."""
        native, scratch, at_root, watched = self._native, self._scratch, self._rank == root, self._watched
        direct: Any = self.direct
        window: Any = self._endpoint.window
        add = kernels.reducer(x.dtype, op or "sum", self._size)
        return {
            "allreduce": Ways(
                fill=add,
                direct=lambda at, x, out: direct.allreduce(at, x, out, add),
                windowed=lambda x, out: window.allreduce(x, out, op),
                native=lambda _, x, out: native.allreduce(x, out, op),
                derived=watched(lambda flow, x, out: derived.allreduce(flow, x, out, op, scratch)),
            ),
            "reduce_scatter": Ways(
                fill=add,
                by_chunk=True,
                direct=lambda at, x, out: direct.reduce_scatter(at, x, out, add),
                windowed=lambda x, out: window.reduce_scatter(x, out, op),
                native=lambda _, x, out: native.reduce_scatter(x, out, op),
                derived=watched(
                    lambda flow, x, out: derived.reduce_scatter(flow, list(rows(x, self._size)), out, op, scratch)
                ),
            ),
            "reduce": Ways(
                fill=add if at_root else None,
                direct=lambda at, x, out: direct.reduce(at, x, out if at_root else None, root, add),
                windowed=lambda x, out: window.reduce(x, out if at_root else None, root, op),
                native=lambda _, x, out: native.reduce(x, out if at_root else None, root, op),
                derived=lambda flow, x, out: derived.reduce(flow, x, out if at_root else None, root, op, scratch),
            ),
            "broadcast": Ways(  # of small arrays MPI's own is no faster, and would not find roots that differ
                fill=None if at_root else lambda values, out: np.copyto(out, values[root]),
                direct=lambda at, x, _: direct.broadcast(at, x, root),
                native=lambda flow, x, _: native.broadcast(flow, x, root),
                derived=lambda flow, x, _: native.broadcast(flow, x, root),
            ),
            "allgather": Ways(
                fill=copy_rows,
                direct=lambda at, x, out: direct.allgather(at, x, out),
                native=lambda _, x, out: native.allgather(x, out),
                derived=watched(derived.allgather),
            ),
            "alltoall": Ways(
                fill=copy_rows,
                by_chunk=True,
                direct=lambda at, x, out: direct.alltoall(at, x, out),
                native=lambda _, x, out: native.alltoall(derived.without_overlap(x, out, scratch), out),
                derived=watched(lambda flow, x, out: derived.alltoall(flow, x, out, scratch)),
            ),
        }

    def _after_agreement(self, call: str, move: AgreedMove, *, by_messages: bool = False) -> Move:
        return Route(lambda x, _: self._agreement.agree(call, x, by_messages=by_messages), move).run

    def _watched(self, move: AgreedMove) -> AgreedMove:
        """`move`, which also measures the speed of the network."""
        watch = self._agreement.watch_speed
        return lambda flow, x, out: watch(lambda: move(flow, x, out))

    def _gathered_by_mpi(self, name: str, op: str) -> AgreedMove:
        """A reduction in rank order of arrays that MPI gathers."""
        gather = self._native.allgather if name == "allreduce" else self._native.alltoall

        def reduce(_: Flow, x: Array, out: Array) -> None:
            table = self._scratch.take("table", (self._size, out.size), x.dtype, like=x)
            gather(x, table)
            kernels.on_host().reduce_rows(table, out.reshape(-1), op)

        return reduce

    def _in_shared_memory(self, name: str, call: str, x: Array, ways: Ways, root: int | None) -> Move:
        """The route of a call on larger arrays among ranks that share memory.

        They read each other's arrays. Where that is not possible, reductions go through the window, and MPI
        carries the rest.
        """
        window, direct, run = self._endpoint.window, self.direct, self._endpoint.run_in_window
        assert window is not None
        flow, scratch = self._agreement.flow(tuning.MESSAGE_BYTES), self._scratch
        number = zlib.crc32(f"{call} {dtype_name(x.dtype)} {x.nbytes}".encode())
        sent = _bytes_sent(name, x.nbytes, self._size, at_root=self._rank == root)

        def agree(x: Array, out: Array) -> Sequence[int]:
            address = UNREADABLE
            if direct is not None and (out is x or out.nbytes == 0 or direct.memory.address(out)):
                address = direct.memory.address(x)
            addresses = run(0, window.addresses, number, address)
            if addresses is None:
                raise self._agreement.mismatch(call, x)
            return addresses

        def move(addresses: Sequence[int], x: Array, out: Array) -> None:
            if direct is not None and UNREADABLE not in addresses:
                run(sent, ways.direct, addresses, x, out)
            elif ways.windowed is not None:
                run(sent, ways.windowed, x, out)
            else:
                ways.derived(flow, x, out)

        route = Route(agree, move).run
        return (
            (lambda x, out: route(derived.without_overlap(x, out, scratch), out)) if name == "alltoall" else route
        )


def _bytes_sent(name: str, nbytes: int, size: int, *, at_root: bool) -> int:
    """The bytes that a rank sends in a bandwidth-optimal collective on arrays of `nbytes`."""
    others = size - 1
    special = {
        "broadcast": nbytes if at_root else 0,
        "allgather": nbytes * others,
        "allreduce": 2 * nbytes * others // size,
        "reduce": 0 if at_root else nbytes,
    }
    return special.get(name, nbytes * others // size)
