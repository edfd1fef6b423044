"""Numbered locks among all processes and threads of a host; the kernel releases the locks of a process that ends.

They are POSIX record locks on the bytes of one file. A process loses all of them when it closes any descriptor of
the file, so each process opens it once and leaves it open. Linux's locks of open file descriptions would not do:
a forked child shares them with its parent, and would keep them after its parent's end.
"""

from __future__ import annotations

import errno
import fcntl
import functools
import os
import threading
import time
import weakref
from pathlib import Path

NUMBERS = 1 << 61
"""The upper bound of the numbers."""


class Mutex:
    """A lock among the threads of this process. It is free in a forked child, and in a copy by pickle."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        _mutexes[id(self)] = self

    def __reduce__(self) -> tuple[type[Mutex], tuple[()]]:
        return Mutex, ()


_mutexes: weakref.WeakValueDictionary[int, Mutex] = weakref.WeakValueDictionary()


def any_is_locked() -> bool:
    """Whether a thread of this process holds a `Mutex`.

    The garbage collector may have interrupted that thread, so what it calls must not wait for one.
    """
    return any(mutex.lock.locked() for ref in _mutexes.valuerefs() if (mutex := ref()) is not None)


def _renew() -> None:
    for mutex in _mutexes.values():
        mutex.lock = threading.Lock()


os.register_at_fork(after_in_child=_renew)  # another thread may have held them


@functools.cache
def locks_in(path: Path) -> Locks:
    """The locks of a file, which is made if it is missing; one object in each process.

    Raises:
        OSError: The file cannot be opened.
    """
    return Locks(os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | getattr(os, "O_NOFOLLOW", 0), 0o600))


class Holder:
    """A holder of locks, which may wait for one: one operation of one thread.

        holder = Holder()
        try:
            ... locks.take(number, holder) ...
        finally:
            holder.is_over = True  # before a call here, a signal handler could raise
            locks.tidy()

    If one raises after that, the next use of the locks in this process releases the holder's.
    """

    __slots__ = ("is_over", "numbers", "thread", "waits_for")

    def __init__(self) -> None:
        self.thread, self.is_over = threading.get_ident(), False
        self.numbers: set[int] = set()
        self.waits_for: int | None = None


class Locks:
    """The locks of a file: the holder of lock n locks byte 2 n, and its waiters share a lock of byte 2 n + 1."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self._mutex = Mutex()
        self._holders: set[Holder] = set()
        os.register_at_fork(after_in_child=self._holders.clear)  # a forked child inherits the file, and no lock

    def tidy(self) -> None:
        """Release the locks of holders that are over."""
        with self._mutex.lock:
            self._tidy()

    def _tidy(self) -> None:
        for holder in [each for each in self._holders if each.is_over]:
            for number in tuple(holder.numbers):
                self._unlock(2 * number)
                holder.numbers.discard(number)
            self._end_wait(holder)
            self._holders.discard(holder)

    def _end_wait(self, holder: Holder) -> None:
        number = holder.waits_for
        if number is not None:
            if not any(each.waits_for == number for each in self._holders if each is not holder):
                self._unlock(2 * number + 1)
            holder.waits_for = None

    def take(self, number: int, holder: Holder) -> bool:
        """Take a lock if it is free; return whether it was.

        Raises:
            OSError: The file system has no locks.
        """
        with self._mutex.lock:
            self._tidy()
            if any(number in each.numbers for each in self._holders):
                return False
            self._holders.add(holder)
            holder.numbers.add(number)  # first, so that it is released wherever this ends
            if self._try(2 * number, fcntl.LOCK_EX):
                return True
            holder.numbers.discard(number)
            return False

    def give(self, number: int, holder: Holder) -> None:
        """Release a lock."""
        with self._mutex.lock:
            self._unlock(2 * number)
            holder.numbers.discard(number)

    def mine(self, number: int) -> bool:
        """Whether this thread holds the lock."""
        me = threading.get_ident()
        with self._mutex.lock:
            self._tidy()
            return any(number in each.numbers and each.thread == me for each in self._holders)

    def wanted(self, number: int) -> bool:
        """Whether another holder waits for a lock."""
        with self._mutex.lock:
            self._tidy()
            if any(each.waits_for == number for each in self._holders):
                return True
            free = self._try(2 * number + 1, fcntl.LOCK_EX)
            if free:
                self._unlock(2 * number + 1)
            return not free

    def wait(self, number: int, timeout_s: float, holder: Holder) -> bool:
        """Take a lock if it becomes free within this time; meanwhile it is `wanted`."""
        deadline, pause_s = time.monotonic() + timeout_s, 0.001
        with self._mutex.lock:
            self._holders.add(holder)
            holder.waits_for = number
        while not self.take(number, holder):
            with self._mutex.lock:
                self._try(2 * number + 1, fcntl.LOCK_SH)  # may fail during a call of `wanted`
            if time.monotonic() >= deadline:
                break
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, 0.05)
        with self._mutex.lock:
            self._end_wait(holder)
        return number in holder.numbers

    def _unlock(self, byte: int) -> None:
        fcntl.lockf(self._descriptor, fcntl.LOCK_UN, 1, byte)

    def _try(self, byte: int, kind: int) -> bool:
        try:
            fcntl.lockf(self._descriptor, kind | fcntl.LOCK_NB, 1, byte)
        except OSError as exc:
            if exc.errno in (errno.EAGAIN, errno.EACCES):
                return False
            raise
        return True
