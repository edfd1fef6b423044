"""Calls of a Communicator that its conformance kit leaves out, over threads, devices and gloo. mpi/ has MPI."""

import functools
import gc
import threading
import time
import weakref
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor, as_completed
from types import SimpleNamespace

import numpy as np
import pytest
from support import calls
from support.device_ranks import run_on_devices
from support.waiting import until

from bagua_comm import (
    ArrayError,
    CommAborted,
    CommError,
    CommMismatch,
    CommTimeout,
    Communicator,
    Quantized,
    Reproducible,
    UnsupportedError,
    wait_all,
    wait_any,
)
from bagua_comm.arrays import as_array
from bagua_comm.execution import requests
from bagua_comm.testing import run_ranks
from bagua_comm.transports import LocalTransport
from bagua_comm.transports.labels import UNLABELLED

name = {"ids": lambda value: getattr(value, "__name__", None)}


@pytest.mark.parametrize("ranks", [1, 2, 3])
@pytest.mark.parametrize("check", [*calls.WITHOUT_CHECK, *calls.BY_LABELS], **name)
def test_calls_over_threads(ranks, check):
    run_ranks(ranks, lambda comm: check(comm, np.copy))


@pytest.mark.parametrize("check", calls.WITHOUT_CHECK, **name)
def test_calls_over_threads_with_every_call_checked(check):
    run_ranks(3, lambda comm: check(comm, np.copy), check=True)


@pytest.mark.parametrize("check", calls.WITH_CHECK, **name)
@pytest.mark.parametrize("ranks", [2, 3])
def test_calls_that_differ_are_found(ranks, check):
    run_ranks(ranks, lambda comm: check(comm, np.copy), check=True)


def test_products_of_complex_numbers():
    run_ranks(3, lambda comm: calls.products_of_complex_numbers(comm, np.copy))


def test_messages_like_earlier_ones_run_prepared_calls():
    def messages(comm):
        x, out, peer = np.full(2, comm.rank), np.zeros(2, int), 1 - comm.rank
        comm.send(x, dest=1) if comm.rank == 0 else comm.recv(out, source=0)
        return comm.sendrecv(x, out, dest=peer, source=peer).tolist()

    def body(comm):
        first = messages(comm)
        prepared = list(comm.call_cache.values())
        second = messages(comm)
        assert all(a is b for a, b in zip(prepared, comm.call_cache.values(), strict=True))
        return first, second

    assert run_ranks(2, body) == [([1, 1], [1, 1]), ([0, 0], [0, 0])]


def test_an_exchange_like_an_earlier_one_runs_a_prepared_call_on_any_arrays():
    """Such an exchange took 60 us longer than its messages, for checks that it had passed before."""

    def body(comm):
        other, found, prepared = 1 - comm.rank, [], []
        for step in range(3):
            column = np.array([-1, 10 * comm.rank + step, 10 * comm.rank + 5 + step, -1])  # new memory each time
            sends = [(other, column[1:2], "up"), (None, column), (other, column[2:3], "down")]
            comm.exchange(sends, [(other, column[:1], "down"), (other, column[3:], "up"), (None, column)])
            found.append(column[[0, 3]].tolist())
            prepared += comm.call_cache["exchange"].values()
        column = weakref.ref(column)
        del sends
        assert len(prepared) == 3
        assert len(set(prepared)) == 1
        assert column() is None
        return found

    rows = run_ranks(2, body)
    assert rows == [[[15 + step, 10 + step] for step in range(3)], [[5 + step, step] for step in range(3)]]


