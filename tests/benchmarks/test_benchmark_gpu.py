"""The benchmark of the GPU, on what stands in for one: that it works, and notices what is wrong. No figures."""

import argparse
import doctest
import json
import os
import subprocess
import sys
import time
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import numpy as np
import pytest
from cuda_on_cpu.install import environment
from device_ranks import run_on_devices

from bagua_comm import MinMaxUInt8, kernels
from bagua_comm.kernels import host

torch = pytest.importorskip("torch")
ROOT = Path(__file__).parents[2]
BENCHMARKS = ROOT / "benchmarks"
sys.path.insert(0, str(BENCHMARKS))

import gpu  # noqa: E402
import gpu_codecs  # noqa: E402
import gpu_ranks  # noqa: E402
import gpu_report  # noqa: E402
import gpu_training  # noqa: E402
import gpu_world  # noqa: E402

on_one_stream = pytest.mark.parametrize("device", ["lazy"], indirect=True)
PLAIN = {
    "numpy": (gpu_codecs.Plain.of_numpy(np), lambda x: x),
    "torch": (gpu_codecs.Plain.of_torch(torch), torch.from_numpy),
}


def normal(shape, seed=0):
    return np.random.default_rng(seed).standard_normal(shape, np.float32)


# The formulas in plain operations -----------------------------------------------------------------------


@pytest.mark.parametrize("library", PLAIN)
def test_plain_operations_give_the_bytes_of_the_codec(library):
    plain, view = PLAIN[library]
    x, codec = normal((3, 4096)), MinMaxUInt8(gpu_codecs.BLOCK)
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
    host.adam_moments(x, g, m, v, **gpu_codecs.ADAM)
    host.adam_step(x, m, v, **gpu_codecs.ADAM_STEP)
    plain.adam(*map(view, mine))
    for expected, actual in zip((x, g, m, v), mine, strict=True):
        np.testing.assert_allclose(actual, expected, rtol=1e-6)

    host.sgd_step(x, g, m, **gpu_codecs.SGD)
    plain.sgd_step(*map(view, mine[:3]))
    for expected, actual in zip((x, g, m), mine, strict=False):
        np.testing.assert_allclose(actual, expected, rtol=1e-5)


# Parts, on the stand-in ---------------------------------------------------------------------------------


