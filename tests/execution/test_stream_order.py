"""A communicator that is called on one stream and then on another: its calls share working memory, in order."""

import threading
import weakref

import numpy as np
import pytest
from support.device_ranks import run_on_devices, run_over_nccl
from support.fake_comm import FakeComm

from bagua_comm import UnsupportedError, quantized_allreduce, reproducible_allreduce
from bagua_comm.execution import cuda
from bagua_comm.execution.cuda import SharedScratch
from bagua_comm.execution.lane import InlineLane
from bagua_comm.testing import run_ranks

SIZE = 1001
CALLS = {
    "quantized": lambda comm, x: quantized_allreduce(comm, x),
    "reproducible": lambda comm, x: reproducible_allreduce(comm, x),
    "min of floats": lambda comm, x: comm.allreduce(x, op="min"),
    "scan": lambda comm, x: comm.scan(x),
    "many": lambda comm, x: comm.allreduce_many([x, x])[1],
    "in place": lambda comm, x: comm.alltoall(x[:1000], out=x[:1000]),
}
lazy = pytest.mark.parametrize("device", ["lazy"], indirect=True)
"""No stream runs before a wait for it."""
eager = pytest.mark.parametrize("device", ["side-first"], indirect=True)
"""Streams run as far as they can: until they need data of a rank that is late."""


def values(rank, number):
    return np.random.default_rng((rank, number)).standard_normal(SIZE).astype(np.float32)


def results_on_host(call, numbers=2):
    """The bytes that each rank gets, by call."""

    def body(comm):
        return [call(comm, values(comm.rank, i)).tobytes() for i in range(numbers)]

    return run_ranks(2, body)


def arrays_and_streams(cupy, comm, count=2):
    """Streams, each with an array that lies on the device already."""
    streams = [cupy.cuda.Stream(non_blocking=True) for _ in range(count)]
    xs = [cupy.asarray(values(comm.rank, i)) for i in range(count)]
    cupy.cuda.get_current_stream().synchronize()
    return list(zip(xs, streams, strict=True))


def run_while_rank_1_is_late(device, body):
    """`body(comm)` of two ranks over NCCL, which are connected; rank 1 begins when rank 0 has enqueued all.

    `body` returns arrays, and their streams.
    """
    import cupy

    enqueued = threading.Event()

    def run(comm):
        for call in CALLS.values():
            call(comm, cupy.asarray(values(comm.rank, 9)))
        cupy.cuda.get_current_stream().synchronize()
        if comm.rank == 1:
            assert enqueued.wait(20)
        outs = body(comm)
        if comm.rank == 0:
            enqueued.set()
        return [out.get(stream).tobytes() for out, stream in outs]

    return run_over_nccl(device, 2, body=run)


@lazy
@pytest.mark.parametrize("name", CALLS)
@pytest.mark.parametrize("kind", ["nccl", "local", "staged"])
def test_calls_on_two_streams_give_the_results_of_calls_on_one(device, kind, name):
    import cupy

    call = CALLS[name]

    def body(comm):
        call(comm, cupy.asarray(values(comm.rank, 9)))  # memory is there
        outs, made = [], arrays_and_streams(cupy, comm)
        for x, stream in made:
            with stream:
                outs.append(call(comm, x))
        for _, stream in reversed(made):
            stream.synchronize()
        return [out.get().tobytes() for out in outs]

    assert run_on_devices(device, 2, kind, body) == results_on_host(call)


@eager
@pytest.mark.parametrize("name", CALLS)
def test_the_second_stream_does_not_run_ahead_while_the_first_waits_for_a_peer(device, name):
    import cupy

    call = CALLS[name]

    def body(comm):
        outs = []
        for x, stream in arrays_and_streams(cupy, comm):
            with stream:
                outs.append((call(comm, x), stream))
        return outs

    assert run_while_rank_1_is_late(device, body) == results_on_host(call)


@lazy
def test_scratch_memory_may_be_used_on_one_stream_first_and_on_another_next(device):
    import cupy

    def body(comm):
        outs, made = [], arrays_and_streams(cupy, comm)
        for x, stream in made:
            with stream:
                outs.append(reproducible_allreduce(comm, x))
        made[1][1].synchronize()
        made[0][1].synchronize()
        return [out.get().tobytes() for out in outs]

    assert run_over_nccl(device, 2, body=body) == results_on_host(CALLS["reproducible"])


def test_nothing_is_recorded_while_the_stream_stays_the_same(device, monkeypatch):
    import cupy

    recorded = []
    monkeypatch.setattr(cuda, "record_event", lambda stream: recorded.append(stream.ptr) or stream.record())
    scratch, x, stream = SharedScratch(), cupy.zeros(3), cupy.cuda.Stream(non_blocking=True)
    again = cupy.cuda.Stream._at(stream.ptr, None)  # another handle
    for current in (cupy.cuda.Stream.null, cupy.cuda.Stream.null, stream, stream, again, cupy.cuda.Stream.null):
        with current:
            scratch.take("a", (3,), x.dtype, like=x)
            scratch.take("b", (3,), np.float32, like=np.empty(0))
    assert recorded == [0, stream.ptr]


