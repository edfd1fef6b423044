"""Shared memory: threads stand for processes, since a process may map the same memory twice."""

import gc
import os
import stat
import subprocess
import time
from contextlib import ExitStack
from pathlib import Path

import numpy as np
import pytest

from bagua_comm import CommTimeout
from bagua_comm.arrays import FLOATS, dtype_named
from bagua_comm.kernels import host
from bagua_comm.testing import run_ranks, sample
from bagua_comm.transports.mpi import shared_window as window

SLOT = 960  # of whole cache lines for 3 and 5 ranks
SIZES = [2, 3, 5]


@pytest.fixture(autouse=True)
def small_slots(monkeypatch):
    monkeypatch.setattr(window, "SLOT_BYTES", SLOT)


def wait(done):
    deadline = time.monotonic() + 20
    while not done():
        assert time.monotonic() < deadline
        os.sched_yield()


def over_window(ranks, body, wait=wait):
    """Return `body(window)` of each of `ranks` threads."""
    return run_ranks(ranks, lambda comm: body(window.open_window(comm.transports[0], wait)))


@pytest.mark.parametrize("ranks", SIZES)
@pytest.mark.parametrize(
    ("dtype", "op"), [*((name, "avg") for name in sorted(FLOATS)), ("int8", "avg"), ("int16", "max")]
)
def test_reductions_have_the_bytes_of_rank_order(ranks, dtype, op):
    m = 1003  # several pieces, the last one short
    xs = np.stack([sample(r, (ranks * m,), dtype) for r in range(ranks)])
    expected = np.empty(ranks * m, dtype_named(dtype))
    host.reduce_rows(xs, expected, op)

    def body(window):
        x = xs[window.rank].copy()
        uneven, chunk = np.empty_like(x[1:]), x[window.rank * m : (window.rank + 1) * m]
        window.allreduce(x[1:], uneven, op)
        assert (x == xs[window.rank]).all()
        window.reduce_scatter(x, chunk, op)
        scattered, x[:] = chunk.copy(), xs[window.rank]
        window.allreduce(x, x, op)
        return uneven.tobytes(), scattered.tobytes(), x.tobytes()

    for rank, (uneven, scattered, in_place) in enumerate(over_window(ranks, body)):
        assert expected[1:].tobytes() == uneven
        assert expected[rank * m : (rank + 1) * m].tobytes() == scattered
        assert expected.tobytes() == in_place


@pytest.mark.parametrize("ranks", SIZES)
@pytest.mark.parametrize("count", [0, 1, SLOT, 3 * SLOT + 1])
def test_any_count_will_do(ranks, count):
    def body(window):
        x = np.arange(count, dtype=np.uint64) + window.rank
        window.allreduce(x, x, "max")
        return x

    for result in over_window(ranks, body):
        np.testing.assert_array_equal(result, np.arange(count) + ranks - 1)


def test_data_that_a_slow_rank_has_not_read_is_not_overwritten():
    """Every rank in turn does nothing until the others can do no more without it."""

    def body(window):
        meet, total = window.barrier, np.zeros(5 * SLOT, np.uint8)

        def late():
            if window._round % window.size == window.rank:
                behind = lambda: all(  # noqa: E731
                    window._counters[peer] > window._round for peer in window._others
                )
                wait(behind)
            meet()

        window.barrier = late
        for value in range(1, 4):
            window.allreduce(np.full(total.size, value * (window.rank + 1), np.uint8), total, "sum")
            assert (total == value * 6).all()
        return True

    assert all(over_window(3, body))


def test_a_wait_for_a_missing_peer_raises_the_error_of_the_wait():
    def fail(done):
        raise CommTimeout("waited")

    def body(window):
        if window.rank == 0:
            with pytest.raises(CommTimeout):
                window.allreduce(np.ones(9), np.ones(9), "sum")

    over_window(2, body, fail)


@pytest.mark.parametrize(("machine", "kind"), [("x86_64", type(None)), ("aarch64", window.Barrier)])
def test_memory_is_ordered_by_more_where_the_machine_reorders_it(monkeypatch, machine, kind):
    monkeypatch.setattr(window.platform, "machine", lambda: machine)

    def body(window):
        assert type(window._fence) is kind
        x = np.full(3 * SLOT, window.rank)
        window.allreduce(x, x, "sum")
        return x.tolist()

    assert over_window(2, body) == [[1] * 3 * SLOT] * 2


def refuse(*arguments):
    raise OSError("not here")


@pytest.mark.parametrize(
    ("module", "name", "value"),
    [
        (os, "memfd_create", refuse),  # forbidden, or no file left
        (os, "ftruncate", refuse),
        (os, "readlink", refuse),  # another host or user
        (os, "readlink", lambda path: "/memfd:bagua-1 (deleted)"),  # another user's
        (window.mmap, "mmap", refuse),
    ],
)
def test_where_memory_cannot_be_shared_there_is_no_window(module, name, value, monkeypatch):
    monkeypatch.setattr(module, name, value)
    assert over_window(2, lambda window: window) == [None, None]


def test_nor_is_there_one_where_the_system_does_not_know_such_memory(monkeypatch):
    monkeypatch.delattr(os, "memfd_create")
    assert over_window(2, lambda window: window) == [None, None]


@pytest.mark.slow
def test_memory_and_files_go_with_the_window():
    def held():
        gc.collect()
        return "memfd:bagua" in Path("/proc/self/maps").read_text(), len(os.listdir("/proc/self/fd"))

    assert not held()[0]
    _, files = held()
    windows = over_window(2, lambda window: window)
    assert held() == (True, files + 2)
    del windows
    assert held() == (False, files)


class Halved:
    """Elements in int32, times 2, of which half the sum is wanted."""

    dtype = np.dtype(np.int32)

    def __init__(self, x):
        self.x = x

    def encode(self, piece, out):
        out[...] = 2 * self.x[piece].astype(np.int32)

    def decode(self, total, piece, out):
        assert total.size == piece.stop - piece.start
        out[...] = total / 2


@pytest.mark.parametrize("ranks", SIZES)
@pytest.mark.parametrize("count", [0, 1, 7, 1003])
@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_encoded_sums_are_added_and_decoded_piece_by_piece(ranks, count, dtype):
    xs = np.arange(ranks * count).reshape(ranks, count) % 50

    def body(window):
        x = xs[window.rank].astype(dtype)
        for _ in range(2):  # in place; the second time, of the sums
            window.allreduce_encoded(Halved(x), x)
        return x.tolist()

    assert over_window(ranks, body) == [(ranks * xs.sum(axis=0)).astype(dtype).tolist()] * ranks


def test_no_other_user_can_open_the_memory_of_ranks():
    """Its mode was 0777: /proc/PID/fd, which only this user may read, was all that kept others out."""
    with ExitStack() as files:
        process, file, _ = window._create(4096, files)
        assert stat.S_IMODE(os.fstat(file).st_mode) == 0o600
        assert not os.get_inheritable(file)
        command = ["sh", "-c", f"exec 3<>/proc/{process}/fd/{file}"]
        assert subprocess.run(command, check=False).returncode == 0
        if os.geteuid() == 0:
            nobody = {"user": 65534, "group": 65534, "extra_groups": []}
            other = subprocess.run(command, stderr=subprocess.PIPE, check=False, **nobody)
            assert other.returncode != 0
            assert b"ermission denied" in other.stderr
