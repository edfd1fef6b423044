"""Spans, numbers and counters, and the tools that show them."""

import contextlib
import json
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import numpy as np
import pytest

from bagua_comm import (
    ArrayError,
    CommError,
    Communicator,
    Engine,
    GradientAllReduce,
    Plan,
    Point,
    TensorSpec,
    trace,
)
from bagua_comm.execution.cuda import NvtxRanges
from bagua_comm.testing import run_ranks
from bagua_comm.timeline.chrome import chrome_trace
from bagua_comm.trace import Counter, Counters, Recorder
from bagua_comm.transports import LocalTransport


def names(recorder):
    return [span.name for span in recorder.spans()]


# Recorder


def test_a_ring_keeps_the_last_spans_oldest_first():
    recorder = Recorder(capacity=3)
    for name in "abcde":
        recorder.add(name, 0, 1, {})
    assert names(recorder) == ["c", "d", "e"]


def test_span_times_the_body_of_a_with_statement():
    recorder = Recorder()
    before = time.perf_counter_ns()
    with recorder.span("encode", bucket=3):
        inside = time.perf_counter_ns()
    after = time.perf_counter_ns()

    (span,) = recorder.spans()

    shift = time.time_ns() - time.perf_counter_ns()
    assert (span.name, span.args) == ("encode", {"bucket": 3})
    assert span.start_ns <= span.end_ns
    assert span.end_ns - span.start_ns <= after - before
    assert abs(span.start_ns - shift - inside) < 10**9  # the same instant, since the epoch


def test_times_keep_their_differences():
    recorder = Recorder()
    recorder.add("a", 1000, 1500, {})
    recorder.add("b", 1600, 1601, {})
    a, b = recorder.spans()
    assert (a.end_ns - a.start_ns, b.start_ns - a.end_ns, b.end_ns - b.start_ns) == (500, 100, 1)


def test_nested_spans_are_kept_as_they_end():
    recorder = Recorder()
    with recorder.span("outer"), recorder.span("inner"):
        pass
    assert names(recorder) == ["inner", "outer"]


def test_a_failure_is_named_in_its_span_and_raised():
    recorder = Recorder()
    with pytest.raises(ZeroDivisionError), recorder.span("divide", by=0):
        1 / 0  # noqa: B018
    assert [span.args for span in recorder.spans()] == [{"by": 0, "error": "ZeroDivisionError"}]


def test_spans_know_their_thread():
    recorder = Recorder()

    def work():
        for _ in range(100):
            with recorder.span("work"):
                pass

    threads = [threading.Thread(target=work, name=f"worker {i}") for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)

    found = [span.thread for span in recorder.spans()]
    assert {f"worker {i}": 100 for i in range(4)} == {name: found.count(name) for name in found}


# Numbers


def test_numbers_have_their_times_and_the_last_are_kept():
    recorder = Recorder(capacity=2)
    before = time.time_ns()
    for number in (3, 2.5, 2):
        recorder.value("loss", number)
    values = recorder.values()
    assert [(value.name, value.number) for value in values] == [("loss", 2.5), ("loss", 2)]
    assert before - 10**8 < values[0].time_ns <= values[1].time_ns < time.time_ns() + 10**8


@pytest.mark.parametrize("number", ["low", None, [1, 2]])
def test_a_number_that_is_none_is_an_error_on_all_ranks_that_names_the_rank(tmp_path, number):
    def body(comm):
        if comm.rank == 1:
            comm.tracer.value("loss", number)
        with pytest.raises(ArrayError, match="rank 1 has a span that JSON cannot hold"):
            comm.trace(tmp_path / "trace.json")

    run_ranks(2, body, timeout_s=5)


# The null tracer


def test_the_null_tracer_runs_the_body_and_hides_no_error():
    ran = []
    with trace.NULL.span("quiet", bytes=1):
        ran.append("body")
    trace.NULL.value("loss", 1.0)
    with pytest.raises(KeyError), trace.NULL.span("loud"):
        raise KeyError
    assert ran == ["body"]


def test_a_communicator_with_the_null_tracer_keeps_no_spans(tmp_path):
    comm = Communicator([LocalTransport()], tracer=trace.NULL)
    assert comm.allreduce(np.ones(3)).tolist() == [1, 1, 1]
    comm.trace(tmp_path / "trace.json")
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    assert [event["ph"] for event in events] == ["M", "M"]  # the name and the place of rank 0


# Counters


