"""The benchmark of the tuner: that it runs, and what it reports."""

import doctest
import json

import pytest
from support.launch import run_python

from bagua_comm.launch.mpirun import find_mpirun
from benchmarks.training import tuner


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    """What two ranks write about a tiny model, and print."""
    if find_mpirun() is None:
        pytest.skip("there is no mpirun")
    stem = tmp_path_factory.mktemp("results") / "tuner"
    options = [
        "--model",
        "tiny",
        "--image-size",
        "16",
        "--bucket-bytes",
        "1K,64K",
        "--steps",
        "1",
        "--rounds",
        "1",
    ]
    done = run_python(2, "-m", "benchmarks.training.tuner", *options, "--rematches", "1", "--out", stem)
    assert done.returncode == 0, done.stderr
    return json.loads(stem.with_suffix(".json").read_text()), stem.with_suffix(".md").read_text()


@pytest.mark.slow
def test_the_whole_grid_is_measured_and_the_tuned_settings_are_compared_to_its_best(results):
    record, _ = results
    found = record["results"]
    sizes = {row["bucket_bytes"] for row in found["grid"]}
    assert len(sizes) == len(found["grid"]) >= 2
    assert {row["bucket_bytes"] for row in found["history"]} == sizes
    assert {row["bucket_bytes"] for row in found["again"]} == {
        found[name]["bucket_bytes"] for name in ("tuned", "fastest")
    }
    assert all(row["q1_s"] <= row["median_s"] <= row["q3_s"] for row in found["grid"])
    assert found["tuned_by_fastest"] > 0


@pytest.mark.slow
def test_the_report_has_a_row_for_every_choice_and_every_trial(results):
    record, text = results
    assert text == tuner.markdown(record)
    rows = [line for line in text.splitlines() if line.startswith("|")]
    assert len(rows) == 2 + len(record["results"]["grid"]) + 2 + len(record["results"]["history"])


@pytest.mark.parametrize("wrong", [["--averages", "median"], ["--trials", "0"], ["--bucket-bytes", "1X"]])
def test_wrong_arguments_are_refused(wrong, capsys):
    with pytest.raises(SystemExit):
        tuner.parse_arguments(wrong)
    assert wrong[0] in capsys.readouterr().err


def test_examples_in_docstrings():
    assert doctest.testmod(tuner).failed == 0
