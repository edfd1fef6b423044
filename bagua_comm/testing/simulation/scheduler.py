"""Threads that run one at a time, in an order drawn from a seed, and their virtual time.

A thread of a simulation runs until it calls the scheduler: before it acquires a lock, when it waits or sleeps,
and when it ends. The scheduler then draws the next thread among those that can run.

Time is virtual. A step of a thread takes some microseconds. When no thread can run, the clock advances to the
next moment at which a wait ends or a message arrives. So a timeout of an hour costs nothing.
"""

from __future__ import annotations

import hashlib
import heapq
import itertools
import threading
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from math import inf
from queue import SimpleQueue
from random import Random

from ...errors import CommTimeout
from ...flight.stacks import current_stacks

_running: list[Scheduler] = []
"""The scheduler of the simulation in progress, if there is one."""

STEP_S = 20e-6
"""The longest time that a step of a thread takes, in virtual seconds."""
KEPT_STEPS = 30
"""How many of the latest steps a report shows."""


def running() -> Scheduler | None:
    """The scheduler of the simulation in progress."""
    return _running[0] if _running else None


def mine() -> Scheduler | None:
    """The scheduler of the calling thread; None if it belongs to no simulation."""
    return _running[0] if _running and _running[0].is_mine() else None


class SimulationError(AssertionError):
    """The threads of a simulation cannot or do not end: a deadlock, or too many steps."""


class Ended(BaseException):
    """Ends a thread of a simulation that has failed."""


class Task:
    """A thread of a simulation."""

    def __init__(self, number: int, name: str, priority: float) -> None:
        self.number, self.name, self.priority = number, name, priority
        self.turn: SimpleQueue[None] = SimpleQueue()
        """Holds an item when it is this thread's turn."""
        self.ident: int | None = None
        self.is_ready, self.is_over = True, False
        self.waits = 0
        """How many waits it has begun; a timer of an earlier one wakes it no more."""
        self.timed_out = False
        self.waits_for = ""
        self.joiners: list[Task] = []


