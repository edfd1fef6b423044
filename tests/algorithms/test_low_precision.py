"""Quantized differences of weights: against plain loops over all ranks, and replicas bit for bit."""

import pickle
from functools import partial

import numpy as np
import pytest
from support.references import (
    Trainer,
    assert_follows,
    assert_restarts,
    low_precision_decentralized,
    low_precision_one_peer,
    make_plan,
    trajectories,
)

from bagua_comm import (
    ArrayError,
    Engine,
    Float16,
    Int4,
    LowPrecisionDecentralized,
    LowPrecisionOnePeer,
    MinMaxUInt8,
    Plan,
    Point,
    TensorSpec,
    UnsupportedError,
)
from bagua_comm.testing import check_algorithm, run_ranks

KINDS = [LowPrecisionDecentralized, LowPrecisionOnePeer]
REFERENCES = {
    LowPrecisionDecentralized: low_precision_decentralized,
    LowPrecisionOnePeer: low_precision_one_peer,
}


@pytest.mark.parametrize("kind", KINDS)
def test_conformance(kind):
    check_algorithm(kind(), sizes=(1, 2, 3, 4, 8))
    check_algorithm(kind(MinMaxUInt8.bagua()), sizes=(3,))
    check_algorithm(kind(Int4(rounding="stochastic")), sizes=(3,))


@pytest.mark.parametrize(
    ("codec", "ranks"),
    [(MinMaxUInt8(), ranks) for ranks in (1, 2, 3, 4, 8)]
    + [(MinMaxUInt8.bagua(), 4), (Float16(), 3), (Int4(), 3)],
)
@pytest.mark.parametrize("kind", KINDS)
def test_weights_follow_the_equations(kind, codec, ranks):
    actual = trajectories(ranks, kind(codec))

    assert_follows(actual, partial(REFERENCES[kind], codec=codec), ranks=ranks, wide="float32")


@pytest.mark.parametrize(("dtype", "atol"), [("float16", 0.05), ("bfloat16", 0.1)])
@pytest.mark.parametrize("kind", KINDS)
def test_other_precisions(kind, dtype, atol):
    actual = trajectories(4, kind(), dtype=dtype)

    reference = partial(REFERENCES[kind], codec=MinMaxUInt8())
    assert_follows(actual, reference, ranks=4, dtype=dtype, wide="float32", atol=atol)


def replicas(engine):
    """Copies of what a rank keeps for every bucket: [bucket][field]."""
    engine.flush()
    return [{name: np.copy(value) for name, value in vars(state).items()} for state in engine.states]


def assert_peers_agree(kept):
    """Compare, bit for bit, what ranks know of each other: [rank][bucket][field]."""
    p = len(kept)
    for rank, buckets in enumerate(kept):
        for i, mine in enumerate(buckets):
            if "left" in mine:
                assert mine["weight"].tobytes() == kept[rank - 1][i]["right"].tobytes()
                assert mine["weight"].tobytes() == kept[(rank + 1) % p][i]["left"].tobytes()
            else:
                assert len(mine["sent"]) == (p - 1).bit_length()
                for k, sent in enumerate(mine["sent"]):
                    assert sent.tobytes() == kept[(rank + 2**k) % p][i]["received"][k].tobytes()


@pytest.mark.parametrize(
    ("dtype", "ranks"),
    [("float32", ranks) for ranks in (1, 2, 3, 4, 8)] + [("float16", 3), ("bfloat16", 4)],
)
@pytest.mark.parametrize("kind", KINDS)
def test_replicas_agree_bit_for_bit_after_every_step_replan_and_restart(kind, dtype, ranks):
    first, second, third = (make_plan(ranks, dtype, elements) for elements in (25, 10_000, 1))

    def body(comm):
        kept = []

        def train(training):
            kept.append(replicas(training.engine))
            for _ in range(4):
                training.step()
                kept.append(replicas(training.engine))

        with Trainer(comm, kind(), first) as training:
            train(training)
            training.replan(second)
            train(training)
            saved = pickle.dumps(training.engine.state_dict())
            weights = training.tensors()
        with Trainer(comm, kind(), third) as training:
            training.load_tensors(weights)
            training.engine.load_state_dict(pickle.loads(saved))
            train(training)
        return kept

    for kept in zip(*run_ranks(ranks, body), strict=True):
        assert_peers_agree(kept)


@pytest.mark.parametrize("kind", KINDS)
def test_training_continues_in_other_buckets(kind):
    actual = trajectories(3, kind(), replans={3: 10_000, 7: 1})

    # Blocks now hold other tensors, so what quantizing loses is another part of a step of 1/255 of their range.
    assert_follows(actual, partial(REFERENCES[kind], codec=MinMaxUInt8()), ranks=3, wide="float32", atol=0.05)


@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize("kind", KINDS)
def test_training_continues_after_a_restart(kind, ranks):
    assert_restarts(ranks, kind(), at=(4, 7))


def settle(comm, algorithm, steps):
    """Train without gradients; returns the weights before and after."""
    with Trainer(comm, algorithm, make_plan(comm.size), lr=0) as training:
        before = training.tensors()
        training.run(steps)
        training.engine.at(Point.FORWARD)
        return before, training.tensors()


@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize("kind", KINDS)
def test_without_gradients_ranks_converge(kind, ranks):
    results = run_ranks(ranks, lambda comm: settle(comm, kind(), steps=30))

    for name in results[0][0]:
        before, after = (np.stack([result[i][name] for result in results]) for i in (0, 1))
        assert np.ptp(after, axis=0).max() < 0.02 * np.ptp(before, axis=0).max()


@pytest.mark.parametrize("ranks", [3, 8])
def test_one_peer_averaging_keeps_the_sum_over_the_ranks(ranks):
    results = run_ranks(ranks, lambda comm: settle(comm, LowPrecisionOnePeer(), steps=20))

    for name in results[0][0]:
        before, after = (np.sum([result[i][name] for result in results], axis=0, dtype="f8") for i in (0, 1))
        np.testing.assert_allclose(after, before, rtol=0, atol=1e-5)


def test_one_peer_averaging_of_one_rank_changes_nothing():
    ((before, after),) = run_ranks(1, lambda comm: settle(comm, LowPrecisionOnePeer(), steps=5))

    assert {name: x.tobytes() for name, x in before.items()} == {name: x.tobytes() for name, x in after.items()}


@pytest.mark.parametrize("kind", KINDS)
def test_a_dtype_the_codec_does_not_take_is_refused_with_the_tensor(kind):
    plan = Plan.pack([TensorSpec("narrow", (3,), "float32"), TensorSpec("wide", (3,), "float64")])

    def body(comm):
        with pytest.raises(UnsupportedError, match="'wide'"):
            Engine(comm, kind(), plan, plan.allocate())

    run_ranks(2, body)


@pytest.mark.parametrize("kind", KINDS)
def test_an_object_that_is_no_codec_is_refused(kind):
    with pytest.raises(ArrayError, match="codec"):
        kind("MinMaxUInt8")
