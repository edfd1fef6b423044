"""The guard of calls: one thread at a time, in the process that made the communicator, within a time limit."""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Callable, Sequence
from threading import get_ident
from typing import TypeVar

from ..bucket import Bucket
from ..errors import CommError
from ..transports.base import Transport

R = TypeVar("R")

POINT_TO_POINT = frozenset({"send", "recv", "sendrecv", "exchange", "send_object", "recv_object"})
"""Names of the calls between two ranks, which other ranks do not make."""

forks = 0
"""Number of forks between the process that imported this module and this one."""


def _count_fork() -> None:
    global forks
    forks += 1


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_count_fork)


class CallGuard:
    """Lets one thread at a time make calls on the transports of a communicator, and numbers the calls.

    Python runs signal handlers, which may raise exceptions such as KeyboardInterrupt, where a function is called
    and where a loop starts its next round. An exception just after a lock was acquired would leave it locked. So
    the statements that acquire and release the guard call no function, and stand in the caller's own body:

        guard.check(name)
        me = get_ident()
        if guard.owner[0] != me:                            # sets the owner to this thread if there is none
            raise guard.refusal(name)
        outermost, guard.is_free = guard.is_free, False     # a nested call neither enters nor leaves
        try:
            if outermost:
                guard.enter(name, describe, timeout_s)
            ...
            if outermost:
                guard.leave()
        finally:
            if outermost:
                guard.is_free = True
                del guard.owner[0]
    """

    def __init__(self, transports: Sequence[Transport], *, checked: bool) -> None:
        self._transports, self._checked = transports, checked
        self._process, self.forks = os.getpid(), forks
        self.owner: defaultdict[int, int] = defaultdict(get_ident)
        """Under key 0, the id of the thread that is in a call; a lookup stores the caller's if there is none."""
        self.is_free = True
        """Whether no thread is in a call. Only the owner writes it."""
        self._entered = False
        """Whether the transports have begun a call and not ended it yet."""
        self._rank = transports[0].rank
        self.closed = False
        self.calls = self.collectives = 0
        """Number of calls that have begun, and of the collective ones among them."""
        self.limit_s: float | None = None
        """The time limit of the call in progress, in seconds, if it was given one."""

    @property
    def is_of_this_process(self) -> bool:
        """Whether the communicator was made in this process, and not in a parent before a fork."""
        return self.forks == forks

    def close(self) -> None:
        """Refuse all further calls."""
        self.closed = True

    def count(self, collective: bool) -> int:
        """Count a call that begins; return its number among the collective calls or among the other ones."""
        self.calls += 1
        if collective:
            self.collectives += 1
            return self.collectives
        return self.calls - self.collectives

    def check(self, name: str) -> None:
        """Raise `CommError` if the communicator is closed or belongs to a parent process."""
        if self.closed or self.forks != forks:
            raise CommError(f"{name}: {self._why_unusable()}")

    def refusal(self, name: str) -> CommError:
        """Return the error to raise if another thread is in a call."""
        return CommError(
            f"{name}: another thread is in a call of this communicator; give each thread its own, made by "
            "dup() on all ranks, or submit the call to a lane()"
        )

    def enter(self, name: str, describe: Callable[[], str], timeout_s: float | None = None) -> None:
        """Begin an outermost call on all transports."""
        if self._entered:
            self.leave()  # a signal handler's exception kept the previous call from leaving
        self._entered = True
        collective = name not in POINT_TO_POINT
        # `connect(check=True)` compares the whole call before it moves a byte.
        compared = None if self._checked else describe
        for transport in self._transports:
            transport.begin_call(name, collective=collective, describe=compared)
        if timeout_s is not None:
            self._limit(timeout_s)

    def leave(self, *, made: bool = True) -> None:
        """End the call on all transports; not `made` means that it failed before it moved a byte."""
        for transport in self._transports:
            if made:
                transport.end_call()
            else:
                transport.cancel_call()
        if self.limit_s is not None:
            self._limit(None)
        self._entered = False

    def run(
        self, name: str, describe: Callable[[], str], body: Callable[[], R], timeout_s: float | None = None
    ) -> R:
        """Run the calls of `body` as one call, under its `timeout_s` alone. Returns the result of `body`.

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
                self.enter(name, describe, timeout_s)
            try:
                return body()
            finally:
                if outermost:
                    self.leave(made=self.calls > calls)
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


class CallContext:
    """The bucket that an engine exchanges by the calls that a communicator makes now, if any."""

    __slots__ = ("_drawn_in", "_draws", "_draws_outside", "bucket", "bucket_step")

    def __init__(self) -> None:
        self.bucket: Bucket | None = None
        self.bucket_step: tuple[int, int] | None = None
        """Index of the bucket and training step, for the flight recorder and for random numbers."""
        self._drawn_in: tuple[int, int] | None = None
        self._draws = self._draws_outside = 0

    def count_draws(self) -> int:
        """Return how often this was called before: for this exchange of the bucket, or outside of an engine."""
        if self.bucket_step is None:
            self._draws_outside += 1
            return self._draws_outside - 1
        self._draws = self._draws + 1 if self._drawn_in is self.bucket_step else 0
        self._drawn_in = self.bucket_step
        return self._draws
