"""Quantized differences of weights: against plain loops over all ranks, and replicas bit for bit."""

import pickle

import numpy as np
import pytest
from support.references import Trainer, make_plan

from bagua_comm import LowPrecisionDecentralized, LowPrecisionOnePeer, Point
from bagua_comm.testing import run_ranks

KINDS = [LowPrecisionDecentralized, LowPrecisionOnePeer]


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


@pytest.mark.parametrize(("dtype", "ranks"), [("float32", 4), ("float16", 3), ("bfloat16", 2)])
@pytest.mark.parametrize("kind", KINDS)
def test_replicas_agree_bit_for_bit_after_every_step_replan_and_restart(kind, dtype, ranks):
    first, second, third = (make_plan(ranks, dtype, elements) for elements in (25, 10_000, 1))

    def body(comm):
        kept = []

        def train(training):
            kept.append(replicas(training.engine))
            for _ in range(3):
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


def settle(comm, algorithm, steps):
    """Train without gradients; returns the weights before and after."""
    with Trainer(comm, algorithm, make_plan(comm.size), lr=0) as training:
        before = training.tensors()
        training.run(steps)
        training.engine.at(Point.FORWARD)
        return before, training.tensors()


@pytest.mark.parametrize("kind", KINDS)
def test_without_gradients_ranks_converge(kind):
    results = run_ranks(3, lambda comm: settle(comm, kind(), steps=20))

    for name in results[0][0]:
        before, after = (np.stack([result[i][name] for result in results]) for i in (0, 1))
        assert np.ptp(after, axis=0).max() < 0.02 * np.ptp(before, axis=0).max()


@pytest.mark.parametrize("ranks", [3, 8])
def test_one_peer_averaging_keeps_the_sum_over_the_ranks(ranks):
    results = run_ranks(ranks, lambda comm: settle(comm, LowPrecisionOnePeer(), steps=8))

    for name in results[0][0]:
        before, after = (np.sum([result[i][name] for result in results], axis=0, dtype="f8") for i in (0, 1))
        np.testing.assert_allclose(after, before, rtol=0, atol=1e-5)


def test_one_peer_averaging_of_one_rank_changes_nothing():
    ((before, after),) = run_ranks(1, lambda comm: settle(comm, LowPrecisionOnePeer(), steps=5))

    assert {name: x.tobytes() for name, x in before.items()} == {name: x.tobytes() for name, x in after.items()}
