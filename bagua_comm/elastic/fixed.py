"""A fleet over a communicator that does not survive deaths: it meets once, at the start."""

from __future__ import annotations

import os
import socket
from collections.abc import Collection, Sequence

from ..comm import Communicator
from ..errors import CommError, RankFailed, UnsupportedError
from .fleet import Fleet, Meeting, Process

ADVICE = (
    "start it by `python -m bagua_comm run --ulfm`, with --spares N for processes that take a dead one's place"
)


class FixedFleet(Fleet):
    """The ranks of a communicator, none of which may die.

    Args:
        world: The communicator; it is closed at the end of the job.
    """

    def __init__(self, world: Communicator) -> None:
        self._world = world
        self.me, self.wanted, self.timeout_s = world.rank, world.size, world.timeout_s
        self._met = False

    def meet(self, cause: CommError | None = None) -> Meeting:
        """See `Fleet.meet`; only the first meeting can be held.

        Raises:
            RankFailed: This is another one.
        """
        if self._met:
            ranks = cause.ranks if isinstance(cause, RankFailed) else ()
            why = f" ({cause})" if cause is not None else ""
            raise RankFailed(f"this job cannot go on without the ranks that it has lost{why}; {ADVICE}", ranks)
        self._met = True
        rows = self._world.allgather_object((socket.gethostname(), os.getpid()))
        return Meeting(1, tuple(Process(rank, host, pid) for rank, (host, pid) in enumerate(rows)), ())

    def connect(self, members: Sequence[int], *, control: bool = False) -> Communicator:
        """See `Fleet.connect`; all processes are members."""
        if list(members) != list(range(self._world.size)):
            raise UnsupportedError(
                f"connect: members are {list(members)}, expected all {self._world.size} processes in order: this "
                f"job has no spares; {ADVICE}"
            )
        return self._world.dup()

    def stand_by(self, training: Collection[int]) -> bool:
        """See `Fleet.stand_by`; nobody stands by here."""
        return False

    def recruit(self, count: int) -> None:
        """See `Fleet.recruit`.

        Raises:
            UnsupportedError: Always.
        """
        raise UnsupportedError(f"this job cannot start processes; {ADVICE}")

    def recruits_wait(self) -> bool:
        """See `Fleet.recruits_wait`."""
        return False

    def end(self) -> None:
        """See `Fleet.end`."""
        self._world.close()
