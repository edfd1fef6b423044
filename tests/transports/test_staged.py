"""Device arrays through host memory: the same results as host arrays, in pieces, in the order of streams."""

import functools
import importlib

import numpy as np
import pytest
from support.device_ranks import run_on_devices

import bagua_comm
from bagua_comm import CommMismatch, CommTimeout
from bagua_comm.testing import check_transport, sample

run_staged = functools.partial(run_on_devices, kind="staged")


@pytest.fixture
def piece_bytes(device, monkeypatch):
    """Arrays go in pieces of 64 bytes."""
    monkeypatch.setattr(importlib.import_module("bagua_comm.transports.staged"), "PIECE_BYTES", 64)
    return 64


@pytest.mark.parametrize(
    ("device", "ranks"),
    [
        ("lazy", 1),
        pytest.param("main-first", 2, marks=pytest.mark.slow),
        pytest.param("side-first", 3, marks=pytest.mark.slow),
        pytest.param("lazy", 4, marks=pytest.mark.slow),
    ],
    indirect=["device"],
)
def test_conformance(device, ranks):
    import cupy

    run_staged(device, ranks, body=lambda comm: check_transport(comm, asarray=cupy.asarray))


@pytest.mark.slow
def test_conformance_in_many_pieces(device, monkeypatch):
    import cupy

    monkeypatch.setattr(importlib.import_module("bagua_comm.transports.staged"), "PIECE_BYTES", 4096)
    run_staged(device, 3, body=lambda comm: check_transport(comm, asarray=cupy.asarray))


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16", "int64"])
def test_results_are_those_of_host_arrays(device, piece_bytes, dtype):
    import cupy

    def body(comm):
        x = sample(comm.rank, (3, 111), dtype)
        on_device = cupy.asarray(x)
        for call in (
            lambda x: comm.allreduce(x, op="avg"),
            lambda x: comm.reduce(x, root=1, op="max"),
            lambda x: comm.broadcast(x, root=2),
            lambda x: comm.reduce_scatter(x),
            lambda x: comm.alltoall(x),
            lambda x: comm.allgather(x),
        ):
            expected, actual = call(x), call(on_device)
            if expected is not None:
                assert expected.tobytes() == actual.get().tobytes()
        comm.check_consistency(comm.allreduce(on_device))

    run_staged(device, 3, body=body)


def test_the_next_pieces_are_on_their_way_while_one_is_with_the_host(device, piece_bytes):
    import cupy

    def body(comm):
        x = cupy.asarray(np.ones(64, np.float32))
        staged = comm.transports[1]
        host, seen = staged._host, []
        reduce = host.allreduce

        def watched(piece, out, op):
            mine = [entry.stream for entry in device.log if entry.device == comm.rank and entry.name == "copy"]
            seen.append((piece.nbytes, mine.count(staged._down.ptr)))
            reduce(piece, out, op)

        host.allreduce = watched
        comm.allreduce(x, out=x)
        assert x.get().tolist() == [2.0] * 64
        return seen

    assert run_staged(device, 2, body=body) == [[(piece_bytes, 4)] * 4] * 2


def test_the_host_waits_for_pieces_down_and_for_nothing_else(device, piece_bytes):
    import cupy

    def body(comm):
        x = cupy.asarray(np.ones(64, np.float32))
        for _ in range(3):
            comm.allreduce(x, out=x)
        return x

    run_staged(device, 1, body=body)
    # Four pieces a call, and once before each further call (and the end) for the copies up.
    assert device.host_syncs == ["Event.synchronize"] * (3 * 4 + 2 + 1)


def test_received_bytes_stay_until_they_are_copied_up(device):
    import cupy

    def body(comm):
        xs = [cupy.asarray(np.full(100, 10.0 * comm.rank + i)) for i in range(4)]
        for x in xs:
            comm.broadcast(x, root=1)
        return [x.get().max() for x in xs]

    assert run_staged(device, 2, body=body) == [[10.0, 11.0, 12.0, 13.0]] * 2


