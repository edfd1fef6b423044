"""A store in Redis or Valkey servers, for all hosts."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any, TypeVar

from ..errors import ArrayError, StoreError
from ..system.files import is_private
from .stores import ShardedStore, Store
from .values import library

T = TypeVar("T")

_PREFIX = b"bagua:"
"""The prefix of this library's keys in a server."""

_SECRETS = ("password", "ssl_certfile")
"""The parts of a URL that authenticate this user."""

_AT_ONCE = 1000
"""The number of keys in one request."""


class RedisStore(ShardedStore):
    """Store in one or more servers; each key is in one of them, by rendezvous hashing.

    It starts no servers. Protect a server on a network with a password (`requirepass`) and, where others listen,
    TLS. With `maxmemory` and `maxmemory-policy allkeys-lru`, a full server evicts the least recently used values.
    `local_redis` starts one for tests and trials.

    Args:
        urls: One or more of redis://:password@host:port/db, rediss:// (TLS) and unix:///path. All ranks pass the
            same ones, in any order.
        timeout_s: The longest wait for a server.

    Raises:
        ArrayError: A URL has another form.
        ImportError: redis is not installed.
    """

    def __init__(self, urls: str | Sequence[str], *, timeout_s: float = 5.0) -> None:
        urls = [urls] if isinstance(urls, str) else list(urls)
        super().__init__([_Server(url, timeout_s) for url in urls])


class _Server(Store):
    """One server, with a client for each process."""

    def __init__(self, url: str, timeout_s: float) -> None:
        self._url, self._timeout_s = url, timeout_s
        self._client: tuple[int, Any] | None = None
        try:
            parts = library("redis", "RedisStore").connection.parse_url(url)
        except (ValueError, AttributeError, TypeError):  # its text may have a part of the password
            scheme, mark, _ = str(url).partition("://")
            begins = f", which begins with {scheme + mark!r}," if mark and scheme.isalpha() else ""
            raise ArrayError(
                f"RedisStore: a URL{begins} is not of the form "
                "redis://:password@host:port/db, rediss://:password@host:port/db or unix:///path"
            ) from None
        self._socket = parts.get("path")
        place = self._socket or f"{parts.get('host', 'localhost')}:{parts.get('port', 6379)}"
        self.identity = f"redis:{place}/{parts.get('db', 0)}"  # without the password
        self._has_secret = not parts.keys().isdisjoint(_SECRETS)

    def __getstate__(self) -> dict[str, object]:
        return {**vars(self), "_client": None}

    def _do(self, body: Callable[[Any], T]) -> T:
        redis = library("redis", "RedisStore")
        try:
            if self._client is None or self._client[0] != os.getpid():
                self._client = os.getpid(), self._connect()
            return body(self._client[1])
        except (redis.RedisError, OSError, ValueError) as exc:
            raise StoreError(f"RedisStore: {self.identity}: {type(exc).__name__}: {exc}") from exc

    def _connect(self) -> Any:
        redis = library("redis", "RedisStore")
        from redis.backoff import NoBackoff
        from redis.retry import Retry

        return redis.Redis.from_url(
            self._url,
            socket_timeout=self._timeout_s,
            socket_connect_timeout=self._timeout_s,
            retry=Retry(NoBackoff(), 1),  # a restarted server has closed our connection
        )

    def open_to_others(self) -> str | None:
        """See `Store.open_to_others`. A password, or a socket of only this user, keeps others out."""
        if self._has_secret:
            return None
        if self._socket is not None:
            with suppress(OSError):
                if is_private(os.stat(self._socket)):
                    return None
        return (
            f"whoever reaches {self.identity} can write there, since its URL has no password; give the server one"
        )

    def get_many(self, keys: Sequence[bytes]) -> list[bytes | None]:
        """See `Store.get_many`."""
        names = [_PREFIX + key for key in keys]
        return self._do(lambda client: [value for part in _parts(names) for value in client.mget(part)])

    def set_many(self, items: Mapping[bytes, bytes]) -> None:
        """See `Store.set_many`."""
        values = {_PREFIX + key: value for key, value in items.items()}
        parts = [{name: values[name] for name in part} for part in _parts(list(values))]
        self._do(lambda client: [client.mset(part) for part in parts])

    def count(self) -> int:
        """See `Store.count`. Goes through all keys of the server."""
        return len(self._names())

    def clear(self) -> None:
        """See `Store.clear`. Other keys of the server stay."""
        names = self._names()
        self._do(lambda client: [client.delete(*part) for part in _parts(names)])

    def _names(self) -> list[bytes]:
        """This library's keys in the server; it may return one twice."""
        return self._do(lambda client: list(set(client.scan_iter(_PREFIX + b"*", count=_AT_ONCE))))

    def close(self) -> None:
        """See `Store.close`."""
        if self._client is not None and self._client[0] == os.getpid():
            self._client[1].close()
        self._client = None


def _parts(keys: list[bytes]) -> list[list[bytes]]:
    return [keys[start : start + _AT_ONCE] for start in range(0, len(keys), _AT_ONCE)]
