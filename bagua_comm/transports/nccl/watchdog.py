"""A watchdog for calls in flight of a library that reports no missing peers: it ends them after a time limit.

Calls that only enqueue work return at once, whatever happens to the work. A `Watch` records the calls of a
communicator, each with an event after its work. The thread of a `Watchdog` drops the calls that have ended. It
aborts the communicator when a call takes longer than `timeout_s`, or when the library reports an error. Then
streams continue, with garbage in the arrays that were to be received, and the next call raises the reason.
"""

from __future__ import annotations

import atexit
import ctypes
import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeout
from contextlib import suppress
from typing import TypeVar

from ...errors import CommAborted, CommError, CommTimeout
from ...execution.cuda import Event, passed, use_device

T = TypeVar("T")

LOOK_S = 0.2
"""How often the watchdog checks calls in flight; ten times in `timeout_s` if that is more often."""

LEAVE_S = 10.0
"""How long `Watch.leave` waits for a communicator to be freed: the library may need the other ranks for that."""


class Call:
    """One call in flight; `event` is recorded after its work once the library has returned."""

    __slots__ = ("event", "limit_s", "name", "nbytes", "start")

    def __init__(self, name: str, nbytes: int, limit_s: float) -> None:
        self.name, self.nbytes, self.limit_s, self.start = name, nbytes, limit_s, time.monotonic()
        self.event: Event | None = None


class Watch:
    """The calls in flight of one communicator, why it failed, and its end.

    Args:
        who: The rank, for errors.
        watchdog: The watchdog of the communicator.
        check: Raises a `CommError` if the library has found an error.
        destroy: Frees the communicator; may wait for peers.
        abort: Ends the calls in flight, and frees the communicator.
        notify: Notifies the other ranks why this one has aborted, without waiting.
        listen: Raises a `CommError` if another rank has aborted; called while calls are in flight.
    """

    def __init__(
        self,
        who: str,
        watchdog: Watchdog,
        *,
        check: Callable[[], None],
        destroy: Callable[[], None],
        abort: Callable[[], None],
        notify: Callable[[CommError], None],
        listen: Callable[[], None],
    ) -> None:
        self.who, self._watchdog = who, watchdog
        self._check, self._destroy, self._abort = check, destroy, abort
        self._notify, self._listen = notify, listen
        self._calls: deque[Call] = deque()
        self.spare_events: list[Event] = []
        self.stuck = False
        """Whether a thread hangs inside the library: to free its communicator would end the process."""
        self.inside = False
        """Whether a thread is inside the library now. Set it, then call `check_usable` (see `_end`); set it back
        by an assignment in `finally`, since a signal handler may raise before a call there."""
        self._failure: tuple[type[CommError], str] | None = None
        self._is_reported = self._closed = False
        self._looking = threading.Lock()
        self._over = threading.Event()
        self._ender = threading.Thread(target=self._end, name="end of a communicator", daemon=True)
        self._ender.start()
        watchdog.add(self)
        atexit.register(self.leave, LEAVE_S)

    @property
    def calls(self) -> tuple[Call, ...]:
        """The calls in flight, oldest first, as of the last `look`."""
        return tuple(self._calls)

    @property
    def failure(self) -> CommError | None:
        """The error that has ended the communicator, if one has."""
        return None if self._failure is None else self._failure[0](self._failure[1])

    def begin(self, name: str, nbytes: int, limit_s: float | None = None) -> Call:
        """Record a call that is about to be made, and may take `limit_s`; the watchdog's limit if None."""
        call = Call(name, nbytes, self._watchdog.timeout_s if limit_s is None else limit_s)
        self._calls.append(call)
        self._watchdog.wake()
        return call

    def look(self) -> bool:
        """Drop the calls that have ended, fail if one takes too long, and return whether any is left."""
        with self._looking:
            if self._failure is not None or self._closed:
                return False
            try:
                while self._calls and (event := self._calls[0].event) is not None and passed(event):
                    self._calls.popleft()
                    self.spare_events.append(event)
            except RuntimeError as exc:  # the device has met an error, and does no more work
                self.fail(CommError, f"{self.who}: CUDA failed: {exc}")
            try:
                self._check()
                if self._calls:
                    self._listen()
            except CommError as exc:
                self.fail(type(exc), str(exc))
            for call in tuple(self._calls):
                age = time.monotonic() - call.start
                if age > call.limit_s:
                    where = "in the library" if call.event is None else "on its stream"
                    reason = f"{call.name} of {call.nbytes} bytes is not done after {age:.1f} s {where}"
                    self.fail(CommTimeout, f"{self.who}: {reason}")
            return bool(self._calls) and self._failure is None

    def drain(self, limit_s: float) -> None:
        """Wait until no call is in flight or the communicator has failed, but at most `limit_s`."""
        deadline = time.monotonic() + limit_s
        while self.look() and time.monotonic() < deadline:
            time.sleep(0.0001)

    def fail(self, kind: type[CommError], reason: str, *, is_reported: bool = False) -> None:
        """Abort the communicator; later calls raise this error, and `close` does unless it `is_reported`."""
        first = self._failure is None
        if first:
            self._failure = kind, reason
            self._is_reported = is_reported
        self._over.set()
        if first:
            self._notify(kind(reason))

    def check_usable(self, cause: BaseException | None = None) -> None:
        """Raise the failure, if there is one."""
        if self._failure is not None:
            kind, reason = self._failure
            self._is_reported = True
            raise kind(reason) from cause
        if self._closed:
            raise CommAborted(f"{self.who}: this communicator is closed")

    def abort(self) -> None:
        """Abort at the caller's request."""
        self.fail(CommAborted, f"{self.who}: this communicator was aborted")
        self._is_reported = True

    def abandon(self, reason: str) -> None:
        """Free the communicator in the background, and end its calls in flight, without notices or waits."""
        self._is_reported = True
        if self._closed:
            return
        if self._failure is None:
            self._failure = CommAborted, f"{self.who}: {reason}"
        self._closed = True
        atexit.unregister(self.leave)
        self._watchdog.discard(self)
        self._over.set()

    def close(self, limit_s: float) -> None:
        """Free the communicator, once its calls have ended; raises the first failure that no call has raised."""
        self.leave(limit_s)
        if self._failure is not None and not self._is_reported:
            self.check_usable()

    def leave(self, limit_s: float) -> None:
        """Free the communicator in any state, within a time limit. Also called when the process ends."""
        if self._closed:
            return
        atexit.unregister(self.leave)
        self.drain(limit_s)
        if self._calls:
            self.fail(CommAborted, f"{self.who}: this communicator was closed with calls in flight")
        self._closed = True
        self._watchdog.discard(self)
        self._over.set()
        self._ender.join(LEAVE_S)

    def _end(self) -> None:
        """Wait for the end, then free the communicator; on a thread, since freeing may wait for peers forever.

        The thread starts early, since none can be started while the process ends.
        """
        try:
            _work_beside(self._watchdog.device)
        except RuntimeError as exc:  # of CUDA
            self.fail(CommError, f"{self.who}: CUDA failed: {exc}")
        self._over.wait()
        # A thread that is inside the library is about to leave it, unless it hangs there.
        deadline = time.monotonic() + 1
        while self.inside and time.monotonic() < deadline:
            time.sleep(0.001)
        with self._looking:  # no more looks from now on
            free = self._destroy if self._failure is None else self._abort
        if self.stuck:
            return
        try:
            free()
        except Exception as exc:
            self.fail(CommError, f"{self.who}: this communicator could not be freed: {exc}")


