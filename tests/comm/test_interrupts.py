"""Exceptions that signal handlers raise, such as KeyboardInterrupt, at any moment of any call."""

import functools
import operator
import os
import random
import signal
import threading
import time
import types
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from support.interrupts import Interrupt, interrupted_everywhere

from bagua_comm import (
    CommAborted,
    CommTimeout,
    Communicator,
    MinMaxUInt8,
    quantized_allreduce,
    reproducible_allreduce,
)
from bagua_comm.bootstrap.rendezvous import Deadline
from bagua_comm.bucket import Plan, TensorSpec, make_buckets
from bagua_comm.engine.exchanges import Exchanges
from bagua_comm.execution import cuda
from bagua_comm.flight import FlightRecorder
from bagua_comm.system.files import write_at_once
from bagua_comm.testing import run_ranks
from bagua_comm.trace import NULL
from bagua_comm.transports import LocalTransport
from bagua_comm.transports.notices import LEFT, Notice, Notices

# Of generators and files that are let go at an exception.
pytestmark = pytest.mark.filterwarnings(
    "ignore::pytest.PytestUnraisableExceptionWarning", "ignore::ResourceWarning"
)

X = np.ones(3, np.float32)

CALLS = {
    "allreduce": lambda comm: comm.allreduce(X),
    "allreduce with a limit": lambda comm: comm.allreduce(X, timeout_s=5),
    "reduce": lambda comm: comm.reduce(X, root=0),
    "broadcast": lambda comm: comm.broadcast(X.copy(), root=0),
    "allgather": lambda comm: comm.allgather(X),
    "reduce_scatter": lambda comm: comm.reduce_scatter(X[: comm.size]),
    "reduce_scatter by counts": lambda comm: comm.reduce_scatter(X, counts=[3] + [0] * (comm.size - 1)),
    "alltoall": lambda comm: comm.alltoall(X[: comm.size]),
    "scan": lambda comm: comm.scan(X),
    "gather": lambda comm: comm.gather(X, root=0),
    "scatter": lambda comm: comm.scatter(np.ones((comm.size, 3)), np.ones(3), root=0),
    "many": lambda comm: comm.allreduce_many([X, X]),
    "broadcast many": lambda comm: comm.broadcast_many([X.copy(), X.copy()], root=0),
    "barrier": lambda comm: comm.barrier(),
    "object": lambda comm: comm.allgather_object("text"),
    "scattered object": lambda comm: comm.scatter_object(["text"] * comm.size, root=0),
    "sendrecv": lambda comm: comm.sendrecv(X, X.copy(), dest=comm.rank, source=comm.rank),
    "dup": lambda comm: comm.dup().close(),
    "split": lambda comm: comm.split(0, 5).close(),
    "quantized": lambda comm: quantized_allreduce(comm, X.copy(), codec=MinMaxUInt8()),
    "reproducible": lambda comm: reproducible_allreduce(comm, X),
    "hooks": lambda comm: with_a_hook(comm),
    "consistency": lambda comm: comm.check_consistency(X),
}


NEVER_KNOWN = {"dup", "split"}
"""Calls of which nothing is prepared for the next one."""


def with_a_hook(comm):
    hook = comm.on(before=lambda call: comm.barrier(), after=lambda call: None, failed=lambda call: None)
    try:
        comm.allreduce(X)
    finally:
        hook.remove()


def on_another_thread(call):
    with ThreadPoolExecutor(1) as other:
        return other.submit(call).result()


@pytest.mark.parametrize(
    ("name", "known"),
    [(name, known) for name in CALLS for known in (False, True) if not (known and name in NEVER_KNOWN)],
)
def test_a_call_that_is_interrupted_anywhere_does_not_keep_the_guard(name, known):
    comm, call = Communicator([LocalTransport()]), CALLS[name]
    tried = 0

    def again():
        if not known:
            comm.call_cache.clear()
        call(comm)

    def check():
        nonlocal tried
        tried += 1
        comm.hooks.all = ()
        assert comm.guard.is_free
        if tried % 8 == 0:  # the other thread takes longer than all the rest
            assert on_another_thread(lambda: comm.allreduce(X)).tolist() == [1, 1, 1]
        assert comm.allreduce(X).tolist() == [1, 1, 1]
        assert comm.guard.limit_s is None

    call(comm)
    assert interrupted_everywhere(again, check) > 3