def test_an_exchange_like_an_earlier_one_is_refused_for_what_is_wrong_with_it_alone():
    """What depends on the memory of the arrays, or on the type of a peer or a tag, is checked each time."""
    x, y, out, other = np.zeros(2), np.ones(2), np.zeros(2), np.zeros(2)
    comm = Communicator([LocalTransport()])
    read_only = np.zeros(2)
    read_only.flags.writeable = False
    wide = np.zeros((2, 2))
    for _ in range(2):
        comm.exchange([(0, x, 1), (0, y, 2)], [(0, other, 2), (0, out, 1)])
        comm.exchange([(0, x), (0, x)], [(0, out), (0, other)])  # one array twice: in any order
        for sends, recvs, message in (
            ([(0, x, 1), (0, y, 2)], [(0, y, 2), (0, out, 1)], "an array to receive into overlaps another array"),
            (
                [(0, x, 1), (0, y, 2)],
                [(0, out, 2), (0, out, 1)],
                "an array to receive into overlaps another array",
            ),
            ([(0, x, 1), (0, y, 2)], [(0, read_only, 2), (0, out, 1)], "read-only"),
            ([(0, x, 1.0), (0, y, 2)], [(0, other, 2), (0, out, 1)], "tag is 1.0"),
            ([(0, x, True), (0, y, 2)], [(0, other, 2), (0, out, 1)], "tag is True"),
            ([(0.0, x, 1), (0, y, 2)], [(0, other, 2), (0, out, 1)], "a peer in sends is 0.0"),
            ([([0], x, 1), (0, y, 2)], [(0, other, 2), (0, out, 1)], "a peer in sends is "),
            ([(0, x), (0, y)], [(0, out), (0, other)], "only their order tells them apart"),
        ):
            with pytest.raises(ArrayError, match=message):
                comm.exchange(sends, recvs)
        comm.exchange([(0, x, 1), (0, wide[:, 1], 2)], [(0, wide[:, 0], 2), (0, out, 1)])  # copied
        comm.exchange(((0, each, 1) for each in [x + 3]), iter([(0, out, 1)]))
        assert out.tolist() == [3, 3]


def test_calls_on_a_ranks_own_part_of_the_other_array_run_prepared_calls():
    def body(comm):
        whole, other = np.empty((2, 3)), np.empty((2, 3))
        for array in (whole, other, whole, other):
            before = comm.call_cache.get(("allgather", ((2, 3),), whole.dtype, (3,)))
            array[:] = comm.rank
            assert comm.allgather(array[comm.rank], array).tolist() == [[0] * 3, [1] * 3]
            assert comm.reduce_scatter(array.reshape(6), array[comm.rank]).tolist() == [2 * comm.rank] * 3
            now = comm.call_cache["allgather", ((2, 3),), whole.dtype, (3,)]
            assert before in (None, now)
        with pytest.raises(ArrayError, match="out overlaps x outside of this rank's own chunk"):
            comm.allgather(whole[1 - comm.rank], whole)
        assert comm.allgather(np.full(3, float(comm.rank)), whole).tolist() == [[0] * 3, [1] * 3]

    run_ranks(2, body)


def test_calls_leave_no_cycles_of_references():
    comm, x, out, other = Communicator([LocalTransport()]), np.ones(3), np.empty(3), np.empty(3)

    def make_calls():
        comm.allreduce(x, out)
        comm.scan(x, out)
        comm.gather(x, root=0)
        comm.scatter(x[None], root=0)
        comm.allgather(x, out, counts=[3])
        comm.alltoall(x, out, counts=[3], out_counts=[3])
        comm.allreduce_many([x, x])
        comm.allgather_object("text")
        comm.exchange([(0, x, "a"), (0, x, "b")], [(0, out, "a"), (0, other, "b")])

    def collected():
        gc.collect()
        make_calls()
        return gc.collect()

    make_calls()
    gc.disable()
    try:
        assert 0 in (collected() for _ in range(5))  # threads of other tests may leave some at any time
    finally:
        gc.enable()


def test_an_object_is_never_taken_for_an_array():
    def body(comm):
        comm.send_object("text", dest=1 - comm.rank)
        out = comm.sendrecv(np.ones(1), np.zeros(1), dest=1 - comm.rank, source=1 - comm.rank)
        return out[0], comm.recv_object(source=1 - comm.rank)

    assert run_ranks(2, body) == [(1, "text")] * 2


