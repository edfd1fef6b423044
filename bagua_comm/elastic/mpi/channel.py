"""Sub-communicators emulated by message tags, without creating an MPI communicator.

Open MPI may crash the survivors when a rank dies inside a call that creates a communicator. So none is created
after a death. The survivors keep their communicator, which still carries messages among them. Each group of ranks
uses its own channel: a number, encoded in its tags, that is never used twice. So a message that an earlier group
has left pending matches no later receive.

    tag = FIRST_TAG + 4 * channel + kind

A channel has no MPI collectives. Small arrays are sent to all ranks directly, as MPI's own collectives do among
few ranks. Larger arrays use the collectives that are derived from exchanges.
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
from ...topology import split_group
from ...transports import derived
from ...transports.base import Transport
from ...transports.flow import COLLECTIVE, POINT_TO_POINT, Flow
from ...transports.mpi.endpoint import Endpoint
from ...transports.mpi.failure_detector import FailureDetector
from ...transports.mpi.native import Native
from ...transports.mpi.transport import MPITransport
from .processes import JobProcesses

KINDS = 4
"""How many tags of `transports.flow` a channel distinguishes."""

FIRST_TAG = 1 << 12
"""Programs that use MPI beside this library may use smaller tags, except `processes.NOTICES_TAG`."""

LEAST_TAG_BOUND = (1 << 15) - 1
"""The largest tag that every MPI supports."""


def check_channel(number: int) -> None:
    """Raise `CommError` if MPI has no tags for this channel."""
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
        base: The underlying communicator, which raises the errors of calls.
        members: The ranks of `base` in this channel, in order; this rank is among them.
        number: The number of the channel, the same on all members, and never used before.

    Raises:
        CommError: MPI has no tags for this channel.
    """

    def __init__(self, base: MPI.Comm, members: Sequence[int], number: int) -> None:
        self._base, self._members = base, list(members)
        check_channel(number)
        self._tag = FIRST_TAG + KINDS * number
        self._rank = self._members.index(base.Get_rank())
        self._others = [peer for peer in range(len(self._members)) if peer != self._rank]

    def Get_rank(self) -> int:
        """The index of this rank among the members."""
        return self._rank

    def Get_size(self) -> int:
        """The number of members."""
        return len(self._members)

    def Set_errhandler(self, handler: MPI.Errhandler) -> None:
        """Set the error handler of the underlying communicator."""
        self._base.Set_errhandler(handler)

    def Isend(self, buffer: object, dest: int, tag: int = POINT_TO_POINT) -> MPI.Request:
        """Start a send."""
        return self._base.Isend(buffer, self._members[dest], self._tag + tag)

    def Irecv(self, buffer: object, source: int, tag: int = POINT_TO_POINT) -> MPI.Request:
        """Start a receive."""
        return self._base.Irecv(buffer, self._members[source], self._tag + tag)

    def Recv_init(self, buffer: object, source: int, tag: int) -> MPI.Prequest:
        """See mpi4py."""
        return self._base.Recv_init(buffer, self._members[source], self._tag + tag)

    def Iprobe(self, source: int, tag: int) -> bool:
        """Whether a message from `source` has arrived."""
        return self._base.Iprobe(self._members[source], self._tag + tag)

    def Improbe(self, source: int, tag: int, status: MPI.Status) -> MPI.Message | None:
        """Match the next message from `source`; None if none has arrived."""
        return self._base.Improbe(self._members[source], self._tag + tag, status)

    def Iallgather(self, sends: object, buffer: Any) -> _Requests:
        """Start an allgather of the rows of a table, in which each rank has filled its row. Collective."""
        table = rows(as_bytes(buffer[0]), len(self._members))
        return self._exchange_rows([table[self._rank]] * len(self._members), table)

    def Ialltoall(self, sends: Any, buffer: Any) -> _Requests:
        """Start to send row j of a table to rank j, and to receive row i of another from rank i. Collective."""
        source, target = (rows(as_bytes(table[0]), len(self._members)) for table in (sends, buffer))
        target[self._rank] = source[self._rank]
        return self._exchange_rows(source, target)

    def _exchange_rows(self, source: Sequence[Array], target: Sequence[Array]) -> _Requests:
        recvs = [self.Irecv([target[peer], MPI.BYTE], peer, COLLECTIVE) for peer in self._others]
        sends = [self.Isend([source[peer], MPI.BYTE], peer, COLLECTIVE) for peer in self._others]
        return _Requests([*recvs, *sends])

    def Abort(self, exit_code: int) -> None:
        """Abort all processes of the job."""
        self._base.Abort(exit_code)


class _Requests:
    """Requests of one call. Their buffers are kept if one fails, since the others may still be pending."""

    def __init__(self, requests: list[MPI.Request]) -> None:
        self._requests, self._statuses = requests, [MPI.Status() for _ in requests]

    def Test(self) -> bool:
        """Whether all are complete; raises the error of the first that failed."""
        try:
            return MPI.Request.Testall(self._requests, self._statuses)
        except MPI.Exception as exc:
            codes = [status.Get_error() for status in self._statuses]
            failed = [code for code in codes if code not in (MPI.SUCCESS, MPI.ERR_PENDING)]
            raise MPI.Exception(next(iter(failed), exc.Get_error_code())) from exc


