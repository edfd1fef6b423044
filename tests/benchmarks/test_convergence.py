"""The benchmark of convergence: its results, and that it resumes after an interruption."""

import doctest
import json
import statistics

import pytest
from support import needs
from support.launch import run_python

from bagua_comm.launch.mpirun import find_mpirun
from benchmarks.convergence import methods, report, run, tasks

NAMES = ["torch", "exact", "low-precision-one-peer"]


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    """The results of two ranks in four steps of both tasks."""
    if find_mpirun() is None:
        pytest.skip("there is no mpirun")
    folder = tmp_path_factory.mktemp("results")
    options = ["--task", "all", "--algorithms", ",".join(NAMES), "--seeds", "0", "--steps", "4"]
    done = run_python(2, "-m", "benchmarks.convergence", *options, "--out", folder / "algorithms")
    assert done.returncode == 0, done.stderr
    assert done.stdout.count(" low-precision-one-peer ") == 2
    return folder


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


# Two ranks, under mpirun ------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("task", ["digits", "text"])
def test_exact_averaging_ends_where_torch_does(results, task):
    record = json.loads((results / "algorithms.json").read_text())
    exact, torch = row_of(record, "exact", task), row_of(record, "torch", task)

    assert exact["metric"] == pytest.approx(torch["metric"], rel=1e-4)
    assert exact["within"] is True
    assert exact["steps"] == torch["steps"] == 4


@pytest.mark.slow
@pytest.mark.parametrize(("task", "parameters"), [("digits", 85066), ("text", 248737)])
def test_the_json_file_has_bytes_and_settings(results, task, parameters):
    record = json.loads((results / "algorithms.json").read_text())
    sent = {name: row_of(record, name, task)["per_step"] for name in NAMES}

    assert record["ranks"] == 2
    assert record["tasks"][task]["parameters"] == parameters
    assert {"torch", "scikit-learn", "MPI"} <= set(record["versions"])
    # On two ranks an allreduce sends as much as there is, and one peer gets a quarter of it.
    assert sent["torch"]["payload_bytes"] == sent["torch"]["wire_bytes"] == 4 * parameters
    assert (
        sent["exact"]["wire_bytes"] == sent["exact"]["payload_bytes"] == pytest.approx(4 * parameters, rel=1e-2)
    )
    assert sent["low-precision-one-peer"]["wire_bytes"] == pytest.approx(parameters, rel=0.03)
    for result in record["results"]:
        assert len(result["train_loss"]) == 4


@pytest.mark.slow
def test_the_report_has_a_table_for_each_task_and_says_how_it_was_made(results):
    text = (results / "algorithms.md").read_text()
    rows = [line for line in text.splitlines() if line.startswith("| ") and "`" in line]

    assert "-m benchmarks.convergence --task all --algorithms torch,exact,low-precision-one-peer" in text
    assert [row.split(" | ")[0] for row in rows] == 2 * [f"| {methods.METHODS[name].title}" for name in NAMES]
    assert text.count("1 of the 1 algorithms that should end where exact averaging does end within") == 2
    assert str(results.parent) not in text + (results / "algorithms.json").read_text()


@pytest.mark.slow
def test_the_report_is_made_of_the_json_file_alone(results):
    before = (results / "algorithms.md").read_text()
    (results / "algorithms.md").unlink()
    figure = results / "algorithms.png"
    figure.unlink(missing_ok=True)

    assert run.main(["--report", "--out", str(results / "algorithms")]) == 0

    assert before == (results / "algorithms.md").read_text()
    needs.package("matplotlib")
    assert figure.read_bytes().startswith(b"\x89PNG")


# Parts ------------------------------------------------------------------------------------------------


def test_examples_in_docstrings():
    for module in (run, tasks, report):
        assert doctest.testmod(module).failed == 0


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
    table = report.markdown({**record, "machine": {"cpu": "one", "cores": 2}}, None)
    assert "| 5.0667 | 3.5233 | 2.2000, 4.0000, 9.0000 | +3.33 | 1.0500 ± 0.0707 | **no** |" in table