@pytest.fixture
def random_interrupts():
    """`with random_interrupts(): ...` raises `Interrupt` at a random moment of the body, or soon after it."""
    source = random.Random(7)

    def handler(number, frame):
        raise Interrupt

    class Soon:
        def __enter__(self):
            signal.setitimer(signal.ITIMER_REAL, source.uniform(1e-6, 60e-6))

        def __exit__(self, *error):
            signal.setitimer(signal.ITIMER_REAL, 0)

    before = signal.signal(signal.SIGALRM, handler)
    yield Soon
    signal.setitimer(signal.ITIMER_REAL, 0)
    signal.signal(signal.SIGALRM, before)


@pytest.mark.parametrize("rounds", [400, pytest.param(30_000, marks=pytest.mark.slow)])
def test_random_interrupts_leave_a_world_of_one_usable(random_interrupts, rounds):
    comm, calls, interrupted = Communicator([LocalTransport()]), list(CALLS.values()), 0
    for i in range(rounds):
        try:
            try:
                with random_interrupts():
                    for k in range(3):
                        calls[(i + k) % len(calls)](comm)
            finally:
                signal.setitimer(signal.ITIMER_REAL, 0)
        except Interrupt:
            interrupted += 1
            comm.hooks.all = ()
        assert comm.allreduce(X).tolist() == [1, 1, 1], i
        assert comm.guard.is_free
    assert interrupted > rounds / 10


def test_a_rank_that_is_interrupted_in_a_call_ends_it_on_all_ranks_with_the_reason():
    def body(comm):
        if comm.rank == 0:

            def interrupt(*_, **__):
                raise Interrupt

            comm.transports[0].exchange = interrupt
            with pytest.raises(Interrupt):
                comm.allreduce(X)
            del comm.transports[0].exchange
        else:
            with pytest.raises(CommAborted, match="a call of rank 0 was interrupted by Interrupt"):
                comm.allreduce(X)
        with pytest.raises(CommAborted, match="a call of rank 0 was interrupted by Interrupt"):
            comm.barrier()

    run_ranks(2, body)


def test_a_call_that_was_not_ended_is_ended_by_the_next():
    """As after an exception at the very beginning of the end of a call."""
    comm = Communicator([LocalTransport()])
    end, comm.guard.end = comm.guard.end, lambda **_: None
    with pytest.raises(CommTimeout):
        comm.recv(X.copy(), source=0, timeout_s=0.01)
    comm.guard.end = end
    assert comm.guard.limit_s == 0.01
    fresh = Communicator([LocalTransport()])
    comm.transports[0].broken = None
    comm.barrier()
    assert comm.guard.limit_s is None
    assert comm.transports[0].limit_s == fresh.transports[0].limit_s


def test_calls_within_the_one_after_a_call_that_was_not_ended_are_allowed():
    comm = Communicator([LocalTransport()])
    comm.guard.begin("barrier", True, lambda: "barrier")  # as if both its end and its failure were interrupted
    assert comm.guard.run("sum", lambda: "sum", lambda: comm.allreduce(X)).tolist() == [1, 1, 1]
    assert comm.guard.is_free


# Notices and records beside calls


def test_notices_that_were_interrupted_while_they_listened_listen_again():
    notice, post = Notice(LEFT, "", "", {}), []
    arriving = []

    def take(hear):
        if not arriving:
            return False
        hear(*arriving[-1])
        arriving.pop()
        return True

    notices = Notices(lambda rank, message: post.append(message), take)
    notices.send([1], notice)

    def check():
        notices.listen()

    def listen():
        arriving.append((1, post[0]))
        notices.listen()

    assert interrupted_everywhere(listen, check) > 3
    arriving.append((2, post[0]))
    notices.listen()
    assert [each for each, _ in notices.from_rank(2)] == [notice]


