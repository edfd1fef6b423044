"""Lanes with a side stream: the order of what the caller and the lane enqueue, whatever the device runs first."""

import itertools
import threading
import time
import weakref

import numpy as np
import pytest
from support.fake_comm import PATIENCE_S, FakeComm

from bagua_comm import ArrayError, CommAborted, CommError, CommTimeout, Communicator, UnsupportedError, trace
from bagua_comm.execution.cuda import DeviceClock, _stream_at, use_address
from bagua_comm.execution.lane import StreamLane, ThreadLane
from bagua_comm.testing import run_ranks
from bagua_comm.trace import DEVICE_SPANS, DeviceSpan, Recorder

each_lane = pytest.mark.parametrize("make", [StreamLane, ThreadLane])
pytestmark = pytest.mark.usefixtures("device")


@pytest.fixture
def cupy(device):
    import cupy

    return cupy


def copy(source, target):
    target[...] = source


def fail(error):
    raise error


# Order


@each_lane
def test_a_task_runs_between_the_callers_work_before_it_and_after_wait(cupy, make):
    x, y, z = (cupy.zeros(4, np.float32) for _ in range(3))
    with make(FakeComm(0)) as lane:
        for step in range(1, 4):
            x[...] = step
            lane.submit(copy, x, y)
            lane.wait()
            z[...] = y
            x[...] = -1
            assert [step] * 4 == z.get().tolist()


@each_lane
def test_tasks_run_in_the_order_in_which_they_were_submitted(cupy, make):
    cells = [cupy.zeros(4, np.float32) for _ in range(10)]
    with make(FakeComm(0)) as lane:
        cells[0][...] = 7
        for source, target in itertools.pairwise(cells):
            lane.submit(copy, source, target)
        lane.wait()
        assert cells[-1].get().tolist() == [7] * 4


@each_lane
def test_a_result_is_there_in_the_order_of_the_stream_that_asks(cupy, make):
    x, other = cupy.zeros(4, np.float32), cupy.cuda.Stream(non_blocking=True)
    with make(FakeComm(0)) as lane:
        x[...] = 5
        future = lane.submit(lambda: x.copy())
        with other:
            doubled = future.result(PATIENCE_S).copy()
            assert doubled.get().tolist() == [5] * 4


@each_lane
def test_wait_on_one_stream_covers_tasks_submitted_on_others(cupy, make):
    streams = [cupy.cuda.Stream(non_blocking=True) for _ in range(3)]
    x, total = cupy.zeros((3, 4), np.float32), cupy.zeros((3, 4), np.float32)
    cupy.cuda.Device().synchronize()
    with make(FakeComm(0)) as lane:
        for stream, row in zip(streams, x, strict=True):
            with stream:
                row[...] = stream.ptr
                lane.submit(copy, row, total[streams.index(stream)])
        lane.wait()
        assert [[float(s.ptr)] * 4 for s in streams] == total.get().tolist()


@each_lane
def test_nothing_makes_the_host_wait_for_the_device(device, cupy, make):
    x, y = cupy.zeros(4, np.float32), cupy.zeros(4, np.float32)
    lane = make(FakeComm(0, tracer=Recorder()))
    with device.forbid_host_sync():
        for _ in range(5):
            lane.submit(copy, x, y)
            future = lane.submit(copy, y, x)
            future.done()
            lane.wait()
            future.result()
    lane.close()


@each_lane
def test_a_future_is_done_when_the_device_is(cupy, make):
    x = cupy.zeros(4, np.float32)
    with make(FakeComm(0)) as lane:
        future = lane.submit(copy, 3, x)
        assert future.exception(PATIENCE_S) is None
        while not future.done():
            pass
        with cupy.cuda.Stream(non_blocking=True):  # which waits for nothing
            assert x.get().tolist() == [3] * 4


def test_a_device_that_works_is_not_done(device, cupy):
    x = cupy.zeros(4, np.float32)
    with StreamLane(FakeComm(0)) as lane:
        future = lane.submit(lambda: [copy(i, x) for i in range(3)])
        assert (device.side == "eager") == future.done()


