"""Stand-ins for `threading`, `time`, `queue` and `ThreadPoolExecutor` that wait under the control of a scheduler.

Each works as the original in threads that belong to no simulation: other threads of the process use the same
modules meanwhile.
"""

from __future__ import annotations

import concurrent.futures
import importlib.util
import queue
import secrets
import sys
import threading
import time
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any

from ...transports.local import Hub
from .deliveries import DelayingHub
from .scheduler import Scheduler, Task, mine, running

EPOCH_S = 1_700_000_000.0
"""The result of `time.time` when a simulation begins."""


class SimulatedLock:
    """`threading.Lock`."""

    def __init__(self) -> None:
        self._token: queue.SimpleQueue[None] = queue.SimpleQueue()
        """Holds an item as long as no thread holds the lock."""
        self._token.put(None)
        self._waiting: list[Task] = []

    def acquire(self, blocking: bool = True, timeout: float = -1) -> bool:
        """See `threading.Lock.acquire`."""
        return self._take(blocking, None if timeout < 0 else timeout)

    def release(self) -> None:
        """See `threading.Lock.release`."""
        self._give()

    def locked(self) -> bool:
        """See `threading.Lock.locked`."""
        return self._token.empty()

    def __enter__(self) -> bool:
        return self._take()

    def __exit__(self, *error: object) -> None:
        self._give()

    def _take(self, blocking: bool = True, timeout_s: float | None = None) -> bool:
        scheduler = mine()
        if scheduler is None:
            return self._get(blocking, timeout_s)
        scheduler.pause("a lock")
        until_s = None if timeout_s is None else scheduler.now_s + timeout_s
        while not self._get(False):
            if not blocking or not wait_among(self._waiting, "a lock", _left(until_s)):
                return False
        return True

    def _get(self, blocking: bool, timeout_s: float | None = None) -> bool:
        try:
            self._token.get(blocking, timeout_s)
        except queue.Empty:
            return False
        return True

    def _give(self) -> None:
        scheduler = running()
        if not self._token.empty():
            if scheduler is not None and scheduler.failure is not None:
                return  # this thread ends, in a wait that has not taken the lock again
            raise RuntimeError("release unlocked lock")
        self._token.put(None)
        if scheduler is not None:
            for task in self._waiting:
                scheduler.wake(task)

    def give_for_a_wait(self) -> int:
        """Release the lock before a wait; return what `take_again` needs."""
        self._give()
        return 1

    def take_again(self, depth: int) -> None:
        """Acquire the lock after a wait."""
        self._take()


class SimulatedRLock(SimulatedLock):
    """`threading.RLock`."""

    def __init__(self) -> None:
        super().__init__()
        self._owner, self._depth = 0, 0

    def _take(self, blocking: bool = True, timeout_s: float | None = None) -> bool:
        me = threading.get_ident()
        if self._owner != me and not super()._take(blocking, timeout_s):
            return False
        self._owner, self._depth = me, self._depth + 1
        return True

    def _give(self) -> None:
        self._depth -= 1
        if self._depth <= 0:
            self._owner, self._depth = 0, 0
            super()._give()

    def give_for_a_wait(self) -> int:
        """See `SimulatedLock.give_for_a_wait`."""
        depth, self._depth = self._depth, 1
        self._give()
        return depth

    def take_again(self, depth: int) -> None:
        """See `SimulatedLock.take_again`."""
        self._take()
        self._depth = depth


class SimulatedCondition:
    """`threading.Condition`; only threads of a simulation may wait."""

    def __init__(self, lock: SimulatedLock | None = None) -> None:
        self._lock = lock or SimulatedRLock()
        self._waiting: list[Task] = []

    def acquire(self, blocking: bool = True, timeout: float = -1) -> bool:
        """See `threading.Condition.acquire`."""
        return self._lock._take(blocking, None if timeout < 0 else timeout)

    def release(self) -> None:
        """See `threading.Condition.release`."""
        self._lock._give()

    def __enter__(self) -> bool:
        return self._lock.__enter__()

    def __exit__(self, *error: object) -> None:
        self._lock.__exit__(*error)

    def wait(self, timeout: float | None = None) -> bool:
        """See `threading.Condition.wait`."""
        depth = self._lock.give_for_a_wait()
        woken = wait_among(self._waiting, "a condition", timeout)
        self._lock.take_again(depth)
        return woken

    def wait_for(self, predicate: Callable[[], object], timeout: float | None = None) -> Any:
        """See `threading.Condition.wait_for`."""
        scheduler = mine()
        until_s = None if timeout is None or scheduler is None else scheduler.now_s + timeout
        while not (result := predicate()):
            left = _left(until_s)
            if left is not None and left <= 0:
                break
            self.wait(left)
        return result

    def notify(self, n: int = 1) -> None:
        """See `threading.Condition.notify`. The scheduler draws the threads to wake."""
        scheduler = running()
        if scheduler is not None and self._waiting:
            for task in scheduler.random.sample(self._waiting, min(n, len(self._waiting))):
                scheduler.wake(task)
                self._waiting.remove(task)

    def notify_all(self) -> None:
        """See `threading.Condition.notify_all`."""
        self.notify(len(self._waiting))


