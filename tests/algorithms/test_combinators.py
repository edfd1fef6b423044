"""Schedules: the same as what they are made of, in the steps where that is used."""

import dataclasses
import warnings
from functools import partial

import numpy as np
import pytest
from support.own_algorithms import Plain
from support.references import (
    STEPS,
    Trainer,
    assert_follows,
    assert_restarts,
    bits,
    common_start,
    decentralized,
    diloco,
    gradient_allreduce,
    low_precision_decentralized,
    make_plan,
    switched,
    trajectories,
)

import bagua_comm
from bagua_comm import (
    Algorithm,
    ArrayError,
    AsyncModelAverage,
    ByteGrad,
    Decentralized,
    DiLoCo,
    Engine,
    ErrorFeedback,
    GradientAllReduce,
    LowPrecisionDecentralized,
    LowPrecisionOnePeer,
    MinMaxUInt8,
    Plan,
    Point,
    QAdam,
    Quantized,
    Reproducible,
    TensorSpec,
    UnsupportedError,
    Window,
    after,
    by_node,
    every,
)
from bagua_comm.algorithms.by_node import ByNode
from bagua_comm.algorithms.combinators import After, Every
from bagua_comm.bucket import make_buckets
from bagua_comm.testing import check_algorithm, run_ranks

PAIRS = Decentralized("shift_one")
WARM_UP = after(4, GradientAllReduce(ErrorFeedback(Quantized())), DiLoCo(3))
ALL = [
    GradientAllReduce(),
    Decentralized(),
    LowPrecisionDecentralized(),
    LowPrecisionOnePeer(),
    QAdam(2),
    DiLoCo(3),
    every(3, PAIRS),
    WARM_UP,
]


@pytest.mark.algorithms("sample")
@pytest.mark.parametrize(
    "algorithm",
    [
        every(2, Decentralized()),
        every(2, LowPrecisionDecentralized()),
        every(2, LowPrecisionOnePeer()),
        every(2, DiLoCo(2)),
        after(0, GradientAllReduce(), Decentralized()),
        after(1, ByteGrad(), DiLoCo(1)),
        after(1, Decentralized("one_peer_exponential"), GradientAllReduce()),
        after(1, LowPrecisionDecentralized(), QAdam(1)),
        after(1, LowPrecisionOnePeer(), after(1, GradientAllReduce(), LowPrecisionDecentralized())),
        WARM_UP,
    ],
    ids=repr,
)
def test_conformance(algorithm):
    check_algorithm(algorithm, sizes=(1, 3, 4))


# every


@pytest.mark.parametrize(
    ("peers", "ranks"), [("all", 1), ("all", 3), ("shift_one", 2), ("shift_one", 4), ("one_peer_exponential", 8)]
)
@pytest.mark.parametrize("n", [1, 3])
def test_every_n_averages_weights_in_the_first_of_n_steps(n, peers, ranks):
    actual = trajectories(ranks, every(n, Decentralized(peers)))

    assert_follows(actual, partial(decentralized, peers=peers, interval=n), ranks=ranks)


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_every_n_sends_the_changes_of_n_steps_at_once(ranks):
    actual = trajectories(ranks, every(3, LowPrecisionDecentralized()))

    reference = partial(low_precision_decentralized, codec=MinMaxUInt8(), interval=3)
    assert_follows(actual, reference, ranks=ranks, wide="float32")


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


def test_nothing_is_sent_between():
    def body(comm):
        with Trainer(comm, every(3, Decentralized()), make_plan(2)) as training:
            sent = []
            for _ in range(7):
                training.step()
                sent.append(training.engine.counter.wire_bytes)
            return np.diff([0, *sent]) > 0

    assert run_ranks(2, body)[0].tolist() == [True, False, False, True, False, False, True]


@pytest.mark.parametrize("n", [0, -1, 1.5])
def test_n_must_be_a_positive_integer(n):
    with pytest.raises(ArrayError, match="every"):
        every(n, Decentralized())


# after


@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 8])
def test_after_gradients_come_weights(ranks):
    algorithm = after(4, GradientAllReduce(), DiLoCo(3, 0.6, 0.8))

    actual = trajectories(ranks, algorithm, start=common_start)

    then = partial(diloco, local_steps=3, outer_lr=0.6, outer_momentum=0.8)
    reference = partial(switched, steps=4, first=gradient_allreduce, then=then)
    assert_follows(actual, reference, ranks=ranks, start=common_start)


@pytest.mark.parametrize("peers", ["all", "shift_one"])
def test_after_weights_come_gradients_of_their_mean(peers):
    actual = trajectories(4, after(5, Decentralized(peers), GradientAllReduce()))

    first = partial(decentralized, peers=peers)
    reference = partial(switched, steps=5, first=first, then=gradient_allreduce, averaged=True)
    assert_follows(actual, reference, ranks=4)


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_the_second_algorithm_begins_with_the_present_weights(ranks):
    algorithm = after(3, Decentralized("one_peer_exponential"), LowPrecisionDecentralized())

    actual = trajectories(ranks, algorithm)

    first = partial(decentralized, peers="one_peer_exponential")
    then = partial(low_precision_decentralized, codec=MinMaxUInt8())
    reference = partial(switched, steps=3, first=first, then=then)
    assert_follows(actual, reference, ranks=ranks, wide="float32")


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_the_first_algorithm_is_finished_before_the_change(ranks):
    algorithm = after(3, LowPrecisionDecentralized(), Decentralized())

    actual = trajectories(ranks, algorithm)

    first = partial(low_precision_decentralized, codec=MinMaxUInt8())
    reference = partial(switched, steps=3, first=first, then=partial(decentralized, peers="all"))
    assert_follows(actual, reference, ranks=ranks, wide="float32")


