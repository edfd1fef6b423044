"""The benchmark of the collectives: what it prints and writes, and that it notices what is wrong."""

import argparse
import doctest
import json
import os
import subprocess
import sys
import threading
from dataclasses import replace

import numpy as np
import pytest
from support import needs

from bagua_comm.launch.mpirun import find_mpirun
from bagua_comm.testing import run_ranks
from benchmarks import bench
from benchmarks.bench import ROOT, arguments, checking, named, record, report, table, timing
from benchmarks.collectives import cases, rivals
from benchmarks.collectives import report as reports
from benchmarks.collectives import run as collectives

NCCL_TESTS_COLUMNS = "size count type redop root" + 2 * " time algbw busbw #wrong"
NCCL_TESTS_UNITS = "(B) (elements)" + 2 * " (us) (GB/s) (GB/s)"


def run(*args, ranks=None):
    """Run the benchmark on one rank without mpirun, or on `ranks` with it; returns what it printed."""
    launcher = ["-m", "bagua_comm", "run", "-n", str(ranks)] if ranks else []
    inherited = {k: v for k, v in os.environ.items() if not k.startswith(("OMPI_COMM", "PMI"))}
    result = subprocess.run(
        [sys.executable, *launcher, "-m", "benchmarks.collectives", *map(str, args)],
        cwd=ROOT,
        env={**inherited, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert result.returncode == 0, result.stderr
    return result.stdout.splitlines()


def rows(lines):
    return [line.split() for line in lines if not line.startswith("#")]


def comments(lines):
    return [" ".join(line[1:].split()) for line in lines if line.startswith("#")]


def forms(record):
    return [form for result in record["results"] for form in result["forms"].values()]


# Parts ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("text", "nbytes"), [("8", 8), ("4K", 4096), ("64M", 67108864), ("1g", 1 << 30)])
def test_sizes_take_suffixes(text, nbytes):
    assert nbytes == arguments.parse_size(text)


@pytest.mark.parametrize("text", ["", "K", "0", "-8", "1.5K", "8B", "²"])
def test_other_sizes_are_refused(text):
    with pytest.raises(argparse.ArgumentTypeError, match="expected for example 8, 4K"):
        arguments.parse_size(text)


def test_sweep_ends_at_the_largest_size():
    assert arguments.sweep(8, 128, 4) == [8, 32, 128]
    assert arguments.sweep(8, 127, 4) == [8, 32]


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


def test_examples_in_docstrings():
    for module in (arguments, checking, collectives, named, record, report, reports, table, timing):
        assert doctest.testmod(module, optionflags=doctest.NORMALIZE_WHITESPACE).failed == 0


def test_unsuitable_arguments_are_refused(capsys):
    for argv, message in [
        (["allgather", "alreduce"], "there is no operation 'alreduce'"),
        (["allreduce", "-d", "float32", "-o", "band"], "there is no op='band' for float32"),
        (["quantized_allreduce", "-d", "int32"], "cannot code int32"),
        (["quantized_allreduce", "-o", "max"], "only sum and avg"),
        (["allreduce", "--beside", "gloo", "-d", "int8"], "gloo adds up float32 and float64 here, not int8"),
        (["allreduce", "--beside", "nccl"], "there is no rival 'nccl'; expected one of mpi4py, gloo"),
        (["broadcast", "--forms", "out-of-place"], "broadcast: it has no out-of-place form"),
    ]:
        with pytest.raises(SystemExit):
            collectives.parse_arguments(argv)
        assert message in capsys.readouterr().err


def test_without_operations_all_run_that_the_dtype_allows():
    assert [*cases.EXACT, "quantized_allreduce"] == collectives.parse_arguments([]).operations
    assert [*cases.EXACT] == collectives.parse_arguments(["-d", "int32"]).operations


# Checking ---------------------------------------------------------------------------------------------


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


def run_case(comm, case, *argv):
    options = collectives.parse_arguments(["-e", "512", "-n", "2", "-w", "0", *argv])
    return collectives.run_case(collectives.World(comm, {}), case, options)


@pytest.mark.parametrize("name", cases.EXACT)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int8"])
@pytest.mark.parametrize("op", ["sum", "avg", "prod"])
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


def test_a_call_that_does_nothing_is_wrong_everywhere():
    idle = replace(cases.ALLGATHER, ours=lambda comm, s, x, out: out, forms=("out-of-place",))
    (result,) = run_ranks(1, lambda comm: run_case(comm, idle, "-b", "512"))[0]

    assert result["forms"]["out-of-place"]["wrong"] == 128


# One rank, without mpirun -----------------------------------------------------------------------------


def test_one_rank_prints_the_columns_of_nccl_tests_and_writes_json(tmp_path):
    path = tmp_path / "one.json"
    lines = run("-b", 8, "-e", 512, "-f", 8, "-n", 2, "-w", 1, "--json", path)
    said = comments(lines)

    assert sum(line.startswith(NCCL_TESTS_COLUMNS) for line in said) == len(cases.EXACT)
    assert sum(line.startswith(NCCL_TESTS_UNITS) for line in said) == len(cases.EXACT) + 1
    assert said.count("Out of bounds values : 0 OK") == len(cases.EXACT) + 1
    assert sum(line.startswith("Avg bus bandwidth : ") for line in said) == len(cases.EXACT) + 1
    assert rows(lines)[0][:5] == ["8", "2", "float32", "sum", "-1"]
    assert [rows(lines)[0][i] for i in (8, 12)] == ["0", "0"]
    assert "-" in rows(lines)[0]  # mpi4py is absent

    record = json.loads(path.read_text())
    assert list(record) == ["benchmark", "machine", "versions", "ranks", "arguments", "results"]
    assert {"cpu", "cores", "cores_per_rank"} == set(record["machine"])
    assert {"python", "bagua_comm", "numpy"} == set(record["versions"])
    assert record["arguments"]["maxbytes"] == 512
    assert record["ranks"] == 1
    assert len(record["results"]) == 3 * (len(cases.EXACT) + 1) == len(rows(lines))
    first = record["results"][0]
    wanted = {"round", "operation", "codec", "size_bytes", "count", "dtype", "op", "root", "forms"}
    assert wanted == set(first)
    wanted = {"time_us", "algbw_gbs", "busbw_gbs", "wrong", "wire_bytes", "beside"}
    assert wanted == set(first["forms"]["in-place"])
    assert {"median", "q1", "q3"} == set(first["forms"]["in-place"]["time_us"])
    assert all(form.get("wrong", 0) == 0 for form in forms(record))


def test_one_rank_has_overhead_without_mpi4py():
    lines = run("overhead", "--batches", 2, "--calls", 3)

    assert [[row[0], row[-1]] for row in rows(lines)] == [["out-of-place", "0"], ["in-place", "0"]]
    assert rows(lines)[0][2:6] == ["-"] * 4


# Two ranks, under mpirun ------------------------------------------------------------------------------

needs_mpirun = pytest.mark.skipif(find_mpirun() is None, reason="there is no mpirun")


@needs_mpirun
@pytest.mark.slow
def test_two_ranks_stand_beside_mpi4py(tmp_path):
    path = tmp_path / "two.json"
    lines = run(*cases.EXACT, "-e", 128, "-f", 16, "-n", 2, "-w", 1, "--json", path, ranks=2)
    record = json.loads(path.read_text())

    assert comments(lines).count("Out of bounds values : 0 OK") == len(cases.EXACT)
    assert {"mpi4py", "MPI"} <= set(record["versions"])
    assert record["ranks"] == 2
    for form in forms(record):
        assert form["wrong"] == form["beside"]["mpi4py"]["wrong"] == 0
        assert form["time_us"]["median"] > 0
        ratio = form["beside"]["mpi4py"]["ratio"]
        assert ratio["q1"] <= ratio["median"] <= ratio["q3"]


@pytest.mark.slow
@needs_mpirun
def test_two_quantized_ranks_report_their_wire_bytes_and_their_error(tmp_path):
    path = tmp_path / "quantized.json"
    args = ["--codec", "minmax", "float16", "-b", "4K", "-e", "4K", "-n", 2, "-w", 1, "--json", path]
    lines = run("quantized_allreduce", *args, ranks=2)
    minmax, float16 = json.loads(path.read_text())["results"]

    assert minmax["codec"] == "MinMaxUInt8(block=512, eps=0.0)"
    assert any("time algbw busbw error wire time ratio" in line for line in comments(lines))
    # 1024 elements in two chunks; one of each stage leaves rank 0: 512 codes and a header of 32 bytes.
    assert minmax["forms"]["in-place"]["wire_bytes"] == 2 * (512 + 32)
    assert float16["forms"]["in-place"]["wire_bytes"] == 2 * 1024
    for form in (*minmax["forms"].values(), *float16["forms"].values()):
        assert 0 < form["error"] < 0.02
        assert {"mpi4py", "exact"} == set(form["beside"])
        assert form["beside"]["exact"]["error"] < 1e-6
        assert form["beside"]["mpi4py"]["error"] < 1e-6


@needs_mpirun
@pytest.mark.slow
def test_two_ranks_overhead_is_the_difference_to_mpi4py():
    lines = run("overhead", "--batches", 3, "--calls", 5, "-w", 1, ranks=2)

    for row in rows(lines):
        ours, theirs, difference, q1, q3, wrong = (float(cell) for cell in row[1:])
        assert ours > 0
        assert theirs > 0
        assert q1 <= difference <= q3
        assert wrong == 0


@pytest.mark.slow
@needs_mpirun
def test_all_rivals_are_right_and_have_their_place_in_the_report(tmp_path):
    expected = set(rivals.RIVALS)
    needs.package("torch")
    path = tmp_path / "network.json"
    beside = ["--beside", ",".join(rivals.RIVALS), "--label", "here", "--json", path]
    operations = ["allreduce", "quantized_allreduce", "reduce_scatter", "allgather", "alltoall"]
    lines = run(*operations, *beside, "-b", 400, "-e", 400, "-n", 2, "-w", 1, "-o", "avg", ranks=2)

    assert comments(lines).count("Out of bounds values : 0 OK") == len(operations)
    results = {result["operation"]: result["forms"] for result in json.loads(path.read_text())["results"]}
    assert set(results["allreduce"]["out-of-place"]["beside"]) == expected
    assert set(results["quantized_allreduce"]["in-place"]["beside"]) == {*expected, "exact"}
    assert set(results["allgather"]["out-of-place"]["beside"]) == {"mpi4py", "gloo", "ring"}
    assert set(results["alltoall"]["in-place"]["beside"]) == {"mpi4py"}

    assert reports.main([str(path), "--out", str(tmp_path / "network")]) == 0
    text = (tmp_path / "network.md").read_text()
    assert "## here" in text
    titles, row = (
        line.strip("| ").split(" | ")
        for line in text.splitlines()
        if line.startswith(("| operation", "| reduce_scatter"))
    )
    others = {"ring", "halving-doubling"} & set(titles)
    assert {title for title, cell in zip(titles, row, strict=True) if cell.strip() == "-"} == others
    assert len(others) == len(expected - {"mpi4py", "gloo"})


@pytest.mark.slow
def test_the_report_of_slow_networks_is_that_of_its_records(tmp_path):
    records = sorted(str(path) for path in bench.RESULTS.glob("network-*.json"))
    assert reports.main([*records, "--out", str(tmp_path / "network")]) == 0
    assert (tmp_path / "network.md").read_text() == (bench.RESULTS / "network.md").read_text()


def test_all_operations_are_timed_once_in_each_round(tmp_path):
    path = tmp_path / "rounds.json"
    run("allgather", "alltoall", "-b", 8, "-e", 8, "-n", 1, "-w", 0, "--rounds", 2, "--json", path)
    results = json.loads(path.read_text())["results"]
    assert [(result["round"], result["operation"]) for result in results] == [
        (0, "allgather"),
        (0, "alltoall"),
        (1, "allgather"),
        (1, "alltoall"),
    ]


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
