"""What the communicators of one world share: where its ranks run, and what they say beside their calls."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, ClassVar, NamedTuple
from weakref import WeakSet

import numpy as np
from mpi4py import MPI

from ...arrays import Array
from ...processes import state_of
from ..notices import Notice, Notices

if TYPE_CHECKING:
    from .transport import MPITransport

_GROUPS_TOLD = 64
"""How many groups a notice lists. Sending a longer message would wait for its receiver."""


class Place(NamedTuple):
    """Where a rank runs."""

    host: str
    process: int
    is_visible: bool = False
    """Whether this process sees it by that number; see `processes.ProcessId`."""

    def __str__(self) -> str:
        state = state_of(self.process) if self.is_visible else ""
        note = {"stopped": ", which is stopped", "ended": ", which has ended"}.get(state, "")
        return f"on {self.host}, process {self.process}{note}"


def first_beside(comm: MPI.Comm) -> int:
    """The first rank of `comm` that shares memory with this one, as MPI itself sees it.

    Collective. Blocks in MPI.
    """
    here = comm.Split_type(MPI.COMM_TYPE_SHARED)
    together, everyone = here.Get_group(), comm.Get_group()
    (first,) = together.Translate_ranks([0], everyone)
    for each in (together, everyone, here):
        each.Free()
    return int(first)


class Arriving:
    """A notice that is being received.

    A signal handler may raise after any call, before its result is kept. `extend` and `map` call and keep it in
    one, so that no message is lost which MPI has given out, and no array freed into which it writes.
    """

    def __init__(self) -> None:
        self._status = MPI.Status()
        self._messages: list[MPI.Message | None] = []
        self._requests: list[MPI.Request] = []
        self.data: Array = np.empty(0, np.uint8)
        self.source = MPI.ANY_SOURCE
        """Who sent it."""

    def look(self, comm: MPI.Comm, tag: int) -> bool:
        """Go on receiving; returns whether it is there, in `data`."""
        if not self._messages:
            self._messages.extend(map(comm.Improbe, (MPI.ANY_SOURCE,), (tag,), (self._status,)))
        message = self._messages[0]
        if message is None:
            self._messages.clear()
            return False
        if not self._requests:
            self.source = self._status.Get_source()
            self.data = np.empty(self._status.Get_count(MPI.BYTE), np.uint8)
            self._requests.extend(map(message.Irecv, ([self.data, MPI.BYTE],)))
        return self._requests[0].Test()


class World:
    """What a transport shares with those that are derived from it by `split` and `dup`."""

    notices_tag: ClassVar[int] = 0

    def __init__(self, comm: MPI.Comm, places: list[Place], sound: frozenset[tuple[str, str]]) -> None:
        self.comm, self.places = comm, places
        self.sound = sound
        """The reductions, (dtype, op), that MPI computes as NumPy does, on all ranks."""
        self.notices = Notices(self._post, self._take)
        self.transports: WeakSet[MPITransport] = WeakSet()
        self.completed: dict[str, list[int]] = {}
        """By group, a list of one number: how many collective calls this rank has completed."""
        self.open = 0
        """How many communicators of this rank were made, and not closed."""
        self.orderly: bool | None = None
        """Whether all ranks left in order; None before this one leaves."""
        self.is_quiet = True
        """Whether no notice can be under way."""
        self._under_way: list[tuple[MPI.Request, Array]] = []
        self._arriving = Arriving()

    def latest_groups(self) -> list[str]:
        """The groups that were made last, as many as fit into a short message."""
        return list(self.completed)[-_GROUPS_TOLD:]

    def tell(self, ranks: Sequence[int], kind: str, error: BaseException | None, groups: Collection[str]) -> None:
        """Tell these ranks of the world that this one leaves, or gives up the calls of some groups."""
        name = type(error).__name__ if error is not None else ""
        reason = str(error) if error is not None else ""
        completed = {group: self.completed[group][0] if group in self.completed else 0 for group in groups}
        notice = Notice(kind, name, reason[:500], completed)
        self.notices.tell(ranks, notice)

    def _post(self, rank: int, message: bytes) -> None:
        data = np.frombuffer(message, np.uint8)
        with suppress(MPI.Exception):  # a rank that has died needs no notice
            # Kept as long as this world: nobody waits until it is received.
            requests = map(self.comm.Isend, ([data, MPI.BYTE],), (rank,), (self.notices_tag,))
            self._under_way.extend(zip(requests, (data,), strict=True))  # as in `Arriving`

    def _take(self, hear: Callable[[int, bytes], None]) -> bool:
        try:
            if not self._arriving.look(self.comm, self.notices_tag):
                return False
        except MPI.Exception:
            self._arriving = Arriving()
            return False  # a rank has died: the calls that wait for it will say so
        hear(self._arriving.source, self._arriving.data.tobytes())
        self._arriving = Arriving()
        return True

    def revoke(self, dead: Collection[int]) -> None:
        """Wake all ranks that are in a call with a dead one; `dead` are ranks of this world."""
        for transport in list(self.transports):
            if not set(dead).isdisjoint(transport.members):
                transport.revoke()
        with suppress(MPI.Exception, NotImplementedError):
            self.comm.Revoke()
