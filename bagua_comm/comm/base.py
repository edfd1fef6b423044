"""The base of all groups of a communicator's methods: its state, settings and argument checks."""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Iterable, Sequence
from typing import Any, Protocol, cast, get_args

import numpy as np

from .. import trace
from ..arrays import AnyArray, OpOrder
from ..errors import ArrayError, shown, shown_as
from ..execution.cuda import SharedScratch
from ..execution.lane import LaneComm
from ..execution.requests import Requests
from ..flight import FlightRecorder
from ..flight.entries import WORLD
from ..hooks import Hooks
from ..objects.caching import BoundedCache
from ..objects.pickling import Shared
from ..topology import place
from ..trace import Counters, Recorder
from ..transports.base import Transport
from ..transports.call_state import check_timeout
from .arguments import EMPTY, as_argument, transport_for
from .guard import CallContext, CallGuard

CACHED_CALLS = 256
"""How many prepared calls a communicator keeps."""


class EngineRegistry(Protocol):
    """Registry of the engines that are made on a communicator; `elastic.run` sets one."""

    def register(self, engine: Any) -> None:
        """Add a new engine, which is ready, and restore its state. Collective."""

    def keep(self, value: object) -> None:
        """Add another object with state that belongs to the communicator, and restore it. Collective."""

    def drop(self, value: object) -> None:
        """Forget an object of `keep`; on all ranks alike."""

    def already_broadcast(self, *objects: object) -> bool:
        """Whether all ranks already hold the same state of these objects."""


