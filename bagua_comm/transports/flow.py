"""Messages, their tags, and the exchanges of one collective call."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol, TypeAlias

from ..arrays import Array

Message: TypeAlias = tuple[int, Array]
"""A peer, and the contiguous array sent to it or received from it."""

Wait: TypeAlias = Callable[[], None]
"""Returns when an exchange has ended."""

Rows: TypeAlias = "Sequence[Array] | Array"
"""One array for each rank: a list of arrays, or the rows of a contiguous array, (p, m)."""

Move: TypeAlias = Callable[[Array, Array], object]
"""Moves the bytes of a call: takes the array of this rank, and the array to fill."""

POINT_TO_POINT, COLLECTIVE, LABELLED = range(3)
"""Kinds of messages, which match only within a kind: arrays without labels, arrays of collectives, and labelled
messages, of which each receive chooses those of a tag."""


FEW_RANKS = 8
"""Among more ranks than this, small arrays are gathered in log2(p) rounds; among fewer, each rank sends its array
to all others at once, which takes less time."""


class Exchanger(Protocol):
    """The part of a transport that a `Flow` and most derived collectives use."""

    rank: int
    size: int
    few_ranks: int
    at_once_bytes: int

    def others(self) -> list[int]:
        """See `Transport.others`."""

    def exchange(self, sends: Sequence[Message], recvs: Sequence[Message], *, tag: int = POINT_TO_POINT) -> None:
        """See `Transport.exchange`."""


class RowExchanger(Exchanger, Protocol):
    """An `Exchanger` with two collectives of its own."""

    def alltoall(self, x: Array, out: Array) -> None:
        """See `Transport.alltoall`."""

    def allgather(self, x: Array, out: Array) -> None:
        """See `Transport.allgather`."""


class Flow:
    """The exchanges of one collective call on which the ranks have agreed; made by `Transport.agree_on_call`.

    Exchanges match in the order in which they begin, and are waited for in that order. The arrays of an exchange
    may not be touched until its `Wait` has returned. Messages have the length that their receivers expect.
    """

    def __init__(self, transport: Exchanger, piece_bytes: int | None) -> None:
        self.transport = transport
        self.rank, self.size, self.others = transport.rank, transport.size, transport.others()
        self.piece_bytes = piece_bytes
        """Bytes to send to a peer at a time; None to send all at once."""

    def begin(self, sends: Sequence[Message], recvs: Sequence[Message]) -> Wait:
        """Begin an exchange. This default blocks until the exchange has ended."""
        self.transport.exchange(sends, recvs, tag=COLLECTIVE)
        return ended

    def alltoall(self, rows: Rows, into: Rows) -> Wait:
        """Send rows[r] to rank r, and receive into[r] from rank r.

        Where rows[rank] and into[rank] are one object, this rank's own row stays where it is.
        """
        if not isinstance(rows, list):
            self.alltoall_at_once(rows, into)
            return ended
        wait = self.begin(self.messages(rows), self.messages(into))
        mine, own = rows[self.rank], into[self.rank]
        if mine is not own:
            own[...] = mine
        return wait

    def allgather(self, mine: Array, into: Rows) -> Wait:
        """Send `mine`, which is into[rank], to all ranks; receive into[r] from rank r."""
        if not isinstance(into, list):
            self.allgather_at_once(mine, into)
            return ended
        return self.begin(self.messages([mine] * self.size), self.messages(into))

    def alltoall_at_once(self, table: Array, into: Array) -> None:
        """`alltoall` of a contiguous table, (p, m)."""
        self.alltoall(list(table), list(into))()

    def allgather_at_once(self, mine: Array, into: Array) -> None:
        """`allgather` into a contiguous table, (p, m)."""
        self.allgather(mine, list(into))()

    def messages(self, rows: Rows) -> list[Message]:
        """A message for each of the other ranks, the next rank's first, so that not all send to rank 0 first."""
        return [*zip(self.others, map(rows.__getitem__, self.others), strict=True)]


class TransportFlow(Flow):
    """A flow that moves contiguous tables by the transport's own calls."""

    transport: RowExchanger

    def __init__(self, transport: RowExchanger, piece_bytes: int | None) -> None:
        super().__init__(transport, piece_bytes)

    def alltoall_at_once(self, table: Array, into: Array) -> None:
        """See `Flow.alltoall_at_once`."""
        self.transport.alltoall(table, into)

    def allgather_at_once(self, mine: Array, into: Array) -> None:
        """See `Flow.allgather_at_once`."""
        self.transport.allgather(mine, into)


def ended() -> None:
    """The `Wait` of an exchange that has ended: does nothing."""
