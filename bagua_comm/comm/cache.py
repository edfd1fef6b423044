"""The cache of prepared calls."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any

CAPACITY = 256
"""The largest number of entries."""


class CallCache:
    """Prepared calls and other values that depend on the arguments of a call; each communicator has one cache.

    Keys begin with the name of the call; dtype, shape and other arguments follow. Entries may be dropped at any
    time, and not on all ranks at the same one: cache only values that a rank computes without communication.
    """

    def __init__(self) -> None:
        self._entries: dict[Hashable, Any] = {}
        self.get: Callable[[Hashable], Any] = self._entries.get
        """Return the entry of a key, or None. Raises TypeError if the key cannot be hashed."""
        self.added = 0
        """Number of entries added so far; a call that finds its entry adds none."""

    def add(self, key: Hashable, entry: Any) -> None:
        """Keep an entry. Raises TypeError if the key cannot be hashed."""
        if len(self._entries) >= CAPACITY and key not in self._entries:
            self._entries.clear()
        self._entries[key] = entry
        self.added += 1

    def clear(self) -> None:
        """Drop all entries."""
        self._entries.clear()