def wait_among(waiting: list[Task], what: str, timeout_s: float | None) -> bool:
    """Wait as one of the threads in `waiting`, for at most `timeout_s`; return whether this thread was woken."""
    scheduler = mine()
    if scheduler is None or scheduler.current is None:
        raise RuntimeError("only threads of a simulation can wait for an object that was made in it")
    task = scheduler.current
    waiting.append(task)
    try:
        return scheduler.wait(what, timeout_s)
    finally:
        if task in waiting:
            waiting.remove(task)


def _left(until_s: float | None) -> float | None:
    scheduler = running()
    return None if until_s is None or scheduler is None else until_s - scheduler.now_s


class SimulatedEvent(threading.Event):
    """`threading.Event`."""

    def __init__(self) -> None:
        super().__init__()
        self._cond = SimulatedCondition(SimulatedLock())


class SimulatedThread(threading.Thread):
    """`threading.Thread`."""

    _task: Task | None = None
    _scheduler: Scheduler | None = None

    def start(self) -> None:
        """See `threading.Thread.start`."""
        scheduler = mine()
        if scheduler is not None:
            self._scheduler, self._task = scheduler, scheduler.add(self.name)
            body = self.run
            self.run = lambda: scheduler.run(self._task, body)  # type: ignore[method-assign, arg-type]
        super().start()
        if scheduler is not None:
            scheduler.pause("start")

    def is_alive(self) -> bool:
        """See `threading.Thread.is_alive`."""
        return super().is_alive() if self._task is None else not self._task.is_over

    def join(self, timeout: float | None = None) -> None:
        """See `threading.Thread.join`."""
        scheduler = mine()
        if scheduler is None or self._task is None:
            super().join(timeout)
        elif not self._task.is_over:
            wait_among(self._task.joiners, f"join of {self.name}", timeout)


class SimulatedFuture(concurrent.futures.Future[object]):
    """`concurrent.futures.Future`."""

    def __init__(self) -> None:
        super().__init__()
        self._condition = SimulatedCondition()  # type: ignore[assignment]


class SimulatedExecutor(concurrent.futures.Executor):
    """`ThreadPoolExecutor`; its threads end when it is shut down."""

    def __init__(
        self,
        max_workers: int = 4,
        thread_name_prefix: str = "",
        initializer: Callable[..., object] | None = None,
        initargs: tuple[object, ...] = (),
    ) -> None:
        self._max_workers, self._name = max_workers, thread_name_prefix or "executor"
        self._initialize, self._arguments = initializer or (lambda *_: None), initargs
        self._tasks, self._threads = _queue.Queue(), list[SimulatedThread]()
        self._shutdown = False

    def submit(self, task: Callable[..., object], /, *args: object, **options: object) -> Any:
        """See `ThreadPoolExecutor.submit`."""
        if self._shutdown:
            raise RuntimeError("cannot schedule new futures after shutdown")
        future = SimulatedFuture()
        self._tasks.put((future, task, args, options))
        if len(self._threads) < self._max_workers:
            name = f"{self._name}_{len(self._threads)}"
            self._threads.append(SimulatedThread(target=self._work, name=name, daemon=True))
            self._threads[-1].start()
        return future

    def shutdown(self, wait: bool = True) -> None:  # type: ignore[override]
        """See `ThreadPoolExecutor.shutdown`."""
        self._shutdown = True
        for _ in self._threads:
            self._tasks.put(None)
        for thread in self._threads if wait else ():
            thread.join()

    def _work(self) -> None:
        self._initialize(*self._arguments)
        while (item := self._tasks.get()) is not None:
            future, task, args, options = item
            if not future.set_running_or_notify_cancel():
                continue
            try:
                future.set_result(task(*args, **options))
            except BaseException as exc:
                future.set_exception(exc)
            del item, future, task, args, options


