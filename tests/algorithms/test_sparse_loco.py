"""SparseLoCo: against local SGD whose ranks send the largest changes, over the list of all ranks' weights."""

from functools import partial

import numpy as np
import pytest
from support.references import (
    STEPS,
    Trainer,
    assert_follows,
    assert_restarts,
    bits,
    common_start,
    make_plan,
    sparse_loco,
    trajectories,
)

from bagua_comm import (
    ArrayError,
    BaguaError,
    DiLoCo,
    Engine,
    ErrorFeedback,
    Exact,
    Hierarchical,
    Plan,
    SparseLoCo,
    TensorSpec,
    TopK,
    UnsupportedError,
)
from bagua_comm.testing import check_algorithm, run_ranks

SMALL = {"chunk": 96, "keep": 10}
TWO_LEVELS = SparseLoCo(2, average=Hierarchical(ErrorFeedback(TopK(96, 10), retain=0.9)))


@pytest.mark.parametrize("algorithm", [SparseLoCo(), SparseLoCo(2, **SMALL), TWO_LEVELS], ids=repr)
def test_conformance(algorithm):
    check_algorithm(algorithm, sizes=(1, 2, 3, 4))


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
@pytest.mark.parametrize(
    ("local_steps", "values", "decay", "outer_lr"), [(1, 2, 0.95, 1.0), (3, 2, 0.5, 0.7), (2, 32, 1.0, 1.0)]
)
def test_weights_follow_the_equations(local_steps, values, decay, outer_lr, ranks):
    settings = {**SMALL, "bits": values, "decay": decay, "outer_lr": outer_lr}
    actual = trajectories(ranks, SparseLoCo(local_steps, **settings), start=common_start)

    reference = partial(sparse_loco, local_steps=local_steps, **settings)
    assert_follows(actual, reference, ranks=ranks, start=common_start, wide="float32")


@pytest.mark.parametrize(("dtype", "atol"), [("float16", 2e-2), ("bfloat16", 0.15)])
def test_other_precisions(dtype, atol):
    """All elements are sent: rounding would change which are the largest."""
    every = {"chunk": 16, "keep": 16, "bits": 32}
    actual = trajectories(2, SparseLoCo(2, **every), dtype=dtype, start=common_start)

    reference = partial(sparse_loco, local_steps=2, **every, decay=0.95)
    assert_follows(actual, reference, ranks=2, start=common_start, dtype=dtype, atol=atol)


def test_it_is_diloco_with_error_feedback_and_no_momentum():
    average = ErrorFeedback(TopK(96, 10), retain=0.95)
    sparse = trajectories(3, SparseLoCo(3, **SMALL), start=common_start)
    dense = trajectories(3, DiLoCo(3, 1.0, 0.0, average), start=common_start)
    given = trajectories(3, SparseLoCo(3, average=average), start=common_start)
    assert [bits(x) for x in sparse] == [bits(x) for x in dense] == [bits(x) for x in given]


@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_all_ranks_hold_the_same_weights_bit_for_bit_after_an_outer_step(ranks):
    first, *others = trajectories(ranks, SparseLoCo(3, **SMALL), start=common_start)

    for other in others:
        same = [bits([x]) == bits([y]) for x, y in zip(first, other, strict=True)]
        assert same == [step % 3 == 0 for step in range(STEPS)]


def test_112_bytes_for_4096_weights_leave_a_rank_for_each_other_one():
    def body(comm):
        plan = Plan.pack([TensorSpec("w", (10 * 4096,), "float32")])
        flats = plan.allocate()
        with Trainer(comm, SparseLoCo(2), plan, start=lambda spec, rank: flats[0]) as training:
            sent = []
            for _ in range(4):
                training.step()
                training.engine.flush()
                sent.append(training.engine.counter.wire_bytes)
            return np.diff([0, *sent]).tolist()

    assert run_ranks(3, body)[1] == [0, 2 * (10 * 112 + 16), 0, 2 * (10 * 112 + 16)]