class _ChannelDetector(FailureDetector):
    """Finds the dead among the members of a channel."""

    _world: JobProcesses

    def failed_ranks(self) -> list[int]:
        """See `FailureDetector.failed_ranks`."""
        dead = self._world.failed()
        return [rank for rank, member in enumerate(self._members) if member in dead]

    def is_revoked(self) -> bool:
        """See `FailureDetector.is_revoked`. The communicator below is never revoked."""
        return False


class ChannelEndpoint(Endpoint):
    """One rank of a channel, which checks for deaths and rendezvous while it waits."""

    world: JobProcesses

    def listen(self, peers: Collection[int] | None) -> None:
        """See `Endpoint.listen`."""
        self.calls.check_usable()  # another thread may have joined a rendezvous
        self.world.check_deaths(self)
        super().listen(peers)
        self.world.check_rendezvous()

    def poll_failures(self, groups: Collection[str]) -> CommError | None:
        """See `Endpoint.poll_failures`. Waits on a device end when a process dies or a rendezvous starts, too."""
        error = super().poll_failures(groups)
        if error is not None or not self.concurrent or self.world.on_wait is not None:
            return error
        try:
            self.world.check_deaths(self)
            self.world.check_rendezvous()
        except CommError as exc:
            return exc
        return None

    def wait_outside_mpi(self, done: Callable[[], bool]) -> None:
        """See `Endpoint.wait_outside_mpi`."""
        self.poll(done)  # which checks for deaths itself

    def revoke(self) -> None:
        """Do nothing: all ranks check for deaths while they wait."""

    def leave(self, reason: str | None = None, on_slow: Callable[[], object] | None = None) -> bool:
        """See `Transport.leave`; waits for no other rank."""
        if reason is not None:
            self.notify(CommAborted(reason))
        return reason is None


class _ChannelBroadcast(Native):
    """A broadcast by messages: a channel has none of MPI."""

    def broadcast(self, flow: Flow, x: Array, root: int) -> None:
        """Broadcast along a tree. Collective."""
        derived.broadcast(self._messages, as_bytes(x), root)


class ChannelTransport(MPITransport):
    """One rank of a channel among the processes of a job.

    Collective among `members`, unless `with_window` is False.

    Args:
        processes: The processes of the job.
        members: The numbers of the processes in the channel, by rank; this process is among them.
        channel: The number of the channel.
        timeout_s: How long a call may wait for its peers.
        with_window: Whether ranks of one host share memory for large reductions.
    """

    name = "mpi"
    detector_class = _ChannelDetector
    endpoint_class = ChannelEndpoint
    native_class = _ChannelBroadcast

    def __init__(
        self,
        processes: JobProcesses,
        members: Sequence[int],
        channel: int,
        *,
        timeout_s: float,
        with_window: bool = True,
    ) -> None:
        self._processes = processes
        super().__init__(
            cast(MPI.Comm, Channel(processes.comm, members, channel)),
            timeout_s=timeout_s,
            world=processes,
            group=f"channel {channel}",
            members=members,
            with_window=with_window,
        )

    def split(self, color: int, key: int) -> Transport:
        """See `Transport.split`. Each rank allocates a channel; a group uses that of its first rank."""
        table = np.empty((self.size, 3), np.int64)
        self.allgather(np.array([color, key, self._processes.new_channel()], np.int64), table)
        colors, keys, channels = table.T.tolist()
        check_channel(max(channels))  # raises on all ranks, whichever group has it
        group = split_group(self.rank, colors, keys)
        members, channel = [self.members[rank] for rank in group], channels[group[0]]
        return ChannelTransport(self._processes, members, channel, timeout_s=self.timeout_s)

    def dup(self) -> Transport:
        """See `Transport.dup`."""
        return self.split(0, self.rank)

    def subgroup(self, ranks: Sequence[int], name: str, host: Transport | None = None) -> Transport:
        """See `Transport.subgroup`. The first rank allocates a channel, and sends its number to the others."""
        channel = np.array([self._processes.new_channel()], np.int64)
        if self.rank == ranks[0]:
            self.exchange([(rank, channel) for rank in ranks[1:]], [])
        else:
            self.exchange([], [(ranks[0], channel)])
        check_channel(int(channel[0]))
        members = [self.members[rank] for rank in ranks]
        return ChannelTransport(self._processes, members, int(channel[0]), timeout_s=self.timeout_s)

    # Failure and end --------------------------------------------------------------------------------

    def abort(self, exit_code: int = 1) -> None:
        """See `Transport.abort`."""
        self._processes.announce_failure(f"exit code {exit_code}")
        super().abort(exit_code)

    def abandon(self, reason: str) -> None:
        """Refuse all later calls, and keep the buffers of pending ones; notifies no other process."""
        self._endpoint.abandon(reason)

    def shrink(self, host: Transport | None = None) -> Transport:
        """Refuse: the survivors of an elastic job connect anew after a rendezvous.

        Raises:
            UnsupportedError: Always.
        """
        raise UnsupportedError("mpi: ranks of an elastic job do not shrink; let the error reach elastic.run")

    def close(self) -> None:
        """Unmap the window. Waits for no other rank."""
        self._unmap()
        if self._endpoint.begun:  # MPI may still write there
            self._endpoint.keep_for_ever()
        if self.broken is None:
            self.refuse_calls("closed")
            self._world.forget()
        with suppress(KeyError):
            del self._world.completed[self._endpoint.group]
