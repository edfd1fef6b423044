"""Asynchronous averaging: what a round brings, and that no rank waits for another but in `stop`."""

import pickle
import threading

import numpy as np
import pytest
from support.references import STEPS, Trainer, by_name, make_plan, start

from bagua_comm import AsyncModelAverage, Point
from bagua_comm.testing import run_ranks

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


# Rounds


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


@pytest.mark.parametrize("ranks", [1, 2, 3])
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
