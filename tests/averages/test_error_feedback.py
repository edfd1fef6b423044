"""Error feedback: what quantizing takes from one mean is given to the next."""

import numpy as np
import pytest
from support.engine_steps import backward
from support.references import (
    STEPS,
    Trainer,
    common_start,
    decoded,
    make_plan,
    mean,
)

from bagua_comm import (
    ArrayError,
    Engine,
    ErrorFeedback,
    Exact,
    GradientAllReduce,
    Hierarchical,
    MinMaxUInt8,
    Plan,
    Point,
    Quantized,
    TensorSpec,
)
from bagua_comm.arrays import dtype_named
from bagua_comm.testing import run_ranks, sample

CODEC = MinMaxUInt8(block=16)
SPECS = [TensorSpec("a", (5, 3), "float32"), TensorSpec("b", (33,), "float32")]
COUNT = sum(spec.size for spec in SPECS)  # a multiple of all numbers of ranks here
NAMES = [spec.name for spec in SPECS]


def gradients(ranks, step):
    """The gradients of all ranks: the same in every step, plus a little noise."""
    same = [sample(rank, (COUNT,), "float32") for rank in range(ranks)]
    noise = [0.1 * sample(rank, (COUNT,), "float32", seed=1 + step) for rank in range(ranks)]
    return [x + y for x, y in zip(same, noise, strict=True)]


def error_feedback(ranks, codec):
    """The owner of a chunk makes up, for all ranks, for what coding the mean has lost."""
    errors = [np.zeros((ranks, COUNT // ranks), "f4") for _ in range(ranks)]
    for step in range(STEPS):
        values = [x.reshape(ranks, -1) + e for x, e in zip(gradients(ranks, step), errors, strict=True)]
        sent = [decoded(codec, value) for value in values]
        result = decoded(codec, mean(sent))
        errors = [value - code for value, code in zip(values, sent, strict=True)]
        for rank in range(ranks):
            errors[rank][rank] += ranks * (mean(sent) - result)[rank]
        yield result.reshape(-1), [e.reshape(-1) for e in errors]


def averages(comm, average, *, dtype="float32", steps=STEPS):
    """The mean and the residual after every step."""
    plan = Plan.pack([TensorSpec(spec.name, spec.shape, dtype) for spec in SPECS])
    kept = []
    with Engine(comm, GradientAllReduce(average), plan, plan.allocate()) as engine:
        (bucket,) = engine.buckets
        for step in range(steps):
            bucket.flat[...] = gradients(comm.size, step)[comm.rank].astype(bucket.flat.dtype)
            backward(engine, NAMES)
            engine.at(Point.STEP)
            saved = [engine.state_dict()["tensors"][name] for name in NAMES]
            residual = np.concatenate([tensor["average.residual"].reshape(-1) for tensor in saved])
            kept.append((bucket.flat.copy(), residual))
    return kept


@pytest.mark.parametrize("ranks", [2, 3])
def test_both_quantizations_are_made_up_for(ranks):
    actual = run_ranks(ranks, lambda comm: averages(comm, ErrorFeedback(Quantized(CODEC))))

    for step, (result, errors) in enumerate(error_feedback(ranks, CODEC)):
        for rank in range(ranks):
            value, residual = actual[rank][step]
            np.testing.assert_allclose(value, result, rtol=0, atol=1e-5)
            np.testing.assert_allclose(residual, errors[rank], rtol=0, atol=1e-5 * ranks)
            assert value.tobytes() == actual[0][step][0].tobytes()


@pytest.mark.parametrize(
    ("ranks", "dtype", "atol"),
    [(1, "float32", 2e-5), (3, "float32", 2e-5), (2, "float16", 0.02), (3, "bfloat16", 0.15)],
)
def test_the_means_and_the_residuals_sum_up_to_the_true_means(ranks, dtype, atol):
    results = run_ranks(ranks, lambda comm: averages(comm, ErrorFeedback(Quantized(CODEC)), dtype=dtype))

    rounded = [[g.astype(dtype_named(dtype)).astype("f8") for g in gradients(ranks, t)] for t in range(STEPS)]
    expected = np.sum([mean(gs) for gs in rounded], axis=0)
    total = np.sum([value.astype("f8") for value, _ in results[0]], axis=0)
    left = mean([result[-1][1].astype("f8") for result in results])
    np.testing.assert_allclose(total + left, expected, rtol=0, atol=atol)


def test_errors_do_not_add_up_over_time():
    def error(average, steps=60):
        """Of the sum of many means of the same gradients."""

        def body(comm):
            mean = average.bind(comm)
            return sum(mean(given[comm.rank].copy()).astype("f8") for _ in range(steps))

        return np.abs(run_ranks(3, body)[0] - steps * mean(given)).max()

    given = gradients(3, 0)

    assert error(Quantized(CODEC)) > 20 * error(ErrorFeedback(Quantized(CODEC)))


@pytest.mark.parametrize(("inner", "nodes"), [(Exact(), [0, 1, 2, 3]), (Quantized(CODEC), [0, 0, 0, 0])])
def test_a_state_without_residuals_loads_on_other_nodes(inner, nodes):
    algorithm, plan = GradientAllReduce(Hierarchical(inner)), make_plan(4)

    def save(comm):
        with Trainer(comm, algorithm, plan, start=common_start) as training:
            training.run(2)
            return training.state_dict(), training.run(4)

    def load(comm):
        with Trainer(comm, algorithm, plan, start=common_start) as training:
            training.load_state_dict(saved[comm.rank])
            return training.run(4)

    saved, expected = zip(*run_ranks(4, save, nodes=[0, 0, 1, 1]), strict=True)
    for actual, through in zip(run_ranks(4, load, nodes=nodes), expected, strict=True):
        for step, before in zip(actual, through, strict=True):
            for name, x in step.items():
                np.testing.assert_allclose(x, before[name], rtol=0, atol=0.05)


def test_residuals_between_nodes_cannot_move_to_other_buckets():
    def body(comm):
        plan = make_plan(comm.size)
        algorithm = GradientAllReduce(Hierarchical(ErrorFeedback()))
        with Engine(comm, algorithm, plan, plan.allocate()) as engine:
            engine.buckets[0].flat[...] = sample(comm.rank, engine.buckets[0].flat.shape, "float32")
            backward(engine, engine.buckets[0].views)
            tensors = [tensor for spec in plan.buckets for tensor in spec.tensors]
            with pytest.raises(ArrayError, match=r"residual' of .* belongs to its bucket as a whole"):
                engine.replan(Plan.pack(tensors, bucket_bytes=1, alignment=8))

    run_ranks(4, body, nodes=[0, 0, 1, 1])
