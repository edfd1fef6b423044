"""The state of a cache in one process: the buffer, the locks, the counts, and failed stores."""

from __future__ import annotations

import os
import threading
import time
import warnings
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from ..errors import StoreError
from ..system.files import cache_folder
from ..system.processes import ProcessId
from .counters import Counts
from .locks import NUMBERS, Holder, Locks, locks_in
from .stores import Store
from .values import DamagedError, Form, checksum, decode, encode

K = TypeVar("K")
T = TypeVar("T")

_UNBUFFERED = 1000
"""The number of values written at once after another worker requested one that was being loaded."""

_OLDEST_S = 1.0
"""The longest time of a value in the buffer, if more are loaded."""


class Value(NamedTuple):
    """A value and its encoding."""

    value: Any
    data: bytes


class Worker:
    """The state of a `Cache` in one process. Its keys are those in the store."""

    def __init__(
        self,
        store: Store,
        form: Form,
        counts: Path | None,
        *,
        buffer_bytes: float,
        wait_s: float,
        retry_s: float,
        warned: Iterable[object],
    ) -> None:
        self.pid = os.getpid()
        self.counts = Counts(counts)
        self.warned: set[object] = set(warned)
        self._store, self._form, self._buffer_bytes = store, form, buffer_bytes
        self._wait_s, self._retry_s = wait_s, retry_s
        self._mutex = threading.RLock()
        self._buffer: dict[bytes, bytes] = {}
        self._buffered = 0  # bytes
        self._since = 0.0  # when the oldest was added
        self._met = 0  # how many more values are written at once
        self._bypassed: dict[tuple[int, str], float] = {}  # (id of a leaf, operation) -> end of the bypass
        self._locks = self._find_locks()
        # Locks of a store of this process alone must differ from those of other stores.
        self._store_id = (store.identity or f"{ProcessId.mine().text()}:{id(store)}").encode()

    def _find_locks(self) -> Locks | None:
        try:
            locks = locks_in(cache_folder("bagua_comm") / "data.lock")
            locks.wanted(0)  # raises where the file system has no locks
            return locks
        except OSError as exc:
            self._warn("locks", f"workers of this host may load one sample more than once: {exc}")
            return None

    def close(self) -> None:
        """Write the buffer."""
        if self.pid == os.getpid():
            self.flush()

    # Reading ----------------------------------------------------------------------------------------

    def get_many(self, keys: list[tuple[K, bytes]], load: Callable[[K], T]) -> list[T]:
        """The values of pairs (user's key, key in the store)."""
        wanted = {full: key for key, full in keys}
        found = self.find(list(wanted))
        missing = {full: key for full, key in wanted.items() if full not in found}
        if missing:
            found |= self._load(missing, load)
        given: list[T] = []
        for _, full in keys:
            if full in wanted:
                del wanted[full]
                given.append(found[full].value)
            else:  # the same sample again is another object
                given.append(decode(found[full].data, full, self._form))
                self._count(hits=1)
        return given

    def find(self, keys: list[bytes], *, again: bool = False, waited: bool = False) -> dict[bytes, Value]:
        """The intact values in the store; `again` after a first look, which counted damaged ones."""
        with self._mutex:
            raw = {key: self._buffer[key] for key in keys if key in self._buffer}
        for leaf, asked in self._store.by_leaf(key for key in keys if key not in raw):
            answer = self._try(leaf, "read", leaf.get_many, asked) or []
            raw |= {key: data for key, data in zip(asked, answer, strict=False) if data is not None}
        found = {}
        for key, data in raw.items():
            try:
                found[key] = Value(decode(data, key, self._form), data)
            except DamagedError as exc:
                self._count(damaged=int(not again))
                self._warn("damaged", f"a value is damaged, and loaded anew: {exc}")
            else:
                self._count(hits=1, waited=int(waited), read_bytes=len(data))
        return found

    def _load(self, missing: dict[bytes, K], load: Callable[[K], object]) -> dict[bytes, Value]:
        """Load missing values; those that others load come last, so that no worker waits with a lock."""
        loaded: dict[bytes, Value] = {}
        locks = self._locks
        holder = Holder()
        try:
            taken = [full for full in missing if locks is None or locks.take(self._number(full), holder)]
            # Another worker may have written it before we took the lock.
            loaded |= self.find(taken, again=True)
            for full in taken:
                if full not in loaded:
                    loaded[full] = self._load_one(full, missing[full], load)
                if locks is not None:
                    locks.give(self._number(full), holder)
        finally:
            holder.is_over = True
            if locks is not None:
                locks.tidy()
        for full in missing:
            if full not in loaded:
                loaded[full] = self._wait(full, missing[full], load)
        return loaded

    def _wait(self, full: bytes, key: K, load: Callable[[K], object]) -> Value:
        """Wait while another worker loads a value."""
        number, locks = self._number(full), self._locks
        if locks is None or locks.mine(number):  # one sample loads another of the same batch
            return self._load_one(full, key, load)
        self._met = _UNBUFFERED
        holder = Holder()
        try:
            came = locks.wait(number, self._wait_s, holder)
            found = self.find([full], again=True, waited=True)
            if full in found:
                return found[full]
            if not came:
                self._count(timeouts=1)
                self._warn("wait", f"a worker has loaded one sample for {self._wait_s:g} s; loaded here, too")
            return self._load_one(full, key, load)
        finally:
            holder.is_over = True
            locks.tidy()

    def _load_one(self, full: bytes, key: K, load: Callable[[K], object]) -> Value:
        value = load(key)
        self._count(misses=1)
        return Value(value, self.put(full, value))

    # Writing ----------------------------------------------------------------------------------------

    def put(self, full: bytes, value: object) -> bytes:
        """Add a value to the buffer, write the buffer if it is full, old or awaited, and return the encoding."""
        data = encode(value, full, self._form)
        now = time.monotonic()
        with self._mutex:
            self._since = self._since if self._buffer else now
            self._buffered += len(data) - len(self._buffer.get(full, b""))
            self._buffer[full] = data
            if self._locks is not None and self._locks.wanted(self._number(full)):
                self._met = _UNBUFFERED  # others request the same samples, and should find the next ones, too
            self._met = max(0, self._met - 1)
            if self._met or self._buffered >= self._buffer_bytes or now - self._since > _OLDEST_S:
                self.flush()
        return data

    def flush(self) -> None:
        """Write the buffer. Other threads wait, so that every value is in the buffer or in the store."""
        with self._mutex:
            items, self._buffer, self._buffered = self._buffer, {}, 0
            for leaf, keys in self._store.by_leaf(items):
                part = {key: items[key] for key in keys}
                if self._try(leaf, "write", _write, leaf, part):
                    self._count(written_bytes=sum(map(len, part.values())))
                else:
                    self._count(unwritten=len(part))

    # Stores that fail -------------------------------------------------------------------------------

    def _try(self, leaf: Store, what: str, call: Callable[..., T], *arguments: object) -> T | None:
        """Call a store; None if it fails or is bypassed."""
        operation = id(leaf), what
        if time.monotonic() < self._bypassed.get(operation, 0.0):
            self._count(bypassed=1)
            return None
        try:
            return call(*arguments)
        except StoreError as exc:
            self._count(errors=1)
            self._bypassed[operation] = time.monotonic() + self._retry_s
            self._warn(
                operation, f"a store fails to {what}, and is bypassed for {self._retry_s:g} s at a time: {exc}"
            )
            return None

    def _warn(self, what: object, text: str) -> None:
        """Warn once of each problem."""
        if what not in self.warned:
            self.warned.add(what)
            warnings.warn(f"cache: {text}", RuntimeWarning, stacklevel=2)

    # Locks and counts -------------------------------------------------------------------------------

    def _number(self, full: bytes) -> int:
        return checksum(self._store_id, full) % NUMBERS

    def _count(self, **counts: int) -> None:
        with self._mutex:
            for name, count in counts.items():
                self.counts.add(name, count)


def _write(store: Store, items: dict[bytes, bytes]) -> bool:
    store.set_many(items)
    return True