def test_a_stream_lane_works_at_once_on_the_callers_thread(cupy):
    with StreamLane(FakeComm(0)) as lane:
        assert threading.get_ident() == lane.submit(threading.get_ident).result()


@each_lane
def test_the_callers_stream_stays_current(cupy, make):
    outer, used = cupy.cuda.Stream(), cupy.cuda.Stream()
    seen = []
    with outer, make(FakeComm(0)) as lane:
        used.use()  # which `with stream:` of CuPy would forget
        lane.submit(lambda: seen.append(cupy.cuda.get_current_stream().ptr))
        lane.wait()
        assert used == cupy.cuda.get_current_stream()
    assert not {outer.ptr, used.ptr, 0} & set(seen)
    assert cupy.cuda.get_current_stream().ptr == 0


@each_lane
def test_tasks_run_on_the_communicators_device(device, cupy, make):
    device.count = 2
    cupy.cuda.Device(1).use()
    with make(FakeComm(device=1)) as lane:
        x = lane.submit(cupy.zeros, 3, np.float32).result(PATIENCE_S)
        assert (x.device.id, x.get().tolist()) == (1, [0, 0, 0])


# Memory


@each_lane
def test_arguments_are_kept_until_the_device_has_read_them(cupy, make):
    y = cupy.zeros(4, np.float32)
    with make(FakeComm(0)) as lane:
        x = cupy.zeros(4, np.float32)
        x[...] = 2
        lane.submit(copy, x, y)
        del x  # the pool may now give its memory to the next array on this stream
        again = cupy.zeros(4, np.float32)
        lane.wait()
        assert (y.get().tolist(), again.get().tolist()) == ([2] * 4, [0] * 4)


@each_lane
def test_memory_of_another_stream_is_reused_after_the_lane_too(cupy, make):
    y, other = cupy.zeros(4, np.float32), cupy.cuda.Stream(non_blocking=True)
    cupy.cuda.Device().synchronize()
    with make(FakeComm(0)) as lane:
        with other:
            x = cupy.zeros(4, np.float32)
            x[...] = 2
            lane.submit(copy, x, y)
            del x
        lane.wait()  # on the default stream; the memory goes back to the other one
        with other:
            cupy.zeros(4, np.float32).get()
        assert y.get().tolist() == [2] * 4


@each_lane
def test_arguments_are_released_by_wait(cupy, make):
    x = cupy.zeros(4, np.float32)
    kept = weakref.ref(x)
    with make(FakeComm(0)) as lane:
        future = lane.submit(copy, x, x)
        del x
        assert kept() is not None
        lane.wait()
        assert kept() is None
        assert future.result() is None


@each_lane
def test_tasks_without_a_waiter_are_freed_once_the_device_is_done(cupy, make):
    with make(FakeComm(0)) as lane:
        for _ in range(20):
            future = lane.submit(copy, 1, cupy.zeros(4, np.float32))
            assert future.exception(PATIENCE_S) is None
            while not future.done():
                pass
        assert len(lane._pending) == 1


# Failures and the end


@each_lane
def test_an_error_surfaces_at_wait_and_stops_the_lane(cupy, make):
    error, x, lane = ValueError("in the task"), cupy.zeros(4, np.float32), make(FakeComm(0))
    before = lane.submit(copy, 1, x)
    failed = lane.submit(fail, error)
    behind = lane.submit(copy, 2, x)

    with pytest.raises(ValueError, match="in the task") as caught:
        lane.wait()

    assert caught.value is error
    assert failed.exception() is error
    assert before.exception() is None
    assert type(behind.exception(PATIENCE_S)) is CommAborted
    assert x.get().tolist() == [1] * 4
    with pytest.raises(CommAborted):
        lane.close()
    assert lane.comm.closed == 1


@each_lane
def test_a_result_that_is_an_error_is_raised(make):
    lane = make(FakeComm(0))
    with pytest.raises(KeyError):
        lane.submit(fail, KeyError("no")).result(PATIENCE_S)
    with pytest.raises(KeyError):
        lane.close()


