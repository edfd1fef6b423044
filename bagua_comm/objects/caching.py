"""A cache with a limit."""

from __future__ import annotations

from typing import TypeVar

K = TypeVar("K")
V = TypeVar("V")


class BoundedCache(dict[K, V]):
    """A dict that is emptied before it would exceed `limit` entries.

    For caches that hardly ever fill: lookups are a dict's, and no order of use is kept.

    >>> cache = BoundedCache(2)
    >>> for key in "aabc":
    ...     cache[key] = key.upper()
    >>> cache
    {'c': 'C'}
    """

    __slots__ = ("_limit",)

    def __init__(self, limit: int) -> None:
        super().__init__()
        self._limit = limit

    def __setitem__(self, key: K, value: V) -> None:
        if len(self) >= self._limit and key not in self:
            self.clear()
        super().__setitem__(key, value)
