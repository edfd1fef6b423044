"""The benchmark of training: what it measures and writes, the shapes of its models, and its report."""

import doctest
import json

import pytest
import torch
from support import needs
from support.launch import run_python

from bagua_comm.launch.mpirun import find_mpirun
from benchmarks.bench.timing import Processors
from benchmarks.training import models, report, run

NAMES = ["alone", "ddp", "ddp-fp16", "exact", "bytegrad", "qadam", "low-precision-one-peer", "diloco-8"]
STEPS, ROUNDS = 2, 2


@pytest.fixture(scope="module")
def record(tmp_path_factory):
    """What two ranks write of a small model."""
    if find_mpirun() is None:
        pytest.skip("there is no mpirun")
    path = tmp_path_factory.mktemp("results") / "tiny.json"
    # Images so large that a round takes some ticks of the clock by which processors are busy.
    options = ["--model", "tiny", "--image-size", "512", "--algorithms", ",".join(NAMES), "--batch", "2"]
    options += ["--steps", STEPS, "--rounds", ROUNDS, "--trace-overlap", "--bucket-bytes", "64K"]
    done = run_python(
        2, "-m", "benchmarks.training", *options, "--label", "rate_mbit=100,link=none", "--json", path
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.count(" bytegrad ") == ROUNDS
    return json.loads(path.read_text())


@pytest.fixture
def rows(record):
    return {row["algorithm"]: row for row in record["results"]}


def row_of(algorithm, samples_per_s, **more):
    """A row of a record, as if measured."""
    return {
        "algorithm": algorithm,
        "model": "vgg16",
        "samples": "images",
        "parameters": 138357544,
        "model_bytes": 553430176,
        "hosts": 4,
        "ranks_per_host": 1,
        "rate_mbit": 1000,
        "batch": 1,
        "settings": f"{algorithm}()",
        "seconds": [4 / samples_per_s],
        "median_s": 4 / samples_per_s,
        "q1_s": 4 / samples_per_s,
        "q3_s": 4 / samples_per_s,
        "samples_per_s": samples_per_s,
        "samples_per_s_std": 0.0,
        "wire_bytes": None,
        "overlap": None,
        "busy": None,
        "compute": None,
        **more,
    }


def record_of(*rows):
    machine = {"cpu": "a processor", "cores": 2, "cores_per_rank": 2}
    return {"machine": machine, "versions": {"python": "3"}, "ranks": 4, "results": list(rows)}


# Two ranks, under mpirun ------------------------------------------------------------------------------


@pytest.mark.slow
def test_each_algorithm_has_a_row_with_its_steps_and_labels(record, rows):
    assert record["ranks"] == 2
    assert {"torch", "MPI"} <= set(record["versions"])
    assert list(rows) == NAMES
    for name, row in rows.items():
        assert len(row["seconds"]) == ROUNDS * (8 if name == "diloco-8" else STEPS)
        assert 0 < row["q1_s"] <= row["median_s"] <= row["q3_s"]
        assert row["samples_per_s"] >= 0.99 * 2 * 2 / max(row["seconds"])
        assert (row["hosts"], row["ranks_per_host"], row["rate_mbit"], row["link"]) == (1, 2, 100, "none")
        assert row["model_bytes"] == 4 * row["parameters"]


@pytest.mark.slow
def test_bytes_are_those_that_the_algorithms_send(rows):
    # On two ranks exact averages send as much as there is.
    assert rows["exact"]["wire_bytes"] == pytest.approx(rows["exact"]["model_bytes"], rel=0.01)
    for name in ("bytegrad", "qadam", "low-precision-one-peer"):
        assert rows[name]["wire_bytes"] == pytest.approx(rows["exact"]["wire_bytes"] / 4, rel=0.03)
    assert rows["diloco-8"]["wire_bytes"] == rows["exact"]["wire_bytes"] / 8
    assert all(rows[name]["wire_bytes"] is None for name in ("alone", "ddp", "ddp-fp16"))


@pytest.mark.slow
def test_overlap_is_of_gradients_only_and_computing_is_separate(rows):
    for name in ("exact", "bytegrad", "qadam"):
        assert 0 <= rows[name]["overlap"] <= 1
    assert all(rows[name]["overlap"] is None for name in ("alone", "ddp", "diloco-8", "low-precision-one-peer"))
    assert sum(rows["alone"]["compute"].values()) == pytest.approx(rows["alone"]["median_s"], rel=0.9)
    assert rows["exact"]["compute"] is None
    assert all(0 < row["busy"] <= 1 for row in rows.values())


# Parts ------------------------------------------------------------------------------------------------


def test_time_that_a_hypervisor_took_is_neither_work_nor_idleness(tmp_path):
    stat = tmp_path / "stat"
    stat.write_text("cpu  1 2 3 40 5 6 7 800 9 9\ncpu0 1 2 3 40 5 6 7 800 9 9\n")
    assert Processors.now(stat) == Processors(worked=19, idle=45)
    assert Processors.now(tmp_path / "absent") is None


@pytest.mark.parametrize(
    ("name", "parameters"),
    [("vgg16", 138_357_544), ("resnet50", 25_557_032), ("bert-large", 335_141_888)],
)
def test_models_have_the_published_numbers_of_parameters(name, parameters):
    with torch.device("meta"):
        assert models.count_parameters(models.MODELS[name].make()) == parameters


@pytest.mark.parametrize("name", models.MODELS)
def test_models_give_an_output_for_each_class(name):
    model, sizes = models.MODELS[name], models.Sizes(batch=2, image=64, sequence=8)
    inputs, targets = model.make_batch(sizes, seed=1)
    with torch.device("meta"):
        outputs = model.make().eval()(inputs.to("meta"))

    assert outputs.shape == (2, model.outputs)
    assert targets.max() < model.outputs
    assert torch.equal(inputs, model.make_batch(sizes, seed=1)[0])
    assert not torch.equal(inputs, model.make_batch(sizes, seed=2)[0])


def test_examples_in_docstrings():
    for module in (run, report):
        assert doctest.testmod(module).failed == 0


def test_algorithms_that_the_number_of_ranks_does_not_allow_are_left_out():
    assert run.unsuitable(4) == {}
    assert set(run.unsuitable(3)) == {"shift-one", "shift-one-every-4"}


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--algorithms", "ddp,exakt"], "there is no algorithm 'exakt'"),
        (["--label", "hosts"], "'hosts' is not a label"),
        (["--algorithms", "qadam", "--warmup", "1"], "--warmup must be more than 1 for qadam"),
    ],
)
def test_unsuitable_arguments_are_refused(argv, message, capsys):
    with pytest.raises(SystemExit):
        run.parse_arguments(argv)
    assert message in capsys.readouterr().err


