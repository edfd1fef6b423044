"""Errors of ranks when others are late, leave, abort or make another call. Run by tests/test_mpirun.py."""

import itertools
import math
import random
import signal
import sys
import threading
import time
from contextlib import contextmanager, suppress

import numpy as np
import pytest
from mpi4py import MPI

import bagua_comm
from bagua_comm import ArrayError, CommAborted, CommError, CommMismatch, CommTimeout, Hierarchical, TopK
from bagua_comm.testing import reduced
from bagua_comm.transports import notices
from bagua_comm.transports.mpi import endpoint, messages, tuning
from bagua_comm.transports.mpi import transport as mpi_transport
from bagua_comm.transports.mpi import world as mpi_world
from bagua_comm.transports.mpi.shared_window import UnreadableError
from bagua_comm.transports.mpi.small_messages import SmallCall
from bagua_comm.transports.mpi.world import World
from bagua_comm.transports.notices import LEFT, Notice

pytestmark = pytest.mark.mpi


@contextmanager
def world_of(comm, timeout_s=0.6):
    """A world that is given up in the test: the others go on."""
    world = bagua_comm.connect(comm=MPI.COMM_WORLD, timeout_s=timeout_s, gpu="none")
    start = time.monotonic()
    yield world, comm.size - 1
    assert time.monotonic() - start < 40
    comm.barrier()
    world.close()


def raises_late(world, last, error, match, call):
    """`call` raises on all ranks but the last, which never calls."""
    if world.rank == last:
        time.sleep(world.timeout_s + 0.8)  # sleeps: past the time limit of the others
        return
    with pytest.raises(error, match=match):
        call()


MISSING = r"missing: rank {} \(on \S+, process \d+\), whose last collective call was allgather, .* this"


@pytest.mark.parametrize(
    "call",
    [
        lambda comm: comm.allreduce(np.ones(3)),
        lambda comm: comm.broadcast(np.ones(1000), root=comm.size - 1),
        lambda comm: comm.allreduce(np.ones(300_000)),
        lambda comm: comm.barrier(),
        lambda comm: comm.dup(),
        lambda comm: comm.split(comm.rank % 2),
        lambda comm: comm.lane(),
    ],
)
def test_a_timeout_names_the_missing_rank_and_its_last_call(comm, call):
    with world_of(comm) as (world, last):
        world.allgather(np.ones(1))
        raises_late(world, last, CommTimeout, MISSING.format(last), lambda: call(world))


def test_a_timeout_without_shared_memory_names_the_rank_that_does_not_answer(comm, monkeypatch):
    monkeypatch.setattr(mpi_transport, "open_window", lambda *_: None)
    with world_of(comm) as (world, last):
        others = [rank for rank in range(last) if rank != world.rank]
        present = rf"; not missing: ranks? .*{others[0]}" if others else ""
        expected = rf"missing: rank {last} \(on \S+, process \d+\){present}"
        raises_late(world, last, CommTimeout, expected, lambda: world.allreduce(np.ones(3)))


OF_ONE_SIZE = {
    "allreduce": lambda comm, x: comm.allreduce(x),
    "broadcast": lambda comm, x: comm.broadcast(x, root=0),
    "allgather": lambda comm, x: comm.allgather(x),
    "reduce_scatter": lambda comm, x: comm.reduce_scatter(x),
    "alltoall": lambda comm, x: comm.alltoall(x),
}


@pytest.mark.covering(2)
@pytest.mark.parametrize("sizes", [(1, 5000), (5000, 1), (4, 5000), (1, 40), (40, 1), (40, 400_000)])
@pytest.mark.parametrize("name", OF_ONE_SIZE)
@pytest.mark.parametrize("with_memory", [True, False])
def test_a_small_and_a_large_call_are_named_on_all_ranks(comm, monkeypatch, sizes, name, with_memory):
    """Small arrays are sent in one round with the number of the call, which a large one compares before."""
    if not with_memory:
        monkeypatch.setattr(mpi_transport, "open_window", lambda *_: None)
    usual, other = (count * comm.size for count in sizes)
    with world_of(comm) as (world, last):
        expected = rf"rank 0 called {name}.* of {usual} x .* rank {last} called {name}.* of {other} x "
        with pytest.raises(CommMismatch, match=expected):
            OF_ONE_SIZE[name](world, np.ones(other if world.rank == last else usual))