def test_a_stream_stays_until_the_next_call_on_another_one(device):
    """Else another stream could get its address, and be taken for it."""
    import cupy

    scratch, x, stream = SharedScratch(), cupy.zeros(3), cupy.cuda.Stream(non_blocking=True)
    scratch.take("a", (3,), x.dtype, like=x)
    with stream:
        scratch.take("a", (3,), x.dtype, like=x)
    kept, stream = weakref.ref(stream), None
    assert kept() is not None
    scratch.take("a", (3,), x.dtype, like=x)
    assert kept() is None


@eager
def test_memory_that_is_freed_is_not_reused_before_the_last_call_has_ended(device):
    import cupy

    enqueued = threading.Event()

    def body(comm):
        (x, first), (y, second) = arrays_and_streams(cupy, comm)
        with first:
            quantized_allreduce(comm, x)  # allocates
        first.synchronize()
        if comm.rank == 1:
            assert enqueued.wait(20)
        with second:
            out = quantized_allreduce(comm, y)
        comm.scratch.clear()
        with first:
            cupy.zeros(1)
        if comm.rank == 0:
            enqueued.set()
        return out.get(second).tobytes()

    assert run_over_nccl(device, 2, body=body) == [second for _, second in results_on_host(CALLS["quantized"])]


@lazy
def test_tasks_of_a_lane_without_a_stream_keep_their_order_on_several_streams(device):
    import cupy

    def copy(source, target):
        target[...] = source

    x, y, z = cupy.zeros(4), cupy.zeros(4), cupy.zeros(4)
    streams = [cupy.cuda.Stream(non_blocking=True) for _ in range(3)]
    cupy.cuda.get_current_stream().synchronize()
    lane = InlineLane(FakeComm(0))
    with streams[0]:
        x[...] = 1
        lane.submit(copy, x, y)
    with streams[1]:
        lane.submit(copy, y, z)
    with streams[2]:
        lane.wait()
        assert z.get().tolist() == [1] * 4


# Graphs


@eager
def test_a_captured_call_leaves_other_streams_in_order(device):
    """It waits for nothing outside of its graph, and later work still waits for earlier work."""
    import cupy

    graphs = []

    def body(comm):
        (x, first), (y, second), (z, third) = arrays_and_streams(cupy, comm, 3)
        outs = [(cupy.empty(SIZE, np.float32), stream) for stream in (first, third, second)]
        cupy.cuda.get_current_stream().synchronize()
        with first:
            quantized_allreduce(comm, x, out=outs[0][0])
        with second:
            second.begin_capture()
            quantized_allreduce(comm, y, out=outs[2][0])
            graphs.append(second.end_capture())
        with third:
            quantized_allreduce(comm, z, out=outs[1][0])
        second.wait_event(third.record())
        graphs[-1].launch(second)
        return outs

    expected = [[first, third, second] for first, second, third in results_on_host(CALLS["quantized"], 3)]
    assert run_while_rank_1_is_late(device, body) == expected


@lazy
def test_two_streams_of_one_capture_are_in_order_in_its_graph(device):
    import cupy

    def body(comm):
        quantized_allreduce(comm, cupy.asarray(values(comm.rank, 9)))
        (x, first), (y, second) = arrays_and_streams(cupy, comm)
        outs = [cupy.empty(SIZE, np.float32) for _ in range(3)]
        cupy.cuda.get_current_stream().synchronize()
        with first:
            quantized_allreduce(comm, x, out=outs[2])  # the latest call on this stream is not captured
            first.begin_capture()
            second.wait_event(first.record())
            quantized_allreduce(comm, x, out=outs[0])
        with second:
            quantized_allreduce(comm, y, out=outs[1])
        with first:
            quantized_allreduce(comm, x, out=outs[2])
            first.wait_event(second.record())
            graph = first.end_capture()
            graph.launch()
        del graph
        return [out.get(first).tobytes() for out in outs]

    expected = [[first, second, first] for first, second in results_on_host(CALLS["quantized"])]
    assert run_over_nccl(device, 2, body=body) == expected


def test_a_call_beside_the_capture_of_the_last_ones_stream_is_refused(device):
    import cupy

    scratch, x = SharedScratch(), cupy.zeros(3)
    with cupy.cuda.Stream(non_blocking=True) as stream:
        scratch.take("a", (3,), x.dtype, like=x)
        stream.begin_capture()
    with pytest.raises(UnsupportedError, match=r"is being captured in a CUDA graph.*end the capture first"):
        scratch.take("a", (3,), x.dtype, like=x)
    stream.end_capture()
    scratch.take("a", (3,), x.dtype, like=x)
    scratch.clear()


def test_a_scratch_that_was_only_captured_is_cleared(device):
    import cupy

    scratch, x = SharedScratch(), cupy.zeros(3)
    with cupy.cuda.Stream(non_blocking=True) as stream:
        stream.begin_capture()
        scratch.take("a", (3,), x.dtype, like=x)
        stream.end_capture()
    scratch.clear()