def test_results_are_there_for_later_work_on_the_callers_stream(device, piece_bytes):
    import cupy

    def body(comm):
        stream = cupy.cuda.Stream(non_blocking=True)
        with stream:
            x = cupy.asarray(np.full(100, comm.rank + 1.0))
            comm.allreduce(x, out=x)
            y = x.copy()
            x[...] = cupy.asarray(np.zeros(100))
            return y.get().tolist()

    assert run_staged(device, 2, body=body) == [[3.0] * 100] * 2


def test_messages_match_however_they_are_sent_and_received(device, piece_bytes):
    import cupy

    def body(comm):
        long, short = cupy.asarray(np.arange(100.0)), cupy.asarray(np.array([7.0]))
        if comm.rank == 0:
            comm.send(long, dest=1)
            comm.exchange([(1, short), (1, long)], [])
            return None
        got = [cupy.zeros(100), cupy.zeros(1), cupy.zeros(100)]
        comm.exchange([], [(0, got[0]), (0, got[1])])
        comm.recv(got[2], source=0)
        return [x.get().sum() for x in got]

    assert run_staged(device, 2, body=body) == [None, [4950.0, 7.0, 4950.0]]


def test_an_array_for_several_ranks_is_copied_down_once(device):
    import cupy

    def body(comm):
        x = cupy.asarray(np.ones(100))
        out = cupy.empty((3, 100))
        before = len(device.log)
        comm.allgather(x, out=out)
        down = comm.transports[1]._down.ptr
        return [entry.stream for entry in device.log[before:] if entry.device == comm.rank].count(down)

    assert run_staged(device, 3, body=body) == [1, 1, 1]


def test_pinned_memory_is_kept(device):
    import cupy

    def body(comm):
        staged, addresses = comm.transports[1], set()
        for count in (1000, 10, 1000):
            comm.allreduce(cupy.asarray(np.ones(count)))
            addresses.add(bagua_comm.arrays.address(staged._pinned))
        return len(addresses)

    assert run_staged(device, 2, body=body) == [1, 1]


def test_bytes_are_those_that_the_host_transport_sends(device):
    import cupy

    def body(comm):
        comm.allgather(cupy.asarray(np.ones(100)))
        return comm.counters.by_operation["allgather"].wire_bytes

    assert run_staged(device, 3, body=body) == [1600] * 3


def test_errors_are_those_of_the_host_transport(device):
    import cupy

    def body(comm):
        if comm.rank == 0:
            comm.send(cupy.zeros(3), dest=1)
        else:
            with pytest.raises(CommMismatch, match=r"expected float64\[2\] from rank 0, which sent float64\[3\]"):
                comm.recv(cupy.zeros(2), source=0)
        comm.barrier()  # an abort would be seen before the message
        comm.transports[1].abort()
        with pytest.raises(bagua_comm.CommAborted):
            comm.allreduce(cupy.zeros(3))

    run_staged(device, 2, body=body)


@pytest.mark.parametrize("device", ["lazy"], indirect=True)
@pytest.mark.parametrize("error", [CommTimeout, KeyboardInterrupt])
def test_after_an_error_no_piece_is_still_on_its_way_to_pinned_memory(device, piece_bytes, error):
    """The memory may soon belong to another array."""
    import cupy

    def body(comm):
        staged, rounds = comm.transports[1], []

        def fail_in_round_1(piece, out, op):
            rounds.append(staged._down.done)
            if len(rounds) == 2:
                raise error("in round 1")

        staged._host.allreduce = fail_in_round_1
        with pytest.raises(error):
            comm.allreduce(cupy.asarray(np.ones(64, np.float32)))
        return rounds, staged._down.done

    assert run_staged(device, 1, body=body) == [([False, False], True)]


def test_a_missing_rank_is_a_timeout(device, monkeypatch):
    import cupy

    def body(comm):
        if comm.rank == 0:
            comm.transports[1]._host.inner.timeout_s = 0.2
            with pytest.raises(CommTimeout, match=r"rank 0 waited 0\.2 s"):
                comm.allreduce(cupy.zeros(3))

    run_staged(device, 2, body=body)


def test_groups_agree_and_synchronise_over_the_host_transport(device):
    def body(comm):
        staged = comm.transports[1]
        staged.barrier()
        return staged.agree(comm.rank == 0), staged.agree(True), staged.split(comm.rank, 0).size

    assert run_staged(device, 2, body=body) == [(False, True, 1)] * 2