def test_a_timeout_of_a_message_names_its_sender(comm):
    with world_of(comm) as (world, last):
        expected = rf"recv\(.*source={last}\).* missing: rank {last} \(on"
        raises_late(world, last, CommTimeout, expected, lambda: world.recv(np.ones(3), source=last))


@pytest.mark.parametrize("call", [bagua_comm.Communicator.dup, lambda comm: comm.split(0)])
def test_a_rank_that_stops_inside_of_dup_or_split_does_not_hang_the_others(comm, monkeypatch, call):
    with world_of(comm) as (world, last):
        if world.rank == last:  # it calls in the end: MPI itself cannot end while a call waits
            mine = world.transports[0]._endpoint
            make = mine.make

            def late(new):
                time.sleep(1.5)  # sleeps: past the time limit of the others
                return make(new)

            monkeypatch.setattr(mine, "make", late)
            with suppress(CommError):
                call(world)
        else:
            with pytest.raises(CommTimeout):
                call(world)


def test_a_call_of_many_waits_has_one_deadline(comm, monkeypatch):
    monkeypatch.setattr(tuning, "PIECE_BYTES", 1 << 12)
    monkeypatch.setattr(tuning, "FAST_PIECE_BYTES", 1 << 12)
    monkeypatch.setattr(tuning, "MESSAGE_BYTES", 1 << 12)
    monkeypatch.setattr(tuning, "NATIVE_BYTES", 0)
    monkeypatch.setattr(tuning, "SHOWN_BYTES", 0)
    monkeypatch.setattr(mpi_transport, "open_memory", lambda *_: None)
    with world_of(comm) as (world, last):
        if world.rank == last:  # it answers again and again, each time just in time
            start = messages.Messages.start

            def slow(*args):
                time.sleep(0.3)  # sleeps: each answer is just in time
                return start(*args)

            monkeypatch.setattr(messages.Messages, "start", slow)
            with suppress(CommTimeout):  # it waits for no rank
                world.allgather(np.ones(4000))
            return
        with pytest.raises(CommTimeout):
            world.allgather(np.ones(4000))


