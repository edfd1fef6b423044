"""The processes of an elastic job over MPI: which of them have died, and which wait in a rendezvous.

All processes are ranks of one MPI communicator, which is never revoked. No other one is created. A process
learns of a death from MPI, or from another process that has learnt of one and starts a rendezvous. A process
that waits in a rendezvous repeats its notice as a heartbeat, which distinguishes it from a process that hangs.
"""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Callable, Collection
from contextlib import suppress
from typing import ClassVar

from mpi4py import MPI

from ...errors import CommAborted, CommError, RankFailed
from ...transports.mpi.endpoint import Endpoint
from ...transports.mpi.world import Place, World
from ...transports.notices import Notice

NOTICES_TAG = (1 << 12) - 1
"""The tag of notices; the tags above it are those of channels."""

JOIN, ENDING, FAILED = "join", "ending", "failed"
"""Kinds of notices: the process has joined a rendezvous, and waits for all others; it has finished, and waits for
all others; its program has failed, and it waits for no other process."""

FAREWELL_S = 2.0
"""How long a process waits at most, at the end of the job, until the others have noticed that it has ended."""

ROUNDS = "rounds"
"""The group of a notice whose completed calls are rendezvous."""


class JobProcesses(World):
    """The processes of a job, by number.

    Args:
        comm: The communicator of all processes; the number of a process is its rank there.
    """

    notices_tag: ClassVar[int] = NOTICES_TAG

    def __init__(self, comm: MPI.Comm) -> None:
        self.index, self.size = comm.Get_rank(), comm.Get_size()
        super().__init__(comm, [Place("a host not known yet", 0)] * self.size, frozenset())
        self.dead: set[int] = set()
        """Processes known to be dead at the last rendezvous."""
        self.critical: set[int] = set()
        """Processes whose death triggers a rendezvous: the trainers; during a rendezvous, all processes."""
        self._ignored_dead: set[int] = set()
        """Dead processes that are not critical."""
        self.rounds = 0
        """Number of rendezvous held so far."""
        self.on_wait: Callable[[], None] | None = None
        """Called repeatedly while this process waits in a rendezvous; None outside of one."""
        self.over = False
        """Whether the job has ended: it has succeeded, or the program has failed on some process."""
        self._everyone = comm.Get_group()
        self._allocating = threading.Lock()
        self._channels = itertools.count()

    # Channels ---------------------------------------------------------------------------------------

    def new_channel(self) -> int:
        """A channel number that no process has used or will use, unless this one passes it on."""
        with self._allocating:
            return next(self._channels) * (self.size + 1) + self.index

    def channel_of_round(self, number: int) -> int:
        """The channel number of an agreement round; all processes count the same rounds."""
        return number * (self.size + 1) + self.size

    # Deaths -----------------------------------------------------------------------------------------

    def failed(self) -> set[int]:
        """Processes that MPI reports dead."""
        group = self.comm.Get_failed()
        try:
            count = group.Get_size()
            return set(group.Translate_ranks(range(count), self._everyone) if count else ())
        finally:
            group.Free()

    def living(self) -> list[int]:
        """The other processes, except those that MPI reports dead."""
        dead = self.failed()
        return [process for process in range(self.size) if process != self.index and process not in dead]

    def deaths(self) -> set[int]:
        """Critical processes that have died since the last rendezvous."""
        dead = self.failed() - self.dead
        if (ignored := dead - self.critical) != self._ignored_dead:
            self._ignored_dead = ignored
            self.acknowledge()  # otherwise MPI delivers no more messages
        return dead & self.critical

    def check_deaths(self, endpoint: Endpoint) -> None:
        """Raise `RankFailed` if a critical process has died, or within a rendezvous a member of the endpoint."""
        if self.on_wait is None:
            dead = self.deaths()
        else:
            self.on_wait()
            dead = (self.failed() - self.dead) & set(endpoint.members)
        if dead:
            ranks = [rank for rank, member in enumerate(endpoint.members) if member in dead]
            raise RankFailed(f"rank {endpoint.rank} of {endpoint.size}: {self.describe_deaths(dead)}", ranks)

    def describe_deaths(self, dead: Collection[int]) -> str:
        """The deaths of these processes, as text."""
        names = [f"process {process} ({self.places[process]}) died" for process in sorted(dead)]
        return "; ".join(names)

    def acknowledge(self) -> None:
        """Acknowledge all deaths so far: MPI receives from any source, and agrees, only after that."""
        with suppress(MPI.Exception):
            self.comm.Ack_failed()

    def revoke(self, dead: Collection[int]) -> None:
        """Do nothing: all ranks check for deaths while they wait."""

    # Rendezvous -------------------------------------------------------------------------------------

    def announce(self, kind: str, cause: CommError | None) -> None:
        """Notify all others that this process waits for them: `JOIN`, because of `cause`, or `ENDING`."""
        name, reason = (type(cause).__name__, str(cause)) if cause is not None else ("", "")
        self._notify_all(Notice(kind, name, reason[:500], {ROUNDS: self.rounds}))

    def announce_failure(self, reason: str) -> None:
        """Notify all others that the program has `FAILED` here, unless the job is over, and wait for the sends.

        MPI_Abort alone does not always end the other processes of a job that survives deaths.
        """
        if self.over:
            return
        self.over = True
        self._notify_all(Notice(FAILED, "", reason[:500], {ROUNDS: self.rounds}))
        until = time.monotonic() + FAREWELL_S
        while not all(_is_complete(request) for request, _ in self._under_way) and time.monotonic() < until:
            time.sleep(0.001)

    def _notify_all(self, notice: Notice) -> None:
        self._under_way = [(request, data) for request, data in self._under_way if not _is_complete(request)]
        self.notices.send(self.living(), notice)

    def last_notice(self, process: int) -> tuple[Notice, float] | None:
        """The last notice of a process about the next rendezvous, and when it arrived; None if there is none."""
        for notice, heard_s in reversed(self.notices.from_rank(process)):
            if notice.completed.get(ROUNDS, -1) >= self.rounds:
                return notice, heard_s
        return None

    def pending_rendezvous(self) -> list[tuple[int, Notice]]:
        """Processes waiting in the next rendezvous, each with its last notice."""
        self.notices.listen()
        heard = [(process, self.last_notice(process)) for process in range(self.size) if process != self.index]
        return [(process, last[0]) for process, last in heard if last is not None]

    def failure(self) -> str:
        """Describe a process on which the program has failed; an empty text if there is none."""
        for process, notice in self.pending_rendezvous():
            if notice.kind == FAILED:
                return f"process {process} ({self.places[process]}) ended with {notice.reason}"
        return ""

    def check_rendezvous(self) -> None:
        """Raise `CommAborted` if another process has started a rendezvous, unless this process is in one."""
        if self.on_wait is not None:
            return
        for process, notice in self.pending_rendezvous():
            if notice.kind == JOIN:
                why = f", after {notice.error}: {notice.reason}" if notice.error else ""
                raise CommAborted(f"process {process} ({self.places[process]}) started a rendezvous{why}")


def _is_complete(request: MPI.Request) -> bool:
    try:
        return request.Test()
    except MPI.Exception:
        return True  # the receiver is dead
