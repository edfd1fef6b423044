"""Ranks that read each other's memory: threads in place of processes, since a process may read its own."""

import ctypes
import mmap
import os
import threading
import time

import numpy as np
import pytest
from support.children import Forked

from bagua_comm import kernels
from bagua_comm.arrays import FLOATS, dtype_named
from bagua_comm.kernels import host
from bagua_comm.testing import run_ranks, sample
from bagua_comm.transports.mpi import peer_memory as module
from bagua_comm.transports.mpi import tuning
from bagua_comm.transports.mpi.peer_memory import (
    UNREADABLE,
    DirectCalls,
    PeerMemory,
    address_of,
    largest_copied,
    open_memory,
)
from bagua_comm.transports.mpi.shared_window import PeerAbortedError, open_window
from bagua_comm.transports.mpi.world import World

SIZES = [2, 3, 5]


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch):
    monkeypatch.setattr(module, "PIECE_BYTES", 960)


def wait(done):
    deadline = time.monotonic() + 20
    while not done():
        assert time.monotonic() < deadline
        os.sched_yield()


def made(direct, name, dtype, op, root):
    """The collective of this name; takes the addresses of all ranks' arrays, `x`, and the array to fill."""
    add = kernels.reducer(dtype, op or "sum", direct.size)
    return {
        "broadcast": lambda places, x, _: direct.broadcast(places, x, root),
        "allgather": direct.allgather,
        "alltoall": direct.alltoall,
        "allreduce": lambda places, x, out: direct.allreduce(places, x, out, add),
        "reduce_scatter": lambda places, x, out: direct.reduce_scatter(places, x, out, add),
        "reduce": lambda places, x, out: direct.reduce(
            places, x, out if direct.rank == root else None, root, add
        ),
    }[name]


def directly(ranks, body):
    """Return `body(rank, call)` of each of `ranks` threads; call(name, x, out, op, root) makes a call."""

    def on_rank(comm):
        window, memory = open_window(comm.transports[0], wait), open_memory(comm.transports[0])
        assert memory is not None

        def call(name, x, out, op="", root=0):
            places = window.addresses(1, memory.address(x))
            assert UNREADABLE not in places
            made(DirectCalls(window, memory), name, x.dtype, op, root)(places, x, out)

        return body(comm.rank, call)

    return run_ranks(ranks, on_rank)


@pytest.mark.parametrize("alone", [True, False], ids=["the root adds", "each adds a chunk"])
@pytest.mark.parametrize("ranks", SIZES)
@pytest.mark.parametrize(
    ("dtype", "op"), [*((name, "avg") for name in sorted(FLOATS)), ("int8", "avg"), ("int16", "max")]
)
def test_reductions_have_the_bytes_of_rank_order(monkeypatch, ranks, dtype, op, alone):
    monkeypatch.setattr(module, "ALONE_BYTES", 1 << 20 if alone else 0)
    m = 1003  # several pieces, the last one short
    xs = np.stack([sample(r, (ranks * m,), dtype) for r in range(ranks)])
    expected = np.empty(ranks * m, dtype_named(dtype))
    host.reduce_rows(xs, expected, op)
    root = ranks - 1

    def body(rank, call):
        x, outs = xs[rank].copy(), []
        uneven, chunk, total = np.empty_like(x[1:]), x[rank * m : (rank + 1) * m], np.empty_like(x)
        call("allreduce", x[1:], uneven, op)
        call("reduce", x, total if rank == root else total[:0], op, root)
        assert x.tobytes() == xs[rank].tobytes()
        outs += [uneven, total if rank == root else expected]
        for name, out in (("reduce_scatter", chunk), ("allreduce", x), ("reduce", x)):  # in place
            x[:] = xs[rank]
            call(name, x, out, op, root)
            outs.append(out.copy())
        return [out.tobytes() for out in outs]

    for rank, (uneven, total, scattered, in_place, rooted) in enumerate(directly(ranks, body)):
        assert expected[1:].tobytes() == uneven
        assert expected.tobytes() == total
        assert expected[rank * m : (rank + 1) * m].tobytes() == scattered
        assert expected.tobytes() == in_place
        assert (expected if rank == root else xs[rank]).tobytes() == rooted


@pytest.mark.parametrize("ranks", SIZES)
@pytest.mark.parametrize("dtype", ["bfloat16", "complex64", "bool"])
def test_arrays_arrive_as_they_are(ranks, dtype):
    m = 1003
    xs = np.stack([sample(r, (ranks * m,), dtype) for r in range(ranks)])

    def body(rank, call):
        x, table = xs[rank].copy(), np.empty_like(xs)
        swapped, rows = np.empty_like(x), np.empty_like(xs)
        call("allgather", x, table)
        call("alltoall", x, swapped)
        rows[rank] = x
        call("allgather", rows[rank], rows)
        call("broadcast", x, x, root=1)
        return table.tobytes(), rows.tobytes(), swapped.reshape(ranks, m).tobytes(), x.tobytes()

    for rank, (table, rows, swapped, x) in enumerate(directly(ranks, body)):
        assert xs.tobytes() == table == rows
        assert xs[:, rank * m : (rank + 1) * m].tobytes() == swapped
        assert xs[1].tobytes() == x


def test_memory_that_other_processes_cannot_read_has_no_address():
    memory = PeerMemory([os.getpid()])
    x = np.ones(100_000)
    assert memory.address(x) == address_of(x)
    with mmap.mmap(-1, 4 * mmap.PAGESIZE, prot=mmap.PROT_READ | mmap.PROT_WRITE) as pages:
        y = np.frombuffer(pages, np.uint8)
        assert memory.address(y) == address_of(y)
        protect = ctypes.CDLL(None).mprotect
        protect.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
        assert protect(address_of(y), 4 * mmap.PAGESIZE, 0) == 0
        assert memory.address(y) == UNREADABLE
        with pytest.raises(OSError, match=r"Bad address: cannot read 8 bytes of rank 0, process \d+"):
            memory.read(0, address_of(y), address_of(x), 8)
        del y


