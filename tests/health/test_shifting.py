"""Microbatches that move from slow ranks to the others: their numbers, the rate, and the result of training."""

import logging
import random
from typing import NamedTuple

import numpy as np
import pytest
from support.engine_steps import backward, give_times

from bagua_comm import ArrayError, Engine, GradientAllReduce, Plan, Point, Reproducible, TensorSpec, topology
from bagua_comm.elastic import State, run, share
from bagua_comm.health.rows import Row, StepTimes, Usage
from bagua_comm.health.shifting import Shares, equal, fastest, step_s
from bagua_comm.health.slow import Health
from bagua_comm.testing import run_ranks
from bagua_comm.testing.fleets import ThreadJob, run_fleet

PLAN = Plan.pack([TensorSpec(f"x{i}", (8,), "float32") for i in range(2)], bucket_bytes=32)
MICROBATCHES, STEPS, EACH_MS = 24, 50, 10.0
SAMPLES = np.random.default_rng(0).normal(size=(STEPS, MICROBATCHES, 16)).astype(np.float32)
WEIGHED, ADDED = GradientAllReduce(), GradientAllReduce(Reproducible(addends=MICROBATCHES))


class Trained(NamedTuple):
    """What one rank has done."""

    mine: list[range]
    """Its microbatches, by step."""
    own_ms: list[float]
    """The time that it took for them, by step."""
    weights: np.ndarray
    health: Health


def usual(step, rank):
    return 1.0


def slow(rank, factor, begin=0, end=STEPS):
    """How many times as long a microbatch takes if one rank is slow in these steps."""
    return lambda step, mine: factor if mine == rank and begin <= step < end else 1.0


SLOW = slow(1, 3.0)


def train(
    comm,
    factor,
    *,
    algorithm=WEIGHED,
    shift=True,
    microbatches=MICROBATCHES,
    noise=0.05,
    weighs=True,
    tokens=False,
    keeps=None,
    steps=STEPS,
):
    """Fit weights to the samples, one in each microbatch; from step `keeps` on, rank 1 calls `share` no more.

    With `tokens`, microbatches have different weights.
    """
    weights, own_ms, shares = np.zeros(16, np.float32), [], []
    with Engine(comm, algorithm, PLAN, PLAN.allocate()) as engine:
        give_times(engine, lambda step: own_ms[-1])
        for step in range(steps):
            if keeps is None or step < keeps or comm.rank != 1:
                mine = share(microbatches, comm, shift=shift)
            shares.append(mine)
            drawn = random.Random(1000 * step + comm.rank).uniform(1 - noise, 1 + noise)
            own_ms.append(len(mine) * EACH_MS * drawn * factor(step, comm.rank))
            fit(engine, weights, step, mine, weighs=weighs, tokens=tokens)
        return Trained(shares, own_ms, weights, comm.health())


def fit(engine, weights, step, mine, *, weighs=True, tokens=False):
    """Make one training step with these microbatches."""
    engine.at(Point.FORWARD)
    flats = [bucket.flat for bucket in engine.buckets]
    for flat in flats:
        flat[...] = 0
    for i in mine:
        for flat, part in zip(flats, np.split(weights - SAMPLES[step, i], 2), strict=True):
            flat += part if engine.algorithm is ADDED else part / len(mine)
        if tokens:
            engine.weight = 1 + i % 3
        if engine.algorithm is ADDED and i != mine[-1]:
            engine.hold()
    if weighs and engine.algorithm is WEIGHED:
        engine.weight = len(mine)
    backward(engine, ["x0", "x1"])
    weights -= np.float32(0.1) * np.concatenate(flats)
    engine.at(Point.STEP)


def counts(ranks):
    """The numbers of microbatches, by step and rank."""
    return [tuple(map(len, step)) for step in zip(*(rank.mine for rank in ranks), strict=True)]


def rate(ranks, steps):
    """The rate in these steps, as a part of that of ranks that wait for nothing."""
    taken = sum(max(rank.own_ms[step] for rank in ranks) for step in steps)
    ideal = np.mean([sum(len(rank.mine[step]) / rank.own_ms[step] for rank in ranks) for step in steps])
    return len(steps) * MICROBATCHES / taken / ideal


