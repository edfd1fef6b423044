"""Schedules: the same as what they are made of, in the steps where that is used."""

import dataclasses
import warnings
from functools import partial

import numpy as np
import pytest
from support.own_algorithms import Plain
from support.references import STEPS, Trainer, bits, common_start, make_plan, trajectories

from bagua_comm import (
    Algorithm,
    ArrayError,
    Decentralized,
    DiLoCo,
    Engine,
    ErrorFeedback,
    GradientAllReduce,
    LowPrecisionDecentralized,
    LowPrecisionOnePeer,
    Plan,
    Point,
    Quantized,
    Reproducible,
    TensorSpec,
    Window,
    after,
    by_node,
    every,
)
from bagua_comm.algorithms.by_node import ByNode
from bagua_comm.algorithms.combinators import Every
from bagua_comm.bucket import make_buckets
from bagua_comm.testing import run_ranks

WARM_UP = after(4, GradientAllReduce(ErrorFeedback(Quantized())), DiLoCo(3))


# every


def test_every_n_leaves_gradients_local_in_between():
    def body(comm):
        with Trainer(comm, every(2, GradientAllReduce()), make_plan(2), start=common_start, lr=0) as training:
            kept = []
            for _ in range(4):
                training.step()
                kept.append([g.copy() for g in training.grads])
            return kept

    for step, (mine, other) in enumerate(zip(*run_ranks(2, body), strict=True)):
        for g, h in zip(mine, other, strict=True):
            assert np.array_equal(g, h) == (step % 2 == 0)


@pytest.mark.parametrize(
    ("algorithm", "sends"),
    [(every(3, Decentralized()), [1, 0, 0, 1, 0, 0, 1]), (DiLoCo(3), [0, 0, 1, 0, 0, 1, 0])],
)
def test_nothing_is_sent_between(algorithm, sends):
    def body(comm):
        with Trainer(comm, algorithm, make_plan(2)) as training:
            sent = []
            for _ in range(7):
                training.step()
                training.engine.flush()
                sent.append(training.engine.counter.wire_bytes)
            return np.diff([0, *sent]) > 0

    assert run_ranks(2, body)[0].tolist() == sends


# after


def test_the_buckets_are_those_of_the_payload_in_use():
    def body(comm):
        with Trainer(comm, after(2, GradientAllReduce(), Decentralized()), make_plan(2)) as training:
            used = []
            for _ in range(4):
                training.engine.at(Point.FORWARD)
                flat = training.engine.buckets[0].flat
                used.append(
                    "grad" if flat is training.grads[0] else "weight" if flat is training.weights[0] else ""
                )
                training.engine.at(Point.BACKWARD)
                training.engine.at(Point.STEP)
            return used

    assert run_ranks(2, body) == [["grad", "grad", "weight", "weight"]] * 2


def test_diloco_counts_the_steps_in_which_it_may_communicate():
    def body(comm):
        with Trainer(comm, every(2, DiLoCo(3)), make_plan(comm.size)) as training:
            spent = []
            for _ in range(13):
                training.step()
                training.engine.flush()
                spent.append(training.engine.counter.calls)
        return spent

    # Steps 0, 2 and 4 are due, and the third of them steps the outer optimizer; then 6, 8 and 10.
    buckets = len(make_plan(2).buckets)
    assert run_ranks(2, body)[0] == [0] * 4 + [buckets] * 6 + [2 * buckets] * 3


# Members


MEMBERS = {name for name in [*vars(Algorithm), *Algorithm.__annotations__] if name[0] != "_"} - {"defines"}
"""All that an algorithm may have."""


@pytest.mark.parametrize("combinator", [Every, ByNode])
def test_a_combinator_handles_each_member_of_an_algorithm(combinator):
    """All combinators forward an optional member of algorithms, or refuse algorithms that have it."""
    missing = MEMBERS - {name for base in combinator.__mro__[:-2] for name in vars(base)}
    assert not missing


@dataclasses.dataclass
class Given:
    momentum: np.ndarray
    calls: list


