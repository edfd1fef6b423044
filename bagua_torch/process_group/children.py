"""Objects and sockets of gloo in the forked children of this process.

Children must not destroy the objects. Threads of gloo own their connections, and a store serves its clients in a
thread. A child, such as a worker of a DataLoader, has the objects without the threads, and with closed sockets.
Their destructors wait for the threads or use the sockets, so that a garbage collection in the child, or its end,
would end it by a signal or never.

Nor may they keep the sockets open. A peer notices the death of this process when the kernel closes its
connections, and would wait for its time limit as long as a child has them. Gloo does not give its sockets away,
so they are found in /proc: those that are new after the ranks have connected.
"""

from __future__ import annotations

import ctypes
import itertools
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import TypeVar
from weakref import WeakValueDictionary

T = TypeVar("T")

_numbers = itertools.count()
_alive: WeakValueDictionary[int, object] = WeakValueDictionary()
_held: list[list[object]] = []
"""Living objects, for each fork in progress: another thread may release the last reference meanwhile."""


def kept_in_children(made: T) -> T:
    """Never destroy `made` in later forked children of this process; returns it."""
    _alive[next(_numbers)] = made
    return made


def _hold() -> None:
    _held.append([each() for each in _alive.valuerefs()])


def _release() -> None:
    _held.pop()


def _keep() -> None:
    """Add a reference that nothing releases, not even the end of the interpreter."""
    _hold()  # again: another thread may have made some since
    for each in itertools.chain.from_iterable(_held):
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(each))
    _held.clear()


# Sockets ------------------------------------------------------------------------------------------------

_OPEN = "/proc/self/fd"

_known: dict[int, str] = {}
"""By file descriptor: the socket that it was when it was found. It may be another file by now."""


@contextmanager
def closed_in_children() -> Iterator[None]:
    """Close the TCP sockets of gloo that the body opens in later children of this process, forked or started.

    Gloo's are inheritable; Python's are not, so that those which other threads open meanwhile stay as they are.
    Does nothing without /proc.
    """
    before = _descriptors()
    yield
    for descriptor in _descriptors() - before:
        with suppress(OSError):  # another thread has closed it
            name = _name_of(descriptor)
            if name.startswith("socket:") and os.get_inheritable(descriptor) and _is_tcp(descriptor):
                os.set_inheritable(descriptor, False)
                _known[descriptor] = name


def _descriptors() -> set[int]:
    """The open file descriptors; none without /proc."""
    try:
        return {int(each) for each in os.listdir(_OPEN)}
    except OSError:
        return set()


def _name_of(descriptor: int) -> str:
    """The name of an open file; that of a socket is unique in this host."""
    return os.readlink(f"{_OPEN}/{descriptor}")


def _is_tcp(descriptor: int) -> bool:
    copy = os.dup(descriptor)
    try:
        found = socket.socket(fileno=copy)
    except OSError:
        os.close(copy)
        return False
    with found:
        return found.family in (socket.AF_INET, socket.AF_INET6) and found.type == socket.SOCK_STREAM


def _close_in_child() -> None:
    """Close the known sockets, but keep their file descriptors from being used again: gloo still knows them."""
    if not _known:
        return
    with suppress(OSError):
        nothing = os.open(os.devnull, os.O_RDWR)
        for descriptor, name in _known.items():
            with suppress(OSError):
                if _name_of(descriptor) == name:
                    os.dup2(nothing, descriptor, inheritable=False)
        os.close(nothing)
    _known.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(before=_hold, after_in_parent=_release, after_in_child=_keep)
    os.register_at_fork(after_in_child=_close_in_child)
