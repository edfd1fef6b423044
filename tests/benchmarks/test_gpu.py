"""The benchmark of the GPU, on what stands in for one: that it works, and notices what is wrong. No figures."""

import argparse
import doctest
import json
import os
import signal
import subprocess
import sys
import textwrap
import time

import numpy as np
import pytest
import torch
from cuda_on_cpu.install import environment
from support.device_ranks import run_on_devices
from support.waiting import until

from bagua_comm import Float16, Int4, MinMaxUInt8, kernels
from bagua_comm.kernels import host
from bagua_comm.processes import state_of
from benchmarks.bench import RESULTS, ROOT
from benchmarks.gpu import codecs as gpu_codecs
from benchmarks.gpu import device as gpu_device
from benchmarks.gpu import lines as gpu_lines
from benchmarks.gpu import part as gpu_part
from benchmarks.gpu import plain as gpu_plain
from benchmarks.gpu import ranks as gpu_ranks
from benchmarks.gpu import report as gpu_report
from benchmarks.gpu import run as gpu
from benchmarks.gpu import sections as gpu_sections
from benchmarks.gpu import training as gpu_training
from benchmarks.gpu import world as gpu_world

on_one_stream = pytest.mark.parametrize("device", ["lazy"], indirect=True)
PLAIN = {
    "numpy": (gpu_plain.Plain.of_numpy(np), lambda x: x),
    "torch": (gpu_plain.Plain.of_torch(torch), torch.from_numpy),
}


def normal(shape, seed=0):
    return np.random.default_rng(seed).standard_normal(shape, np.float32)


# The formulas in plain operations -----------------------------------------------------------------------


@pytest.mark.parametrize("library", PLAIN)
def test_plain_operations_give_the_bytes_of_the_codec(library):
    plain, view = PLAIN[library]
    x, codec = normal((3, 4096)), MinMaxUInt8(gpu_plain.BLOCK)
    wire = codec.encode(x)
    encoded = plain.minmax_encode(view(x))
    mean = plain.minmax_combine(*encoded)

    assert gpu_codecs.different_from_wire(encoded, wire, 4096) == 0
    assert np.asarray(plain.minmax_decode(*encoded)).tobytes() == codec.decode(wire, np.empty_like(x)).tobytes()
    combined = codec.combine(wire, op="avg", count=4096, dtype=x.dtype)
    assert gpu_codecs.different_from_wire(mean, combined, 4096) == 0
    assert gpu_codecs.different_from_wire(encoded, wire + np.uint8(1), 4096) > 0


@pytest.mark.parametrize("library", PLAIN)
def test_plain_operations_make_the_steps_of_the_host(library):
    plain, view = PLAIN[library]
    x, g, m, v = (np.abs(normal(100, seed)) for seed in range(4))
    mine = [y.copy() for y in (x, g, m, v)]
    host.adam_moments(x, g, m, v, **gpu_plain.ADAM)
    host.adam_step(x, m, v, **gpu_plain.ADAM_STEP)
    plain.adam(*map(view, mine))
    for expected, actual in zip((x, g, m, v), mine, strict=True):
        np.testing.assert_allclose(actual, expected, rtol=1e-6)

    host.sgd_step(x, g, m, **gpu_plain.SGD)
    plain.sgd_step(*map(view, mine[:3]))
    for expected, actual in zip((x, g, m), mine, strict=False):
        np.testing.assert_allclose(actual, expected, rtol=1e-5)


# Parts, on the stand-in ---------------------------------------------------------------------------------


