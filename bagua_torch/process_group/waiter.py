"""Waiting for long messages over gloo, whose peers may die or close meanwhile.

Gloo fails the operations that a connection has not begun when it is closed. One that is under way is forgotten
(`Pair::signalException` of its TCP transport looks at neither the message that is being read nor those that are
being written), so that a wait for it lasts until its timeout. A wait with a short timeout is no remedy: a timeout
closes all connections. So a thread waits here, while the caller asks now and then whether the connection is open.
"""

from __future__ import annotations

import contextlib
import queue
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, wait
from datetime import timedelta
from typing import Any, TypeVar

T = TypeVar("T")

CHECK_S = 0.5
"""How often connections are checked during a wait."""

BUFFERED_BYTES = 1 << 20
"""Messages up to this size usually fit in the send buffer of a socket, for which Linux allows 4 MiB, and arrive
from it even if their process dies. For longer ones, a thread takes less than a tenth of their time."""

_GRACE_S = 0.1
"""How long a completed message may take to be noticed after its connection was found closed."""

Pending = tuple[int, Any]
"""The peer of an operation, and the `Work` to wait for."""


class _Batch:
    """Operations to wait for, in order, and how many are complete."""

    def __init__(self, works: Sequence[Pending], until: float) -> None:
        self.works, self.until = works, until
        self.complete = 0
        self.result: queue.SimpleQueue[BaseException | None] = queue.SimpleQueue()

    def wait(self) -> None:
        try:
            for _, work in self.works:
                work.wait(timedelta(seconds=max(self.until - time.monotonic(), 0.001)))
                self.complete += 1
        except BaseException as exc:
            self.result.put(exc)
        else:
            self.result.put(None)


class Waiter:
    """Waits for operations of gloo, in a thread of its own that starts with the first wait."""

    def __init__(self) -> None:
        self._batches: queue.SimpleQueue[_Batch | None] | None = None

    def wait(
        self, works: Sequence[Pending], until: float, check: Callable[[int], None]
    ) -> tuple[int, RuntimeError] | None:
        """Wait for operations. Returns the peer and the error of the first that fails, or None.

        Args:
            works: The operations.
            until: When to stop, in seconds of `time.monotonic`.
            check: Called with the peer of an operation; raises RuntimeError if its connection is closed.
        """
        if self._batches is None:
            self._batches = queue.SimpleQueue()
            threading.Thread(target=_serve, args=(self._batches,), name="bagua-gloo-waiter", daemon=True).start()
        batch = _Batch(works, until)
        self._batches.put(batch)
        try:
            exc = self._result_of(batch, check)
        except BaseException:
            self.close()  # the thread may wait until the timeout
            raise
        if exc is None:
            return None
        if not isinstance(exc, RuntimeError):
            raise exc
        return works[batch.complete][0], exc

    def _result_of(self, batch: _Batch, check: Callable[[int], None]) -> BaseException | None:
        while True:
            with contextlib.suppress(queue.Empty):
                return batch.result.get(timeout=CHECK_S)
            index = batch.complete
            if index == len(batch.works):
                continue
            try:
                check(batch.works[index][0])
            except RuntimeError as exc:
                with contextlib.suppress(queue.Empty):
                    return batch.result.get(timeout=_GRACE_S)
                if batch.complete == index:
                    self.close()
                    return exc

    def close(self) -> None:
        """Let the thread end once it waits for nothing."""
        if self._batches is not None:
            self._batches.put(None)
            self._batches = None

    def __del__(self) -> None:
        self.close()


def run_watched(call: Callable[[], T], check: Callable[[], None], check_s: float = CHECK_S) -> T:
    """The result of a call that may wait for a dead process, and cannot be interrupted.

    A thread makes the call. It is abandoned if `check` raises an error, which is called every `check_s` seconds.
    """
    future: Future[T] = Future()

    def work() -> None:
        try:
            future.set_result(call())
        except BaseException as exc:
            future.set_exception(exc)

    threading.Thread(target=work, name="bagua-connect", daemon=True).start()
    while wait([future], check_s).not_done:
        check()
    return future.result()


def wait_for_collective(work: Any, until: float, check: Callable[[], None]) -> None:
    """Wait for a collective of gloo, whose timeout closes nothing.

    Args:
        work: The `Work` of the collective.
        until: When to stop, in seconds of `time.monotonic`.
        check: Raises RuntimeError if a connection is closed.

    Raises:
        RuntimeError: It failed, or has not ended in time.
    """
    while True:
        left_s = until - time.monotonic()
        try:
            work.wait(timedelta(seconds=max(min(left_s, CHECK_S), 0.001)))
            return
        except RuntimeError:
            if work.is_completed():  # it failed, or ended just after this wait
                work.wait()
                return
            if left_s <= CHECK_S:
                raise
        check()


def _serve(batches: queue.SimpleQueue[_Batch | None]) -> None:
    while (batch := batches.get()) is not None:
        batch.wait()
        del batch  # it refers to arrays
