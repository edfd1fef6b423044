"""The messages of the logger, and that none is shown unless the user asks."""

import logging
import subprocess
import sys

import numpy as np
import pytest

import bagua_comm
from bagua_comm import (
    Checkpoints,
    DiLoCo,
    Engine,
    GradientAllReduce,
    Plan,
    Point,
    TensorSpec,
    Tuner,
    after,
    connect,
    trace,
)
from bagua_comm.execution.cuda import NvtxRanges
from bagua_comm.testing import run_ranks

PLAN = Plan.pack([TensorSpec("x", (250_000,), "float32"), TensorSpec("y", (8,), "float32")], bucket_bytes=2**20)


@pytest.fixture
def said(caplog):
    """The messages so far at a level, without the names of the loggers."""
    caplog.set_level(logging.DEBUG, "bagua_comm")

    def at(level):
        return [each.getMessage() for each in caplog.records if each.levelno == level]

    return at


def test_nothing_is_printed_unless_the_user_asks():
    code = "import bagua_comm; bagua_comm.connect(gpu='none').close()"
    quiet = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300)
    assert (quiet.returncode, quiet.stdout, quiet.stderr) == (0, "", "")


def test_connect_says_which_world_it_has_made(said):
    with connect(gpu="none", node="here"):
        (line,) = said(logging.INFO)
    assert line.startswith("rank 0 of 1 on ")
    assert f"(nodes: 1, ranks on each: 1), over local, no device; bagua_comm {bagua_comm.__version__}, " in line
    assert line.endswith(f"NumPy {np.__version__}")


def test_an_engine_says_its_buckets_and_when_another_algorithm_takes_over(said):
    def body(comm):
        algorithm, grads, weights = after(1, GradientAllReduce(), DiLoCo(2)), PLAN.allocate(), PLAN.allocate()
        with Engine(comm, algorithm, PLAN, {"grad": grads, "weight": weights}) as engine:
            for point in (Point.FORWARD, Point.BACKWARD, Point.STEP, Point.FORWARD):
                engine.at(point)

    run_ranks(2, body)
    first, second = said(logging.INFO)
    assert first.startswith("after(1, GradientAllReduce(average=Exact()), DiLoCo(")
    assert first.endswith("): 2 tensors in 1 buckets, 1.0 MB, the largest 1.0 MB; on a ThreadLane")
    assert second.startswith("from step 1 on: DiLoCo(local_steps=2")
    assert sorted(said(logging.DEBUG)) == sorted([first, second])  # rank 1 says the same


def test_a_tuner_logs_its_final_settings(said):
    def body(comm):
        tuner = Tuner(trials=2, steps_per_trial=1, warmup_steps=0, bucket_bytes=[2**20])
        specs = [TensorSpec(name, (2**18,), "float32") for name in "abcd"]
        tuner.start(comm, GradientAllReduce(), specs, bucket_bytes=2**22)
        while tuner.searching:
            tuner.step(1.0)
        return tuner.best, len(tuner.history)

    ((best, measurements),) = run_ranks(1, body)
    last = f"tuner: stay with {best} after {measurements} measurements; 2 settings to choose from"
    assert said(logging.INFO) == [last]
    assert {line.split(" Settings")[0] for line in said(logging.DEBUG)} == {"tuner: try"}


def test_checkpoints_log_completed_saves(said, tmp_path):
    def body(comm):
        with Checkpoints(tmp_path, comm) as checkpoints:
            checkpoints.save(7, {"x": np.zeros(250_000, np.float32)}, wait=True)
            checkpoints.load()

    run_ranks(2, body)
    saved, loaded = said(logging.INFO)
    assert saved.startswith(f"step 7 is saved in {tmp_path}: 1.0 MB in ")
    assert loaded == f"step 7 is loaded from {tmp_path}"


@pytest.mark.parametrize(("value", "listens"), [("1", True), ("0", False), ("", False)])
def test_an_environment_variable_switches_nvtx_on(monkeypatch, value, listens):
    monkeypatch.setenv("BAGUA_NVTX", value)
    try:
        with connect(gpu="none"):
            assert (NvtxRanges() in trace.listeners) == listens
    finally:
        trace.ignore(NvtxRanges())
