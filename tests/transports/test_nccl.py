"""NCCL: what is enqueued, what waits, and what happens when a rank, a call or NCCL itself fails."""

import contextlib
import subprocess
import sys
import textwrap
import threading
import time
from pathlib import Path

import numpy as np
import pytest
from support.device_ranks import HostOnly, over, run_over_nccl
from support.waiting import until

import bagua_comm
from bagua_comm import CommAborted, CommError, CommTimeout, RankFailed, UnsupportedError
from bagua_comm.testing import check_transport
from bagua_comm.transports.local import Hub, LocalTransport
from bagua_comm.transports.nccl import watchdog

one_policy = pytest.mark.parametrize("device", ["lazy"], indirect=True)


@pytest.mark.parametrize(
    ("device", "ranks"),
    [
        ("lazy", 1),
        ("main-first", 2),
        *(pytest.param(*each, marks=pytest.mark.slow) for each in [("side-first", 3), ("lazy", 4)]),
    ],
    indirect=["device"],
)
def test_conformance(device, ranks):
    import cupy

    run_over_nccl(device, ranks, body=lambda comm: check_transport(comm, asarray=cupy.asarray))


def enqueued(device, *calls, ranks=3):
    """Return NCCL's operations that rank 0 enqueues in each `call(comm, x)`, where x is (ranks, 4) of a dtype."""
    import cupy

    def body(comm):
        found = []
        for call, dtype in calls:
            x = cupy.asarray(np.ones((ranks, 4)).astype(bagua_comm.arrays.dtype_named(dtype)))
            comm.barrier()
            before = len(device.log)
            call(comm, x)
            comm.barrier()
            mine = [entry.name for entry in device.log[before:] if entry.device == 0]
            found.append([name for name in mine if name.startswith("nccl")])
        return found

    return run_over_nccl(device, ranks, body=body)[0]


@one_policy
def test_the_flight_recorder_says_that_the_host_has_left_a_call_and_a_device_works_on_it(device):
    import cupy

    def body(comm):
        comm.allreduce(cupy.asarray(np.ones(4)))
        comm.barrier()
        return [(entry.name, entry.state) for entry in comm.flight.entries()[-2:]]

    assert run_over_nccl(device, 2, body=body)[0] == [("allreduce", "enqueued"), ("barrier", "ended")]


REDUCED = [
    *(
        (d, op, 1)
        for d in ("int8", "uint8", "int32", "uint32", "int64", "uint64")
        for op in ("sum", "prod", "min", "max")
    ),
    *((d, op, 1) for d in ("float16", "bfloat16", "float32", "float64") for op in ("sum", "prod", "avg")),
    # NCCL does these in another way, so that they are exchanged.
    *(
        ("float32", "min", 2),
        ("bfloat16", "max", 2),
        ("int32", "avg", 2),
        ("int32", "bxor", 2),
        ("int16", "sum", 2),
    ),
]


@one_policy
def test_nccl_reduces_what_it_reduces_as_the_specification_does(device):
    calls = [(lambda comm, x, op=op: comm.allreduce(x, op=op), dtype) for dtype, op, _ in REDUCED]
    for (*what, operations), names in zip(REDUCED, enqueued(device, *calls), strict=True):
        assert names == (["nccl allReduce"] if operations == 1 else ["nccl send+recv"] * 2), what


OPERATIONS = {
    "reduce": (lambda comm, x: comm.reduce(x, root=1), ["nccl reduce"]),
    "reduce_scatter": (lambda comm, x: comm.reduce_scatter(x), ["nccl reduceScatter"]),
    "broadcast": (lambda comm, x: comm.broadcast(x, root=2), ["nccl broadcast"]),
    "allgather": (lambda comm, x: comm.allgather(x), ["nccl allGather"]),
    "alltoall": (lambda comm, x: comm.alltoall(x), ["nccl send+recv"]),
    "alltoall in place": (lambda comm, x: comm.alltoall(x, out=x), ["nccl send+recv"]),
    "gather": (lambda comm, x: comm.gather(x, root=0), ["nccl recv"]),
    "allreduce of nothing": (lambda comm, x: comm.allreduce(x[:0]), []),
    "alltoall of nothing": (lambda comm, x: comm.alltoall(x[:0]), []),
}