def test_nodes_exchange_sparse_changes_of_their_means():
    """Two nodes of two ranks change their weights as two ranks do whose gradients are the means of the nodes."""
    algorithm = SparseLoCo(1, average=Hierarchical(ErrorFeedback(TopK(32, 4, 32), retain=0.9)))
    by_node = trajectories(4, algorithm, start=common_start, nodes="aabb")

    def of_means(xs, gradient):
        pairs = sparse_loco(xs[:2], of_pairs(gradient), 1, 32, 4, 32, 0.9)
        return ([x for x in two for _ in range(2)] for two in pairs)

    def of_pairs(gradient):
        return lambda x, node, step: (gradient(x, 2 * node, step) + gradient(x, 2 * node + 1, step)) / 2

    def by_chunks(xs, gradient):  # each rank of a node owns a half of a bucket
        half = len(xs[0]) // 2
        return map(
            lambda low, high: [np.concatenate(both) for both in zip(low, high, strict=True)],
            of_means([x[:half] for x in xs], lambda x, rank, step: part_of(gradient, x, 0, rank, step, xs)),
            of_means([x[half:] for x in xs], lambda x, rank, step: part_of(gradient, x, half, rank, step, xs)),
        )

    def part_of(gradient, x, first, rank, step, xs):
        whole = np.zeros_like(xs[0])
        whole[first : first + len(x)] = x
        return gradient(whole, rank, step)[first : first + len(x)]

    assert_follows(by_node, by_chunks, ranks=4, start=common_start, wide="float32")


def test_training_continues_in_other_buckets():
    def body(comm):
        with Trainer(comm, SparseLoCo(2, **SMALL), make_plan(2), start=common_start) as training:
            training.run(5)
            before = {name: x.copy() for name, x in unsent(training).items()}
            training.replan(make_plan(2, bucket_elements=10_000))
            after = unsent(training)
            assert any(x.any() for x in before.values())
            assert {name: x.tobytes() for name, x in before.items()} == {n: x.tobytes() for n, x in after.items()}
            training.run(3)

    run_ranks(2, body)


def unsent(training):
    """What is unsent, by tensor."""
    return {name: x["average.residual"] for name, x in training.engine.state_dict()["tensors"].items()}


@pytest.mark.parametrize("ranks", [1, 3])
def test_training_continues_after_a_restart(ranks):
    assert_restarts(ranks, SparseLoCo(3, **SMALL), at=(3, 5, 8), start=common_start)


@pytest.mark.parametrize(
    ("settings", "match"),
    [
        ({"local_steps": 0}, "local_steps"),
        ({"chunk": 4097}, r"chunk is 4097, expected an int from 2 to 4096, since indices have 12 bits"),
        ({"chunk": 8, "keep": 10}, "keep is 10, expected an even int from 2 to the chunk of 8"),
        ({"keep": 3}, "keep is 3, expected an even int"),
        ({"keep": 0}, "keep is 0"),
        ({"bits": 4}, "bits is 4, expected 2, 16 or 32"),
        ({"decay": 1.5}, "decay is 1.5, expected a number from 0 to 1"),
        ({"decay": "much"}, "decay is 'much'"),
        ({"outer_lr": 0}, "outer_lr is 0"),
        ({"average": "mean"}, "average"),
        ({"average": Exact(), "keep": 32}, r"keep is 32 beside average=Exact\(\), expected one of the two"),
    ],
)
def test_settings_out_of_range_are_refused(settings, match):
    with pytest.raises(ArrayError, match=match):
        SparseLoCo(**settings)


@pytest.mark.parametrize("dtype", ["int32", "float64"])
def test_a_dtype_that_cannot_be_averaged_is_refused_with_the_tensor(dtype):
    plan = Plan.pack([TensorSpec("odd one", (3,), dtype)])

    def body(comm):
        with pytest.raises(UnsupportedError, match="'odd one'"):
            Engine(comm, SparseLoCo(), plan, plan.allocate())

    run_ranks(2, body)


@pytest.mark.parametrize("other", [{"keep": 32}, {"bits": 16}, {"decay": 0.5}, {"local_steps": 3}])
def test_ranks_with_other_settings_are_an_error_on_all_ranks_before_training(other):
    plan = Plan.pack([TensorSpec("w", (3,), "float32")])

    def body(comm):
        with pytest.raises(BaguaError, match="have different algorithms"):
            Engine(comm, SparseLoCo(**other) if comm.rank else SparseLoCo(), plan, plan.allocate())

    run_ranks(3, body)