@shown_as("Communicator")
class CommBase(Shared):
    """State and settings of a communicator; see `Communicator` for the arguments.

    The groups of methods (`Collectives`, `PointToPoint`, ...) inherit from this class alone, and none calls a
    method of another group.
    """

    def __init__(
        self,
        transports: Sequence[Transport],
        *,
        nodes: Sequence[object] | None = None,
        device: int | None = None,
        check: bool = False,
        tracer: trace.Tracer | None = None,
        op_order: OpOrder = "rank",
    ) -> None:
        self.transports = tuple(transports)
        first = self.transports[0]
        self.host = next((each for each in self.transports if each.moves(EMPTY)), first)
        """The transport of host arrays, which also carries barriers, objects and checks."""
        self.rank: int = first.rank
        self.size: int = first.size
        self._others = [rank for rank in range(self.size) if rank != self.rank]
        self._labels = list(nodes) if nodes is not None else [0] * self.size
        self.node, self.local_rank, self.local_size = place(self.rank, self._labels)
        self.node_sizes = list(Counter(self._labels).values())
        """Number of ranks of each node."""
        self.device = device
        self.check = check
        self.tracer: trace.Tracer = tracer if tracer is not None else Recorder()
        self.counters = Counters()
        self.flight = FlightRecorder(self.rank, self.size)
        """Recorder of the last calls of this communicator and of those derived from it."""
        self.group = WORLD
        """The name of this communicator in the flight recorder."""
        self.hooks = Hooks()
        """Hooks on the calls of this communicator and of those derived from it; see `Communicator.on`."""
        self.context = CallContext()
        self.scratch = SharedScratch()
        self.engine_registry: EngineRegistry | None = None
        """Registry of the engines that are made on this very communicator."""
        self.open_checkpoints: list[Any] = []
        """The open checkpoints of this communicator and of those derived from it, in the order in which all ranks
        have made them."""
        self.call_cache: BoundedCache[Hashable, Any] = BoundedCache(CACHED_CALLS)
        """Prepared calls, and other values that a rank computes from the arguments of a call, without
        communication. Keys begin with the name of the call; dtype, shape and other arguments follow. Ranks drop
        entries at any time, each for itself."""
        self.agreed: set[Hashable] = set()
        """Settings that all ranks have compared and found equal. Unlike the cache, the same on all ranks."""
        self.guard = CallGuard(self.transports, checked=check)
        self._ids: Counter[str] = Counter()
        for transport in self.transports:
            transport.is_checked = check
        self._requests = Requests(cast(LaneComm, self))
        self._inner: Sequence[CommBase] = ()
        """Communicators that take over this one's time limit; see `Communicator.by_node`."""
        self.op_order = op_order

    @property
    def timeout_s(self) -> float:
        """The time that a call may wait for other ranks, in seconds; ranks may differ in it.

        math.inf, no limit, is kept as 1e9, 30 years: such a wait ends by Ctrl-C, and if other ranks die or fail.

        A new value applies from the next call on, and to communicators and lanes derived later. Lanes that exist
        keep their own limit: set that of `lane.comm`.

        Raises:
            ArrayError: The new value is not a positive number.
        """
        return self.transports[0].timeout_s

    @timeout_s.setter
    def timeout_s(self, timeout_s: float) -> None:
        limit_s = check_timeout("Communicator", timeout_s, ArrayError)
        for transport in self.transports:
            transport.set_timeout(limit_s)
        for comm in self._inner:
            comm.timeout_s = limit_s

    @property
    def op_order(self) -> OpOrder:
        """The order in which host arrays are reduced over MPI: "rank" or "any".

        "rank": floats are added in the order of the ranks. "any": `allreduce`, `reduce` and `reduce_scatter` use
        MPI's own reductions, whose order depends on the number of ranks, the size and the hosts, so bits may
        differ from run to run. This library still reduces where MPI's result would differ in more than the order
        (16-bit floats, 8- and 16-bit integers, averages of integers, products of complex numbers, "min" and "max"
        of floats if MPI loses NaN), and where MPI is slower (small arrays, and `reduce` of more than 64 KiB).
        Other transports ignore it. Derived communicators inherit it.

        Set it to the same value on all ranks, before a reduction. Ranks that call MPI's reductions in different
        orders raise `CommMismatch`.
        """
        return self._op_order

    @op_order.setter
    def op_order(self, order: OpOrder) -> None:
        if order not in get_args(OpOrder):
            raise ArrayError(
                f"Communicator: op_order is {order!r}, expected one of {', '.join(get_args(OpOrder))}"
            )
        self._op_order: OpOrder = order
        self.call_cache.clear()
        for transport in self.transports:
            transport.set_order(order)

    def transport_for(self, x: AnyArray, *, call: str = "transport_for", name: str = "x") -> Transport:
        """Return the transport that moves arrays like `x`.

        Args:
            x: An array.
            call: The call that an error names.
            name: The argument that an error names.

        Raises:
            UnsupportedError: No transport moves `x`: it is not an array, or its dtype or its library is not
                supported.
        """
        return transport_for(self.transports, call, name, as_argument(call, name, x), self.device)

    def next_id(self, kind: str) -> int:
        """Return the next number, from 1 on, of things such as layers that all ranks make in the same order."""
        self._ids[kind] += 1
        return self._ids[kind]

    def _check_peer(self, call: str, name: str, peer: Any) -> int:
        is_integer = isinstance(peer, (int, np.integer)) and not isinstance(peer, bool)
        if not is_integer or not 0 <= peer < self.size:
            wanted, hint = f"a rank from 0 to {self.size - 1}", ""
            if name != "root" and (peer is None or (is_integer and peer < 0)):
                hint = "; for MPI.PROC_NULL pass None, in sendrecv and exchange; for MPI.ANY_SOURCE call recv_any"
            raise ArrayError(f"{call}: {name} is {peer!r}, expected {wanted}{hint}")
        return int(peer)

    def _check_sources(self, call: str, sources: Sequence[int] | None) -> tuple[int, ...]:
        """Check the argument `sources`."""
        ranks = self._others if sources is None else sources
        if not isinstance(ranks, Iterable) or not (ranks := list(ranks)):
            raise ArrayError(f"{call}: sources is {shown(sources)}, expected a list of ranks")
        return tuple(self._check_peer(call, "a rank in sources", rank) for rank in ranks)
