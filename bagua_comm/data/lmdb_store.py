"""A store in an LMDB file, shared by all processes of a host without a server."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

from ..errors import StoreError
from ..system.files import is_private
from .locks import Holder, Mutex, locks_in
from .stores import Store
from .values import library

T = TypeVar("T")

_READERS = 1024
"""The largest number of concurrent readers, threads of all processes."""

_WRITER = 0
"""The number of the lock for writing."""

_LONGEST_KEY = 511


_opened: dict[str, tuple[int, Any]] = {}
"""LMDB's environments by their folders, with the process that opened them.

LMDB allows one for each file, and none inherited by a fork.
"""

_opening = Mutex()
"""The lock of `_opened`."""


def _open(path: str, capacity_bytes: int) -> Any:
    lmdb = library("lmdb", "LMDBStore")
    with _store_errors(f"{path} cannot be opened"):
        # Data are synced before the page that refers to them: a crash of the host loses only the last values.
        environment = lmdb.open(
            path, map_size=capacity_bytes, metasync=False, max_readers=_READERS, mode=0o600, meminit=False
        )
        environment.reader_check()  # the remains of killed processes
    return environment


@contextmanager
def _store_errors(what: str) -> Iterator[None]:
    """Raise errors of LMDB and of the file system as a StoreError that begins with `what`."""
    try:
        yield
    except (library("lmdb", "LMDBStore").Error, OSError, OverflowError) as exc:
        raise StoreError(f"LMDBStore: {what}: {exc}") from exc


class LMDBStore(Store):
    """Store in a folder of the local disk, and so in the page cache, which all processes share.

    A missing folder is made private to this user. Do not put it on a network file system: LMDB maps its file into
    memory. The file is trusted: users who can write to the folder can crash this process. A cache with
    `form="pickle"` refuses such a folder, since they could run code as you.

    Args:
        path: The folder.
        capacity_bytes: The largest size of the file; more raises StoreError. The largest value of all processes
            counts.
        timeout_s: The longest wait for another process that writes.

    Raises:
        StoreError: The folder cannot be made, or holds a file that is not LMDB's.
        ImportError: lmdb is not installed.
    """

    def __init__(self, path: str | Path, *, capacity_bytes: int = 100 << 30, timeout_s: float = 30.0) -> None:
        with _store_errors(f"{path} cannot be made"):
            Path(path).mkdir(mode=0o700, parents=True, exist_ok=True)
        self.path = os.path.realpath(path)
        self.identity = f"lmdb:{self.path}"
        self.capacity_bytes = capacity_bytes
        self.timeout_s = timeout_s
        self._writing = Mutex()
        self._environment()

    def _environment(self) -> Any:
        """The environment of LMDB; opened at the first use in this process."""
        with _opening.lock:
            pid, environment = _opened.get(self.path, (0, None))
            if pid != os.getpid():
                if environment is not None:
                    environment.close()
                environment = _open(self.path, self.capacity_bytes)
                _opened[self.path] = os.getpid(), environment
            return environment

    def _do(self, body: Callable[[Any], T], *, write: bool) -> T:
        """Call `body(transaction)`."""
        lmdb = library("lmdb", "LMDBStore")
        environment = self._environment()
        with _store_errors(self.path):
            while True:
                try:
                    with environment.begin(write=write) as transaction:
                        return body(transaction)
                except lmdb.MapResizedError:  # another process has increased the size
                    environment.set_mapsize(0)
                except lmdb.MapFullError as exc:
                    raise StoreError(
                        f"LMDBStore: {self.path} is full ({self.capacity_bytes} bytes): {exc}"
                    ) from exc

    def _write(self, body: Any) -> None:
        """Call `body(transaction)` while no other process writes: LMDB itself would wait forever."""
        with _store_errors(self.path):
            locks = locks_in(Path(self.path) / "writer.lock")
            writer = Holder()
            try:
                if not locks.wait(_WRITER, self.timeout_s, writer):
                    raise StoreError(
                        f"LMDBStore: {self.path}: another process has written for {self.timeout_s:g} s"
                    )
                with self._writing.lock:  # it is free: only one thread is the writer
                    self._do(body, write=True)
            finally:
                writer.is_over = True
                locks.tidy()

    def open_to_others(self) -> str | None:
        """See `Store.open_to_others`."""
        for path in (Path(self.path), Path(self.path) / "data.mdb"):
            try:
                is_own = is_private(path.lstat())
            except OSError as exc:
                return f"it cannot be seen who can write to {path}: {exc}"
            if not is_own:
                return f"{path} belongs to another user, or others can write to it (chmod go-w makes it private)"
        return None

    def get_many(self, keys: Sequence[bytes]) -> list[bytes | None]:
        """See `Store.get_many`."""
        _check_keys(keys)
        return self._do(lambda transaction: [transaction.get(key) for key in keys], write=False)

    def set_many(self, items: Mapping[bytes, bytes]) -> None:
        """See `Store.set_many`. All values are written, or none."""
        _check_keys(items)

        def put(transaction: Any) -> None:
            for key in sorted(items):  # neighbours share a page
                transaction.put(key, items[key])

        self._write(put)

    def count(self) -> int:
        """See `Store.count`."""
        return self._do(lambda transaction: int(transaction.stat()["entries"]), write=False)

    def clear(self) -> None:
        """See `Store.clear`."""
        environment = self._environment()
        self._write(lambda transaction: transaction.drop(environment.open_db(txn=transaction), delete=False))

    def close(self) -> None:
        """See `Store.close`. Other stores of this process on the same path open it again."""
        with _opening.lock:
            _, environment = _opened.pop(self.path, (0, None))
            if environment is not None:
                environment.close()


def _check_keys(keys: Iterable[bytes]) -> None:
    for key in keys:
        if not 0 < len(key) <= _LONGEST_KEY:
            raise StoreError(f"LMDBStore: a key has {len(key)} bytes, expected 1 to {_LONGEST_KEY}")
