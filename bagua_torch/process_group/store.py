"""JSON values in a store of torch.distributed, under a prefix, for a fleet."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any, TypeVar

import torch.distributed as dist

from bagua_comm import RankFailed

T = TypeVar("T")


class FleetStore:
    """The part of a store under a prefix, through a connection of its own. Values are JSON.

    Args:
        store: A store of torch.distributed.
        prefix: The prefix of all keys.

    Raises:
        RankFailed: The store cannot be reached; so does every method.
    """

    def __init__(self, store: Any, prefix: str) -> None:
        self.store, self.prefix = store, prefix
        self._part = self._ask(
            lambda: dist.distributed_c10d.PrefixStore(prefix, store.clone() if hasattr(store, "clone") else store)
        )

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
            where = f" at {self.store.host}:{self.store.port}" if hasattr(self.store, "port") else ""
            raise RankFailed(
                f"the store{where}, which connects the processes of this job, is gone: torchrun's agent that "
                "serves it has ended, or its host. Without it the job cannot go on after a death; with "
                f"--max-restarts torchrun starts all of them again ({str(exc).splitlines()[0]})"
            ) from exc