@pytest.mark.parametrize(
    ("kind", "ranks", "device"),
    [("local", 2, "lazy"), ("nccl", 3, "side-first"), ("staged", 2, "main-first")],
    indirect=["device"],
)
def test_calls_on_device_arrays(device, kind, ranks):
    import cupy

    def body(comm):
        for check in calls.WITHOUT_CHECK:
            check(comm, cupy.asarray)
        x = cupy.asarray(np.ones(2, complex))
        with pytest.raises(UnsupportedError, match=r"no op='prod' for complex128 on a device; .*x.get\(\)"):
            comm.scan(x, op="prod")
        mixed = comm.allreduce_many([x, np.ones(2, complex)])
        assert [type(each) for each in mixed] == [cupy.ndarray, np.ndarray]

    run_on_devices(device, ranks, kind, body)


@pytest.mark.parametrize(("kind", "device"), [("nccl", "lazy"), ("staged", "lazy")], indirect=["device"])
def test_calls_on_device_arrays_that_differ_are_found(device, kind):
    import cupy

    def body(comm):
        with Communicator(comm.transports, device=comm.device, check=True) as checked:
            for check in calls.WITH_CHECK:
                check(checked, cupy.asarray)

    run_on_devices(device, 2, kind, body)


def run_over_gloo(monkeypatch, body, *, check=False):
    """Run `body` on three ranks over gloo, which are threads."""
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    from torch.distributed import HashStore

    from bagua_torch.process_group import ProcessGroupTransport, RendezvousInfo

    store = HashStore()

    def run(rank):
        transport = ProcessGroupTransport(timeout_s=30, rendezvous=RendezvousInfo(store, "calls", rank, 3))
        comm = Communicator([transport], check=check)
        body(comm)
        comm.close()
        return True

    with ThreadPoolExecutor(3) as pool:
        ranks = [pool.submit(run, rank) for rank in range(3)]
        assert all(rank.result() for rank in as_completed(ranks, timeout=60))  # the first error first


@pytest.mark.parametrize("check", [False, True])
def test_calls_over_gloo(check, monkeypatch):
    def body(comm):
        for each in calls.WITH_CHECK if check else [*calls.WITHOUT_CHECK, *calls.BY_LABELS]:
            each(comm, np.copy)

    run_over_gloo(monkeypatch, body, check=check)


def test_a_tag_that_nobody_sends_is_named_over_threads_and_gloo(monkeypatch):
    run_ranks(2, lambda comm: calls.a_tag_that_nobody_sends(comm, np.copy))
    run_over_gloo(monkeypatch, lambda comm: calls.a_tag_that_nobody_sends(comm, np.copy))


def test_an_empty_array_overlaps_nothing_on_any_rank():
    def body(comm):
        empty = np.zeros(0)
        return comm.allgather(empty, empty) is empty

    assert run_ranks(2, body) == [True, True]


def test_a_sparse_matrix_is_refused_with_what_to_send_in_its_place():
    class csr_matrix:
        nnz = 3

        def toarray(self):
            return np.eye(3)

    with pytest.raises(UnsupportedError, match=r"csr_matrix\) is several arrays; .*toarray\(\), or .*indptr"):
        as_array(csr_matrix())
    with pytest.raises(UnsupportedError, match="allreduce: x: a sparse matrix"):
        Communicator([LocalTransport()]).allreduce(csr_matrix())


def test_isend_and_irecv_are_tasks_of_a_lane():
    """As in MPI programs: begin to receive, begin to send, work, wait for both."""

    def body(comm):
        peer, out = 1 - comm.rank, np.zeros(100_000)
        with comm.lane() as lane:
            receives = lane.submit(lane.comm.recv, out, source=0) if comm.rank else None
            sends = lane.submit(lane.comm.send, np.full(100_000, 7.0), dest=1) if not comm.rank else None
            comm.barrier()  # beside them
            for request in filter(None, (receives, sends)):
                request.result(timeout=30)
            swap = lane.submit(
                lane.comm.sendrecv, np.full(9, comm.rank), np.empty(9, int), dest=peer, source=peer
            )
            lane.wait()
        return out[0], swap.result()[0]

    assert run_ranks(2, body) == [(0, 1), (7, 0)]