class Watchdog:
    """A thread that watches a communicator and those split off from it; it sleeps while no call is in flight.

    Args:
        device: The device of the communicators.
        timeout_s: How long a call may take.
    """

    def __init__(self, device: int, timeout_s: float) -> None:
        self.device, self.timeout_s = device, timeout_s
        self._watches: list[Watch] = []
        self._busy = threading.Event()

    @property
    def watches(self) -> tuple[Watch, ...]:
        """The communicators that it watches."""
        return tuple(self._watches)

    def add(self, watch: Watch) -> None:
        """Watch one more communicator."""
        self._watches.append(watch)
        if len(self._watches) == 1:
            self.start(self._run).add_done_callback(self._ended)

    def discard(self, watch: Watch) -> None:
        """Stop watching a communicator; any thread may call this, more than once."""
        with suppress(ValueError):
            self._watches.remove(watch)
        self._busy.set()

    def _ended(self, thread: Future[None]) -> None:
        """Fail the communicators that are still watched, if the thread has ended by an error."""
        exc = thread.exception()
        if exc is not None:
            for watch in self.watches:
                reason = f"nobody watches this communicator: {type(exc).__name__}: {exc}"
                watch.fail(CommError, f"{watch.who}: {reason}")

    def abandon(self, reason: str) -> None:
        """Abandon all communicators; see `Watch.abandon`."""
        for watch in self.watches:
            watch.abandon(reason)

    def wake(self) -> None:
        """Wake the thread, since a call is in flight."""
        if not self._busy.is_set():
            self._busy.set()

    def limited(self, task: Callable[[], T], limit_s: float, who: str) -> T:
        """The result of `task`, a library call without a time limit.

        Raises:
            CommTimeout: It takes longer than `limit_s`. It continues on its thread.
        """
        try:
            return self.start(task).result(limit_s)
        except FutureTimeout as exc:
            raise CommTimeout(f"{who} has waited {limit_s:g} s for other ranks to come") from exc

    def start(self, task: Callable[[], T]) -> Future[T]:
        """Run `task` on a thread that does not keep the process alive."""
        outcome: Future[T] = Future()

        def run() -> None:
            try:
                _work_beside(self.device)
                outcome.set_result(task())
            except BaseException as exc:
                outcome.set_exception(exc)

        threading.Thread(target=run, name="watchdog", daemon=True).start()
        return outcome

    def _run(self) -> None:
        while self._watches:
            self._busy.wait()
            self._busy.clear()
            while True:
                in_flight = [watch.look() for watch in self.watches]
                if not any(in_flight):
                    break
                time.sleep(min(LOOK_S, self.timeout_s / 10))


_RELAXED = 2
"""CU_STREAM_CAPTURE_MODE_RELAXED."""


def _work_beside(device: int) -> None:
    """Make a device current on this thread, and keep the thread from breaking captures of other threads.

    A query of an event breaks a capture in global mode, which is PyTorch's default, unless the querying thread
    has relaxed its own mode. CuPy does not offer that call.
    """
    use_device(device)
    with suppress(OSError, AttributeError):  # there is no driver, or not under this name
        mode = ctypes.c_int(_RELAXED)
        ctypes.CDLL("libcuda.so.1").cuThreadExchangeStreamCaptureMode(ctypes.byref(mode))