@pytest.mark.parametrize(("nbytes", "timeout_s"), [(8, 60), (8, math.inf), (1 << 12, 60), (1 << 21, math.inf)])
def test_a_wait_for_a_rank_that_has_left_ends_soon(comm, nbytes, timeout_s):
    with world_of(comm, timeout_s=timeout_s) as (world, last):
        if world.rank == last:
            assert not world.transports[0].leave()
        else:
            expected = rf"waits for rank {last} \(on .*\), which has left: its program ended"
            with pytest.raises(CommMismatch, match=expected):
                world.allreduce(np.ones(nbytes // 8))


def test_a_request_to_a_rank_that_has_left_ends_soon(comm):
    with world_of(comm, timeout_s=60) as (world, last):
        if world.rank == last:
            assert not world.transports[0].leave()
        else:
            request = world.irecv(np.zeros(3), source=last, tag="x")
            expected = rf"irecv\(.*source={last}, tag=x\) #1: .* waits for rank {last} \(on .*\), which has left"
            with pytest.raises(CommMismatch, match=expected):
                request.result(timeout=40)


def test_a_request_that_nobody_answers_names_its_own_time_limit(comm):
    with world_of(comm, timeout_s=60) as (world, last):
        if world.rank == last:
            request = world.irecv(np.zeros(3), source=0, tag="x", timeout_s=0.25)
            with pytest.raises(CommTimeout, match=rf"rank {last} of {comm.size} waited 0\.25 s for its peers"):
                request.result(timeout=40)
        else:
            expected = rf"rank {last} .* waited 0\.25 s for its peers in irecv, rank {world.rank} with it"
            with pytest.raises(CommTimeout, match=expected):
                world.recv(np.zeros(1), source=last)
            with pytest.raises(CommAborted, match=rf"failed earlier: recv\(.*rank {last} .* in irecv"):
                world.barrier()


def test_a_timeout_of_a_long_send_names_its_receiver_and_its_tag(comm):
    with world_of(comm) as (world, last):
        expected = (
            rf"send\(.* missing: rank {last} .*; it waited until rank {last} receives 800000 bytes with tag 'x'"
        )
        x = np.zeros(100_000)
        raises_late(world, last, CommTimeout, expected, lambda: world.send(x, dest=last, tag="x"))


def test_a_wait_for_a_rank_that_raised_gets_its_error(comm):
    with world_of(comm, timeout_s=60) as (world, last):
        if world.rank == last:
            with pytest.raises(ZeroDivisionError), world:
                raise ZeroDivisionError("in the middle of a step")
        else:
            expected = rf"rank {last} \(on .*\) left: ZeroDivisionError: in the middle of a step"
            with pytest.raises(CommAborted, match=expected):
                world.allreduce(np.ones(3))


def test_a_rank_that_left_does_not_fail_ranks_that_do_not_need_it_any_more(comm):
    with world_of(comm, timeout_s=60) as (world, last):
        x = world.allreduce(np.ones(300_000))
        if world.rank == last:
            world.transports[0].leave()
        elif world.rank == 0:
            time.sleep(1.6)  # sleeps: by then the others know
            if last > 1:
                world.send(x, dest=1)
        elif world.rank == 1 and last > 1:
            world.recv(x, source=0)
        world.transports[0].leave()
        assert (x == comm.size).all()


def test_where_mpi_has_no_more_communicators_the_error_says_what_to_do(comm, monkeypatch):
    def none_left(self):
        raise MPI.Exception(MPI.ERR_INTERN)

    monkeypatch.setattr(tuning, "MAX_COMMUNICATORS", 8)
    with world_of(comm) as (world, _):
        groups = [world.dup() for _ in range(4)]
        monkeypatch.setattr(endpoint.Endpoint, "duplicate", none_left)
        with pytest.raises(CommError, match=r"one more communicator beside 5, .* close those"):
            world.dup()
        for group in groups:
            group.close()


def test_worlds_that_are_closed_in_order_leave_no_communicator_behind(comm):
    contexts = set()
    for _ in range(10):
        with bagua_comm.connect(comm=MPI.COMM_WORLD, timeout_s=30, gpu="none") as world:
            contexts.add(world.transports[0]._world.comm.py2f())
    assert len(contexts) < 5


def test_many_sizes_of_small_calls_keep_little_memory(comm):
    for count in range(1, 200):
        comm.broadcast(np.zeros(count, np.uint8), root=0)
    for count in range(1, 100):
        comm.allgather(np.zeros(count, np.uint8))
    assert len(comm.transports[0]._routes._moves) <= 64


def test_messages_to_oneself_match_in_order(comm):
    if MPI.get_vendor()[0] == "MPICH":
        pytest.skip("MPICH keeps no message to oneself: a send waits for its receive, as MPI allows")
    with comm.split(comm.rank) as alone:
        first, second, out = np.array([1, 2]), np.array([3, 4]), np.zeros((2, 1), int)
        for _ in range(2):
            alone.send(first, dest=0)
            assert alone.sendrecv(second, out, dest=0, source=0).ravel().tolist() == [1, 2]
            assert alone.recv(out, source=0).ravel().tolist() == [3, 4]
            assert alone.sendrecv(first, out, dest=0, source=0).ravel().tolist() == [1, 2]
            as_bytes = np.zeros(16, np.uint8)
            alone.sendrecv(second.view(np.uint8), as_bytes, dest=0, source=0)
            assert as_bytes.view(int).tolist() == [3, 4]


def test_groups_outlive_a_world_that_was_left_in_order(comm):
    with world_of(comm, timeout_s=20) as (world, last):
        group = world.dup()
        if comm.rank == last:
            time.sleep(1.5)  # sleeps: the others have left by then
        world.close()
        if comm.rank == 0:
            time.sleep(1)  # sleeps: the last one has left by then
        assert group.allreduce(np.ones(1))[0] == comm.size
        group.close()


def test_an_error_in_a_group_does_not_keep_ranks_from_leaving_the_world(comm):
    with world_of(comm, timeout_s=0.5) as (world, last):
        group = world.dup()
        if comm.rank == last:
            with pytest.raises(CommTimeout):
                group.recv(np.ones(1), source=0)
        comm.barrier()
        assert world.transports[0].leave()


CALLS = {
    "dtype": (
        lambda comm, x: comm.allreduce(x.view(np.int32 if comm.rank else np.float32)),
        r"rank 0 called allreduce sum of \d+ x float32 .*, but rank 1 called allreduce sum of \d+ x int32",
    ),
    "op": (lambda comm, x: comm.allreduce(x, op="max" if comm.rank else "min"), "allreduce min .* allreduce max"),
    "root": (lambda comm, x: comm.reduce(x, root=min(comm.rank, 1)), "reduce sum to 0 .* reduce sum to 1"),
    "call": (
        lambda comm, x: comm.alltoall(x) if comm.rank else comm.allgather(x),
        "called allgather .* alltoall",
    ),
    "size": (
        lambda comm, x: comm.allreduce(x[min(comm.rank, 1) :]),
        r"\(\d+ bytes\), but rank 1 .*\(\d+ bytes\)",
    ),
    "root of a broadcast": (
        lambda comm, x: comm.broadcast(x, root=min(comm.rank, 1)),
        "called broadcast from 0 .* called broadcast from 1",
    ),
    "chunks": (
        lambda comm, x: comm.reduce_scatter(x.view(np.int32 if comm.rank else np.float32)),
        "reduce_scatter sum of .* x float32 .* x int32",
    ),
    "size of a record": (
        lambda comm, x: TopK(1000, 2).bind(comm)(x.view(np.float32)[comm.rank and 1 :]),
        r"TopK.*\(\d+ bytes\), but rank 1 .*\(\d+ bytes\)",
    ),
    "dtype below a padded array": (
        lambda comm, x: Hierarchical().bind(comm)(x.view(np.float64 if comm.rank else np.float32)),
        r"float32[^|]* rank 1 [^|]*float64",
    ),
}


@pytest.mark.parametrize("count", [24, 120, 12_000, 1_200_000])
@pytest.mark.parametrize("different", CALLS)
def test_calls_that_differ_raise_on_all_ranks_and_leave_the_communicator_usable(comm, different, count):
    call, expected = CALLS[different]
    with pytest.raises(CommMismatch, match=expected):
        call(comm, np.zeros(count * comm.size // 2 * 2, np.int32))
    assert comm.allreduce(np.ones(1))[0] == comm.size


@pytest.mark.parametrize("count", [1, 1000, 20_000])
def test_a_broadcast_of_another_dtype_raises(comm, count):
    with bagua_comm.connect(comm=MPI.COMM_WORLD, timeout_s=30) as world:
        x = np.zeros(count, np.float32 if comm.rank == 0 else np.int32)
        with pytest.raises(CommMismatch, match=r"called broadcast from 0 of \d+ x float32.* x int32"):
            world.broadcast(x, root=0)


@pytest.mark.parametrize("dtype", ["int8", "uint8", "int16", "uint16", "int32", "uint32", "int64", "uint64"])
@pytest.mark.parametrize("op", ["sum", "prod", "min", "max", "band", "bor", "bxor"])
def test_integers_wrap_around_as_numpy_has_it(comm, dtype, op):
    """Open MPI saturates whole vectures of short integers, and not the rest of the array."""
    limits = np.iinfo(dtype)
    for count in (1, 33, 100, 3000, 60_001):
        xs = [
            np.random.default_rng([count, rank]).integers(limits.min, limits.max, comm.size * count, dtype, True)
            for rank in range(comm.size)
        ]
        expected = reduced(xs, op)
        np.testing.assert_array_equal(comm.allreduce(xs[comm.rank], op=op), expected)
        np.testing.assert_array_equal(
            comm.reduce_scatter(xs[comm.rank], op=op), expected[comm.rank * count :][:count]
        )
        at_root = comm.reduce(xs[comm.rank], root=comm.size - 1, op=op)
        if at_root is not None:
            np.testing.assert_array_equal(at_root, expected)


def test_a_notice_about_a_group_reaches_ranks_that_are_in_calls(comm):
    host, heard = comm.transports[0], []

    def listen():
        give_up = time.monotonic() + 20
        while not heard and time.monotonic() < give_up:
            heard.extend(filter(None, [host.poll_failures({"another", "a group"})]))
            time.sleep(0.001)  # sleeps: between looks at the notices

    listener = threading.Thread(target=listen)
    if comm.rank == 0:
        host.notify_failure("a group", CommError("the device has met an error"))
    else:
        listener.start()
    for _ in range(100):
        comm.allreduce(np.ones(10_000))
    if comm.rank:
        listener.join()
        (error,) = heard
        assert type(error) is CommAborted
        assert str(error).startswith(f"rank {comm.rank} of {comm.size}: rank 0 (on ")
        assert str(error).endswith(" aborted after CommError: the device has met an error")
    assert host.poll_failures({"another"}) is None
    comm.barrier()


def test_a_barrier_is_distinguished_from_other_calls(comm):
    for _ in range(2):
        with pytest.raises(CommMismatch, match=r"barrier of 0 .*allreduce sum|allreduce sum .*barrier of 0"):
            comm.allreduce(np.ones(3)) if comm.rank else comm.barrier()
        comm.barrier()


def test_memory_that_cannot_be_read_in_the_middle_of_a_call_is_an_error_on_all_ranks(comm, monkeypatch):
    def refuse(memory, rank, *place):
        raise UnreadableError(rank, 14, f"Bad address: cannot read 8 bytes of rank {rank}")

    with world_of(comm, timeout_s=20) as (world, last):
        if last == 0 or world.transports[0]._routes.direct is None:
            return
        if world.rank == last:
            monkeypatch.setattr(type(world.transports[0]._routes.direct.memory), "read", refuse)
        # A rank that has seen the abort may itself abort first, as another one sees it.
        match = "cannot read 8 bytes" if world.rank == last else r"rank \d+ .*aborted"
        with pytest.raises(CommError, match=match):
            world.allgather(np.ones(300_000))


@pytest.mark.parametrize("readable", [True, False])
def test_large_arrays_that_some_rank_cannot_show_go_another_way(comm, monkeypatch, readable):
    with comm.dup() as other:
        transport, p = other.transports[0], comm.size
        if p > 1 and not readable:
            assert transport._routes.direct is not None
            if comm.rank == p - 1:
                monkeypatch.setattr(transport._routes.direct.memory, "address", lambda x: 0)
            monkeypatch.setattr(transport._routes.direct.memory, "read", None)  # nobody reads
        x = np.arange(p * 60_000) % 1000 + comm.rank
        chunk, total = slice(comm.rank * 60_000, (comm.rank + 1) * 60_000), x * p + sum(range(p)) - p * comm.rank
        before = transport.sent_bytes
        np.testing.assert_array_equal(other.allreduce(x), total)
        assert transport.sent_bytes - before == 2 * x.nbytes * (p - 1) // p
        np.testing.assert_array_equal(other.reduce_scatter(x), total[chunk])
        if (result := other.reduce(x, root=0)) is not None:
            np.testing.assert_array_equal(result, total)
        np.testing.assert_array_equal(other.allgather(x[chunk]), comm.allgather(x[chunk]))
        np.testing.assert_array_equal(other.broadcast(x.copy(), root=0), x - comm.rank)
        expected = np.concatenate([(np.arange(p * 60_000) % 1000 + r)[chunk] for r in range(p)])
        np.testing.assert_array_equal(other.alltoall(x.copy()), expected)


def late(comm, monkeypatch, owner, name):
    """On all ranks but 0: `owner.name` waits, the first time, until rank 0 has given up and changed its array."""
    call, has_waited = getattr(owner, name), []

    def wait(*arguments):
        if not has_waited:
            has_waited.append(comm.recv(np.zeros(1), source=0))
        return call(*arguments)

    if comm.rank > 0:
        monkeypatch.setattr(owner, name, wait)


READ_LATE = {
    "broadcast": lambda comm, x, limit: comm.broadcast(x, root=0, **limit),
    "allreduce": lambda comm, x, limit: comm.allreduce(x, **limit),
    "reduce": lambda comm, x, limit: comm.reduce(x, root=comm.size - 1, **limit),
    "alltoall": lambda comm, x, limit: comm.alltoall(x, **limit),
    "broadcast by MPI": lambda comm, x, limit: comm.broadcast(x, root=0, **limit),
    "send": lambda comm, x, limit: comm.send(x, dest=1, **limit) if comm.rank == 0 else comm.recv(x, source=0),
}


@pytest.mark.parametrize("name", READ_LATE)
def test_an_array_that_its_rank_has_changed_after_a_timeout_is_not_taken_for_a_result(comm, monkeypatch, name):
    with world_of(comm, timeout_s=20) as (world, last):
        transport = world.transports[0]
        if last == 0 or transport._routes.direct is None or (name == "send" and comm.rank > 1):
            return
        if name == "broadcast by MPI":
            transport._routes.use_memory(None)
        place = {
            "broadcast by MPI": (transport._endpoint, "complete"),
            "send": (transport._messages, "_after_next"),
        }
        late(
            comm,
            monkeypatch,
            *place.get(name, (transport._routes.direct and transport._routes.direct.memory, "read")),
        )
        x, call = np.ones(comm.size * 60_000), READ_LATE[name]
        if comm.rank == 0:
            with pytest.raises(CommTimeout):
                call(world, x, {"timeout_s": 0.1})
            x[:] = 77
            for peer in range(1, 2 if name == "send" else comm.size):
                comm.send(np.zeros(1), dest=peer)
        else:
            # The one that another rank has seen first is named.
            with pytest.raises(CommTimeout, match=r"rank \d of \d waited .* rank \d with it"):
                call(world, x, {})


def test_keys_of_64_bits_order_ranks_and_a_wrong_one_is_an_error_on_all(comm):
    with comm.split(0, -(2**40) * comm.rank) as backwards:
        assert backwards.allgather_object(comm.rank) == list(range(comm.size))[::-1]
    with pytest.raises(ArrayError, match=f"split: key is .*, on rank {comm.size - 1}"):
        comm.split(0, 2**64 if comm.rank == comm.size - 1 else 2**31)
    comm.barrier()


class Interrupt(BaseException):
    """The exception of a signal handler."""


# A handler that raises within a finalizer raises for nobody.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize("rounds", [2, pytest.param(40, marks=pytest.mark.slow)])
def test_random_interrupts_leave_a_communicator_usable_or_aborted_on_all_ranks(comm, rounds):
    def interrupt(number, frame):
        raise Interrupt

    x, large, source, p = np.ones(4), np.ones(100_000), random.Random(comm.rank), comm.size
    calls = [
        lambda each: each.allreduce(x),
        lambda each: each.allgather_object("text"),
        lambda each: each.allreduce(large),
        lambda each: each.broadcast(large, root=0),
        lambda each: each.sendrecv(x, np.ones(4), dest=(comm.rank + 1) % p, source=(comm.rank - 1) % p),
    ]
    before = signal.signal(signal.SIGALRM, interrupt)
    try:
        with world_of(comm, timeout_s=0.5) as (world, _):
            for _ in range(rounds):
                each = world.dup()
                with suppress(CommError, Interrupt):
                    try:
                        signal.setitimer(signal.ITIMER_REAL, source.uniform(1e-5, 2e-3))
                        for i in range(10_000):
                            calls[i % len(calls)](each)
                    finally:
                        signal.setitimer(signal.ITIMER_REAL, 0)
                told = []
                for _ in range(2):
                    try:
                        each.barrier()
                    except CommError as exc:
                        told.append(str(exc))
                assert not any("another thread" in text for text in told), told
                assert each.guard.is_free
                comm.barrier()
    finally:
        signal.signal(signal.SIGALRM, before)


def test_a_notice_is_received_wherever_a_signal_handler_raises():
    world = World(MPI.COMM_SELF.Dup(), [], frozenset())
    files = {module.__file__ for module in (mpi_world, notices)}

    class Interrupt(BaseException):
        pass

    def raise_at(left):
        """A trace function that raises before one of the instructions of the modules."""

        def look(frame, event, _):
            nonlocal left
            if frame.f_code.co_filename not in files:
                return None
            frame.f_trace_opcodes = True
            left -= event == "opcode"
            if left < 0:
                sys.settrace(None)
                raise Interrupt
            return look

        return look

    def was_heard(notice):
        return notice in [each for each, _ in world.notices.from_rank(0)]

    for left in itertools.count():
        notice = Notice(LEFT, "", str(left), {})
        world.notices.send([0], notice)
        try:
            sys.settrace(raise_at(left))
            world.notices.listen()
        except Interrupt:
            pass
        else:
            sys.settrace(None)
            break
        finally:
            sys.settrace(None)
        until = time.monotonic() + 20
        while not was_heard(notice) and time.monotonic() < until:
            world.notices.listen()
        assert was_heard(notice), left
    assert left > 50


def interrupted_after(monkeypatch, owner, name, call):
    """Make `call`, and interrupt it at the end of method `name` of `owner`."""
    method = getattr(owner, name)

    def interrupted(*arguments, **settings):
        method(*arguments, **settings)
        raise Interrupt

    with monkeypatch.context() as patched:
        patched.setattr(owner, name, interrupted)
        with pytest.raises(Interrupt):
            call()


slow = pytest.mark.slow


@pytest.mark.parametrize(
    ("make", "place"),
    [
        pytest.param(lambda world: world.dup(), "duplicate", id="dup"),
        pytest.param(lambda world: world.dup(), "allgather", id="dup, in the new group", marks=slow),
        pytest.param(lambda world: world.split(0), "_derived", id="split", marks=slow),
        pytest.param(lambda world: world.lane(), "run", id="lane", marks=slow),
    ],
)
def test_a_rank_interrupted_while_it_makes_a_group_ends_that_on_all_ranks(comm, monkeypatch, make, place):
    monkeypatch.setattr(tuning, "GRACE_S", 0.05)
    with world_of(comm, timeout_s=30) as (world, last):
        if comm.rank == last:
            transport = world.transports[0]
            owners = {"allgather": mpi_transport.MPITransport, "duplicate": transport._endpoint, "run": SmallCall}
            owner = owners.get(place, transport)
            interrupted_after(monkeypatch, owner, place, lambda: make(world))
        else:
            start = time.monotonic()
            with pytest.raises(CommAborted, match="aborted after Interrupt"):
                make(world).barrier()
            assert time.monotonic() - start < 10


def test_a_call_interrupted_before_it_moves_anything_can_be_made_again_and_interrupted(comm, monkeypatch):
    monkeypatch.setattr(tuning, "GRACE_S", 0.05)
    with world_of(comm, timeout_s=30) as (world, last):
        world.barrier()
        if comm.rank == last:
            interrupted_after(monkeypatch, world.guard, "begin", lambda: world.allgather(np.ones(3)))
        world.allgather(np.ones(3))
        if comm.rank == last:
            interrupted_after(monkeypatch, world.guard, "begin", world.barrier)
            world.transports[0].interrupted(Interrupt("in the middle"), ())
        else:
            start = time.monotonic()
            with pytest.raises(CommAborted, match="aborted after Interrupt"):
                world.barrier()
            assert time.monotonic() - start < 10
