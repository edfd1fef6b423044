"""What the communicators of one world share: where its ranks run, and what they say beside their calls."""

from __future__ import annotations

from collections.abc import Collection, Sequence
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
        self._arriving: tuple[MPI.Request, Array, int] | None = None
        """A notice that is being received, and who sent it."""

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
            self._under_way.append((self.comm.Isend([data, MPI.BYTE], rank, self.notices_tag), data))

    def _take(self) -> tuple[int, bytes] | None:
        try:
            if self._arriving is None:
                status = MPI.Status()
                message = self.comm.Improbe(MPI.ANY_SOURCE, self.notices_tag, status)
                if message is None:
                    return None
                data = np.empty(status.Get_count(MPI.BYTE), np.uint8)
                self._arriving = message.Irecv([data, MPI.BYTE]), data, status.Get_source()
            request, data, source = self._arriving
            if not request.Test():
                return None
        except MPI.Exception:
            self._arriving = None
            return None  # a rank has died: the calls that wait for it will say so
        self._arriving = None
        return source, data.tobytes()

    def revoke(self, dead: Collection[int]) -> None:
        """Wake all ranks that are in a call with a dead one; `dead` are ranks of this world."""
        for transport in list(self.transports):
            if not set(dead).isdisjoint(transport.members):
                transport.revoke()
        with suppress(MPI.Exception, NotImplementedError):
            self.comm.Revoke()
