"""Many ranks: the training of each algorithm with ranks as threads, and what is called wrong."""

import argparse

import numpy as np
import pytest

from bagua_comm.testing import run_ranks
from benchmarks.many import report
from benchmarks.many.__main__ import STEPS, _wrong
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
