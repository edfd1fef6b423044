"""Requests to write a flight record, to a rank on the same host that others wait for.

A rank that hangs outside of any call does not know that others wait for it. A rank whose call has timed out sends
it SIGURG, which processes that do not expect it ignore. Python answers between two steps of the main thread, and
interrupts system calls such as sleeps; a thread inside a library of C that does not return cannot answer.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from contextlib import suppress
from types import FrameType

_SIGNAL = getattr(signal, "SIGURG", None)


def answer_requests(write: Callable[[], object]) -> None:
    """Call `write` at each request to this process, unless its program handles the signal itself.

    Call it on the main thread. A child of this process does not answer.
    """
    if _SIGNAL is None or signal.getsignal(_SIGNAL) not in (signal.SIG_DFL, None):
        return
    process = os.getpid()

    def answer(number: int, frame: FrameType | None) -> None:
        if os.getpid() == process:
            write()

    signal.signal(_SIGNAL, answer)


def request_record(process: int) -> None:
    """Ask a process of this host, by its id, to write its flight record. Never raises."""
    if _SIGNAL is not None:
        with suppress(OSError):
            os.kill(process, _SIGNAL)