def test_memory_is_remembered_as_readable_only_as_long_as_its_array_lives(monkeypatch):
    memory, looks = PeerMemory([os.getpid()]), []
    read = memory._read
    monkeypatch.setattr(memory, "_read", lambda *place: looks.append(place) or read(*place))
    x = np.ones(100)
    assert memory.address(x) == memory.address(x.reshape(10, 10)) == address_of(x)
    assert len(looks) == 1
    address = address_of(x)
    del x
    with mmap.mmap(-1, mmap.PAGESIZE) as page:  # other memory is mapped there
        y = np.frombuffer(page, np.uint8)[:800]
        monkeypatch.setattr(module, "address_of", lambda _: address)
        memory.address(y)
        memory.address(y)
        assert len(looks) == 3
        del y


@pytest.mark.parametrize("ranks", SIZES)
@pytest.mark.parametrize("name", ["broadcast", "allgather", "alltoall", "allreduce", "reduce_scatter", "reduce"])
def test_reading_memory_of_an_aborted_rank_is_an_error(name, ranks):
    """Rank 0 times out, and its program changes its array; then the others read it."""
    changed = threading.Event()

    def on_rank(comm):
        class TooLate(Exception):
            pass

        def fail(done):
            raise TooLate

        window = open_window(comm.transports[0], wait)
        memory, x, out = open_memory(comm.transports[0]), np.ones(ranks * 1000), np.empty(ranks * ranks * 1000)
        out = out[: {"allgather": out.size, "reduce_scatter": 1000}.get(name, x.size)]
        places = window.addresses(1, address_of(x))
        call = made(DirectCalls(window, memory), name, x.dtype, "sum", root=0 if name == "broadcast" else 1)
        if comm.rank == 0:
            window._wait = fail
            with pytest.raises(TooLate):
                call(places, x, out)
            window.abort()
            x[:] = out[:] = 77
            changed.set()
        else:
            assert changed.wait(20)
            with pytest.raises(PeerAbortedError, match="aborted while its array was read"):
                call(places, x, out)
            window.abort()

    run_ranks(ranks, on_rank)


def test_a_process_that_has_ended_cannot_be_read():
    process = Forked(lambda: None)
    assert process.code() == 0
    x = np.ones(1)
    with pytest.raises(OSError, match="No such process"):
        PeerMemory([process.pid]).read(0, address_of(x), address_of(x), 8)


@pytest.mark.parametrize("error", [PermissionError, None])
def test_where_one_rank_may_not_read_all_do_without(monkeypatch, error):
    def refuse(memory, rank, *place):
        if error is not None and rank == 1:
            raise error("not allowed")

    monkeypatch.setattr(PeerMemory, "read", refuse)  # else it reads other bytes than were meant
    assert run_ranks(3, lambda comm: open_memory(comm.transports[0])) == [None] * 3


def test_where_the_system_has_no_such_call_all_do_without(monkeypatch):
    monkeypatch.setattr(module, "_is_here", lambda: False)
    assert run_ranks(2, lambda comm: open_memory(comm.transports[0])) == [None] * 2


@pytest.mark.parametrize(
    ("slow", "ranks", "expected"),
    [("read", 2, tuning.SHOWN_BYTES), ("gather", 2, tuning.READ_BYTES), ("read", 5, tuning.READ_BYTES)],
    ids=["reads take longer", "copies take longer", "too many ranks to copy arrays of this size"],
)
def test_ranks_agree_on_the_faster_way_for_arrays_of_middle_size(slow, ranks, expected):
    def on_rank(comm):
        transport = comm.transports[0]
        window, memory = open_window(transport, wait), open_memory(transport)
        slowed = memory if slow == "read" else window
        call = getattr(slowed, slow)
        pause_s = 0.02 if transport.rank == 0 else 0.0  # one rank is enough
        setattr(slowed, slow, lambda *arguments: (time.sleep(pause_s), call(*arguments))[1])
        return largest_copied(transport, window, memory, new_world())

    assert run_ranks(ranks, on_rank) == [expected] * ranks


def new_world():
    return World(None, [], frozenset())


@pytest.mark.parametrize("known", [(7, 7), (9, 7), (0, 7), (0, 0)])
def test_the_faster_way_is_measured_once_a_world(known):
    """Groups of the world use what their ranks know; all ranks of a group the same."""

    def on_rank(comm):
        transport, world = comm.transports[0], new_world()
        window, memory, reads = open_window(transport, wait), open_memory(transport), []
        world.copied_bytes = known[comm.rank]
        read, memory.read = memory.read, lambda *place: (reads.append(place), read(*place))
        found = [largest_copied(transport, window, memory, world) for _ in range(3)]
        return len(reads), found

    (reads, found), other = run_ranks(2, on_rank)
    assert (reads, found) == other
    assert found == [7 if all(known) else found[0]] * 3
    assert reads == (0 if all(known) else tuning.PROBES_OF_COPIES)


def test_a_rank_that_cannot_read_another_while_they_measure_stays_in_step():
    def on_rank(comm):
        transport = comm.transports[0]
        window, memory = open_window(transport, wait), open_memory(transport)
        if comm.rank:
            memory._processes = [1 << 30] * 2  # no such process
        copied_bytes = largest_copied(transport, window, memory, new_world())
        window.barrier()
        return copied_bytes

    first, second = run_ranks(2, on_rank)
    assert first == second
