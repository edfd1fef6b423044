"""The benchmark of the collectives: what it prints and writes, and that it notices what is wrong."""

import json
import threading
from dataclasses import replace

import numpy as np
import pytest

from bagua_comm.testing import run_ranks
from benchmarks import bench
from benchmarks.bench import checking, timing
from benchmarks.collectives import cases
from benchmarks.collectives import report as reports
from benchmarks.collectives import run as collectives


def forms(record):
    return [form for result in record["results"] for form in result["forms"].values()]


@pytest.mark.parametrize(
    ("name", "factor"),
    [
        ("allreduce", 1.5),
        ("allgather", 0.75),
        ("reduce_scatter", 0.75),
        ("alltoall", 0.75),
        ("broadcast", 1),
        ("reduce", 1),
    ],
)
def test_bus_factors_on_four_ranks_are_those_of_nccl_tests(name, factor):
    assert factor == cases.EXACT[name].bus_factor(4)


def test_wrong_elements_are_counted():
    expected = np.array([1, 2, 3, 4])

    assert checking.count_wrong(expected, expected) == 0
    assert checking.count_wrong(np.array([1, 2, 4, 3]), expected) == 2
    assert checking.count_wrong(np.array([1.0, np.nan, 3.0, 4.0]), expected) == 1
    assert checking.count_wrong(np.array([1, 2, 3]), expected) == 4
    assert checking.count_wrong(None, expected) == 4


def test_relative_error():
    expected = np.array([3.0, 4.0])

    assert checking.relative_error(expected.astype(np.float32), expected) == 0
    assert checking.relative_error(np.array([3.0, 5.0], np.float32), expected) == pytest.approx(0.2)
    assert np.isnan(checking.relative_error(np.array([3.0, np.nan]), expected))
    assert checking.relative_error(None, expected) == np.inf


def test_wrong_elements_are_summed_over_ranks_and_come_from_the_worst_call():
    def body(comm):
        results = [np.array([7, 7]), np.array([7, 7]), np.array([7 + comm.rank, 8])]  # warm-up first
        call = timing.Call(lambda: results.pop(0), lambda: None, np.array([7, 7]))
        (measured,) = timing.measure(comm, [call], barrier=comm.barrier, warmup=1, iterations=2)
        return measured.fault, measured.seconds.shape

    # One element is wrong on rank 0, both are on ranks 1 and 2.
    assert run_ranks(3, body) == [(5, (2,))] * 3


def test_time_is_the_slowest_ranks(monkeypatch):
    now = {0: [0.0, 1.0], 1: [10.0, 15.0]}

    def body(comm):
        call = timing.Call(lambda: None, lambda: None, None)
        (measured,) = timing.measure(comm, [call], barrier=comm.barrier, warmup=0, iterations=1)
        return measured.seconds.tolist()

    class Clock:
        @staticmethod
        def perf_counter():
            return now[int(threading.current_thread().name.split()[-1])].pop(0)

    monkeypatch.setattr(timing, "time", Clock)
    assert run_ranks(2, body) == [[5.0], [5.0]]


OPS = [("bfloat16", "avg"), ("int8", "avg"), ("int8", "prod"), ("float32", "prod")]


def run_case(comm, case, *argv):
    options = collectives.parse_arguments(["-e", "512", "-n", "2", "-w", "0", *argv])
    return collectives.run_case(collectives.World(comm, {}), case, options)


@pytest.mark.parametrize(
    ("name", "dtype", "op"),
    [
        *((name, dtype, "sum") for name in cases.EXACT for dtype in ("float32", "bfloat16", "int8")),
        *((name, *each) for name, case in cases.EXACT.items() if case.reduces for each in OPS),
    ],
)
def test_every_case_is_right_on_three_ranks(name, dtype, op):
    def body(comm):
        return run_case(comm, cases.EXACT[name], "-d", dtype, "-o", op, "-r", "2")

    for results in run_ranks(3, body):
        assert len(results) == 4
        assert all(form["wrong"] == 0 for form in forms({"results": results}))


def test_a_deliberately_wrong_collective_fails(capsys):
    def off_by_one(comm, s, x, out):
        comm.allreduce(x, out, op=s.op)
        out[comm.rank] += 1
        return out

    wrong = replace(cases.ALLREDUCE, ours=off_by_one)
    results = run_ranks(2, lambda comm: run_case(comm, wrong, "-b", "512"))

    assert [form["wrong"] for form in forms({"results": results[1]})] == [2, 2]
    assert "# Out of bounds values : 4 FAILED" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("operation", "nbytes", "label", "ours", "gloo", "expected"),
    [
        ("allreduce", 1 << 20, "1gbit", [0.116, 0.117, 0.115], [0.11, 0.12, 0.1], "2 of 3"),
        ("allreduce", 1 << 20, "1gbit", [0.117], [0.121], "0 of 1"),  # gloo was faster than the line
        ("allreduce", 1 << 20, "10gbit", [0.3, 0.3], [0.3, 0.4], "1 of 2"),
        ("quantized_allreduce", 8 << 20, "1gbit", [0.37, 0.35], [0.1, 0.1], "1 of 2"),
        ("quantized_allreduce", 2 << 20, "1gbit", [0.36], [0.1], "-"),  # no goal
        ("allreduce", 1 << 20, "1gbit", [0.117], [], "-"),
    ],
)
def test_the_report_counts_the_rounds_that_reach_the_goal(operation, nbytes, label, ours, gloo, expected):
    found = {"ours": ours, "gloo": gloo} if gloo else {"ours": ours}
    assert reports.reached(operation, nbytes, label, found) == expected


def test_a_wrong_result_has_no_report(tmp_path, capsys):
    record = json.loads((bench.RESULTS / "network-1gbit.json").read_text())
    record["results"][0]["forms"]["out-of-place"]["wrong"] = 1
    (tmp_path / "wrong.json").write_text(json.dumps(record))
    assert reports.main([str(tmp_path / "wrong.json"), "--out", str(tmp_path / "network")]) == 2
    assert "allreduce of 524288 bytes: the result of ours is wrong" in capsys.readouterr().err
