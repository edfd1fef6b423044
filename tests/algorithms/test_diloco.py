"""DiLoCo: against local SGD with an outer optimizer, over the list of all ranks' weights."""

import logging
from functools import partial

import numpy as np
import pytest
import torch
from support.references import (
    STEPS,
    Trainer,
    assert_follows,
    assert_restarts,
    bits,
    common_start,
    diloco,
    make_plan,
    mean,
    quantized_mean,
    trajectories,
)

from bagua_comm import (
    ArrayError,
    DiLoCo,
    Engine,
    MinMaxUInt8,
    Plan,
    Point,
    Quantized,
    TensorSpec,
    UnsupportedError,
)
from bagua_comm.testing import check_algorithm, run_ranks


@pytest.mark.parametrize("algorithm", [DiLoCo(), DiLoCo(local_steps=2), DiLoCo(1, average=Quantized())], ids=repr)
def test_conformance(algorithm):
    check_algorithm(algorithm, sizes=(1, 2, 3, 4, 8))


@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 8])
@pytest.mark.parametrize("local_steps", [1, 3])
def test_weights_follow_the_equations(local_steps, ranks):
    actual = trajectories(ranks, DiLoCo(local_steps, 0.6, 0.8), start=common_start)

    reference = partial(diloco, local_steps=local_steps, outer_lr=0.6, outer_momentum=0.8)
    assert_follows(actual, reference, ranks=ranks, start=common_start)


@pytest.mark.parametrize("ranks", [1, 3, 4])
def test_changes_may_be_quantized(ranks):
    actual = trajectories(ranks, DiLoCo(2, average=Quantized()), start=common_start)

    reference = partial(
        diloco,
        local_steps=2,
        outer_lr=0.7,
        outer_momentum=0.5,
        average=partial(quantized_mean, codec=MinMaxUInt8()),
    )
    assert_follows(actual, reference, ranks=ranks, start=common_start, wide="float32")


@pytest.mark.parametrize(("dtype", "atol"), [("float64", 1e-12), ("float16", 2e-2), ("bfloat16", 0.15)])
def test_other_precisions(dtype, atol):
    actual = trajectories(4, DiLoCo(3), dtype=dtype, start=common_start)

    reference = partial(diloco, local_steps=3, outer_lr=0.7, outer_momentum=0.5)
    assert_follows(actual, reference, ranks=4, start=common_start, dtype=dtype, atol=atol)


@pytest.mark.parametrize("average", [DiLoCo().average, Quantized()], ids=repr)
@pytest.mark.parametrize("ranks", [2, 3, 8])
def test_all_ranks_hold_the_same_weights_bit_for_bit_after_an_outer_step(average, ranks):
    first, *others = trajectories(ranks, DiLoCo(3, average=average), start=common_start)

    for other in others:
        same = [bits([x]) == bits([y]) for x, y in zip(first, other, strict=True)]
        assert same == [step % 3 == 0 for step in range(STEPS)]


def test_the_outer_optimizer_is_nesterov_sgd():
    def body(comm):
        with Trainer(comm, DiLoCo(1, outer_lr=0.6, outer_momentum=0.8), make_plan(1)) as training:
            inner = []
            training.update = lambda: (Trainer.update(training), inner.append(training.tensors()))
            return training.run(STEPS), inner

    ((before, inner),) = run_ranks(1, body)
    anchors = {name: torch.tensor(x) for name, x in before[0].items()}
    outer = torch.optim.SGD(anchors.values(), lr=0.6, momentum=0.8, nesterov=True)
    for step in range(STEPS):
        for name, anchor in anchors.items():
            np.testing.assert_allclose(before[step][name], anchor.numpy(), rtol=0, atol=1e-5)
            anchor.grad = anchor - torch.tensor(inner[step][name])
        outer.step()