@one_policy
def test_every_call_is_one_operation_of_nccl(device):
    found = enqueued(device, *((call, "float32") for call, _ in OPERATIONS.values()))
    assert dict(zip(OPERATIONS, found, strict=True)) == {name: names for name, (_, names) in OPERATIONS.items()}


@one_policy
@pytest.mark.parametrize("call", ["allreduce", "reduce_scatter", "reduce"])
def test_one_rank_alone_averages_all_elements_of_a_long_array(device, call):
    """NCCL before 2.29.7 leaves the last ones unwritten."""
    import cupy

    def body(comm):
        x = cupy.empty(70_001, np.float32)
        x.fill(3)
        options = {"root": 0} if call == "reduce" else {}
        return getattr(comm, call)(x.reshape(1, -1), op="avg", **options).get()

    np.testing.assert_array_equal(run_over_nccl(device, 1, body=body)[0].reshape(-1), np.full(70_001, 3))


@one_policy
def test_alltoall_enqueues_nothing_but_its_group(device):
    import cupy

    def body(comm):
        x = cupy.zeros((2, 8), np.float32)
        out = cupy.empty(x.shape, x.dtype)
        comm.barrier()
        before = len(device.log)
        comm.alltoall(x, out=out)
        comm.barrier()
        return [entry.name for entry in device.log[before:] if entry.device == comm.rank]

    assert run_over_nccl(device, 2, body=body) == [["nccl send+recv"]] * 2


def test_no_call_makes_the_host_wait_for_the_device(device):
    import cupy

    def body(comm):
        x = cupy.asarray(np.full((2, 600), comm.rank + 1.0, np.float32))
        for _ in range(2):
            comm.allreduce(x, out=x, op="avg")
            comm.allreduce(x, op="max")
            comm.reduce_scatter(x)
            comm.allgather(x)
            comm.alltoall(x, out=x)
            comm.broadcast(x, root=0)
            comm.sendrecv(x, cupy.empty(x.shape, x.dtype), dest=1 - comm.rank, source=1 - comm.rank)
            bagua_comm.quantized_allreduce(comm, x)
        comm.barrier()
        return x

    def guarded(comm):
        with device.forbid_host_sync(this_thread=True):
            x = body(comm)
        return x.get().ravel()[0]

    assert run_over_nccl(device, 2, body=guarded) == [1.5, 1.5]


@one_policy
def test_sent_bytes_are_those_of_a_bandwidth_optimal_algorithm(device):
    import cupy

    def body(comm):
        x, sent = cupy.zeros((4, 300), np.uint8), []
        for call in (
            lambda: comm.allreduce(x),
            lambda: comm.reduce_scatter(x),
            lambda: comm.allgather(x),
            lambda: comm.alltoall(x),
            lambda: comm.broadcast(x, root=1),
            lambda: (
                comm.send(x, dest=1) if comm.rank == 0 else comm.recv(x, source=0) if comm.rank == 1 else None
            ),
        ):
            before = comm.transports[1].sent_bytes
            call()
            sent.append(comm.transports[1].sent_bytes - before)
        return sent

    assert run_over_nccl(device, 4, body=body)[0] == [1800, 900, 3600, 900, 0, 1200]


def test_calls_in_a_graph_are_replayed_and_not_watched(device):
    import cupy

    def body(comm):
        x, out = cupy.asarray(np.arange(4.0) + comm.rank), cupy.empty(4)
        comm.allreduce(x, out=out)  # connects
        stream = cupy.cuda.Stream(non_blocking=True)
        stream.wait_event(cupy.cuda.get_current_stream().record())
        with stream:
            stream.begin_capture()
            comm.allreduce(x, out=out)
            graph = stream.end_capture()
            watched = len(comm.transports[1].watch.calls)
            x[...] = cupy.asarray(np.full(4, 10.0 + comm.rank))
            graph.launch()
            result = out.get().tolist()
        return watched <= 1, result

    assert run_over_nccl(device, 2, body=body) == [(True, [21.0] * 4)] * 2


