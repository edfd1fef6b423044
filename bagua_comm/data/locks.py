"""Locks on numbers, among all processes and threads of a host; a process that ends gives its locks back.

They are locks of POSIX on the bytes of one file, which the kernel keeps. All of a process's go when it closes any
descriptor of that file, so each process opens it once and leaves it open.
"""

from __future__ import annotations

import errno
import fcntl
import functools
import os
import threading
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path

NUMBERS = 1 << 61
"""Numbers are less than this."""


@functools.cache
def locks_in(path: Path) -> Locks:
    """The locks of a file, which is made if it is not there; one object in each process.

    Raises:
        OSError: The file cannot be opened.
    """
    return Locks(os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | getattr(os, "O_NOFOLLOW", 0), 0o600))


class Locks:
    """Byte 2 n of a file is held by who has lock n, and byte 2 n + 1 is shared by those who wait for it."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self._renew()

    def _renew(self) -> None:
        self._pid = os.getpid()
        self._mutex = threading.Lock()
        self._held: dict[int, int] = {}
        self._waiting: Counter[int] = Counter()

    def _own(self) -> threading.Lock:
        if self._pid != os.getpid():  # a forked child inherits the file, and no lock
            self._renew()
        return self._mutex

    def take(self, number: int) -> bool:
        """Take a lock, if nobody has it.

        Raises:
            OSError: The file system has no locks.
        """
        with self._own():
            if number in self._held or not self._try(2 * number, fcntl.LOCK_EX):
                return False
            self._held[number] = threading.get_ident()
            return True

    def give(self, number: int) -> None:
        """Give a lock back."""
        with self._own():
            del self._held[number]
            fcntl.lockf(self._descriptor, fcntl.LOCK_UN, 1, 2 * number)

    def mine(self, number: int) -> bool:
        """Whether this very thread has the lock."""
        with self._own():
            return self._held.get(number) == threading.get_ident()

    def wanted(self, number: int) -> bool:
        """Whether somebody waits for a lock."""
        with self._own():
            if self._waiting[number]:
                return True
            free = self._try(2 * number + 1, fcntl.LOCK_EX)
            if free:
                fcntl.lockf(self._descriptor, fcntl.LOCK_UN, 1, 2 * number + 1)
            return not free

    def wait(self, number: int, timeout_s: float, give_up: Callable[[], bool] = lambda: False) -> bool:
        """Take a lock, if it comes free within this time; meanwhile it is `wanted`."""
        deadline, pause_s = time.monotonic() + timeout_s, 0.001
        with self._own():
            self._waiting[number] += 1
        try:
            while not self.take(number):
                with self._own():
                    self._try(2 * number + 1, fcntl.LOCK_SH)  # may fail for the instant in which it is asked for
                if time.monotonic() >= deadline or give_up():
                    return False
                time.sleep(pause_s)
                pause_s = min(2 * pause_s, 0.05)
            return True
        finally:
            with self._own():
                self._waiting[number] -= 1
                if not self._waiting[number]:
                    del self._waiting[number]
                    fcntl.lockf(self._descriptor, fcntl.LOCK_UN, 1, 2 * number + 1)

    def _try(self, byte: int, kind: int) -> bool:
        try:
            fcntl.lockf(self._descriptor, kind | fcntl.LOCK_NB, 1, byte)
        except OSError as exc:
            if exc.errno in (errno.EAGAIN, errno.EACCES):
                return False
            raise
        return True
