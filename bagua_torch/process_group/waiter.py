"""Waiting for long messages over gloo, whose peers may die or close meanwhile.

Gloo fails the operations that a connection has not begun when it is closed. One that is under way is forgotten
(`Pair::signalException` of its TCP transport looks at neither the message that is being read nor those that are
being written), so that a wait for it lasts until its timeout. A wait with a short timeout is no remedy: a timeout
closes all connections. So a thread waits here, while the caller asks now and then whether the connection is open.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, wait
from datetime import timedelta
from typing import TypeAlias, TypeVar

import torch.distributed as dist

T = TypeVar("T")

CHECK_S = 0.5
"""How often connections are checked during a wait."""

BUFFERED_BYTES = 1 << 20
"""Messages up to this size usually fit in the send buffer of a socket, for which Linux allows 4 MiB, and arrive
from it even if their process dies. For longer ones, a thread takes less than a tenth of their time."""

GRACE_S = 0.1
"""How long a completed message may take to be noticed after its connection was found closed."""

Pending: TypeAlias = "tuple[int, dist.Work]"
"""The peer of an operation, and the `Work` to wait for."""


def wait_watched(
    works: Sequence[Pending], until: float, check: Callable[[int], None]
) -> tuple[int, RuntimeError] | None:
    """Wait for operations in order. Returns the peer and the error of the first that fails, or None.

    Args:
        works: The operations.
        until: When to stop, in seconds of `time.monotonic`.
        check: Called with the peer of an operation; raises RuntimeError if its connection is closed.
    """
    complete, has_ended = 0, False
    given_up: int | None = None  # the operation whose connection is closed; it may end just then

    def wait_for_all() -> None:
        nonlocal complete, has_ended
        try:
            for _, work in works:
                work.wait(timedelta(seconds=max(until - time.monotonic(), 0.001)))
                complete += 1
        finally:
            has_ended = True

    def check_next() -> None:
        nonlocal given_up
        index = complete
        try:
            if index < len(works):
                check(works[index][0])
        except RuntimeError:
            time.sleep(GRACE_S)
            if complete == index and not has_ended:
                given_up = index
                raise

    try:
        run_watched(wait_for_all, check_next)
    except RuntimeError as exc:
        return works[complete if given_up is None else given_up][0], exc
    return None


def wait_for_collective(
    work: dist.Work, until: float, check: Callable[[], None], every_s: float = CHECK_S
) -> None:
    """Wait for a collective of gloo, whose timeout closes nothing, so that no thread is needed.

    Args:
        work: The `Work` of the collective.
        until: When to stop, in seconds of `time.monotonic`.
        check: Raises RuntimeError if a connection is closed.
        every_s: How often to check, in seconds.

    Raises:
        RuntimeError: It failed, or has not ended in time.
    """
    while True:
        left_s = until - time.monotonic()
        try:
            work.wait(timedelta(seconds=max(min(left_s, every_s), 0.001)))
            return
        except RuntimeError:
            if work.is_completed():  # it failed, or ended just after this wait
                work.wait()
                return
            if left_s <= every_s:
                raise
        check()


def run_watched(call: Callable[[], T], check: Callable[[], None], check_s: float = CHECK_S) -> T:
    """The result of a call that may wait for a dead process, and cannot be interrupted.

    A thread makes the call. It is abandoned if `check` raises an error, which is called every `check_s` seconds.
    """
    future = in_background(call)
    while wait([future], check_s).not_done:
        check()
    return future.result()


def in_background(call: Callable[[], T]) -> Future[T]:
    """The future of a call that a thread makes."""
    future: Future[T] = Future()

    def work() -> None:
        try:
            future.set_result(call())
        except BaseException as exc:
            future.set_exception(exc)

    threading.Thread(target=work, name="bagua-waiter", daemon=True).start()
    return future