@each_lane
def test_work_of_a_failing_task_still_comes_before_the_callers(cupy, make):
    x, y = cupy.zeros(4, np.float32), cupy.zeros(4, np.float32)

    def half():
        y[...] = x
        raise ValueError("half way")

    lane = make(FakeComm(0))
    x[...] = 3
    lane.submit(half)
    with pytest.raises(ValueError, match="half way"):
        lane.wait()
    x[...] = 4
    assert y.get().tolist() == [3] * 4


def test_an_interrupt_is_not_held_back():
    lane = StreamLane(FakeComm(0))
    with pytest.raises(KeyboardInterrupt):
        lane.submit(fail, KeyboardInterrupt())
    assert lane._failure is not None


@each_lane
def test_close_waits_for_the_device_and_then_closes_the_communicator(cupy, make):
    comm, x = FakeComm(0), cupy.zeros(4, np.float32)
    lane = make(comm)
    lane.submit(copy, 6, x)
    lane.close()
    lane.close()
    assert comm.closed == 1
    with cupy.cuda.Stream(non_blocking=True):  # which waits for nothing
        assert x.get().tolist() == [6] * 4
    with pytest.raises(CommError, match="closed"):
        lane.submit(print)


@each_lane
def test_close_gives_the_memory_of_the_side_stream_back(cupy, make):
    x, pool = cupy.zeros(400, np.uint8), cupy.get_default_memory_pool()
    before = pool.total_bytes()
    with make(FakeComm(0)) as lane:
        lane.submit(lambda: x.copy() is None)
        lane.wait()
        assert pool.total_bytes() == before + 400
    assert pool.total_bytes() == before


@each_lane
def test_a_device_that_is_stuck_makes_close_raise(cupy, make, monkeypatch):
    lane = make(FakeComm(0, timeout_s=0.001))
    lane.submit(copy, 1, cupy.zeros(4, np.float32))
    monkeypatch.setattr("bagua_comm.execution.cuda.passed", lambda event: False)
    with pytest.raises(CommTimeout, match=r"for more than 0\.002 s"):
        lane.close()


@each_lane
def test_a_device_that_has_met_an_error_makes_done_and_close_raise_it_at_once(device, cupy, make):
    device.main = device.side = "lazy"
    lane = make(FakeComm(0))
    future = lane.submit(copy, 1, cupy.zeros(4, np.float32))
    assert future.exception(PATIENCE_S) is None
    device.break_device(0)
    start = time.monotonic()
    with pytest.raises(cupy.cuda.runtime.CUDARuntimeError, match="an illegal memory access was encountered"):
        future.done()
    with pytest.raises(cupy.cuda.runtime.CUDARuntimeError, match="an illegal memory access was encountered"):
        lane.close()
    assert time.monotonic() - start < PATIENCE_S


@each_lane
def test_a_device_that_breaks_while_close_waits_for_it_ends_the_wait(device, cupy, make, monkeypatch):
    device.main = device.side = "lazy"
    lane = make(FakeComm(0))
    lane.submit(copy, 1, cupy.zeros(4, np.float32))
    monkeypatch.setattr(device, "settle", lambda *_, **__: None)  # polling does not make the device go on
    threading.Timer(0.05, device.break_device, [0]).start()
    start = time.monotonic()
    with pytest.raises(cupy.cuda.runtime.CUDARuntimeError, match="an illegal memory access was encountered"):
        lane.close()
    assert time.monotonic() - start < PATIENCE_S


# Which lane a communicator makes


@pytest.mark.parametrize("kind", [None, "thread"])
def test_a_communicator_without_a_device_has_threads_without_streams(kind):
    with Communicator.lane(run_ranks(1, lambda comm: comm)[0], kind) as lane:
        assert type(lane) is ThreadLane
        assert lane._side is None


