"""The benchmark of convergence: its statistics, and that it resumes after an interruption."""

import json

import pytest
from support.launch import run_python

from bagua_comm.launch.mpirun import find_mpirun
from benchmarks.convergence import methods, report, run, tasks


@pytest.mark.slow
@pytest.mark.needs("sklearn", "torch")
@pytest.mark.skipif(find_mpirun() is None, reason="there is no mpirun")
def test_exact_averaging_ends_where_torch_does(tmp_path):
    options = "--task all --algorithms torch,exact,low-precision-one-peer --seeds 0 --steps 4"
    done = run_python(2, "-m", "benchmarks.convergence", *options.split(), "--out", tmp_path / "algorithms")
    assert done.returncode == 0, done.stderr
    record = json.loads((tmp_path / "algorithms.json").read_text())
    for task in ("digits", "text"):
        exact, torch = row_of(record, "exact", task), row_of(record, "torch", task)
        assert exact["metric"] == pytest.approx(torch["metric"], rel=1e-4)
        assert exact["within"] is True
        # One peer of two gets a quarter of what an exact average sends.
        sent = exact["per_step"]["wire_bytes"]
        fewer = row_of(record, "low-precision-one-peer", task)["per_step"]["wire_bytes"]
        assert fewer == pytest.approx(sent / 4, rel=0.03)


def record_of(metrics, task="digits"):
    """A record of one task, from {algorithm: {seed: metric}}."""
    per_step = {"payload_bytes": 80.0, "wire_bytes": 40.0, "exchanges": 1.0, "ms": 2.0}
    results = [
        {
            "task": task,
            "algorithm": name,
            "seed": seed,
            "object": methods.METHODS[name].object_name(40),
            "steps": 40,
            "metric": metric,
            "per_step": per_step,
            "train_loss": [2.0, 1.0],
        }
        for name, by_seed in metrics.items()
        for seed, metric in by_seed.items()
    ]
    described = {task: run.describe(tasks.TASKS[task], 40)}
    record = {"versions": {"python": "3"}, "ranks": 4, "tasks": described, "results": results}
    return {**record, "summary": report.summarize(record)}


def row_of(record, name, task="digits"):
    (row,) = [r for r in record["summary"] if (r["task"], r["algorithm"]) == (task, name)]
    return row


@pytest.mark.needs("sklearn")
def test_resuming_runs_the_missing_trainings():
    options = run.parse_arguments(["--task", "digits", "--algorithms", "torch,exact", "--seeds", "0,1"])
    record = record_of({"torch": {0: 98.0}, "exact": {1: 98.0}})

    assert run.missing(record, options) == [("digits", "exact", 0), ("digits", "torch", 1)]
    assert record == run.resume({**record, "results": []}, record)
