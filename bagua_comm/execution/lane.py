"""Lanes: queues of tasks that run concurrently with the caller, on a thread or a CUDA stream of the lane.

A lane runs its tasks in order on a duplicate of a communicator, so that its messages never match the caller's.

    ThreadLane    runs tasks on a thread, which works on a side stream if there is a device
    StreamLane    runs tasks that only enqueue work: at once, on a side stream
    InlineLane    for libraries that only one thread may call: runs tasks at once, on the caller's stream

A side stream waits for the caller's stream when a task is submitted, and the caller's stream waits for the side
stream when the lane is joined. Both wait by events: the host does not wait. Lanes query events, so work that is
submitted to a lane cannot be captured in a CUDA graph.
"""

from __future__ import annotations

import itertools
import os
import sys
import threading
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor
from concurrent.futures import TimeoutError as FutureTimeout
from contextlib import suppress
from typing import Any, ClassVar, Generic, ParamSpec, Protocol, TypeVar

from ..bucket import Bucket
from ..errors import ArrayError, BaguaError, CommAborted, CommError, CommTimeout, RankFailed
from ..flight import Entry
from ..objects.closing import Closing
from ..objects.pickling import Live
from ..trace import Counters, DeviceSpan, Tracer
from .cuda import OrderedFuture, SideFuture, SideStream, StreamOrder, record_event, use_device
from .futures import TASK_END_S, Task, TaskFuture, name_of, wait_for_tasks

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

    def stop_calls(self, reason: str) -> None:
        """Let the call in progress fail soon, and refuse all later ones; any thread may call it."""


C = TypeVar("C", bound=LaneComm)

SLACK_S = 5.0
"""Longest time, in seconds, that `wait` adds to the limit of a call, so that the call itself raises the error."""

STOP_S = 2.0
"""How long a task may take to end after its communicator was stopped, in seconds."""