# The report -------------------------------------------------------------------------------------------


def test_speedups_are_over_ddp_in_the_same_file_and_network():
    slow = {"rate_mbit": 500}
    one = record_of(row_of("ddp", 0.5), row_of("bytegrad", 1.0), row_of("ddp", 0.25, **slow))
    other = record_of(row_of("exact", 0.75, **slow))

    found = {(row["rate_mbit"], row["algorithm"]): row["speedup"] for row in report.merge([one, other])}

    assert found == {(1000, "ddp"): 1, (1000, "bytegrad"): 2, (500, "ddp"): 1, (500, "exact"): None}


def test_speedups_are_over_the_faster_of_pytorchs_own():
    rows = [row_of("ddp", 0.5), row_of("ddp-view", 1.0), row_of("exact", 0.75), row_of("ddp-fp16", 2.0)]
    found = {row["algorithm"]: row["speedup"] for row in report.merge([record_of(*rows)])}
    assert found == {"ddp": 0.5, "ddp-view": 1, "exact": 0.75, "ddp-fp16": 2}


def test_of_rows_measured_twice_the_last_is_kept():
    first, again = (record_of(row_of("ddp", 0.5), row_of("exact", value)) for value in (1.0, 2.0))

    assert [row["speedup"] for row in report.merge([first, again])] == [1, 4]


def test_a_step_is_compared_with_the_longer_of_computing_and_sending():
    rows = [
        row_of("alone", 2.0),  # 2 s
        row_of("ddp", 0.5),
        row_of("ddp-fp16", 0.5),
        row_of("exact", 1.0, wire_bytes=4e8),
        row_of("bytegrad", 1.0, wire_bytes=1e8),
    ]
    found = {row["algorithm"]: row["of_limit"] for row in report.merge([record_of(*rows)])}
    ring_s = 1.5 * 553430176 * 8 / 1e9
    expected = {"alone": 1, "ddp": ring_s / 8, "ddp-fp16": ring_s / 16, "exact": 3.2 / 4, "bytegrad": 2 / 4}
    assert found == pytest.approx(expected)
    assert report.limit_s({**rows[1], "ranks_per_host": 2}, 2.0) is None  # not all bytes cross the line
    assert report.limit_s({**rows[1], "rate_mbit": None}, 2.0) is None


def test_the_report_has_a_table_for_each_network_and_a_figure(tmp_path):
    compute = {"forward_s": 0.25, "backward_s": 0.5, "optimizer_s": 0.125}
    record = record_of(
        row_of("alone", 5.0, compute=compute),
        row_of("ddp", 0.5),
        row_of("bytegrad", 1.0, wire_bytes=2.1e8, overlap=0.5, busy=0.875, samples_per_s_std=0.25),
        row_of("ddp", 0.25, rate_mbit=500),
    )
    (tmp_path / "vgg16.json").write_text(json.dumps(record))

    assert report.main([str(tmp_path / "vgg16.json"), "--out", str(tmp_path / "report")]) == 0

    text = (tmp_path / "report.md").read_text()
    assert "* Machine: a processor, 2 cores; 4 ranks; python 3." in text
    assert "## vgg16, 4 hosts at 1000 Mbit/s" in text
    assert "## vgg16, 4 hosts at 500 Mbit/s" in text
    assert "Compute alone: forward 0.25 s, backward 0.5 s, optimizer 0.125 s." in text
    assert "| bytegrad | 1 ± 0.25 | 4 | 4 to 4 | 2.00 | 42% | 210.0 | 50% | 88% | `bytegrad()` |" in text
    assert "| ddp | 0.5 ± 0 | 8 | 8 to 8 | 1.00 | 83% | - | - | - | `ddp()` |" in text
    assert "| ddp | 0.25 ± 0 | 16 | 16 to 16 | 1.00 | - | - | - | - | `ddp()` |" in text
    needs.package("matplotlib")
    assert (tmp_path / "report.png").read_bytes().startswith(b"\x89PNG")
