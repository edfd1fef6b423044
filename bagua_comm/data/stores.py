"""Stores: where bytes are kept under keys.

    MemoryStore()           in this process
    LMDBStore(path)         in a file, for all processes of a host
    RedisStore(urls)        in servers, for all hosts
    ShardedStore(stores)    each key in one of several stores

A store raises `StoreError` when it fails. A cache then goes on without it.
"""

from __future__ import annotations

import os
import threading
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import TypeVar

from ..errors import ArrayError, StoreError
from .values import checksum

S = TypeVar("S", bound="Store")


class Store(ABC):
    """Keeps bytes under keys. It can be pickled, and works in forked children and in several threads."""

    identity: str | None = None
    """What names this store alike in all processes that share it; None if it is this process's own."""

    @property
    def leaves(self) -> Sequence[Store]:
        """The stores that hold the values: this one, unless it is made of several."""
        return (self,)

    def leaf_of(self, key: bytes) -> int:
        """Which of the leaves holds this key."""
        return 0

    def open_to_others(self) -> str | None:
        """Why others may have written what this store holds; None if only this user can, as far as it knows."""
        return None

    @abstractmethod
    def get_many(self, keys: Sequence[bytes]) -> list[bytes | None]:
        """The values of these keys, in their order; None for a key that is not there.

        Raises:
            StoreError: The store failed.
        """

    @abstractmethod
    def set_many(self, items: Mapping[bytes, bytes]) -> None:
        """Keep all these values, in the place of what was there.

        Raises:
            StoreError: The store failed; it may hold some of them.
        """

    @abstractmethod
    def count(self) -> int:
        """How many keys there are."""

    @abstractmethod
    def clear(self) -> None:
        """Remove all keys."""

    def close(self) -> None:  # noqa: B027 - most stores have nothing to give back
        """Give back files and connections; the values stay, where they outlive a process."""

    def __enter__(self: S) -> S:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


class MemoryStore(Store):
    """A dictionary. A forked or spawned worker has a copy of its own, which ends with it.

    Args:
        capacity_bytes: How much it may hold; more raises StoreError. None: without end.
    """

    def __init__(self, capacity_bytes: int | None = None) -> None:
        self.capacity_bytes = capacity_bytes
        self._values: dict[bytes, bytes] = {}
        self._nbytes = 0
        self._renew()

    def _renew(self) -> None:
        self._pid, self._lock = os.getpid(), threading.Lock()

    def _own(self) -> threading.Lock:
        if self._pid != os.getpid():  # another thread may have held it at the fork
            self._renew()
        return self._lock

    def __getstate__(self) -> dict[str, object]:
        return {key: value for key, value in vars(self).items() if key != "_lock"}

    def __setstate__(self, state: dict[str, object]) -> None:
        vars(self).update(state)
        self._renew()

    def get_many(self, keys: Sequence[bytes]) -> list[bytes | None]:
        """See `Store.get_many`."""
        return [self._values.get(key) for key in keys]

    def set_many(self, items: Mapping[bytes, bytes]) -> None:
        """See `Store.set_many`."""
        with self._own():
            for key, value in items.items():
                nbytes = self._nbytes + len(value) - len(self._values.get(key, b""))
                if self.capacity_bytes is not None and nbytes > self.capacity_bytes:
                    raise StoreError(f"MemoryStore: full: it may hold {self.capacity_bytes} bytes")
                self._values[key], self._nbytes = value, nbytes

    def count(self) -> int:
        """See `Store.count`."""
        return len(self._values)

    def clear(self) -> None:
        """See `Store.clear`."""
        with self._own():
            self._values.clear()
            self._nbytes = 0


class ShardedStore(Store):
    """Several stores, each of which holds a part of the keys.

    A key belongs to the store with the largest hash of (key, name of the store), so that one of n stores that is
    taken away, or added, moves 1/n of the keys, and no others. Source: rendezvous hashing, Thaler and
    Ravishankar, "Using name-based mappings to increase hit rates", 1998.

    Args:
        stores: The parts.
        names: What stores are called: they must stay, whatever the order is. Their `identity` by default, or,
            where there is none, their number.

    Raises:
        ArrayError: There is no store, or two have one name.
    """

    def __init__(self, stores: Sequence[Store], names: Sequence[str] | None = None) -> None:
        self._stores = tuple(stores)
        if not self._stores:
            raise ArrayError("ShardedStore: got no stores, expected at least one")
        if names is None:
            names = [store.identity or f"#{number}" for number, store in enumerate(self._stores)]
        self.names = tuple(names)
        if len(set(self.names)) != len(self.names) or len(self.names) != len(self._stores):
            raise ArrayError(
                f"ShardedStore: names are {list(self.names)}, expected a different one for each store"
            )
        identities = [store.identity for store in self._stores]
        self.identity = None if None in identities else "+".join(sorted(self.names))

    @property
    def leaves(self) -> Sequence[Store]:
        """See `Store.leaves`."""
        return self._stores

    def leaf_of(self, key: bytes) -> int:
        """See `Store.leaf_of`."""
        hashes = [checksum(len(name).to_bytes(4, "little"), name.encode(), key) for name in self.names]
        return hashes.index(max(hashes))

    def open_to_others(self) -> str | None:
        """See `Store.open_to_others`; of the first part of which that is so."""
        return next(filter(None, (store.open_to_others() for store in self._stores)), None)

    def get_many(self, keys: Sequence[bytes]) -> list[bytes | None]:
        """See `Store.get_many`."""
        places = [self.leaf_of(key) for key in keys]
        found: dict[bytes, bytes | None] = {}
        for leaf in set(places):
            wanted = [key for key, place in zip(keys, places, strict=True) if place == leaf]
            found.update(zip(wanted, self._stores[leaf].get_many(wanted), strict=True))
        return [found[key] for key in keys]

    def set_many(self, items: Mapping[bytes, bytes]) -> None:
        """See `Store.set_many`."""
        parts: dict[int, dict[bytes, bytes]] = {}
        for key, value in items.items():
            parts.setdefault(self.leaf_of(key), {})[key] = value
        for leaf, part in parts.items():
            self._stores[leaf].set_many(part)

    def count(self) -> int:
        """See `Store.count`."""
        return sum(store.count() for store in self._stores)

    def clear(self) -> None:
        """See `Store.clear`."""
        for store in self._stores:
            store.clear()

    def close(self) -> None:
        """See `Store.close`."""
        for store in self._stores:
            store.close()
