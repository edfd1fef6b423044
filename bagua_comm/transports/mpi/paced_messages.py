"""Messages of a call under a credit window: no rank sends further ahead than it has received.

Between hosts, a rank that sends to all others at once shares its link among them, and chance decides how many
ranks send to one receiver: some links have a queue while others are idle. Here each rank sends to the next rank
first, then to the one after that, and so on. It receives in the same order: from the rank before, then from the
one before that. Message n is sent once all but a few of n messages have arrived. So all ranks advance in step,
about one rank sends to each receiver at a time, and the queues of the network stay short.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence

import numpy as np
from mpi4py import MPI

from ...arrays import Array
from ..flow import COLLECTIVE, Message


class PacedMessages:
    """The messages of one call on one rank.

    Args:
        comm: The communicator.
        ahead: How many more messages a rank may have sent than received; None to send all at once.
        sleeping_wait: Whether waits for the messages sleep at once, instead of polling first.
    """

    def __init__(self, comm: MPI.Comm, ahead: int | None, *, sleeping_wait: bool = False) -> None:
        self._comm, self._ahead, self.sleeping_wait = comm, ahead, sleeping_wait
        self._queue: deque[tuple[int, Array, int]] = deque()
        """Messages not yet sent: the peer, the bytes, and how many messages must have arrived before."""
        self._sends: deque[MPI.Request] = deque()
        self._recvs: deque[MPI.Request] = deque()
        self._sent = self._received = 0
        """How many messages have left, and have arrived."""

    def add(self, sends: Sequence[Message], recvs: Sequence[Message]) -> Callable[[], bool]:
        """Begin an exchange; returns a function that advances all messages and tests if this exchange has ended.

        The receives begin at once: first from the rank before this one, which sends to it first.
        """
        before = self._received + len(self._recvs)
        for peer, out in reversed(recvs):
            self._recvs.append(self._comm.Irecv([out.view(np.uint8), MPI.BYTE], peer, COLLECTIVE))
        for k, (peer, x) in enumerate(sends):
            first = 0 if self._ahead is None else before + min(k, len(recvs)) - self._ahead + 1
            self._queue.append((peer, x.view(np.uint8), first))
        self.advance()
        received = self._received + len(self._recvs)
        sent = self._sent + len(self._sends) + len(self._queue)

        def ended() -> bool:
            self.advance()
            return self._received >= received and self._sent >= sent

        return ended

    def advance(self) -> None:
        """Count the messages that have arrived, send those that are due, and count those that have left."""
        while self._recvs and self._recvs[0].Test():
            self._recvs.popleft()
            self._received += 1
        while self._queue and self._queue[0][2] <= self._received:
            peer, x, _ = self._queue.popleft()
            self._sends.append(self._comm.Isend([x, MPI.BYTE], peer, COLLECTIVE))
        while self._sends and self._sends[0].Test():
            self._sends.popleft()
            self._sent += 1

    def is_idle(self) -> bool:
        """Whether no message is under way."""
        return not (self._recvs or self._sends or self._queue)
