"""Communicators that MPI knows nothing of: some ranks of another communicator, told apart by tags.

Open MPI may crash the survivors when a rank dies inside a call that makes a communicator. So after a death none
is made. The survivors go on in the communicator that they have, which still carries messages among the living,
and each group of them talks in a channel of its own: a number, part of each tag, that is never used twice. So
what an earlier group has left under way matches nothing that comes later.

    tag = FIRST_TAG + 4 * channel + kind

A channel has no collectives of MPI. Small arrays are sent to all ranks directly, as MPI's own collectives would
among few ranks, and what is larger takes the collectives that are derived from exchanges.
"""

# ruff: noqa: N802 - a channel's methods have the names of mpi4py

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from typing import Any, cast

import numpy as np
from mpi4py import MPI

from ...arrays import Array, as_bytes, rows
from ...errors import CommAborted, CommError, UnsupportedError
from ...transports import derived
from ...transports.base import Transport
from ...transports.flow import COLLECTIVE, POINT_TO_POINT, Flow
from ...transports.mpi.endpoint import Endpoint
from ...transports.mpi.failure_detector import FailureDetector
from ...transports.mpi.native import Native
from ...transports.mpi.transport import MPITransport
from ...transports.pipeline import chunk_bounds, cut
from .processes import Crew

KINDS = 4
"""How many kinds of messages a channel tells apart: the tags of `transports.base`."""

FIRST_TAG = 1 << 12
"""Programs that use MPI beside this library may use the tags below, but for `crew.NOTICES_TAG`."""

LEAST_TAG_BOUND = (1 << 15) - 1
"""The largest tag that every MPI has."""

TREE_BYTES = 1 << 18
"""Up to this size an array is broadcast along a tree. A larger one is cut into a part for each rank, which passes
it to the others: then no rank sends more than about twice the array."""

BLOCK_BYTES = 1 << 24
"""How much of an array is cut into parts at a time."""


def check_channel(number: int) -> None:
    """Raise `CommError` if MPI has no tags for the channel of this number."""
    largest = MPI.COMM_WORLD.Get_attr(MPI.TAG_UB) or LEAST_TAG_BOUND
    if FIRST_TAG + KINDS * (number + 1) - 1 > largest:
        raise CommError(
            f"no more communicators can be made: channel {number} needs tags up to "
            f"{FIRST_TAG + KINDS * (number + 1) - 1}, and MPI has {largest}; make communicators once, and keep "
            "them, or start the job again"
        )


