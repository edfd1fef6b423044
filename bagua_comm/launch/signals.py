"""Signals that end a supervised job."""

from __future__ import annotations

import contextlib
import ctypes
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from types import FrameType

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
"""The signals that end the job."""


class Signals:
    """Forwards the signals that end the job to mpirun; a second one kills it."""

    def __init__(self) -> None:
        self.first: signal.Signals | None = None
        """The first signal that has come."""
        self.count = 0
        """The number of signals that have come."""
        self._process: subprocess.Popen[bytes] | None = None
        self._before: dict[signal.Signals, Callable[[int, FrameType | None], object] | int | None] = {}

    def install(self) -> None:
        """Install the handlers; a signal that is ignored, as SIGHUP under nohup, remains so."""
        for number in SIGNALS:
            if signal.getsignal(number) is not signal.SIG_IGN:
                self._before[number] = signal.signal(number, self._on_signal)

    def restore(self) -> None:
        """Restore the handlers from before."""
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def forward_to(self, process: subprocess.Popen[bytes] | None) -> None:
        """Forward signals to this process; to none if it is None."""
        self._process = process

    @contextlib.contextmanager
    def held(self) -> Iterator[None]:
        """Block the signals while the body of `with` runs."""
        before = signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
        try:
            yield
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)

    def _on_signal(self, number: int, frame: object) -> None:
        self.count += 1
        self.first = self.first or signal.Signals(number)
        if self._process is None:
            return
        if self.count > 1:
            self._process.kill()
        else:
            self._process.send_signal(signal.SIGTERM if number == signal.SIGHUP else number)


def die_with_supervisor() -> Callable[[], None] | None:
    """Return a `preexec_fn` that has a child end when this process is killed; None if the system has none."""
    if not sys.platform.startswith("linux"):
        return None
    prctl = ctypes.CDLL(None).prctl
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, ())
    parent_death_signal = 1  # PR_SET_PDEATHSIG

    def prepare() -> None:
        prctl(parent_death_signal, int(signal.SIGTERM))
        signal.pthread_sigmask(signal.SIG_SETMASK, mask - set(SIGNALS))

    return prepare
