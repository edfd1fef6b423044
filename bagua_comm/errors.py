"""Errors of this library.

    BaguaError
      CommError                     something went wrong between ranks
        RankFailed                  a peer process died; `ranks` says which, where known
        CommAborted                 the communicator was aborted, here or by a peer
        CommTimeout                 a peer did not answer within `timeout_s`
        CommMismatch                ranks made calls that don't fit together
      ArrayError (ValueError)       an argument has a wrong value: shape, dtype, root, op, peer
      UnsupportedError (TypeError)  an array, dtype or operation that is not supported
      BootstrapError                the world could not be set up
      CheckpointError (OSError)     a checkpoint cannot be written or loaded
      StoreError                    a store of cached data failed: no connection, no space, a damaged file

Arguments are checked before a byte moves, so `ArrayError` and `UnsupportedError` are raised on all ranks
and leave the communicator usable. After a `CommError` in the middle of a collective the communicator can
only be shrunk, aborted or closed.
"""

from __future__ import annotations

import functools
import reprlib
import sys
import warnings
from collections.abc import Callable, Iterable, Iterator
from types import FunctionType
from typing import TypeVar

T = TypeVar("T")


class BaguaError(Exception):
    """Base of all errors of this library."""


class CommError(BaguaError):
    """Something went wrong between ranks."""


class RankFailed(CommError):  # noqa: N818 - ULFM's words
    """A peer process died."""

    def __init__(self, message: str, ranks: Iterable[int] = ()) -> None:
        super().__init__(message)
        self.ranks = tuple(ranks)


class CommAborted(CommError):  # noqa: N818
    """The communicator was aborted, by this rank or a peer."""


class CommTimeout(CommError):  # noqa: N818
    """A peer did not answer in time."""


class CommMismatch(CommError):  # noqa: N818
    """Ranks made calls that do not fit together.

    Attributes:
        left: The rank that has left without an error while this one waits for it; None for other reasons.
    """

    def __init__(self, message: str, left: int | None = None) -> None:
        super().__init__(message)
        self.left = left


WHICH_CALLS = "connect(check=True) names the calls that differ"
"""Advice on a mismatch of bytes, which does not show whose call is wrong."""


class ArrayError(BaguaError, ValueError):
    """An argument has a wrong value; the message names the argument, its value, and what was expected."""


class UnsupportedError(BaguaError, TypeError):
    """An array, dtype or operation that is not supported."""


class BootstrapError(BaguaError):
    """The world could not be set up."""


class StoreError(BaguaError):
    """A store of cached data failed."""


def shown_as(name: str) -> Callable[[type[T]], type[T]]:
    """Mark a class of which a public class `name` is composed: Python's errors on arguments name that one.

    >>> @shown_as("Table")
    ... class Columns:
    ...     def drop(self, name): ...
    >>> Columns().drop()
    Traceback (most recent call last):
    TypeError: Table.drop() missing 1 required positional argument: 'name'
    """

    def mark(cls: type[T]) -> type[T]:
        function: object
        for function in vars(cls).values():
            while isinstance(function, FunctionType):
                function.__qualname__ = f"{name}.{function.__name__}"
                function = getattr(function, "__wrapped__", None)
        return cls

    return mark


def causes(error: BaseException) -> Iterator[BaseException]:
    """An error, and all that have led to it, each once: causes and contexts may form a cycle."""
    waiting: list[BaseException | None] = [error]
    seen: set[int] = set()
    while waiting:
        each = waiting.pop()
        if each is not None and id(each) not in seen:
            seen.add(id(each))
            yield each
            waiting += [each.__context__, each.__cause__]


def warn(text: str, category: type[Warning] = UserWarning) -> None:
    """Warn at the line of the program: the innermost one outside of this library, its adapter and PyTorch."""
    level, frame = 2, sys._getframe(1)
    while frame.f_back and frame.f_globals.get("__name__", "").partition(".")[0] in _INTERNAL:
        level, frame = level + 1, frame.f_back
    _warned[:] = [text]
    warnings.warn(text, category, stacklevel=level)


_warned: list[str] = []


def last_warning() -> str:
    """The text of the last warning of `warn`; "" before."""
    return "".join(_warned)


def uncaught_error(earlier: BaseException | None = None) -> BaseException | None:
    """The exception that ended the main thread, if there is one; None if it is `earlier`, of a time before."""
    error: BaseException | None = getattr(sys, "last_exc", None) or getattr(sys, "last_value", None)
    return None if error is earlier else error


_INTERNAL = ("bagua_comm", "bagua_torch", "torch", "contextlib")


def shown(value: object) -> str:
    """A short text of `value`, for a message; never fails."""
    try:
        return reprlib.repr(value)
    except Exception:  # such as an int with more digits than Python converts
        return f"a {type(value).__name__}"


def how_to_call(value: object, form: str = "{}") -> str:
    """How to make an object of a class, partial or function given in its place, as the end of a message.

    `form` is what to do with the result. "" for other values.

    >>> how_to_call(functools.partial(ArrayError, "no"))
    "; a functools.partial makes one when it is called: write ArrayError('no')"
    """
    made = value.func if isinstance(value, functools.partial) else value
    if not isinstance(made, (type, FunctionType)):
        return ""
    name, arguments = made.__name__, ""
    what = f"{name} is a {'class' if isinstance(made, type) else 'function'}"
    if isinstance(value, functools.partial):
        what = "a functools.partial makes one when it is called"
        arguments = ", ".join([*map(shown, value.args), *(f"{n}={shown(v)}" for n, v in value.keywords.items())])
    return f"; {what}: write {form.format(f'{name}({arguments})')}" if name.isidentifier() else "; call it"


class CheckpointError(BaguaError, OSError):
    """A checkpoint cannot be written, or is missing, damaged or incompatible."""
