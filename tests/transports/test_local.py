"""Threads as ranks: timeouts, errors that wake everybody, messages that don't fit, device arrays."""

import gc
import re
import time

import numpy as np
import pytest
from support.device_ranks import run_on_devices

from bagua_comm import CommAborted, CommMismatch, CommTimeout
from bagua_comm.testing import check_transport, run_ranks
from bagua_comm.transports import LocalTransport


def test_a_wait_ends_with_a_timeout_that_names_the_call():
    def body(comm):
        if comm.rank == 0:
            comm.barrier()
            comm.allreduce(np.zeros(3))

    start = time.monotonic()
    with pytest.raises(CommTimeout, match=r"barrier\(\) #1: rank 0 waited 0.2 s for 1 bytes from rank 1"):
        run_ranks(2, body, timeout_s=0.2)
    assert time.monotonic() - start < 30


def test_an_error_in_one_rank_wakes_the_others_and_is_the_one_raised():
    def body(comm):
        if comm.rank == 1:
            raise KeyError("mine")
        with pytest.raises(CommAborted, match="rank 1 failed: KeyError"):
            comm.split(0).barrier()

    start = time.monotonic()
    with pytest.raises(KeyError, match="mine"):
        run_ranks(3, body, timeout_s=60)
    assert time.monotonic() - start < 30


def test_abort_reaches_groups_split_off():
    def body(comm):
        group = comm.split(0)
        if comm.rank == 0:
            comm.abort()
            return None
        with pytest.raises(CommAborted, match="rank 0 aborted"):
            group.barrier()
        return True

    assert run_ranks(2, body) == [None, True]


def test_a_message_of_another_size_is_a_mismatch():
    def body(comm):
        if comm.rank == 0:
            comm.send(np.zeros(3), dest=1)
            return
        out = np.full(2, 7.0)
        with pytest.raises(CommMismatch, match=r"expected float64\[2\] from rank 0, which sent float64\[3\]"):
            comm.recv(out, source=0)
        assert out.tolist() == [7, 7]

    run_ranks(2, body)


def test_a_sent_array_may_change_at_once():
    def body(comm):
        x = np.array([1.0])
        comm.send(x, dest=comm.rank)
        x[0] = 2
        return comm.recv(np.empty(1), source=comm.rank)[0]

    assert run_ranks(1, body) == [1.0]


def test_alone_it_needs_no_hub():
    transport = LocalTransport()
    assert (transport.rank, transport.size) == (0, 1)
    assert transport.agree(True)
    assert not transport.agree(False)


@pytest.mark.parametrize("dissenter", [None, 0, 2])
def test_ranks_agree_only_if_all_do(dissenter):
    results = run_ranks(3, lambda comm: comm.transports[0].agree(comm.rank != dissenter))
    assert results == [dissenter is None] * 3


@pytest.mark.parametrize(
    ("device", "ranks"),
    [
        ("lazy", 1),
        *(pytest.param(*each, marks=pytest.mark.slow) for each in [("main-first", 2), ("side-first", 3)]),
    ],
    indirect=["device"],
)
def test_conformance_on_device_arrays(device, ranks):
    import cupy

    run_on_devices(device, ranks, "local", lambda comm: check_transport(comm, asarray=cupy.asarray))


def test_the_host_waits_for_peers_but_not_for_the_device(device):
    import cupy

    def body(comm):
        x = cupy.asarray(np.full((2, 100), comm.rank + 1.0))
        with device.forbid_host_sync(this_thread=True):
            for _ in range(3):
                comm.allreduce(x, out=x, op="avg")
                comm.alltoall(x, out=x)
        return x.get()[0, 0]

    assert run_on_devices(device, 2, "local", body) == [1.5, 1.5]


def test_copies_under_way_are_not_overwritten_by_the_sender(device):
    import cupy

    def body(comm):
        stream = cupy.cuda.Stream(non_blocking=True)
        with stream:
            x, out = cupy.asarray(np.full(100, comm.rank + 1.0)), cupy.empty(100)
            comm.sendrecv(x, out, dest=1 - comm.rank, source=1 - comm.rank)
            comm.barrier()
            x[...] = cupy.asarray(np.zeros(100))  # in memory that copies may have left
            cupy.asarray(np.zeros(100))
            comm.barrier()
            return out.get().tolist()

    assert run_on_devices(device, 2, "local", body) == [[2.0] * 100, [1.0] * 100]


