"""The benchmark of the GPU, on what stands in for one: that it works, and notices what is wrong. No figures."""

import argparse
import doctest
import json
import os
import subprocess
import sys

import numpy as np
import pytest
from cuda_on_cpu.install import environment
from support.device_ranks import HostOnly
from support.gpu_bodies import connected
from support.waiting import until

from bagua_comm import kernels
from bagua_comm.testing import run_ranks
from benchmarks.bench import RESULTS, ROOT
from benchmarks.gpu import codecs as gpu_codecs
from benchmarks.gpu import graphs as gpu_graphs
from benchmarks.gpu import lines as gpu_lines
from benchmarks.gpu import plain as gpu_plain
from benchmarks.gpu import ranks as gpu_ranks
from benchmarks.gpu import report as gpu_report
from benchmarks.gpu import run as gpu

on_one_stream = pytest.mark.parametrize("device", ["lazy"], indirect=True)


def bench(nbytes, row=4096):
    """A bench with a rival on the host."""
    made = gpu_codecs.Bench(gpu_codecs.NBYTES // nbytes, 1)
    made.row = row
    made.rivals = {"numpy": (gpu_plain.Plain.of_numpy(np), lambda x: x.get())}
    return made


@on_one_stream
def test_wrong_bytes_are_counted(device, monkeypatch):
    import cupy

    run = kernels.of(cupy.empty(0))
    monkeypatch.setattr(run, "minmax_decode", lambda wire, out, **layout: out.fill(1))
    monkeypatch.setattr(run, "add", lambda x, y, out: None)
    rows = dict(gpu_codecs.codec_rows(bench(1 << 17), "minmax", "float32"))

    assert rows["encode"]["wrong"] == 0 < 3 * 4096 < rows["decode"]["wrong"]
    assert gpu_codecs.step_row(bench(1 << 12), "add", "float32")["wrong"] > 0


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
from benchmarks.gpu import world
world.launch(2, [{sleeper!r}], timeout_s=60, mpi={mpi})
"""


def launcher(folder, *, mpi):
    """A script that starts two sleepers as ranks."""
    sleeper, script = folder / "sleeper.py", folder / "launcher.py"
    sleeper.write_text(SLEEPER.format(folder=str(folder)))
    script.write_text(LAUNCHER.format(sleeper=str(sleeper), mpi=mpi))
    return script


def sleepers(folder, count=2):
    """The processes of all sleepers, once they are there."""
    until(lambda: len([*folder.glob("processes of *")]) >= count)
    files = folder.glob("processes of *")
    found = [int(process) for file in files for process in file.read_text().split()]
    assert len(found) == 2 * count
    return found


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


def command(*arguments, env):
    return subprocess.run(
        [sys.executable, "-m", "benchmarks.gpu", *map(str, arguments)],
        cwd=ROOT,
        env=env,
        capture_output=True,
        text=True,
        timeout=300,
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


@on_one_stream
def test_launches_of_graphs_are_timed_one_by_one(device, monkeypatch):
    monkeypatch.setattr(gpu_graphs, "ROUNDS", 1)
    monkeypatch.setattr(gpu_graphs, "HOLD_S", 0.001)
    device.count, found = 2, {}
    options = argparse.Namespace(shrink=1 << 10)

    def body(comm):
        with connected(comm.transports[0]) as on_device:
            gpu_ranks.graphs(on_device, found if comm.rank == 0 else {}, options)

    run_ranks(2, body, wrap=HostOnly)
    (times,) = found.values()
    timed = {name: each["us"] for name, each in times.items() if "us" in each}
    assert {name: len(us) for name, us in timed.items()} == dict.fromkeys(timed, gpu_graphs.BATCH)
    assert {"whole", "kernels", "messages", "one rank", "whole, eager", "whole, two graphs in turn"} < {*timed}
    assert "cuLaunchHostFunc" in times["kernels and host functions"]["left_out"]  # a stand-in has no driver


def test_a_launch_that_waits_is_counted():
    found = gpu_graphs.described(np.array([9.0, 11.0, 4000.0, 10.0]))
    assert found == {"before_a_wait": 2, "median_us": 10.5, "us": [9.0, 11.0, 4000.0, 10.0]}


@pytest.mark.slow
def test_the_whole_command_on_the_stand_in(tmp_path):
    env = environment(tmp_path)
    sections = ["device", "codecs", "ranks", "training"]
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
    assert {row["met"] for row in record["steps"]} == {None}
    assert record["sections"]["ranks"]["results"]["staged, 2 ranks"]["1 MiB"]["ranks"] == 2
    trained = record["sections"]["training"]["results"]
    assert trained.keys() >= {"exact", "bytegrad", "torch", "sharded exact", "sharded bytes", "sharded torch"}
    assert trained["sharded bytes"]["overlap"]["exchanges_per_step"] > 1
