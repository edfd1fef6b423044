"""Locks among threads and processes: what signal handlers, forks and the garbage collector leave of them."""

import fcntl
import gc
import os
import pickle
import time
from multiprocessing import util
from pathlib import Path

import pytest
from support.children import forked
from support.interrupts import interrupted_everywhere

from bagua_comm.data import Cache, LMDBStore, MemoryStore, lmdb_store
from bagua_comm.data.locks import Holder, locks_in

# Of what is let go at an exception.
pytestmark = pytest.mark.filterwarnings(
    "ignore::pytest.PytestUnraisableExceptionWarning", "ignore::ResourceWarning"
)


def bytes_held(path):
    """The locks of this process in a file, as the kernel lists them."""
    lines = [line.split() for line in Path("/proc/locks").read_text().splitlines()]
    inode = str(os.stat(path).st_ino)
    return sorted(int(words[-1]) for words in lines if words[-3].split(":")[-1] == inode)


def test_a_lock_that_interrupted_work_has_acquired_is_released_by_the_next_use(tmp_path):
    locks = locks_in(tmp_path / "locks")

    def work():
        holder = Holder()
        try:
            locks.take(3, holder)
            locks.wait(4, 0.0, holder)
            assert bytes_held(tmp_path / "locks") == [6, 8]
            locks.give(3, holder)
        finally:
            holder.is_over = True
            locks.tidy()

    def check():
        assert not locks.wanted(3)
        assert not locks.wanted(4)
        assert bytes_held(tmp_path / "locks") == []
        assert not locks.mine(3)

    work()
    check()
    assert interrupted_everywhere(work, check) > 10


def test_a_thread_waits_for_a_lock_of_its_process_and_then_has_it(tmp_path, monkeypatch):
    locks, first, second = locks_in(tmp_path / "locks"), Holder(), Holder()
    assert locks.take(1, first)
    assert not locks.take(1, second)
    assert not locks.wait(1, 0.0, second)
    assert not locks.wanted(1)
    monkeypatch.setattr(time, "sleep", lambda seconds: locks.wanted(1) and locks.give(1, first))
    assert locks.wait(1, 20.0, second)
    second.is_over = True
    locks.tidy()
    assert bytes_held(tmp_path / "locks") == []


@pytest.mark.slow
def test_a_store_or_a_cache_that_was_interrupted_while_it_wrote_blocks_no_other(tmp_path):
    store = LMDBStore(tmp_path / "store", timeout_s=0.0)
    with Cache(store, wait_s=0.0) as cache:
        keys = iter(range(10**6))

        def call():
            store.set_many({b"a": b"1"})
            cache.get(next(keys), lambda key: key)

        def check():
            store.set_many({b"a": b"2"})

        assert interrupted_everywhere(call, check) > 10
        cache.get(-1, lambda key: key)
        assert cache.stats().timeouts == 0


class Watched(dict):
    """Items for a store, which call a function while the store reads them."""

    def __init__(self, items, call):
        super().__init__(items)
        self.call = call

    def items(self):
        self.call()
        return super().items()

    def __getitem__(self, key):
        self.call()
        return super().__getitem__(key)


def ignore():
    """Do nothing."""


def after(call, function):
    """The function, with a call before it."""

    def both(*arguments):
        call()
        return function(*arguments)

    return both


@pytest.mark.parametrize("place", ["memory", "transaction", "locks", "opening"])
def test_a_cache_that_is_collected_while_its_store_writes_does_not_wait_for_itself(place, tmp_path, monkeypatch):
    def child():
        gc.disable()
        store = MemoryStore() if place == "memory" else LMDBStore(tmp_path, timeout_s=0.0)
        cache = Cache(store)
        cache.put("a", 1)
        cache.cycle = cache  # so that the collector alone ends it
        del cache
        collects = gc.collect if place in ("memory", "transaction") else ignore
        if place == "locks":
            monkeypatch.setattr(fcntl, "lockf", after(gc.collect, fcntl.lockf))
        elif place == "opening":
            store.close()
            monkeypatch.setattr(lmdb_store, "_open", after(gc.collect, lmdb_store._open))
        store.set_many(Watched({b"b": b"2"}, collects))
        util._run_finalizers(0)  # as at the end of a process
        assert store.get_many([b"b"]) == [b"2"]
        assert store.count() == 2

    assert forked(child, limit_s=10) == 0


def test_a_child_that_is_forked_while_a_thread_writes_finds_the_store_free():
    store, codes = MemoryStore(), []

    def fork():
        copy = pickle.loads(pickle.dumps(store))
        copy.set_many({b"b": b"2"})
        codes.append(forked(store.set_many, {b"b": b"2"}, limit_s=10))

    store.set_many(Watched({b"a": b"1"}, fork))
    assert codes == [0]
