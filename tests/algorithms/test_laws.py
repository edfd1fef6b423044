"""Laws of all algorithms: combinators that change nothing, phases that follow each other, stops."""

import functools
import random
from dataclasses import dataclass, field

import numpy as np
import pytest
from support.references import FittingTrainer, Trainer, bits, common_start, make_plan, trajectories

from bagua_comm import (
    ArrayError,
    AsyncModelAverage,
    ByteGrad,
    Checkpoints,
    Decentralized,
    DiLoCo,
    ErrorFeedback,
    GradientAllReduce,
    Hierarchical,
    LowPrecisionDecentralized,
    LowPrecisionOnePeer,
    Own,
    Point,
    QAdam,
    Quantized,
    Reproducible,
    SparseLoCo,
    StreamingDiLoCo,
    after,
    by_node,
    every,
)
from bagua_comm.algorithms.base import exchanges_weights, runs_in_rounds
from bagua_comm.checkpoint import tree_of_engine
from bagua_comm.testing import run_ranks, sample

GRADIENTS = [
    GradientAllReduce(),
    ByteGrad(),
    GradientAllReduce(ErrorFeedback()),
    GradientAllReduce(Hierarchical(ErrorFeedback())),
    GradientAllReduce(Reproducible()),
]
LENDING = [QAdam(2), QAdam(2, average=ErrorFeedback())]
MEAN_STEP = {"outer_lr": 1.0, "outer_momentum": 0.0}  # an outer step leads to the mean of the weights
WEIGHTS = [
    Decentralized(),
    Decentralized("shift_one"),
    Decentralized("one_peer_exponential"),
    LowPrecisionDecentralized(),
    LowPrecisionOnePeer(),
    DiLoCo(2),
    DiLoCo(3, **MEAN_STEP),
    DiLoCo(2, **MEAN_STEP, average=ErrorFeedback()),
    StreamingDiLoCo(2, 2, delay=0, mix=0, **MEAN_STEP),
    StreamingDiLoCo(4, 2, delay=2, **MEAN_STEP),
    SparseLoCo(2, chunk=64, keep=8, decay=1.0),
]
ROUNDS = [AsyncModelAverage(interval_s=0), AsyncModelAverage(interval_s=0, warmup_steps=2)]
MADE = [
    every(2, Decentralized("shift_one")),
    every(2, GradientAllReduce()),
    every(2, QAdam(2)),
    by_node(DiLoCo(2, **MEAN_STEP)),
    by_node(LowPrecisionOnePeer()),
    every(2, StreamingDiLoCo(2, 2, **MEAN_STEP)),
    after(2, GradientAllReduce(), StreamingDiLoCo(3, 2, **MEAN_STEP)),
    after(2, GradientAllReduce(), DiLoCo(2, **MEAN_STEP)),
]
ALL = [*GRADIENTS, *LENDING, *WEIGHTS, *ROUNDS, *MADE]


def outlives_steps(algorithm):
    """Whether an exchange may be under way between two steps."""
    return any(getattr(phase.window, "delay", 0) for phase in algorithm.phases)


def trained(algorithm, **settings):
    """The weights in each step, as bytes, where steps begin with equal weights."""
    settings = {"trainer": FittingTrainer, "start": common_start, **settings}
    return [bits(trajectory) for trajectory in trajectories(2, algorithm, **settings)]


# Combinators that change nothing -------------------------------------------------------------------------


@pytest.mark.algorithms("sample")
@pytest.mark.parametrize("algorithm", [x for x in ALL if not runs_in_rounds(x)], ids=repr)
def test_every_1_changes_nothing(algorithm):
    assert trained(every(1, algorithm)) == trained(algorithm)


UNPADDED = [x for x in ALL if not isinstance(x, SparseLoCo)]
"""Algorithms whose result does not depend on zeros behind the tensors, by which `by_node` divides a bucket."""


@pytest.mark.algorithms("sample")
@pytest.mark.parametrize("algorithm", ALL, ids=repr)
def test_after_0_steps_changes_nothing(algorithm):
    assert trained(after(0, Decentralized(), algorithm)) == trained(algorithm)


