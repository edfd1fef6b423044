"""Host arrays over MPI, through mpi4py. Importing this module starts MPI.

Messages travel as bytes, so every dtype can be sent. `routes` lists the ways of a collective; floats
are added in rank order on all of them, however many there are, so a sum does not depend on what else was in its
bucket. With `set_order("any")`, MPI reduces larger arrays in its own order.

A transport is made of objects, each of which uses those before it:

    World               places and notices of all ranks, shared by the communicators of a world
    CountedCalls        the call in progress, and how many there were: the base of the transport itself
    FailureDetector     which ranks are dead, have left or are late
    Endpoint            waits, time limits, and the abort of the communicator
    Messages            exchanges
    Agreement           comparison of calls, and sizes of messages
    Native, Routes      collectives, and the choice between them

The first transport of a world measures the links between its hosts (`link_speed`).
"""

from __future__ import annotations

import logging
import math
import os
import socket
import time
import zlib
from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from typing import Any, ClassVar

import numpy as np
from mpi4py import MPI

from ... import kernels
from ...arrays import Array, OpOrder, dtype_name, parts, text_row, texts_of
from ...errors import CommError, RankFailed, UnsupportedError
from ...logs import log_on_root
from ...system.processes import namespace_number
from .. import derived
from ..base import Transport
from ..counted_calls import CountedCalls
from ..flow import COLLECTIVE, POINT_TO_POINT, Flow, Message, Move
from ..labels import Ended, Labelled, Receive
from ..pipeline import Encoding
from . import tuning
from .agreement import Agreement
from .endpoint import Endpoint, duplicate
from .failure_detector import FailureDetector, ranks_in
from .link_speed import measure_links
from .messages import NOTHING, Messages
from .native import Native
from .peer_memory import DirectCalls, largest_copied, open_memory
from .reductions import REDUCTIONS, is_sound
from .routes import Routes
from .shared_window import open_window
from .time_limit import in_time
from .world import Place, World

_log = logging.getLogger(__name__)

MIN_TAG_UB = 32767
"""The largest tag that every MPI has."""