@pytest.mark.parametrize(
    ("size", "factor"),
    [
        (3, 2.0),
        *(
            pytest.param(n, f, marks=pytest.mark.slow)
            for n in (3, 4)
            for f in (1.5, 2.0, 4.0)
            if (n, f) != (3, 2.0)
        ),
    ],
)
def test_with_a_slow_rank_the_rate_is_nine_tenths_of_the_ideal_one(size, factor):
    ranks = run_ranks(size, lambda comm: train(comm, slow(1, factor)))
    assert rate(ranks, range(10)) < 0.8
    assert rate(ranks, range(22, STEPS)) >= 0.9
    for step in zip(*(rank.mine for rank in ranks), strict=True):
        assert [i for mine in step for i in mine] == list(range(MICROBATCHES))
        assert all(step)
    assert len(set(counts(ranks))) == 2  # one decision
    assert ranks[0].health.slow[0].ranks == (1,)  # as it is, although its steps are no longer than others'


def test_a_rank_that_is_no_longer_slow_gets_its_microbatches_back(caplog):
    caplog.set_level(logging.INFO, "bagua_comm.elastic")
    ranks = run_ranks(3, lambda comm: train(comm, slow(2, 3.0, end=20)))
    equal, shifted = (8, 8, 8), counts(ranks)[21]
    assert shifted[2] < 5
    assert list(dict.fromkeys(counts(ranks))) == [equal, shifted]
    assert counts(ranks)[-1] == equal
    assert [each.ranks for each in ranks[0].health.past] == [(2,)]  # and no other has been called slow
    assert ranks[0].health.slow == ()
    assert [record.message for record in caplog.records if record.levelno == logging.INFO] == [
        f"microbatches are shifted: {shifted} by rank, {equal} before",
        f"microbatches are shifted: {equal} by rank, {shifted} before",
    ]


@pytest.mark.parametrize(
    "factor",
    [usual, slow(0, 4.0, 18, 24), lambda step, rank: 1 + (step % 10 == rank)],
    ids=["noise", "for a short time", "now and then"],
)
def test_microbatches_stay_where_no_rank_is_slow_for_long(factor):
    ranks = run_ranks(3, lambda comm: train(comm, factor, noise=0.15))
    assert set(counts(ranks)) == {(8, 8, 8)}


