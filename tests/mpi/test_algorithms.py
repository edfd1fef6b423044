"""The algorithms over MPI processes, compared with the references of tests/algorithms."""

import numpy as np
import pytest
from support.references import AdamTrainer, Trainer, assert_follows, follows, make_plan, mean, start, trainer_of

from bagua_comm import (
    ArrayError,
    AsyncModelAverage,
    Decentralized,
    DiLoCo,
    Engine,
    ErrorFeedback,
    Exact,
    GradientAllReduce,
    Hierarchical,
    LowPrecisionDecentralized,
    LowPrecisionOnePeer,
    MinMaxUInt8,
    QAdam,
    Quantized,
    StreamingDiLoCo,
    after,
    every,
)
from bagua_comm.testing import check_algorithm

pytestmark = pytest.mark.mpi

ALWAYS = AsyncModelAverage(interval_s=0)
STEPS = 6  # there are eight processes on two cores
FOLLOWING = [
    *(Decentralized(), Decentralized("shift_one"), Decentralized("one_peer_exponential")),
    *(LowPrecisionDecentralized(), LowPrecisionOnePeer()),
    QAdam(AdamTrainer.optimizer.warmup_steps, beta1=0.8),
    *(ALWAYS, AsyncModelAverage(0, warmup_steps=2), DiLoCo(2, 0.6, 0.8)),
    *(every(3, Decentralized()), after(2, GradientAllReduce(), DiLoCo(2, 0.6, 0.8))),
]
"""Algorithms that are compared with their equations."""


def runs_on(algorithm, ranks):
    """Pairs need an even number of ranks."""
    return ranks % 2 == 0 or "shift_one" not in repr(algorithm)


@pytest.mark.algorithms("sample")
@pytest.mark.parametrize(
    "algorithm",
    [
        *FOLLOWING,
        GradientAllReduce(ErrorFeedback()),
        DiLoCo(1, average=Quantized()),
        StreamingDiLoCo(2, 2, 1),
        *(GradientAllReduce(each) for each in (Exact(), Quantized(), Hierarchical())),
        GradientAllReduce(Hierarchical(Quantized(MinMaxUInt8.bagua()))),
        GradientAllReduce(Hierarchical(inside=Quantized())),
        after(1, GradientAllReduce(ErrorFeedback()), every(2, LowPrecisionDecentralized())),
    ],
    ids=repr,
)
def test_conformance(comm, algorithm):
    if runs_on(algorithm, comm.size):
        check_algorithm(algorithm, comm=comm)
    else:
        plan = make_plan(comm.size)
        with pytest.raises(ArrayError, match="even number"):
            Engine(comm, algorithm, plan, plan.allocate())


@pytest.mark.algorithms("sample")
@pytest.mark.parametrize("algorithm", FOLLOWING, ids=repr)
def test_weights_follow_the_reference(comm, algorithm):
    if runs_on(algorithm, comm.size):
        with trainer_of(algorithm)(comm, algorithm, make_plan(comm.size)) as training:
            trajectory = training.run(STEPS)

        assert_follows({comm.rank: trajectory}, ranks=comm.size, **follows(algorithm))


def test_ranks_with_different_numbers_of_steps_stop_together(comm):
    with Trainer(comm, ALWAYS, make_plan(comm.size), lr=0) as training:
        training.run(3 * comm.rank)
        training.engine.stop()
        training.engine.stop()
        stopped = np.concatenate(training.weights)
        training.engine.resume()
        training.run(1 + comm.rank)
        training.engine.stop()

    expected = mean(
        [np.concatenate([start(spec, r) for spec in training.plan.buckets]) for r in range(comm.size)]
    )
    np.testing.assert_allclose(stopped, expected, rtol=0, atol=1e-5)
    np.testing.assert_allclose(np.concatenate(training.weights), expected, rtol=0, atol=1e-5)