def test_a_stream_needs_calls_that_only_enqueue():
    def body(comm):
        comm.lane("stream")

    with pytest.raises(UnsupportedError, match='lane: kind is "stream", which needs a device and NCCL; use'):
        run_ranks(2, body)
    with pytest.raises(ArrayError, match="lane: kind is 'streams', expected"):
        run_ranks(2, lambda comm: comm.lane("streams"))


# The timeline


def named(x):
    x[...] = 1


@each_lane
def test_each_task_is_a_span_on_a_row_of_the_device(cupy, make):
    tracer, x = Recorder(), cupy.zeros(4, np.float32)

    def work(step):
        lane.note(step=step)
        with tracer.span("on the host"):
            x[...] = step
            x.get()  # by when it has happened

    with make(FakeComm(0, tracer=tracer)) as lane:
        for step in range(3):
            lane.submit(work, step)
        lane.wait()

    spans = [span for span in tracer.spans() if span.thread == f"device: {lane.name}"]
    assert [("work", {"step": step}) for step in range(3)] == [(span.name, span.args) for span in spans]
    inside = [span for span in tracer.spans() if span.name == "on the host"]
    for outer, inner in zip(spans, inside, strict=True):
        assert outer.start_ns <= outer.end_ns
        assert abs(outer.start_ns - inner.start_ns) < 50e6  # one axis of time, whatever the load


def test_spans_that_have_not_ended_are_reported_later(device, cupy):
    tracer, x = Recorder(), cupy.zeros(4, np.float32)
    with StreamLane(FakeComm(0, tracer=tracer)) as lane:
        lane.submit(named, x)
        if device.side == "lazy":
            assert tracer.spans() == []
        lane.wait()
        x.get()
        assert [span.name for span in tracer.spans()] == ["named"]
        assert [span.name for span in tracer.spans()] == ["named"]


@each_lane
def test_without_a_recorder_no_event_takes_the_time(cupy, make, monkeypatch):
    timed, x = [], cupy.zeros(4, np.float32)

    class Event(cupy.cuda.Event):
        def __init__(self, disable_timing=False):
            super().__init__(disable_timing=disable_timing)
            if not disable_timing:
                timed.append(self)

    monkeypatch.setattr(cupy.cuda, "Event", Event)
    with make(FakeComm(0, tracer=trace.NULL)) as lane:
        lane.submit(named, x)
        lane.wait()
    assert timed == []
    with make(FakeComm(0, tracer=Recorder())) as lane:
        lane.submit(named, x)
        lane.wait()
    assert len(timed) == 2


def test_spans_of_the_device_are_bounded(cupy):
    tracer, clock = Recorder(), DeviceClock(0)
    for i in range(DEVICE_SPANS + 5):
        DeviceSpan(tracer, clock, "span", "row").end(i=i)
    cupy.cuda.Device().synchronize()
    assert list(range(5, DEVICE_SPANS + 5)) == [span.args["i"] for span in tracer.spans()]


# Streams of other libraries


def test_the_handle_of_a_stream_is_made_once_for_each_address(cupy, monkeypatch):
    _stream_at.cache_clear()  # addresses of another machine
    stream, other, made = cupy.cuda.Stream(), cupy.cuda.Stream(), []
    from_external = cupy.cuda.Stream.from_external
    monkeypatch.setattr(
        cupy.cuda.Stream, "from_external", lambda obj: made.append(obj.address) or from_external(obj)
    )
    for _ in range(3):
        for each in (stream, other):
            with use_address(each.ptr):
                assert each == cupy.cuda.get_current_stream()
    assert made == [stream.ptr, other.ptr]


def test_default_streams_of_two_devices_have_a_handle_each_though_one_address(cupy):
    assert _stream_at(0, 0) is _stream_at(0, 0) is not _stream_at(0, 1)


def test_the_stream_at_an_address_is_current_in_the_body(cupy):
    stream = cupy.cuda.Stream()
    with use_address(stream.ptr):
        assert stream == cupy.cuda.get_current_stream()
        with use_address(0):
            assert cupy.cuda.get_current_stream().ptr == 0
        assert stream == cupy.cuda.get_current_stream()
    assert cupy.cuda.get_current_stream().ptr == 0