@pytest.mark.algorithms("sample")
@pytest.mark.parametrize("algorithm", UNPADDED, ids=repr)
def test_by_node_changes_nothing_on_nodes_of_one_rank(algorithm):
    phases = algorithm.phases
    refused = runs_in_rounds(algorithm) or outlives_steps(algorithm)
    if refused or any(phase.payload == "grad" for phase in phases):
        with pytest.raises(ArrayError, match="by_node"):
            by_node(algorithm)
        return
    assert trained(by_node(algorithm), nodes="ab") == trained(algorithm, nodes="ab")


def test_every_n_qadam_trains_as_its_optimizer_alone_does_between():
    """After the warm-up the momentum continues with this rank's gradients, until it is averaged again."""

    def body(comm):
        with FittingTrainer(comm, every(3, QAdam(2)), make_plan(2), start=common_start) as training:
            momenta = []
            for _ in range(8):
                before = momenta[-1] if momenta else None
                training.step()
                momenta.append(training.engine.phase.lent(training.engine.states[0]).copy())
                if before is not None and training.engine.step in (5, 6, 8):
                    expected = 0.9 * before + 0.1 * training.grads[0]
                    np.testing.assert_allclose(momenta[-1], expected, rtol=1e-5, atol=1e-7)
            return momenta[6]  # averaged in the seventh step

    mine, other = run_ranks(2, body)
    assert mine.tobytes() == other.tobytes()


# Sequences -----------------------------------------------------------------------------------------------


def equal_after(algorithm, steps, folder):
    """Whether ranks have the same weights after each of `steps` steps; at the end, their state is saved."""

    def body(comm):
        with FittingTrainer(comm, algorithm, make_plan(comm.size), start=common_start) as training:
            equal = []
            for _ in range(steps):
                training.step()
                training.engine.settle()
                others = comm.allgather_object(bits([training.tensors()]))
                equal.append(others == [others[0]] * comm.size)
            if folder is not None:
                engine = tree_of_engine(training.engine)
                weights = Own(training.tensors(), "mean")
                Checkpoints(folder, comm).save(steps, {"engine": engine, "weights": weights})
            return equal

    return run_ranks(2, body)[0]


@functools.cache
def equal_alone(algorithm, steps):
    return equal_after(algorithm, steps, None)


def assert_equal_as_without(first, then, folder):
    """In `after`, ranks have equal weights in all steps in which they have them by `then` alone, and can save."""
    local = [every(2, QAdam(2))]  # the momenta of its ranks differ, and its checkpoint says so
    goes_on = first == then and len(then.phases) == 1
    alone = equal_alone(then, 8)[3 if goes_on else 0 :][:5]
    folder = folder if first not in local and then not in local else None
    actual = equal_after(after(3, first, then), 8, folder)[3:]
    assert all(now or not before for before, now in zip(alone, actual, strict=True)), (first, then)


@pytest.mark.parametrize(
    ("first", "then"),
    [
        (Decentralized("one_peer_exponential"), GradientAllReduce()),
        (LowPrecisionOnePeer(), DiLoCo(2)),
        (AsyncModelAverage(interval_s=0), DiLoCo(2)),
        (every(2, DiLoCo(2)), QAdam(2)),
        (every(2, GradientAllReduce()), by_node(DiLoCo(2, **MEAN_STEP))),
    ],
    ids=repr,
)
def test_weights_become_equal_after_any_algorithm_as_they_do_without_it(first, then, tmp_path):
    assert_equal_as_without(first, then, tmp_path)


DIFFERENT = [x for x in ALL if x not in (*GRADIENTS[:2], *GRADIENTS[4:], *LENDING[1:], *WEIGHTS[:2], WEIGHTS[6])]


@pytest.mark.slow
@pytest.mark.parametrize("first", DIFFERENT, ids=repr)
def test_weights_become_equal_in_many_pairs(first, tmp_path):
    """Each algorithm comes after a fifth of the others."""
    for number, then in enumerate(DIFFERENT[DIFFERENT.index(first) % 5 :: 5]):
        assert_equal_as_without(first, then, tmp_path / str(number))


def test_weights_are_the_mean_when_an_algorithm_that_needs_equal_ones_begins():
    def body(comm, algorithm):
        with Trainer(comm, algorithm, make_plan(2)) as training:
            training.run(3)
            return training.tensors()

    def trained(algorithm):
        return run_ranks(2, lambda comm: body(comm, algorithm))

    apart = trained(Decentralized("one_peer_exponential"))
    for then in (GradientAllReduce(), QAdam(2), DiLoCo(2), every(2, DiLoCo(2)), by_node(DiLoCo(2))):
        for weights in trained(after(3, Decentralized("one_peer_exponential"), then)):
            for name, x in weights.items():
                np.testing.assert_allclose(x, (apart[0][name] + apart[1][name]) / 2, atol=1e-6)
    kept = trained(after(3, Decentralized("one_peer_exponential"), LowPrecisionOnePeer()))
    assert bits(kept) == bits(apart)


