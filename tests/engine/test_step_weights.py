"""Sums of weights since the last outer step: kept in checkpoints, under another plan, and on other ranks."""

import copy

import numpy as np
import pytest

from bagua_comm import (
    ArrayError,
    Checkpoints,
    DiLoCo,
    Engine,
    Own,
    Point,
    SparseLoCo,
    StreamingDiLoCo,
    TensorSpec,
    every,
)
from bagua_comm.algorithms.base import pack
from bagua_comm.checkpoint import load_engine, tree_of_engine
from bagua_comm.testing import run_ranks

SPECS = [TensorSpec("a", (300,), "float32"), TensorSpec("b", (500,), "float32")]
ALGORITHMS = [
    DiLoCo(4),
    StreamingDiLoCo(4, fragments=2, delay=1),
    SparseLoCo(4, chunk=64, keep=64, bits=32),
    every(2, DiLoCo(2)),
]
STEPS = 9


def weight_of(rank, step):
    return [1, 7, 0, 513][(rank + step) % 4]


class Training:
    """A training whose changes are given. Collective."""

    def __init__(self, comm, algorithm, bucket_bytes=1200, weights=weight_of):
        self.comm, self.algorithm, self.weight_of = comm, algorithm, weights
        plan = self.plan(bucket_bytes)
        self.use(plan, plan.allocate())
        self.engine = Engine(comm, algorithm, plan, self.flats)

    def plan(self, bucket_bytes):
        return pack(self.algorithm, SPECS, bucket_bytes=bucket_bytes)

    def use(self, plan, flats):
        self.flats, self.views = flats, plan.cut(flats)

    def train(self, first, end):
        engine = self.engine
        for step in range(first, end):
            if (weight := self.weight_of(self.comm.rank, step)) is not None:
                engine.weight = 99  # set again before its step ends, it counts once
            engine.at(Point.FORWARD)
            engine.weight = weight
            engine.at(Point.BACKWARD)
            random = np.random.default_rng([self.comm.rank, step])
            for view in self.views.values():
                view += random.standard_normal(view.shape).astype(np.float32)
            engine.at(Point.STEP)
        return self

    def end(self):
        self.engine.settle()
        values = np.concatenate([view.copy().ravel() for view in self.views.values()])
        self.engine.close()
        return values


def changed(comm, algorithm, change, stop):
    """Train, with a change before step `stop`. Collective."""
    training = Training(comm, algorithm).train(0, stop)
    if change == "replan":
        plan = training.plan(10_000)
        training.use(plan, training.engine.replan(plan))
    elif change is not None:
        state, values = copy.deepcopy((training.engine.state_dict(), dict(training.views)))
        training.engine.close()
        training = Training(comm, algorithm, change)
        training.engine.load_state_dict(state)
        for name, view in training.views.items():
            view[...] = values[name]
    return training.train(stop, STEPS).end()


CHANGES = {"resumed": (1200, (1, 3, 4, 6)), "another plan": (10_000, (2, 5, 8)), "replan": ("replan", (1, 3, 5))}
"""What `changed` changes, and before which steps."""


@pytest.mark.parametrize("algorithm", ALGORITHMS, ids=str)
def test_a_training_changed_between_outer_steps_is_one_that_went_on(algorithm):
    expected = run_ranks(2, lambda comm: changed(comm, algorithm, None, 0))
    for name, (change, stops) in CHANGES.items():
        for stop in stops:
            found = run_ranks(2, lambda comm, at=(change, stop): changed(comm, algorithm, *at))
            assert all(np.array_equal(*each) for each in zip(expected, found, strict=True)), (name, stop)


@pytest.mark.parametrize("ranks", [2, 3])
def test_on_another_number_of_ranks_each_begins_with_the_mean_of_weights_and_sums(ranks, tmp_path):
    algorithm = DiLoCo(3, outer_lr=1, outer_momentum=0)

    def save(comm):
        training = Training(comm, algorithm).train(0, 2)
        with Checkpoints(tmp_path, comm) as checkpoints:
            values = dict(training.views)
            checkpoints.save(2, {"engine": tree_of_engine(training.engine), "x": Own(values, "mean")}, wait=True)
        return training.end()

    def load(comm):
        training = Training(comm, algorithm)
        with Checkpoints(tmp_path, comm) as checkpoints:
            tree = checkpoints.load().tree
        for name, view in training.views.items():
            view[...] = tree["x"][name]
        load_engine(training.engine, tree["engine"])
        return training.train(2, 3).end()

    before = run_ranks(2, save)
    found = run_ranks(ranks, load)
    sums = [sum(weight_of(rank, step) for step in range(2)) for rank in range(2)]
    if ranks != 2:
        before, sums = [np.mean(before, axis=0)] * ranks, [np.mean(sums)] * ranks
    total, weighted = 0, 0
    for rank, (x, earlier) in enumerate(zip(before, sums, strict=True)):
        random = np.random.default_rng([rank, 2])
        change = np.concatenate([random.standard_normal(spec.shape).astype(np.float32) for spec in SPECS])
        weight = earlier + weight_of(rank, 2)
        total, weighted = total + weight, weighted + weight * (x + change)
    for each in found:
        np.testing.assert_allclose(each, weighted / total, rtol=1e-5, atol=1e-6)


def test_weights_replaced_by_the_program_count_from_then_on():
    def body(comm, first):
        training = Training(comm, DiLoCo(3), weights=lambda rank, step: weight_of(rank, step) if step else first)
        training.train(0, 1)
        for flat in training.flats:
            flat[...] = 0
        training.engine.weights_replaced()
        return training.train(1, 4).end()

    found = [run_ranks(2, lambda comm, first=first: body(comm, first * comm.rank))[0] for first in (0, 99)]
    assert np.array_equal(*found)


@pytest.mark.parametrize("forgotten", [1, 2, 3])
def test_a_step_of_one_rank_without_a_weight_is_an_error_on_all_ranks(forgotten):
    def weights(rank, step):
        return None if (rank, step) == (1, forgotten) else 3

    def body(comm):
        with pytest.raises(ArrayError, match="rank 1 has none in some steps since the last exchange"):
            Training(comm, DiLoCo(3), weights=weights).train(0, 6).end()

    run_ranks(2, body)


def test_without_weights_checkpoints_hold_nothing_of_them():
    def body(comm):
        training = Training(comm, DiLoCo(3), weights=lambda rank, step: None).train(0, 2)
        saved = training.engine.state_dict()["tensors"]
        training.end()
        return saved

    for saved in run_ranks(2, body):
        assert set(saved["a"]) == {"anchor", "momentum", "steps"}