class MPITransport(CountedCalls, Transport):
    """One rank of an MPI communicator, which it owns: pass a duplicate.

    Collective.

    Args:
        comm: The communicator, or an object with the methods of one that are called here.
        timeout_s: How long a call may wait for its peers.
        world: The state that all transports of a world share; None to make it.
        group: A name for these ranks, the same on all of them, and no other group's.
        members: Their ranks in the world; None if this is the world.
        with_window: Whether ranks of one host share memory for large reductions.
    """

    name = "mpi"
    needs_polling = True
    piece_bytes = tuning.PIECE_BYTES
    detector_class: ClassVar[type[FailureDetector]] = FailureDetector
    endpoint_class: ClassVar[type[Endpoint]] = Endpoint
    native_class: ClassVar[type[Native]] = Native

    def __init__(
        self,
        comm: MPI.Comm,
        *,
        timeout_s: float = 300.0,
        world: World | None = None,
        group: str = "world",
        members: Sequence[int] | None = None,
        with_window: bool = True,
    ) -> None:
        super().__init__()
        comm.Set_errhandler(MPI.ERRORS_RETURN)
        self.rank, self.size, self.timeout_s = comm.Get_rank(), comm.Get_size(), timeout_s
        self.members = list(range(self.size)) if members is None else list(members)
        """The members' ranks in the world."""
        self._world = _new_world(comm, self) if world is None else world
        self._detector = self.detector_class(comm, self, self._world, group, self.members)
        self._endpoint = self.endpoint_class(comm, self, self._world, self._detector, group, self.members)
        self.concurrent = self._endpoint.concurrent
        self._messages = Messages(self._endpoint)
        self.exchange_labelled = self._messages.exchange_labelled  # type: ignore[method-assign]
        self._agreement = Agreement(self._endpoint, self._messages, self._scratch)
        native = self.native_class(self._endpoint, self._messages, self._scratch)
        self._routes = Routes(self._endpoint, self._agreement, native, self._scratch)
        if world is None:
            self._world.learn(*_exchange_facts(self._endpoint))
        self._world.add(self._endpoint, group, self.completed)
        self._share_memory(with_window)
        if world is None and self._endpoint.window is None:
            self._measure_links()

    def _share_memory(self, with_window: bool) -> None:
        """Share memory with the other ranks, if all run on one host that allows it. Collective."""
        wait = self._endpoint.wait_outside_mpi
        window = open_window(self, wait) if with_window and self.size > 1 else None
        if window is None:
            self.quantize_bytes = self._world.quantize_bytes or tuning.QUANTIZE_BYTES
            self._agreement.expect_slow_network()
            self.plan = self._agreement.learn_plans()
            return
        self._endpoint.share(window)
        self._routes.use_memory(None)  # the routes so far are without a window
        memory = open_memory(self)
        if memory is not None:
            copied_bytes = largest_copied(self, window, memory, self._world)
            self._routes.use_memory(DirectCalls(window, memory, copied_bytes))

    def _measure_links(self) -> None:
        """Measure the links between hosts, for all transports of this world. Collective."""
        hosts = [place.host for place in self._world.places]
        speed = measure_links(self._endpoint, self._messages, hosts)
        self.quantize_bytes = speed.quantize_bytes
        self._world.learn_links(self.quantize_bytes)
        if speed.bytes_s < math.inf:
            log_on_root(
                _log,
                self.rank,
                "links between hosts: %.3g Gbit/s a rank, latency %.0f us; arrays from %d bytes on are quantized",
                *(speed.bytes_s * 8e-9, speed.latency_s * 1e6, self.quantize_bytes),
            )

    def moves(self, x: Array) -> bool:
        """Host arrays."""
        return isinstance(x, np.ndarray)

    # Messages, and choices of calls -----------------------------------------------------------------

    def exchange(self, sends: Sequence[Message], recvs: Sequence[Message], *, tag: int = POINT_TO_POINT) -> None:
        """All messages at once, non-blocking; see `Transport.exchange`."""
        if tag == COLLECTIVE:
            self._agreement.note_messages(self._call or "exchange")
        self._messages.exchange(sends, recvs, tag=tag)

    def begin_labelled(self, sends: Sequence[Labelled], receives: Sequence[Receive]) -> Ended:
        """See `Transport.begin_labelled`. Needs MPI_THREAD_MULTIPLE."""
        return (
            self._messages.begin_labelled(sends, receives)
            if self.concurrent
            else super().begin_labelled(sends, receives)
        )

    def agree_on_call(self, call: str, x: Array, *, by_messages: bool = False) -> Flow:
        """See `Transport.agree_on_call`. The ranks also agree on the size of pieces, from this call on."""
        return self._agreement.agree(call, x, by_messages=by_messages)

    def coded_piece_bytes(self, nbytes: int) -> int:
        """See `Transport.coded_piece_bytes`."""
        return self._agreement.coded_piece_bytes(nbytes)

    def fast_path(self, name: str, x: Array, op: str = "", root: int | None = None) -> Move | None:
        """See `Transport.fast_path`. It is the route of the call."""
        is_own = getattr(type(self), name) is getattr(MPITransport, name)
        return self._routes.choose(name, x, op, root) if is_own else None

    def set_order(self, order: OpOrder) -> None:
        """See `Transport.set_order`. In any order MPI reduces all that it computes as NumPy does."""
        self.adds_in_rank_order = self._routes.set_order(order)

    # Collectives: see `routes` ----------------------------------------------------------------------

    def allreduce(self, x: Array, out: Array, op: str) -> None:
        """See `Transport.allreduce`."""
        self._routes.choose("allreduce", x, op)(x, out)

    def reduce(self, x: Array, out: Array | None, root: int, op: str) -> None:
        """See `Transport.reduce`."""
        self._routes.choose("reduce", x, op, root)(x, NOTHING if out is None else out)

    def reduce_scatter(self, x: Array, out: Array, op: str) -> None:
        """See `Transport.reduce_scatter`."""
        self._routes.choose("reduce_scatter", x, op)(x, out)

    def allgather(self, x: Array, out: Array) -> None:
        """See `Transport.allgather`."""
        self._routes.choose("allgather", x)(x, out)

    def alltoall(self, x: Array, out: Array) -> None:
        """See `Transport.alltoall`."""
        self._routes.choose("alltoall", x)(x, out)

    def broadcast(self, x: Array, root: int) -> None:
        """See `Transport.broadcast`."""
        self._routes.choose("broadcast", x, root=root)(x, x)

    def barrier(self) -> None:
        """See `Transport.barrier`. A round of small arrays without elements."""
        self._routes.choose("barrier", NOTHING)(NOTHING, NOTHING)

    def allreduce_encoded(self, code: Encoding, out: Array) -> None:
        """See `Transport.allreduce_encoded`. Large arrays go through shared memory, if there is any."""
        nbytes, window = out.size * code.dtype.itemsize, self._endpoint.window
        if window is None or nbytes < tuning.SHARED_BYTES:
            super().allreduce_encoded(code, out)
            return
        self.agree_on_call(f"allreduce of encoded {dtype_name(code.dtype)}", out)
        sent = (nbytes + out.nbytes) * (self.size - 1) // self.size
        self._endpoint.run_in_window(sent, window.allreduce_encoded, code, out)

    def reduce_scatterv(self, x: Array, out: Array, counts: Sequence[int], op: str) -> None:
        """See `Transport.reduce_scatterv`. Small arrays are gathered and reduced here."""
        call = f"reduce_scatter {op} by {list(counts)}"
        if self._routes.are_small(x):

            def fill(values: Sequence[Array], out: Array) -> None:
                kernels.on_host().reduce_rows([parts(row, counts)[self.rank] for row in values], out, op)

            self._routes.small(call, x, fill)(x, out)
            return
        flow, chunks = self.agree_on_call(call, x), list(parts(x, counts))
        self._agreement.watch_speed(lambda: derived.reduce_scatter(flow, chunks, out, op, self._scratch))

    def scan(self, x: Array, out: Array, op: str, *, exclusive: bool = False) -> None:
        """See `Transport.scan`. Small arrays are gathered and reduced here."""
        call = f"{'exscan' if exclusive else 'scan'} {op}"
        if self._routes.are_small(x):
            count = self.rank + (not exclusive)

            def fill(values: Sequence[Array], out: Array) -> None:
                kernels.on_host().reduce_rows(values[:count], out, op)

            self._routes.small(call, x, fill if count else None)(x, out)
            return
        self.agree_on_call(call, x)
        super().scan(x, out, op, exclusive=exclusive)

    # Groups -----------------------------------------------------------------------------------------

    def split(self, color: int, key: int) -> Transport:
        """See `Transport.split`."""
        comm, group = self._endpoint.comm, self.name_new_group(self._endpoint.group, f":{color}")
        self.barrier()  # a missing rank is named here
        self._agreement.end_plan()
        left_s = max(self.deadline_s() - time.monotonic(), 0.0)
        made = self._endpoint.make(lambda: in_time(lambda: comm.Split(color, key), left_s, "MPI_Comm_split"))
        return self._derived(made, group, [self.members[rank] for rank in ranks_in(comm, made.Get_group())])

    def dup(self) -> Transport:
        """See `Transport.dup`."""
        group = self.name_new_group(self._endpoint.group)
        if self.size > 1:
            self._routes.small("dup", NOTHING, None)(NOTHING, NOTHING)  # names a missing rank, or another call
            self._agreement.end_plan()
        return self._derived(self._endpoint.make(self._endpoint.duplicate), group, self.members)

    def subgroup(self, ranks: Sequence[int], name: str, host: Transport | None = None) -> Transport:
        """See `Transport.subgroup`."""
        comm: Any = self._endpoint.comm  # of one group, as all communicators of this library are
        tag = zlib.crc32(name.encode()) % MIN_TAG_UB

        def create() -> Any:
            everyone = comm.Get_group()
            wanted = everyone.Incl(ranks)
            try:
                return comm.Create_group(wanted, tag)
            finally:
                wanted.Free()
                everyone.Free()

        try:
            made = in_time(create, self.timeout_s, "MPI_Comm_create_group")
        except MPI.Exception as exc:
            raise self._detector.error_of_mpi(exc) from exc
        return self._derived(made, f"{self._endpoint.group}/{name}", [self.members[rank] for rank in ranks])

    def _derived(self, comm: MPI.Comm, group: str, members: Sequence[int]) -> MPITransport:
        return MPITransport(comm, timeout_s=self.timeout_s, world=self._world, group=group, members=members)

    # Failure and end --------------------------------------------------------------------------------

    def shrink(self, host: Transport | None = None) -> Transport:
        """A transport over the survivors, with ULFM (`mpirun --with-ft ulfm`)."""
        if self.broken is None:
            self.refuse_calls("shrunk")
        try:
            self._world.revoke(self.members)
            self._endpoint.revoke()
            survivors = in_time(self._endpoint.comm.Shrink, self.timeout_s, "MPI_Comm_shrink")
            return MPITransport(survivors, timeout_s=self.timeout_s)
        except (MPI.Exception, NotImplementedError) as exc:
            raise UnsupportedError(
                "mpi: this MPI cannot go on without the ranks that died; Open MPI 5 can: mpirun --with-ft ulfm"
            ) from exc

    def interrupted(self, error: BaseException, arrays: object) -> None:
        """See `Transport.interrupted`. Notifies the others."""
        if self.size > 1 and self.broken is None:
            self._endpoint.abort_after(error, arrays)

    def abort(self, exit_code: int = 1) -> None:
        """End all processes of the MPI job with `exit_code`."""
        self._endpoint.comm.Abort(exit_code)

    def leave(self, reason: str | None = None) -> bool:
        """See `Transport.leave`. Only the world can be left, not a group of it."""
        return self._endpoint.leave(reason, self.on_slow_leave)

    def notify_failure(self, group: str, error: CommError) -> None:
        """See `Transport.notify_failure`. Does nothing if several threads may not call MPI."""
        self._endpoint.notify_failure(group, error)

    def poll_failures(self, groups: Collection[str]) -> CommError | None:
        """See `Transport.poll_failures`. Finds nothing if several threads may not call MPI."""
        return self._endpoint.poll_failures(groups)

    def close(self) -> None:
        """Free the MPI communicator, unless unfinished calls still use it, and unmap the window."""
        self._unmap()
        world, endpoint = self._world, self._endpoint
        if endpoint.begun:
            self.refuse_calls("a call was interrupted")
        if self.broken is None and not MPI.Is_finalized():
            self.refuse_calls("closed")
            world.forget()
            if self._messages.drop():
                in_time(endpoint.comm.Free, self.timeout_s, "MPI_Comm_free")
            # Calls on communicators that are still open, for instance of a lane, receive notices on the world's.
            if endpoint.group == "world" and world.orderly and world.is_quiet and world.open == 0:
                in_time(world.comm.Free, self.timeout_s, "MPI_Comm_free")

    def _unmap(self) -> None:
        """Drop the window, and all routes through it."""
        self._endpoint.share(None)
        self._routes.use_memory(None)