@pytest.mark.parametrize("then", [GradientAllReduce(), DiLoCo(2)], ids=repr)
def test_a_new_plan_that_leads_back_to_equal_weights_averages_them(then):
    """The algorithm has begun to exchange weights, and is to begin to do so later."""

    def body(comm):
        with Trainer(comm, after(2, then, Decentralized("one_peer_exponential")), make_plan(2)) as training:
            training.run(5)
            apart = bits([training.tensors()])
            later = after(20, then, Decentralized("one_peer_exponential"))
            training.replan(training.plan, later)
            assert training.engine.phase == then
            met = bits([training.tensors()])
            training.run(2)
            training.engine.settle()
            return apart, met, bits([training.tensors()])

    mine, other = run_ranks(2, body)
    assert mine[0] != other[0]
    assert mine[1:] == other[1:]


# Stops ---------------------------------------------------------------------------------------------------


class FixedTrainer(FittingTrainer):
    """Gradients that depend on the rank and the step alone, and a sum of the steps along them."""

    def __init__(self, comm, algorithm):
        super().__init__(comm, algorithm, make_plan(comm.size), start=common_start)
        self.made = 0
        self.moved = [np.zeros_like(x) for x in self.weights]

    def step(self, midway=None):
        engine = self.engine
        engine.at(Point.FORWARD)
        for bucket, (spec, g) in enumerate(zip(self.plan.buckets, self.grads, strict=True)):
            g[...] = 0
            for name, x in spec.cut(g).items():
                x[...] = 1 + sample(self.comm.rank, x.shape, "float32", seed=100 * self.made + ord(name))
            self.moved[bucket] += self.lr * g
            for tensor in spec.tensors:
                engine.ready(tensor.name)
            if bucket == 0 and midway is not None:
                midway(engine)
        engine.at(Point.BACKWARD)
        self.update()
        engine.at(Point.STEP)
        self.made += 1


LINEAR = [
    x
    for x in ALL
    if not any(p.lends for p in x.phases) and not outlives_steps(x) and x != DiLoCo(2)
    if not isinstance(x, SparseLoCo)  # which keeps what it has not sent
]
"""Algorithms that leave the sum of the weights over the ranks as it is, up to rounding."""


def assert_nothing_is_lost(algorithm, seed):
    """The sum of the weights moves along all gradients, whatever stops and resumes between."""
    order = random.Random(f"{algorithm} {seed}")
    actions = [order.choice(["step", "step", "stop", "resume", "read", "pass", "uneven"]) for _ in range(14)]
    midway = [order.choice([None, None, None, "stop", "resume"]) for _ in actions]
    rounds = runs_in_rounds(algorithm)

    def body(comm):
        with FixedTrainer(comm, algorithm) as training:
            engine = training.engine
            first = [x.copy() for x in training.weights]
            for action, inside in zip(actions, midway, strict=True):
                if action == "step":
                    training.step({"stop": type(engine).stop, "resume": type(engine).resume}.get(inside))
                elif action in ("stop", "resume"):
                    getattr(engine, action)()
                elif action == "read":
                    engine.settle()
                elif action == "pass" and not rounds:
                    engine.at(Point.FORWARD)
                elif action == "uneven" and engine.stopped:
                    for _ in range(1 + comm.rank):
                        training.step()
            engine.resume()
            engine.at(Point.FORWARD)
            engine.stop()  # so that rounds and residuals are written back
            kept = [getattr(state, "average", None) for state in engine.states]
            lost = [getattr(average, "residual", None) for average in kept]
            return first, training.weights, training.moved, lost, engine.step

    ranks = run_ranks(2, body)
    for bucket, _ in enumerate(ranks[0][0]):
        start, end, moved = (sum(rank[k][bucket] for rank in ranks) for k in range(3))
        np.testing.assert_allclose(end, start - moved, atol=0.15, err_msg=f"{actions} {midway}")


