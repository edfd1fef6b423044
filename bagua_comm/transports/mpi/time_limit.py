"""Time limits for calls of MPI that block and cannot be interrupted."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TypeVar

from mpi4py import MPI

from ...errors import CommTimeout

T = TypeVar("T")


class BlockedCall(threading.Thread):
    """A thread that is inside a call of MPI; MPI cannot be shut down meanwhile."""


def in_time(call: Callable[[], T], limit_s: float, name: str) -> T:
    """Make a call of MPI that blocks and cannot be interrupted.

    Args:
        call: The call.
        limit_s: How long it may take.
        name: The name of the call, for the error.

    Raises:
        CommTimeout: The call has not returned within `limit_s`. It continues on its thread until the process
        ends.
    """
    if MPI.Query_thread() < MPI.THREAD_SERIALIZED:
        return call()
    results: list[T] = []
    failures: list[BaseException] = []

    def run() -> None:
        try:
            results.append(call())
        except BaseException as exc:
            failures.append(exc)

    thread = BlockedCall(target=run, name=name, daemon=True)
    thread.start()
    thread.join(limit_s)
    if failures:
        raise failures[0]
    if not results:
        raise CommTimeout(f"{name} did not return within {limit_s:.3g} s: a rank does not take part")
    return results[0]
