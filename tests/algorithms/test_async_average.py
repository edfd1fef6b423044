"""Asynchronous averaging: what a round brings, and that no rank waits for another but in `stop`."""

import pickle
import threading
from functools import partial

import numpy as np
import pytest
from support.references import (
    STEPS,
    AsyncTrainer,
    Trainer,
    assert_follows,
    assert_restarts,
    async_model_average,
    by_name,
    common_start,
    gradient_allreduce,
    make_plan,
    start,
    switched,
    trajectories,
)

from bagua_comm import (
    ArrayError,
    AsyncModelAverage,
    Engine,
    GradientAllReduce,
    Plan,
    Point,
    TensorSpec,
    UnsupportedError,
    after,
)
from bagua_comm.testing import check_algorithm, run_ranks

ALWAYS = AsyncModelAverage(interval_s=0)
"""Begins a round at every step that finds none under way."""


def assert_all_hold(expected, tensors, atol=1e-5):
    """Every rank's tensors, [rank][name], are `expected`."""
    for rank, mine in enumerate(tensors):
        for name, x in mine.items():
            what = f"{name} of rank {rank}"
            np.testing.assert_allclose(x.astype("f8"), expected[name], rtol=0, atol=atol, err_msg=what)


def mean_of_starts(ranks):
    plan = make_plan(ranks)
    flats = [[start(spec, rank) for rank in range(ranks)] for spec in plan.buckets]
    return by_name(plan, [np.mean(flat, axis=0) for flat in flats])


def assign(training, value):
    for x in training.weights:
        x[...] = value


@pytest.mark.parametrize(
    "algorithm",
    [
        ALWAYS,
        AsyncModelAverage(),
        AsyncModelAverage(interval_s=0, warmup_steps=2),
        after(1, GradientAllReduce(), ALWAYS),
    ],
    ids=repr,
)
def test_conformance(algorithm):
    check_algorithm(algorithm, sizes=(1, 2, 3, 4, 8))


# Rounds


@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 8])
def test_a_round_brings_the_mean_and_keeps_the_progress_since_its_snapshot(ranks):
    actual = trajectories(ranks, ALWAYS, trainer=AsyncTrainer)

    assert_follows(actual, async_model_average, ranks=ranks)


@pytest.mark.parametrize(("dtype", "atol"), [("float64", 1e-12), ("float16", 0.02), ("bfloat16", 0.1)])
def test_other_precisions(dtype, atol):
    actual = trajectories(4, ALWAYS, dtype=dtype, trainer=AsyncTrainer)

    assert_follows(actual, async_model_average, ranks=4, dtype=dtype, atol=atol)


def test_a_rank_that_runs_ahead_does_not_wait_and_keeps_its_progress():
    ran_ahead = threading.Event()

    def run_ahead(training):
        training.step()
        for _ in range(10):
            for x in training.weights:
                x += 1
            training.step()
        alone = training.tensors()
        ran_ahead.set()
        training.engine.flush()
        training.engine.at(Point.STEP)
        return alone, training.tensors()

    def body(comm):
        with Trainer(comm, ALWAYS, make_plan(2), lr=0) as training:
            if comm.rank == 0:
                return run_ahead(training)
            assert ran_ahead.wait(20)
            return training.step()

    (alone, together), other = run_ranks(2, body)
    first = {name: 2 * x - other[name] for name, x in mean_of_starts(2).items()}
    assert_all_hold({name: x + 10 for name, x in first.items()}, [alone])
    assert_all_hold({name: x + 10 for name, x in mean_of_starts(2).items()}, [together])


def test_a_round_begins_only_when_the_interval_has_passed():
    def body(comm):
        with Trainer(comm, AsyncModelAverage(interval_s=1e6), make_plan(2), lr=0) as training:
            for _ in range(2):  # the first round
                training.step()
                training.engine.flush()
            assign(training, comm.rank)
            for _ in range(5):
                training.step()
                training.engine.flush()
            return [x.tolist() for tensors in training.run(1) for x in tensors.values()]

    for rank, values in enumerate(run_ranks(2, body)):
        assert {x for value in values for x in np.ravel(value)} == {rank}


@pytest.mark.parametrize("ranks", [2, 3])
def test_passes_without_a_backward_or_a_step_do_no_harm(ranks):
    def body(comm):
        with Trainer(comm, ALWAYS, make_plan(ranks), lr=0) as training:
            for points in (
                [Point.FORWARD, Point.FORWARD, Point.BACKWARD, Point.STEP],  # two losses
                [Point.FORWARD, Point.BACKWARD, Point.FORWARD, Point.BACKWARD, Point.STEP],  # accumulation
                [Point.FORWARD, Point.FORWARD],  # evaluation
            ):
                for _ in range(3 + comm.rank):
                    for point in points:
                        training.engine.at(point)
                training.step()
            training.engine.stop()
            return training.tensors()

    assert_all_hold(mean_of_starts(ranks), run_ranks(ranks, body))


# Stopping


@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 8])
@pytest.mark.parametrize(
    "steps", [lambda rank: 1, lambda rank: rank, lambda rank: 5 * (rank % 3)], ids=["one", "rank", "uneven"]
)
def test_all_ranks_hold_the_mean_when_they_have_stopped(steps, ranks):
    def body(comm):
        with Trainer(comm, ALWAYS, make_plan(ranks), lr=0) as training:
            training.run(steps(comm.rank))
            training.engine.stop()
            return training.tensors()

    assert_all_hold(mean_of_starts(ranks), run_ranks(ranks, body))