@pytest.mark.slow
def test_a_flight_recorder_that_was_interrupted_while_it_wrote_writes_again(tmp_path):
    recorders = [FlightRecorder(folder=tmp_path)]  # each writes a few times only

    def check():
        assert recorders[-1].write() == tmp_path
        recorders.append(FlightRecorder(folder=tmp_path))

    assert interrupted_everywhere(lambda: recorders[-1].write(), check) > 3


@pytest.mark.filterwarnings("ignore::ResourceWarning")
def test_a_file_that_was_interrupted_while_it_was_written_leaves_no_descriptor_and_no_other_file(tmp_path):
    def check():
        assert len(os.listdir("/proc/self/fd")) == before
        assert {path.name for path in tmp_path.iterdir()} <= {"file"}

    before = len(os.listdir("/proc/self/fd"))
    assert interrupted_everywhere(lambda: write_at_once(tmp_path / "file", b"content"), check) > 3


def test_a_thread_that_writes_for_long_does_not_keep_a_flight_recorder_from_giving_up(tmp_path, monkeypatch):
    recorder = FlightRecorder(folder=tmp_path)
    now = iter(range(100))
    monkeypatch.setattr(time, "monotonic", lambda: next(now))
    with recorder._writing:
        assert recorder.write() is None


@pytest.mark.parametrize("way", ["with", "a task beside"])
def test_a_stream_that_was_made_current_is_so_no_longer_after_an_interrupt(monkeypatch, way):
    current = []

    class Stream:
        def __init__(self, ptr):
            self.ptr = ptr
            self.use = functools.partial(operator.setitem, current, 0, self)  # of C, as CuPy's is

    caller, other = Stream(1), Stream(2)
    current.append(caller)
    library = types.SimpleNamespace(get_current_stream=functools.partial(operator.getitem, current, 0))
    monkeypatch.setattr(cuda, "_cuda", lambda: library)
    side = cuda.SideStream.__new__(cuda.SideStream)
    other.wait_event, side._stream, side._cuda = len, other, library
    seen = []

    def work():
        assert current == [other]
        seen.append(1)

    def call():
        if way == "with":
            with cuda.UseStream(other):
                work()
        else:
            side.run_after("", work)

    def check():
        assert current == [caller]

    call()
    check()
    assert interrupted_everywhere(call, check) > 3


def test_a_call_after_an_interrupted_exchange_is_not_made_for_its_bucket():
    comm, seen = Communicator([LocalTransport()]), []
    plan = Plan.pack([TensorSpec("w", (3,), "float32")])
    (bucket,) = make_buckets(plan, [np.ones(3, np.float32)])

    class Noting:
        def exchange(self, *_):
            seen.append(comm.context.bucket_step)

    lane = types.SimpleNamespace(comm=comm, note=lambda **_: None)
    exchanges = Exchanges(lane, NULL)

    def check():
        assert (comm.context.bucket, comm.context.bucket_step) == (None, None)

    assert interrupted_everywhere(lambda: exchanges._exchange(Noting(), bucket, None, bucket.step), check) > 3
    assert seen[-1] == (0, bucket.step)


def test_a_limit_that_was_interrupted_ends_no_process(monkeypatch):
    polls = []
    monkeypatch.setattr(threading.Thread, "start", lambda thread: polls.append(thread._target))
    monkeypatch.setattr(time, "sleep", lambda _: None)
    done = []

    def fail(message):
        raise AssertionError(message)

    def check():
        for poll in polls:
            poll()
        polls.clear()

    assert (
        interrupted_everywhere(lambda: Deadline(lambda: "too long", fail).run(lambda: done.append(1)), check) > 3
    )
    assert done