def test_counters_add_up_per_operation_and_in_total():
    counters = Counters()
    counters["allreduce"].add(8, 12)
    counters["allreduce"].add(80, 120)
    counters["barrier"].add(0, 2)
    assert counters["allreduce"] == Counter(calls=2, payload_bytes=88, wire_bytes=132)
    assert counters["barrier"] == Counter(calls=1, payload_bytes=0, wire_bytes=2)
    assert counters.total() == Counter(calls=3, payload_bytes=88, wire_bytes=134)
    assert list(counters.by_operation) == ["allreduce", "barrier"]


def test_a_total_is_a_snapshot():
    counters = Counters()
    before = counters.total()
    counters["send"].add(1, 1)
    assert before == Counter()
    assert counters.total() == Counter(1, 1, 1)


def test_two_counters_share_nothing():
    a, b = Counters(), Counters()
    a["send"].add(1, 1)
    assert b.by_operation == {}


# What a device does


class FakeClock:
    """Events are the times at which they happen; `now` is the present."""

    def __init__(self):
        self.now = 0

    def times(self, events):
        return [event if event <= self.now else None for event in events]


def test_a_span_of_a_device_has_its_row_and_its_time_once_it_has_ended():
    recorder, clock = Recorder(), FakeClock()
    recorder.add_on_device("exchange", "device: lane", 100, 250, {"bucket": 1}, clock)
    clock.now = 200
    assert recorder.spans() == []
    clock.now = 250
    for _ in range(2):
        (span,) = recorder.spans()
        assert (span.name, span.thread, span.args) == ("exchange", "device: lane", {"bucket": 1})
        assert span.end_ns - span.start_ns == 150


def test_spans_of_threads_and_devices_are_reported_in_the_order_of_their_ends():
    recorder, clock, other_clock = Recorder(), FakeClock(), FakeClock()
    clock.now = other_clock.now = 1000
    recorder.add_on_device("late", "device", 0, 900, {}, clock)
    recorder.add("early", 0, 100, {})
    recorder.add_on_device("between", "other device", 0, 500, {}, other_clock)
    assert names(recorder) == ["early", "between", "late"]


def test_no_more_spans_of_devices_wait_than_the_ring_is_long():
    recorder, clock = Recorder(capacity=3), FakeClock()
    for end in range(5):
        recorder.add_on_device("exchange", "device", 0, end, {}, clock)
    clock.now = 10
    assert [span.end_ns - span.start_ns for span in recorder.spans()] == [2, 3, 4]


def test_a_device_is_a_row_of_the_chrome_trace():
    recorder, clock = Recorder(), FakeClock()
    recorder.add("exchange", 0, 100, {})
    clock.now = 300
    recorder.add_on_device("exchange", "device: lane-0", 100, 300, {}, clock)
    events = chrome_trace([recorder.spans()])["traceEvents"]
    rows = {event["args"]["name"]: event["tid"] for event in events if event["name"] == "thread_name"}
    (on_device,) = [e for e in events if e["ph"] == "X" and e["tid"] == rows["device: lane-0"]]
    assert (on_device["ts"], on_device["dur"]) == (0.1, 0.2)


# Other tools


class Listener:
    """Writes down where spans begin and end, and on which thread."""

    def __init__(self):
        self.told = []
        self.on = True

    def active(self):
        return self.on

    @contextlib.contextmanager
    def range(self, name, args):
        thread = threading.current_thread().name.split("-")[0]
        self.told.append((thread, "begin", trace.label(name, args)))
        yield
        self.told.append((thread, "end", name))


@pytest.fixture
def listener():
    listener = Listener()
    trace.listen(listener)
    yield listener
    trace.ignore(listener)


def test_a_listener_gets_calls_and_exchanges_on_their_threads(listener):
    def body(comm):
        plan = Plan.pack([TensorSpec("x", (8,), "float32")])
        with Engine(comm, GradientAllReduce(), plan, plan.allocate()) as engine:
            listener.told.clear()
            engine.ready("x")
            engine.at(Point.BACKWARD)
            return list(listener.told)

    (told,) = run_ranks(1, body)
    assert [each for each in told if each[0] == "lane"] == [
        ("lane", "begin", "bagua_comm: exchange bucket=0 bytes=32"),
        ("lane", "begin", "bagua_comm: allreduce bytes=32"),
        ("lane", "end", "allreduce"),
        ("lane", "end", "exchange"),
    ]
    assert [each for each in told if each[0] == "rank 0"] == [
        ("rank 0", "begin", "bagua_comm: wait for exchanges"),
        ("rank 0", "end", "wait for exchanges"),
    ]


