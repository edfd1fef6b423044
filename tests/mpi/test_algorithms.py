"""The algorithms over MPI processes, compared with the references of tests/algorithms."""

from functools import partial

import numpy as np
import pytest
from support.references import (
    AdamTrainer,
    AsyncTrainer,
    Trainer,
    assert_follows,
    async_model_average,
    common_start,
    decentralized,
    diloco,
    gradient_allreduce,
    low_precision_decentralized,
    low_precision_one_peer,
    make_plan,
    mean,
    qadam,
    quantized_mean,
    start,
    switched,
)

from bagua_comm import (
    ArrayError,
    AsyncModelAverage,
    Decentralized,
    DiLoCo,
    Engine,
    ErrorFeedback,
    GradientAllReduce,
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
quantized = partial(quantized_mean, codec=MinMaxUInt8())


def follows(algorithm, reference, *, start=start, trainer=Trainer, wide="float64"):
    return pytest.param(algorithm, reference, start, trainer, wide, id=repr(algorithm))


TRAJECTORIES = [
    follows(Decentralized(), partial(decentralized, peers="all")),
    follows(Decentralized("shift_one"), partial(decentralized, peers="shift_one")),
    follows(Decentralized("one_peer_exponential"), partial(decentralized, peers="one_peer_exponential")),
    follows(
        LowPrecisionDecentralized(), partial(low_precision_decentralized, codec=MinMaxUInt8()), wide="float32"
    ),
    follows(LowPrecisionOnePeer(), partial(low_precision_one_peer, codec=MinMaxUInt8()), wide="float32"),
    follows(
        QAdam(AdamTrainer.optimizer.warmup_steps, beta1=0.8),
        partial(qadam, average=quantized, settings=AdamTrainer.optimizer),
        start=common_start,
        trainer=AdamTrainer,
        wide="float32",
    ),
    follows(ALWAYS, async_model_average, trainer=AsyncTrainer),
    follows(
        AsyncModelAverage(0, warmup_steps=2),
        partial(switched, steps=2, first=gradient_allreduce, then=async_model_average),
        start=common_start,
        trainer=AsyncTrainer,
    ),
    follows(
        DiLoCo(2, 0.6, 0.8),
        partial(diloco, local_steps=2, outer_lr=0.6, outer_momentum=0.8),
        start=common_start,
    ),
    follows(every(3, Decentralized()), partial(decentralized, peers="all", interval=3)),
    follows(
        after(2, GradientAllReduce(), DiLoCo(2, 0.6, 0.8)),
        partial(
            switched,
            steps=2,
            first=gradient_allreduce,
            then=partial(diloco, local_steps=2, outer_lr=0.6, outer_momentum=0.8),
        ),
        start=common_start,
    ),
]


def runs_on(algorithm, ranks):
    """Pairs need an even number of ranks."""
    return ranks % 2 == 0 or "shift_one" not in repr(algorithm)


@pytest.mark.algorithms("sample")
@pytest.mark.parametrize(
    "algorithm",
    [
        *(case.values[0] for case in TRAJECTORIES),
        GradientAllReduce(ErrorFeedback()),
        DiLoCo(1, average=Quantized()),
        StreamingDiLoCo(2, 2, 1),
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
@pytest.mark.parametrize(("algorithm", "reference", "start", "trainer", "wide"), TRAJECTORIES)
def test_weights_follow_the_reference(comm, algorithm, reference, start, trainer, wide):
    if runs_on(algorithm, comm.size):
        with trainer(comm, algorithm, make_plan(comm.size), start=start) as training:
            trajectory = training.run(STEPS)

        assert_follows({comm.rank: trajectory}, reference, ranks=comm.size, start=start, wide=wide)


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
