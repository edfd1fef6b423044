"""The file of a timeline, as `Communicator.trace` writes it, and as Perfetto reads it."""

import json
import threading

import numpy as np
import pytest

from bagua_comm import ArrayError
from bagua_comm.testing import run_ranks
from bagua_comm.timeline.chrome import chrome_trace
from bagua_comm.trace import Span, Value


def metadata(kind, pid, tid, **args):
    return {"ph": "M", "name": kind, "pid": pid, "tid": tid, "args": args}


def test_chrome_trace_by_hand():
    spans = [
        [Span("encode", "main", 5_000, 7_500, {"bucket": 0}), Span("send", "lane", 6_000, 6_250, {})],
        [Span("encode", "main", 4_000, 4_001, {})],
    ]
    values = [[Value("loss", 6_000, 0.5), Value("loss", 8_000, float("nan"))], []]
    assert chrome_trace(spans, values) == {
        "otherData": {"format": "bagua_comm timeline", "version": 1, "ranks": 2, "start_ns": 4_000},
        "displayTimeUnit": "ms",
        "traceEvents": [
            metadata("process_name", 1000, 1000, name="rank 0"),
            metadata("process_sort_index", 1000, 1000, sort_index=0),
            metadata("thread_name", 1000, 1001, name="main"),
            metadata("thread_sort_index", 1000, 1001, sort_index=1),
            metadata("thread_name", 1000, 1002, name="lane"),
            metadata("thread_sort_index", 1000, 1002, sort_index=2),
            # Microseconds, from the start of rank 1's span on.
            {"ph": "X", "name": "encode", "pid": 1000, "tid": 1001, "ts": 1.0, "dur": 2.5, "args": {"bucket": 0}},
            {"ph": "X", "name": "send", "pid": 1000, "tid": 1002, "ts": 2.0, "dur": 0.25, "args": {}},
            {"ph": "C", "name": "loss", "pid": 1000, "ts": 2.0, "args": {"value": 0.5}},
            {"ph": "i", "s": "p", "tid": 1000, "name": "loss", "pid": 1000, "ts": 4.0, "args": {"value": "nan"}},
            metadata("process_name", 2000, 2000, name="rank 1"),
            metadata("process_sort_index", 2000, 2000, sort_index=1),
            metadata("thread_name", 2000, 2001, name="main"),
            metadata("thread_sort_index", 2000, 2001, sort_index=1),
            {"ph": "X", "name": "encode", "pid": 2000, "tid": 2001, "ts": 0.0, "dur": 0.001, "args": {}},
        ],
    }


def test_chrome_trace_of_nothing():
    names = [event["name"] for event in chrome_trace([[], []])["traceEvents"]]
    assert names == ["process_name", "process_sort_index"] * 2
    assert chrome_trace([])["traceEvents"] == []


def test_tids_of_many_threads_are_distinct_and_no_pids():
    spans = [[Span("work", f"thread {i}", i, i + 1, {}) for i in range(n)] for n in (1500, 3, 0)]
    events = chrome_trace(spans)["traceEvents"]
    pids = [event["pid"] for event in events if event["name"] == "process_name"]
    tids = [event["tid"] for event in events if event["name"] == "thread_name"]
    assert len({*pids, *tids}) == len(pids) + len(tids) == 1506


def test_spans_that_overlap_have_rows_of_their_own():
    times = [(0, 10), (2, 4), (4, 10), (9, 12), (11, 13), (12, 13)]
    spans = [Span(str(i), "main", *time, {}) for i, time in enumerate(times)]
    events = chrome_trace([spans])["traceEvents"]
    rows = {event["tid"]: event["args"]["name"] for event in events if event["name"] == "thread_name"}
    found = {event["name"]: rows[event["tid"]] for event in events if event["ph"] == "X"}
    assert found == {"0": "main", "1": "main", "2": "main", "3": "main, overlapping", "4": "main", "5": "main"}


def test_a_communicators_trace_is_json_with_a_process_per_rank(tmp_path):
    path = tmp_path / "trace.json"

    def body(comm):
        comm.allreduce(np.ones(4), op="avg")
        with comm.lane() as lane:
            lane.submit(lane.comm.broadcast, np.ones(2), root=0)
            lane.wait()
        comm.trace(path)
        assert path.exists()  # on every rank, when the call returns

    run_ranks(3, body)

    events = json.loads(path.read_text())["traceEvents"]
    threads = {(e["pid"], e["tid"]): e["args"]["name"] for e in events if e["name"] == "thread_name"}
    ranks = {e["pid"]: int(e["args"]["name"][5:]) for e in events if e["name"] == "process_name"}
    calls = {rank: [] for rank in range(3)}
    for event in events:
        if event["ph"] == "X":
            assert event["ts"] >= 0
            assert event["dur"] >= 0
            calls[ranks[event["pid"]]].append((event["name"], threads[event["pid"], event["tid"]].split("-")[0]))
    for rank in range(3):
        assert calls[rank] == [("allreduce", f"rank {rank}"), ("dup", f"rank {rank}"), ("broadcast", "lane")]
    first = next(event for event in events if event["name"] == "allreduce")
    assert first["args"] == {"op": "avg", "dtype": "float64", "bytes": 32, "wire_bytes": 48}


# What cannot be written


class Unprintable:
    def __str__(self):
        raise ZeroDivisionError

    __repr__ = __str__


def deep(levels):
    nested = []
    for _ in range(levels):
        nested = [nested]
    return nested


LOOP = {}
LOOP["itself"] = LOOP

BAD_SPANS = {
    "itself": {"loop": LOOP},
    "a key": {"keys": {(1, 2): 3}},
    "depth": {"deep": deep(100_000)},
    "no text": {"object": Unprintable()},
}


@pytest.mark.parametrize("name", BAD_SPANS)
@pytest.mark.parametrize("rank", [0, 1])
def test_a_span_that_json_cannot_hold_is_an_error_that_names_the_file_on_all_ranks(tmp_path, name, rank):
    def body(comm):
        if comm.rank == rank:
            comm.tracer.add("span", 0, 1, BAD_SPANS[name])
        with pytest.raises(ArrayError, match=rf"trace\.json.*rank {rank} has a span that JSON") as caught:
            comm.trace(tmp_path / "trace.json")
        comm.barrier()
        return str(caught.value)

    assert len(set(run_ranks(2, body, timeout_s=5))) == 1
    assert list(tmp_path.iterdir()) == []


def test_what_cannot_be_pickled_is_written_as_text(tmp_path):
    def body(comm):
        comm.tracer.add("span", 0, 1, {"lock": threading.Lock(), "array": np.ones(2), "function": lambda: 0})
        comm.trace(tmp_path / "trace.json")

    run_ranks(2, body, timeout_s=5)
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    assert [event["args"]["array"] for event in events if event["name"] == "span"] == ["[1. 1.]"] * 2


@pytest.mark.parametrize(
    "name",
    ["a\0b", ".", "", "x" * 5000, "\ud800", None, 3, b"trace.json", ["trace.json"], object(), 1.5],
    ids=lambda name: repr(name)[:20],
)
def test_a_path_that_cannot_be_written_is_an_error_on_all_ranks(tmp_path, monkeypatch, name):
    monkeypatch.chdir(tmp_path)

    def body(comm):
        with pytest.raises((OSError, ArrayError)) as caught:
            comm.trace(name)
        assert (str(name) or "''")[:10].encode("unicode_escape").decode() in str(caught.value)
        comm.barrier()
        return type(caught.value), str(caught.value)

    assert len(set(run_ranks(2, body, timeout_s=5))) == 1
    assert list(tmp_path.iterdir()) == []
