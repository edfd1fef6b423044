"""Requests to write a flight record, to a rank on the same host that others wait for.

A rank that hangs outside of any call does not know that others wait for it. A rank whose call has timed out sends
it SIGURG, which processes that do not expect it ignore. Python answers between two steps of the main thread, and
interrupts system calls such as sleeps; a thread inside a library of C that does not return cannot answer.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from types import FrameType

_SIGNAL = getattr(signal, "SIGURG", None)

ANSWERS = 8
"""The largest number of requests that a process answers: a library may use the signal for itself."""

PAUSE_S = 1.0
"""The shortest time between two answers, since all ranks that wait send requests."""


def answer_requests(write: Callable[[], object]) -> None:
    """Call `write` at requests to this process, unless the program or a library handles the signal.

    Only the main thread can install that. A child of this process does not answer, unless it calls this itself.
    """
    is_main = threading.current_thread() is threading.main_thread()
    if _SIGNAL is None or not is_main or signal.getsignal(_SIGNAL) is not signal.SIG_DFL:
        return
    process, answered_s = os.getpid(), [-PAUSE_S]

    def answer(number: int, frame: FrameType | None) -> None:
        now_s = time.monotonic()
        if os.getpid() == process and len(answered_s) <= ANSWERS and now_s >= answered_s[-1] + PAUSE_S:
            answered_s.append(now_s)
            write()

    def stop_in_child() -> None:
        if signal.getsignal(_SIGNAL) is answer:
            signal.signal(_SIGNAL, signal.SIG_DFL)

    signal.signal(_SIGNAL, answer)
    os.register_at_fork(after_in_child=stop_in_child)


def request_record(process: int) -> None:
    """Ask a process of this host, by its id, to write its flight record. Never raises."""
    if _SIGNAL is not None:
        with suppress(OSError):
            os.kill(process, _SIGNAL)