@dataclasses.dataclass(frozen=True)
class Everything(Algorithm):
    """An algorithm with all members, which writes down what it is asked."""

    payload: str = "grad"
    asked: list = dataclasses.field(default_factory=list, compare=False)

    window = Window(Point.GRADIENT, Point.BACKWARD)
    lends = "momentum"
    equal_start = False
    drifts = True

    def lent(self, state):
        return state.momentum

    def check(self, dtype):
        self.asked.append(dtype)

    def check_size(self, size):
        self.asked.append(size)

    def init(self, bucket, comm):
        return Given(np.zeros_like(bucket.flat), self.asked)

    def hold(self, bucket, state):
        state.calls.append("hold")

    def begin(self, bucket, state):
        state.calls.append("begin")

    def exchange(self, bucket, comm, state):
        state.calls.append("exchange")

    def skip(self, bucket, state):
        state.calls.append("skip")

    def commit(self, bucket, state):
        state.calls.append("commit")


@pytest.mark.parametrize("around", [partial(every, 1), partial(after, 0, Plain())], ids=["every", "after"])
def test_members_that_a_combinator_forwards_reach_the_algorithm(around):
    plan = Plan.pack([TensorSpec("a", (4,), "float32")])
    (bucket,) = make_buckets(plan, plan.allocate())

    def body(comm):
        bare = Everything()
        whole = around(bare)
        whole.check("float32")
        whole.check_size(3)
        assert bare.asked == ["float32", 3]
        assert (whole.payload, whole.window, whole.lends) == ("grad", bare.window, "momentum")
        assert (whole.equal_start, whole.drifts) == (False, True)
        whole = whole.phase(0)
        state = whole.init(bucket, comm)
        assert whole.lent(state).shape == bucket.flat.shape
        bucket.step = 0
        del bare.asked[:]
        whole.hold(bucket, state)
        whole.begin(bucket, state)
        whole.exchange(bucket, comm, state)
        whole.skip(bucket, state)
        whole.commit(bucket, state)
        assert bare.asked == ["hold", "begin", "exchange", "skip", "commit"]

    run_ranks(1, body)


def test_members_that_cannot_go_through_a_combinator_are_refused():
    with pytest.raises(ArrayError, match=r"by_node: every\(2, Everything.* lends an array to optimizers"):
        by_node(every(2, Everything("weight")))

    def body(comm):
        algorithm = every(2, GradientAllReduce(Reproducible(addends=4)))
        refused = pytest.raises(ArrayError, match=r"hold: every\(2, .* averages nothing in some steps")
        with Trainer(comm, algorithm, make_plan(2)) as training, refused:
            training.engine.hold()

    run_ranks(2, body)


# All algorithms


@pytest.mark.parametrize("algorithm", [Decentralized(), LowPrecisionDecentralized(), WARM_UP], ids=repr)
def test_passes_for_evaluation_change_nothing(algorithm):
    def body(comm):
        with Trainer(comm, algorithm, make_plan(2), start=common_start) as training:
            trajectory = []
            for step in range(STEPS):
                for _ in range(step % 3):
                    training.engine.at(Point.FORWARD)
                trajectory.append(training.step())
            return trajectory

    expected = trajectories(2, algorithm, start=common_start)
    assert [bits(x) for x in run_ranks(2, body)] == [bits(x) for x in expected]


@pytest.mark.parametrize("algorithm", [LowPrecisionDecentralized(), LowPrecisionOnePeer(), DiLoCo(3)], ids=repr)
@pytest.mark.parametrize("finish", [Engine.settle, Engine.state_dict, Engine.stop, Engine.close])
def test_an_exchange_is_written_back_before_weights_are_read(algorithm, finish):
    def weights(comm, finish):
        with Trainer(comm, algorithm, make_plan(2), start=common_start) as training:
            training.run(3)
            finish(training.engine)
            return training.tensors()

    expected = run_ranks(2, lambda comm: weights(comm, lambda engine: engine.at(Point.FORWARD)))
    actual = run_ranks(2, lambda comm: weights(comm, finish))
    assert bits(actual) == bits(expected)


def test_every_warns_where_gradients_are_not_averaged_in_some_steps():
    for algorithm in (GradientAllReduce(), after(2, GradientAllReduce(), Decentralized())):
        with pytest.warns(
            UserWarning, match=r"every: GradientAllReduce.* averages gradients, so that ranks drift"
        ):
            every(2, algorithm)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        every(1, GradientAllReduce())
        every(2, DiLoCo(2))
