"""Processes that replace dead ones over MPI: how a running job spawns them, and how it admits them.

    parent              spawn them, in the background         MPI_Comm_spawn, in a thread: a second or more
    joining processes   start Python, the program and MPI, and report that they are ready
    all                 at a later rendezvous                 admit: one communicator of all, some milliseconds
    joining processes   take part in the next rendezvous

Until they are ready no other process waits for them: one that dies or is late causes no delay. Only `admit`
creates an MPI communicator. Open MPI may crash the survivors if a process dies in these milliseconds. Then the
job is lost, and `bagua run --restarts` restarts it from memory.
"""

from __future__ import annotations

import logging
import secrets
import sys
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from typing import Any, NamedTuple, cast

from mpi4py import MPI

from ...bootstrap.job import Job
from ...errors import RankFailed
from ...processes import ProcessId, kill, start_of, started_with
from ...transports.mpi.time_limit import in_time
from ..fleet import ProcessInfo
from .parent import VARIABLE, ParentInfo
from .sealing import seal

START_S = 60.0
"""How long spawned processes may take until they are ready; slower ones are killed, and others are spawned."""

ADMIT_S = 10.0
"""How long creating the communicator with them may take; after that the job continues without them."""

MAX_TRIES = 3
"""How often processes are spawned to replace the same dead ones."""

APPEAR_S = 10.0
"""How long spawned processes may take until they are visible, where all processes of the job see each other."""

CHECK_S = 0.5
"""Interval at which the parent checks that spawned processes that are not ready are alive."""

POLL_S = 0.001
"""Interval at which joining processes, and those that admit them, poll."""

_READY, _REPLY, _INTERCOMM = 1, 2, 3
"""Tags of messages between the parent and the joining processes."""

_log = logging.getLogger(__name__)


class JoinReply(NamedTuple):
    """The facts about the job that a joining process needs."""

    numbers: list[int]
    """The numbers of the processes, by rank in the communicator of all."""
    wanted: int
    rounds: int
    """Number of rendezvous held so far."""
    started: int
    """How many processes were started with the job."""


# The parent -----------------------------------------------------------------------------------------------


class Spawner:
    """Spawns processes in the background.

    Args:
        variables: Their environment variables, beside those that MPI needs.
        job: The job in whose record this is noted.
    """

    def __init__(self, variables: dict[str, str], job: Job) -> None:
        self._variables, self._job = variables, job
        self._group: SpawnedGroup | None = None
        self._count, self._here, self._tries = 0, True, 0

    def start(self, count: int, *, here: bool) -> None:
        """Spawn `count` processes, unless some are starting already; `here` if they will be visible from here."""
        if self._group is None:
            self._count, self._here, self._tries = count, here, 0
            self._try()

    def _try(self) -> None:
        self._tries += 1
        self._job.record("recruits", count=self._count)
        self._group = SpawnedGroup(self._count, self._variables, here=self._here)

    def ready(self) -> SpawnedGroup | None:
        """The spawned processes, if they are ready. Replaces those that have failed to start."""
        group = self._group
        if group is None:
            return None
        problem = group.problem()
        if problem is None:
            return group if group.processes else None
        group.kill()
        self._group = None
        if self._tries < MAX_TRIES:
            _log.warning("processes that were spawned to replace dead ones %s; others are spawned", problem)
            self._try()
        else:
            _log.warning(
                "processes were spawned %d times to replace dead ones, and %s; training continues with fewer",
                self._tries,
                problem,
            )
        return None

    def pop_ready(self) -> SpawnedGroup | None:
        """Return the spawned processes that are ready, and forget them."""
        group = self.ready()
        if group is not None:
            self._group = None
        return group

    def close(self) -> None:
        """Kill the processes that were not admitted."""
        if self._group is not None:
            self._group.kill()
            self._group = None


class SpawnedGroup:
    """Processes that were spawned together, as their parent sees them.

    Args:
        count: How many are spawned.
        variables: Their environment variables.
        here: Whether all of them start where this process sees them: on its host, and not in another container.
    """

    def __init__(self, count: int, variables: dict[str, str], *, here: bool) -> None:
        self._parent = ParentInfo(secrets.token_hex(8), ProcessId.mine())
        self._count, self._variables = count, variables
        self._here = here
        self._begun_s = self._checked_s = time.monotonic()
        self._seen = self._killed = False
        self._error: Exception | None = None
        self.comm: MPI.Intracomm | None = None
        """The communicator of the parent, which is rank 0, and the spawned processes."""
        self.processes: tuple[ProcessInfo, ...] = ()
        """The spawned processes, once all are ready."""
        threading.Thread(target=self._start, name="bagua-spawn", daemon=True).start()

    def _start(self) -> None:
        """Spawn the processes, and wait until they are ready; blocks for ever if one dies before."""
        try:
            program = [sys.executable, *sys.orig_argv[1:]]
            sealed = seal(self._variables, {VARIABLE: self._parent.text()}, program)
            settings = {"map_by": "slot:OVERSUBSCRIBE", "bind_to": "none", "PMIX_ENVAR": sealed.variable}
            between = MPI.COMM_SELF.Spawn("env", sealed.command, self._count, MPI.Info.Create(settings))
            comm = between.Merge(False)
            between.Disconnect()  # otherwise MPI crashes later
            comm.Set_errhandler(MPI.ERRORS_RETURN)
            processes = tuple(cast(ProcessInfo, comm.recv(None, rank, _READY)) for rank in self._ranks())
        except Exception as exc:
            self._error = exc
            return
        self.comm, self.processes = comm, processes
        if self._killed:
            self.kill()

    def _ranks(self) -> range:
        return range(1, self._count + 1)

    def problem(self) -> str | None:
        """Why the processes cannot be admitted any more; None if they are ready or still starting."""
        if self._error is not None:
            return f"could not be started: {self._error}"
        if any(each.state() in ("ended", "stopped") for each in self.processes):
            return "died or were stopped before they were admitted"
        now = time.monotonic()
        if self.processes or now - self._checked_s < CHECK_S:
            return None
        self._checked_s = now
        if now - self._begun_s > START_S:
            return f"were not ready in {START_S:.3g} s"
        living = len(started_with(VARIABLE, self._parent.text()))
        self._seen = self._seen or living >= self._count
        if self._here and not self._seen and now - self._begun_s > APPEAR_S:
            return f"did not appear in {APPEAR_S:.3g} s, or died at once"
        some_died = self._seen and living < self._count and not self.processes
        return "died before they were ready" if some_died else None

    def kill(self) -> None:
        """Kill the processes."""
        self._killed = True
        for process in started_with(VARIABLE, self._parent.text()):
            kill(process, start_of(process))

    def send(self, message: object) -> None:
        """Send an object to each of the processes."""
        assert self.comm is not None
        for rank in self._ranks():
            with suppress(MPI.Exception):
                self.comm.send(message, rank, _REPLY)


