"""Lanes: the one place where work runs beside the caller's thread, or beside the caller's CUDA stream.

A lane runs its tasks one after another, in order, on its own duplicate of a communicator, so that its messages
never match the caller's.

    ThreadLane    on a thread of its own; where there is a device, that thread works on a side stream
    StreamLane    for tasks that only enqueue work: they run at once, but on a side stream
    InlineLane    for libraries that only one thread may call: tasks run at once, on the caller's stream

A side stream waits for the caller's stream when a task is submitted, and the caller's waits for it when the lane
is joined. Both are events between streams: the host waits for neither. Lanes ask events whether they have passed,
so work that is submitted to a lane cannot be captured in a CUDA graph.
"""

from __future__ import annotations

import itertools
import sys
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor
from concurrent.futures import TimeoutError as FutureTimeout
from contextlib import suppress
from types import TracebackType
from typing import Any, ClassVar, Generic, ParamSpec, Protocol, TypeAlias, TypeVar

from .bucket import Bucket
from .cuda import DeviceSpan, SideFuture, SideStream, StreamOrder, record_event, use_device
from .errors import BaguaError, CommAborted, CommError, CommTimeout, RankFailed
from .flight import Entry
from .pickling import Live
from .trace import Counters, Tracer

P = ParamSpec("P")
R = TypeVar("R")


class CallLimit(Protocol):
    """The limit of a communicator's call in progress."""

    limit_s: float | None


class LaneComm(Protocol):
    """A communicator, to its lane: `Communicator` is one."""

    @property
    def guard(self) -> CallLimit:
        """The guard of its calls."""

    @property
    def timeout_s(self) -> float:
        """The time limit of its calls, in seconds."""

    tracer: Tracer
    counters: Counters
    device: int | None
    group: str

    def close(self) -> None:
        """Free it. Collective."""


C = TypeVar("C", bound=LaneComm)

SLACK_S = 5.0
"""How much longer than the timeout of a call `wait` waits, at most, so that the call itself can say what is
wrong."""


Task: TypeAlias = tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any]]
"""What was submitted to a lane."""