def test_a_lane_that_is_closed_leaves_no_memory_behind(device):
    import cupy

    def body(comm):
        x, pool = cupy.zeros(1000, np.float32), cupy.get_default_memory_pool()
        before = pool.total_bytes()
        with comm.lane("stream") as lane:
            lane.submit(bagua_comm.quantized_allreduce, lane.comm, x, out=x)
            lane.submit(lane.comm.allreduce, x, out=x, op="max")
            lane.wait()
            assert pool.total_bytes() > before
        return pool.total_bytes() - before

    assert run_over_nccl(device, 2, body=body) == [0, 0]


def test_the_watchdog_ends_no_capture_of_any_mode(device, monkeypatch):
    import cupy

    device.nccl_connects = False
    monkeypatch.setattr(watchdog, "LOOK_S", 0.001)
    looks, query = [], cupy.cuda.runtime.eventQuery
    monkeypatch.setattr(cupy.cuda.runtime, "eventQuery", lambda ptr: looks.append(1) or query(ptr))

    def body(comm):
        x, stream = cupy.zeros(3), cupy.cuda.Stream(non_blocking=True)
        comm.transports[0].barrier()  # nobody allocates during the capture
        if comm.rank == 0:
            comm.allreduce(x)
            stream.begin_capture(cupy.cuda.runtime.streamCaptureModeGlobal)
            looks.clear()
            until(lambda: len(looks) >= 3)
            stream.end_capture()
        comm.transports[0].barrier()
        if comm.rank == 1:
            comm.allreduce(x)

    in_time(lambda: run_over_nccl(device, 2, body=body))


# Failure ------------------------------------------------------------------------------------------------


def in_time(function, seconds=25):
    """Run `function`, which must not take as long as a call may wait for its peers."""
    start = time.monotonic()
    result = function()
    assert time.monotonic() - start < seconds
    return result


def call_until_it_fails(comm, x):
    comm.allreduce(x)
    x.get()  # the stream goes on
    while True:
        comm.allreduce(x)
        time.sleep(0.01)  # sleeps: between calls until one of them fails


def call_once_it_fails(comm):
    """As `call_until_it_fails`, but what is in flight is not added to."""
    watch = comm.transports[1].watch
    until(lambda: watch.failure)
    watch.check_usable()


@pytest.mark.parametrize("connects", [True, False], ids=["in NCCL", "on its stream"])
def test_a_call_that_a_peer_never_makes_is_aborted(device, connects):
    import cupy

    device.nccl_connects = connects

    def body(comm):
        x = cupy.zeros(3)
        if comm.rank == 0:
            with pytest.raises(CommTimeout, match=r"rank 0 of 2: allreduce of 24 bytes is not done after .* s"):
                call_until_it_fails(comm, x)
            with pytest.raises(CommTimeout, match="rank 0 of 2: allreduce of 24 bytes"):
                comm.allgather(x)
        comm.transports[0].barrier()
        return comm.rank

    assert in_time(lambda: run_over_nccl(device, 2, body=body, timeout_s=0.5)) == [0, 1]


@one_policy
@pytest.mark.parametrize("connects", [True, False], ids=["in NCCL", "on its stream"])
def test_a_call_may_have_a_time_limit_of_its_own(device, connects):
    import cupy

    device.nccl_connects = connects

    def body(comm):
        x = cupy.asarray(np.ones(3))

        def call():
            comm.allreduce(x, timeout_s=0.3)
            call_once_it_fails(comm)

        if comm.rank == 0:
            with pytest.raises(CommTimeout, match=r"allreduce of 24 bytes is not done after 0\.\d s"):
                call()
        comm.transports[0].barrier()

    in_time(lambda: run_over_nccl(device, 2, body=body, timeout_s=20.0), seconds=10)


