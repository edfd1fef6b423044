"""Notices that ranks send each other beside their calls: that they have left, or have aborted.

A rank that waits for long listens to the notices. So it learns long before its own timeout that a peer will not
join a call. After a timeout, the rank that has sent no notice is the one for which all wait.

Each group of ranks (a communicator, one split off, a duplicate) has a name, the same on all its ranks. A rank
counts the collective calls that it has completed in each group, and its notices contain these counts. So a
listener can tell whether the call that it is in still needs that rank.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass

from ..errors import CommAborted, CommError, CommTimeout

LEFT, ABORTED = "left", "gave up"


@dataclass(frozen=True)
class Notice:
    """A message from one rank to the others about its end in a world or in some groups."""

    kind: str
    """`LEFT`: the rank makes no more calls in any group. `ABORTED`: none in the groups of `completed`."""
    error: str
    """The class of the error that the rank raises; empty if it left without an error."""
    reason: str
    completed: dict[str, int]
    """How many collective calls the rank has completed, by group."""

    def ends(self, group: str, call: int) -> bool:
        """Whether the rank takes no part in collective call number `call` of `group`, counted from 1."""
        completed = self.completed.get(group)
        return self.kind == LEFT if completed is None else completed < call


def aborted(who: str, error: str, reason: str) -> CommError:
    """The error to raise because another rank has aborted, after an error of class `error`."""
    kind = CommTimeout if error == CommTimeout.__name__ else CommAborted
    return kind(f"{who} aborted after {error}: {reason}")


def different_calls(calls: Sequence[str]) -> str:
    """The message of the error to raise because ranks made different calls: the call of each, by rank."""
    other = next((rank for rank, call in enumerate(calls) if call != calls[0]), 0)
    return f"ranks made different calls: rank 0 called {calls[0]}, but rank {other} called {calls[other]}"


class Notices:
    """The notices between this rank and the others of its world. Any thread may use them.

    Args:
        post: Sends bytes to a rank without waiting until they are received.
        take: Calls its argument with the sender and the bytes of the next message that has arrived, and then
            drops the message; returns whether there was one. After an exception it may deliver the message again.
    """

    def __init__(
        self, post: Callable[[int, bytes], None], take: Callable[[Callable[[int, bytes], None]], bool]
    ) -> None:
        self._post, self._take = post, take
        self._listening = threading.Lock()
        self._received: dict[int, list[tuple[Notice, float]]] = {}

    def send(self, ranks: Iterable[int], notice: Notice) -> None:
        """Send a notice to these ranks."""
        message = json.dumps(asdict(notice)).encode()
        for rank in ranks:
            self._post(rank, message)

    def listen(self) -> None:
        """Receive all notices that have arrived."""
        if self._listening.locked():
            return  # another thread is listening
        with self._listening:
            while self._take(self._receive):
                pass

    def _receive(self, rank: int, message: bytes) -> None:
        notice = Notice(**json.loads(message))
        received, now = self._received.setdefault(rank, []), (notice, time.monotonic())
        if received and received[-1][0] == notice:  # it is repeated
            received[-1] = now
        else:
            received.append(now)

    def from_rank(self, rank: int) -> list[tuple[Notice, float]]:
        """The notices from this rank so far, and when each arrived last, by `time.monotonic`."""
        return list(self._received.get(rank, ()))
