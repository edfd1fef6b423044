"""Context managers that close themselves, or leave after an error without waiting for other ranks."""

from __future__ import annotations

import os
from types import TracebackType
from typing import TypeVar

C = TypeVar("C", bound="Closing")


class Closing:
    """Base of context managers: a block that ends well closes the object, an error leaves it.

    `sys.exit()` and `sys.exit(0)` end a block well. In a forked child, the end of the block does nothing.
    """

    _entered_by: int | None = None
    """The process that has entered the block."""

    def close(self) -> None:
        """End the object. Collective, if it belongs to several ranks."""
        raise NotImplementedError

    def _leave(self, error: BaseException) -> None:
        """End the object after an error, without waiting for other ranks."""
        raise NotImplementedError

    def __enter__(self: C) -> C:
        self._entered_by = os.getpid()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._entered_by not in (None, os.getpid()):
            return  # the threads and connections are those of the parent
        if error is None or (isinstance(error, SystemExit) and error.code in (None, 0)):
            self.close()
        else:
            self._leave(error)