def test_a_message_under_way_overlaps_with_what_its_receiver_computes():
    """In the trace, the span of the message encloses that of the computation; it comes meanwhile."""
    computing, sent = threading.Event(), threading.Event()

    def body(comm):
        if comm.rank == 0:
            out = np.zeros(2)
            request = comm.irecv(out, source=1, tag="x")
            with comm.tracer.span("compute"):
                computing.set()
                assert sent.wait(30)
            assert request.done()  # without a wait
            assert request.result() is out
            assert out.tolist() == [7, 7]
            return {span.name: span for span in comm.tracer.spans()}
        assert computing.wait(30)
        comm.isend(np.full(2, 7.0), dest=0, tag="x").result()
        return sent.set()

    spans = run_ranks(2, body)[0]
    message, compute = spans["irecv(source=1, tag=x) under way"], spans["compute"]
    assert message.start_ns < compute.start_ns <= compute.end_ns < message.end_ns


def test_a_rank_that_makes_no_lane_is_told_that_all_do():
    def body(comm):
        if comm.rank == 0:
            with pytest.raises(
                CommTimeout, match=r"lane .* all ranks make a lane, also those that submit nothing"
            ):
                comm.lane()

    run_ranks(2, body, timeout_s=0.5)


def test_a_request_that_nobody_answers_is_named():
    def body(comm):
        if comm.rank == 1:
            comm.send(np.ones(2), dest=0, tag=3)
            with pytest.raises(CommTimeout):
                comm.recv(np.ones(2), source=0)
            return
        request = comm.irecv(np.ones(2), source=1, tag="x", timeout_s=0.2)
        message = r"irecv\(.*, tag=x\) #1: rank 0 .* for 16 bytes from rank 1 with tag 'x'; from there came .*: 3"
        with pytest.raises(CommTimeout, match=message):
            wait_all([request])
        begun = comm.flight.entries()[0]
        assert (begun.name, begun.state) == ("irecv", "failed")
        assert begun.error.startswith("CommTimeout: rank 0 waited")
        with pytest.raises(
            CommAborted, match=r"a call failed earlier: irecv\(.* #1 on rank 0: CommTimeout: rank 0"
        ):
            comm.barrier()
        with pytest.raises(CommAborted, match="a call failed earlier: irecv"):
            comm.barrier()

    run_ranks(2, body, timeout_s=30)


def test_a_request_cannot_be_cancelled():
    """Its arrays are in use; and the next message is for it."""

    def body(comm):
        peer, outs = 1 - comm.rank, np.zeros((2, 1))
        requests = [comm.irecv(out, source=peer) for out in outs]
        assert not requests[0].cancel()
        comm.isend(np.full(1, 1.0), dest=peer)
        assert not comm.isend(np.full(1, 2.0), dest=peer).cancel()
        wait_all(requests)
        return outs.ravel().tolist()

    assert run_ranks(2, body) == [[1, 2], [1, 2]]


def test_an_end_of_a_request_may_wait_for_another_thread_that_asks_for_it():
    def body(comm):
        request = comm.irecv(np.zeros(1), source=0)
        with ThreadPoolExecutor(1) as threads:
            seen = []
            request.add_done_callback(lambda it: seen.append(threads.submit(it.done).result(timeout=30)))
            comm.send(np.ones(1), dest=0)
            request.result()
        assert seen == [True]

    run_ranks(1, body)


def test_messages_of_algorithms_are_for_no_receive_of_the_user():
    """Also where they have labels, for the ranks compare them."""

    def body(comm):
        peer, mine, theirs = 1 - comm.rank, np.zeros(1), np.zeros(1)
        request = comm.irecv(mine, source=peer)
        comm.sendrecv(np.full(1, 1.0), theirs, dest=peer, source=peer, tag=UNLABELLED)
        comm.send(np.full(1, 2.0), dest=peer)
        request.result()
        return mine[0], theirs[0]

    assert run_ranks(2, body, check=True) == [(2, 1), (2, 1)]