def test_rows_of_streaming_have_times_and_waits():
    record = record_of({"torch": {0: 2.0}, "diloco-30": {0: 2.0}, "streaming-30": {0: 2.0}}, "text")
    for row, per_step in zip(
        record["summary"],
        [
            {"ms": 4.0, "waited_ms": None, "most_wire_bytes": 4000.0},
            {"ms": 3.0, "waited_ms": 1.5, "most_wire_bytes": 4000.0},
            {"ms": 2.0, "waited_ms": 0.1, "most_wire_bytes": 1000.0},
        ],
        strict=True,
    ):
        row["per_step"].update(per_step)
    machine = {"cpu": "one", "cores": 2}
    table = report.markdown({**record, "machine": machine}, None)
    assert "| most B in a step | time | waiting (%) |" in table
    for cells in ("| 4,000 | 1.00 | - |", "| 4,000 | 0.75 | 50.0 |", "| 1,000 | 0.50 | 5.0 |"):
        assert cells in table
    plain = {**record_of({"torch": {0: 2.0}}, "text"), "machine": machine}
    assert "waiting (%)" not in report.markdown(plain, None)


def test_each_task_has_its_own_algorithms_by_default():
    options = run.parse_arguments(["--task", "digits,gpt", "--seeds", "0"])
    wanted = run.missing({"results": []}, options)
    assert ("digits", "diloco-10", 0) in wanted
    few_bits = ["torch", "bytegrad", "int4-plain", "int4", "int4-error-feedback", "int4-loco"]
    assert [name for task, name, _ in wanted if task == "gpt"] == few_bits
    assert ("digits", "int4-stochastic", 0) not in wanted
    named = run.parse_arguments(["--task", "digits", "--seeds", "0", "--algorithms", "int4-stochastic"])
    assert run.missing({"results": []}, named) == [("digits", "int4-stochastic", 0)]


def test_every_method_makes_an_algorithm():
    for method in methods.METHODS.values():
        method.object_name(40)


def test_differences_of_losses_are_relative():
    record = record_of({"torch": {0: 2.0}, "qadam": {0: 2.01}}, "text")

    assert row_of(record, "qadam", "text")["baseline"] == "torch"
    assert row_of(record, "qadam", "text")["difference"] == pytest.approx(0.5)


def test_tasks_with_another_optimizer_are_run_by_name(capsys):
    assert run.parse_arguments([]).tasks == ["digits", "text"] == [*tasks.ALL]
    assert run.parse_arguments(["--task", "text-sgd,digits"]).tasks == ["text-sgd", "digits"]
    assert tasks.TASKS["text-sgd"].optimizer_of(methods.METHODS["diloco-100"]) == "sgd"
    for task in tasks.TASKS.values():
        assert all(task.lr_of(method) > 0 for method in task.methods().values())
    with pytest.raises(SystemExit):
        run.parse_arguments(["--task", "digits-sgd"])
    assert "there is no task 'digits-sgd'; expected one of digits, text" in capsys.readouterr().err


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


def test_trainings_with_other_rates_are_compared_with_one_of_them():
    record = record_of({"exact-adam-0.004": {0: 2.0}, "exact-adam-0.008": {0: 2.2}}, "text")
    assert row_of(record, "exact-adam-0.008", "text")["ratio"] == pytest.approx(1.1)
    table = report.markdown({**record, "machine": {"cpu": "one", "cores": 2}}, None)
    assert "| exact, Adam at 0.008 |" in table
    assert "are compared with exact, Adam at 0.004." in table


@pytest.mark.needs("sklearn")
def test_the_report_names_the_command_of_its_record():
    record = record_of({"diloco-100": {0: 98.0}, "torch": {0: 98.0}}, "digits-adam")
    command = report.command_of(
        {**record, "tasks": {**record["tasks"], "digits": run.describe(tasks.TASKS["digits"], 40)}}
    )
    assert command.endswith("--task digits-adam,digits --algorithms torch,diloco-100 --seeds 0 --steps 40")


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


def test_unsuitable_arguments_are_refused(capsys):
    for argv, message in [
        (["--algorithms", "torch,exakt"], "there is no algorithm 'exakt'"),
        (["--seeds", "0,x"], "argument --seeds: 'x' is not an integer >= 0"),
        (["--steps", "0"], "'0' is not an integer >= 1"),
    ]:
        with pytest.raises(SystemExit):
            run.parse_arguments(argv)
        assert message in capsys.readouterr().err
