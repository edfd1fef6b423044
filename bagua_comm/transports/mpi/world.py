"""The state that all communicators of one MPI world share: where its ranks run, and their notices."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from typing import ClassVar, NamedTuple, Protocol
from weakref import WeakSet

import numpy as np
from mpi4py import MPI

from ...arrays import Array
from ...flight.requests import request_record
from ...system.processes import state_of
from ..notices import Notice, Notices

_GROUPS_LISTED = 64
"""How many groups a notice lists. Sending a longer message would wait for its receiver."""


class Place(NamedTuple):
    """Host and process of a rank."""

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

    A signal handler may raise after any call, before its result is stored. `extend` and `map` call and store in
    one step, so that no message that MPI has handed out is lost, and no array is freed while MPI writes to it.
    """

    def __init__(self) -> None:
        self._status = MPI.Status()
        self._messages: list[MPI.Message | None] = []
        self._requests: list[MPI.Request] = []
        self.data: Array = np.empty(0, np.uint8)
        self.source = MPI.ANY_SOURCE
        """The rank that sent it."""

    def look(self, comm: MPI.Comm, tag: int) -> bool:
        """Continue to receive; returns whether the notice is complete, in `data`."""
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


class Revocable(Protocol):
    """A communicator of the world that can be revoked."""

    members: list[int]
    """The members' ranks in the world."""
    rank: int
    size: int

    def revoke(self) -> None:
        """Wake the ranks that are in a call, where MPI can do that."""


class World:
    """The state that a transport shares with all that are derived from it by `split` and `dup`.

    Args:
        comm: Carries the notices.
        places: Where each rank runs; empty as long as that is not known.
        sound: The reductions, (dtype, op), that MPI computes as NumPy does, on all ranks.
    """

    notices_tag: ClassVar[int] = 0

    def __init__(self, comm: MPI.Comm, places: list[Place], sound: frozenset[tuple[str, str]]) -> None:
        self.comm, self.places, self.sound = comm, places, sound
        self.quantize_bytes: int | None = None
        """The size in bytes from which arrays are quantized between hosts; None if no link was measured."""
        self.copied_bytes = 0
        """See `peer_memory.largest_copied`; 0 before this rank has measured it."""
        self.notices = Notices(self._post, self._take)
        self.communicators: WeakSet[Revocable] = WeakSet()
        self.completed: dict[str, list[int]] = {}
        """By group, a list of one number: how many collective calls this rank has completed."""
        self.open = 0
        """How many communicators of this rank are open."""
        self.orderly: bool | None = None
        """Whether all ranks left in order; None before this one leaves."""
        self.is_quiet = True
        """Whether no notice can be under way."""
        self._under_way: list[tuple[MPI.Request, Array]] = []
        self._arriving = Arriving()

    def learn(self, places: list[Place], sound: frozenset[tuple[str, str]]) -> None:
        """Set where the ranks run, and which reductions are sound."""
        self.places, self.sound = places, sound

    def learn_links(self, quantize_bytes: int) -> None:
        """Set the size from which arrays are quantized between hosts; the same on all ranks."""
        self.quantize_bytes = quantize_bytes

    def add(self, communicator: Revocable, group: str, completed: list[int]) -> None:
        """Register a communicator, the name of its group, and its count of completed collective calls."""
        self.communicators.add(communicator)
        self.open += 1
        self.completed[group] = completed

    def forget(self) -> None:
        """Record that a communicator was closed."""
        self.open -= 1

    def name(self, member: int) -> str:
        """The host and process of a rank of the world, in parentheses; empty if not known."""
        return f" ({self.places[member]})" if self.places else ""

    def request_record(self, member: int) -> None:
        """Ask a rank of the world to write its flight record, if this process sees it."""
        if self.places and self.places[member].is_visible:
            request_record(self.places[member].process)

    def latest_groups(self) -> list[str]:
        """The latest groups, up to the number that fits into a short message."""
        return list(self.completed)[-_GROUPS_LISTED:]

    def notify(
        self, ranks: Sequence[int], kind: str, error: BaseException | None, groups: Collection[str]
    ) -> None:
        """Notify these ranks of the world that this one leaves, or has aborted some groups."""
        name = type(error).__name__ if error is not None else ""
        reason = str(error) if error is not None else ""
        completed = {group: self.completed[group][0] if group in self.completed else 0 for group in groups}
        self.notices.send(ranks, Notice(kind, name, reason[:500], completed))

    def note_failure(self) -> None:
        """Record that a notice of a failure is sent, and may be under way for long."""
        self.is_quiet = False

    def end(self, *, orderly: bool, quiet: bool | None = None) -> None:
        """Record that this rank has left, and whether all have left in order and no notice is under way."""
        self.orderly = orderly
        if quiet is not None:
            self.is_quiet = quiet

    def _post(self, rank: int, message: bytes) -> None:
        data = np.frombuffer(message, np.uint8)
        with suppress(MPI.Exception):  # a rank that has died needs no notice
            # Kept as long as this world: nobody waits until it is received.
            requests = map(self.comm.Isend, ([data, MPI.BYTE],), (rank,), (self.notices_tag,))
            self._under_way.extend(zip(requests, (data,), strict=True))  # as in `Arriving`

    def _take(self, receive: Callable[[int, bytes], None]) -> bool:
        try:
            if not self._arriving.look(self.comm, self.notices_tag):
                return False
        except MPI.Exception:
            self._arriving = Arriving()
            return False  # a rank has died: the calls that wait for it will raise
        receive(self._arriving.source, self._arriving.data.tobytes())
        self._arriving = Arriving()
        return True

    def revoke(self, dead: Collection[int]) -> None:
        """Wake all ranks that are in a call with a dead one; `dead` are ranks of this world."""
        for communicator in list(self.communicators):
            if not set(dead).isdisjoint(communicator.members):
                communicator.revoke()
        with suppress(MPI.Exception, NotImplementedError):
            self.comm.Revoke()
