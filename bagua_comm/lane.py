"""Lanes: the one place where work runs beside the caller's thread.

A lane runs what it is given one after another, in order, on its own duplicate of a communicator, so
that its messages never meet the caller's.
"""

from __future__ import annotations

import itertools
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import TimeoutError as FutureTimeout
from types import TracebackType
from typing import Any, Protocol

from .errors import CommAborted, CommError, CommTimeout

CALLS_PER_TASK = 8
"""How many communicator calls, each with its own timeout, a task is allowed before `wait` gives up."""


class _Comm(Protocol):
    timeout_s: float

    def close(self) -> None: ...


class Lane(ABC):
    """Runs tasks in order, beside the caller.

    `comm` is the lane's own communicator: pass it, and no other, to what is submitted. A task that
    fails stops the lane: the ones behind it fail with `CommAborted`, since its peers' calls no longer
    match.
    """

    def __init__(self, comm: Any) -> None:
        self.comm: Any = comm
        self._pending: deque[Future[Any]] = deque()
        self._failure: BaseException | None = None
        self._closed = False

    @abstractmethod
    def submit(self, task: Callable[..., Any], *args: Any, **kwargs: Any) -> Future[Any]:
        """Run `task(*args, **kwargs)` after everything submitted before; returns at once."""

    def wait(self) -> None:
        """Return when everything submitted is done; raises the first error among it.

        Raises:
            CommTimeout: A task takes longer than its communicator's timeouts allow.
        """
        limit_s = self.comm.timeout_s * CALLS_PER_TASK
        while self._pending:
            future = self._pending[0]
            try:
                future.result(timeout=limit_s)
            except FutureTimeout as exc:
                if not future.done():
                    raise CommTimeout(f"a task on this lane has run for more than {limit_s:g} s") from exc
                self._pending.popleft()
                raise
            except BaseException:
                self._pending.popleft()
                raise
            self._pending.popleft()

    def close(self) -> None:
        """Wait, then free the thread and the communicator; closing twice does nothing.

        Collective.
        """
        if self._closed:
            return
        self._closed = True
        try:
            self.wait()
        finally:
            self._stop()
            if all(future.done() for future in self._pending):
                self.comm.close()

    def _stop(self) -> None:  # noqa: B027 - a lane without a thread has nothing to stop
        """Free the thread, once it has done what it is doing."""

    def _remember(self, future: Future[Any]) -> None:
        while self._pending and self._pending[0].done() and self._pending[0].exception() is None:
            self._pending.popleft()  # nothing left to wait for
        self._pending.append(future)

    def _check_open(self) -> None:
        if self._closed:
            raise CommError("this lane is closed")

    def _run(self, task: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if self._failure is not None:
            raise CommAborted("an earlier task on this lane failed") from self._failure
        try:
            return task(*args, **kwargs)
        except BaseException as exc:
            self._failure = exc
            raise

    def __enter__(self) -> Lane:
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


class ThreadLane(Lane):
    """A lane on a thread of its own. NumPy and MPI release the interpreter lock while they work."""

    _numbers = itertools.count()

    def __init__(self, comm: Any, name: str = "lane") -> None:
        super().__init__(comm)
        self._executor = ThreadPoolExecutor(1, thread_name_prefix=f"{name}-{next(self._numbers)}")

    def submit(self, task: Callable[..., Any], *args: Any, **kwargs: Any) -> Future[Any]:
        """See `Lane.submit`."""
        self._check_open()
        future = self._executor.submit(self._run, task, args, kwargs)
        self._remember(future)
        return future

    def _stop(self) -> None:
        self._executor.shutdown(wait=False)


class InlineLane(Lane):
    """A lane without a thread, for libraries that only one thread may call: `submit` does the work."""

    def submit(self, task: Callable[..., Any], *args: Any, **kwargs: Any) -> Future[Any]:
        """Run the task now; see `Lane.submit`."""
        self._check_open()
        future: Future[Any] = Future()
        try:
            future.set_result(self._run(task, args, kwargs))
        except Exception as exc:
            future.set_exception(exc)
        self._remember(future)
        return future
