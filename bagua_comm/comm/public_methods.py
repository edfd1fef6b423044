"""The public method that the user called, which messages name in place of the calls inside of it.

`Checkpoints.save` makes calls such as `allgather_object` on a communicator of its own. When one of them fails,
the error names `Checkpoints.save` first, and the flight recorder keeps the name.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from typing import ParamSpec, TypeVar

P = ParamSpec("P")
R = TypeVar("R")


class _Method(threading.local):
    name = ""
    """The outermost public method that this thread is in; "" for none."""


_current = _Method()


def current_method() -> str:
    """The outermost method marked by `public_method` that this thread is in; "" for none."""
    return _current.name


def public_method(name: str) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Mark a function that users call, and that makes calls of a communicator: errors of these show `name`.

    >>> @public_method("Table.sort")
    ... def sort():
    ...     return current_method()
    >>> sort(), current_method()
    ('Table.sort', '')
    """

    def mark(function: Callable[P, R]) -> Callable[P, R]:
        @functools.wraps(function)
        def marked(*args: P.args, **kwargs: P.kwargs) -> R:
            if _current.name:
                return function(*args, **kwargs)
            try:
                _current.name = name
                return function(*args, **kwargs)
            finally:  # an assignment: a signal handler cannot come before it
                _current.name = ""

        return marked

    return mark