@pytest.mark.parametrize("ranks", [2, 3, 8])
def test_the_sum_of_the_updates_of_all_ranks_is_kept(ranks):
    def body(comm):
        with Trainer(comm, ALWAYS, make_plan(ranks)) as training:
            progress = [np.zeros_like(x) for x in training.weights]
            for _ in range(10 + 3 * comm.rank):
                training.step()
                for total, g in zip(progress, training.grads, strict=True):
                    total -= training.lr * g
            training.engine.stop()
            return by_name(training.plan, progress), training.tensors()

    results = run_ranks(ranks, body)
    progress = {name: np.mean([p[name] for p, _ in results], axis=0) for name in results[0][0]}
    expected = {name: x + progress[name] for name, x in mean_of_starts(ranks).items()}
    assert_all_hold(expected, [tensors for _, tensors in results])


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_nothing_is_exchanged_between_stop_and_resume(ranks):
    def body(comm):
        with Trainer(comm, ALWAYS, make_plan(ranks), lr=0) as training:
            training.run(3)
            training.engine.stop()
            training.engine.stop()
            assign(training, comm.rank)
            stopped = training.run(2 + comm.rank)[-1]
            training.engine.resume()
            training.engine.resume()
            training.run(3)
            training.engine.stop()
            return stopped, training.tensors()

    results = run_ranks(ranks, body)
    for rank, (stopped, _) in enumerate(results):
        assert_all_hold(dict.fromkeys(stopped, rank), [stopped])
    mean = dict.fromkeys(results[0][0], (ranks - 1) / 2)
    assert_all_hold(mean, [resumed for _, resumed in results])


@pytest.mark.parametrize("stops_first", [True, False])
def test_closing_with_a_round_under_way_returns(stops_first):
    def body(comm):
        training = Trainer(comm, ALWAYS, make_plan(3), lr=0)
        training.run(1 + 4 * comm.rank)
        if stops_first:
            training.engine.stop()
        training.engine.close()
        training.engine.close()
        return float(comm.allreduce(np.array(1.0)))

    assert run_ranks(3, body) == [3.0] * 3


# Warm-up


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_gradients_are_averaged_in_the_warm_up_and_weights_from_then_on(ranks):
    algorithm = AsyncModelAverage(interval_s=0, warmup_steps=4)

    actual = trajectories(ranks, algorithm, start=common_start, trainer=AsyncTrainer)

    reference = partial(switched, steps=4, first=gradient_allreduce, then=async_model_average)
    assert_follows(actual, reference, ranks=ranks, start=common_start)


def test_the_warm_up_can_be_stopped_and_resumed():
    def body(comm):
        with Trainer(comm, AsyncModelAverage(0, warmup_steps=4), make_plan(2), lr=0) as training:
            training.run(2)
            for spec, x in zip(training.plan.buckets, training.weights, strict=True):
                x[...] = start(spec, comm.rank)
            training.engine.stop()
            training.engine.resume()
            training.run(3 + comm.rank)
            training.engine.stop()
            return training.tensors()

    assert_all_hold(mean_of_starts(2), run_ranks(2, body))


# State


class Pausing(AsyncTrainer):
    stops = (3, 5, 8)


@pytest.mark.parametrize("warmup_steps", [0, 4])
@pytest.mark.parametrize("ranks", [1, 3])
def test_stopped_training_continues_after_a_restart(ranks, warmup_steps):
    algorithm = AsyncModelAverage(interval_s=0, warmup_steps=warmup_steps)

    assert_restarts(ranks, algorithm, at=Pausing.stops, trainer=Pausing)


def test_training_continues_in_other_buckets():
    def body(comm):
        with Trainer(comm, ALWAYS, make_plan(3), lr=0) as training:
            training.run(2)
            training.replan(make_plan(3, bucket_elements=10_000))
            training.run(1 + comm.rank)
            training.replan(make_plan(3, bucket_elements=1))
            training.run(1 + comm.rank)
            training.engine.stop()
            return training.tensors()

    assert_all_hold(mean_of_starts(3), run_ranks(3, body))


def test_a_state_saved_during_a_round_can_be_loaded():
    def body(comm):
        with Trainer(comm, ALWAYS, make_plan(2), lr=0) as training:
            training.run(STEPS)
            saved = pickle.dumps(training.state_dict())
        with Trainer(comm, ALWAYS, make_plan(2), lr=0) as training:
            training.load_state_dict(pickle.loads(saved))
            loaded = training.engine.step
            training.run(1 + comm.rank)
            training.engine.stop()
            return loaded, training.tensors()

    first, second = run_ranks(2, body)
    assert first[0] == second[0] == STEPS
    assert_all_hold(first[1], [second[1]])


# Arguments


@pytest.mark.parametrize("interval_s", [-1, -0.1, float("nan")])
def test_a_negative_interval_is_refused(interval_s):
    with pytest.raises(ArrayError, match="interval_s"):
        AsyncModelAverage(interval_s)


def test_a_negative_warm_up_is_refused():
    with pytest.raises(ArrayError, match="warmup_steps"):
        AsyncModelAverage(warmup_steps=-1)


@pytest.mark.parametrize("algorithm", [ALWAYS, AsyncModelAverage(warmup_steps=2)], ids=repr)
def test_integers_are_refused_with_the_tensor(algorithm):
    plan = Plan.pack([TensorSpec("count", (3,), "int32")])
    storage = {"grad": plan.allocate(), "weight": plan.allocate()}

    def body(comm):
        with pytest.raises(UnsupportedError, match="'count'"):
            Engine(comm, algorithm, plan, storage)

    run_ranks(2, body)