def bench(nbytes):
    """A bench with a rival on the host."""
    made = gpu_codecs.Bench(gpu_codecs.NBYTES // nbytes, 1)
    made.rivals = {"numpy": (gpu_codecs.Plain.of_numpy(np), lambda x: x.get())}
    return made


@on_one_stream
def test_codecs_are_timed_beside_copies_and_plain_operations(device):
    rows = dict(gpu_codecs.codec_rows(bench(1 << 17), "minmax", "float32"))

    assert list(rows) == ["encode", "decode", "combine 2", "combine 4", "combine 8"]
    elements, wire = 8 * 4096 * 4, 4096 + 8 * 8
    assert rows["encode"]["bytes"] == rows["decode"]["bytes"] == elements + 8 * wire
    assert [rows[f"combine {p}"]["bytes"] for p in (2, 4, 8)] == [(p + 1) * wire for p in (2, 4, 8)]
    for name, row in rows.items():
        assert row["wrong"] == 0
        assert row["of_copy"]["median"] > 0
        assert ("numpy" in row["beside"]) == (name in ("encode", "decode", "combine 8"))
    assert rows["encode"]["beside"]["numpy"]["slower"]["median"] > 0
    found = gpu_codecs.plain_agrees(bench(1 << 17))
    assert found == {"numpy": {"encode": 0, "decode": 0, "combine": 0}}


@on_one_stream
def test_two_passes_read_twice(device):
    rows = dict(gpu_codecs.codec_rows(bench(8 * 12288 * 4), "bagua", "float32"))

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


@on_one_stream
def test_steps_are_timed_and_checked(device):
    for name in gpu_codecs.STEPS:
        row = gpu_codecs.step_row(bench(1 << 12), name, "float32")
        assert (row["wrong"], row["bytes"]) == (0, gpu_codecs.STEPS[name][1] << 12)
    row = gpu_codecs.adam_row(bench(1 << 12))
    assert (row["wrong"], list(row["beside"])) == (0, ["numpy"])


@on_one_stream
def test_what_a_rival_raises_is_recorded(device):
    row = bench(1 << 12).measured(lambda: None, 64, 0, {"broken": lambda: 1 / 0})
    assert row["beside"] == {"broken": {"left_out": "ZeroDivisionError: division by zero"}}


@on_one_stream
def test_costs_and_averages_over_nccl(device, tmp_path, monkeypatch):
    monkeypatch.setattr(gpu_ranks, "HOLD_S", 1e-4)
    monkeypatch.setattr(gpu_ranks, "BATCH", 2)
    options = argparse.Namespace(shrink=1 << 11, iterations=2)

    def body(comm):
        results = gpu_world.Results(tmp_path / "results.json", rank=comm.rank)
        gpu_ranks.costs(comm, results, options)
        gpu_ranks.allreduce(comm, results, options)
        return results

    results = run_on_devices(device, 2, "nccl", body)[0]

    assert json.loads((tmp_path / "results.json").read_text()) == results
    enqueued = results["enqueued, 1024 KiB"]
    assert enqueued["kernels"] == ["encode", "combine", "decode"]
    assert enqueued["collectives"] == {"alltoall": 1, "allgather": 1}
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


@on_one_stream
def test_averages_between_threads(device, tmp_path):
    results = gpu_world.Results(tmp_path / "results.json")
    gpu_ranks.threads(results, argparse.Namespace(shrink=1 << 13, iterations=1))

    assert list(results) == [f"{ranks} ranks, {size} MiB" for ranks in (2, 4) for size in (1, 8, 64)]
    assert {row["quantized minmax"]["error"] < 0.02 for row in results.values()} == {True}


def test_overlap_is_the_part_of_exchanges_within_backward_passes():
    assert doctest.testmod(gpu_training).failed == 0


# Processes ----------------------------------------------------------------------------------------------


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


def test_what_takes_too_long_is_ended_with_its_children(tmp_path):
    pid = tmp_path / "pid"
    child = f"import os, time; open({str(pid)!r}, 'w').write(str(os.getpid())); time.sleep(60)"
    command = [sys.executable, "-c", f"import subprocess, sys; subprocess.run([sys.executable, '-c', {child!r}])"]
    done = gpu_world.run_limited(command, timeout_s=1)

    assert done.returncode == 124
    deadline = time.monotonic() + 10
    while is_running(int(pid.read_text())) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not is_running(int(pid.read_text()))


def is_running(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except OSError:
        return False


# Sections -----------------------------------------------------------------------------------------------


@pytest.fixture
def run(tmp_path):
    return gpu.Run(gpu.parse_arguments(["--quick"]), tmp_path)


def test_quick_is_smaller_and_shorter_and_can_be_changed():
    options = [vars(gpu.parse_arguments(argv)) for argv in ([], ["--quick"], ["--quick", "--shrink", "9"])]
    assert [(o["shrink"], o["iterations"]) for o in options] == [(1, 20), (16, 5), (9, 5)]


def failing(error):
    def section(run):
        raise error

    return section


@pytest.mark.parametrize(
    ("error", "entry"),
    [
        (ZeroDivisionError("no"), {"outcome": "failed", "error": "ZeroDivisionError: no"}),
        (gpu.SectionError("no", {"a": 1}), {"outcome": "failed", "error": "no", "results": {"a": 1}}),
        (gpu.LeftOutError("no such thing"), {"outcome": "left out", "reason": "no such thing"}),
    ],
)
def test_a_section_that_fails_is_recorded(run, error, entry):
    assert gpu.recorded(gpu.Section("a", failing(error), 10), run, 100) == {**entry, "seconds": 0.0}


def test_without_time_a_section_is_left_out(run):
    entry = gpu.recorded(gpu.Section("a", failing(KeyError()), 10), run, 4)
    assert entry == {"outcome": "left out", "reason": "no time was left for it"}


def test_what_a_part_wrote_before_its_time_was_up_is_kept(run, tmp_path):
    script = tmp_path / "slow.py"
    script.write_text("import sys, time; open(sys.argv[2], 'w').write('{\"a\": 1}'); time.sleep(60)")
    entry = gpu.recorded(gpu.Section("a", lambda run: run.part(script), 1), run, 100)
    assert (entry["outcome"], entry["results"]) == ("failed", {"a": 1})
    assert entry["error"].startswith("not done after 1 s")


def test_the_gpu_tests_are_counted(run, tmp_path, monkeypatch):
    folder = tmp_path / "tests"
    folder.mkdir()
    (folder / "pytest.ini").write_text("[pytest]\nmarkers = gpu\n")
    (folder / "test_it.py").write_text(
        "import pytest\n"
        "@pytest.mark.gpu\n@pytest.mark.parametrize('x', [1, 2, 3])\n"
        "def test_x(x):\n    if x == 3: pytest.skip('no')\n    assert x < 2, 'too large'\n"
        "def test_not_chosen():\n    assert False\n"
    )
    monkeypatch.setattr(gpu, "GPU_TESTS", folder)
    entry = gpu.recorded(gpu.Section("tests", gpu.gpu_tests, 60), run, 100)

    results = entry["results"]
    assert (entry["outcome"], entry["error"]) == ("failed", "1 tests failed")
    assert (results["passed"], results["skipped"]) == (1, 1)
    (failure,) = results["failures"]
    assert failure["test"] == "test_it::test_x[2]"
    assert "too large" in failure["message"]


def test_errors_in_fixtures_are_failures():
    report = '<a><testcase classname="c" name="n"><error message="m">x</error></testcase></a>'
    expected = {"passed": 0, "skipped": 0, "failures": [{"test": "c::n", "message": "m"}]}
    assert gpu.counted(ElementTree.fromstring(report)) == expected


def sanitizer_that(folder, says, code):
    folder.mkdir(exist_ok=True)
    program = folder / "compute-sanitizer"
    program.write_text(f"#!/bin/sh\necho '========= {says}'\nexit {code}\n")
    program.chmod(0o755)
    return program


@pytest.mark.parametrize(
    ("says", "code", "outcome"), [("ERROR SUMMARY: 0 errors", 0, "ok"), ("ERROR SUMMARY: 2 errors", 86, "failed")]
)
def test_the_sanitizer_is_heard(run, tmp_path, monkeypatch, says, code, outcome):
    program = sanitizer_that(tmp_path / "bin", says, code)
    monkeypatch.setenv("CUDA_HOME", str(tmp_path))
    monkeypatch.setattr(
        gpu.shutil, "which", lambda name, path: str(program) if str(program.parent) in path else None
    )
    entry = gpu.recorded(gpu.Section("sanitizer", gpu.sanitizer, 60), run, 100)

    assert entry["outcome"] == outcome
    assert list(entry["results"]) == list(gpu.TOOLS)
    for result in entry["results"].values():
        assert (result["exit_code"], result["summary"]) == (code, [says])


def test_a_sanitizer_that_is_nowhere(monkeypatch):
    monkeypatch.setattr(gpu.shutil, "which", lambda name, path: None)
    monkeypatch.setattr(gpu.importlib.metadata, "files", lambda name: [])
    assert gpu.find_sanitizer({}) is None


# The record ---------------------------------------------------------------------------------------------


def test_targets_are_met_missed_or_not_measured():
    rows = {"encode": 0.9, "decode": 0.5}
    codecs = {f"minmax {verb} float32": {"of_copy": {"median": share}} for verb, share in rows.items()}
    costs = {
        "enqueued, 1024 KiB": {"kernels": ["encode", "combine", "decode"], "collectives": {"alltoall": 2}},
        "host time, 1024 KiB": {"us": {"whole": {"median": 79.0}}},
    }
    sections = {"codecs": {"results": codecs}, "costs": {"results": costs}}
    met = [target.row(sections)["met"] for target in gpu_report.TARGETS]
    assert met == [True, False, None, True, False, True]
    assert [target.row({"codecs": {"outcome": "failed"}})["met"] for target in gpu_report.TARGETS] == [None] * 6


def test_results_that_are_wrong_are_named():
    sections = {
        "a": {"results": {"x": {"wrong": 0}, "y": {"wrong": 2, "error": 0.5}}},
        "b": {"outcome": "failed"},
        "c": {"results": {"z": {"ahead": False, "left_out": "why"}, "exact losses differ by": 1e-9}},
        "d": {"outcome": "left out", "reason": "not here"},
    }
    assert gpu_report.checks(sections) == {
        "right": 2,
        "wrong": ["a, y, wrong: 2", "a, y, error: 0.5", "c, z, ahead: False"],
    }
    assert gpu_report.left_out(sections) == ["d: not here", "c, z: why"]


def command(*arguments, env):
    return subprocess.run(
        [sys.executable, str(BENCHMARKS / "gpu.py"), *map(str, arguments)],
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
    monkeypatch.setattr(gpu, "SECTIONS", [gpu.Section("device", lambda run: {"stand_in": True}, 10)])
    assert gpu.main([]) == 2
    assert "Figures of a stand-in for CuPy are no results" in capsys.readouterr().err
    assert not (BENCHMARKS / "results" / "gpu.json").exists()


def test_the_whole_command_on_the_stand_in(tmp_path):
    sanitizer_that(tmp_path / "bin", "ERROR SUMMARY: 0 errors", 0)
    env = environment(tmp_path)
    env["PATH"] = f"{tmp_path / 'bin'}{os.pathsep}{env['PATH']}"
    sections = ["device", "codecs", "ranks", "training", "sanitizer"]
    sizes = ["--shrink", 1 << 14, "--iterations", 1, "--dtypes", "float32"]
    options = ["--sections", *sections, "--transports", "staged", "--device", "cpu", *sizes]
    done = command(*options, "--out", tmp_path / "gpu.json", env=env)
    record = json.loads((tmp_path / "gpu.json").read_text())

    assert {name: entry["outcome"] for name, entry in record["sections"].items()} == dict.fromkeys(sections, "ok")
    assert done.returncode == 0, done.stderr
    assert record["stand_in"] is True
    assert record["checks"]["wrong"] == []
    assert {"date", "commit", "machine", "versions", "arguments", "targets", "left_out"} <= set(record)
    facts = record["sections"]["device"]["results"]
    assert (facts["name"], facts["compute_capability"]) == ("a CPU", "90")
    assert {"cupy", "cuda driver", "cuda runtime", "nccl", "torch"} == set(facts["versions"])
    measured = {row["target"].split()[0]: row["measured"] for row in record["targets"]}
    assert measured["encode"] > 0
    assert measured["kernels"] is None
    assert record["sections"]["ranks"]["results"]["staged, 2 ranks"]["1 MiB"]["ranks"] == 2
    assert set(record["sections"]["training"]["results"]) >= {"exact", "bytegrad", "torch"}