def test_of_two_requests_the_one_whose_message_comes_first_is_done_first():
    def body(comm):
        if comm.rank:
            comm.recv(np.zeros(1), source=0) if comm.rank == 1 else None
            comm.send(np.full(1, float(comm.rank)), dest=0)
            return None
        outs = [np.zeros(1), np.zeros(1)]
        requests = [comm.irecv(out, source=source) for source, out in zip((1, 2), outs, strict=True)]
        assert wait_any(requests) == 1
        assert not requests[0].done()
        comm.send(np.zeros(1), dest=1)
        wait_all(requests)
        with pytest.raises(ArrayError, match="wait_any: futures is empty"):
            wait_any([])
        assert wait_all([]) == []
        for wait, wrong, found in (
            (wait_any, [None], r"futures\[0\] is None"),
            (wait_all, [requests[0], 3], r"futures\[1\] is 3"),
            (wait_any, requests[0], "is one future"),
        ):
            with pytest.raises(TypeError, match=f"{wait.__name__}: .*{found}, expected a"):
                wait(wrong)
        return outs

    assert run_ranks(3, body)[0] == [1, 2]


def test_an_array_of_an_open_request_is_refused_until_that_has_ended():
    def body(comm):
        x, y = np.zeros(6), np.ones(2)
        received = comm.irecv(x[:4], source=0, tag="x")
        for call in (lambda: comm.irecv(x[3:], source=0), lambda: comm.isend(x[::2], dest=0)):
            text = (
                r"^i(recv|send)\(.*=0\): its array overlaps that of irecv\(source=0, tag=x\), which has not ended"
            )
            with pytest.raises(ValueError, match=text):
                call()
        requests = [comm.irecv(x[4:], source=0), comm.isend(np.ones(4), dest=0, tag="x")]
        requests += [comm.isend(y, dest=0), comm.isend(y, dest=0, tag="x")]
        requests.append(
            comm.irecv(x[:2], source=0, tag="x")
        )  # the first message has come, though nobody has asked
        wait_all([*requests, received])
        return x.sum()

    assert run_ranks(1, body) == [6]


def test_two_threads_may_use_the_array_of_a_request_that_has_ended_at_once():
    class Late:
        """A lock that another thread gets first."""

        def __init__(self, lock, first):
            self.lock, self.first = lock, [first]

        def __enter__(self):
            while self.first:
                self.first.pop()()
            self.lock.acquire()

        def __exit__(self, *_):
            self.lock.release()

    def body(comm):
        waiting = requests.Requests(comm)
        buffer = requests.Buffer.of(np.zeros(1), is_written=True)
        waiting.add("irecv", buffer, lambda _: True, list, 60, polled=False).result()
        waiting._lock = Late(waiting._lock, lambda: waiting.check_free("irecv", buffer))
        waiting.check_free("irecv", buffer)
        assert waiting._pending == []

    run_ranks(1, body)


def test_receives_that_wait_take_messages_in_the_order_in_which_they_began():
    def body(comm):
        if comm.rank:
            for i in range(200):
                comm.isend(np.full(1, i), dest=0)
            return comm.barrier()
        outs = [np.zeros(1, int) for _ in range(200)]
        requests = [comm.irecv(out, source=1) for out in outs[:100]]
        last = comm.recv(outs[100], source=1)
        assert last == 100
        comm.barrier()
        for out in outs[101:]:
            requests.append(comm.irecv(out, source=1))
        wait_all(requests)
        assert [int(out[0]) for out in outs] == list(range(200))
        return None

    run_ranks(2, body)


