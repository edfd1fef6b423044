"""A cache of values that are slow to load, in a store that may fail and that processes share."""

from __future__ import annotations

import operator
import os
import weakref
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

from ..errors import ArrayError, UnsupportedError, shown
from .counters import Stats, new_file
from .locks import any_is_locked
from .stores import Closed, Store
from .values import FORMS, Form, checksum
from .worker import Worker

K = TypeVar("K")
T = TypeVar("T")

_LONGEST_KEY = 400
"""Longer keys are replaced by their checksums."""

_EXIT_PRIORITY = 100
"""Higher than that of multiprocessing's queues, so that the store still works."""


class Cache(Closed):
    """Cache of the values of `load(key)`, in a store.

    * A damaged value is loaded again, and counted.
    * A store that fails causes one warning, is bypassed for `retry_s`, and counted: loading continues without it.
    * If several workers of a host request one key at a time, one loads it and the others wait for it. A value
      still in the buffer of another worker is loaded here, too; after such a conflict, values are written at
      once.
    * Loaded values are written when there are `buffer_bytes` of them, when one is a second old and more are
      loaded, when another worker waits for one, and at `flush`, `close` and the end of the process. A process
      that is killed loses unwritten values, which are loaded again.

    It works in forked and spawned workers. `close` writes the values of this process; the store stays open.

    Args:
        store: The store of the values.
        name: The name of the cached data. Caches of one store need different names; change it with the data or
            their decoding.
        form: "tree" stores numbers, str, bytes, None, NumPy arrays, dense tensors of PyTorch on the CPU, and
            lists, tuples and dicts of these, bit for bit. Arrays and tensors are restored as contiguous ones.
            "pickle" stores any object, and runs code from the store: a store that others can write to is
            refused, such as an LMDB folder that others can write to, or a Redis server without a password.
        buffer_bytes: Bytes of values to write together; 0 writes each value at once.
        wait_s: The longest wait for another worker that loads the same key; then it is loaded here, too.
        retry_s: The time for which a failed store is bypassed, in seconds.

    Raises:
        ArrayError: An argument has a wrong value.

    >>> from bagua_comm.data import MemoryStore
    >>> with Cache(MemoryStore()) as cache:
    ...     cache.get("a", str.upper), cache.get("a", str.lower), cache.stats().hits
    ('A', 'A', 1)
    """

    def __init__(
        self,
        store: Store,
        *,
        name: str = "",
        form: Form = "tree",
        buffer_bytes: int = 1 << 20,
        wait_s: float = 60.0,
        retry_s: float = 30.0,
    ) -> None:
        if not isinstance(store, Store):
            raise ArrayError(f"Cache: store is {shown(store)}, expected a Store such as LMDBStore(path)")
        if form not in FORMS:
            raise ArrayError(f'Cache: form is {form!r}, expected "tree" or "pickle"')
        if form == "pickle" and (why := store.open_to_others()) is not None:
            raise ArrayError(f'Cache: form="pickle" runs code from the store, and {why}; or use form="tree"')
        for what, value in {"buffer_bytes": buffer_bytes, "wait_s": wait_s, "retry_s": retry_s}.items():
            if not (isinstance(value, (int, float)) and value >= 0):
                raise ArrayError(f"Cache: {what} is {value!r}, expected a number from 0 on")
        checksum(b"")  # raises if the extra is not installed
        self.store, self.name, self.form = store, name, form
        self.buffer_bytes, self.wait_s, self.retry_s = buffer_bytes, wait_s, retry_s
        self._counts = new_file()
        self._worker: Worker | None = None

    def __getstate__(self) -> dict[str, object]:
        return {**vars(self), "_worker": None}

    def _of_this_process(self) -> Worker:
        """The state of this process: a forked child must not write its parent's buffer."""
        if self._worker is None or self._worker.pid != os.getpid():
            from multiprocessing import util  # changes sys.modules, so not before a cache is used

            self._worker = Worker(
                self.store,
                self.form,
                self._counts,
                buffer_bytes=self.buffer_bytes,
                wait_s=self.wait_s,
                retry_s=self.retry_s,
                warned=self._worker.warned if self._worker is not None else (),
            )
            # Runs at the end of a program and of a worker of multiprocessing, and when the cache is collected.
            util.Finalize(self, _close, (self._worker,), exitpriority=_EXIT_PRIORITY)
        return self._worker

    def key(self, key: object) -> bytes:
        """The key in the store for an int, str or bytes.

        Raises:
            UnsupportedError: `key` is something else.
        """
        if isinstance(key, (str, bytes)):
            own = b"s" + key.encode("utf-8", "surrogatepass") if isinstance(key, str) else b"b" + key
        else:
            own = b"i%d" % _whole("a key", key)
        full = self.name.encode() + b"\0" + own
        if len(full) <= _LONGEST_KEY:
            return full
        return b"\0%016x%016x" % (checksum(full), checksum(b"again", full))

    def get(self, key: K, load: Callable[[K], T]) -> T:
        """The value of a key, from the store or else from `load(key)`, whose errors are raised unchanged.

        Raises:
            UnsupportedError: The loaded value cannot be stored in this form.
        """
        return self.get_many([key], load)[0]

    def get_many(self, keys: Sequence[K], load: Callable[[K], T]) -> list[T]:
        """The values of several keys, from the store in one request; missing ones are loaded."""
        return self._of_this_process().get_many([(key, self.key(key)) for key in keys], load)

    def peek(self, key: object) -> Any:
        """The value of a key in the store, or None; see `put`."""
        found = self._of_this_process().find([self.key(key)])
        return found[self.key(key)].value if found else None

    def put(self, key: object, value: object) -> None:
        """Store a value.

        Raises:
            UnsupportedError: It cannot be stored in this form.
        """
        self._of_this_process().put(self.key(key), value)

    def flush(self) -> None:
        """Write the buffered values of this process."""
        self._of_this_process().flush()

    def stats(self) -> Stats:
        """Counts of this process and of the workers that it started."""
        return self._of_this_process().counts.total()

    def close(self) -> None:
        """Write the buffered values of this process. The cache may be used again."""
        self.flush()