def test_a_listener_gets_the_end_of_a_call_that_fails(listener):
    class Failing(LocalTransport):
        def allreduce(self, *_):
            raise CommError("no")

    comm = Communicator([Failing()], tracer=trace.NULL)
    with pytest.raises(CommError):
        comm.allreduce(np.ones(3))
    assert [each[1:] for each in listener.told] == [
        ("begin", "bagua_comm: allreduce bytes=24"),
        ("end", "allreduce"),
    ]


def test_a_listener_that_is_not_active_or_ignored_gets_nothing(listener):
    comm = Communicator([LocalTransport()])
    listener.on = False
    comm.allreduce(np.ones(3))
    listener.on = True
    trace.listen(listener)  # a second time
    trace.ignore(listener)
    comm.allreduce(np.ones(3))
    assert listener.told == []
    assert listener not in trace.listeners


def test_only_the_active_listeners_are_called(listener):
    second = Listener()
    trace.listen(second)
    listener.on = False
    try:
        Communicator([LocalTransport()]).barrier()
    finally:
        trace.ignore(second)
    assert (len(listener.told), len(second.told)) == (0, 2)


@pytest.mark.parametrize("when", ["begin", "end"])
def test_a_listener_that_fails_does_not_end_the_call(when):
    class Broken(Listener):
        def range(self, name, args):
            if when == "begin":
                raise ZeroDivisionError
            return self.failing_at_its_end()

        @contextlib.contextmanager
        def failing_at_its_end(self):
            yield
            raise ZeroDivisionError

    broken, comm = Broken(), Communicator([LocalTransport()])
    trace.listen(broken)
    try:
        with pytest.warns(RuntimeWarning, match="ZeroDivisionError"):
            assert comm.allreduce(np.ones(2)).tolist() == [1, 1]
        assert broken not in trace.listeners
        trace.listen(broken)
        with pytest.raises(RuntimeWarning):  # the suite makes an error of each warning
            comm.barrier()
        with ThreadPoolExecutor(1) as other:  # the communicator is free for another thread
            other.submit(comm.barrier).result(30)
    finally:
        trace.ignore(broken)


def test_nvtx_ranges_are_pushed_and_popped_by_cupy(monkeypatch):
    pushed = []
    nvtx = SimpleNamespace(RangePush=pushed.append, RangePop=lambda: pushed.append("pop"))
    ranges, recorder = NvtxRanges(), Recorder()
    monkeypatch.delitem(sys.modules, "cupy", raising=False)
    trace.listen(ranges)
    try:
        with recorder.span("exchange", bucket=1, bytes=8):
            pass  # CuPy is not imported
        monkeypatch.setitem(sys.modules, "cupy", SimpleNamespace(cuda=SimpleNamespace(nvtx=nvtx)))
        with pytest.raises(KeyError), recorder.span("exchange", bucket=2, bytes=8):
            raise KeyError
    finally:
        trace.ignore(NvtxRanges())
    assert pushed == ["bagua_comm: exchange bucket=2 bytes=8", "pop"]
    assert ranges not in trace.listeners


# Counters for other tools


def test_counters_as_plain_numbers():
    def body(comm):
        comm.allreduce(np.ones(4), op="avg")
        comm.barrier()
        comm.barrier()
        return comm.counters.as_dict()

    numbers = run_ranks(2, body)[0]
    seconds = {name: numbers.pop(name) for name in list(numbers) if name.endswith("/seconds")}
    assert numbers == {
        "allreduce/calls": 1,
        "allreduce/payload_bytes": 32,
        "allreduce/wire_bytes": 32,
        "barrier/calls": 2,
        "barrier/payload_bytes": 0,
        "barrier/wire_bytes": 2,
        "total/calls": 3,
        "total/payload_bytes": 32,
        "total/wire_bytes": 34,
    }
    assert seconds.keys() == {"allreduce/seconds", "barrier/seconds", "total/seconds"}
    assert 0 < seconds["allreduce/seconds"] < seconds["total/seconds"]
    assert seconds["total/seconds"] == pytest.approx(seconds["allreduce/seconds"] + seconds["barrier/seconds"])
    json.dumps(numbers)


def test_the_time_of_a_call_is_counted():
    class Slow(LocalTransport):
        def barrier(self):
            end_ns = time.perf_counter_ns() + 3_000_000
            while time.perf_counter_ns() < end_ns:
                pass

    comm = Communicator([Slow()])
    comm.barrier()
    comm.barrier()
    assert 0.006 <= comm.counters["barrier"].seconds < 10
    assert comm.counters.total().time_ns == comm.counters["barrier"].time_ns
