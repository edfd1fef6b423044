"""Stores of bytes by key.

    MemoryStore()           in this process
    LMDBStore(path)         in a file, for all processes of a host
    RedisStore(urls)        in servers, for all hosts
    ShardedStore(stores)    each key in one of several stores

A store that fails raises `StoreError`. A cache then continues without it.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from typing import TypeVar

from ..errors import ArrayError, StoreError, shown
from .locks import Mutex
from .values import checksum

C = TypeVar("C", bound="Closed")


class Closed:
    """Base of context managers: the end of a block closes the object, also after an error."""

    def close(self) -> None:
        """Write what is not written yet, and close files and connections."""

    def __enter__(self: C) -> C:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


class Store(Closed, ABC):
    """A store of bytes by key. It can be pickled, and works in forked children and in several threads."""

    identity: str | None = None
    """The name of this store, equal in all processes that share it; None if only this process uses it."""

    def leaf_of(self, key: bytes) -> Store:
        """The store that holds this key: this one, unless it consists of several."""
        return self

    def by_leaf(self, keys: Iterable[bytes]) -> list[tuple[Store, list[bytes]]]:
        """Keys by the store that holds them, which need not be hashable.

        Raises:
            ArrayError: `leaf_of` returns something else.
        """
        parts: dict[int, tuple[Store, list[bytes]]] = {}
        for key in keys:
            leaf = self.leaf_of(key)
            if not isinstance(leaf, Store):
                raise ArrayError(f"{type(self).__name__}: leaf_of returned {shown(leaf)}, expected a Store")
            parts.setdefault(id(leaf), (leaf, []))[1].append(key)
        return list(parts.values())

    def open_to_others(self) -> str | None:
        """Why other users may have written to this store; None if only this user can, as far as is known."""
        return None

    @abstractmethod
    def get_many(self, keys: Sequence[bytes]) -> list[bytes | None]:
        """The values of these keys, in their order; None for a missing key.

        Raises:
            StoreError: The store failed.
        """

    @abstractmethod
    def set_many(self, items: Mapping[bytes, bytes]) -> None:
        """Store all these values, and overwrite former ones.

        Raises:
            StoreError: The store failed; it may hold some of them.
        """

    @abstractmethod
    def count(self) -> int:
        """The number of keys."""

    @abstractmethod
    def clear(self) -> None:
        """Remove all keys."""

    def close(self) -> None:
        """Close files and connections; values that outlive a process stay."""


class MemoryStore(Store):
    """Store in a dictionary. A forked or spawned worker has its own copy, which ends with it.

    Args:
        capacity_bytes: The largest number of bytes to hold; more raises StoreError. None: no limit.
    """

    def __init__(self, capacity_bytes: int | None = None) -> None:
        self.capacity_bytes = capacity_bytes
        self._values: dict[bytes, bytes] = {}
        self._nbytes = 0
        self._mutex = Mutex()

    def get_many(self, keys: Sequence[bytes]) -> list[bytes | None]:
        """See `Store.get_many`."""
        return [self._values.get(key) for key in keys]

    def set_many(self, items: Mapping[bytes, bytes]) -> None:
        """See `Store.set_many`."""
        with self._mutex.lock:
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
        with self._mutex.lock:
            self._values.clear()
            self._nbytes = 0


class ShardedStore(Store):
    """Several stores, each for a part of the keys.

    A key belongs to the store with the largest hash of (key, name of the store), so that to remove or add one
    of n stores moves only 1/n of the keys. Source: rendezvous hashing, Thaler and Ravishankar, "Using
    name-based mappings to increase hit rates", 1998.

    Args:
        stores: The parts.
        names: The names of the stores, which must not change; the order may. By default their `identity`, or,
            without one, their number.

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

    def leaf_of(self, key: bytes) -> Store:
        """See `Store.leaf_of`."""
        hashes = [checksum(len(name).to_bytes(4, "little"), name.encode(), key) for name in self.names]
        return self._stores[hashes.index(max(hashes))]

    def open_to_others(self) -> str | None:
        """See `Store.open_to_others`; the answer of the first store that has one."""
        return next(filter(None, (store.open_to_others() for store in self._stores)), None)

    def get_many(self, keys: Sequence[bytes]) -> list[bytes | None]:
        """See `Store.get_many`."""
        found: dict[bytes, bytes | None] = {}
        for store, part in self.by_leaf(keys):
            found.update(zip(part, store.get_many(part), strict=True))
        return [found[key] for key in keys]

    def set_many(self, items: Mapping[bytes, bytes]) -> None:
        """See `Store.set_many`."""
        for store, part in self.by_leaf(items):
            store.set_many({key: items[key] for key in part})

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