@one_policy
def test_the_time_limit_of_a_call_is_no_limit_of_the_next_one(device):
    import cupy

    def body(comm):
        x = cupy.asarray(np.ones(3))
        comm.allreduce(x, timeout_s=5.0)
        limits = []
        for limit_s in (0.7, None):
            comm.allreduce(x, timeout_s=limit_s)
            limits.append(comm.transports[1].watch.calls[-1].limit_s)
        return limits

    assert run_over_nccl(device, 2, body=body) == [[0.7, 30.0]] * 2


def test_close_raises_an_error_that_no_call_has_raised(device):
    import cupy

    device.nccl_connects = False

    def body(comm):
        if comm.rank == 0:
            comm.allreduce(cupy.zeros(3))
            with pytest.raises(CommTimeout, match="is not done after"):
                comm.close()
            comm.close()
        else:
            time.sleep(0.6)  # sleeps: longer than the time limit of rank 0

    in_time(lambda: run_over_nccl(device, 2, body=body, timeout_s=0.4))


@one_policy
@pytest.mark.parametrize(
    ("code", "error", "text"),
    [
        (1, CommError, "unhandled cuda error"),
        (3, CommError, "internal error"),
        (6, RankFailed, "a peer died or cannot be reached"),
        (8, CommTimeout, "NCCL gave up waiting"),
    ],
)
def test_errors_that_nccl_finds_later_are_raised_by_the_next_call(device, code, error, text):
    import cupy

    device.nccl_connects = False

    def body(comm):
        x = cupy.zeros(3)
        if comm.rank == 0:
            comm.allreduce(x)
            device.nccl_async_error = code
            with pytest.raises(error, match=text) as caught:
                call_until_it_fails(comm, x)
            assert error is type(caught.value)
            device.nccl_async_error = None
        comm.transports[0].barrier()

    in_time(lambda: run_over_nccl(device, 2, body=body))


@one_policy
def test_an_error_of_the_device_is_raised_at_once_in_cudas_words(device):
    import cupy

    device.nccl_connects = False

    def body(comm):
        x = cupy.zeros(3)
        if comm.rank == 0:
            comm.allreduce(x)
            device.break_device(0)
            until(lambda: comm.transports[1].watch.failure)
            with pytest.raises(CommError, match=r"rank 0 of 2: CUDA failed: .*illegal memory") as caught:
                comm.transports[1].split(0, 0)
            assert type(caught.value) is CommError
        comm.transports[0].barrier()

    in_time(lambda: run_over_nccl(device, 2, body=body))


@one_policy
def test_a_call_that_a_broken_device_does_not_even_take_is_not_waited_for(device, monkeypatch):
    import cupy
    from cupy.cuda import nccl

    def body(comm):
        x = cupy.zeros(3)
        if comm.rank == 0:
            monkeypatch.setattr(nccl.NcclCommunicator, "allReduce", lambda *_: device.break_device(0))
            with pytest.raises(CommError, match=r"rank 0 of 2: allreduce: CUDA failed: .*illegal memory"):
                comm.allreduce(x)
            comm.close()
        comm.transports[0].barrier()

    in_time(lambda: run_over_nccl(device, 2, body=body))


@one_policy
def test_an_event_that_cannot_be_asked_about_during_a_capture_is_no_error(device, monkeypatch):
    import cupy

    status = []

    def body(comm):
        query = cupy.cuda.runtime.eventQuery
        monkeypatch.setattr(cupy.cuda.runtime, "eventQuery", lambda ptr: status[0] if status else query(ptr))
        for status[:] in ([code] for code in (900, 901, 906, 907)):
            comm.allreduce(cupy.zeros(3))
            watch = comm.transports[1].watch
            assert watch.look()
        status.clear()
        comm.transports[1].agree(True)
        return len(watch.calls)

    assert run_over_nccl(device, 1, body=body) == [0]


@one_policy
def test_ranks_that_wait_learn_at_once_that_another_one_has_failed(device):
    import cupy

    device.nccl_connects = False
    waiting = threading.Event()

    def body(comm):
        x = cupy.zeros(3)
        with comm.split(0) as group, comm.dup() as unused:
            if comm.rank == 0:
                assert waiting.wait(5)
                group.allreduce(x, op="max")  # not the call that the others make
                device.break_device(0)
                until(lambda: group.transports[1].watch.failure)
            else:
                group.allreduce(x)
                waiting.set()
                with pytest.raises(CommAborted, match=r"rank . of 3: rank 0 aborted after CommError: .*: CUDA"):
                    call_once_it_fails(group)
            comm.transports[0].barrier()
            assert unused.transports[1].watch.failure is None
            for left in (group, unused, comm):
                with contextlib.suppress(CommError):
                    left.close()

    in_time(lambda: run_over_nccl(device, 3, body=body))