class Channel:
    """The calls of an MPI communicator that `MPITransport` makes, among some ranks of another communicator.

    Args:
        base: The communicator below; errors of calls are its errors.
        members: The ranks of `base` that talk here, in order; this rank is among them.
        number: The number of the channel, the same on all members, and never used before.

    Raises:
        CommError: MPI has no tags for this number.
    """

    def __init__(self, base: MPI.Comm, members: Sequence[int], number: int) -> None:
        self._base, self._members = base, list(members)
        check_channel(number)
        self._tag = FIRST_TAG + KINDS * number
        self._rank = self._members.index(base.Get_rank())
        self._others = [peer for peer in range(len(self._members)) if peer != self._rank]

    def Get_rank(self) -> int:
        """This rank, as a place among the members."""
        return self._rank

    def Get_size(self) -> int:
        """How many members there are."""
        return len(self._members)

    def Set_errhandler(self, handler: MPI.Errhandler) -> None:
        """Choose what errors do, in all calls of the communicator below."""
        self._base.Set_errhandler(handler)

    def Isend(self, buffer: Any, dest: int, tag: int = POINT_TO_POINT) -> MPI.Request:
        """Begin to send."""
        return self._base.Isend(buffer, self._members[dest], self._tag + tag)

    def Irecv(self, buffer: Any, source: int, tag: int = POINT_TO_POINT) -> MPI.Request:
        """Begin to receive."""
        return self._base.Irecv(buffer, self._members[source], self._tag + tag)

    def Iprobe(self, source: int, tag: int) -> bool:
        """Whether a message from `source` has arrived."""
        return self._base.Iprobe(self._members[source], self._tag + tag)

    def Improbe(self, source: int, tag: int, status: MPI.Status) -> MPI.Message | None:
        """The next message from `source`; None if none has arrived."""
        return self._base.Improbe(self._members[source], self._tag + tag, status)

    def Iallgather(self, sends: object, buffer: Any) -> _Requests:
        """Begin to collect the rows of a table, of which each rank has filled its own. Collective."""
        table = rows(as_bytes(buffer[0]), len(self._members))
        return self._trade([table[self._rank]] * len(self._members), table)

    def Ialltoall(self, sends: Any, buffer: Any) -> _Requests:
        """Begin to send row j of a table to rank j, and to receive row i of another from rank i. Collective."""
        source, target = (rows(as_bytes(table[0]), len(self._members)) for table in (sends, buffer))
        target[self._rank] = source[self._rank]
        return self._trade(source, target)

    def _trade(self, source: Sequence[Array], target: Sequence[Array]) -> _Requests:
        requests = _Requests()
        for peer in self._others:
            requests.add(self.Irecv([target[peer], MPI.BYTE], peer, COLLECTIVE))
        for peer in self._others:
            requests.add(self.Isend([source[peer], MPI.BYTE], peer, COLLECTIVE))
        return requests

    def Abort(self, exit_code: int) -> None:
        """End all processes of the job."""
        self._base.Abort(exit_code)


class _Requests:
    """Requests of one call. They never lose their memory: if one fails, the others may still be under way."""

    def __init__(self) -> None:
        self._requests: list[MPI.Request] = []
        self._statuses: list[MPI.Status] = []

    def add(self, request: MPI.Request) -> None:
        """One more request of the call."""
        self._requests.append(request)
        self._statuses.append(MPI.Status())

    def Test(self) -> bool:
        """Whether all have ended; raises the error of the first that failed."""
        try:
            return MPI.Request.Testall(self._requests, self._statuses)
        except MPI.Exception as exc:
            codes = [status.Get_error() for status in self._statuses]
            failed = [code for code in codes if code not in (MPI.SUCCESS, MPI.ERR_PENDING)]
            raise MPI.Exception(next(iter(failed), exc.Get_error_code())) from exc


class _ChannelDetector(FailureDetector):
    """Finds the dead among the members of a channel."""

    _world: Crew

    def failed_ranks(self) -> list[int]:
        """See `FailureDetector.failed_ranks`."""
        dead = self._world.failed()
        return [rank for rank, member in enumerate(self._members) if member in dead]


class _ChannelEndpoint(Endpoint):
    """One rank of a channel, which looks for deaths and for meetings while it waits."""

    world: Crew

    def listen(self, peers: Collection[int] | None) -> None:
        """See `Endpoint.listen`."""
        self.check_usable()  # another thread may have gone to a meeting
        self.world.look_for_deaths(self)
        super().listen(peers)
        self.world.look_for_calls()

    def poll_failures(self, groups: Collection[str]) -> CommError | None:
        """See `Endpoint.poll_failures`. What waits on a device ends for any death, and for a meeting."""
        error = super().poll_failures(groups)
        if error is not None or not self.concurrent or self.world.watch is not None:
            return error
        try:
            self.world.look_for_deaths(self)
            self.world.look_for_calls()
        except CommError as exc:
            return exc
        return None

    def wait_outside_mpi(self, done: Callable[[], bool]) -> None:
        """See `Endpoint.wait_outside_mpi`."""
        self.poll(done)  # which looks for deaths itself

    def revoke(self) -> None:
        """Do nothing: all ranks look for deaths while they wait."""

    def leave(self, reason: str | None = None) -> bool:
        """See `Transport.leave`; waits for nobody."""
        if reason is not None:
            self.notify(CommAborted(reason))
        return reason is None


