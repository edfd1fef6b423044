"""A hub whose messages arrive after delays that are drawn from the seed of a simulation."""

from __future__ import annotations

from random import Random

from ...transports.local import Hub, Mail
from .scheduler import running

SHORT_S, LONG_S = 0.5e-3, 0.05
"""The longest delays of messages, in virtual seconds."""


class Delays:
    """Draws the delays of messages: no seed delays all of them, and some seeds delay none.

    Args:
        random: The source of random numbers.
    """

    def __init__(self, random: Random) -> None:
        self._random = random
        self._share = random.choice((0.0, 0.1, 0.5))
        self._longest_s = random.choice((SHORT_S, LONG_S))

    def __call__(self, source: int, dest: int) -> float:
        """The delay of the next message from `source` to `dest`, in seconds."""
        if not self._share or source == dest or self._random.random() >= self._share:
            return 0.0
        return self._random.random() * self._longest_s


class DelayingHub(Hub):
    """Delivers each message after a delay. The messages from one rank to another arrive in their order."""

    def __init__(self, size: int) -> None:
        super().__init__(size)
        self._arrivals: dict[tuple[int, int], float] = {}
        """By (source, dest): when the latest message arrives."""

    def post(self, source: int, dest: int, tag: int, message: Mail) -> None:
        """See `Hub.post`."""
        scheduler = running()
        if scheduler is None:
            super().post(source, dest, tag, message)
            return
        due_s = scheduler.now_s + scheduler.delay_s(source, dest)
        due_s = max(due_s, self._arrivals.get((source, dest), 0.0))
        if due_s <= scheduler.now_s:
            super().post(source, dest, tag, message)
            return
        self._arrivals[source, dest] = due_s

        def arrive() -> None:
            Hub.post(self, source, dest, tag, message)
            self.changed.notify_all()

        scheduler.call_at(due_s, arrive)