class Lane(Live, Closing, ABC, Generic[C]):
    """Runs tasks in order, concurrently with the caller.

    `comm` is the communicator of the lane; tasks must use no other one. A task that fails stops the lane. Later
    tasks fail with `RankFailed` if that was the error, else with `CommAborted`, because the calls of the other
    ranks no longer match.

    On a lane with a side stream, a future is done when the device has finished the work. `result` makes the
    caller's current stream wait for it, not the host. The lane keeps the arguments of a task until it is joined.
    Memory that a task allocates belongs to the side stream: on a `ThreadLane`, pass `out=` instead.
    """

    _numbers: ClassVar = itertools.count()

    def __init__(self, comm: C, name: str = "lane", *, device: int | None = None) -> None:
        self.comm = comm
        self.name = f"{name}-{next(self._numbers)}"
        self.tracer: Tracer = comm.tracer
        """Receives the spans of the side stream."""
        self._side = SideStream(device) if device is not None else None
        self._unretrieved: set[TaskFuture] = set()
        """Failed tasks whose errors nobody has retrieved, of this lane and others; see `end_lanes`."""
        self._pending: deque[tuple[TaskFuture, Task]] = deque()
        """Futures and their tasks, whose arguments stay in memory until they are done."""
        self._lock = threading.RLock()
        """Held while tasks are added and forgotten: several threads may submit."""
        self._failure: BaseException | None = None
        self._closed = False
        self.waited_ns = 0
        """How long callers have waited for tasks."""
        self._process = os.getpid()
        self._note: dict[str, Any] = {}

    @abstractmethod
    def submit(self, task: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> Future[R]:
        """Schedule `task(*args, **kwargs)` after all tasks submitted before; return at once."""

    def run(self, task: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
        """Run `task(*args, **kwargs)` after all tasks submitted before; return its result or raise its error.

        On the calling thread if the lane is idle: handing a short task to a thread and back takes longer than the
        task.

        Raises:
            CommTimeout: See `result`.
        """
        return self.result(self.submit(task, *args, **kwargs))

    def wait(self) -> None:
        """Wait until all tasks are done; raise the first error among them.

        With a side stream, wait until all tasks are enqueued; work that the caller enqueues later runs after it.

        Raises:
            CommTimeout: No task and no call of the lane's communicator has ended within its `timeout_s`.
        """
        done: list[TaskFuture] = []
        try:
            for future in self._unforgotten():
                try:
                    error = self._outcome(future)
                except CancelledError as exc:
                    error = exc
                done.append(future)
                if error is not None:
                    raise error
        finally:
            if self._side is not None:
                self._side.join()
            for future in done:
                self.forget(future)

    def drain(self) -> list[TaskFuture]:
        """Wait for the ends of all tasks, whether or not with errors; return those without progress.

        These are the first one and those behind it if that makes no progress for `TASK_END_S`.
        """
        before: Any = None
        while running := self._running():
            now = len(running), self.comm.counters.total().calls
            if now == before:
                break
            wait_for_tasks(running, min(TASK_END_S, self.comm.timeout_s))
            before = now
        return running

    def result(self, future: Future[R]) -> R:
        """Wait until one task is done; return its result or raise its error, which `wait` then raises no more.

        Raises:
            CommTimeout: No task and no call of the lane's communicator has ended within its `timeout_s`.
        """
        self._outcome(future)
        self.forget(future)
        return future.result()

    def forget(self, future: Future[Any]) -> None:
        """Let `wait` raise the error of this task no more."""
        with self._lock:
            for each in self._pending:
                if each[0] is future:
                    each[0].note_asked()
                    self._pending.remove(each)
                    break

    def _outcome(self, future: Future[Any]) -> BaseException | None:
        """Wait until `future` is done; return its error, or None."""
        self._check_process()
        error = future.error if isinstance(future, TaskFuture) else future.exception
        while True:
            limit_s, calls = self._limit_s(), self.comm.counters.total().calls
            began_ns = time.perf_counter_ns()
            try:
                return error(limit_s)
            except FutureTimeout as exc:
                if self.comm.counters.total().calls == calls and self._limit_s() <= limit_s:
                    raise CommTimeout(
                        f"a task on this lane has run for more than {limit_s:g} s without ending a call"
                    ) from exc
            finally:
                self.waited_ns += time.perf_counter_ns() - began_ns

    def _limit_s(self) -> float:
        """Return the time to wait for the end of a call or a task, in seconds."""
        limit_s, timeout_s = self.comm.guard.limit_s, self.comm.timeout_s
        if limit_s is not None:
            timeout_s = max(limit_s, timeout_s)
        return timeout_s + min(timeout_s, SLACK_S)

    def note(self, **args: Any) -> None:
        """Add arguments to the span of the running task in the timeline of the device. Called by the task."""
        self._note.update(args)

    def close(self) -> None:
        """Wait for all tasks and the device, and free the thread and the communicator; may be called again.

        Collective.
        """
        if self._closed or self._process != os.getpid():
            return
        self._closed = True
        try:
            self.wait()
        finally:
            self._stop()
            if self._side is not None:
                self._side.finish(self._limit_s())
            if all(future.done() for future in self._unforgotten()):
                self.comm.close()
                if self._side is not None:
                    self._side.free()

    def abort(self) -> None:
        """Run no more tasks, and do not wait; for a communicator that no longer works.

        The communicator is closed when the running task ends, which it does as soon as its calls fail.
        """
        if self._closed:
            return
        self._closed = True
        self._failure = self._failure or CommAborted("this lane was aborted")
        for future, _ in tuple(self._pending):
            future.note_asked()
        self._close_after_tasks()
        self._stop()

    def _close_after_tasks(self) -> None:
        """Close the communicator when no task uses it any more."""
        with suppress(BaguaError):
            self.comm.close()

    def _stop(self) -> None:
        """Free the thread when it has run the submitted tasks."""

    @property
    def advice(self) -> str:
        """What an error says of tasks that `end_tasks` has stopped."""
        limit_s = min(TASK_END_S, self.comm.timeout_s)
        cure = "wait for results, or close the lane, before the communicator is closed"
        return f"no progress for {limit_s:g} s; {cure}"

    def end_tasks(self, of: str) -> list[str]:
        """Have all tasks end, if this lane is open, and accept no more; return the names of those that did not.

        Not collective. A task that makes no progress for `TASK_END_S` is stopped. The communicator of the lane
        stays as it is.

        Args:
            of: The group of the communicator that is about to end.
        """
        if self._closed:
            return []
        running = self.drain()
        names = [future.name for future in running]
        self._closed = True
        if running:
            self._failure = self._failure or CommAborted(f"{of} was closed")
            self.comm.stop_calls(f"{of} was closed while a task ran on this lane")
            wait_for_tasks(running, STOP_S)
            for future in running:
                future.note_asked()  # their end is reported already
        self._stop()
        return names

    def _unforgotten(self) -> list[TaskFuture]:
        """Return the tasks that run, wait, or have an error that nobody has asked for."""
        with self._lock:
            return [future for future, _ in self._pending]

    def _running(self) -> list[TaskFuture]:
        """Return the tasks that have not ended, for the host."""
        return [future for future in self._unforgotten() if not Future.done(future)]

    def report_to(self, unretrieved: set[Any]) -> None:
        """Add failed tasks to this set until somebody asks for their errors."""
        self._unretrieved = unretrieved

    def queued(self) -> list[Entry]:
        """Return the waiting tasks, as entries of the flight recorder. Any thread may call it."""
        group = self.comm.group
        waiting = [task for future, task in tuple(self._pending) if not (future.done() or future.running())]
        return [_entry_of(task, group) for task in waiting]

    def _add_pending(self, future: TaskFuture, task: Task) -> None:
        self._drop_done()
        self._pending.append((future, task))

    def _drop_done(self) -> None:
        """Forget the first tasks, as long as they are done and without an error to raise."""
        while self._pending:
            first = self._pending[0][0]
            if not first.done() or first.cancelled() or Future.exception(first) is not None:
                break
            self._pending.popleft()

    def _names(self, task: Callable[..., Any]) -> tuple[str, str]:
        """Return the names of a task and of its communicator, for its future."""
        return f"{name_of(task)} on {self.name}", self.comm.group

    def _fail(self, future: TaskFuture, error: BaseException) -> None:
        """End a task with an error; the errors of later tasks are due to the first."""
        future.fail(error, self._unretrieved if error is self._failure else set())

    def _check_process(self) -> None:
        """Raise `CommError` in a forked child, which has neither the thread nor the communicator of the lane."""
        if self._process != os.getpid():
            raise CommError(
                f"{self.name}: this process was forked off process {self._process}; a child cannot use its "
                "parent's lanes, checkpoints and engines: fork children only if they do not communicate"
            )

    def _check_submit(self, task: object) -> None:
        self._check_process()
        if self._closed:
            raise CommError(
                "this lane is closed, by its owner or with the communicator that it was made of; close that "
                "after what uses it, as optimizers and handles"
            )
        if not callable(task):
            raise ArrayError(
                f"submit: task is {type(task).__name__}, expected a function and its arguments: "
                "lane.submit(lane.comm.allreduce, x), not lane.submit(lane.comm.allreduce(x))"
            )

    def _run(self, task: Callable[..., R], args: tuple[Any, ...], kwargs: dict[str, Any]) -> R:
        if isinstance(self._failure, RankFailed):
            raise RankFailed(f"an earlier task on this lane failed: {self._failure}", self._failure.ranks)
        if self._failure is not None:
            cause = f"{type(self._failure).__name__}: {self._failure}"
            raise CommAborted(f"an earlier task on this lane failed: {cause}") from self._failure
        try:
            return task(*args, **kwargs)
        except BaseException as exc:
            self._failure = exc
            raise

    def _run_into(self, future: TaskFuture, task: Callable[..., Any], args: Any, kwargs: Any) -> None:
        """Run a task, and give its result or its error to its future."""
        try:
            future.set_result(self._run(task, args, kwargs))
        except BaseException as exc:
            self._fail(future, exc)
        finally:
            del future  # an error refers to this frame

    def _run_on_side(
        self, side: SideStream, future: SideFuture, task: Callable[..., Any], args: Any, kwargs: Any
    ) -> None:
        """Run a task on the side stream, after the work that the caller's stream held at submission."""
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
            self._fail(future, exc)
            if not isinstance(exc, Exception):
                raise
        else:
            future.set_result(result)

    def _leave(self, error: BaseException) -> None:
        self._closed = True
        if isinstance(error, CommError):  # tasks that fail as well fail for the same reason
            for future in self._unforgotten():
                future.note_asked()
        self._stop()


class ThreadLane(Lane[C]):
    """A lane with a thread. NumPy and MPI release the interpreter lock while they work.

    If its communicator has a device, the thread has a side stream. A transport that waits for the device blocks
    this thread, not the caller's.
    """

    def __init__(self, comm: C, name: str = "lane") -> None:
        super().__init__(comm, name, device=_device_of(comm))
        self._here: Callable[..., Any] | None = None
        """The task that a caller runs itself; those submitted meanwhile run after it."""
        self._here_end: TaskFuture | None = None
        """Done when that task has ended; None as long as nothing waits for it."""
        if self._side is None:
            self._executor = ThreadPoolExecutor(1, self.name)
        else:
            self._executor = ThreadPoolExecutor(1, self.name, use_device, (self._side.device,))

    def submit(self, task: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> Future[R]:
        """See `Lane.submit`."""
        self._check_submit(task)
        with self._lock:
            if self._here is not None:
                self._executor.submit(wait_for_tasks, self._ahead())
            if self._side is None:
                future = TaskFuture(*self._names(task))
                self._executor.submit(self._run_on_thread, future, task, args, kwargs)
            else:
                future = on_side = self._side.future(*self._names(task))
                self._executor.submit(self._run_on_side, self._side, on_side, task, args, kwargs)
            self._add_pending(future, (task, args, kwargs))
        return future

    def submit_begun(
        self, begin: Callable[[], bool], task: Callable[P, R], *args: P.args, **kwargs: P.kwargs
    ) -> Future[R]:
        """Like `submit`, but call `begin` first if the calls of all tasks ahead have begun, too.

        The thread then only waits for the call: its messages need not wait until the thread has ended the tasks
        ahead.

        Args:
            begin: Begins the call of the task on the caller's thread; returns whether it has.
            task: Waits for the call if it has begun; else makes it.
            args: Its arguments.
            kwargs: More arguments.
        """
        with self._lock:
            is_next = self._here is None and self._failure is None and not self._closed
            is_next = is_next and all(each.is_begun or each.done() for each, _ in self._pending)
            is_begun = is_next and begin()
            future = self.submit(task, *args, **kwargs)
            if isinstance(future, TaskFuture):
                future.is_begun = is_begun
        return future

    def run(self, task: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
        """See `Lane.run`."""
        self._check_submit(task)
        here = False
        try:
            with self._lock:
                self._drop_done()
                if self._side is None and self._here is None and not self._pending:
                    self._here, here = task, True
            if here:
                began_ns = time.perf_counter_ns()
                return self._run(task, args, kwargs)
        finally:
            if here:
                self.waited_ns += time.perf_counter_ns() - began_ns
                with self._lock:
                    if self._here_end is not None:
                        self._here_end.set_result(None)
                    self._here = self._here_end = None
        return super().run(task, *args, **kwargs)

    def _run_on_thread(self, future: TaskFuture, task: Callable[..., Any], args: Any, kwargs: Any) -> None:
        """Run a task on the thread, unless it was cancelled."""
        if future.set_running_or_notify_cancel():
            self._run_into(future, task, args, kwargs)

    def _ahead(self) -> list[TaskFuture]:
        """Return the end of the task that a caller runs itself now, if there is one."""
        with self._lock:
            if self._here is not None and self._here_end is None:
                self._here_end = TaskFuture(*self._names(self._here))
            return [] if self._here_end is None else [self._here_end]

    def _unforgotten(self) -> list[TaskFuture]:
        """See `Lane._unforgotten`; first comes the task that a caller runs itself."""
        with self._lock:
            return [*self._ahead(), *super()._unforgotten()]

    def _close_after_tasks(self) -> None:
        self._executor.submit(wait_for_tasks, self._ahead())  # a caller's call has a time limit
        self._executor.submit(super()._close_after_tasks)

    def _stop(self) -> None:
        self._executor.shutdown(wait=False)


class StreamLane(Lane[C]):
    """A lane without a thread, for tasks that only enqueue work on CuPy's current stream and never wait for it.

    `submit` runs the task at once on a side stream, concurrently with the caller's stream. Neither `submit` nor
    `wait` blocks the host.
    """

    _side: SideStream

    def __init__(self, comm: C, name: str = "lane") -> None:
        super().__init__(comm, name, device=comm.device)

    def submit(self, task: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> Future[R]:
        """Enqueue the task's work now; see `Lane.submit`."""
        self._check_submit(task)
        future = self._side.future(*self._names(task))
        self._run_on_side(self._side, future, task, args, kwargs)
        self._add_pending(future, (task, args, kwargs))
        return future


class InlineLane(Lane[C]):
    """A lane without a thread, for libraries that only one thread may call: `submit` runs the task.

    On a device, tasks run in order, and before later work of the caller, whatever stream is current.
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
        self._check_submit(task)
        future = OrderedFuture(self._follow, *self._names(task))
        with self._lock:
            self._follow()
            self._run_into(future, task, args, kwargs)
            error = Future.exception(future)
            if error is not None and not isinstance(error, Exception):
                future.result()  # raises it: the caller gets it now
            self._add_pending(future, (task, args, kwargs))
        return future


def _device_of(comm: LaneComm) -> int | None:
    """Return the device of `comm`; None if CuPy is not loaded, since there are no device arrays then."""
    return comm.device if "cupy" in sys.modules else None


def _entry_of(task: Task, group: str) -> Entry:
    """Return a waiting task as an entry; a task of an engine has a bucket among its arguments."""
    call, args, options = task
    name = name_of(call)
    bucket = next((arg for arg in args if isinstance(arg, Bucket)), None)
    if bucket is None:
        return Entry(group, 0, True, name)
    step = options.get("step", bucket.step)  # the bucket's own goes on while the task waits
    return Entry(group, 0, True, name, bucket.spec.dtype, (bucket.spec.size,), {}, bucket.index, step)