class Lane(Live, ABC, Generic[C]):
    """Runs tasks in order, beside the caller.

    `comm` is the lane's own communicator: pass it, and no other, to what is submitted. A task that fails stops
    the lane. The tasks behind it fail with `RankFailed` if that was the error, else with `CommAborted`, because
    the other ranks' calls no longer match.

    On a lane with a side stream, a future is done when the device has done the work. `result` makes the caller's
    current stream wait for it, not the host. The arguments of a task are kept until the lane is joined. Memory
    that a task allocates belongs to the side stream: on a `ThreadLane`, pass `out=` instead.
    """

    _numbers: ClassVar = itertools.count()

    def __init__(self, comm: C, name: str = "lane", *, device: int | None = None) -> None:
        self.comm = comm
        self.name = f"{name}-{next(self._numbers)}"
        self.tracer: Tracer = comm.tracer
        """Where the spans of the side stream go."""
        self._side = SideStream(device) if device is not None else None
        self._pending: deque[tuple[Future[Any], Task]] = deque()
        """Futures and their tasks; what these refer to stays in memory until they are done."""
        self._failure: BaseException | None = None
        self._closed = False
        self._note: dict[str, Any] = {}

    @abstractmethod
    def submit(self, task: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> Future[R]:
        """Run `task(*args, **kwargs)` after everything submitted before; returns at once."""

    def wait(self) -> None:
        """Wait until all tasks are done; raises the first error among them.

        With a side stream, wait until all tasks are enqueued. What the caller enqueues from then on runs after
        them.

        Raises:
            CommTimeout: No task and no call of the lane's communicator has ended for longer than its `timeout_s`.
        """
        done = 0
        try:
            for future, _ in list(self._pending):
                try:
                    error = self._outcome(future)
                except CancelledError as exc:
                    error = exc
                done += 1
                if error is not None:
                    raise error
        finally:
            if self._side is not None:
                self._side.join()
            for _ in range(done):
                self._pending.popleft()

    def _outcome(self, future: Future[Any]) -> BaseException | None:
        """Wait until `future` is done; returns its error, or None."""
        while True:
            limit_s, calls = self._limit_s(), self.comm.counters.total().calls
            try:
                return future.exception(timeout=limit_s)
            except FutureTimeout as exc:
                if self.comm.counters.total().calls == calls and self._limit_s() <= limit_s:
                    raise CommTimeout(
                        f"a task on this lane has run for more than {limit_s:g} s without ending a call"
                    ) from exc

    def _limit_s(self) -> float:
        limit_s, timeout_s = self.comm.guard.limit_s, self.comm.timeout_s
        if limit_s is not None:
            timeout_s = max(limit_s, timeout_s)
        return timeout_s + min(timeout_s, SLACK_S)

    def note(self, **args: Any) -> None:
        """Called by a task, to show these values with its span in the timeline of the device."""
        self._note.update(args)

    def close(self) -> None:
        """Wait, for the device as well, then free the thread and the communicator; closing twice does nothing.

        Collective.
        """
        if self._closed:
            return
        self._closed = True
        try:
            self.wait()
        finally:
            self._stop()
            if self._side is not None:
                self._side.finish(self._limit_s())
            if all(future.done() for future, _ in self._pending):
                self.comm.close()
                if self._side is not None:
                    self._side.free()

    def give_up(self) -> None:
        """Run nothing more, and wait for nobody: for a communicator that is broken.

        The communicator is closed once the task under way has ended, which it does as soon as its calls fail.
        """
        if self._closed:
            return
        self._closed = True
        self._failure = self._failure or CommAborted("this lane was given up")
        self._close_behind()
        self._stop()

    def _close_behind(self) -> None:
        """Close the communicator when no task uses it any more."""
        with suppress(BaguaError):
            self.comm.close()

    def _stop(self) -> None:
        """Free the thread, once it has run what was submitted."""

    def queued(self) -> list[Entry]:
        """The tasks that wait, as entries of the flight recorder. Any thread may ask."""
        group = self.comm.group
        waiting = [task for future, task in tuple(self._pending) if not (future.done() or future.running())]
        return [_entry_of(task, group) for task in waiting]

    def _remember(self, future: Future[Any], task: Task) -> None:
        while self._pending and self._pending[0][0].done() and self._pending[0][0].exception() is None:
            self._pending.popleft()  # nothing left to wait for
        self._pending.append((future, task))

    def _check_open(self) -> None:
        if self._closed:
            raise CommError("this lane is closed")

    def _run(self, task: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if isinstance(self._failure, RankFailed):
            raise RankFailed(f"an earlier task on this lane failed: {self._failure}", self._failure.ranks)
        if self._failure is not None:
            raise CommAborted("an earlier task on this lane failed") from self._failure
        try:
            return task(*args, **kwargs)
        except BaseException as exc:
            self._failure = exc
            raise

    def _run_beside(
        self, side: SideStream, future: SideFuture, task: Callable[..., Any], args: Any, kwargs: Any
    ) -> None:
        """Run a task on the side stream, after what the caller's stream held when the task was submitted."""
        name = getattr(task, "__name__", type(task).__name__).strip("_")
        self._note = {}
        result = None

        def run() -> None:
            nonlocal result
            span = DeviceSpan(self.tracer, side.clock, name, f"device: {self.name}")
            try:
                result = self._run(task, args, kwargs)
            finally:
                future.end = side.end = span.end(**self._note) or record_event()

        try:
            side.run_after(future.submitted, run)
        except BaseException as exc:
            future.set_exception(exc)
            if not isinstance(exc, Exception):
                raise
        else:
            future.set_result(result)

    def __enter__(self) -> Lane[C]:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if error is None:
            self.close()
        else:
            self._closed = True
            self._stop()


class ThreadLane(Lane[C]):
    """A lane on a thread of its own. NumPy and MPI release the interpreter lock while they work.

    If its communicator works on a device, the thread has a side stream. Transports that wait for the device hold
    up this thread, and not the caller's.
    """

    def __init__(self, comm: C, name: str = "lane") -> None:
        super().__init__(comm, name, device=_device_of(comm))
        if self._side is None:
            self._executor = ThreadPoolExecutor(1, self.name)
        else:
            self._executor = ThreadPoolExecutor(1, self.name, use_device, (self._side.device,))

    def submit(self, task: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> Future[R]:
        """See `Lane.submit`."""
        self._check_open()
        if self._side is None:
            future = self._executor.submit(self._run, task, args, kwargs)
            self._remember(future, (task, args, kwargs))
            return future
        beside = self._side.future()
        self._executor.submit(self._run_beside, self._side, beside, task, args, kwargs)
        self._remember(beside, (task, args, kwargs))
        return beside

    def _close_behind(self) -> None:
        self._executor.submit(super()._close_behind)

    def _stop(self) -> None:
        self._executor.shutdown(wait=False)


class StreamLane(Lane[C]):
    """A lane without a thread, for tasks that only enqueue work on CuPy's current stream and never wait for it.

    `submit` runs the task at once, with a side stream current, so that what it enqueues runs beside what the
    caller enqueues. Neither `submit` nor `wait` holds up the host.
    """

    _side: SideStream

    def __init__(self, comm: C, name: str = "lane") -> None:
        super().__init__(comm, name, device=comm.device)

    def submit(self, task: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> Future[R]:
        """Enqueue the task's work now; see `Lane.submit`."""
        self._check_open()
        future = self._side.future()
        self._run_beside(self._side, future, task, args, kwargs)
        self._remember(future, (task, args, kwargs))
        return future


class InlineLane(Lane[C]):
    """A lane without a thread, for libraries that only one thread may call: `submit` does the work.

    On a device, tasks keep their order, and what comes after `wait` comes after them, whatever stream is current.
    """

    def __init__(self, comm: C, name: str = "lane") -> None:
        super().__init__(comm, name)
        self._order = StreamOrder()

    def wait(self) -> None:
        """See `Lane.wait`."""
        super().wait()
        self._follow()

    def _follow(self) -> None:
        if _device_of(self.comm) is not None:
            self._order.follow()

    def submit(self, task: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> Future[R]:
        """Run the task now; see `Lane.submit`."""
        self._check_open()
        self._follow()
        future: Future[R] = Future()
        try:
            future.set_result(self._run(task, args, kwargs))
        except Exception as exc:
            future.set_exception(exc)
        self._remember(future, (task, args, kwargs))
        return future


def _device_of(comm: LaneComm) -> int | None:
    """The device that `comm` works on; None if CuPy is not loaded, since there are no device arrays then."""
    return comm.device if "cupy" in sys.modules else None


def _entry_of(task: Task, group: str) -> Entry:
    """A task that waits; an engine's has a bucket among its arguments."""
    call, args, _ = task
    name = getattr(call, "__name__", type(call).__name__).strip("_")
    bucket = next((arg for arg in args if isinstance(arg, Bucket)), None)
    if bucket is None:
        return Entry(group, 0, True, name)
    return Entry(group, 0, True, name, bucket.spec.dtype, (bucket.spec.size,), {}, bucket.index, bucket.step)