class Scheduler:
    """The threads of a simulation, its clock and its random choices.

    Args:
        seed: The seed of all choices.
        max_steps: With more steps than this, the simulation fails.
    """

    def __init__(self, seed: object, max_steps: int) -> None:
        self.random = Random(f"schedule {seed}")
        self.now_s = 0.0
        self.delay_s: Callable[[int, int], float] = lambda source, dest: 0.0
        """The delay of the next message from a rank to another, in virtual seconds."""
        self.max_steps = max_steps
        self.tasks: list[Task] = []
        self.current: Task | None = None
        self.failure: SimulationError | None = None
        self.steps = 0
        self.finished = threading.Event()
        """Set when all threads have ended."""
        self.latest: deque[tuple[float, str, str]] = deque(maxlen=KEPT_STEPS)
        """The latest steps: when they began, the thread, and the call that let it wait before."""
        self._digest = hashlib.blake2b(digest_size=16)
        self._timers: list[tuple[float, int, Callable[[], None]]] = []
        self._numbers = itertools.count()
        # Uniform choices let the threads advance alike. With priorities one runs as long as it can, so that
        # others are far behind; a change of priorities now and then reverses who is ahead.
        self._by_priority = self.random.random() < 0.4
        self._keeps = self.random.choice((0.0, 0.5, 0.9))
        """The probability that a thread which can go on does so."""

    @contextmanager
    def active(self) -> Iterator[None]:
        """Let this be the simulation in progress in a block."""
        if _running:
            raise RuntimeError("a simulation is running in this process already")
        _running.append(self)
        try:
            yield
        finally:
            _running.clear()

    # Threads ----------------------------------------------------------------------------------------

    def add(self, name: str) -> Task:
        """Add a thread, which waits for its turn."""
        task = Task(len(self.tasks), name, self.random.random())
        self.tasks.append(task)
        return task

    def begin(self, task: Task) -> None:
        """Let the first thread run. Called by a thread that does not belong to the simulation."""
        self.current = task
        task.turn.put(None)

    def is_mine(self) -> bool:
        """Whether the calling thread belongs to this simulation."""
        return self.current is not None and self.current.ident == threading.get_ident()

    def run(self, task: Task, body: Callable[[], None]) -> None:
        """Run `body` as a thread of the simulation, from its first turn on. Called by that thread."""
        task.turn.get()
        task.ident = threading.get_ident()
        try:
            if self.failure is None:
                body()
        except BaseException:
            if self.failure is None:
                raise
        finally:
            task.is_over, task.is_ready = True, False
            for joiner in task.joiners:
                self.wake(joiner)
            self._pass_on(None)

    def pause(self, what: str) -> None:
        """Let other threads run before this one goes on. Called by the running thread, as all methods below."""
        task = self._mine()
        if not (self._keeps and self.random.random() < self._keeps):
            task.waits_for = what
            self._hand_over(task)

    def wait(self, what: str, timeout_s: float | None = None) -> bool:
        """Wait until this thread is woken, for at most `timeout_s`; return whether it was."""
        task = self._mine()
        task.is_ready, task.timed_out, task.waits_for = False, False, what
        task.waits += 1
        if timeout_s is not None and timeout_s < inf:
            self._wake_at(self.now_s + max(0.0, timeout_s), task)
        self._hand_over(task)
        return not task.timed_out

    def wake(self, task: Task) -> None:
        """End the wait of a thread."""
        if not task.is_over:
            task.is_ready = True

    def call_at(self, when_s: float, action: Callable[[], None]) -> None:
        """Call `action`, which must not wait, at that time; those of one time in the order of their calls."""
        heapq.heappush(self._timers, (when_s, next(self._numbers), action))

    def _wake_at(self, when_s: float, task: Task) -> None:
        number = task.waits

        def expire() -> None:
            if task.waits == number and not task.is_ready and not task.is_over:
                task.is_ready = task.timed_out = True

        self.call_at(when_s, expire)

    def _mine(self) -> Task:
        if self.failure is not None:
            raise Ended
        assert self.current is not None
        return self.current

    def _hand_over(self, task: Task) -> None:
        """Let the next thread run, and return when it is this one's turn again."""
        if self._pass_on(task):
            task.turn.get()
        if self.failure is not None:
            raise Ended

    def _pass_on(self, task: Task | None) -> bool:
        """Give the turn to the next thread; return whether it is another one than `task`."""
        following = self._next()
        self.current = following
        if following is None:
            self.finished.set()
        elif following is not task:
            following.turn.put(None)
        return following is not task

    # Choices ----------------------------------------------------------------------------------------

    def _next(self) -> Task | None:
        """The thread that runs next; None if all have ended."""
        if self.failure is None:
            self.steps += 1
            if self.steps > self.max_steps:
                self._fail(f"the threads have not ended after {self.max_steps} steps")
        while self.failure is None:
            self.now_s += self.random.random() * STEP_S
            while self._timers and self._timers[0][0] <= self.now_s:
                heapq.heappop(self._timers)[2]()
            ready = [task for task in self.tasks if task.is_ready]
            if ready:
                return self._chosen(ready)
            if all(task.is_over for task in self.tasks):
                return None
            if self._timers:
                self.now_s = max(self.now_s, self._timers[0][0])
            else:
                names = ", ".join(task.name for task in self.tasks if not task.is_over)
                is_over = self.tasks[0].is_over
                self._fail(f"{'threads are left' if is_over else 'deadlock'}: {names} wait without a limit")
        # After a failure each thread gets a turn, in which it ends.
        return next((task for task in self.tasks if not task.is_over), None)

    def _chosen(self, ready: list[Task]) -> Task:
        if len(ready) == 1:
            task = ready[0]
        elif self._by_priority:
            if self.random.random() < 0.05:
                self.random.choice(ready).priority = self.random.random()
            task = max(ready, key=lambda each: each.priority)
            task.priority -= 0.001  # a thread that polls does not keep the others from running forever
        else:
            task = self.random.choice(ready)
        self._digest.update(b"%d " % task.number)
        self.latest.append((self.now_s, task.name, task.waits_for))
        return task

    def digest(self) -> str:
        """A digest of all choices so far: equal if two runs were the same."""
        return f"{self.steps} steps, {self._digest.hexdigest()}"

    # Failures ---------------------------------------------------------------------------------------

    def _fail(self, reason: str) -> None:
        """End the simulation: all threads end in their next call of the scheduler."""
        if self.failure is None:
            self.failure = SimulationError(f"{reason}\n{self.report()}")

    def report(self) -> str:
        """The latest steps, and the stacks of all threads that have not ended."""
        lines = [f"latest steps, at {self.now_s:.6f} s of virtual time:"]
        lines += [f"  {when_s:12.6f} s  {name}: {what or 'begins'}" for when_s, name, what in self.latest]
        stacks = current_stacks()
        for task in self.tasks:
            if not task.is_over:
                lines.append(
                    f"{task.name}: {'ready' if task.is_ready else 'waits'} in {task.waits_for or 'its start'}"
                )
                frames = [call.frame() for call in reversed(stacks.get(task.ident or -1, [])[:14])]
                lines += [
                    f"    {each}"
                    for each in frames
                    if "/testing/simulation/" not in each.file and "threading.py" not in each.file
                ]
        return "\n".join(lines)

    def check_over(self, limit_s: float) -> None:
        """Wait, in real time, until all threads have ended.

        Raises:
            CommTimeout: They have not ended after `limit_s`: a thread blocks outside of the scheduler's control.
        """
        if not self.finished.wait(limit_s):
            self._fail("a thread has blocked")  # the others end if they ever go on
            name = self.current.name if self.current is not None else "no thread"
            raise CommTimeout(
                f"a simulation has run for {limit_s:g} s of real time; it is the turn of {name}, which may block "
                f"in a call that the scheduler does not control\n{self.report()}"
            )
