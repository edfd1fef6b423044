"""Agreed plans: the collective calls that all ranks of a transport have agreed to make, again and again.

A training step makes the same calls each time. When the calls of a rank have repeated, it offers their period as
the ranks compare its latest call. If all have made the same offer, the plan is in force on all of them from the
next call on. A call that follows the plan need not be compared: a rank whose call differs knows it before it has
sent anything, compares it as without a plan, and so notifies those that follow.

A plan has only what must be equal on all ranks: the texts of calls, with dtype, size, op and root. Each
comparison confirms it. If one rank has ended it, it then ends on all.
"""

from __future__ import annotations

import hashlib
from collections import deque
from collections.abc import Iterable

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view

MAX_CALLS = 256
"""The longest plan: a training step of many buckets has about as many calls."""

_MAX_KNOWN = 4
"""How many plans are kept for a program that returns to them, such as those of training and evaluation."""

_MAX_UNREAD = 32
"""How many calls at most are counted one after the other."""


class Plan:
    """The plan of one rank of a transport, and the calls from which it learns one.

    >>> ranks = [Plan(), Plan()]
    >>> for call in "allreduce A", "allreduce B", "allreduce A", "allreduce B":
    ...     followed = [plan.note(call) for plan in ranks]
    ...     offers = [plan.offer() for plan in ranks]  # which the ranks exchange as they compare the call
    ...     for plan in ranks:
    ...         plan.settle(offers)
    >>> [plan.note("allreduce A") for plan in ranks], [plan.note("barrier") for plan in ranks]
    ([True, True], [False, False])
    """

    def __init__(self) -> None:
        self.calls: tuple[str, ...] = ()
        """What is in force, or offered; empty if nothing is."""
        self.cursor = 0
        """Index of the next call in `calls`."""
        self.in_force = False
        self.noted = 0
        """How many calls were noted."""
        self._digest = 0
        self._first = ""  # call since the last plan was left, which the next one is remembered by
        self._known: dict[str, tuple[str, ...]] = {}
        self._latest: deque[str] = deque(maxlen=2 * MAX_CALLS)
        self._unread = 0
        """How many of them are not counted below, since they have followed a plan."""
        self._hashes, self._start = np.zeros(2 * MAX_CALLS, np.int64), MAX_CALLS
        """Those of the latest calls, the latest first, from `_start` on."""
        self._runs = np.zeros(MAX_CALLS, np.int64)
        """For each distance, how many of the latest calls in a row equal the call at this distance before."""

    def note(self, call: str) -> bool:
        """Note the next call of this rank; return whether it follows the plan in force, which else has ended."""
        self._first = self._first or call
        self._latest.append(call)
        self._unread += 1
        self.noted += 1
        if self.calls and self.calls[self.cursor] == call:
            self.cursor = (self.cursor + 1) % len(self.calls)
            return self.in_force
        has_left, period = self.in_force, self._period()
        self.end()
        if has_left:
            self._first = call
        if has_left and call in self._known:
            self._propose(self._known[call], 1)
        elif period:
            self._propose(self.latest(period), 0)
        return False

    def correct(self, call: str) -> None:
        """Replace the latest call by the text that it has on all ranks."""
        if self._latest[-1] != call:
            self._latest[-1], self._unread = call, 2 * MAX_CALLS

    def expects(self, call: str) -> bool:
        """Whether the next call follows the plan in force if it is this one."""
        return self.in_force and self.calls[self.cursor] == call

    def offer(self) -> int:
        """Return a number that is equal on ranks with the same plan and the same next call; 0 without a plan."""
        return (self._digest + self.cursor) >> 1 or 1 if self.calls else 0

    def settle(self, offers: Iterable[int]) -> None:
        """Put the plan in force if all ranks have made this rank's offer; else end it.

        Args:
            offers: Those of the other ranks when the last call was compared.
        """
        mine = self.offer()
        if not mine or any(each != mine for each in offers):
            self.end()
        elif not self.in_force:
            self.in_force = True
            if self._first in self.calls:
                start = self.calls.index(self._first)
                self._known[self._first] = self.calls[start:] + self.calls[:start]
                if len(self._known) > _MAX_KNOWN:
                    del self._known[next(iter(self._known))]

    def latest(self, count: int) -> tuple[str, ...]:
        """Return the latest `count` calls, or those of them that are known."""
        return tuple(self._latest)[-count:] if count else ()

    def adopt(self, calls: tuple[str, ...]) -> None:
        """Put a plan of these calls in force, which all ranks have compared; its first call is the next one.

        Collective.
        """
        self._propose(calls, 0)
        self.settle(())

    def end(self) -> None:
        """Forget the plan: the next call is compared, and a plan may be learned again.

        All ranks do so between the same two calls, or calls have failed. If one did so alone, it would begin its
        next call by a comparison, and those that follow the plan would compare theirs late. But the comparison of
        some calls carries their arrays, such as that of a gather of small ones, and ranks that compare late have
        sent none: they would raise, though all make the same call.
        """
        self.calls, self.cursor, self.in_force = (), 0, False

    def _propose(self, calls: tuple[str, ...], cursor: int) -> None:
        text = "\n".join(calls).encode()
        self._digest = int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "little")
        self.calls, self.cursor = calls, cursor % len(calls)

    def _period(self) -> int:
        """The largest k such that the latest k calls equal the k before them; 0 if there is none."""
        if self._unread > _MAX_UNREAD:
            self._count_again()
        for call in self.latest(self._unread):
            self._runs += 1
            self._runs *= self._hashes[self._start : self._start + MAX_CALLS] == hash(call)
            if self._start == 0:
                self._start = MAX_CALLS
                self._hashes[MAX_CALLS:] = self._hashes[:MAX_CALLS]
            self._start -= 1
            self._hashes[self._start] = hash(call)
        self._unread = 0
        found = np.flatnonzero(self._runs >= _DISTANCES)
        return int(found[-1]) + 1 if found.size else 0

    def _count_again(self) -> None:
        """Count all of the latest calls at once: after a long plan, one after the other would take 10 ms."""
        known = [hash(call) for call in reversed(self._latest)]
        self._hashes[...], self._start, self._unread = 0, 0, 0
        self._hashes[: len(known)] = known
        differ = sliding_window_view(self._hashes, MAX_CALLS)[1:] != self._hashes[:MAX_CALLS]
        self._runs[...] = np.where(differ.any(1), differ.argmax(1), MAX_CALLS)


_DISTANCES = np.arange(1, MAX_CALLS + 1)