def _new_world(comm: MPI.Comm, calls: CountedCalls) -> World:
    """Make the state that the transports of a world share. Collective.

    Raises:
        CommError: MPI failed, a rank died, or the other ranks did not come within the time limit.
    """
    detector = FailureDetector(comm, calls, World(comm, [], frozenset()), "world", range(calls.size))
    until = calls.deadline_s()

    def wait(done: Callable[[], bool]) -> None:
        start = time.monotonic()
        while not done():
            now = time.monotonic()
            if now > until:
                dead = detector.failed_ranks()
                raise detector.death(dead) if dead else detector.timeout()
            time.sleep(tuning.SLEEPS_S[0] if now - start > tuning.SPIN_S else 0)

    try:
        made = duplicate(comm, wait)
    except MPI.Exception as exc:
        error = detector.error_of_mpi(exc)
        if isinstance(error, RankFailed):
            with suppress(MPI.Exception, NotImplementedError):
                comm.Revoke()  # so that all ranks notice
        raise error from exc
    made.Set_errhandler(MPI.ERRORS_RETURN)
    return World(made, [], frozenset())


def _exchange_facts(endpoint: Endpoint) -> tuple[list[Place], frozenset[tuple[str, str]]]:
    """Where all ranks run, and the reductions that MPI computes as NumPy does on all of them. Collective."""
    rank, facts = endpoint.rank, np.zeros((endpoint.size, 11), np.int64)
    facts[rank, 0] = os.getpid()
    facts[rank, 1] = sum(1 << i for i, reduction in enumerate(REDUCTIONS) if is_sound(*reduction))
    facts[rank, 2] = namespace_number()
    facts[rank, 3:].view(np.uint8)[:] = text_row(socket.gethostname(), 64)
    endpoint.complete(lambda: endpoint.comm.Iallgather(MPI.IN_PLACE, [facts, MPI.BYTE]), facts)
    hosts = texts_of(facts[:, 3:])
    visible = facts[:, 2] == facts[rank, 2]
    places = [Place(*each) for each in zip(hosts, facts[:, 0].tolist(), visible.tolist(), strict=True)]
    everywhere = int(np.bitwise_and.reduce(facts[:, 1]))
    return places, frozenset(reduction for i, reduction in enumerate(REDUCTIONS) if everywhere >> i & 1)
