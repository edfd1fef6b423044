"""A fleet over a communicator that does not survive deaths: it holds one rendezvous, at the start."""

from __future__ import annotations

import os
import socket
from collections.abc import Collection, Sequence

from ..bootstrap.rank_exit import exit_handler
from ..comm import Communicator
from ..errors import CommError, RankFailed, UnsupportedError
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
        exit_handler().advise(ADVICE if world.size > 1 else "")

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
        exit_handler().advise("")
        self._world.close()