def test_many_requests_that_wait_leave_the_program_half_of_the_time(monkeypatch):
    now_s, slept_s = [0.0], []

    def ended(_):
        now_s[0] += 0.25
        return bool(slept_s)

    clock = SimpleNamespace(
        monotonic=lambda: now_s[0], perf_counter_ns=lambda: int(now_s[0] * 1e9), sleep=slept_s.append
    )
    monkeypatch.setattr(requests, "time", clock)

    def body(comm):
        waiting = requests.Requests(comm)
        buffer = requests.Buffer.of(np.zeros(1), is_written=True)
        waiting.add("irecv", buffer, ended, list, 60, polled=True)
        until(lambda: slept_s)
        waiting.stop("the test ends")

    run_ranks(1, body)
    assert slept_s[0] == 2.5


def test_a_callback_that_blocks_does_not_keep_the_end_of_a_communicator_waiting(monkeypatch):
    monkeypatch.setattr(requests, "STOP_S", 0.01)
    blocks, go_on, returned = threading.Event(), threading.Event(), []

    def callback(_):
        blocks.set()
        go_on.wait(20)
        returned.append(True)

    def body(comm):
        waiting, may_end = requests.Requests(comm), threading.Event()
        buffer = requests.Buffer.of(np.zeros(1), is_written=True)
        request = waiting.add("irecv", buffer, lambda _: may_end.is_set(), list, 60, polled=True)
        request.add_done_callback(callback)
        may_end.set()
        until(blocks.is_set)
        assert waiting.end_tasks("world") == []
        assert not returned
        go_on.set()

    run_ranks(1, body)


def test_a_communicator_that_closes_names_the_requests_that_are_left():
    def body(comm):
        group = comm.dup()
        request = group.irecv(np.zeros(1), source=1 - comm.rank, timeout_s=30)
        start_s = time.monotonic()
        with pytest.raises(
            CommError, match=r"world\.1 ends before irecv\(source=\d\): wait for the results of requests"
        ):
            group.close()
        assert time.monotonic() - start_s < 3  # nobody waits for it
        with pytest.raises(CommAborted, match=r"world\.1 was closed"):
            request.result()

    run_ranks(2, body)


def test_the_end_of_a_long_call_is_compared():
    def body(comm):
        counts = [1] * comm.size
        if comm.rank == 1:
            counts[-2:] = 2, 0
        with pytest.raises(CommMismatch, match="rank 0 called allgather"):
            comm.allgather(np.ones(counts[comm.rank]), counts=counts)

    run_ranks(100, body, check=True)


def test_arrays_of_another_shape_and_equal_size_are_the_same_call():
    def body(comm):
        shape = (4,) if comm.rank == 0 else (2, 2)
        comm.allgather(np.ones(2), np.empty(shape))
        return comm.allgather(np.ones(2), np.empty(shape), counts=[2, 2]).sum()

    assert run_ranks(2, body, check=True) == [4, 4]


@pytest.mark.parametrize("check", [False, True])
def test_a_result_by_counts_has_one_dimension(check):
    def body(comm):
        mine, sizes = np.full((1, comm.rank + 1), comm.rank), [[0, 1], [1, 2]]
        gathered = comm.allgather(mine, counts=[1, 2])
        swapped = comm.alltoall(
            np.full(sum(sizes[comm.rank]), comm.rank),
            counts=sizes[comm.rank],
            out_counts=[row[comm.rank] for row in sizes],
        )
        return gathered.tolist(), swapped.tolist()

    assert run_ranks(2, body, check=check) == [([0, 1, 1], [1]), ([0, 1, 1], [0, 1, 1])]


def test_counts_on_some_ranks_alone_are_another_call():
    def body(comm):
        counts = {} if comm.rank else {"counts": [1, 1], "out_counts": [1, 1]}
        with pytest.raises(CommMismatch, match=r"alltoall\(float64, with counts\), .* alltoall\(float64\[2\]\)"):
            comm.alltoall(np.ones(2), **counts)
        with pytest.raises(CommMismatch, match=r"allgather\(float64\[2\], counts=.* allgather\(float64\[1\]\)"):
            comm.allgather(np.ones(1), counts=None if comm.rank else [1, 1])

    run_ranks(2, body, check=True)


def gather(comm, x, counts):
    return comm.gather(x, root=0, counts=counts)