def test_copies_that_were_read_are_released(device):
    import cupy

    def body(comm):
        x = cupy.asarray(np.ones(100))
        for _ in range(5):
            comm.allgather(x).get()
        return len(comm.transports[0].inner._read)

    assert max(run_on_devices(device, 3, "local", body)) <= 2


def test_a_group_without_references_is_forgotten():
    def body(comm):
        hub = comm.transports[0]._hub
        for _ in range(100):
            comm.dup().close()
        comm.barrier()
        gc.collect()
        comm.barrier()
        return len(hub.forming), len(hub.groups)

    assert run_ranks(2, body) == [(0, 0)] * 2


def test_a_call_of_many_waits_has_one_deadline():
    def body(comm):
        if comm.rank == 1:
            for _ in range(8):
                time.sleep(0.1)  # sleeps: each message is in time, all together are not
                comm.send(np.ones(1), dest=0)
            return

        def receive_all():
            for _ in range(8):
                comm.transports[0].exchange([], [(1, np.ones(1))])

        comm.transports[0].begin_call("several", collective=False)
        with pytest.raises(CommTimeout):
            receive_all()  # each call ends in time, but not all of them together

    run_ranks(2, body, timeout_s=0.4)


@pytest.mark.parametrize(
    ("call", "text"),
    [
        (
            lambda comm: comm.allreduce(np.ones(4, "i4" if comm.rank else "f4")),
            r"called allreduce\(\w+, op=sum\) of 4 elements, but rank \d called",
        ),
        (lambda comm: comm.reduce(np.ones(4), root=comm.rank), "reduce.float64, op=sum, root="),
        (lambda comm: comm.allreduce(np.ones(4), op="max" if comm.rank else "min"), "op=m.*op=m"),
        (lambda comm: comm.alltoall(np.ones(4)) if comm.rank else comm.allgather(np.ones(2)), "all.*, but rank"),
        (lambda comm: comm.gather(np.ones(4), root=comm.rank), "gather|waited"),
    ],
)
def test_calls_that_differ_raise(call, text):
    def body(comm):
        with pytest.raises((CommMismatch, CommTimeout), match=text):
            call(comm)

    run_ranks(2, body, timeout_s=0.5)


@pytest.mark.parametrize("count", [1, 100_000])
@pytest.mark.parametrize("name", ["allreduce", "broadcast", "allgather", "reduce_scatter", "alltoall"])
@pytest.mark.parametrize("size", [2, 3])
def test_the_sizes_of_calls_that_differ_are_named_on_all_ranks(size, name, count):
    def call(comm):
        x, of = (
            np.ones((12 if comm.rank == 1 else 12 * (count + 1)) * size),
            {"root": 0} if name == "broadcast" else {},
        )
        getattr(comm, name)(x, **of)
        comm.barrier()  # for ranks that have waited for no other one in a broadcast

    def body(comm):
        with pytest.raises(CommMismatch, match=rf"rank \d called {name}.* rank \d called {name}") as caught:
            call(comm)
        found = {int(n) for n in re.findall(r"of (\d+) elements", str(caught.value))}
        assert found == {12 * size, 12 * (count + 1) * size}

    run_ranks(size, body, timeout_s=5)


@pytest.mark.parametrize(
    ("odd", "error", "match"),
    [
        (lambda comm: comm.scatter(None, np.ones(1), root=2), CommMismatch, "but rank"),
        (lambda comm: comm.recv(np.ones(1), source=1, timeout_s=0.01), CommTimeout, "aborted after CommTimeout"),
    ],
    ids=["a call that differs", "a timeout"],
)
def test_a_rank_that_aborts_ends_the_waits_of_the_others(odd, error, match):
    def body(comm):
        start = time.monotonic()
        with pytest.raises(error, match=match if comm.rank else None):
            odd(comm) if comm.rank == 0 else comm.reduce_scatter(np.ones(3))
        return time.monotonic() - start

    assert max(run_ranks(3, body, timeout_s=20)) < 10
