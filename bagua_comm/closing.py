"""Context managers that close themselves, or leave after an error without waiting for other ranks."""

from __future__ import annotations

from types import TracebackType
from typing import TypeVar

C = TypeVar("C", bound="Closing")


class Closing:
    """Base of context managers: a block that ends well closes the object, an error leaves it."""

    def close(self) -> None:
        """End the object. Collective, if it belongs to several ranks."""
        raise NotImplementedError

    def _leave(self, error: BaseException) -> None:
        """End the object after an error, without waiting for other ranks."""
        raise NotImplementedError

    def __enter__(self: C) -> C:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if error is None:
            self.close()
        else:
            self._leave(error)
