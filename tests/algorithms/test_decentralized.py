"""Decentralized averaging of weights: against plain loops over the list of all ranks' weights."""

from functools import partial

import numpy as np
import pytest
from support.references import (
    Trainer,
    assert_follows,
    assert_restarts,
    decentralized,
    make_plan,
    trajectories,
)

from bagua_comm import ArrayError, Decentralized, Engine, Plan, Point, TensorSpec, UnsupportedError, every
from bagua_comm.testing import check_algorithm, run_ranks

PEERS_AND_RANKS = [
    (peers, ranks)
    for peers in ("all", "shift_one", "one_peer_exponential")
    for ranks in ((2, 4, 8) if peers == "shift_one" else (1, 2, 3, 4, 8))
]


@pytest.mark.parametrize("peers", ["all", "one_peer_exponential"])
def test_conformance(peers):
    check_algorithm(Decentralized(peers), sizes=(1, 2, 3, 4, 8))


def test_conformance_in_pairs():
    check_algorithm(Decentralized("shift_one"), sizes=(2, 4, 8))


@pytest.mark.parametrize(("peers", "ranks"), PEERS_AND_RANKS)
def test_weights_are_averaged_and_gradients_taken_before(peers, ranks):
    actual = trajectories(ranks, Decentralized(peers))

    assert_follows(actual, partial(decentralized, peers=peers), ranks=ranks)


@pytest.mark.parametrize(("dtype", "atol"), [("float64", 1e-12), ("float16", 1e-2), ("bfloat16", 8e-2)])
@pytest.mark.parametrize("peers", ["all", "one_peer_exponential"])
def test_other_precisions(peers, dtype, atol):
    actual = trajectories(4, Decentralized(peers), dtype=dtype)

    assert_follows(actual, partial(decentralized, peers=peers), ranks=4, dtype=dtype, atol=atol)


def test_weights_stay_as_they_are_until_the_backward_pass_has_ended():
    def body(comm):
        with Trainer(comm, Decentralized(), make_plan(2)) as training:
            before = training.tensors()
            training.engine.at(Point.FORWARD)
            training.engine.flush()
            during = training.tensors()
            training.engine.at(Point.BACKWARD)
            return before, during, training.tensors()

    (first, first_during, first_after), (second, second_during, second_after) = run_ranks(2, body)
    for name in first:
        np.testing.assert_array_equal(first_during[name], first[name])
        np.testing.assert_array_equal(second_during[name], second[name])
        np.testing.assert_allclose(first_after[name], (first[name] + second[name]) / 2, atol=1e-6)
        assert first_after[name].tobytes() == second_after[name].tobytes()


@pytest.mark.parametrize("rounds", [1, 2, 3])
def test_one_peer_rounds_give_the_exact_mean_of_a_power_of_two(rounds):
    ranks = 2**rounds

    def body(comm):
        with Trainer(comm, Decentralized("one_peer_exponential"), make_plan(ranks), lr=0) as training:
            before = training.tensors()
            training.run(rounds)
            return before, training.tensors()

    results = run_ranks(ranks, body)
    for name in results[0][0]:
        mean = np.mean([before[name] for before, _ in results], axis=0)
        for _, after in results:
            np.testing.assert_allclose(after[name], mean, atol=1e-6)


@pytest.mark.parametrize("peers", ["all", "shift_one", "one_peer_exponential"])
def test_training_continues_in_other_buckets(peers):
    actual = trajectories(4, Decentralized(peers), replans={3: 10_000, 7: 1})

    assert_follows(actual, partial(decentralized, peers=peers), ranks=4)


@pytest.mark.parametrize(("peers", "ranks"), [("all", 3), ("shift_one", 4), ("one_peer_exponential", 8)])
def test_training_continues_after_a_restart(peers, ranks):
    assert_restarts(ranks, Decentralized(peers), at=(5, 8))


@pytest.mark.parametrize("ranks", [1, 3])
@pytest.mark.parametrize(
    "algorithm", [Decentralized("shift_one"), every(2, Decentralized("shift_one"))], ids=repr
)
def test_an_odd_number_of_ranks_cannot_be_paired(ranks, algorithm):
    plan = make_plan(ranks)

    def body(comm):
        with pytest.raises(ArrayError, match="even number"):
            Engine(comm, algorithm, plan, plan.allocate())
        assert comm.allreduce(np.array(1)) == ranks

    run_ranks(ranks, body)


def test_unknown_peers_are_refused():
    with pytest.raises(ArrayError, match="ring"):
        Decentralized("ring")


def test_integers_are_refused_with_the_tensor():
    plan = Plan.pack([TensorSpec("weight", (3,), "float32"), TensorSpec("count", (3,), "int32")])

    def body(comm):
        with pytest.raises(UnsupportedError, match="'count'"):
            Engine(comm, Decentralized(), plan, plan.allocate())

    run_ranks(2, body)
