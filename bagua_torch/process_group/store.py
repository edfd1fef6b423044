"""Connections to a store of torch.distributed, and JSON values in it, under a prefix, for a fleet."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeAlias, TypeVar
from weakref import WeakKeyDictionary

import torch.distributed as dist

from bagua_comm import RankFailed

T = TypeVar("T")
Store: TypeAlias = "dist.distributed_c10d.Store"


class StoreConnections:
    """The connections of this process to a store, for all its transports.

    On one connection, two threads that wait would block each other. A new one for each transport would cost the
    process that serves the store a descriptor, and a reverse lookup of the name of its host.
    """

    def __init__(self, store: Store) -> None:
        self._lock = threading.Lock()
        self._idle: list[Store] = []
        self.unblocked = _new_connection(store)
        """A connection for requests that do not wait, of any thread."""

    @contextmanager
    def one(self, store: Store) -> Iterator[Store]:
        """A connection to `store` that no other thread uses meanwhile. After an error it is used no more."""
        with self._lock:
            connection = self._idle.pop() if self._idle else None
        if connection is None:
            connection = _new_connection(store)
        yield connection
        with self._lock:
            self._idle.append(connection)


def _new_connection(store: Store) -> Store:
    return store.clone() if hasattr(store, "clone") else store


_connections: WeakKeyDictionary[Store, StoreConnections] = WeakKeyDictionary()
_connecting = threading.Lock()


def connections_to(store: Store) -> StoreConnections:
    """The connections of this process to `store`, which end with it."""
    with _connecting:
        found = _connections.get(store)
    if found is None:
        found = StoreConnections(store)
        if found.unblocked is not store:  # which it is if the store is in the memory of this process
            with _connecting:
                found = _connections.setdefault(store, found)
    return found


class FleetStore:
    """The part of a store under a prefix, through a connection of its own. Values are JSON.

    Args:
        store: A store of torch.distributed.
        prefix: The prefix of all keys.

    Raises:
        RankFailed: The store cannot be reached; so does every method.
    """

    def __init__(self, store: Store, prefix: str) -> None:
        self.store, self.prefix = store, prefix
        self._part = self._ask(lambda: dist.distributed_c10d.PrefixStore(prefix, _new_connection(store)))

    def set(self, key: str, value: object = True) -> None:
        """Write a value, which replaces the previous one."""
        self._ask(lambda: self._part.set(key, json.dumps(value)))

    def has(self, *keys: str) -> bool:
        """Whether all these keys have values; does not wait."""
        return bool(self._ask(lambda: self._part.check(list(keys))))

    def get(self, key: str) -> Any:
        """The value of a key; None if it has none. Does not wait."""
        return json.loads(self._ask(lambda: self._part.get(key))) if self.has(key) else None

    def set_once(self, key: str, value: object) -> Any:
        """Write a value unless the key has one; returns the value that it has then."""
        return json.loads(self._ask(lambda: self._part.compare_set(key, "", json.dumps(value))))

    def add(self, key: str, amount: int = 0) -> int:
        """Add to a counter, which starts at 0; returns its new value."""
        return int(self._ask(lambda: self._part.add(key, amount)))

    def _ask(self, request: Callable[[], T]) -> T:
        try:
            return request()
        except RuntimeError as exc:
            host, port = (getattr(self.store, name, "") for name in ("host", "port"))
            where = f" at {host}:{port}" if port else ""
            raise RankFailed(
                f"the store{where}, which connects the processes of this job, is gone: torchrun's agent that "
                "serves it has ended, or its host. Without it the job cannot go on after a death; with "
                f"--max-restarts torchrun starts all of them again ({str(exc).splitlines()[0]})"
            ) from exc
