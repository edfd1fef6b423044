"""A cache of what is slow to load, over a store that may fail and that other processes use too."""

from __future__ import annotations

import operator
import os
import weakref
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

from ..errors import ArrayError, UnsupportedError, shown
from .counters import Counts, Stats, new_folder
from .stores import Store
from .values import FORMS, Form, checksum
from .worker import Worker

C = TypeVar("C", bound="Cache")

_LONGEST_KEY = 400
"""Longer keys are replaced by their checksums."""

_EXIT_PRIORITY = 100
"""Above that of the queues of multiprocessing, so that the store still works."""


class Cache:
    """Keeps what `load(key)` gives, in a store.

    * A value that is damaged is loaded anew, and counted.
    * A store that fails is warned of once, then bypassed for `retry_s`, and counted: loading goes on without it.
    * If several workers of a host ask for one key at a time, one loads it and the others wait for it.
      What lies unwritten in the buffer of another is loaded here, too; once workers have met, each value is
      written at once.
    * What was loaded is written when `buffer_bytes` are together, when it is a second old and more is loaded,
      when somebody waits for it, and at `flush`, `close` and the end of the process. A process that is killed
      loses what was not yet written; it is loaded again.

    It works in workers that are forked or spawned. `close` writes what this process has; the store stays open.

    Args:
        store: Keeps the values.
        name: Of what is cached. Caches of one store need different names; change it with the data or their
            decoding.
        form: "tree" keeps numbers, str, bytes, None, NumPy arrays, and lists, tuples and dicts of these. "pickle"
            keeps anything, and runs code that the store holds: a store that others can write to is refused, such
            as an LMDB folder that is not this user's alone, or a server of Redis without a password.
        buffer_bytes: How much to write at once; with 0, each value at once.
        wait_s: How long to wait for another worker that loads the same key; then it is loaded here, too.
        retry_s: For how long a store that failed is bypassed.

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
            raise ArrayError(
                f'Cache: form="pickle" runs code that the store holds, and {why}; or use form="tree"'
            )
        for what, value in {"buffer_bytes": buffer_bytes, "wait_s": wait_s, "retry_s": retry_s}.items():
            if not (isinstance(value, (int, float)) and value >= 0):
                raise ArrayError(f"Cache: {what} is {value!r}, expected a number from 0 on")
        checksum(b"")  # raises if the extra is not installed
        self.store, self.name, self.form = store, name, form
        self.buffer_bytes, self.wait_s, self.retry_s = buffer_bytes, wait_s, retry_s
        self._counts = new_folder()
        self._worker: Worker | None = None

    def __getstate__(self) -> dict[str, object]:
        return {**vars(self), "_worker": None}

    def _own(self) -> Worker:
        """What belongs to this process: a forked child must not write what its parent has in its buffer."""
        if self._worker is None or self._worker.pid != os.getpid():
            from multiprocessing import util  # changes sys.modules, so not before a cache is used

            warned = self._worker.warned if self._worker is not None else ()
            worker = Worker(
                self.store,
                self.form,
                Counts(self._counts),
                buffer_bytes=self.buffer_bytes,
                wait_s=self.wait_s,
                retry_s=self.retry_s,
                warned=warned,
            )
            # Runs at the end of a program and of a worker of multiprocessing, and when the cache is collected.
            util.Finalize(self, worker.close, exitpriority=_EXIT_PRIORITY)
            self._worker = worker
        return self._worker

    def key(self, key: Any) -> bytes:
        """The key in the store: of an int, str or bytes.

        Raises:
            UnsupportedError: `key` is something else.
        """
        if isinstance(key, (str, bytes)):
            own = b"s" + key.encode("utf-8", "surrogatepass") if isinstance(key, str) else b"b" + key
        else:
            try:
                own = b"i%d" % operator.index(key)
            except TypeError:
                raise UnsupportedError(f"a key is {shown(key)}, expected an int, str or bytes") from None
        full = self.name.encode() + b"\0" + own
        if len(full) <= _LONGEST_KEY:
            return full
        return b"\0%016x%016x" % (checksum(full), checksum(b"again", full))

    def get(self, key: Any, load: Callable[[Any], Any]) -> Any:
        """The value of a key; `load(key)` makes it if it is not there, and its errors are raised as they are.

        Raises:
            UnsupportedError: What was loaded cannot be kept in this form.
        """
        return self.get_many([key], load)[0]

    def get_many(self, keys: Sequence[Any], load: Callable[[Any], Any]) -> list[Any]:
        """The values of several keys, from a store in one request; each that is missing is loaded."""
        return self._own().get_many([(key, self.key(key)) for key in keys], load)

    def peek(self, key: Any) -> Any:
        """The value of a key, or None if it is not there; see `put`."""
        found = self._own().find([self.key(key)])
        return found[self.key(key)].value if found else None

    def put(self, key: Any, value: Any) -> None:
        """Keep a value.

        Raises:
            UnsupportedError: It cannot be kept in this form.
        """
        self._own().put(self.key(key), value)

    def flush(self) -> None:
        """Write what this process has not yet written."""
        self._own().flush()

    def stats(self) -> Stats:
        """What happened so far in this process, and in the workers that it started."""
        return self._own().counts.total()

    def close(self) -> None:
        """Write what this process has not yet written. The cache may be used again."""
        self.flush()

    def __enter__(self: C) -> C:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


if TYPE_CHECKING:
    _Dataset = Any  # stands for torch.utils.data.Dataset, which DataLoader asks for in its annotations only
else:
    _Dataset = object


class Cached(_Dataset):  # type: ignore[misc]
    """A data set whose samples are kept in a store: the first epoch loads them, later ones read them.

    It takes the place of a map-style data set, in PyTorch's DataLoader too, which then asks for a batch at a
    time.

    Args:
        dataset: Has `__getitem__` for ints, or for str or bytes, and perhaps `__len__`. What is random in it
            (crops, say) is kept as it was in the first epoch, so apply that to what this gives.
        store: Keeps the samples.
        options: Those of `Cache`: name, form, buffer_bytes, wait_s, retry_s.

    Raises:
        ArrayError: An argument has a wrong value, or a data set of another length is cached in this store under
            this name: each would be given the samples of the other.

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
            if None not in lengths and lengths[0] != lengths[1] and self._meets(other):
                raise ArrayError(
                    f"Cached: this store has samples of a data set of {lengths[0]} under the name "
                    f"{self.cache.name!r}, and this one has {lengths[1]}; give each a name of its own, as in "
                    'Cached(dataset, store, name="train")'
                )
        _cached.add(self)

    def _meets(self, other: Cached) -> bool:
        """Whether both keep samples under the same keys."""
        mine, theirs = self.cache.store, other.cache.store
        same = mine is theirs or (mine.identity is not None and mine.identity == theirs.identity)
        return same and self.cache.name == other.cache.name

    def __len__(self) -> int:
        return len(self.dataset)

    def _place(self, index: Any) -> Any:
        """The index of a sample, which may be counted from the end."""
        if isinstance(index, (str, bytes)):
            return index
        try:
            place = operator.index(index)
        except TypeError:
            raise UnsupportedError(f"an index is {shown(index)}, expected an int, str or bytes") from None
        return place + len(self.dataset) if place < 0 and hasattr(self.dataset, "__len__") else place

    def _load(self, index: Any) -> Any:
        return self.dataset[index]

    def __getitem__(self, index: Any) -> Any:
        return self.cache.get(self._place(index), self._load)

    def __getitems__(self, indices: Sequence[Any]) -> list[Any]:
        """Several samples, from a store in one request."""
        return self.cache.get_many([self._place(index) for index in indices], self._load)

    def flush(self) -> None:
        """See `Cache.flush`."""
        self.cache.flush()

    def stats(self) -> Stats:
        """See `Cache.stats`."""
        return self.cache.stats()

    def close(self) -> None:
        """See `Cache.close`."""
        self.cache.close()

    def __enter__(self) -> Cached:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


_cached: weakref.WeakSet[Cached] = weakref.WeakSet()
"""Those of this process."""


def _length(dataset: Any) -> int | None:
    return len(dataset) if hasattr(dataset, "__len__") else None
