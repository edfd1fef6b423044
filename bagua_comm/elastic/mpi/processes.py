"""The processes of a job over MPI that goes on when some of them die: who is dead, and who calls a meeting.

All of them are ranks of one communicator, which is never revoked. None is made beside it; when newcomers are let
in, one with them takes its place (`Crew.move`). A process learns of a death from MPI, or from another process,
which calls a meeting when it learns of one. A process that waits at a meeting says so again and again, so that it
can be told from one that hangs.
"""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from typing import ClassVar

from mpi4py import MPI

from ...errors import CommAborted, CommError, RankFailed
from ...transports.mpi.world import Arriving, Place, Revocable, World
from ...transports.notices import Notice

NOTICES_TAG = (1 << 12) - 1
"""The tag of notices; the tags above it are those of channels."""

MEETS, ENDS, FAILS = "meets", "ends", "fails"
"""Kinds of notices: the process waits for all others, because something has happened, or because it is done; or
its program has failed, and it waits for nobody."""

FAREWELL_S = 2.0
"""How long a process waits at the end, at most, for the others to have learnt that it is the end."""

MEETINGS = "meetings"
"""The group whose completed calls are meetings."""


class Crew(World):
    """The processes of a job, by their numbers.

    A process keeps its number for as long as it lives. At the start these are the ranks of `comm`.

    Args:
        comm: The communicator of all processes.
        numbers: Their numbers, by rank; the ranks themselves by default.
    """

    notices_tag: ClassVar[int] = NOTICES_TAG

    def __init__(self, comm: MPI.Comm, numbers: Sequence[int] | None = None) -> None:
        super().__init__(comm, [], frozenset())
        self.dead: set[int] = set()
        """Those who were dead at the last meeting."""
        self.needed: set[int] = set()
        """Those whose death calls a meeting: who trains, or all from a meeting until it is clear who does."""
        self._passed_over: set[int] = set()
        """The dead whom nobody needs."""
        self.meetings = 0
        """How many meetings were held."""
        self.watch: Callable[[], None] | None = None
        """What to do while this process waits at a meeting; None outside of meetings."""
        self.over = False
        """Whether the job has ended, well or because the program has failed somewhere."""
        self._giving = threading.Lock()
        self._left: list[object] = []
        """What MPI may still use of communicators that this process has left."""
        self._be_in(comm, range(comm.Get_size()) if numbers is None else numbers)

    def move(self, comm: MPI.Comm, numbers: Sequence[int]) -> None:
        """Go on in another communicator, with the same processes and new ones; `numbers` are theirs, by rank.

        Collective. The one before is kept for ever: messages may be under way there.
        """
        self._left.append((self.comm, self._under_way, self._arriving))
        self._under_way, self._arriving = [], Arriving()
        self.completed.clear()
        self._be_in(comm, numbers)

    def _be_in(self, comm: MPI.Comm, numbers: Sequence[int]) -> None:
        self.comm, self.numbers = comm, list(numbers)
        self.me = self.numbers[comm.Get_rank()]
        self.size = max(len(self.places), 1 + max(self.numbers))
        """How many processes there have ever been."""
        self.places += [Place("a host not known yet", 0)] * (self.size - len(self.places))
        self._ranks = {number: rank for rank, number in enumerate(self.numbers)}
        self._everyone = comm.Get_group()
        self._serial = itertools.count()

    def rank_of(self, process: int) -> int:
        """The rank of a process in the communicator."""
        return self._ranks[process]

    def _post(self, rank: int, message: bytes) -> None:
        super()._post(self.rank_of(rank), message)

    def _take(self, hear: Callable[[int, bytes], None]) -> bool:
        return super()._take(lambda rank, message: hear(self.numbers[rank], message))

    # Channels ---------------------------------------------------------------------------------------

    def new_channel(self) -> int:
        """The number of a channel that no process has used or will use, unless this one passes it on."""
        with self._giving:
            return next(self._serial) * (len(self.numbers) + 1) + self.comm.Get_rank()

    def channel_of_round(self, number: int) -> int:
        """The number of the channel of a round of meetings; the rounds are counted alike on all processes."""
        return number * (len(self.numbers) + 1) + len(self.numbers)

    # Deaths -----------------------------------------------------------------------------------------

    def failed(self) -> set[int]:
        """Those that MPI knows to be dead, and those that died before newcomers were let in."""
        gone = set(range(self.size)) - self._ranks.keys()
        group = self.comm.Get_failed()
        try:
            count = group.Get_size()
            ranks = group.Translate_ranks(range(count), self._everyone) if count else ()
            return gone | {self.numbers[rank] for rank in ranks}
        finally:
            group.Free()

    def living(self) -> list[int]:
        """The other processes, unless MPI knows that they are dead."""
        dead = self.failed()
        return [process for process in range(self.size) if process != self.me and process not in dead]

    def deaths(self) -> set[int]:
        """Those who are needed, and have died since the last meeting."""
        dead = self.failed() - self.dead
        if (others := dead - self.needed) != self._passed_over:
            self._passed_over = others
            self.acknowledge()  # else nobody is heard any more
        return dead & self.needed

    def look_for_deaths(self, transport: Revocable) -> None:
        """Raise `RankFailed` if a process that is needed has died since the last meeting; at one, a member."""
        if self.watch is None:
            dead = self.deaths()
        else:
            self.watch()
            dead = (self.failed() - self.dead) & set(transport.members)
        if dead:
            ranks = [rank for rank, member in enumerate(transport.members) if member in dead]
            raise RankFailed(f"rank {transport.rank} of {transport.size}: {self.obituary(dead)}", ranks)

    def obituary(self, dead: Collection[int]) -> str:
        """Words about those who have died."""
        names = [f"process {process} ({self.places[process]}) died" for process in sorted(dead)]
        return "; ".join(names)

    # Meetings ---------------------------------------------------------------------------------------

    def say(self, kind: str, cause: CommError | None) -> None:
        """Tell all others that this process waits for them: it `MEETS`, because of `cause`, or it `ENDS`."""
        name, reason = (type(cause).__name__, str(cause)) if cause is not None else ("", "")
        self._tell_all(Notice(kind, name, reason[:500], {MEETINGS: self.meetings}))

    def say_failed(self, reason: str) -> None:
        """Tell all others that the program `FAILS` here, unless the job is over, and wait until that has left.

        MPI_Abort alone does not always end the others where MPI is to survive deaths.
        """
        if self.over:
            return
        self.over = True
        self._tell_all(Notice(FAILS, "", reason[:500], {MEETINGS: self.meetings}))
        until = time.monotonic() + FAREWELL_S
        while not all(_has_ended(request) for request, _ in self._under_way) and time.monotonic() < until:
            time.sleep(0.001)

    def _tell_all(self, notice: Notice) -> None:
        self._under_way = [(request, data) for request, data in self._under_way if not _has_ended(request)]
        self.notices.send(self.living(), notice)

    def waits(self, process: int) -> tuple[Notice, float] | None:
        """What a process said last of the next meeting, and when that was heard; None if nothing."""
        for notice, heard_s in reversed(self.notices.from_rank(process)):
            if notice.completed.get(MEETINGS, -1) >= self.meetings:
                return notice, heard_s
        return None

    def calls(self) -> list[tuple[int, Notice]]:
        """Who waits for the next meeting, and what they say."""
        self.notices.listen()
        heard = [(process, self.waits(process)) for process in range(self.size) if process != self.me]
        return [(process, said[0]) for process, said in heard if said is not None]

    def failure(self) -> str:
        """Words about another process on which the program has failed; empty if there is none."""
        for process, notice in self.calls():
            if notice.kind == FAILS:
                return f"process {process} ({self.places[process]}) ended with {notice.reason}"
        return ""

    def look_for_calls(self) -> None:
        """Raise `CommAborted` if another process calls a meeting."""
        if self.watch is not None:
            return
        for process, notice in self.calls():
            if notice.kind == MEETS:
                why = f", after {notice.error}: {notice.reason}" if notice.error else ""
                raise CommAborted(f"process {process} ({self.places[process]}) calls a meeting{why}")

    def acknowledge(self) -> None:
        """Accept all deaths so far: only then MPI takes messages from anybody, and agrees."""
        with suppress(MPI.Exception):
            self.comm.Ack_failed()

    def revoke(self, dead: Collection[int]) -> None:
        """Do nothing: all ranks look for deaths while they wait."""


def _has_ended(request: MPI.Request) -> bool:
    try:
        return request.Test()
    except MPI.Exception:
        return True  # its receiver is dead