def test_shifted_microbatches_count_as_before_in_a_weighted_mean():
    shifted, plain = (run_ranks(3, lambda comm, s=s: train(comm, SLOW, shift=s, steps=25)) for s in (True, False))
    assert len(set(counts(shifted))) > 1
    for rank in shifted:
        np.testing.assert_allclose(rank.weights, plain[0].weights, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("tokens", [False, True])
def test_shifted_addends_have_the_same_bits(tokens):
    trainings = [
        run_ranks(size, lambda comm, s=s: train(comm, SLOW, algorithm=ADDED, shift=s, tokens=tokens, steps=25))
        for size, s in ((3, True), (2, False))
    ]
    assert [len(set(counts(each))) for each in trainings] == [2, 1]
    assert len({rank.weights.tobytes() for ranks in trainings for rank in ranks}) == 1


def test_a_spare_that_knows_no_earlier_rows_begins_with_the_shares_of_the_others():
    job, seen = ThreadJob(3, wanted=2), []

    def body(fleet):
        state = State(step=0, weights=np.zeros(16, np.float32))

        @run(state, fleet=fleet)
        def trained(comm):
            own_ms = []
            with Engine(comm, ADDED, PLAN, PLAN.allocate()) as engine:
                give_times(engine, lambda step: own_ms[-1])
                while state.step < STEPS:
                    mine = share(MICROBATCHES, comm, shift=True)
                    own_ms.append(len(mine) * EACH_MS * (3 if comm.rank else 1))
                    seen.append((fleet.me, state.step, len(mine)))
                    fit(engine, state.weights, state.step, mine)
                    state.step += 1
                    state.commit()
                    if state.step == 25 and fleet.me == 0:
                        job.kill(0)
            return state.weights.tobytes()

        return trained

    results = [outcome["result"] for outcome in run_fleet(job, body) if outcome.get("result")]
    assert {(0, 24, 18), (1, 24, 6), (1, 25, 12), (2, 25, 12), (1, 49, 6), (2, 49, 18)} <= set(seen)
    (plain, _) = run_ranks(2, lambda comm: train(comm, usual, algorithm=ADDED, shift=False))
    assert results == [plain.weights.tobytes()] * 2


def failures(body):
    """The errors of both of two ranks."""

    def caught(comm):
        try:
            body(comm)
        except ArrayError as error:
            return str(error)
        return ""

    return run_ranks(2, caught)


def test_unequal_calls_of_the_ranks_are_an_error_on_all_of_them():
    def other(comm, microbatches, shift):
        given = (MICROBATCHES, True) if comm.rank else (microbatches, shift)
        return train(comm, SLOW, microbatches=given[0], shift=given[1])

    for given in ((MICROBATCHES, False), (MICROBATCHES - 1, True)):
        for text in failures(lambda comm, given=given: other(comm, *given)):
            assert "share: ranks [1] call it otherwise than rank 0" in text


def test_a_plain_mean_is_refused_on_all_ranks_before_a_rank_is_slow():
    for text in failures(lambda comm: train(comm, usual, weighs=False)):
        assert "share: shift=True needs an Engine or a DistributedDataParallel" in text
        assert "set its weight in each step" in text


def test_ranks_without_an_engine_are_refused():
    for text in failures(lambda comm: share(4, comm, shift=True)):
        assert "share: shift=True needs an Engine or a DistributedDataParallel" in text


def test_addends_of_a_rank_that_keeps_its_microbatches_are_an_error_on_all_ranks():
    for text in failures(lambda comm: train(comm, SLOW, algorithm=ADDED, keeps=10)):
        assert "rank 0 has 24 addends (18, 6) in blocks of 128" in text
        assert "rank 1 has 24 addends in blocks of 128" in text


@pytest.mark.parametrize(("factor", "expected"), [(1.08, (150, 150)), (1.2, (164, 136))])
def test_microbatches_move_for_a_gain_of_a_twentieth_and_more(factor, expected):
    shares = Shares(2)
    assert shares.shift(300) == (150, 150)
    for _ in range(3):
        times = [[StepTimes(own_s, 0.0, 0.0)] * 5 for own_s in (1.0, factor)]
        shares.add([Row.of(10, 0, each, Usage(0.0, 0.0, 0.0)) for each in times], weighed=True)
    assert shares.shift(300) == expected


def test_another_number_of_microbatches_is_shifted_by_the_known_times_and_a_plain_call_gives_equal_shares():
    shares = Shares(2)
    assert shares.shift(12) == (6, 6)
    for _ in range(3):
        times = [[StepTimes(own_s, 0.0, 0.0)] * 5 for own_s in (1.0, 2.0)]
        shares.add([Row.of(10, 0, each, Usage(0.0, 0.0, 0.0)) for each in times], weighed=True)
    assert [shares.shift(number) for number in (12, 9, 12)] == [(8, 4), (6, 3), (8, 4)]
    shares.reset()
    assert shares.counts(12) == (6, 6)


@pytest.mark.parametrize("microbatches", [5, 7, 10, 64])
def test_equal_ranks_have_the_shares_of_the_topology(microbatches):
    assert equal(microbatches, 5) == tuple(len(topology.share(microbatches, rank, 5)) for rank in range(5))


def test_as_many_as_fit_go_to_each_rank():
    assert fastest(5, [1.0, 100.0]) == (4, 1)
    assert fastest(2, [1.0, 9.0]) == (1, 1)
    rng = random.Random(0)
    for _ in range(20):
        times = [rng.uniform(1, 4) for _ in range(3)]
        every = [(a, b, 9 - a - b) for a in range(1, 8) for b in range(1, 9 - a)]
        assert step_s(fastest(9, times), times) == min(step_s(each, times) for each in every)
