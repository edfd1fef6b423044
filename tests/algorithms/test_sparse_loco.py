"""SparseLoCo: against local SGD whose ranks send the largest changes, over the list of all ranks' weights."""

import numpy as np
import pytest
from support.references import Trainer, assert_follows, bits, common_start, make_plan, sparse_loco, trajectories

from bagua_comm import BaguaError, DiLoCo, Engine, ErrorFeedback, Hierarchical, Plan, SparseLoCo, TensorSpec, TopK
from bagua_comm.testing import run_ranks

SMALL = {"chunk": 96, "keep": 10}


def test_it_is_diloco_with_error_feedback_and_no_momentum():
    average = ErrorFeedback(TopK(96, 10), retain=0.95)
    sparse = trajectories(3, SparseLoCo(3, **SMALL), start=common_start)
    dense = trajectories(3, DiLoCo(3, 1.0, 0.0, average), start=common_start)
    given = trajectories(3, SparseLoCo(3, average=average), start=common_start)
    assert [bits(x) for x in sparse] == [bits(x) for x in dense] == [bits(x) for x in given]


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


def test_it_passes_its_tensors_to_the_average():
    average = ErrorFeedback(TopK(96, 10, whole_below=50), retain=0.95)
    sparse = trajectories(3, SparseLoCo(3, whole_below=50, **SMALL), start=common_start)
    given = trajectories(3, SparseLoCo(3, average=average), start=common_start)
    flat = trajectories(3, SparseLoCo(3, **SMALL), start=common_start)
    assert [bits(x) for x in sparse] == [bits(x) for x in given]
    assert [bits(x) for x in sparse] != [bits(x) for x in flat]


def test_checkpoints_of_earlier_versions_note_the_same_algorithm():
    earlier = "chunk=4096, keep=64, bits=2"
    assert repr(SparseLoCo()) == f"SparseLoCo(local_steps=30, {earlier}, decay=0.95, outer_lr=1.0, average=None)"
    assert repr(ErrorFeedback(TopK())) == f"ErrorFeedback(inner=TopK({earlier}))"
    assert repr(TopK(whole_below=9)) == f"TopK({earlier}, whole_below=9)"


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


@pytest.mark.parametrize(
    "other", [{"keep": 32}, {"decay": 0.5}, {"local_steps": 3}, {"whole_below": 9}, {"divide": "senders"}]
)
def test_ranks_with_other_settings_are_an_error_on_all_ranks_before_training(other):
    plan = Plan.pack([TensorSpec("w", (3,), "float32")])

    def body(comm):
        with pytest.raises(BaguaError, match="have different algorithms"):
            Engine(comm, SparseLoCo(**other) if comm.rank else SparseLoCo(), plan, plan.allocate())

    run_ranks(3, body)
