"""The choice between the ways in which a collective on host arrays can be made.

Route                  Ranks and arrays
copy                   one rank
MPI's, in any order    `set_order("any")`: reductions that MPI computes as NumPy does, of larger arrays
small messages         arrays of a few KiB (`SmallMessages`)
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
from collections.abc import Callable

from ... import kernels
from ...arrays import Array, DType, OpOrder, Scratch, dtype_name, rows
from ...objects.caching import BoundedCache
from .. import derived
from ..flow import Move
from . import tuning
from .agreement import Agreement, call_name
from .endpoint import Endpoint
from .messages import copy
from .native import Native
from .peer_memory import UNREADABLE, DirectCalls
from .reductions import in_any_order
from .small_messages import SmallMessages


class Routes:
    """Chooses how the collectives of one communicator are made.

    Args:
        endpoint: Waits for MPI and for the window.
        agreement: Compares calls between ranks.
        native: MPI's own collectives.
        small: Collectives on small arrays.
        scratch: Memory for tables and for arrays that must be copied first.
    """

    def __init__(
        self, endpoint: Endpoint, agreement: Agreement, native: Native, small: SmallMessages, scratch: Scratch
    ) -> None:
        self._endpoint, self._agreement, self._native, self._small = endpoint, agreement, native, small
        self._scratch = scratch
        self.rank, self.size = endpoint.rank, endpoint.size
        self._reduced_by_mpi: frozenset[tuple[DType, str]] = frozenset()
        """The reductions, (dtype, op), that are MPI's own; none of floats where they are added in rank order."""
        self.direct: DirectCalls | None = None
        """Calls by reading memory; None unless all ranks share a window, and each may read that of all others."""
        self._known: BoundedCache[tuple[str, tuple[int, ...], DType], Move] = BoundedCache(tuning.TABLES)
        """Routes of calls on small arrays and through shared memory, by call, shape and dtype."""
        self._agreed: BoundedCache[tuple[str, str, int | None, int, DType], Move] = BoundedCache(tuning.TABLES)
        """Other routes, by name, op, root, size in bytes and dtype."""

    def use_memory(self, direct: DirectCalls | None) -> None:
        """Read larger arrays in the memory of other ranks from now on; None not to."""
        self._known.clear()
        self.direct = direct

    def set_order(self, order: OpOrder) -> bool:
        """Reduce in this order from now on; returns whether floats are added in rank order."""
        self._agreed.clear()
        self._reduced_by_mpi, has_floats = in_any_order(self._endpoint.world.sound if order == "any" else ())
        return not has_floats

    def clear(self) -> None:
        """Forget the routes of calls."""
        self._known.clear()
        self._agreed.clear()
        self._small.clear()

    def choose(self, name: str, x: Array, op: str = "", root: int | None = None) -> Move:
        """The route of a collective on arrays such as `x`; takes the array of this rank and the array to fill."""
        route = self.fast_path(name, x, op, root)
        if route is not None:
            return route
        key = name, op, root, x.nbytes, x.dtype
        route = self._agreed.get(key)
        if route is None:
            route = self._agreed[key] = self._agreed_route(name, x, op, root)
        return route

    # Small arrays, and ranks that share memory ------------------------------------------------------

    def fast_path(self, name: str, x: Array, op: str = "", root: int | None = None) -> Move | None:
        """The route of a call on small arrays or among ranks that share memory, made once; None for others."""
        if self.size == 1:
            return copy
        has_window, direct = self._endpoint.window is not None, self.direct
        is_read = direct is not None and x.nbytes > tuning.READ_BYTES and name not in tuning.ALLREDUCE_LIKE
        small = not is_read and self._small.fit(x)
        if self._is_reduced_by_mpi(name, x, op) or not (has_window or small):
            return None
        call = call_name(name, op, root)
        key = call, x.shape, x.dtype
        route = self._known.get(key)
        if route is None:
            make = self._small.route if small else self._shared_memory_route
            route = self._known[key] = make(name, call, x, op, -1 if root is None else root)
        return route

    def _shared_memory_route(self, name: str, call: str, x: Array, op: str, root: int) -> Move:
        """The route of a call on larger arrays among ranks that share memory.

        They read each other's arrays. Where that is not possible, reductions go through the window, and MPI
        carries the rest.
        """
        endpoint, direct, at_root = self._endpoint, self.direct, self.rank == root
        window, run = endpoint.window, endpoint.run_in_window
        assert window is not None
        flow, native, scratch = self._agreement.flow(tuning.MESSAGE_BYTES), self._native, self._scratch
        number = zlib.crc32(f"{call} {dtype_name(x.dtype)} {x.nbytes}".encode())
        sent = _bytes_sent(name, x.nbytes, self.size, at_root=at_root)
        through: dict[str, Move] = {
            "broadcast": lambda x, _: native.broadcast(flow, x, root),
            "allgather": lambda x, out: derived.allgather(flow, x, out),
            "alltoall": lambda x, out: derived.alltoall(flow, x, out, scratch),
            "allreduce": lambda x, out: run(sent, window.allreduce, x, out, op),
            "reduce_scatter": lambda x, out: run(sent, window.reduce_scatter, x, out, op),
            "reduce": lambda x, out: run(sent, window.reduce, x, out if at_root else None, root, op),
        }
        indirectly = through[name]
        directly = direct.of(name, x.dtype, op, root) if direct is not None else None

        def address(x: Array, out: Array) -> int:
            if direct is None or not (out is x or out.nbytes == 0 or direct.memory.address(out)):
                return UNREADABLE
            return direct.memory.address(x)

        def move(x: Array, out: Array) -> None:
            if name == "alltoall":
                x = derived.apart(x, out, scratch)
            addresses = run(0, window.addresses, number, address(x, out))
            if addresses is None:
                raise self._agreement.mismatch(call, x)
            if directly is None or UNREADABLE in addresses:
                indirectly(x, out)
            else:
                run(sent, directly, addresses, x, out)

        return move

    # Other calls: once the ranks have agreed --------------------------------------------------------

    def _agreed_route(self, name: str, x: Array, op: str, root: int | None) -> Move:
        """The route of a call on arrays such as `x` on which the ranks agree first."""
        call, at = call_name(name, op, root), -1 if root is None else root
        if self._is_reduced_by_mpi(name, x, op):
            return self._after_agreement(f"{call} in any order", self._natively(name, op, at))
        if self._is_sound(x, op):
            return self._after_agreement(call, self._natively(name, op, at))
        received = {"alltoall": x.nbytes, "reduce_scatter": x.nbytes, "allreduce": x.nbytes * self.size}
        received["allgather"] = received["allreduce"]
        is_middle = received.get(name, tuning.NATIVE_BYTES + 1) <= tuning.NATIVE_BYTES
        if is_middle and op:
            return self._after_agreement(call, self._gathered_by_mpi(name, op))
        if is_middle:
            return self._after_agreement(call, self._natively(name, op, at))
        return self._derived(name, call, op, at)

    def _after_agreement(self, call: str, move: Move) -> Move:
        def agreed(x: Array, out: Array) -> None:
            self._agreement.agree(call, x)
            move(x, out)

        return agreed

    def _natively(self, name: str, op: str, root: int) -> Move:
        """MPI's own collective."""
        native, at_root = self._native, self.rank == root
        moves: dict[str, Move] = {
            "allreduce": lambda x, out: native.allreduce(x, out, op),
            "reduce": lambda x, out: native.reduce(x, out if at_root else None, root, op),
            "reduce_scatter": lambda x, out: native.reduce_scatter(x, out, op),
            "allgather": native.allgather,
            "alltoall": lambda x, out: native.alltoall(derived.apart(x, out, self._scratch), out),
        }
        return moves[name]

    def _gathered_by_mpi(self, name: str, op: str) -> Move:
        """A reduction in rank order of arrays that MPI gathers."""

        def reduce(x: Array, out: Array) -> None:
            table = self._scratch.take("table", (self.size, out.size), x.dtype, like=x)
            if name == "allreduce":
                self._native.allgather(x, table)
            else:
                self._native.alltoall(x, table)
            kernels.on_host().reduce_rows(table, out.reshape(-1), op)

        return reduce

    def _derived(self, name: str, call: str, op: str, root: int) -> Move:
        """A derived collective; MPI's own for a broadcast."""
        agree, at_root, scratch = self._agreement.agree, self.rank == root, self._scratch

        def watched(call_on: Callable[..., None], x: Array, *arguments: object) -> None:
            flow = agree(call, x)
            self._agreement.watch_speed(lambda: call_on(flow, *arguments))

        moves: dict[str, Move] = {
            "allreduce": lambda x, out: watched(derived.allreduce, x, x, out, op, scratch),
            "reduce": lambda x, out: derived.reduce(
                agree(call, x), x, out if at_root else None, root, op, scratch
            ),
            "reduce_scatter": lambda x, out: watched(
                derived.reduce_scatter, x, list(rows(x, self.size)), out, op, scratch
            ),
            "allgather": lambda x, out: watched(derived.allgather, x, x, out),
            "alltoall": lambda x, out: watched(derived.alltoall, x, x, out, scratch),
            "broadcast": lambda x, _: self._native.broadcast(agree(call, x), x, root),
        }
        return moves[name]

    # Which reductions are MPI's ---------------------------------------------------------------------

    def _is_sound(self, x: Array, op: str) -> bool:
        """Whether MPI reduces arrays such as `x` between hosts: integers of middle size, which have no order."""
        middle = x.nbytes <= tuning.NATIVE_BYTES and x.dtype.kind in "iu"
        return middle and (x.dtype.name, op) in self._endpoint.world.sound

    def _is_reduced_by_mpi(self, name: str, x: Array, op: str) -> bool:
        """Whether MPI reduces arrays such as `x` in its own order.

        Small ones are gathered, which takes less time. Large ones it does not `reduce`: Open MPI begins the next
        8 KiB only when it is asked again.
        """
        if (x.dtype, op) not in self._reduced_by_mpi:
            return False
        largest = tuning.NATIVE_BYTES if name == "reduce" else tuning.MESSAGE_BYTES
        return x.nbytes <= largest and not self._small.fit(x)


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