def scatter(comm, x, counts):
    return comm.scatter(np.ones((2, 2)) if comm.rank == 0 else None, x, root=0, counts=counts)


@pytest.mark.parametrize("call", [gather, scatter])
def test_shapes_of_a_gather_or_scatter_are_compared_unless_the_root_has_counts(call):
    def body(comm):
        x = np.ones((1, 2) if comm.rank else 2)
        call(comm, x, [2, 2] if comm.rank == 0 else None)
        with pytest.raises(CommMismatch, match=r"0 called \w+\(float64\[2\], .*1 called \w+\(float64\[1, 2\]"):
            call(comm, x, None)

    run_ranks(2, body, check=True)


def test_a_message_that_matches_a_collective_raises_on_both_ranks():
    def body(comm):
        call = comm.barrier if comm.rank == 0 else functools.partial(comm.recv, np.zeros(2), source=0)
        name = r"barrier\(\)" if comm.rank == 0 else r"recv\(float64\[2\], source=0\)"
        with pytest.raises(CommTimeout, match=name):
            call()

    run_ranks(2, body, check=True, timeout_s=0.5)


def test_the_second_call_of_a_kind_checks_its_arrays_as_the_first_did():
    def body(comm):
        x, read_only, room = np.arange(4.0), np.empty(4), np.arange(6.0)
        read_only.flags.writeable = False
        for _ in range(3):
            assert comm.allreduce(x).tolist() == [0, 2, 4, 6]
            assert comm.allreduce(np.arange(8.0)[::2]).tolist() == [0, 4, 8, 12]
            for out, message in [
                (read_only, "read-only"),
                (np.empty(5), r"out has shape \(5,\), expected \(4,\)"),
                (np.empty(4, int), "out has dtype int64, expected float64"),
            ]:
                with pytest.raises(ArrayError, match=message):
                    comm.allreduce(x, out)
            with pytest.raises(ArrayError, match="out overlaps x"):
                comm.allreduce(room[:4], room[2:])
            with pytest.raises(ArrayError, match="timeout_s is 0"):
                comm.allreduce(x, timeout_s=0)
            with pytest.raises(ArrayError, match="root is 2"):
                comm.reduce(x, root=2)
            assert (comm.reduce(x, root=1) is None) == (comm.rank == 0)
        return comm.counters["allreduce"].calls, [entry.state for entry in comm.flight.entries()]

    for calls_made, states in run_ranks(2, body):
        assert calls_made == 6
        assert states == ["ended"] * 9


def test_prepared_calls_keep_no_arrays():
    def body(comm):
        names = (
            "allreduce",
            "reduce",
            "broadcast",
            "allgather",
            "reduce_scatter",
            "alltoall",
            "send",
            "sendrecv",
        )
        mean, exact = Quantized(min_bytes=0).bind(comm), Reproducible().bind(comm)
        kept = []
        for name in (*names, "scan", "gather", "scatter", "allreduce_many", "quantized", "reproducible"):
            x, other = np.ones(200, np.float32), 1 - comm.rank
            if name in ("reduce", "broadcast", "gather"):
                result = getattr(comm, name)(x, root=0)
            elif name == "scatter":
                result = comm.scatter(x.reshape(2, -1), np.empty(100, np.float32), root=0)
            elif name == "send":
                result = comm.send(x, dest=1) if comm.rank == 0 else comm.recv(x, source=0)
            elif name == "sendrecv":
                result = comm.sendrecv(x, np.empty_like(x), dest=other, source=other)
            elif name == "allreduce_many":
                (result,) = comm.allreduce_many([x])
            elif name in ("quantized", "reproducible"):
                result = (mean if name == "quantized" else exact)(x)
            else:
                result = getattr(comm, name)(x)
            arrays = [weakref.ref(each) for each in (x, result) if each is not None]
            del x, result
            kept += [name for array in arrays if array() is not None]
        return kept

    gc.disable()
    try:
        assert run_ranks(2, body) == [[], []]
    finally:
        gc.enable()