def leave_by_an_error(comm):
    with pytest.raises(MemoryError), comm:
        raise MemoryError("no room for a bucket")


def hear_that_rank_0_left(comm):
    with pytest.raises(CommAborted, match=r"rank 0 aborted after CommAborted: MemoryError: no room"):
        call_once_it_fails(comm)


@one_policy
def test_ranks_that_wait_on_a_lane_learn_at_once_that_another_one_has_left(device):
    import cupy

    device.nccl_connects = False

    def body(comm):
        x = cupy.zeros(3)
        lane = comm.lane("stream")
        if comm.rank == 0:
            leave_by_an_error(comm)
        else:
            lane.submit(lane.comm.allreduce, x)
            hear_that_rank_0_left(lane.comm)
        comm.transports[0].barrier()
        with contextlib.suppress(CommError):
            lane.comm.close()

    in_time(lambda: run_over_nccl(device, 2, body=body))


@one_policy
def test_ranks_that_wait_in_a_smaller_group_learn_at_once_that_another_one_has_left(device):
    import cupy

    device.nccl_connects = False

    def body(comm):
        x = cupy.zeros(3)
        group = comm.split(comm.rank // 2)
        if comm.rank == 0:
            leave_by_an_error(comm)
        elif comm.rank == 1:
            group.allreduce(x)
            hear_that_rank_0_left(group)
        comm.transports[0].barrier()
        if comm.rank > 1:
            assert group.transports[1].agree(True)  # no rank has left this one
        with contextlib.suppress(CommError):
            group.close()

    in_time(lambda: run_over_nccl(device, 4, body=body))


@one_policy
def test_a_communicator_made_again_at_the_same_address_is_another_one(device, monkeypatch):
    from cupy.cuda import nccl

    address = nccl.get_unique_id()
    monkeypatch.setattr(nccl, "get_unique_id", lambda: address)

    def body(comm):
        transport = comm.transports[1]
        transport.abort()
        comm.transports[0].barrier()
        device.nccl_worlds.clear()  # NCCL lets ranks use an address again
        comm.transports[0].barrier()
        again = type(transport).connect(comm.transports[0])
        agreed = again.agree(True)  # the notices about the aborted one do not end it
        again.close()
        return agreed

    assert run_over_nccl(device, 2, body=body) == [True] * 2


@one_policy
def test_a_rank_that_has_aborted_one_group_of_ranks_continues_in_others(device):
    import cupy

    device.nccl_connects = False

    def body(comm):
        with comm.split(comm.rank % 2) as half, comm.split(0) as other:
            if comm.rank == 0:
                half.transports[1].abort()
            comm.transports[0].barrier()
            result = other.allreduce(cupy.asarray(np.ones(3))).get().tolist()
            if comm.rank % 2:
                assert half.allreduce(cupy.asarray(np.ones(3))).get().tolist() == [2.0] * 3
            return result

    assert in_time(lambda: run_over_nccl(device, 4, body=body)) == [[4.0] * 3] * 4


@one_policy
def test_work_in_progress_is_no_error(device):
    import cupy

    def body(comm):
        device.nccl_async_error = 7
        result = comm.allreduce(cupy.asarray(np.ones(3))).get().tolist()
        comm.transports[1].agree(True)
        device.nccl_async_error = None
        return result

    assert run_over_nccl(device, 2, body=body) == [[2.0] * 3] * 2


@one_policy
def test_an_error_of_the_call_itself_is_translated_with_its_cause(device, monkeypatch):
    import cupy
    from cupy.cuda import nccl

    def fail(*arguments):
        raise nccl.NcclError(5)

    def body(comm):
        monkeypatch.setattr(nccl.NcclCommunicator, "allReduce", fail)
        with pytest.raises(CommError, match=r"rank . of 2: allreduce: NCCL failed: .*invalid usage") as caught:
            comm.allreduce(cupy.zeros(3))
        assert isinstance(caught.value.__cause__, nccl.NcclError)
        comm.transports[0].barrier()

    run_over_nccl(device, 2, body=body)


def test_abort_ends_calls_in_flight(device):
    import cupy

    device.nccl_connects = False

    def body(comm):
        x = cupy.zeros(3)
        if comm.rank == 0:
            comm.allreduce(x)
            comm.transports[1].abort()
            x.get()
            with pytest.raises(CommAborted, match="this communicator was aborted"):
                comm.allreduce(x)
        comm.transports[0].barrier()

    in_time(lambda: run_over_nccl(device, 2, body=body))


def test_the_watchdog_sleeps_when_nothing_is_in_flight(device, monkeypatch):
    import cupy
    from cupy.cuda import nccl

    def body(comm):
        comm.allreduce(cupy.zeros(3)).get()
        comm.transports[1].agree(True)
        looks = []
        with monkeypatch.context() as patch:
            patch.setattr(nccl.NcclCommunicator, "check_async_error", lambda _: looks.append(1))
            time.sleep(0.3)  # sleeps: a time without looks
        return len(looks)

    monkeypatch.setattr(watchdog, "LOOK_S", 0.01)
    assert max(run_over_nccl(device, 1, body=body)) < 5


def test_calls_that_end_in_time_are_forgotten(device):
    import cupy

    def body(comm):
        for _ in range(30):
            comm.allreduce(cupy.zeros(3)).get()
        comm.transports[1].agree(True)
        return len(comm.transports[1].watch.calls), len(comm.transports[1].watch.spare_events) <= 31

    assert run_over_nccl(device, 2, body=body) == [(0, True)] * 2


# Groups -------------------------------------------------------------------------------------------------


def test_a_split_waits_for_calls_in_flight(device):
    import cupy

    def body(comm):
        x = comm.allreduce(cupy.asarray(np.full(3, comm.rank)))
        with comm.split(comm.rank % 2) as group:
            return int(group.allreduce(x).get()[0])

    assert run_over_nccl(device, 3, body=body) == [3 + 3, 3, 3 + 3]


@one_policy
def test_a_split_without_all_ranks_is_a_timeout(device):
    def body(comm):
        nccl = comm.transports[1]
        if comm.rank == 0:
            with pytest.raises(CommTimeout, match=r"rank 0 of 2: split: NCCL has waited 0\.3 s"):
                nccl.split(0, 0)
            with pytest.raises(CommTimeout, match="split"):
                nccl.agree(True)
        comm.transports[0].barrier()
        if comm.rank == 1:
            nccl.split(0, 1)  # lets the other's thread end

    in_time(lambda: run_over_nccl(device, 2, body=body, timeout_s=0.3))


def test_survivors_make_a_new_communicator(device):
    import cupy

    hub = Hub(2)

    def body(comm):
        host, nccl = comm.transports
        if comm.rank == 2:
            nccl.abort()
            return None
        with pytest.raises(UnsupportedError, match="host transport"):
            nccl.shrink()
        host.shrink = lambda: HostOnly(LocalTransport(hub, comm.rank))
        with comm.shrink() as survivors:
            assert [transport.name for transport in survivors.transports] == [host.name, "nccl"]
            return survivors.allreduce(cupy.asarray(np.full(3, comm.rank + 1.0))).get().tolist()

    assert run_over_nccl(device, 3, body=body) == [[3.0] * 3, [3.0] * 3, None]


# Setting up, and the end --------------------------------------------------------------------------------


def run_hosts(size, body):
    """Return `body(host)`, or its error, for each of `size` host transports, each on a thread."""
    hub, results = Hub(size), [None] * size

    def run(rank):
        try:
            results[rank] = body(LocalTransport(hub, rank, timeout_s=2.0))
        except BaseException as exc:
            results[rank] = exc

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return results


def test_ranks_that_share_a_gpu_fail_alike(device):
    results = in_time(lambda: run_hosts(3, lambda host: over("nccl", host)))

    assert [CommError] * 3 == [type(result) for result in results]
    assert "invalid usage" in str(results[0])


def test_a_rank_on_which_nccl_fails_fails_the_others(device, monkeypatch):
    import cupy
    from cupy.cuda import nccl

    device.count = 3
    make = nccl.NcclCommunicator.__init__

    def fail_on_rank_1(self, size, unique_id, rank, config=None):
        if rank == 1:
            raise nccl.NcclError(2)
        make(self, size, unique_id, rank)

    monkeypatch.setattr(nccl.NcclCommunicator, "__init__", fail_on_rank_1)

    def connect(host):
        cupy.cuda.Device(host.rank).use()
        return over("nccl", host)

    results = in_time(lambda: run_hosts(3, connect))

    assert "rank 1 of 3: NCCL failed: " in str(results[1])
    assert [CommTimeout, CommError, CommTimeout] == [type(result) for result in results]
    assert "rank 0 of 3: NCCL has waited 1 s for other ranks" in str(results[0])
    assert str(results[0]).endswith(f"; on rank 1: {results[1]}")


def test_a_unique_id_that_cannot_be_had_fails_everywhere(device, monkeypatch):
    from cupy.cuda import nccl

    def fail():
        raise nccl.NcclError(2)

    monkeypatch.setattr(nccl, "get_unique_id", fail)
    results = in_time(lambda: run_hosts(2, lambda host: over("nccl", host)))

    assert "rank 0 of 2: NCCL failed: " in str(results[0])
    assert str(results[1]) == f"rank 1 of 2: NCCL could not be set up on rank 0: {results[0]}"


@one_policy
def test_a_transport_that_is_closed_says_so(device):
    import cupy

    def body(comm):
        transport = comm.transport_for(cupy.zeros(1))
        transport.close()
        with pytest.raises(CommAborted, match="this communicator is closed"):
            transport.broadcast(cupy.zeros(3), 0)

    run_over_nccl(device, 1, body=body)


def test_without_nccl_the_import_error_says_what_to_install(device, monkeypatch):
    from cupy.cuda import nccl

    monkeypatch.setattr(nccl, "available", False)
    with pytest.raises(ImportError, match=r"bagua-comm\[cuda13\]"):
        import bagua_comm.transports.nccl  # noqa: F401


def test_a_process_that_closes_nothing_frees_its_communicators_and_ends_though_a_call_hangs():
    script = """
        import sys, threading
        from cuda_on_cpu import fake_nccl, install, machine
        sys.modules.update(install.MODULES)
        machine.use(machine.Machine("lazy"))
        machine.running().count, machine.running().nccl_connects = 2, False
        import cupy
        from bagua_comm.transports import nccl
        from bagua_comm.transports.nccl import watchdog
        from bagua_comm.transports.local import Hub, LocalTransport
        watchdog.LEAVE_S = 1.0

        def telling(name):
            free = getattr(fake_nccl.NcclCommunicator, name)
            setattr(fake_nccl.NcclCommunicator, name, lambda comm: (free(comm), print(name, flush=True)))

        telling("abort")
        telling("destroy")

        hub = Hub(2)
        def run(rank):
            cupy.cuda.Device(rank).use()
            transport = nccl.NcclTransport.connect(LocalTransport(hub, rank))
            if rank == 0:
                x = cupy.zeros(3)
                transport.allreduce(x, x, "sum")
        threads = [threading.Thread(target=run, args=(rank,)) for rank in range(2)]
        for thread in threads: thread.start()
        for thread in threads: thread.join()
    """
    result = in_time(
        lambda: subprocess.run(
            [sys.executable, "-c", textwrap.dedent(script)],
            cwd=Path(__file__).parent.parent,
            capture_output=True,
            text=True,
            timeout=300,
        ),
        seconds=30,
    )
    assert (result.returncode, result.stderr) == (0, "")
    assert sorted(result.stdout.split()) == ["abort", "destroy"]  # the rank whose call hangs, and the other
