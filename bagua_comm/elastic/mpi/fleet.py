"""A fleet over MPI that survives deaths (Open MPI with ULFM: `bagua run --ulfm`).

All processes are ranks of one MPI communicator, and no other one is created (see `channel`). A rendezvous is an
agreement of all living processes (see `agreement`). If spawned processes are ready to join, the living processes
admit them: they create one communicator with them, agree that all have it, move to it, and hold another
agreement there.

The end of the job is an agreement too, so that no process leaves while another one may have to repeat its last
steps.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Collection, Iterable, Sequence
from contextlib import suppress

import numpy as np
from mpi4py import MPI

from ... import kernels
from ...bootstrap import environment
from ...bootstrap.connection import open_world
from ...bootstrap.rank_exit import set_abort_group
from ...comm import Communicator
from ...errors import BootstrapError, CommAborted, CommError, CommMismatch, RankFailed, UnsupportedError
from ...processes import sees_starter
from ..fleet import Death, Fleet, Process, ProcessInfo, Rendezvous
from . import spawn
from .agreement import EITHER, FINISH, POLL_S, RESUME, Agreement, Participant, location_of
from .channel import ChannelTransport
from .parent import ParentInfo
from .processes import ENDING, FAILED, FAREWELL_S, JOIN, JobProcesses
from .spawn import JoinReply, Spawner

SPARE_POLL_S = 0.002
"""Interval at which a spare polls."""

MAX_SPAWNED_DEATHS = 20
"""How many spawned processes may die before no more are spawned."""

_log = logging.getLogger(__name__)


def gather(timeout_s: float) -> MPIFleet:
    """The fleet of all processes that mpirun has started, once all of them are ready.

    Collective.

    Raises:
        BootstrapError: BAGUA_SPARES leaves no process to train.
    """
    job, size = environment.job(), MPI.COMM_WORLD.Get_size()
    spares = job.spares
    if job.recruiter:
        return _join(ParentInfo.parse(job.recruiter), timeout_s)
    if spares >= size:
        raise BootstrapError(
            f"elastic.run: BAGUA_SPARES is {spares}, so that none of {size} processes would train; start more "
            "processes, or fewer spares"
        )
    kernels.on_host()  # this loads them; otherwise all would wait for the slowest process after a death
    fleet = MPIFleet(MPI.COMM_WORLD, timeout_s=timeout_s, wanted=size - spares)
    fleet.start()
    return fleet


def _join(parent: ParentInfo, timeout_s: float) -> MPIFleet:
    """The fleet that admits this spawned process."""
    comm, reply = spawn.join(parent)
    fleet = MPIFleet(comm, timeout_s=timeout_s, wanted=reply.wanted, reply=reply)
    fleet.start()
    return fleet


class MPIFleet(Fleet):
    """The processes that mpirun has started, of which some may die.

    Args:
        comm: The communicator of all of them; no other thread may make collective calls of it.
        timeout_s: How long a process may stay away from a rendezvous, and a call may wait for its peers.
        wanted: How many processes train, while enough are alive.
        reply: The reply of the parent, if this process was spawned.
    """

    def __init__(self, comm: MPI.Comm, *, timeout_s: float, wanted: int, reply: JoinReply | None = None) -> None:
        comm.Set_errhandler(MPI.ERRORS_RETURN)
        processes = JobProcesses(comm, None if reply is None else reply.numbers)
        self._processes = processes
        self._started = processes.size
        """How many processes were started with the job."""
        if reply is not None:
            set_abort_group(comm)
            processes.rounds, self._started = reply.rounds, reply.started
            processes.dead = set(range(processes.size)) - set(reply.numbers)
        self.can_spawn = MPI.Query_thread() == MPI.THREAD_MULTIPLE
        self._spawner = Spawner(environment.job_variables(), environment.job())
        self.me, self.wanted, self.timeout_s = processes.index, wanted, timeout_s
        self._agreement = Agreement(processes, timeout_s, self._joining)
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
            parent = next((process for process, each in sorted(participants.items()) if each.joining), None)
            if parent is not None:
                self._admit(parent, participants[parent].joining)
            elif all(each.wants == RESUME for each in participants.values()):
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
        self._spawner.close()
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
        for transport in list(self._processes.transports):
            if isinstance(transport, ChannelTransport):
                transport.abandon(reason)
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
        if (
            self.me not in members
            or len(set(members)) != len(members)
            or not set(members) <= set(control.members)
        ):
            raise CommMismatch(
                f"connect: members are {members}, expected different ones of {control.members}, process "
                f"{self.me} among them"
            )
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

    # Spawned processes ------------------------------------------------------------------------------

    def spawn(self, count: int) -> None:
        """See `Fleet.spawn`."""
        if not self.can_spawn:
            raise UnsupportedError(
                "this MPI cannot spawn processes while other threads call it; start spares with the job: bagua "
                "run --spares 1"
            )
        lost = sum(process >= self._started for process in self._processes.dead)
        if lost < MAX_SPAWNED_DEATHS:
            participants = self._agreement.participants
            living = (self.me, *self._processes.living())
            namespaces = {participants[each].info.namespace for each in living}
            self._spawner.start(count, here=len(namespaces) == 1 and sees_starter("PMIX_NAMESPACE"))
        else:
            _log.warning("%d spawned processes have died; no more are spawned", lost)

    def has_joining(self) -> bool:
        """See `Fleet.has_joining`."""
        return self._spawner.ready() is not None

    def _joining(self) -> Sequence[ProcessInfo]:
        group = self._spawner.ready()
        return group.processes if group is not None else ()

    def _admit(self, parent: int, joining: Sequence[ProcessInfo]) -> None:
        """Move to a communicator that includes spawned processes; stay if that fails, the same on all.

        Collective among all living processes.

        Args:
            parent: The process that has spawned them.
            joining: The spawned processes.
        """
        processes, agreement = self._processes, self._agreement
        group = self._spawner.pop_ready() if parent == self.me else None
        created: tuple[MPI.Intracomm, list[int]] | None = None
        with suppress(CommError, MPI.Exception):
            created = spawn.admit(processes.comm, group, processes.rank_of(parent))
        while (agreed := agreement.agree(created is not None)) is None:
            pass  # another process has died; the communicator is as good
        if not agreed or created is None:
            _log.warning("spawned processes could not be admitted; training continues without them")
            if group is not None:
                group.kill()
            return
        comm, ranks = created
        numbers = spawn.numbers_with_joining(processes.numbers, ranks, processes.size, len(joining))
        processes.move_to(comm, numbers)
        set_abort_group(comm)
        agreement.round = 0
        for number, info in zip(numbers[-len(joining) :], joining, strict=True):
            agreement.participants[number] = Participant(RESUME, info)
            processes.places[number] = location_of(info)
        if group is not None:
            group.send(JoinReply(numbers, self.wanted, processes.rounds, self._started))