# All processes in a rendezvous ----------------------------------------------------------------------------


def admit(old: MPI.Comm, group: SpawnedGroup | None, parent: int) -> tuple[MPI.Intracomm, list[int]]:
    """Create a communicator of the living processes, followed by the spawned ones.

    Collective among the living processes.

    Args:
        old: Their communicator, which may have dead ranks.
        group: The spawned processes; only the parent passes them.
        parent: The rank of the parent in `old`.

    Returns:
        The communicator, and the ranks of `old` that are in it, by rank there.

    Raises:
        CommTimeout: It was not created in time.
        MPI.Exception: It could not be created.
    """

    def create() -> tuple[MPI.Intracomm, list[int]]:
        living = cast(MPI.Intracomm, cast(MPI.Intracomm, old).Shrink())
        living.Set_errhandler(MPI.ERRORS_RETURN)
        ranks = _ranks_in(old, living)
        bridge = group.comm if group is not None else None
        return _merge(living, ranks.index(parent), bridge or MPI.COMM_SELF, 1, last=False), ranks

    if group is not None:
        group.send("admit")
    return in_time(create, ADMIT_S, "admitting spawned processes", kind=threading.Thread)


def _ranks_in(old: MPI.Comm, living: MPI.Comm) -> list[int]:
    everyone, group = old.Get_group(), living.Get_group()
    try:
        return list(group.Translate_ranks(range(group.Get_size()), everyone))
    finally:
        everyone.Free()
        group.Free()


def _merge(local: MPI.Intracomm, leader: int, bridge: MPI.Intracomm, peer: int, *, last: bool) -> MPI.Intracomm:
    """Create a communicator of the local group and a remote one.

    Collective.

    Args:
        local: The communicator of the local group.
        leader: The rank in `local` of the process that is in `bridge`.
        bridge: A communicator with the remote leader; only the local leader needs it.
        peer: The rank of the remote leader in `bridge`.
        last: Whether the ranks of the local group come last.
    """
    between = local.Create_intercomm(leader, bridge, peer, _INTERCOMM)
    between.Set_errhandler(MPI.ERRORS_RETURN)
    everyone = between.Merge(last)
    between.Disconnect()  # otherwise MPI crashes later
    everyone.Set_errhandler(MPI.ERRORS_RETURN)
    return everyone


# A joining process ----------------------------------------------------------------------------------------


def join(parent: ParentInfo) -> tuple[MPI.Intracomm, JoinReply]:
    """Report that this spawned process is ready, and wait until it is admitted.

    Collective among the processes that were spawned together.

    Raises:
        CommTimeout: The others do not take part.
        RankFailed: It is not admitted.
    """

    def report() -> MPI.Intracomm:
        between = MPI.Comm.Get_parent()
        comm = between.Merge(True)
        between.Disconnect()
        comm.Set_errhandler(MPI.ERRORS_RETURN)
        comm.send(ProcessInfo.of_this(), 0, _READY)
        return comm

    comm = in_time(report, START_S, "reporting to the process that has spawned this one")
    _receive_reply(comm, parent, float("inf"))
    everyone = in_time(lambda: _merge(MPI.COMM_WORLD, 0, comm, 0, last=True), ADMIT_S, "being admitted")
    return everyone, JoinReply(*_receive_reply(comm, parent, 3 * ADMIT_S))


def _receive_reply(comm: MPI.Comm, parent: ParentInfo, timeout_s: float) -> Any:
    """The next message of the parent."""
    until = time.monotonic() + timeout_s
    while True:
        try:
            if comm.Iprobe(0, _REPLY):
                return comm.recv(None, 0, _REPLY)
        except MPI.Exception as exc:
            raise RankFailed(f"{parent}, which has spawned this process, is gone: {exc}") from exc
        if time.monotonic() > until:
            raise RankFailed(f"{parent}, which has spawned this process, did not admit it")
        time.sleep(POLL_S)


def numbers_with_joining(numbers: Sequence[int], ranks: Sequence[int], size: int, count: int) -> list[int]:
    """The numbers of the processes of a communicator that includes spawned ones, by rank.

    Args:
        numbers: Those of the previous communicator, by rank.
        ranks: The ranks of the previous communicator that are in the new one, by rank there.
        size: How many numbers have been assigned so far.
        count: How many spawned processes there are; they come last.

    >>> numbers_with_joining([0, 1, 2], ranks=[0, 2], size=3, count=1)
    [0, 2, 3]
    """
    return [*(numbers[rank] for rank in ranks), *range(size, size + count)]