def test_the_second_algorithm_counts_its_steps_from_0():
    algorithm = after(2, GradientAllReduce(), every(3, PAIRS))

    actual = trajectories(4, algorithm, start=common_start)

    then = partial(decentralized, peers="shift_one", interval=3)
    reference = partial(switched, steps=2, first=gradient_allreduce, then=then)
    assert_follows(actual, reference, ranks=4, start=common_start)


def test_schedules_nest():
    algorithm = after(2, GradientAllReduce(), after(3, every(2, Decentralized()), GradientAllReduce()))

    actual = trajectories(3, algorithm, start=common_start)

    first = partial(decentralized, peers="all", interval=2)
    then = partial(switched, steps=3, first=first, then=gradient_allreduce, averaged=True)
    reference = partial(switched, steps=2, first=gradient_allreduce, then=then)
    assert_follows(actual, reference, ranks=3, start=common_start)


def test_after_no_steps_is_the_second_algorithm():
    expected = trajectories(4, PAIRS)

    actual = trajectories(4, after(0, GradientAllReduce(), PAIRS))

    assert [bits(trajectory) for trajectory in actual] == [bits(trajectory) for trajectory in expected]


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


def test_storage_for_both_payloads_is_needed():
    plan = make_plan(2)

    def body(comm):
        with pytest.raises(ArrayError, match="weight"):
            Engine(comm, after(1, GradientAllReduce(), Decentralized()), plan, plan.allocate())

    run_ranks(2, body)


@pytest.mark.parametrize(
    ("steps", "first", "then"),
    [
        (-1, GradientAllReduce(), Decentralized()),
        (1.5, GradientAllReduce(), Decentralized()),
        (1, "bytegrad", Decentralized()),
        (1, GradientAllReduce(), None),
        (1, GradientAllReduce, Decentralized()),
    ],
)
def test_after_needs_a_number_of_steps_and_two_algorithms(steps, first, then):
    with pytest.raises(ArrayError, match="after"):
        after(steps, first, then)


def test_rounds_that_begin_by_time_cannot_be_left_out_by_steps():
    with pytest.raises(ArrayError, match=r"every: rounds of .* begin by time"):
        every(2, after(1, Decentralized(), AsyncModelAverage()))


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


@pytest.mark.parametrize("algorithm", ["bytegrad", None, Decentralized, Quantized()])
def test_every_needs_an_algorithm(algorithm):
    with pytest.raises(ArrayError, match="every"):
        every(2, algorithm)


@pytest.mark.parametrize(
    "algorithm",
    [
        every(2, Decentralized()),
        after(1, Decentralized(), GradientAllReduce()),
        after(1, GradientAllReduce(), Decentralized()),
    ],
    ids=repr,
)
def test_integers_are_refused_with_the_tensor(algorithm):
    plan = Plan.pack([TensorSpec("count", (3,), "int32")])
    storage = {"grad": plan.allocate(), "weight": plan.allocate()}

    def body(comm):
        with pytest.raises(UnsupportedError, match="'count'"):
            Engine(comm, algorithm, plan, storage)

    run_ranks(2, body)


# Members


MEMBERS = {name for name in [*vars(Algorithm), *Algorithm.__annotations__] if name[0] != "_"} - {"defines"}
"""All that an algorithm may have."""


@pytest.mark.parametrize("combinator", [Every, After, ByNode])
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


@pytest.mark.algorithms("sample")
@pytest.mark.parametrize("algorithm", [*ALL, AsyncModelAverage(interval_s=0, warmup_steps=2)], ids=repr)
def test_algorithms_are_plain_data(algorithm):
    assert eval(repr(algorithm), vars(bagua_comm)) == algorithm
    assert hash(eval(repr(algorithm), vars(bagua_comm))) == hash(algorithm)
    for field in dataclasses.fields(algorithm):
        with pytest.raises(dataclasses.FrozenInstanceError):
            setattr(algorithm, field.name, None)


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


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_other_precisions(dtype):
    algorithm = after(4, GradientAllReduce(), every(2, Decentralized()))

    actual = trajectories(4, algorithm, dtype=dtype, start=common_start)

    then = partial(decentralized, peers="all", interval=2)
    reference = partial(switched, steps=4, first=gradient_allreduce, then=then)
    assert_follows(actual, reference, ranks=4, dtype=dtype, start=common_start, atol=0.1)


@pytest.mark.parametrize(
    "algorithm",
    [every(3, PAIRS), WARM_UP, after(5, LowPrecisionOnePeer(), every(2, LowPrecisionDecentralized()))],
    ids=repr,
)
def test_training_continues_after_a_restart(algorithm):
    assert_restarts(4, algorithm, at=(2, 4, 5, 8))


def test_training_continues_in_other_buckets():
    actual = trajectories(
        3, after(4, GradientAllReduce(), DiLoCo(3)), start=common_start, replans={2: 10_000, 4: 1, 8: 100}
    )

    then = partial(diloco, local_steps=3, outer_lr=0.7, outer_momentum=0.5)
    reference = partial(switched, steps=4, first=gradient_allreduce, then=then)
    assert_follows(actual, reference, ranks=3, start=common_start)


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
