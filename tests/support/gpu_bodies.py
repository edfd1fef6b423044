"""The bodies of tests of NCCL, one call per rank: on threads of the stand-in, and in processes on a GPU.

A body gets a transport of host arrays, and connects NCCL over it.
"""

import contextlib
import threading
import time

import numpy as np
import pytest

import bagua_comm
from bagua_comm import (
    ByteGrad,
    CommAborted,
    CommError,
    CommTimeout,
    Communicator,
    Engine,
    ErrorFeedback,
    Int4,
    MinMaxUInt8,
    Plan,
    Point,
    Quantized,
    TensorSpec,
    TopK,
    kernels,
)
from bagua_comm.execution import lane
from bagua_comm.execution.cuda import device_count, use_device
from bagua_comm.testing import check_transport, run_ranks
from benchmarks.gpu.device import Hold, is_stand_in
from support.device_ranks import over, up, values

HOLD_S = 0.3


def connected(host, **options):
    """A communicator over NCCL; ranks share a device if there are too few."""
    index = host.rank % device_count()
    use_device(index)
    return Communicator([host.dup(), over("nccl", host, **options)], device=index)


@contextlib.contextmanager
def never_waiting():
    """In the body of `with` the host may wait for nothing: it must reach the end while the device is held."""
    if is_stand_in():
        from cuda_on_cpu.machine import running

        with running().forbid_host_sync(this_thread=True):
            yield
        return
    held = Hold()(HOLD_S)
    yield
    assert not held.done, "the host has waited for the device"


@contextlib.contextmanager
def without_memory():
    """In the body of `with`, this thread can allocate no memory on the device."""
    import cupy

    def refuse(*arguments):
        raise MemoryError("the device has no memory left")

    if is_stand_in():
        with kernels.of(cupy.empty(0)).before_launch(refuse):
            yield
        return
    with cupy.cuda.using_allocator(refuse):
        yield


def call_until_it_fails(comm, x, seconds):
    give_up = time.monotonic() + seconds
    while time.monotonic() < give_up:
        comm.allreduce(x)
        time.sleep(0.05)  # sleeps: between calls until one of them fails


def conformance(host):
    import cupy

    with connected(host) as comm:
        check_transport(comm, asarray=cupy.asarray)


def quantized_allreduce_gives_the_bytes_of_the_host(host):
    with connected(host) as comm:
        for dtype in ("float32", "float16", "bfloat16"):
            for codec in (MinMaxUInt8(), MinMaxUInt8.bagua(), bagua_comm.Float16(), bagua_comm.BFloat16()):
                expected = run_ranks(
                    comm.size,
                    lambda c, dtype=dtype, codec=codec: bagua_comm.quantized_allreduce(
                        c, values(c.rank, dtype=dtype), codec=codec, op="avg"
                    ).tobytes(),
                )
                x = up(values(comm.rank, dtype=dtype))
                result = bagua_comm.quantized_allreduce(comm, x, codec=codec, op="avg")
                assert expected[comm.rank] == (x if comm.size == 1 else result).get().tobytes(), (dtype, codec)


