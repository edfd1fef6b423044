"""Objects of gloo in the forked children of this process, which must not destroy them.

Threads of gloo own their connections, and a store serves its clients in a thread. A child, such as a worker of
a DataLoader, has the objects without the threads, and with closed sockets. Their destructors wait for the threads
or use the sockets, so that a garbage collection in the child, or its end, would end it by a signal or never.
"""

from __future__ import annotations

import ctypes
import itertools
import os
from typing import TypeVar
from weakref import WeakValueDictionary

T = TypeVar("T")

_numbers = itertools.count()
_alive: WeakValueDictionary[int, object] = WeakValueDictionary()
_held: list[list[object]] = []
"""What is alive, for each fork in progress: another thread may release the last reference meanwhile."""


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


if hasattr(os, "register_at_fork"):
    os.register_at_fork(before=_hold, after_in_parent=_release, after_in_child=_keep)
