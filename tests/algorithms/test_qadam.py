"""QAdam: against Adam on averaged gradients and, past the warm-up, on averaged momentum."""

from functools import partial

import numpy as np
import pytest
from support.references import (
    AdamTrainer,
    assert_follows,
    assert_restarts,
    bits,
    common_start,
    gradient,
    make_plan,
    mean,
    qadam,
    quantized_mean,
    trajectories,
)

from bagua_comm import (
    ArrayError,
    Engine,
    Exact,
    MinMaxUInt8,
    Plan,
    QAdam,
    TensorSpec,
    UnsupportedError,
)
from bagua_comm.testing import check_algorithm, run_ranks

WARMUP_STEPS = AdamTrainer.optimizer.warmup_steps
QUANTIZED = QAdam(warmup_steps=WARMUP_STEPS, beta1=0.8)
EXACT = QAdam(warmup_steps=WARMUP_STEPS, beta1=0.8, average=Exact())


def reference(average):
    return partial(qadam, average=average, settings=AdamTrainer.optimizer)


@pytest.mark.parametrize("algorithm", [QAdam(warmup_steps=2), EXACT], ids=repr)
def test_conformance(algorithm):
    check_algorithm(algorithm, sizes=(1, 2, 3, 4, 8))


@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 8])
def test_without_quantization_it_is_adam_with_a_frozen_variance(ranks):
    actual = trajectories(ranks, EXACT, trainer=AdamTrainer)

    assert_follows(actual, reference(mean), ranks=ranks, start=common_start)


@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 8])
def test_past_the_warm_up_the_momentum_is_quantized(ranks):
    actual = trajectories(ranks, QUANTIZED, trainer=AdamTrainer)

    average = partial(quantized_mean, codec=MinMaxUInt8())
    assert_follows(actual, reference(average), ranks=ranks, start=common_start, wide="float32")


@pytest.mark.parametrize(("dtype", "atol"), [("float16", 0.1), ("bfloat16", 0.2)])
def test_other_precisions(dtype, atol):
    actual = trajectories(4, QUANTIZED, dtype=dtype, trainer=AdamTrainer)

    average = partial(quantized_mean, codec=MinMaxUInt8())
    assert_follows(
        actual, reference(average), ranks=4, start=common_start, dtype=dtype, wide="float32", atol=atol
    )


@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_all_ranks_hold_the_same_weights_bit_for_bit(ranks):
    first, *others = trajectories(ranks, QUANTIZED, trainer=AdamTrainer)

    for other in others:
        assert bits(first) == bits(other)


def test_gradients_are_averaged_until_the_warm_up_ends_and_then_stay_local():
    def body(comm):
        with AdamTrainer(comm, QUANTIZED, make_plan(2)) as training:
            kept = []
            for step in range(WARMUP_STEPS + 2):
                mine, other = (
                    [
                        gradient(spec, x, rank, step)
                        for spec, x in zip(training.plan.buckets, training.weights, strict=True)
                    ]
                    for rank in (comm.rank, 1 - comm.rank)
                )
                training.step()
                kept.append((mine, other, [g.copy() for g in training.grads]))
            return kept

    for kept in run_ranks(2, body):
        for step, buckets in enumerate(kept):
            for mine, other, actual in zip(*buckets, strict=True):
                if step < WARMUP_STEPS:
                    np.testing.assert_allclose(actual, (mine + other) / 2, atol=1e-6)
                else:
                    assert actual.tobytes() == mine.tobytes()


def test_training_continues_in_other_buckets():
    actual = trajectories(3, EXACT, replans={3: 10_000, 7: 1}, trainer=AdamTrainer)

    assert_follows(actual, reference(mean), ranks=3, start=common_start)


@pytest.mark.parametrize("ranks", [1, 3])
def test_training_continues_after_a_restart(ranks):
    assert_restarts(ranks, QUANTIZED, at=(2, WARMUP_STEPS, 8), trainer=AdamTrainer)


@pytest.mark.parametrize("warmup_steps", [0, -1])
def test_a_warm_up_of_no_steps_is_refused(warmup_steps):
    with pytest.raises(ArrayError, match="warmup_steps"):
        QAdam(warmup_steps=warmup_steps)


@pytest.mark.parametrize("beta1", [-0.1, 1.0])
def test_a_beta_out_of_range_is_refused(beta1):
    with pytest.raises(ArrayError, match="beta1"):
        QAdam(beta1=beta1)


def test_an_object_that_is_no_average_is_refused():
    with pytest.raises(ArrayError, match="average"):
        QAdam(average="mean")


def test_a_dtype_the_codec_does_not_take_is_refused_with_the_tensor():
    plan = Plan.pack([TensorSpec("wide", (3,), "float64")])

    def body(comm):
        with pytest.raises(UnsupportedError, match="'wide'"):
            Engine(comm, QAdam(), plan, plan.allocate())

    run_ranks(2, body)