@pytest.mark.algorithms("sample")
@pytest.mark.parametrize("algorithm", LINEAR, ids=repr)
def test_stops_and_resumes_lose_no_step(algorithm):
    for seed in range(2):
        assert_nothing_is_lost(algorithm, seed)


@pytest.mark.slow
@pytest.mark.parametrize("algorithm", LINEAR, ids=repr)
def test_many_stops_and_resumes_lose_no_step(algorithm):
    for seed in range(2, 12):
        assert_nothing_is_lost(algorithm, seed)


@pytest.mark.algorithms("sample")
@pytest.mark.parametrize("algorithm", ALL, ids=repr)
@pytest.mark.parametrize("read", [False, True])
def test_a_stopped_rank_trains_by_itself_and_continues_from_there(algorithm, read):
    def body(comm):
        with FittingTrainer(comm, algorithm, make_plan(comm.size), start=common_start) as training:
            training.run(3)
            training.engine.stop()
            sent = training.engine.counter.wire_bytes
            for _ in range(2 + comm.rank):
                alone = Alone(training)
                training.step()
                alone.check(training)
            assert training.engine.counter.wire_bytes == sent
            before = training.tensors()
            training.engine.resume()
            (training.engine.settle if read else lambda: training.engine.at(Point.FORWARD))()
            return before, training.tensors(), training.engine.step

    ranks = run_ranks(2, body)
    for before, now, step in ranks:
        if not exchanges_weights(algorithm.phase(6)):
            before = {name: (ranks[0][0][name] + ranks[1][0][name]) / 2 for name in before}
        for name in before:
            np.testing.assert_allclose(now[name], before[name], atol=1e-6)
        if not runs_in_rounds(algorithm):
            assert step == 6


class Alone:
    """The expected result of the next step of a rank that trains alone."""

    def __init__(self, training):
        phase = training.engine.phase
        self.weights = [x.copy() for x in training.weights]
        self.momenta = [phase.lent(state).copy() for state in training.engine.states] if phase.lends else None
        self.variances = [moments.variance.copy() for moments in training.moments]

    def check(self, training):
        for i, (x, g, now) in enumerate(zip(self.weights, training.grads, training.weights, strict=True)):
            if self.momenta is None:
                np.testing.assert_allclose(now, x - training.lr * g, atol=1e-6)
                continue
            m, v, moments = self.momenta[i], self.variances[i], training.moments[i]
            m = 0.9 * m + 0.1 * g  # the third step and all after it are past the warm-up
            deviation = np.sqrt(v / (1 - 0.999**2)) + 1e-8
            expected = x - 0.05 * m / (1 - 0.9**moments.step) / deviation
            np.testing.assert_allclose(now, expected, rtol=1e-4, atol=1e-5)


def test_a_phase_that_would_begin_while_stopped_begins_afterwards():
    def body(comm):
        algorithm = after(2, GradientAllReduce(), DiLoCo(2))
        with Trainer(comm, algorithm, make_plan(2), start=common_start) as training:
            training.run(1)
            training.engine.stop()
            training.run(3 + 2 * comm.rank)
            stopped = training.engine.phase
            training.engine.resume()
            equal = bits([training.tensors()])
            training.run(2)
            training.engine.settle()
            return stopped, training.engine.phase, training.engine.step, equal, bits([training.tensors()])

    mine, other = run_ranks(2, body)
    assert mine[:3] == (GradientAllReduce(), DiLoCo(2), 8)
    assert mine == other


BY_STEPS = [x for x in ALL if not runs_in_rounds(x) and not outlives_steps(x)]  # a stop ends both


@pytest.mark.algorithms("sample")
@pytest.mark.parametrize("algorithm", BY_STEPS, ids=repr)
def test_a_pause_without_steps_changes_nothing(algorithm):
    def body(comm, paused):
        with FittingTrainer(comm, algorithm, make_plan(comm.size), start=common_start) as training:
            trajectory = []
            for _ in range(6):
                trajectory.append(training.step())
                if paused:
                    training.engine.stop()
                    training.engine.resume()
            return bits(trajectory)

    paused, through = (run_ranks(2, lambda comm, p=p: body(comm, p)) for p in (True, False))
    assert paused == through


# Other averages ------------------------------------------------------------------------------------------

AVERAGES = [
    ErrorFeedback(),
    Quantized(min_bytes=0),
    Hierarchical(ErrorFeedback()),
    Reproducible(),
    ErrorFeedback(decay=0.5),
    GradientAllReduce().average,
]