# The modules -------------------------------------------------------------------------------------------


class _Module(ModuleType):
    """A module, some of whose names are replaced."""

    def __init__(self, original: ModuleType, **names: object) -> None:
        super().__init__(original.__name__, original.__doc__)
        self._original = original
        vars(self).update(names)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._original, name)


def _either(original: Callable[..., Any], simulated: Callable[..., Any]) -> Callable[..., Any]:
    """A function that calls `original`, and in threads of a simulation `simulated`, with the scheduler first."""

    def call(*args: Any, **options: Any) -> Any:
        scheduler = mine()
        return original(*args, **options) if scheduler is None else simulated(scheduler, *args, **options)

    return call


_sleep = _either(time.sleep, lambda scheduler, seconds: scheduler.wait("sleep", seconds))
_token_hex = _either(secrets.token_hex, lambda scheduler, nbytes=32: scheduler.random.randbytes(nbytes).hex())
_executor = _either(
    concurrent.futures.ThreadPoolExecutor, lambda _, *args, **options: SimulatedExecutor(*args, **options)
)
_CLOCKS: dict[str, Callable[[], object]] = {
    "monotonic": _either(time.monotonic, lambda scheduler: scheduler.now_s),
    "perf_counter": _either(time.perf_counter, lambda scheduler: scheduler.now_s),
    "time": _either(time.time, lambda scheduler: EPOCH_S + scheduler.now_s),
    "monotonic_ns": _either(time.monotonic_ns, lambda scheduler: int(scheduler.now_s * 1e9)),
    "perf_counter_ns": _either(time.perf_counter_ns, lambda scheduler: int(scheduler.now_s * 1e9)),
    "time_ns": _either(time.time_ns, lambda scheduler: int((EPOCH_S + scheduler.now_s) * 1e9)),
}
_LOCKS: dict[str, object] = {
    "Lock": SimulatedLock,
    "RLock": SimulatedRLock,
    "Condition": SimulatedCondition,
    "Event": SimulatedEvent,
    "Thread": SimulatedThread,
}
_THREADING = _Module(threading, **_LOCKS)


def _copy_of(original: ModuleType, **names: Any) -> Any:
    """A copy of a module of the standard library, some of whose names are replaced."""
    found: Any = importlib.util.find_spec(original.__name__)
    copy = importlib.util.module_from_spec(found)
    found.loader.exec_module(copy)
    vars(copy).update(names)
    return copy


_ERRORS = {name: each for name, each in vars(queue).items() if name in ("Empty", "Full", "ShutDown")}
_queue = _copy_of(queue, threading=_THREADING, time=_CLOCKS["monotonic"], **_ERRORS)
"""Queues that wait by the locks above; only threads of a simulation may wait."""
_QUEUES = {"Queue": _queue.Queue, "SimpleQueue": _queue.Queue}

_SUBSTITUTES: list[tuple[object, object]] = [
    (threading, _THREADING),
    (time, _Module(time, sleep=_sleep, **_CLOCKS)),
    (queue, _Module(queue, **_QUEUES)),
    (secrets, _Module(secrets, token_hex=_token_hex)),
    (concurrent.futures.ThreadPoolExecutor, _executor),
    (Hub, DelayingHub),
    (time.sleep, _sleep),
    (secrets.token_hex, _token_hex),
    *((getattr(time, name), clock) for name, clock in _CLOCKS.items()),
    *((getattr(threading, name), substitute) for name, substitute in _LOCKS.items()),
    *((getattr(queue, name), substitute) for name, substitute in _QUEUES.items()),
]
_BY_ID = {id(original): substitute for original, substitute in _SUBSTITUTES}


@contextmanager
def in_place(packages: Collection[str]) -> Iterator[None]:
    """Put the substitutes into all modules of these packages that have been imported."""
    replaced = []
    for name, module in list(sys.modules.items()):
        if (name.split(".")[0] in packages or name in packages) and not name.startswith(__package__):
            names = vars(module)
            replaced += [(names, key, each) for key, each in names.items() if id(each) in _BY_ID]
    for names, key, original in replaced:
        names[key] = _BY_ID[id(original)]
    try:
        yield
    finally:
        for names, key, original in replaced:
            names[key] = original