def bench(nbytes, row=4096):
    """A bench with a rival on the host."""
    made = gpu_codecs.Bench(gpu_codecs.NBYTES // nbytes, 1)
    made.row = row
    made.rivals = {"numpy": (gpu_plain.Plain.of_numpy(np), lambda x: x.get())}
    return made


@pytest.mark.slow
@on_one_stream
def test_codecs_are_timed_beside_copies_and_plain_operations(device):
    rows = dict(gpu_codecs.codec_rows(bench(1 << 17, row=8192), "minmax", "float32"))

    assert list(rows) == ["encode", "decode", "combine 2", "combine 4", "combine 8"]
    elements, wire, row = 8 * 4096 * 4, 4096 + 8 * 8, 8192 + 16 * 8
    assert rows["encode"]["bytes"] == rows["decode"]["bytes"] == elements + 8 * wire
    assert [rows[f"combine {p}"]["bytes"] for p in (2, 4, 8)] == [(p + 1) * row for p in (2, 4, 8)]
    for name, row in rows.items():
        assert row["wrong"] == 0
        assert row["of_copy"]["median"] > 0
        assert ("numpy" in row["beside"]) == (name in ("encode", "decode", "combine 8"))
    assert rows["encode"]["beside"]["numpy"]["slower"]["median"] > 0
    found = gpu_codecs.plain_agrees(bench(1 << 17))
    assert found == {"numpy": {"encode": 0, "decode": 0, "combine": 0}}


@on_one_stream
def test_codes_of_random_rounding_are_compared_as_far_as_they_repeat(device, monkeypatch):
    monkeypatch.setattr(gpu_codecs, "DRAWN", 4096)
    rows = dict(gpu_codecs.codec_rows(bench(8 * 8192 * 4, row=8192), "int4 stochastic", "float32"))

    row = 16384 // 2 + 16384 // 32 * 2
    assert rows["combine 8"]["bytes"] == 9 * row
    assert {row["wrong"] for row in rows.values()} == {0}


@pytest.mark.slow
@on_one_stream
def test_two_passes_read_twice(device, monkeypatch):
    monkeypatch.setattr(gpu_codecs, "DRAWN", 4096)  # the numbers repeat
    made = bench(8 * 12288 * 4, row=12288)
    monkeypatch.setattr(np.random, "default_rng", None)  # nothing more is drawn
    rows = dict(gpu_codecs.codec_rows(made, "bagua", "float32"))

    wire = 12288 + 32
    assert rows["encode"]["bytes"] == 2 * 8 * 12288 * 4 + 8 * wire
    assert rows["combine 8"]["bytes"] == 2 * 8 * wire + wire
    assert {row["wrong"] for row in rows.values()} == {0}


@on_one_stream
def test_wrong_bytes_are_counted(device, monkeypatch):
    import cupy

    run = kernels.of(cupy.empty(0))
    monkeypatch.setattr(run, "minmax_decode", lambda wire, out, *rest: out.fill(1))
    monkeypatch.setattr(run, "add", lambda x, y, out: None)
    rows = dict(gpu_codecs.codec_rows(bench(1 << 17), "minmax", "float32"))

    assert rows["encode"]["wrong"] == 0 < 3 * 4096 < rows["decode"]["wrong"]
    assert gpu_codecs.step_row(bench(1 << 12), "add", "float32")["wrong"] > 0


@pytest.mark.parametrize(
    "codec", [MinMaxUInt8(512), MinMaxUInt8(4096), MinMaxUInt8.bagua(), Float16(), Int4()], ids=repr
)
def test_numbers_that_repeat_are_compared_to_their_end(codec):
    x = normal((1, 16384))
    whole, expected = codec.encode(np.tile(x, 3)), codec.encode(x)
    assert gpu_codecs.wrong_on_wire(codec, whole, expected, 3 * 16384, x) == 0
    whole[0, [0, -1]] ^= 1
    assert gpu_codecs.wrong_on_wire(codec, whole, expected, 3 * 16384, x) == 2


def test_few_numbers_are_drawn_for_arrays_larger_than_the_cache():
    assert gpu_codecs.NBYTES // 4 > 32 * gpu_codecs.DRAWN
    assert gpu_codecs.ROW >= 16 << 20
    for codec, summands in gpu_codecs.CODECS.values():
        row = gpu_codecs.row_elements(codec, gpu_codecs.ROW)
        assert min(summands) * codec.wire_nbytes(row, np.dtype(np.float32)) > 60e6
        assert gpu_codecs.DRAWN // (codec.granule or 32) * 2 * 2 % 32 == 0  # no padding of the smallest header


@on_one_stream
def test_the_largest_elements_are_timed_and_checked(device, monkeypatch):
    import cupy

    monkeypatch.setattr(gpu_codecs, "DRAWN", 1 << 13)  # the numbers repeat
    rows = dict(gpu_codecs.top_k_rows(bench(1 << 15), "float32"))
    record = 16 + 2 * 112
    assert {name: row["bytes"] for name, row in rows.items()} == {
        "encode": (1 << 15) + record,
        "sum 2": (1 << 15) + 2 * record,
        "sum 8": (1 << 15) + 8 * record,
        "subtract": record + 2 * 2 * 64 * 4,
    }
    assert {row["wrong"] for row in rows.values()} == {0}

    monkeypatch.setattr(kernels.of(cupy.empty(0)), "top_k_subtract", lambda *args: None)
    rows = dict(gpu_codecs.top_k_rows(bench(1 << 15), "float32"))
    assert {name for name, row in rows.items() if row["wrong"]} == {"subtract"}


@on_one_stream
def test_steps_are_timed_and_checked(device, monkeypatch):
    monkeypatch.setattr(gpu_codecs, "DRAWN", 256)  # the numbers repeat
    made = bench(1 << 12)
    monkeypatch.setattr(np.random, "default_rng", None)  # nothing more is drawn
    for name in gpu_codecs.STEPS:
        row = gpu_codecs.step_row(made, name, "float32")
        assert (row["wrong"], row["bytes"]) == (0, gpu_codecs.STEPS[name][1] << 12)
    row = gpu_codecs.adam_row(made)
    assert (row["wrong"], list(row["beside"])) == (0, ["numpy"])


@on_one_stream
def test_before_each_call_the_cache_is_flushed_by_a_write_and_a_read(device, monkeypatch):
    import cupy

    monkeypatch.setattr(gpu_device, "is_stand_in", lambda: False)
    monkeypatch.setattr(gpu_device, "FLUSH_BYTES", 1 << 20)
    watch, seen, totals = gpu_codecs.Bench(1 << 14, 1).watch, [], []  # whose arrays are smaller

    def reduce_rows(rows, out, op):
        seen.append(("read", rows))
        totals.append(out)

    monkeypatch.setattr(cupy.ndarray, "fill", lambda x, value: seen.append(("write", x)))
    monkeypatch.setattr(kernels.of(cupy.empty(0)), "reduce_rows", reduce_rows)
    watch.seconds({name: lambda name=name: seen.append((name, None)) for name in "ab"}, iterations=1)

    assert [what for what, _ in seen] == ["write", "read", "a", "write", "read", "b"] * 2
    assert {x.nbytes for _, x in seen if x is not None} == {1 << 20}
    assert max(total.nbytes for total in totals) <= 1 << 12
    assert seen[0][1].data.ptr != seen[1][1].data.ptr


@on_one_stream
def test_an_error_of_a_rival_is_recorded(device):
    row = bench(1 << 12).measured(lambda: None, 64, 0, {"broken": lambda: 1 / 0})
    assert row["beside"] == {"broken": {"left_out": "ZeroDivisionError: division by zero"}}


@pytest.mark.slow
@on_one_stream
def test_costs_and_averages_over_nccl(device, tmp_path, monkeypatch):
    monkeypatch.setattr(gpu_ranks, "HOLD_S", 1e-4)
    monkeypatch.setattr(gpu_ranks, "BATCH", 2)
    options = argparse.Namespace(shrink=1 << 11, iterations=2)

    def body(comm):
        results = gpu_part.Results(tmp_path / "results.jsonl", rank=comm.rank)
        gpu_ranks.costs(comm, results, options)
        gpu_ranks.allreduce(comm, results, options)
        return results

    results = run_on_devices(device, 2, "nccl", body)[0]

    assert gpu_lines.read(tmp_path / "results.jsonl") == results
    enqueued = results["enqueued, 1024 KiB"]
    assert enqueued["kernels"] == ["encode", "combine", "decode"]
    assert enqueued["collectives"] == {"quantized_allreduce": 1}
    assert enqueued["left_out"] == "profile: RuntimeError: there is no PyTorch with CUDA"
    graph = results["graph, 1024 KiB"]
    assert (graph["wrong"], graph["differs_from_other_values"]) == (0, True)
    parts = results["host time, 1024 KiB"]["us_of_parts"]
    assert sum(parts.values()) == pytest.approx(results["host time, 1024 KiB"]["us"]["whole"]["median"])
    for size, nbytes in (("1 MiB", 512), ("8 MiB", 4096), ("64 MiB", 32768)):
        row = results[size]
        assert (row["bytes"], row["ranks"], row["same_bytes_on_all_ranks"]) == (nbytes, 2, True)
        wire = 2 * MinMaxUInt8().wire_nbytes(nbytes // 8, np.dtype(np.float32))
        assert row["quantized minmax"]["wire_bytes"] == wire
        assert (row["exact float32"]["wire_bytes"], row["exact float16"]["wire_bytes"]) == (nbytes, nbytes // 2)
        assert 0 < row["exact float32"]["error"] < 1e-6 < row["quantized minmax"]["error"] < 0.02


@pytest.mark.slow
@on_one_stream
def test_averages_between_threads(device, tmp_path):
    results = gpu_part.Results(tmp_path / "results.jsonl")
    gpu_ranks.threads(results, argparse.Namespace(shrink=1 << 13, iterations=1))

    assert list(results) == [f"{ranks} ranks, {size} MiB" for ranks in (2, 4) for size in (1, 8, 64)]
    assert {row["quantized minmax"]["error"] < 0.02 for row in results.values()} == {True}


def test_many_ranks_make_large_calls_less_often():
    assert doctest.testmod(gpu_ranks).failed == 0


def test_overlap_is_the_part_of_exchanges_within_backward_passes():
    assert doctest.testmod(gpu_training).failed == 0


# Processes ----------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("mpi", [True, False])
def test_when_one_rank_fails_the_others_are_ended(tmp_path, mpi, monkeypatch):
    monkeypatch.setattr(gpu_world, "GRACE_S", 0.5)
    script = tmp_path / "script.py"
    script.write_text(
        "import os, sys, time\n"
        "rank = os.environ.get('OMPI_COMM_WORLD_RANK') or os.environ['RANK']\n"
        "print('rank', rank, flush=True)\n"
        "sys.exit(3) if rank == '1' else time.sleep(60)\n"
    )
    start = time.monotonic()
    done = gpu_world.launch(2, [script], timeout_s=50, mpi=mpi)

    assert done.returncode == 3
    assert "rank 1" in done.stdout
    assert time.monotonic() - start < 30


SLEEPER = """
import os, pathlib, signal, subprocess, sys, time
folder, rank = pathlib.Path({folder!r}), os.environ.get("OMPI_COMM_WORLD_RANK") or os.environ.get("RANK", "0")
signal.signal(signal.SIGTERM, signal.SIG_IGN)
child = subprocess.Popen(["sleep", "60"], start_new_session=True)
(folder / f"part of {{rank}}").write_text(f"{{os.getpid()}} {{child.pid}}")
(folder / f"part of {{rank}}").rename(folder / f"processes of {{rank}}")
time.sleep(60)
"""
"""It ignores SIGTERM, and has a child in a session of its own; it says which processes that makes."""

LAUNCHER = """
import os, pathlib, threading, time
from benchmarks.gpu import world

def crash():
    while len(list(pathlib.Path({folder!r}).glob("processes of *"))) < 2:
        time.sleep(0.01)
    os.abort()

if {crashes}:
    threading.Thread(target=crash).start()
world.launch(2, [{sleeper!r}], timeout_s=60, mpi={mpi})
"""


def launcher(folder, *, mpi, crashes=False):
    """A script that starts two sleepers as ranks."""
    sleeper, script = folder / "sleeper.py", folder / "launcher.py"
    sleeper.write_text(SLEEPER.format(folder=str(folder)))
    script.write_text(LAUNCHER.format(folder=str(folder), crashes=crashes, sleeper=str(sleeper), mpi=mpi))
    return script


def sleepers(folder, count=2):
    """The processes of all sleepers, once they are there."""
    until(lambda: len([*folder.glob("processes of *")]) >= count)
    files = folder.glob("processes of *")
    found = [int(process) for file in files for process in file.read_text().split()]
    assert len(found) == 2 * count
    return found


@pytest.mark.slow
def test_a_program_that_takes_too_long_is_ended_with_its_children(tmp_path, monkeypatch):
    monkeypatch.setattr(gpu_world, "END_S", 0.1)
    command = [sys.executable, "-c", SLEEPER.format(folder=str(tmp_path))]
    assert gpu_world.run_limited(command, timeout_s=2).returncode == 124
    assert [state_of(process) for process in sleepers(tmp_path, 1)] == ["ended"] * 2


def test_ranks_of_tests_are_ended_before_their_section(tmp_path, monkeypatch):
    monkeypatch.setattr(gpu_world, "END_S", 0.1)
    monkeypatch.setenv(gpu_world.SECTION_ENDS, str(time.time() + gpu_world.SPARE_S + 0.5))
    (tmp_path / "says.py").write_text("import time; print('begun', flush=True); time.sleep(60)")
    start = time.monotonic()
    done = gpu_world.launch(1, [tmp_path / "says.py"], timeout_s=60, mpi=False)
    assert (done.returncode, done.stdout) == (124, "begun\n")
    assert time.monotonic() - start < gpu_world.SPARE_S


@pytest.mark.slow
@pytest.mark.parametrize(("mpi", "crashes"), [(True, False), (False, True)])
def test_ranks_do_not_outlive_their_launcher(tmp_path, monkeypatch, mpi, crashes):
    def monotonic():
        both = len(list(tmp_path.glob("processes of *"))) == 2
        return time.monotonic() + (100 if both and not crashes else 0)

    monkeypatch.setattr(gpu_world, "END_S", 0.3)
    monkeypatch.setattr(gpu_world, "time", argparse.Namespace(monotonic=monotonic, sleep=time.sleep))
    script = launcher(tmp_path, mpi=mpi, crashes=crashes)
    done = gpu_world.run_limited([sys.executable, script], timeout_s=60)

    assert done.returncode == (128 + signal.SIGABRT if crashes else 124), done.stdout
    assert [state_of(process) for process in sleepers(tmp_path)] == ["ended"] * 4


# Sections -----------------------------------------------------------------------------------------------


@pytest.fixture
def run(tmp_path):
    """A function that runs a section, and returns its entry in the record."""

    def run(section, limit_s=60):
        options = gpu.parse_arguments(["--quick", "--out", str(tmp_path / "gpu.json")])
        chosen = [gpu.Section("a", section, limit_s)]
        gpu.begin_lines(tmp_path / "gpu.jsonl", options, chosen)
        said = gpu.recorded(chosen[0], gpu_sections.Run(options, "a", time.monotonic() + limit_s))
        entry = gpu.report(options)["sections"]["a"]
        assert said.items() <= entry.items()
        return entry

    return run


def test_quick_is_smaller_and_shorter_and_can_be_changed():
    options = [vars(gpu.parse_arguments(argv)) for argv in ([], ["--quick"], ["--quick", "--shrink", "9"])]
    assert [(o["shrink"], o["iterations"]) for o in options] == [(1, 20), (16, 5), (9, 5)]


def test_limits_of_sections_add_up_to_that_of_the_command():
    assert sum(section.limit_s for section in gpu.SECTIONS) == gpu.TOTAL_S
    assert gpu.TOTAL_S < 480


def test_a_section_has_the_time_that_earlier_ones_left_and_at_least_its_limit(tmp_path, monkeypatch, capsys):
    now = [0.0]
    monkeypatch.setattr(gpu.time, "monotonic", lambda: now[0])
    left = []

    def spend(seconds):
        def section(run):
            left.append(run.left_s)
            now[0] += seconds

        return section

    sections = [("device", 2, 10), ("a", 38, 30), ("b", 15, 10), ("c", 5, 10)]
    monkeypatch.setattr(gpu, "SECTIONS", [gpu.Section(name, spend(s), limit) for name, s, limit in sections])
    argv = ["--out", str(tmp_path / "gpu.json"), "--limit-s"]
    assert gpu.main([*argv, "60", "--sections", "a", "b", "c"]) == 0
    assert left == [10, 38, 10, 5]
    left.clear()
    now[0] = 0.0
    assert gpu.main([*argv, "120", "--sections", "b"]) == 0
    assert left == [60, 118]


def failing(error):
    def section(run):
        raise error

    return section


@pytest.mark.parametrize(
    ("error", "outcome", "reason"),
    [
        (ZeroDivisionError("no"), "failed", "ZeroDivisionError: no"),
        (gpu_sections.SectionError("no"), "failed", "no"),
        (gpu_sections.OutOfTimeError("not done"), "out of time", "not done"),
        (gpu_sections.LeftOutError("no such thing"), "left out", "no such thing"),
    ],
)
def test_a_section_that_raises_is_recorded(run, error, outcome, reason):
    entry = run(failing(error))
    assert (entry["outcome"], entry["reason"]) == (outcome, reason)


def test_without_time_a_section_is_left_out(run):
    entry = run(failing(KeyError()), 0.5)
    assert (entry["outcome"], entry["reason"]) == ("left out", "no time was left for it")


def test_a_part_continues_after_an_error(tmp_path):
    results = gpu_part.Results(tmp_path / "lines.jsonl", under=["sections"])
    with results.going_on("a"):
        results["b"] = 1 / 0
    results["c"] = 1
    with pytest.raises(SystemExit, match="failed: a"):
        results.end()
    expected = {"sections": {"a": {"failed": "ZeroDivisionError: division by zero"}, "c": 1}}
    assert gpu_lines.read(tmp_path / "lines.jsonl") == expected


def test_worlds_share_the_time_and_continue_after_one_that_fails(run, monkeypatch):
    shares = []

    def part(self, *arguments, ranks, share, under):
        shares.append((arguments[-1], ranks, share))
        if ranks == 4:
            raise gpu_sections.OutOfTimeError("not done")

    monkeypatch.setattr(gpu_sections.Run, "part", part)
    entry = run(gpu_sections.ranks)
    assert shares == [("nccl", 2, 0.4), ("nccl", 4, 0.6), ("staged", 2, 1.0)]
    assert (entry["outcome"], entry["reason"]) == ("out of time", "nccl, 4 ranks: not done")


def test_lines_that_were_cut_off_are_left_out(tmp_path):
    assert doctest.testmod(gpu_lines).failed == 0
    path = tmp_path / "lines.jsonl"
    gpu_lines.append(path, ["a"], 1)
    with path.open("a") as file:
        file.write('{"at": ["b"], "val')
    assert gpu_lines.read(path) == {"a": 1}


@pytest.mark.slow
@pytest.mark.parametrize("crashes", [False, True])
def test_the_gpu_tests_are_counted(run, tmp_path, monkeypatch, crashes):
    folder = tmp_path / "tests"
    folder.mkdir()
    (folder / "pytest.ini").write_text("[pytest]\nmarkers = gpu\n")
    (folder / "test_it.py").write_text(
        "import os, pytest\n"
        "pytestmark = pytest.mark.gpu\n"
        "@pytest.mark.parametrize('x', [1, 2, 3])\n"
        "def test_x(x):\n    if x == 3: pytest.skip('no')\n    assert x < 2, 'too large'\n"
        "@pytest.fixture\ndef broken():\n    raise KeyError('in a fixture')\n"
        "def test_y(broken): pass\n"
        f"def test_z():\n    if {crashes}: os.kill(os.getpid(), 9)\n"
        f"    assert float(os.environ[{gpu_world.SECTION_ENDS!r}]) < {time.time() + 61}\n"
    )
    monkeypatch.setattr(gpu_sections, "GPU_TESTS", folder)
    entry = run(lambda run: gpu_sections.gpu_tests(run, "test_it.py"))

    results = entry["results"]
    names = [failure["test"].split("::")[1] for failure in results["failures"]]
    assert names == ["test_x[2]", "test_y"]
    assert "too large" in results["failures"][0]["message"]
    assert "in a fixture" in results["failures"][1]["message"]
    assert (results["collected"], results["skipped"]) == (5, 1)
    unfinished = [name.split("::")[1] for name in results["unfinished"]]
    assert (results["passed"], unfinished) == ((1, ["test_z"]) if crashes else (2, []))
    assert entry["outcome"] == "failed"
    assert entry["reason"].startswith("ended by SIGKILL: " if crashes else "2 tests failed: ")


@pytest.mark.slow
def test_tests_that_cannot_be_collected_have_failed(run, tmp_path, monkeypatch):
    (tmp_path / "test_it.py").write_text("import there_is_no_such_module")
    monkeypatch.setattr(gpu_sections, "GPU_TESTS", tmp_path)
    entry = run(lambda run: gpu_sections.gpu_tests(run, "test_it.py"))
    assert entry["outcome"] == "failed"
    assert "there_is_no_such_module" in entry["results"]["failures"][0]["message"]


def sanitizer_that(folder, says, code):
    folder.mkdir(exist_ok=True)
    program = folder / "compute-sanitizer"
    program.write_text(f"#!/bin/sh\necho '========= {says}'\nexit {code}\n")
    program.chmod(0o755)
    return program


@pytest.mark.parametrize(
    ("says", "code", "outcome"),
    [("ERROR SUMMARY: 0 errors", 0, "passed"), ("ERROR SUMMARY: 2 errors", 86, "failed")],
)
def test_the_errors_of_the_sanitizer_are_counted(run, tmp_path, monkeypatch, says, code, outcome):
    program = sanitizer_that(tmp_path / "bin", says, code)
    monkeypatch.setenv("CUDA_HOME", str(tmp_path))
    monkeypatch.setattr(
        gpu_sections.shutil, "which", lambda name, path: str(program) if str(program.parent) in path else None
    )
    entry = run(gpu_sections.sanitizer)

    assert entry["outcome"] == outcome
    assert entry["results"] == {"memcheck": {"program": str(program), "exit_code": code, "summary": [says]}}


def test_a_sanitizer_that_is_nowhere(monkeypatch):
    monkeypatch.setattr(gpu_sections.shutil, "which", lambda name, path: None)
    monkeypatch.setattr(gpu_sections.importlib.metadata, "files", lambda name: [])
    assert gpu_sections.find_sanitizer({}) is None


# The record ---------------------------------------------------------------------------------------------


def test_targets_are_met_missed_or_not_measured():
    costs = {
        "enqueued, 1024 KiB": {"kernels": ["encode", "combine", "decode"], "collectives": {"alltoall": 2}},
        "host time, 1024 KiB": {"us": {"whole": {"median": 79.0}}},
    }
    assert [target.row({"costs": {"results": costs}})["met"] for target in gpu_report.TARGETS] == [
        True,
        False,
        True,
    ]
    assert [target.row({"costs": {"outcome": "failed"}})["met"] for target in gpu_report.TARGETS] == [None] * 3


def shares(**measured):
    """Sections that measured these shares of a copy, on an H100 PCIe."""
    codecs = {name.replace("_", " "): {"of_copy": {"median": share}} for name, share in measured.items()}
    codecs["copy"] = {"gb_per_s": {"median": 1790.0}}
    return {"device": {"results": {"name": "NVIDIA H100 PCIe"}}, "codecs": {"results": codecs}}


def test_steps_are_beside_the_expectation_of_arithmetic(monkeypatch):
    counts = {"encode float32": 100.0, "combine float32 p=8": 146.0, "decode float32": 29.0}
    monkeypatch.setattr(gpu_report, "instruction_counts", lambda architecture: counts)
    sections = shares(minmax_encode_float32=0.7, minmax_decode_float32=0.8, minmax_combine_8_float32=0.7)
    rows = {row.pop("step"): row for row in gpu_report.steps(sections, 1)}

    expected = round(0.62 * 114 * 128 * 1.755e9 / 100 * (5 + 8 / 512) / 1.8e12, 2)
    assert rows["encode float32"] == {"measured": 0.7, "expected": expected, "target": expected, "met": True}
    assert rows["decode float32"] == {"measured": 0.8, "expected": 0.9, "target": 0.85, "met": False}
    assert rows["combine float32 p=8"] == {"measured": 0.7, "expected": 0.55, "target": 0.55, "met": True}
    assert rows["encode float16"] == {"measured": None, "expected": None, "target": 0.85, "met": None}
    speed = {"gb_per_s": 1790.0, "assumed_gb_per_s": 1800.0, "data_sheet_gb_per_s": 2040.0}
    assert gpu_report.copy(sections) == speed


def test_steps_of_arrays_that_were_made_smaller_are_neither_met_nor_missed():
    assert {row["met"] for row in gpu_report.steps(shares(minmax_encode_float32=9.0), 16)} == {None}


def test_nothing_is_expected_of_an_unknown_gpu():
    sections = shares(minmax_encode_float32=0.86)
    sections["device"]["results"]["name"] = "a GPU"
    row = gpu_report.steps(sections, 1)[0]
    assert row == {"step": "encode float32", "measured": 0.86, "expected": None, "target": 0.85, "met": True}


def test_the_arithmetic_of_the_guide_to_gpus():
    assert doctest.testmod(gpu_report).failed == 0
    table = "\n".join(gpu_report.table())
    assert table.count("\n") >= 2
    assert table in (ROOT / "docs" / "guides" / "gpus.md").read_text(), (
        f"python -m benchmarks.gpu.report now prints\n{table}"
    )


def test_results_that_are_wrong_are_named():
    sections = {
        "a": {"outcome": "passed", "results": {"x": {"wrong": 0}, "y": {"wrong": 2, "error": 0.5}}},
        "b": {"outcome": "out of time", "reason": "not done after 3 s: this\nand that"},
        "c": {
            "outcome": "failed",
            "reason": "z",
            "results": {"z": {"ahead": False, "left_out": "why"}, "exact losses differ by": 1e-9},
        },
        "d": {"outcome": "left out", "reason": "not here"},
    }
    assert gpu_report.checks(sections) == {
        "right": 2,
        "wrong": ["a, y, wrong: 2", "a, y, error: 0.5", "c, z, ahead: False"],
    }
    said = ["b: out of time: not done after 3 s: this", "d: left out: not here", "c, z: why"]
    assert gpu_report.not_done(sections) == said


# The command --------------------------------------------------------------------------------------------

COMMAND = """
import pathlib, time, types
from benchmarks.gpu import run, sections, world
folder = pathlib.Path({folder!r})

def part(script):
    return lambda run: run.part(folder / script)

def monotonic():
    return time.monotonic() + sum(float(late.read_text()) for late in folder.glob("late *"))

world.END_S = 0.3
run.time = sections.time = world.time = types.SimpleNamespace(monotonic=monotonic, sleep=time.sleep)
run.SECTIONS = [run.Section(name, part(name + ".py"), limit_s) for name, limit_s in {sections!r}]
run.command()
"""
PART = """
import os, pathlib, sys, time
from benchmarks.gpu import lines

def pass_time(seconds):
    file = pathlib.Path({folder!r}) / str(os.getpid())
    file.write_text(str(seconds))
    file.rename(file.with_name(f"late {{file.name}}"))

at = sys.argv.index("--under")
lines.append(sys.argv[at - 1], [*sys.argv[at + 1 :], "x"], 1)
"""


def started(folder, sections):
    """The command, with sections that are these scripts: name, limit of time, what follows after one result."""
    for name, _, text in sections:
        (folder / f"{name}.py").write_text(PART.format(folder=str(folder)) + textwrap.dedent(text))
    limits = [(name, limit_s) for name, limit_s, _ in sections]
    script = COMMAND.format(folder=str(folder), sections=limits)
    total = str(sum(limit_s for _, limit_s in limits))
    return subprocess.Popen(
        [sys.executable, "-c", script, "--out", str(folder / "gpu.json"), "--limit-s", total],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def test_the_record_is_complete_whatever_sections_do(tmp_path):
    ignores = SLEEPER.format(folder=str(tmp_path))
    sections = [
        ("device", 100, ""),
        ("crashes", 100, "print('last words', flush=True); os.abort()"),
        ("sleeps", 100, "pass_time(300); time.sleep(60)"),
        ("ignores", 100, ignores.replace("time.sleep(60)", "pass_time(100); time.sleep(60)")),
        ("raises", 100, "raise ValueError('no')"),
        ("passes", 100, ""),
    ]
    start = time.monotonic()
    command = started(tmp_path, sections)
    printed, _ = command.communicate(timeout=60)
    took_s = time.monotonic() - start
    record = json.loads((tmp_path / "gpu.json").read_text())

    found = record["sections"]
    assert {name: entry["outcome"] for name, entry in found.items()} == {
        "device": "passed",
        "crashes": "failed",
        "sleeps": "out of time",
        "ignores": "out of time",
        "raises": "failed",
        "passes": "passed",
    }, printed
    assert [entry["results"] for entry in found.values()] == [{"x": 1}] * 6
    assert found["crashes"]["reason"] == "ended by SIGABRT: last words"
    assert "ValueError: no" in found["raises"]["reason"]
    assert found["sleeps"]["reason"].startswith("not done after")
    assert [state_of(process) for process in sleepers(tmp_path, 1)] == ["ended"] * 2
    assert command.returncode == 1
    assert took_s < 30  # none of which is a minute's sleep
    assert "last words" in (tmp_path / "gpu.log").read_text()


@pytest.mark.slow
@pytest.mark.parametrize(("number", "mpi"), [(signal.SIGTERM, False), (signal.SIGKILL, True)])
def test_a_command_that_is_killed_leaves_a_record_and_no_process(tmp_path, number, mpi):
    slow = f"exec(open({str(launcher(tmp_path, mpi=mpi))!r}).read())"
    command = started(tmp_path, [("device", 20, ""), ("slow", 40, slow), ("never", 40, "")])
    processes = sleepers(tmp_path)
    command.send_signal(number)
    printed, _ = command.communicate(timeout=60)
    until(lambda: [state_of(process) for process in processes] == ["ended"] * 4)

    assert command.returncode == (-number if number == signal.SIGKILL else 128 + number), printed
    if number == signal.SIGKILL:
        (tmp_path / "gpu.json").unlink()
        assert gpu.main(["--report", "--out", str(tmp_path / "gpu.json")]) == 1
    record = json.loads((tmp_path / "gpu.json").read_text())
    slow, never = record["sections"]["slow"], record["sections"]["never"]
    assert (slow["outcome"], slow["reason"]) == ("out of time", "the command was ended meanwhile")
    assert slow["results"] == {"x": 1}
    assert (never["outcome"], never["reason"]) == ("left out", "the command was ended before")
    assert {"date", "commit", "machine", "versions", "arguments", "steps", "targets", "checks"} <= set(record)


def command(*arguments, env):
    return subprocess.run(
        [sys.executable, "-m", "benchmarks.gpu", *map(str, arguments)],
        cwd=ROOT,
        env=env,
        capture_output=True,
        text=True,
        timeout=100,
    )


def test_without_a_gpu_nothing_is_written(tmp_path):
    env = {**os.environ, "PYTHONPATH": str(ROOT), "CUDA_VISIBLE_DEVICES": ""}
    done = command("--out", tmp_path / "gpu.json", env=env)
    assert done.returncode == 2
    assert "There is no GPU here that CuPy can use; nothing was measured." in done.stderr
    assert list(tmp_path.iterdir()) == []


def test_figures_of_the_stand_in_are_no_results(monkeypatch, capsys):
    def device(run):
        gpu_lines.append(run.lines, run.path("stand_in"), True)

    monkeypatch.setattr(gpu, "SECTIONS", [gpu.Section("device", device, 10)])
    before = {file: file.read_bytes() for file in RESULTS.glob("gpu.*")}
    assert gpu.main([]) == 2
    assert "Figures of a stand-in for CuPy are not results" in capsys.readouterr().err
    assert {file: file.read_bytes() for file in RESULTS.glob("gpu.*")} == before


@pytest.mark.slow
def test_the_whole_command_on_the_stand_in(tmp_path):
    sanitizer_that(tmp_path / "bin", "ERROR SUMMARY: 0 errors", 0)
    env = environment(tmp_path)
    env["PATH"] = f"{tmp_path / 'bin'}{os.pathsep}{env['PATH']}"
    sections = ["device", "codecs", "ranks", "training", "sanitizer"]
    sizes = ["--shrink", 1 << 14, "--iterations", 1, "--dtypes", "float32"]
    options = ["--sections", *sections, "--transports", "staged", "--device", "cpu", *sizes]
    done = command(*options, "--out", tmp_path / "gpu.json", env=env)
    record = json.loads((tmp_path / "gpu.json").read_text())

    assert {name: entry["outcome"] for name, entry in record["sections"].items()} == dict.fromkeys(
        sections, "passed"
    )
    assert done.returncode == 0, done.stderr
    assert record["stand_in"] is True
    assert record["checks"]["wrong"] == []
    assert {"date", "commit", "machine", "versions", "arguments", "copy", "targets", "not_done"} <= set(record)
    facts = record["sections"]["device"]["results"]
    assert (facts["name"], facts["compute_capability"]) == ("a CPU", "90")
    assert {"cupy", "cuda driver", "cuda runtime", "nccl", "torch"} == set(facts["versions"])
    measured = {row["step"]: (row["measured"] or 0) > 0 for row in record["steps"]}
    assert [name for name, known in measured.items() if known] == [
        f"{codec}{verb} float32{rows}"
        for codec in ("", "int4 ")
        for verb, rows in (("encode", ""), ("decode", ""), *(("combine", f" p={p}") for p in (2, 4, 8)))
    ]
    assert {row["met"] for row in record["steps"]} == {None}
    assert record["targets"][0]["measured"] is None
    assert record["sections"]["ranks"]["results"]["staged, 2 ranks"]["1 MiB"]["ranks"] == 2
    assert set(record["sections"]["training"]["results"]) >= {"exact", "bytegrad", "torch"}
