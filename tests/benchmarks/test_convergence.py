"""The benchmark of convergence: its statistics, and that it resumes after an interruption."""

import json
import statistics

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
def test_differences_are_of_means_over_the_seeds_of_both():
    record = record_of({"torch": {0: 98.0, 1: 99.0}, "exact": {0: 98.25, 1: 99.25, 2: 90.0}, "async": {3: 9.0}})

    assert row_of(record, "exact")["metric"] == pytest.approx((98.25 + 99.25 + 90) / 3)
    assert row_of(record, "exact")["difference"] == 0.25
    assert row_of(record, "exact")["within"] is True
    assert row_of(record, "async")["difference"] is None


@pytest.mark.needs("sklearn")
def test_only_results_that_should_match_are_judged():
    torch = {"torch": {0: 98.0}, "torch-adam": {0: 96.0}}
    record = record_of({**torch, "bytegrad": {0: 97.25}, "qadam": {0: 96.5}, "shift-one": {0: 60.0}})

    assert row_of(record, "bytegrad")["within"] is False
    assert row_of(record, "qadam")["within"] is True  # beside torch-adam
    assert row_of(record, "shift-one")["within"] is None
    assert report.verdicts(record, "digits") == [
        "1 of the 2 algorithms that should end where exact averaging does end within 0.5 points of it."
        " Outside: ByteGrad (-0.75 points)."
    ]


def test_a_ratio_is_the_mean_over_seeds_with_its_standard_deviation():
    record = record_of({"torch": {0: 2.0, 1: 4.0}, "int4-stochastic": {0: 2.2, 1: 4.0, 2: 9.0}}, "gpt")

    row = row_of(record, "int4-stochastic", "gpt")
    assert row["ratio"] == pytest.approx(1.05)
    assert row["ratio_spread"] == pytest.approx(0.1 / 2**0.5)
    assert row["spread"] == pytest.approx(statistics.stdev([2.2, 4.0, 9.0]))
    assert row_of(record, "torch", "gpt")["ratio"] == 1


def test_differences_of_losses_are_relative():
    record = record_of({"torch": {0: 2.0}, "qadam": {0: 2.01}}, "text")

    assert row_of(record, "qadam", "text")["baseline"] == "torch"
    assert row_of(record, "qadam", "text")["difference"] == pytest.approx(0.5)


def test_muon_trains_the_matrices_of_blocks_and_adamw_the_rest():
    task, method = tasks.TASKS["text"], methods.METHODS["diloco-30-muon-0.008"]
    model = task.make_model()
    muon, adamw = run.make_optimizers(task.optimizer_of(method), model, task.lr_of(method), None)
    names = {parameter: name for name, parameter in model.named_parameters()}
    hidden = {names[parameter] for parameter in muon.param_groups[0]["params"]}
    parts = ("project.weight", "mix.weight", "feed_forward.1.weight", "feed_forward.3.weight")
    assert hidden == {f"blocks.{i}.{part}" for i in range(2) for part in parts}
    assert hidden | {names[parameter] for parameter in adamw.param_groups[0]["params"]} == set(names.values())
    assert muon.defaults["lr"] == adamw.defaults["lr"] == 0.008
    assert "exact-adam-0.004" not in tasks.TASKS["text-sgd"].methods()


@pytest.mark.needs("sklearn")
def test_resuming_runs_the_missing_trainings():
    options = run.parse_arguments(["--task", "digits", "--algorithms", "torch,exact", "--seeds", "0,1"])
    record = record_of({"torch": {0: 98.0}, "exact": {1: 98.0}})

    assert run.missing(record, options) == [("digits", "exact", 0), ("digits", "torch", 1)]
    assert record == run.resume({**record, "results": []}, record)


@pytest.mark.needs("sklearn")
@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"ranks": 2}, "ranks were 2, and now are 4"),
        ({"versions": {"python": "2"}}, "versions were {'python': '2'}, and now are {'python': '3'}"),
        ({"tasks": {"digits": {"steps": 7}}}, "digits: data was None"),
    ],
)
def test_other_settings_are_not_mixed(change, message):
    record = record_of({"torch": {0: 98.0}})
    with pytest.raises(ValueError, match=message):
        run.resume(record, {**record, **change})


@pytest.mark.needs("sklearn")
def test_results_of_a_changed_algorithm_are_not_kept():
    record = record_of({"diloco-10": {0: 98.0}})
    record["results"][0]["object"] = "DiLoCo(local_steps=11)"
    with pytest.raises(ValueError, match=r"diloco-10 was DiLoCo\(local_steps=11\), and now is DiLoCo\("):
        run.resume(record, record)