@pytest.mark.parametrize("p", [1, 2, 3, 4])
def test_the_halos_of_a_ring_are_right_where_both_neighbours_are_one_rank(p):
    """By a call for each direction, as docs/guides/arrays.md says and as mpi4py's Sendrecv does it."""

    def body(comm):
        up, down = (comm.rank - 1) % p, (comm.rank + 1) % p
        halos, edges = np.full(2, -1), np.array([0, 1]) + 10 * comm.rank
        comm.sendrecv(edges[:1], halos[1:], dest=up, source=down)
        comm.sendrecv(edges[1:], halos[:1], dest=down, source=up)
        return halos.tolist()

    assert run_ranks(p, body) == [[10 * ((r - 1) % p) + 1, 10 * ((r + 1) % p)] for r in range(p)]


@pytest.mark.parametrize("p", [1, 2, 3, 4])
def test_the_halos_of_a_ring_are_never_swapped_by_one_exchange(p):
    """On a ring of two ranks the guide's example for an open row gave each halo the edge of the other side."""

    def body(comm):
        up, down = (comm.rank - 1) % p, (comm.rank + 1) % p
        grid = np.array([-1, 0, 1, -1])[:, None] + 10 * comm.rank * np.ones((1, 4), int)
        column = grid[:, ::2]  # not contiguous: copied before it is sent
        try:
            comm.exchange([(up, column[1]), (down, column[2])], [(up, column[0]), (down, column[3])])
        except ArrayError as exc:
            return str(exc)
        return [int(column[0, 0]), int(column[3, 0])]

    expected = [[10 * ((r - 1) % p) + 1, 10 * ((r + 1) % p)] for r in range(p)]
    refused = [f"exchange: two arrays of 16 bytes go to rank {p - 1 - r}, and two come from it" for r in range(p)]
    found = run_ranks(p, body)
    assert found == expected if p > 2 else [each[: len(refused[0])] for each in found] == refused


def test_two_fields_to_and_from_one_rank_are_refused_with_what_is_right_for_them():
    """The advice was a call for each direction, which is what the program had."""

    def body(comm):
        fields = np.full((2, 3), comm.rank)
        other = 1 - comm.rank
        with pytest.raises(ArrayError, match=r"each direction and each field a tag, .* \(down, bottom, 'down'\)"):
            comm.exchange([(other, field[1:2]) for field in fields], [(other, field[2:]) for field in fields])
        sends = [(other, field[1:2], n) for n, field in enumerate(fields)]
        comm.exchange(sends, [(other, field[2:], n) for n, field in enumerate(fields)][::-1])
        return fields[:, 2].tolist()

    assert run_ranks(2, body) == [[1, 1], [0, 0]]


def test_messages_both_ways_that_cannot_be_interchanged_match_in_order():
    """By their sizes, or since one array is sent twice; and several one way are never refused."""

    def body(comm):
        other, rank = 1 - comm.rank, np.array([comm.rank])
        head, tail, twice, a, b = np.empty(1, int), np.empty(2, int), np.empty(2, int), rank + 10, rank + 20
        comm.exchange([(other, rank), (other, np.array([8, 9]))], [(other, head), (other, tail)])
        comm.exchange([(other, rank), (other, rank)], [(other, twice[:1]), (other, twice[1:])])
        way = [(other, a), (other, b)]
        comm.exchange(way if comm.rank else [], [] if comm.rank else way)
        return [*head, *tail, *twice, *a, *b]

    assert run_ranks(2, body) == [[1, 8, 9, 1, 1, 11, 21], [0, 8, 9, 0, 0, 11, 21]]


def test_a_cancelled_future_does_not_keep_the_others_from_being_waited_for():
    class Ended(Future):
        is_asked = False

        def exception(self, timeout=None):
            self.is_asked = True
            return super().exception(timeout)

    cancelled, later = Future(), Ended()
    cancelled.cancel()
    later.set_result(7)
    with pytest.raises(CancelledError):
        wait_all([cancelled, later])
    assert later.is_asked
