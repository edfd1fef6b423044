"""Futures of the tasks of lanes, and what is left of tasks when their communicator ends."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Collection, Iterable
from concurrent.futures import CancelledError, Future
from concurrent.futures import TimeoutError as FutureTimeout
from contextlib import suppress
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias
from weakref import WeakSet

from ..errors import CommAborted, CommError
from ..flight.entries import is_of

Task: TypeAlias = tuple[Callable[..., object], tuple[object, ...], dict[str, Any]]
"""A submitted function with its arguments."""

TASK_END_S = 5.0
"""How long the end of a communicator waits for the tasks of an open lane without progress, in seconds."""

NAMED = 3
"""How many tasks an error names."""


class TaskFuture(Future[Any]):
    """The future of a task on a lane. If the task fails, it is in a set until somebody asks for its error."""

    def __init__(self, name: str = "", group: str = "") -> None:
        super().__init__()
        self._condition = threading.Condition()  # of this module, so that a simulation controls it
        self.name, self.group = name, group
        """The name of the task, and of the communicator that it works on."""
        self._unretrieved: set[TaskFuture] = set()
        self._is_asked = False
        self._process = os.getpid()
        self.is_begun = False
        """Whether the call of the task has begun ahead; see `ThreadLane.submit_begun`."""

    def fail(self, error: BaseException, unretrieved: set[TaskFuture]) -> None:
        """End with an error, in this set as long as nobody has asked for it."""
        self._unretrieved = unretrieved
        unretrieved.add(self)
        if self._is_asked:  # read after the addition: `note_asked` may run on another thread
            unretrieved.discard(self)
        self.set_exception(error)

    def error(self, timeout: float | None = None) -> BaseException | None:
        """Wait for the error, or None, without asking for it."""
        self._check_process()
        return super().exception(timeout)

    def note_asked(self) -> None:
        """Record that somebody has got the error, or that nobody needs it, even if the task fails later."""
        self._is_asked = True
        self._unretrieved.discard(self)

    def exception(self, timeout: float | None = None) -> BaseException | None:
        """See `Future.exception`."""
        error = self.error(timeout)
        self.note_asked()
        return error

    def result(self, timeout: float | None = None) -> Any:
        """See `Future.result`."""
        self._check_process()
        try:
            return super().result(timeout)
        finally:
            if super().done():
                self.note_asked()

    def _check_process(self) -> None:
        """Raise `CommError` in a forked child, if it would wait for a thread that only its parent has."""
        if self._process != os.getpid() and not super().done():
            raise CommError(
                f"{self.name or 'a task'}: this process was forked off process {self._process}, which runs the "
                "task; fork children only if they do not communicate"
            )

    if not TYPE_CHECKING:  # it would hide wrong names from type checkers

        def __getattr__(self, name: str) -> Any:
            here = {"wait": "result()", "test": "done()"}.get(name.lower())
            hint = f"; it is {here} here, see docs/quickstart/coming-from.md" if here else ""
            text = f"{type(self).__name__!r} object has no attribute {name!r}{hint}"
            raise AttributeError(text, name=name, obj=self)


def wait_for_tasks(futures: Iterable[TaskFuture], limit_s: float | None = None) -> None:
    """Wait until all have ended, or for `limit_s` seconds. It does not ask for their errors."""
    until = None if limit_s is None else time.monotonic() + limit_s
    for future in futures:
        with suppress(CancelledError, FutureTimeout):
            future.error(None if until is None else max(0.0, until - time.monotonic()))


class TaskProblem(NamedTuple):
    """A task whose end nobody has waited for, and that failed or did not end."""

    text: str
    error: BaseException
    has_ended: bool = True

    def __str__(self) -> str:
        return self.text


_abandoned: WeakSet[object] = WeakSet()
"""Lanes whose tasks nobody can ask for."""


def abandon(lane: Any, unretrieved: Collection[TaskFuture]) -> None:
    """Report the tasks of a lane no more, since what has submitted them is gone.

    Args:
        lane: The lane.
        unretrieved: Failed tasks whose errors nobody has retrieved, also of other lanes.
    """
    _abandoned.add(lane)
    lane.report_to(set())
    for future in tuple(unretrieved):
        if future.group == lane.comm.group:
            future.note_asked()


def end_lanes(lanes: Iterable[Any], unretrieved: Collection[TaskFuture], group: str) -> list[TaskProblem]:
    """End the tasks of the open lanes of a communicator and those derived from it; return what went wrong.

    Not collective. Causes come first; their consequences, `CommAborted`, are one problem.

    Args:
        lanes: Lanes, also of other communicators.
        unretrieved: Failed tasks whose errors nobody has retrieved, also of other lanes.
        group: The group of the communicator, which is about to end.
    """
    problems = []
    for lane in [each for each in tuple(lanes) if is_of(each.comm.group, group)]:
        names = lane.end_tasks(group)
        if names and lane not in _abandoned:
            listed = ", ".join(names[:NAMED]) + (f" and {len(names) - NAMED} more" if len(names) > NAMED else "")
            text = f"{group} ends before {listed}: {lane.advice}"
            problems.append(TaskProblem(text, CommError(text), has_ended=False))
    for future in [each for each in tuple(unretrieved) if is_of(each.group, group)]:
        error = future.exception()
        assert error is not None
        text = f"{future.name} failed, and nobody has asked for its result: {type(error).__name__}: {error}"
        problems.append(TaskProblem(text, error))
    causes = [each for each in problems if not isinstance(each.error, CommAborted)]
    aborted = [each for each in problems if isinstance(each.error, CommAborted)]
    if len(aborted) > 1:
        aborted = [aborted[0]._replace(text=f"{aborted[0]}; and {len(aborted) - 1} more tasks failed so")]
    return causes + aborted


def name_of(task: object) -> str:
    """The name of a task in messages."""
    return str(getattr(task, "__name__", type(task).__name__)).strip("_")
