"""Whose turn it is: one thread at a time makes calls on the transports of a communicator."""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Callable, Sequence
from threading import get_ident
from typing import TypeVar

from ..errors import CommError
from ..transports.base import Transport

R = TypeVar("R")

POINT_TO_POINT = frozenset({"send", "recv", "sendrecv", "exchange", "send_object", "recv_object"})
"""Calls between two ranks, which the other ranks do not make."""

forks = 0
"""How many forks lie between the process that imported this module and this one."""


def _count_fork() -> None:
    global forks
    forks += 1


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_count_fork)


class Turn:
    """Lets one thread at a time make calls on the transports of a communicator, and knows the latest call.

    A signal handler may raise an exception, such as KeyboardInterrupt, wherever Python calls a function or begins
    a loop anew, and a lock that was just acquired would stay locked. So there are no calls where a thread begins
    its turn, and where it ends it:

        turn.check(name)
        me = get_ident()
        if turn.owner[0] != me:                           # names this thread, unless another one is named
            raise turn.refusal(name)
        outermost, turn.is_free = turn.is_free, False     # a call within a call has begun and ends nothing
        try:
            if outermost:
                turn.begin(name, describe, timeout_s)
            ...
        finally:
            if outermost:
                turn.is_free = True
                del turn.owner[0]
    """

    def __init__(self, transports: Sequence[Transport], *, checked: bool) -> None:
        self._transports, self._checked = transports, checked
        self._process, self.forks = os.getpid(), forks
        self.owner: defaultdict[int, int] = defaultdict(get_ident)
        """Under 0: the number of the thread that is in a call. To look is to enter it, if there is none."""
        self.is_free = True
        """Whether no thread is in a call; the owner writes it."""
        self._is_open = False
        """Whether the transports have begun a call and not ended it."""
        self._rank = transports[0].rank
        self.closed = False
        self.calls = self.collectives = 0
        """How many calls have begun, and how many of them were collective."""
        self.last_call = "none"
        self.limit_s: float | None = None
        """How long the call in progress may wait, if it has a limit of its own."""

    @property
    def is_of_this_process(self) -> bool:
        """Whether the communicator was made in this process, and not in a parent before a fork."""
        return self.forks == forks

    def count(self, collective: bool) -> int:
        """The number of a call that begins now, among the collective ones or among the others."""
        self.calls += 1
        if collective:
            self.collectives += 1
            return self.collectives
        return self.calls - self.collectives

    def check(self, name: str) -> None:
        """Raise `CommError` if the communicator is closed, or belongs to a parent process."""
        if self.closed or self.forks != forks:
            raise CommError(f"{name}: {self._why_unusable()}")

    def refusal(self, name: str) -> CommError:
        """The error to raise where another thread is in a call."""
        return CommError(
            f"{name}: another thread is in a call of this communicator; give each thread its own, made by "
            "dup() on all ranks, or submit the call to a lane()"
        )

    def begin(self, name: str, describe: Callable[[], str], timeout_s: float | None = None) -> None:
        """Begin a call that is within no other one."""
        if self._is_open:
            self.end()  # an exception from a signal handler has kept the latest call from it
        self._is_open = True
        collective = name not in POINT_TO_POINT
        compared = None if self._checked else describe  # checked calls are compared before, in full
        for transport in self._transports:
            transport.begin_call(name, collective=collective, describe=compared)
        if timeout_s is not None:
            self._limit(timeout_s)

    def end(self, *, made: bool = True) -> None:
        """End what `begin` began; unless `made`, before anything was moved."""
        for transport in self._transports:
            if made:
                transport.end_call()
            else:
                transport.cancel_call()
        if self.limit_s is not None:
            self._limit(None)
        self._is_open = False

    def run(
        self, name: str, describe: Callable[[], str], body: Callable[[], R], timeout_s: float | None = None
    ) -> R:
        """Make the calls of `body` as one: only this one's `timeout_s` counts. Returns what `body` returns.

        Raises:
            CommError: Another thread is in a call, the communicator is closed, or it belongs to a parent process.
        """
        self.check(name)
        calls, me = self.calls, get_ident()
        if self.owner[0] != me:
            raise self.refusal(name)
        outermost, self.is_free = self.is_free, False
        try:
            if outermost:
                self.begin(name, describe, timeout_s)
            try:
                return body()
            finally:
                if outermost:
                    self.end(made=self.calls > calls)
        finally:
            if outermost:
                self.is_free = True
                del self.owner[0]

    def _limit(self, timeout_s: float | None) -> None:
        self.limit_s = timeout_s
        for transport in self._transports:
            transport.limit_call(timeout_s)

    def _why_unusable(self) -> str:
        if self.is_of_this_process:
            return "this communicator is closed"
        return (
            f"this process was forked off process {self._process}, rank {self._rank}; a child cannot use its "
            "parent's communicator: start ranks with mpirun, and fork children only if they do not communicate"
        )