def every_call_enqueues_and_returns(host):
    import cupy

    with connected(host) as comm:
        x, out = up(values(comm.rank, (comm.size, 600))), cupy.empty((comm.size, 600), np.float32)
        peer = (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size

        def calls():
            comm.allreduce(x, out=x, op="avg")
            comm.allreduce(x, op="max")
            comm.reduce(x, root=0)
            comm.reduce_scatter(x)
            comm.allgather(x)
            comm.alltoall(x, out=x)
            comm.broadcast(x, root=0)
            comm.sendrecv(x, out, dest=peer[0], source=peer[1])
            bagua_comm.quantized_allreduce(comm, x, out=x, op="avg")

        calls()
        cupy.cuda.get_current_stream().synchronize()
        comm.barrier()
        with never_waiting():
            calls()
        cupy.cuda.get_current_stream().synchronize()


def captured(stream, call):
    """A graph of a call, on `stream`. The call may allocate nothing, not even from CuPy's pool."""
    import cupy

    def refuse(nbytes):
        raise AssertionError(f"{nbytes} bytes of the device are allocated in a capture")

    with stream, contextlib.nullcontext() if is_stand_in() else cupy.cuda.using_allocator(refuse):
        stream.begin_capture(cupy.cuda.runtime.streamCaptureModeThreadLocal)
        try:
            call()
        except BaseException:
            with contextlib.suppress(RuntimeError):
                stream.end_capture()  # else it would forbid this thread to allocate in the next body
            raise
        return stream.end_capture()


class Averaged:
    """An average of a copy of `x` into `y`, as one call."""

    def __init__(self, comm, average, size):
        self.comm, self.mean = comm, average.bind(comm)
        self.x, self.y = up(values(0, size)), up(values(0, size))

    def __call__(self):
        self.y[...] = self.x
        self.mean(self.y)

    def give(self, seed):
        self.x.set(values(self.comm.rank + 10 * seed, self.x.size))

    def bytes(self):
        return self.y.get().tobytes()


CAPTURED = [
    *(Quantized(codec, 0) for codec in (MinMaxUInt8(), MinMaxUInt8(None), MinMaxUInt8.bagua(), Int4())),
    *(TopK(), TopK(whole_below=100_000)),
    ErrorFeedback(Quantized(MinMaxUInt8.bagua()), retain=0.9),
    ErrorFeedback(Quantized(Int4()), decay=0.5, residual_codec=MinMaxUInt8()),
    ErrorFeedback(TopK()),
]
"""Averages that a graph may hold. In one block, more than 8192 elements need two passes."""


def captured_averages_give_the_bytes_of_eager_ones(host):
    import cupy

    with connected(host) as comm:
        stream = cupy.cuda.Stream(non_blocking=True)
        for average in CAPTURED:
            eager, replayed = (Averaged(comm, average, 8200 * comm.size + 1) for _ in range(2))
            for each in (eager, replayed):
                each.give(0)
                each()  # compiles and allocates
            cupy.cuda.get_current_stream().synchronize()
            host.barrier()
            graph = captured(stream, replayed)
            for seed in (1, 2):
                eager.give(seed)
                eager()
                expected = eager.bytes()
                with stream:
                    replayed.give(seed)
                    graph.launch()
                    assert replayed.bytes() == expected, (average, seed)
            del graph


def graphs_of_two_sizes_and_eager_calls_take_turns(host):
    """They share the communicator's memory, which has grown between the first call and its capture."""
    import cupy

    for average in (Quantized(MinMaxUInt8(), 0), Quantized(MinMaxUInt8.bagua(), 0), TopK()):
        with connected(host) as comm:
            stream, other = (cupy.cuda.Stream(non_blocking=True) for _ in range(2))
            small, large, eager = (Averaged(comm, average, n * comm.size) for n in (8200, 12_000, 8200))
            expected = {}
            for each in (eager, small, large):
                each.give(1)
                each()
                expected[each] = each.bytes()
            host.barrier()
            graphs = {each: captured(stream, each) for each in (small, large)}
            with stream:
                eager.give(2)
                for order in ((small, large), (large, small)):
                    for each in order:
                        each.y.fill(0)
                    for each in (*order, order[0]):
                        graphs[each].launch()
                        eager()
                    assert [each.bytes() for each in order] == [expected[each] for each in order], average
                small.y.fill(0)
                eager()
                other.wait_event(stream.record())
                graphs[small].launch(other)
                stream.wait_event(other.record())
                eager()
                assert small.bytes() == expected[small], average
            graphs.clear()


def calls_on_several_streams_give_what_calls_on_one_give(host):
    import cupy

    with connected(host) as comm:
        xs = [up(values(10 * i + comm.rank)) for i in range(8)]
        expected = [bagua_comm.quantized_allreduce(comm, x, op="avg").get().tobytes() for x in xs]
        streams = [cupy.cuda.Stream(non_blocking=True) for _ in xs]
        outs = []
        for x, stream in zip(xs, streams, strict=True):
            with stream:
                outs.append(bagua_comm.quantized_allreduce(comm, x, op="avg"))
        assert expected == [out.get(stream).tobytes() for out, stream in zip(outs, streams, strict=True)]


def a_lane_comes_after_its_caller_and_before_what_follows(host):
    import cupy

    with connected(host) as comm:
        x, y, hold = cupy.zeros(50_000, np.float32), cupy.zeros(50_000, np.float32), Hold()
        for kind in ("stream", "thread"):
            with comm.lane(kind) as side:
                for step in range(1, 4):
                    hold(0.02)
                    x.fill(step)
                    side.submit(side.comm.allreduce, x, out=x)
                    side.wait()
                    y[...] = x
                    x.fill(-1)
                    np.testing.assert_array_equal(y.get(), step * comm.size)


def a_step_of_training_never_waits(host):
    import cupy

    with connected(host) as comm:
        specs = [TensorSpec(name, (size,), "float32") for name, size in (("a", 3000), ("b", 70), ("c", 5000))]
        plan = Plan.pack(specs, bucket_bytes=8192, alignment=32 * comm.size)
        grads = [up(flat) for flat in plan.allocate()]
        with Engine(comm, ByteGrad(), plan, grads) as engine:
            assert isinstance(engine._lane, lane.StreamLane)

            def step(value):
                engine.at(Point.FORWARD)
                for flat in grads:
                    flat.fill(value)
                for spec in specs:
                    engine.ready(spec.name)
                engine.at(Point.BACKWARD)
                engine.at(Point.STEP)

            step(1.0)
            cupy.cuda.get_current_stream().synchronize()
            comm.barrier()
            with never_waiting():
                step(2.0 + comm.rank)
            mean = 2.0 + (comm.size - 1) / 2
            for gradient in plan.cut(grads).values():
                np.testing.assert_allclose(gradient.get(), mean, rtol=1e-6)


def a_call_that_a_peer_never_makes_is_given_up(host):
    import cupy

    comm = connected(host, timeout_s=2.0)
    x = cupy.zeros(3)
    comm.allreduce(x)
    if comm.rank == 0 and comm.size > 1:
        with pytest.raises(CommTimeout, match="allreduce of 24 bytes is not done after"):
            call_until_it_fails(comm, x, 30)
    host.barrier()
    comm.transports[1].abort()


def an_abort_from_another_thread_ends_the_wait(host):
    import cupy

    comm = connected(host)
    x = cupy.zeros(1000)
    comm.allreduce(x)
    cupy.cuda.get_current_stream().synchronize()
    host.barrier()
    if comm.rank == 0 and comm.size > 1:
        threading.Timer(0.5, comm.transports[1].abort).start()
        start = time.monotonic()
        comm.allreduce(x)
        cupy.cuda.get_current_stream().synchronize()  # waits for peers until the abort
        assert time.monotonic() - start < 20
        with pytest.raises(CommAborted, match="this communicator was aborted"):
            comm.allreduce(x)
    host.barrier()
    comm.transports[1].abort()


def a_rank_without_memory_is_an_error_on_all_ranks(host):
    import cupy

    comm = connected(host)
    x = cupy.zeros(1 << 20, np.float32)
    comm.allreduce(x)
    cupy.cuda.get_current_stream().synchronize()
    host.barrier()

    if comm.rank == 0 and comm.size > 1:
        with without_memory(), pytest.raises(MemoryError):
            bagua_comm.quantized_allreduce(comm, x, out=x, op="avg")
    if comm.size > 1:
        with pytest.raises(CommError, match="MemoryError"):
            call_until_it_fails(comm, x, 30)
    host.barrier()
    comm.transports[1].abort()


BODIES = [
    quantized_allreduce_gives_the_bytes_of_the_host,
    every_call_enqueues_and_returns,
    captured_averages_give_the_bytes_of_eager_ones,
    graphs_of_two_sizes_and_eager_calls_take_turns,
    calls_on_several_streams_give_what_calls_on_one_give,
    a_lane_comes_after_its_caller_and_before_what_follows,
    a_step_of_training_never_waits,
    a_call_that_a_peer_never_makes_is_given_up,
    an_abort_from_another_thread_ends_the_wait,
    a_rank_without_memory_is_an_error_on_all_ranks,
]


def bodies_of(ranks):
    """The bodies for this number of ranks. The last makes 900 calls, too many for more than two on one GPU."""
    return [*BODIES, conformance] if ranks <= 2 else BODIES
