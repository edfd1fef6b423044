"""Waits of one rank of a communicator, their time limits, and the abort of the communicator.

Every wait polls, with a deadline: a rank that waits long sleeps between polls, and leaves its core to the
backward pass. It also listens to the notices of other ranks: a rank that leaves, or aborts the communicator,
sends one, and the ranks that wait for it learn of it at once. If MPI can continue after a rank has died (ULFM),
the first rank that notices the death revokes all communicators that the dead rank was part of, so that all ranks
notice it.
"""

from __future__ import annotations

import ctypes
import os
import time
from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from typing import TypeVar

import numpy as np
from mpi4py import MPI

from ...errors import CommAborted, CommError, CommMismatch, CommTimeout, RankFailed
from ..counted_calls import CountedCalls
from ..flow import COLLECTIVE
from ..notices import ABORTED, LEFT
from . import tuning
from .failure_detector import FailureDetector
from .shared_window import PeerAbortedError, SharedWindow, UnreadableError
from .world import World

T = TypeVar("T")


class Endpoint:
    """One rank's side of an MPI communicator.

    Args:
        comm: The communicator.
        calls: The calls of this rank.
        world: The world that the communicator belongs to.
        detector: Knows which ranks have failed.
        group: The name of the communicator's ranks.
        members: Their ranks in the world.
    """

    def __init__(
        self,
        comm: MPI.Comm,
        calls: CountedCalls,
        world: World,
        detector: FailureDetector,
        group: str,
        members: list[int],
    ) -> None:
        self.comm, self.calls, self.world, self.detector = comm, calls, world, detector
        self.rank, self.size = calls.rank, calls.size
        self.group, self.members = group, members
        self.concurrent = MPI.Query_thread() == MPI.THREAD_MULTIPLE
        self.window: SharedWindow | None = None
        """Memory that all ranks share; None if they do not."""
        self.begun: dict[int, object] = {}
        """The arrays and requests of exchanges that have begun and were not yet waited for."""
        self.on_listen: Callable[[], object] | None = None
        """Called when this rank listens to notices while it waits."""
        self._has_notified = False

    def share(self, window: SharedWindow | None) -> None:
        """Use the window, or none, from now on."""
        self.window = window
        self.calls.publish(window.calls if window is not None else None)

    # Calls of MPI, and of the window ----------------------------------------------------------------

    def complete(self, start: Callable[[], MPI.Request], buffers: object) -> None:
        """Start a non-blocking call of MPI and wait for it."""
        if (longer := self._longer_message(start, buffers)) is not None:
            raise self.abort_after(longer, None) from longer

    def gather_rows(self, wire: Sequence[object]) -> bool:
        """Gather the rows of a table, in place; return False if another rank sends longer ones.

        Collective. That rank makes another call. This one must then abort, once the ranks have named their calls.
        """
        return self._longer_message(lambda: self.comm.Iallgather(MPI.IN_PLACE, wire), wire) is None

    def _longer_message(self, start: Callable[[], MPI.Request], buffers: object) -> MPI.Exception | None:
        """Start a call of MPI and wait for it; return its error if a rank has sent more than this one expects."""
        if self.calls.broken is not None or self.begun:
            self.check_idle()
        request = None
        try:
            request = start()
            if not request.Test():
                self.poll(request.Test)
            if self.window is not None:
                self.window.check()  # MPI reads other processes' memory, too
        except BaseException as exc:
            if isinstance(exc, MPI.Exception) and exc.Get_error_class() == MPI.ERR_TRUNCATE:
                self.keep_for_ever((request, buffers))
                return exc
            raise self.abort_after(exc, (request, buffers)) from exc
        return None

    def run_in_window(self, sent: int, call: Callable[..., T], *arguments: object) -> T:
        """Make a call through the window that sends `sent` bytes to other ranks."""
        if self.calls.broken is not None or self.begun:
            self.check_idle()
        try:
            result = call(*arguments)
        except BaseException as exc:
            raise self.abort_after(exc, None) from exc  # who reads this rank's memory sees that it has aborted
        self.calls.sent_bytes += sent
        return result

    def duplicate(self) -> MPI.Comm:
        """Duplicate the communicator. Collective."""
        return duplicate(self.comm, self.poll)

    def make(self, make: Callable[[], MPI.Comm]) -> MPI.Comm:
        """Make a communicator of MPI by `make`. Collective."""
        try:
            return make()
        except MPI.Exception as exc:
            error = self.abort_after(exc, None)
            count = self.world.open
            if not isinstance(error, RankFailed) and count > tuning.MAX_COMMUNICATORS // 2:
                raise CommError(
                    f"rank {self.rank}: MPI could not make one more communicator beside {count}, and has "
                    f"room for about {tuning.MAX_COMMUNICATORS} at a time; close those that are no longer "
                    f"used ({error})"
                ) from exc
            raise error from exc
        except BaseException as exc:
            raise self.abort_after(exc, None) from exc

    # Waits ------------------------------------------------------------------------------------------

    def poll(
        self,
        done: Callable[[], bool],
        between: Callable[[], object] | None = None,
        peers: Collection[int] | None = None,
        *,
        sleeping: bool = False,
        deadline_s: float | None = None,
    ) -> None:
        """Wait until `done`. It polls first without sleeping, since most answers come at once.

        Args:
            done: Asks MPI whether the wait is over.
            between: Called after sleeps.
            peers: The ranks that this one waits for; None if all others.
            sleeping: Whether to sleep at once, and longer, since the answer is far off.
            deadline_s: When to raise; that of the call in progress if None, counted from its first long wait.
        """
        start = listened = time.monotonic()
        spin_s, (shortest, longest) = tuning.SPIN_S, tuning.SLEEPS_S
        if sleeping:
            spin_s, shortest, longest = 0.0, tuning.LONG_SLEEP_S, tuning.LONG_SLEEP_S
        while not done():
            now = time.monotonic()
            waited = now - start
            if waited > spin_s:
                if deadline_s is None:
                    deadline_s = self.calls.deadline_s()
                if now > deadline_s:
                    raise self.overdue(peers)
                time.sleep(min(max(shortest, waited / 10), longest))
                if between is not None:
                    between()
                if now - listened > tuning.LISTEN_S:
                    listened = now
                    self.listen(peers)
            elif waited > tuning.BUSY_S:
                os.sched_yield()

    def wait_outside_mpi(self, done: Callable[[], bool]) -> None:
        """Wait for an event that MPI does not see; calls MPI meanwhile, which raises if a rank has died."""
        self.poll(done, lambda: self.comm.Iprobe(MPI.ANY_SOURCE, COLLECTIVE))

    def listen(self, peers: Collection[int] | None) -> None:
        """Raise if a rank that this one waits for takes no part in the call; `peers` are all others if None.

        Also raises if another thread has stopped the calls.
        """
        self.calls.check_usable()
        self._listen(peers)

    def _listen(self, peers: Collection[int] | None) -> None:
        self.world.notices.listen()
        if self.on_listen is not None:
            self.on_listen()
        for rank in self.calls.others() if peers is None else peers:
            for notice, arrived_s in self.detector.final_notices(rank):
                if notice.error == CommTimeout.__name__:
                    raise self.overdue(peers, self.detector.timeout_of_peer(notice))
                if time.monotonic() - arrived_s > tuning.GRACE_S:
                    raise self.detector.departure(rank, notice)

    def overdue(self, peers: Collection[int] | None, error: CommTimeout | None = None) -> CommError:
        """The error to raise if a wait took too long; names missing ranks, if known.

        It was that of the call in progress, unless another `error` is given.
        """
        dead = self.detector.failed_ranks()
        if dead:
            return self.detector.death(dead)
        error = error or self.detector.timeout()
        self.notify(error)
        return self.detector.timeout_with_names(error, peers)

    def check_idle(self) -> None:
        """Raise unless this communicator can be used, and no exchange that has begun is still under way."""
        if self.begun and self.calls.broken is None:
            self.abort_after(CommAborted("a call was interrupted"), None)
        self.calls.check_usable()

    # Abort ------------------------------------------------------------------------------------------

    def abort_after(
        self, exc: BaseException, in_flight: object, statuses: Sequence[MPI.Status] = ()
    ) -> BaseException:
        """Abort this communicator after `exc`, raised in the middle of a call; returns the error to raise."""
        if isinstance(exc, UnreadableError) and self.window is not None:
            try:
                self.window.check((exc.rank,))
            except PeerAbortedError as aborted:  # it may have freed that memory
                exc = aborted
        # Ranks may still be at the end of the collective before a message that does not fit: its bytes are right.
        if self.window is not None and (self.calls.in_collective or not isinstance(exc, CommMismatch)):
            self.window.abort()
        self.keep_for_ever(in_flight)
        self.calls.refuse_calls(f"a call failed earlier ({type(exc).__name__})")
        error = exc
        if isinstance(exc, MPI.Exception):
            if exc.Get_error_class() == MPI.ERR_IN_STATUS:
                codes = [code for code in map(MPI.Status.Get_error, statuses) if code != MPI.SUCCESS]
                exc = MPI.Exception(next(iter(codes), MPI.ERR_OTHER))
            error = self.detector.error_of_mpi(exc)
        elif isinstance(exc, UnreadableError):
            dead = self.detector.await_failed_ranks()
            error = self.detector.death(dead) if dead else CommError(f"rank {self.rank}: {exc}")
        elif isinstance(exc, PeerAbortedError):
            error = self._abort_of_peer(exc.rank)
        if isinstance(error, RankFailed):
            self.world.revoke([self.members[rank] for rank in error.ranks])
            self.revoke()
        else:
            self.notify(error)
        return error

    def _abort_of_peer(self, rank: int) -> CommError:
        """The error to raise because `rank` has aborted: its notice follows soon after its mark in the window."""
        until = time.monotonic() + tuning.FAILED_RANKS_S + 2 * tuning.GRACE_S
        try:
            while time.monotonic() < until:
                self._listen((rank,))
                if dead := self.detector.failed_ranks():  # a rank that has seen a death sends no notice
                    return self.detector.death(dead)
                time.sleep(tuning.SLEEPS_S[0])
        except CommError as exc:
            return exc
        return CommAborted(f"{self.detector.who}: rank {rank} aborted while its array was read")

    def keep_for_ever(self, in_flight: object = None) -> None:
        """Never free the arrays of unfinished calls of MPI, which may write to them."""
        if in_flight is not None or self.begun:
            ctypes.pythonapi.Py_IncRef(ctypes.py_object((in_flight, self.begun)))

    def notify(self, error: BaseException) -> None:
        """Notify the other ranks, once, that this one has aborted this communicator."""
        if not self._has_notified:
            self._has_notified = True
            others = [self.members[rank] for rank in self.calls.others()]
            self.world.notify(others, ABORTED, error, [self.group, *self.calls.making])

    def abandon(self, reason: str) -> None:
        """Refuse all calls from now on, and keep the memory of unfinished ones; notifies no other rank."""
        self._has_notified = True
        self.abort_after(CommAborted(reason), None)
        self.calls.broken = reason

    def revoke(self) -> None:
        """Wake the ranks that are in a call, where MPI can do that."""
        with suppress(MPI.Exception, NotImplementedError):
            if not self.detector.is_revoked():
                self.comm.Revoke()

    # Groups of ranks that belong to no transport, and the end ---------------------------------------

    def notify_failure(self, group: str, error: CommError) -> None:
        """See `Transport.notify_failure`. Does nothing if several threads may not call MPI."""
        if self.concurrent and not MPI.Is_finalized():
            self.world.note_failure()
            self.world.notify([self.members[rank] for rank in self.calls.others()], ABORTED, error, [group])

    def poll_failures(self, groups: Collection[str]) -> CommError | None:
        """See `Transport.poll_failures`. Finds nothing if several threads may not call MPI."""
        if not self.concurrent or MPI.Is_finalized():
            return None
        self.world.notices.listen()
        error = self.detector.abort_of_group(groups)
        if error is None and (dead := self.detector.failed_ranks()):
            error = self.detector.death(dead)
        return error

    def leave(self, reason: str | None = None, on_slow: Callable[[], object] | None = None) -> bool:
        """See `Transport.leave` and `Transport.on_slow_leave`. Only the world can be left, not a group of it."""
        world = self.world
        if self.group != "world" or world.orderly is not None:
            return world.orderly is not False
        world.end(orderly=self.size == 1)
        if self.size == 1:
            return True
        error = CommAborted(reason) if reason is not None else None
        if reason is not None or self.calls.broken is not None:
            self._send_leave(error)
            return False
        start, has_notified = time.monotonic(), np.array([not world.is_quiet], np.uint8)

        def ended(request: MPI.Request, *, may_notify: bool) -> bool:
            while not request.Test():
                waited = time.monotonic() - start
                world.notices.listen()
                if waited > self.calls.timeout_s or self.detector.any_rank_failed():
                    ctypes.pythonapi.Py_IncRef(ctypes.py_object((request, has_notified)))
                    self._send_leave(CommAborted("it did not wait any longer for the other ranks to leave"))
                    return False
                if waited > tuning.LEAVE_QUIETLY_S and may_notify:
                    may_notify, has_notified[0] = False, 1
                    self._send_leave(None)
                    if on_slow is not None:
                        on_slow()
                shortest, longest = tuning.SLEEPS_S
                time.sleep(min(max(shortest, waited / 10), longest) if waited > tuning.SPIN_S else 0)
            return True

        try:
            if not ended(world.comm.Ibarrier(), may_notify=True):
                return False
            # Whether any rank has sent a notice, which may still be under way.
            if not ended(world.comm.Iallreduce(MPI.IN_PLACE, has_notified, MPI.MAX), may_notify=False):
                return False
        except MPI.Exception:
            return False  # a rank has died
        world.end(orderly=True, quiet=not has_notified[0])
        return True

    def _send_leave(self, error: CommError | None) -> None:
        self.world.notify(self.calls.others(), LEFT, error, self.world.latest_groups())


def duplicate(comm: MPI.Comm, wait: Callable[[Callable[[], bool]], None]) -> MPI.Comm:
    """Duplicate a communicator; `wait` returns when a condition holds. Collective."""
    made, request = comm.Idup()
    try:
        wait(request.Test)
    except BaseException:
        # MPI may still write the new communicator into this memory: never free it.
        ctypes.pythonapi.Py_IncRef(ctypes.py_object((made, request)))
        raise
    return made