def test_one_local_step_and_a_plain_outer_one_average_the_weights():
    actual = trajectories(3, DiLoCo(1, outer_lr=1.0, outer_momentum=0.0), start=common_start)

    def local_sgd(xs, gradient):
        for step in range(STEPS):
            yield xs
            xs = [mean([x - 0.5 * gradient(x, rank, step) for rank, x in enumerate(xs)])] * len(xs)

    assert_follows(actual, local_sgd, ranks=3, start=common_start)


def test_by_default_a_lasting_change_is_not_taken_several_times():
    def body(comm):
        with Trainer(comm, DiLoCo(1), make_plan(1)) as training:
            training.update = lambda: [np.add(x, 1, out=x) for x in training.weights]
            return [next(iter(weights.values())).flat[0] for weights in training.run(STEPS)]

    moved = np.diff(run_ranks(2, body)[0])
    assert (moved > 1).all()
    assert (moved < 1.5).all()


def test_nothing_is_sent_between_outer_steps():
    def body(comm):
        with Trainer(comm, DiLoCo(3), make_plan(2)) as training:
            sent = []
            for _ in range(7):
                training.step()
                training.engine.flush()
                sent.append(training.engine.counter.wire_bytes)
            return np.diff([0, *sent]) > 0

    assert run_ranks(2, body)[0].tolist() == [False, False, True, False, False, True, False]


def test_training_continues_in_other_buckets():
    actual = trajectories(3, DiLoCo(3), start=common_start, replans={4: 10_000, 6: 1})

    reference = partial(diloco, local_steps=3, outer_lr=0.7, outer_momentum=0.5)
    assert_follows(actual, reference, ranks=3, start=common_start)


@pytest.mark.parametrize("ranks", [1, 3])
@pytest.mark.parametrize("average", [DiLoCo().average, Quantized()], ids=repr)
def test_training_continues_after_a_restart(average, ranks):
    assert_restarts(ranks, DiLoCo(3, average=average), at=(3, 5, 8), start=common_start)


@pytest.mark.parametrize("local_steps", [0, -1])
def test_local_steps_must_be_positive(local_steps):
    with pytest.raises(ArrayError, match="local_steps"):
        DiLoCo(local_steps)


def test_an_object_that_is_no_average_is_refused():
    with pytest.raises(ArrayError, match="average"):
        DiLoCo(average="mean")


@pytest.mark.parametrize(
    ("algorithm", "dtype"), [(DiLoCo(), "int32"), (DiLoCo(average=Quantized()), "float64")], ids=repr
)
def test_a_dtype_that_cannot_be_averaged_is_refused_with_the_tensor(algorithm, dtype):
    plan = Plan.pack([TensorSpec("odd one", (3,), dtype)])

    def body(comm):
        with pytest.raises(UnsupportedError, match="'odd one'"):
            Engine(comm, algorithm, plan, plan.allocate())

    run_ranks(2, body)


@pytest.mark.parametrize("steps", [2, 3, 5])
def test_a_training_that_ends_before_the_first_outer_step_is_a_warning_and_later_steps_a_line_in_the_log(
    steps, caplog
):
    caplog.set_level(logging.DEBUG, "bagua_comm")

    def body(comm):
        plan = Plan.pack([TensorSpec("w", (4,), "float32")])
        flat, batches = np.zeros(plan.buckets[0].size, np.float32), steps
        if steps < 3:
            batches -= 1 - comm.rank  # uneven ones hang nowhere, since nothing is exchanged
        with Engine(comm, DiLoCo(local_steps=3), plan, [flat]) as engine:
            for _ in range(batches):
                for point in (Point.FORWARD, Point.BACKWARD, Point.STEP):
                    engine.at(point)

    if steps == 2:
        with pytest.warns(UserWarning, match="has exchanged nothing in 1 step: each rank has trained alone"):
            run_ranks(2, body)
    else:
        run_ranks(2, body)
    lines = [text for text in caplog.messages if "since the last exchange" in text]
    expected = {5: ["2 steps since the last exchange stay on each rank: the weights differ between ranks"] * 2}
    assert lines == expected.get(steps, [])
