"""What ranks tell each other beside their calls: that they have left, or have given up.

A rank that waits for long listens, and so learns that what it waits for will not come, long before its time is
over. The rank that still says nothing then is the one that all wait for.

Each group of ranks (a communicator, one split off, a duplicate) has a name, the same on all its ranks. A rank
counts the collective calls that it has completed in each, so a listener can tell whether it still needs it.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass

from ..errors import CommAborted, CommError, CommTimeout

LEFT, GAVE_UP = "left", "gave up"


@dataclass(frozen=True)
class Notice:
    """What one rank says."""

    kind: str
    """`LEFT`: it makes no more calls in any group. `GAVE_UP`: none in the groups of `completed`."""
    error: str
    """The kind of error that it raises; empty if it left without one."""
    reason: str
    completed: dict[str, int]
    """How many collective calls it has completed, by group."""

    def ends(self, group: str, call: int) -> bool:
        """Whether it takes no part in collective call number `call` of `group`; the first has number 1."""
        completed = self.completed.get(group)
        return self.kind == LEFT if completed is None else completed < call


def given_up(who: str, error: str, reason: str) -> CommError:
    """What to raise where a rank has given up, by an error of this kind."""
    kind = CommTimeout if error == CommTimeout.__name__ else CommAborted
    return kind(f"{who} gave up, by {error}: {reason}")


class Notices:
    """The notices of all ranks of a world, of which this is one; any thread may ask.

    Args:
        post: Sends bytes to a rank, and does not wait until they are received.
        take: The next message that has arrived, with the rank that sent it; None if there is none.
    """

    def __init__(self, post: Callable[[int, bytes], None], take: Callable[[], tuple[int, bytes] | None]) -> None:
        self._post, self._take = post, take
        self._listening = threading.Lock()
        self._heard: dict[int, list[tuple[Notice, float]]] = {}

    def tell(self, ranks: Iterable[int], notice: Notice) -> None:
        """Send a notice to these ranks."""
        message = json.dumps(asdict(notice)).encode()
        for rank in ranks:
            self._post(rank, message)

    def listen(self) -> None:
        """Take what has arrived."""
        if not self._listening.acquire(blocking=False):
            return  # another thread does
        try:
            while (arrived := self._take()) is not None:
                rank, message = arrived
                notice = Notice(**json.loads(message))
                self._heard.setdefault(rank, []).append((notice, time.monotonic()))
        finally:
            self._listening.release()

    def from_rank(self, rank: int) -> list[tuple[Notice, float]]:
        """What this rank has said so far, and when that was heard, by `time.monotonic`."""
        return list(self._heard.get(rank, ()))
