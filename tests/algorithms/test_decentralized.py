"""Decentralized averaging of weights: against plain loops over the list of all ranks' weights."""

import numpy as np
import pytest
from support.references import Trainer, make_plan

from bagua_comm import ArrayError, Decentralized, Engine, Point, every
from bagua_comm.testing import run_ranks


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
