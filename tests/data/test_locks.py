"""Locks on numbers, which processes and threads share: what a signal handler's exception leaves of them."""

import os
import time
from pathlib import Path

import pytest
from support.interrupts import interrupted_everywhere

from bagua_comm.data import Cache, LMDBStore
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