@pytest.mark.parametrize(
    ("nodes", "make"),
    [
        ("aab", GradientAllReduce),
        ("ab", GradientAllReduce),
        ("ab", lambda average: every(1, GradientAllReduce(average))),
        ("ab", lambda average: after(0, Decentralized(), GradientAllReduce(average))),
    ],
)
def test_replans_to_other_averages_lose_no_residual(nodes, make):
    """Means without feedback lose what they round; all others make up for what the ones before have lost."""
    averages = [average for average in AVERAGES if not isinstance(average, Quantized)]

    def body(comm):
        plan = make_plan(comm.size)
        with Trainer(comm, make(ErrorFeedback()), plan, start=common_start) as training:
            exact, actual = (0 * training.grads[0].astype("float64") for _ in range(2))
            for step in range(2 * len(averages) + 1):
                if step % 2:
                    algorithm = make(averages[(step // 2) % len(averages)])
                    training.replan(plan, algorithm)
                training.engine.at(Point.FORWARD)
                size = training.grads[0].size
                rows = np.stack([100 * sample(rank, (size,), "float32", seed=step) for rank in range(comm.size)])
                rows[:, sum(tensor.size for tensor in plan.buckets[0].tensors) :] = 0
                training.grads[0][...] = rows[comm.rank]
                exact += rows.astype("float64").mean(0)
                training.engine.ready_bucket(0)
                training.engine.at(Point.BACKWARD)
                actual += training.grads[0]
                training.engine.at(Point.STEP)
            return exact, actual

    averages.append(GradientAllReduce().average)
    for exact, actual in run_ranks(len(nodes), body, nodes=nodes):
        np.testing.assert_allclose(actual, exact, atol=2e-3)


@pytest.mark.parametrize(
    ("now", "then"),
    [
        (every(2, DiLoCo(2)), every(2, Decentralized())),
        (every(1, GradientAllReduce()), every(1, QAdam(2))),
        (by_node(DiLoCo(2)), by_node(LowPrecisionOnePeer())),
    ],
    ids=repr,
)
def test_a_replan_to_another_algorithm_inside_of_a_combinator_is_refused(now, then):
    def body(comm):
        plan = make_plan(comm.size)
        with Trainer(comm, now, plan) as training, pytest.raises(ArrayError, match="replan: algorithm is"):
            training.engine.replan(plan, algorithm=then)

    run_ranks(2, body)


def test_a_replan_that_would_lose_held_addends_is_refused():
    def body(comm):
        algorithm = GradientAllReduce(Reproducible(addends=4))
        with Trainer(comm, algorithm, make_plan(comm.size)) as training:
            training.engine.hold()
            with pytest.raises(ArrayError, match="replan: addends are held, and would be lost"):
                training.replan(training.plan, GradientAllReduce())
            training.step()
            training.replan(training.plan, GradientAllReduce())

    run_ranks(2, body)


@dataclass
class Kept:
    total: np.ndarray | None = None


@dataclass
class KeptTwice:
    total: np.ndarray | None = None
    squares: np.ndarray = field(default_factory=lambda: np.zeros(3))


@dataclass(frozen=True)
class Remembers(GradientAllReduce):
    """Keeps more with one setting than with another."""

    twice: bool = False

    def init(self, bucket, comm):
        return KeptTwice(bucket.flat.copy(), bucket.flat.copy()) if self.twice else Kept(bucket.flat.copy())

    def exchange(self, bucket, comm, state):
        comm.allreduce(bucket.flat, out=bucket.flat, op="avg")


def test_a_replan_that_would_lose_state_is_refused_on_all_ranks_and_changes_nothing():
    def body(comm):
        with Trainer(comm, Remembers(twice=True), make_plan(comm.size), start=common_start) as training:
            training.run(2)
            before = training.engine.plan, training.engine.algorithm, bits([training.tensors()])
            with pytest.raises(ArrayError, match=r"keeps 'squares' of 'a', which would be lost"):
                training.engine.replan(make_plan(comm.size, bucket_elements=10_000), algorithm=Remembers())
            assert before == (training.engine.plan, training.engine.algorithm, bits([training.tensors()]))
            training.run(2)
            training.engine.replan(training.plan, algorithm=Remembers(twice=True))

    run_ranks(2, body)