def _close(worker: Worker) -> None:
    """Write the buffer of a cache that is gone.

    If the garbage collector has interrupted a store, whose lock this thread then holds, the buffer is written at
    the end of the process.
    """
    if any_is_locked():
        from multiprocessing import util

        util.Finalize(None, worker.close, exitpriority=_EXIT_PRIORITY)
    else:
        worker.close()


def _whole(what: str, value: Any) -> int:
    try:
        return operator.index(value)
    except TypeError:
        raise UnsupportedError(f"{what} is {shown(value)}, expected an int, str or bytes") from None


if TYPE_CHECKING:
    _Dataset = Any  # stands for torch.utils.data.Dataset, which only DataLoader's annotations require
else:
    _Dataset = object


class Cached(Closed, _Dataset):  # type: ignore[misc]
    """A data set with its samples cached in a store: the first epoch loads them, later ones read them.

    It replaces a map-style data set, also in PyTorch's DataLoader, which then requests a batch at a time.

    Args:
        dataset: Has `__getitem__` for ints, or for str or bytes, and perhaps `__len__`. Random transforms, such
            as crops, stay as in the first epoch, so apply them to the cached samples instead.
        store: The store of the samples.
        options: Arguments of `Cache`: name, form, buffer_bytes, wait_s, retry_s.

    Raises:
        ArrayError: An argument has a wrong value, or a data set of another length is cached in this store under
            this name: each would get the samples of the other.

    >>> from bagua_comm.data import MemoryStore
    >>> squares = Cached([0, 1, 4], MemoryStore())
    >>> squares[2], squares[-1], len(squares), squares.stats().misses
    (4, 4, 3, 1)
    """

    def __init__(self, dataset: Any, store: Store, **options: Any) -> None:
        self.dataset = dataset
        self.cache = Cache(store, **options)
        for other in list(_cached):
            lengths = _length(other.dataset), _length(dataset)
            if (
                None not in lengths
                and lengths[0] != lengths[1]
                and self._store_and_name() == other._store_and_name()
            ):
                raise ArrayError(
                    f"Cached: this store has samples of a data set of {lengths[0]} under the name "
                    f"{self.cache.name!r}, and this one has {lengths[1]}; give each a different name, as in "
                    'Cached(dataset, store, name="train")'
                )
        _cached.add(self)

    def _store_and_name(self) -> tuple[object, str]:
        """What data sets that store samples under the same keys have in common."""
        return self.cache.store.identity or id(self.cache.store), self.cache.name

    def __len__(self) -> int:
        return len(self.dataset)

    def _position(self, index: object) -> object:
        """The index of a sample, from a nonnegative or negative index."""
        if isinstance(index, (str, bytes)):
            return index
        place = _whole("an index", index)
        return place + len(self.dataset) if place < 0 and hasattr(self.dataset, "__len__") else place

    def _load(self, index: Any) -> Any:
        return self.dataset[index]

    def __getitem__(self, index: object) -> Any:
        return self.cache.get(self._position(index), self._load)

    def __getitems__(self, indices: Sequence[object]) -> list[Any]:
        """Several samples, from the store in one request."""
        return self.cache.get_many([self._position(index) for index in indices], self._load)

    def flush(self) -> None:
        """See `Cache.flush`."""
        self.cache.flush()

    def stats(self) -> Stats:
        """See `Cache.stats`."""
        return self.cache.stats()

    def close(self) -> None:
        """See `Cache.close`."""
        self.cache.close()


_cached: weakref.WeakSet[Cached] = weakref.WeakSet()
"""The cached data sets of this process."""


def _length(dataset: object) -> int | None:
    return len(dataset) if hasattr(dataset, "__len__") else None
