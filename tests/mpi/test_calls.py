"""The calls of tests/calls.py over MPI, and beside mpi4py's own."""

import time
from concurrent.futures import Future
from threading import Timer
from unittest.mock import Mock

import numpy as np
import pytest
from mpi4py import MPI
from support import calls
from support.waiting import until

import bagua_comm
from bagua_comm import CommAborted, CommMismatch, quantized_allreduce
from bagua_comm.testing import run_ranks, sample
from bagua_comm.transports.flow import LABELLED
from bagua_comm.transports.labels import Receive, label
from bagua_comm.transports.mpi.messages import Messages
from bagua_comm.transports.mpi.transport import MPITransport

pytestmark = pytest.mark.mpi


@pytest.mark.parametrize("check", [*calls.WITHOUT_CHECK, *calls.BY_LABELS, calls.products_of_complex_numbers])
def test_calls(comm, check):
    check(comm, np.copy)


def test_calls_that_differ_are_found(comm):
    if comm.size == 1:
        return  # nobody to differ from
    with bagua_comm.connect(comm=MPI.COMM_WORLD, timeout_s=30, check=True) as checked:
        for check in calls.WITH_CHECK:
            check(checked, np.copy)


def test_long_messages_are_under_way_while_the_program_computes(comm):
    """Nobody asks for the requests: a thread of theirs does."""
    right, left = (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size
    out = np.zeros(300_000)
    requests = [
        comm.irecv(out, source=left, tag=1),
        comm.isend(np.full(out.size, comm.rank + 0.5), dest=right, tag=1),
    ]
    for request in requests:
        until(lambda request=request: Future.done(request))
    assert (out == left + 0.5).all()
    names = [span.name for span in comm.tracer.spans()]
    assert f"irecv(source={left}, tag=1) under way" in names


def test_no_message_takes_the_place_of_one_that_an_interrupt_has_lost(monkeypatch):
    """Of two receives with one tag, the first gets an error, and not the second message."""
    transport = MPITransport(MPI.COMM_SELF.Dup(), timeout_s=30)
    outs, of = np.zeros((2, 1)), label("x", np.dtype(float), 1)
    first, second = (transport.begin_labelled([], [Receive((0,), out, of)]) for out in outs)
    for value in (1.0, 2.0):
        transport.begin_labelled([(0, np.full(1, value), of)], [])
    with monkeypatch.context() as interrupt:
        interrupt.setattr(Messages, "_deliver", Mock(side_effect=KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            first(np.inf)
    for ended in (second, first):
        with pytest.raises(CommAborted, match="KeyboardInterrupt"):
            ended(np.inf)
    assert not outs.any()


def test_the_limit_of_a_request_is_that_of_all_parts_of_its_message():
    """And not that of the communicator, or of a call that another thread is in."""
    transport, out = MPITransport(MPI.COMM_SELF.Dup(), timeout_s=0.1), np.zeros(40_000)
    wire, of = transport._endpoint.comm, label("x", out.dtype, out.size)
    ended = transport.begin_labelled([], [Receive((0,), out, of)])
    requests = [wire.Isend([of, MPI.BYTE], 0, LABELLED)]
    rest = Timer(0.5, lambda: requests.append(wire.Isend(np.ones(out.size), 0, LABELLED + 1)))
    rest.start()
    until(lambda: ended(time.monotonic() + 30))
    rest.join()
    MPI.Request.Waitall(requests)
    assert out.all()
    transport.close()


@pytest.mark.parametrize("tag", [9, 2])
def test_a_message_that_nobody_received_does_not_reach_the_next_communicator(comm, tag):
    right, left = (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size
    with comm.dup() as first:
        first.send(np.full(5, 7.0), dest=right, tag=tag)
        first.barrier()
    with comm.dup() as second:
        second.timeout_s = 20
        for i, size in enumerate((5, 100_000, 5)):
            out = second.sendrecv(np.full(size, comm.rank), np.zeros(size, int), dest=right, source=left, tag=i)
            assert (out == left).all()


def test_a_tag_that_nobody_sends_is_named(comm):
    if comm.size == 1:
        return  # the other rank sends the wrong ones
    with bagua_comm.connect(comm=MPI.COMM_WORLD, timeout_s=30) as world:
        calls.a_tag_that_nobody_sends(world, np.copy)


@pytest.mark.parametrize("count", [3, 2000, 100_000])
def test_uneven_calls_are_those_of_mpi(comm, count):
    world, p, rank = MPI.COMM_WORLD, comm.size, comm.rank
    counts = [count * (r + 1) for r in range(p)]
    mine = sample(rank, (counts[rank],), "float64")
    root = p - 1

    theirs = np.zeros(sum(counts)) if rank == root else None
    world.Gatherv(mine, [theirs, counts] if rank == root else None, root=root)
    ours = comm.gather(mine, counts=counts, root=root)
    np.testing.assert_array_equal(ours, theirs) if rank == root else None

    part = np.zeros(counts[rank])
    world.Scatterv([ours, counts] if rank == root else None, part, root=root)
    np.testing.assert_array_equal(comm.scatter(ours, np.empty_like(part), root=root, counts=counts), part)

    x = sample(rank, (sum(counts),), "int64")
    part = np.zeros(counts[rank], np.int64)
    world.Reduce_scatter(x, part, recvcounts=counts)
    np.testing.assert_array_equal(comm.reduce_scatter(x, counts=counts), part)


@pytest.mark.parametrize("count", [1, 2000, 100_000])
@pytest.mark.parametrize(("op", "mpi_op"), [("sum", MPI.SUM), ("max", MPI.MAX), ("bxor", MPI.BXOR)])
def test_prefixes_are_those_of_mpi(comm, count, op, mpi_op):
    world = MPI.COMM_WORLD
    x = sample(comm.rank, (count,), "int64")
    for theirs, ours in ((world.Scan, comm.scan), (world.Exscan, comm.exscan)):
        expected, out = np.full(count, -7), np.full(count, -7)  # MPI, too, leaves it on rank 0
        theirs(x, expected, mpi_op)
        np.testing.assert_array_equal(ours(x, out, op=op), expected)


def test_messages_of_another_size_are_found_in_calls_that_are_known(comm):
    if comm.size == 1:
        return  # a rank knows what it sends to itself
    right, left = (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size
    with comm.dup() as dup:
        for longer in (1, 1, 2, 100_000, 1):
            x, out = np.full(3 * longer if comm.rank == 0 else 3, comm.rank), np.full(3, -1)
            if longer > 1 and comm.rank == 1:
                with pytest.raises(
                    CommMismatch, match=rf"int64\[3\] from rank 0, which sent int64\[{3 * longer}\]"
                ):
                    dup.sendrecv(x, out, dest=right, source=left)
                assert out.tolist() == [-1] * 3
            else:
                assert dup.sendrecv(x, out, dest=right, source=left).tolist() == [left] * 3


def test_sums_of_complex_numbers_are_those_of_mpi(comm):
    x, total = sample(comm.rank, (1000,), "complex128"), np.zeros(1000, complex)
    MPI.COMM_WORLD.Allreduce(x, total)
    np.testing.assert_allclose(comm.allreduce(x), total, rtol=1e-12)


def test_objects_travel_as_those_of_mpi(comm):
    world, p, rank = MPI.COMM_WORLD, comm.size, comm.rank
    objs = [{"for": r} for r in range(p)] if rank == 0 else None
    assert comm.scatter_object(objs, root=0) == world.scatter(objs, root=0)
    assert comm.gather_object(rank, root=0) == world.gather(rank, root=0)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_prefixes_and_uneven_sums_have_the_bytes_that_threads_give(comm, dtype):
    counts = [70_000 * (r % 2 + 1) for r in range(comm.size)]

    def body(world):
        x = sample(world.rank, (sum(counts),), dtype)
        return [world.scan(x, op="avg").tobytes(), world.reduce_scatter(x, counts=counts).tobytes()]

    assert run_ranks(comm.size, body)[comm.rank] == body(comm)


@pytest.mark.parametrize("count", [10, 10_000])
def test_other_operations_and_counts_are_found_without_being_asked_to(comm, count):
    if comm.size == 1:
        return  # nobody to differ from
    x = np.zeros((comm.size, count))
    single = x.astype(np.float32)
    for call in (
        lambda world: world.scan(x, op="sum" if comm.rank == 0 else "max"),
        lambda world: world.scan(x) if comm.rank == 0 else world.exscan(x),
        lambda world: world.dup() if comm.rank == 0 else world.barrier(),
        lambda world: world.split(0) if comm.rank == 0 else world.allgather(np.zeros(3, np.int64)),
        lambda world: quantized_allreduce(world, single[:0] if comm.rank == 0 else single),
        lambda world: world.reduce_scatter(
            x.reshape(-1), counts=[x.size, 0, *[0] * (comm.size - 2)][:: 1 if comm.rank == 0 else -1]
        ),
    ):
        with (
            bagua_comm.connect(comm=MPI.COMM_WORLD, timeout_s=30) as world,
            pytest.raises(CommMismatch, match="different calls"),
        ):
            call(world)
