"""The guard of calls: one thread at a time, in the process that made the communicator, within a time limit."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from threading import Lock, get_ident
from typing import TypeVar

from ..bucket import Bucket
from ..errors import CommError
from ..transports.base import Transport
from .weights import Weighting

R = TypeVar("R")

_MESSAGES = ("send", "recv", "sendrecv", "exchange", "exchange_halos", "isend", "irecv", "recv_any")
POINT_TO_POINT = frozenset({*_MESSAGES, "send_object", "recv_object", "recv_any_object"})
"""Names of the calls between two ranks, which other ranks do not make, or make with others."""

_forks = 0
"""Number of forks between the process that imported this module and this one."""


def _count_fork() -> None:
    global _forks
    _forks += 1


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_count_fork)


class CallGuard:
    """Lets one thread at a time make calls on the transports of a communicator, and numbers the calls.

        with guard.lock(name) as outermost:     # raises if another thread holds it
            if outermost:                       # else this call is a part of one that this thread is in
                guard.begin(name, ...)
            ...
            if outermost:
                guard.end()

    It is a lock of C, which `with` releases wherever a signal handler raises, for instance KeyboardInterrupt. Of
    two threads that begin calls at one moment, one waits for the other.
    """

    def __init__(self, transports: Sequence[Transport], *, checked: bool) -> None:
        self._transports, self._checked = transports, checked
        self._process, self._forks = os.getpid(), _forks
        self._lock, self._part = Lock(), nullcontext(False)
        self.thread = 0
        """The id of the thread that is in a call, and may make further ones within it; 0 for none."""
        self._begun = False
        """Whether the transports have begun a call and not ended it yet."""
        self._rank = transports[0].rank
        self.closed = False
        self.calls = [0, 0]
        """How many calls between two ranks, and how many collective ones have begun."""
        self.limit_s: float | None = None
        """The time limit of the call in progress, in seconds, if it was given one."""

    @property
    def is_free(self) -> bool:
        """Whether no thread is in a call."""
        return not self._lock.locked()

    @property
    def is_of_this_process(self) -> bool:
        """Whether the communicator was made in this process, and not in a parent before a fork."""
        return self._forks == _forks

    def close(self) -> None:
        """Refuse all further calls."""
        self.closed = True

    def check(self, name: str) -> None:
        """Raise `CommError` if the communicator is closed or belongs to a parent process."""
        if self.closed or self._forks != _forks:
            raise CommError(f"{name}: {self._why_unusable()}")

    def lock(self, name: str) -> AbstractContextManager[bool]:
        """The lock of a call while it runs. `with` returns whether it is part of no other call.

        Raises:
            CommError: Another thread is in a call, the communicator is closed, or it belongs to a parent process.
        """
        if self.closed or self._forks != _forks:
            self.check(name)
        if not self._lock.locked():
            return self._lock
        if self.thread != get_ident():
            raise CommError(
                f"{name}: another thread is in a call of this communicator; give each thread its own, made by "
                "dup() on all ranks, or submit the call to a lane()"
            )
        return self._part

    def begin(
        self, name: str, collective: bool, describe: Callable[[], str], timeout_s: float | None = None
    ) -> None:
        """Begin a call, which is part of no other one, on all transports."""
        if self._begun:
            self.end()  # a signal handler's exception kept the previous call from ending
        self._begun, self.thread = True, get_ident()
        # `connect(check=True)` compares the whole call before it moves a byte.
        compared = None if self._checked else describe
        for transport in self._transports:
            transport.begin_call(name, collective=collective, describe=compared)
        if timeout_s is not None:
            self._limit(timeout_s)

    def end(self, *, made: bool = True) -> None:
        """End the call on all transports; not `made` means that it failed before it moved a byte."""
        for transport in self._transports:
            if made:
                transport.end_call()
            else:
                transport.cancel_call()
        if self.limit_s is not None:
            self._limit(None)
        self._begun, self.thread = False, 0

    def run(
        self, name: str, describe: Callable[[], str], body: Callable[[], R], timeout_s: float | None = None
    ) -> R:
        """Run the calls of `body` as one call, under its `timeout_s` alone. Returns the result of `body`.

        Raises:
            CommError: See `lock`.
        """
        with self.lock(name) as outermost:
            if not outermost:
                return body()
            calls = sum(self.calls)
            try:
                self.begin(name, name not in POINT_TO_POINT, describe, timeout_s)
                return body()
            finally:
                self.end(made=sum(self.calls) > calls)

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

    __slots__ = ("_drawn_in", "_draws", "_draws_outside", "bucket", "bucket_step", "weighting")

    def __init__(self) -> None:
        self.bucket: Bucket | None = None
        self.bucket_step: tuple[int, int] | None = None
        """Index of the bucket and training step, for the flight recorder and for random numbers."""
        self.weighting: Weighting | None = None
        """The factors of this rank in the mean of the bucket; None for a plain mean."""
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
