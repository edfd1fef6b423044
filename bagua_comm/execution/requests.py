"""Requests: futures of messages that go on beside the program, and waits for several futures."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable
from concurrent.futures import CancelledError, Future
from contextlib import suppress
from typing import Any, NamedTuple, TypeVar

from .. import arrays
from ..arrays import Array
from ..errors import ArrayError, CommAborted, UnsupportedError, shown
from ..flight import Entry
from .futures import TASK_END_S, TaskFuture, wait_for_tasks
from .lane import STOP_S, LaneComm

R = TypeVar("R")

SPIN_S, POLL_S = 0.001, 0.0005
"""How long a wait polls without sleeping, and how often afterwards, in seconds."""

PAUSE = 10
"""How much longer the thread that polls many requests sleeps than it polls: the program needs the interpreter."""


ARRIVAL_S = 0.5
"""How long the end of a communicator waits for messages that nobody has waited for, in seconds."""


class Buffer(NamedTuple):
    """The memory that a request reads, or writes to."""

    x: Array
    is_written: bool
    extent: tuple[int, int]

    @classmethod
    def of(cls, x: Array, *, is_written: bool) -> Buffer:
        """The memory of an array."""
        return cls(x, is_written, arrays.extent(x))


class Request(TaskFuture):
    """The future of a message that was begun; it ends when somebody asks for it, or polls it.

    Args:
        name: The call, for errors and traces.
        comm: The communicator.
        buffer: The memory of its array.
        ended: Whether it has ended; see `Transport.begin_labelled`.
        result: Returns the result.
        limit_s: How long it may take, in seconds.
        unretrieved: Has it after an error, until somebody asks for that.
    """

    def __init__(
        self,
        name: str,
        comm: LaneComm,
        buffer: Buffer,
        ended: Callable[[float], bool],
        result: Callable[[], object],
        limit_s: float,
        unretrieved: set[TaskFuture],
    ) -> None:
        super().__init__()
        self.name, self.group, self.buffer, self._comm = name, comm.group, buffer, comm
        self._ended, self._finish, self._failures = ended, result, unretrieved
        self._until_s, self._begun_ns = time.monotonic() + limit_s, time.perf_counter_ns()
        self._asking = threading.RLock()
        self.set_running_or_notify_cancel()  # MPI uses the arrays already

    def done(self) -> bool:
        """See `Future.done`."""
        self._check_process()
        if super().done():
            return True  # without the lock, which its callbacks may hold
        with self._asking:
            if not super().done():
                try:
                    if self._ended(self._until_s):
                        self.set_result(self._finish())
                        name = f"{self.name} under way"
                        self._comm.tracer.add(name, self._begun_ns, time.perf_counter_ns(), {})
                except Exception as exc:
                    self.fail(exc, self._failures)
        return super().done()

    def error(self, timeout: float | None = None) -> BaseException | None:
        """See `TaskFuture.error`."""
        self._poll(timeout)
        return super().error(0)

    def result(self, timeout: float | None = None) -> object:
        """See `Future.result`."""
        self._poll(timeout)
        return super().result(0)

    def give_up(self, error: Exception) -> None:
        """End with this error, unless it has ended; MPI may still use the arrays, which are kept forever."""
        with self._asking:
            if not super().done():
                _given_up.append((self._ended, self._finish))
                self.set_exception(error)

    def _poll(self, timeout: float | None) -> None:
        start_s = now = time.monotonic()
        while not self.done() and (timeout is None or now - start_s < timeout):
            time.sleep(POLL_S if now - start_s > SPIN_S else 0)
            now = time.monotonic()


_given_up: list[object] = []


class Requests:
    """The requests of a communicator that have not ended.

    It is a lane to those that end the lanes of a communicator; see `futures.end_lanes`.
    """

    advice = "wait for the results of requests before the communicator is closed or the program ends"

    def __init__(self, comm: LaneComm) -> None:
        self.comm = comm
        self._pending: list[tuple[int, int, Request]] = []
        """Where the memory of a request begins and ends, and the request. Entries are removed by a new list:
        other threads read this one without the lock."""
        self._crowd = 32
        """At how many requests those that have ended are removed."""
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None
        self._unretrieved: set[TaskFuture] = set()

    def check_free(self, name: str, buffer: Buffer) -> None:
        """Raise `ArrayError` if request `name` cannot have this memory, since an open one has it."""
        (start, end), writes = buffer.extent, buffer.is_written
        with self._lock:
            near = [
                each
                for each in self._pending
                if each[0] < end and start < each[1] and (writes or each[-1].buffer.is_written)
            ]
            ended = [each for each in near if Future.done(each[-1])]
            if ended:  # as a rule the array is used again and again
                self._pending = [each for each in self._pending if each not in ended]
        for *_, other in (each for each in near if each not in ended):
            if arrays.share_elements(buffer.x, other.buffer.x) and not other.done():
                raise ArrayError(
                    f"{name}: its array overlaps that of {other.name}, which has not ended; wait for it before, "
                    "or pass another array"
                )

    def add(
        self,
        name: str,
        buffer: Buffer,
        ended: Callable[[float], bool],
        result: Callable[[], object],
        limit_s: float,
        *,
        polled: bool,
    ) -> Request:
        """A new request; if it is `polled`, a thread does so, that it goes on while the program computes."""
        request = Request(name, self.comm, buffer, ended, result, limit_s, self._unretrieved)
        with self._lock:
            if len(self._pending) >= self._crowd:
                self._pending = [each for each in self._pending if not Future.done(each[-1])]
                self._crowd = 2 * len(self._pending) + 32
            self._pending.append((*buffer.extent, request))
            if polled and self._thread is None:
                self._thread = threading.Thread(target=self._poll, name="requests", daemon=True)
                self._thread.start()
        return request

    def _poll(self) -> None:
        while True:
            with self._lock:
                pending = self._open()
                if not pending:
                    self._thread = None
                    return
            start_s = time.monotonic()
            for request in pending:
                request.done()
            time.sleep(max(POLL_S, PAUSE * (time.monotonic() - start_s)))

    def queued(self) -> list[Entry]:
        """None: what has begun is among the calls of the communicator."""
        return []

    def report_to(self, unretrieved: set[TaskFuture]) -> None:
        """See `Lane.report_to`."""
        self._unretrieved = unretrieved

    def end_tasks(self, of: str) -> list[str]:
        """See `Lane.end_tasks`. No thread polls them afterwards."""
        self.wait(min(ARRIVAL_S, self.comm.timeout_s))
        sends = [each for each in self._open() if not each.buffer.is_written]
        wait_for_tasks(sends, min(TASK_END_S, self.comm.timeout_s))
        names = self.wait(0)
        self.stop(f"{of} was closed")
        return names

    def wait(self, limit_s: float) -> list[str]:
        """Wait until all have ended, or for `limit_s` seconds; return the names of those that have not."""
        wait_for_tasks(self._open(), limit_s)
        return [each.name for each in self._open()]

    def stop(self, reason: str) -> None:
        """Give up those that have not ended, and poll no more."""
        for request in self._open():
            request.give_up(CommAborted(f"{request.name}: {reason}"))
        if (thread := self._thread) not in (None, threading.current_thread()):  # in a callback, it is that thread
            thread.join(STOP_S)  # a callback of a request may block it

    def _open(self) -> list[Request]:
        return [each for *_, each in self._pending if not Future.done(each)]


def wait_all(futures: Iterable[Future[Any]]) -> list[Any]:
    """Wait until all have ended; return their results, or raise the first error among them. [] for none.

    >>> from bagua_comm.testing import run_ranks
    >>> import numpy as np
    >>> run_ranks(2, lambda comm: wait_all([comm.iallreduce(np.ones(1)), comm.iallreduce(np.ones(2))]))
    [[array([2.]), array([2., 2.])], [array([2.]), array([2., 2.])]]
    """
    futures = _listed("wait_all", futures)
    for future in futures:
        with suppress(CancelledError):
            future.exception()
    return [future.result() for future in futures]


def wait_any(futures: Iterable[Future[Any]]) -> int:
    """Wait until one has ended, with a result or an error; return its index.

    Raises:
        ArrayError: There is none.
    """
    futures = _listed("wait_any", futures)
    if not futures:
        raise ArrayError("wait_any: futures is empty, expected at least one")
    while True:
        for index, future in enumerate(futures):
            if future.done():
                return index
        time.sleep(POLL_S)


def _listed(call: str, futures: Iterable[Future[R]]) -> list[Future[R]]:
    if isinstance(futures, Future):
        raise UnsupportedError(f"{call}: futures is one future, expected a list of them: {call}([future])")
    if not isinstance(futures, Iterable):
        raise UnsupportedError(f"{call}: futures is {shown(futures)}, expected a list of futures")
    found = list(futures)
    for index, each in enumerate(found):
        if not isinstance(each, Future):
            raise UnsupportedError(
                f"{call}: futures[{index}] is {shown(each)}, expected a future, as isend and irecv return"
            )
    return found
