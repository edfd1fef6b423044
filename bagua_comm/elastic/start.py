"""The fleet of this process, according to its launcher; and the one that does not survive deaths."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Collection, Sequence

from ..bootstrap import mpi_start
from ..bootstrap.connection import TIMEOUT_S, check_timeout, connect
from ..bootstrap.environment import has_ulfm, under_mpi, under_torchrun
from ..bootstrap.rank_exit import exit_handler
from ..bootstrap.world import refuse_a_second_world
from ..comm import Communicator
from ..errors import BootstrapError, CommError, RankFailed, UnsupportedError
from .fleet import Fleet, Process, Rendezvous

ADVICE = "start it by `python -m bagua_comm run --ulfm`, with --spares N for processes that replace dead ones"


class FixedFleet(Fleet):
    """The ranks of a communicator, none of which may die.

    Args:
        world: The communicator; it is closed at the end of the job.
    """

    def __init__(self, world: Communicator) -> None:
        self._world = world
        self.me, self.wanted, self.timeout_s = world.rank, world.size, world.timeout_s
        self._started = False
        exit_handler().advice = ADVICE if world.size > 1 else ""

    def rendezvous(self, cause: CommError | None = None) -> Rendezvous:
        """See `Fleet.rendezvous`; only the first one is possible.

        Raises:
            RankFailed: This is not the first one.
        """
        if self._started:
            ranks = cause.ranks if isinstance(cause, RankFailed) else ()
            why = f" ({cause})" if cause is not None else ""
            raise RankFailed(f"this job cannot go on without the ranks that it has lost{why}; {ADVICE}", ranks)
        self._started = True
        rows = self._world.allgather_object((socket.gethostname(), os.getpid()))
        return Rendezvous(1, tuple(Process(rank, host, pid) for rank, (host, pid) in enumerate(rows)), ())

    def connect(self, members: Sequence[int], *, control: bool = False) -> Communicator:
        """See `Fleet.connect`; all processes are members."""
        if list(members) != list(range(self._world.size)):
            raise UnsupportedError(
                f"connect: members are {list(members)}, expected all {self._world.size} processes in order: this "
                f"job has no spares; {ADVICE}"
            )
        return self._world.dup()

    def stand_by(self, training: Collection[int]) -> bool:
        """See `Fleet.stand_by`; there are no spares."""
        return False

    def end(self) -> None:
        """See `Fleet.end`."""
        exit_handler().advice = ""
        self._world.close()


_under_torchrun: Callable[[float], Fleet] | None = None


def register_torchrun_fleet(start: Callable[[float], Fleet]) -> None:
    """Have `start(timeout_s)` make the fleet under torchrun; bagua_torch calls this when it is imported."""
    global _under_torchrun
    _under_torchrun = start


def start(timeout_s: float = TIMEOUT_S) -> Fleet:
    """The fleet of all processes that were started with this one.

    Collective. Under `bagua run --ulfm` and under torchrun the fleet survives deaths. Under any other mpirun, and
    without a launcher, it only reports them.

    Args:
        timeout_s: How long a process may stay away from a rendezvous, and a call may wait for its peers, in
            seconds.

    Raises:
        BootstrapError: The world cannot be set up, or this process is connected already; see `connect`.
        CommTimeout: MPI has started on all ranks, but one has not joined in time.
        RankFailed: A process died before the others could continue without it.
    """
    timeout_s = check_timeout(timeout_s)
    refuse_a_second_world()
    if under_torchrun():
        if _under_torchrun is None:
            raise BootstrapError(
                "elastic.run: torchrun started this process, and only bagua_torch can connect its processes; "
                "import bagua_torch before"
            )
        return _under_torchrun(timeout_s)
    if not (under_mpi() and has_ulfm()):
        return FixedFleet(connect(timeout_s=timeout_s))

    def gather() -> Fleet:
        from .mpi import fleet as mpi  # this needs MPI to have started

        return mpi.gather(timeout_s)

    fleet = mpi_start.start(timeout_s, gather)
    exit_handler().abort.notify = fleet.fail
    return fleet
