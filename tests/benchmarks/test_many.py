"""Many ranks: the training of each algorithm with ranks as threads, and what is called wrong."""

import argparse
import re

import numpy as np
import pytest

from bagua_comm.testing import run_ranks
from benchmarks.bench.record import begin_record
from benchmarks.many import report
from benchmarks.many.__main__ import STEPS, _wrong, main, parse_arguments
from benchmarks.many.training import trained


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    """Images that can be learnt: each class has a pixel of its own."""
    chance, labels = np.random.default_rng(0), np.arange(480) % 10
    images = 0.1 * chance.random((480, 64), dtype=np.float32)
    images[np.arange(480), labels] = 1
    file = tmp_path_factory.mktemp("many") / "digits.npz"
    np.savez(file, images=images, labels=labels)
    return file


@pytest.mark.parametrize("name", ["exact", "decentralized"])
def test_ranks_train_and_the_weights_are_those_of_one_rank(tmp_path, data, name):
    options = argparse.Namespace(data=data, steps=STEPS, out=tmp_path / "out.json")
    measured = run_ranks(3, lambda comm: trained(comm, name, options))
    assert list(_wrong(name, 3, measured, data, tmp_path / f"{name}.npz")) == []
    row = report.summary(measured)
    assert row["loss"][1] < row["loss"][0]
    assert row["mib"]["median"] > 1


def test_wrong_weights_a_loss_that_rises_and_a_missing_rank_are_named(tmp_path, data):
    options = argparse.Namespace(data=data, steps=STEPS, out=tmp_path / "out.json")
    measured = run_ranks(2, lambda comm: trained(comm, "exact", options))
    with np.load(tmp_path / "exact.npz") as found:
        np.savez(tmp_path / "exact.npz", *(weight + 0.01 for weight in found.values()))
    measured[0]["loss"] = measured[0]["loss"][::-1]
    few, loss, weights = _wrong("exact", 3, measured, data, tmp_path / "exact.npz")
    assert few == "2 ranks measured, expected 3"
    assert loss.startswith("the loss went from")
    assert weights.startswith("the weights are 0.")


def test_the_report_has_a_row_for_each_algorithm_and_the_failures_of_the_job():
    measured = [
        {"constructed_s": 0.1, "step_s": [0.1, 0.3], "call_s": [0.01, 0.01], "mib": 40.0 + rank, "threads": 2}
        | {"descriptors": 16, "loss": (2.5, 0.5)}
        for rank in range(3)
    ]
    record = begin_record("many", parse_arguments([])) | {
        "start": report.start_of(
            [{"imported_s": 1.0, "connected_s": 2.0}, {"imported_s": 3.0, "connected_s": 2.5}]
        ),
        "results": [{"name": "exact", **report.summary(measured), "problems": []}],
        "problems": ["bytegrad did not end"],
    }
    text = report.markdown(record)
    assert "| exact | 0.1 | 200.0 | 10.0 | 41.0 | 2 | 16 | 2.500 to 0.500 | none |" in text
    assert "imported the library after 3.0 s, and was connected after 2.5 s" in text
    assert "Failures of the job: bytegrad did not end." in text
    assert report.lines(record)[-1] == "bytegrad did not end"


@pytest.mark.parametrize("wrong", [["--ranks", "1"], ["--algorithms", "exakt"], ["--limit", "0"]])
def test_settings_out_of_range_are_refused(wrong, capsys):
    with pytest.raises(SystemExit):
        main(wrong)
    assert re.search("is not an integer|there is no algorithm", capsys.readouterr().err)


def test_an_elastic_job_that_cannot_lose_two_ranks_is_refused(capsys):
    with pytest.raises(SystemExit):
        parse_arguments(["--elastic", "2"])
    assert "--elastic: 2 processes cannot lose two; give 3 or more" in capsys.readouterr().err
    assert parse_arguments(["--elastic", "0"]).elastic == 0
