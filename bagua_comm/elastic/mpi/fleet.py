"""A fleet over MPI that survives deaths (Open MPI with ULFM: `bagua run --ulfm`).

All processes are ranks of one MPI communicator, and no other one is created (see `channel`). A rendezvous is an
agreement of all living processes (see `agreement`).

The end of the job is an agreement too, so that no process leaves while another one may have to repeat its last
steps.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Iterable, Sequence
from contextlib import suppress

import numpy as np
from mpi4py import MPI

from ... import kernels
from ...bootstrap import environment
from ...bootstrap.connection import open_world
from ...comm import Communicator
from ...errors import BootstrapError, CommAborted, CommError, CommMismatch, RankFailed
from ..fleet import Death, Fleet, Process, Rendezvous
from .agreement import EITHER, FINISH, POLL_S, RESUME, Agreement
from .channel import ChannelEndpoint, ChannelTransport
from .processes import ENDING, FAILED, FAREWELL_S, JOIN, JobProcesses

SPARE_POLL_S = 0.002
"""Interval at which a spare polls."""


def gather(timeout_s: float) -> MPIFleet:
    """The fleet of all processes that mpirun has started, once all of them are ready.

    Collective.

    Raises:
        BootstrapError: BAGUA_SPARES leaves no process to train.
    """
    spares, size = environment.job().spares, MPI.COMM_WORLD.Get_size()
    if spares >= size:
        raise BootstrapError(
            f"elastic.run: BAGUA_SPARES is {spares}, so that none of {size} processes would train; start more "
            "processes, or fewer spares"
        )
    kernels.on_host()  # this loads them; otherwise all would wait for the slowest process after a death
    fleet = MPIFleet(MPI.COMM_WORLD, timeout_s=timeout_s, wanted=size - spares)
    fleet.start()
    return fleet


class MPIFleet(Fleet):
    """The processes that mpirun has started, of which some may die.

    Args:
        comm: The communicator of all of them; no other thread may make collective calls of it.
        timeout_s: How long a process may stay away from a rendezvous, and a call may wait for its peers.
        wanted: How many processes train, while enough are alive.
    """

    def __init__(self, comm: MPI.Comm, *, timeout_s: float, wanted: int) -> None:
        comm.Set_errhandler(MPI.ERRORS_RETURN)
        processes = self._processes = JobProcesses(comm)
        self.me, self.wanted, self.timeout_s = processes.index, wanted, timeout_s
        self._agreement = Agreement(processes, timeout_s)
        self._comms: list[Communicator] = []
        """Communicators made since the last rendezvous."""
        self._first: Rendezvous | None = None
        """The first rendezvous, until `rendezvous` has returned it."""
        self._death_noticed: RankFailed | None = None
        """The death that this process noticed while it stood by."""

    # Rendezvous -------------------------------------------------------------------------------------

    def start(self) -> None:
        """Hold the first rendezvous; the first call of `rendezvous` returns its result. Collective."""
        self._first = self.rendezvous()

    def rendezvous(self, cause: CommError | None = None) -> Rendezvous:
        """See `Fleet.rendezvous`."""
        if self._first is not None:
            first, self._first = self._first, None
            return first
        cause, self._death_noticed = cause or self._death_noticed, None
        self._abort_pending(cause)
        processes = self._processes
        before = processes.dead
        while True:
            participants = self._agreement.hold(RESUME, cause)
            if all(each.wants == RESUME for each in participants.values()):
                break
        processes.rounds += 1
        processes.dead, processes.critical = set(range(processes.size)) - set(participants), set(participants)
        reasons: dict[int, str] = {}
        for process, why in (each for participant in participants.values() for each in participant.killed):
            # Several may have killed it; the longest reason comes from the first of them.
            reasons[process] = max(why, reasons.get(process, ""), key=len)
        dead = [Death(self._process(each), reasons.get(each, "died")) for each in sorted(processes.dead - before)]
        return Rendezvous(processes.rounds, tuple(map(self._process, sorted(participants))), tuple(dead))

    def stand_by(self, training: Collection[int]) -> bool:
        """See `Fleet.stand_by`."""
        processes = self._processes
        processes.critical = set(training)
        while True:
            kinds = {notice.kind for _, notice in processes.pending_rendezvous()}
            if dead := processes.deaths():
                text = processes.describe_deaths(dead)
                self._death_noticed = RankFailed(f"process {self.me}, standing by: {text}")
            if dead or JOIN in kinds or FAILED in kinds:
                return True
            if ENDING in kinds:
                return not self._finish(EITHER)
            time.sleep(SPARE_POLL_S)

    def end(self) -> None:
        """See `Fleet.end`."""
        if not self._finish(FINISH):
            raise CommAborted(f"process {self.me} had finished, but another one started a rendezvous")

    def fail(self, reason: str) -> None:
        """See `Fleet.fail`."""
        self._processes.announce_failure(reason)

    def _finish(self, wants: str) -> bool:
        """Whether all agree that the job has ended; False if some want a rendezvous."""
        participants = self._agreement.hold(wants, None)
        if any(each.wants == RESUME for each in participants.values()):
            return False
        self._say_farewell(participants)
        return True

    def _say_farewell(self, everyone: Iterable[int]) -> None:
        """Wait until the others have noticed that the job has ended, for at most `FAREWELL_S`."""
        processes = self._processes
        processes.over = True
        processes.rounds += 1
        until = time.monotonic() + FAREWELL_S
        processes.announce(ENDING, None)
        others = set(everyone) - {self.me}
        while others and time.monotonic() < until:
            others &= set(processes.living())
            others -= {process for process, _ in processes.pending_rendezvous()}
            time.sleep(POLL_S)

    def _process(self, number: int) -> Process:
        location = self._processes.places[number]
        return Process(number, location.host, location.process)

    def _abort_pending(self, cause: CommError | None) -> None:
        """Abort pending operations in all communicators of this fleet."""
        reason = "a rendezvous started" + (f" after {type(cause).__name__}: {cause}" if cause is not None else "")
        for endpoint in list(self._processes.communicators):
            if isinstance(endpoint, ChannelEndpoint):
                endpoint.abandon(reason)
        for comm in self._comms:
            for beside in comm.transports[1:]:
                with suppress(CommError):
                    beside.leave(reason)
        self._comms.clear()
        self._processes.completed.clear()

    # Communicators ----------------------------------------------------------------------------------

    def connect(self, members: Sequence[int], *, control: bool = False) -> Communicator:
        """See `Fleet.connect`."""
        numbers, processes = list(members), self._processes
        processes.critical = set(numbers)
        channel = self._new_channel(numbers)
        transport = ChannelTransport(
            processes, numbers, channel, timeout_s=self.timeout_s, with_window=not control
        )
        hosts = [self._agreement.participants[each].info.host for each in numbers]
        comm = open_world(transport, hosts, gpu="none" if control else "auto")
        self._comms.append(comm)
        return comm

    def _new_channel(self, members: list[int]) -> int:
        """The channel number that the first of these processes allocates. Collective among them."""
        control = self._agreement.control
        if control is None:
            raise CommMismatch("connect: there was no rendezvous before")
        self._check_members(members, control.members)
        ranks, offer = [control.members.index(each) for each in members], np.array([0, *members], np.int64)
        if self.me == members[0]:
            offer[0] = self._processes.new_channel()
            control.exchange([(rank, offer) for rank in ranks[1:]], [])
        else:
            control.exchange([], [(ranks[0], offer)])
            if offer[1:].tolist() != members:
                raise CommMismatch(
                    f"connect: process {self.me} connects {members}, but process {members[0]} connects "
                    f"{offer[1:].tolist()}"
                )
        return int(offer[0])