class _ChannelBroadcast(Native):
    """A broadcast by messages: a channel has none of MPI."""

    def broadcast(self, flow: Flow, x: Array, root: int) -> None:
        """Along a tree, or in parts if `x` is large; see `TREE_BYTES`. Collective."""
        flat = as_bytes(x)
        if self.size == 2 or x.nbytes <= TREE_BYTES:
            derived.broadcast(self._transport, flat, root)
            return
        for block in cut(flat.size, flat.size, BLOCK_BYTES):
            self._broadcast_in_parts(flow, flat[block], root)

    def _broadcast_in_parts(self, flow: Flow, x: Array, root: int) -> None:
        """`root` sends part r to rank r, which passes it to the others. Collective."""
        parts, others = [x[chunk] for chunk in chunk_bounds(x.size, self.size)], flow.others
        mine = parts[self.rank]
        if self.rank == root:
            flow.begin(flow.messages(parts), [])()
            flow.begin([(peer, mine) for peer in others], [])()
        else:
            flow.begin([], [(root, mine)])()
            flow.begin([(peer, mine) for peer in others if peer != root], flow.messages(parts))()


class ChannelTransport(MPITransport):
    """One rank of a channel of a crew.

    Collective among `members`, unless `with_window` is False.

    Args:
        crew: The processes of the job.
        members: Those that are ranks here, in order; this process is among them.
        channel: The number of the channel.
        timeout_s: How long a call may wait for its peers.
        with_window: Whether ranks of one host share memory for large reductions.
    """

    name = "mpi"
    detector_class = _ChannelDetector
    endpoint_class = _ChannelEndpoint
    native_class = _ChannelBroadcast

    def __init__(
        self,
        crew: Crew,
        members: Sequence[int],
        channel: int,
        *,
        timeout_s: float,
        with_window: bool = True,
    ) -> None:
        self._crew = crew
        super().__init__(
            cast(MPI.Comm, Channel(crew.comm, [crew.rank_of(each) for each in members], channel)),
            timeout_s=timeout_s,
            world=crew,
            group=f"channel {crew.size}.{channel}",  # numbers begin anew in a communicator with newcomers
            members=members,
            with_window=with_window,
        )

    def split(self, color: int, key: int) -> Transport:
        """See `Transport.split`. Each rank offers a channel; a group takes that of its first rank."""
        table = np.empty((self.size, 3), np.int64)
        self.allgather(np.array([color, key, self._crew.new_channel()], np.int64), table)
        check_channel(int(table[:, 2].max()))  # on all ranks alike, whichever group has it
        alike = [rank for rank in range(self.size) if table[rank, 0] == color]
        alike.sort(key=lambda rank: (table[rank, 1], rank))
        members, channel = [self.members[rank] for rank in alike], int(table[alike[0], 2])
        return ChannelTransport(self._crew, members, channel, timeout_s=self.timeout_s)

    def dup(self) -> Transport:
        """See `Transport.dup`."""
        return self.split(0, self.rank)

    # Failure and end --------------------------------------------------------------------------------

    def abort(self, exit_code: int = 1) -> None:
        """See `Transport.abort`."""
        self._crew.say_failed(f"exit code {exit_code}")
        super().abort(exit_code)

    def abandon(self, reason: str) -> None:
        """Refuse all calls from now on, and keep the memory of what is under way; tells nobody."""
        self._endpoint.abandon(reason)

    def shrink(self, host: Transport | None = None) -> Transport:
        """Refuse: those that are left of an elastic job meet, and connect anew.

        Raises:
            UnsupportedError: Always.
        """
        raise UnsupportedError("mpi: ranks of an elastic job do not shrink; let the error reach elastic.run")

    def close(self) -> None:
        """Unmap the window. Waits for nobody."""
        self._unmap()
        if self._endpoint.begun:  # MPI may still write there
            self._endpoint.keep_for_ever()
        if self._broken is None:
            self._break("closed")
            self._world.forget()
        with suppress(KeyError):
            del self._world.completed[self._endpoint.group]
