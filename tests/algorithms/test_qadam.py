"""QAdam: against Adam on averaged gradients and, past the warm-up, on averaged momentum."""

import numpy as np
from support.references import AdamTrainer, gradient, make_plan

from bagua_comm import QAdam
from bagua_comm.testing import run_ranks

WARMUP_STEPS = AdamTrainer.optimizer.warmup_steps
QUANTIZED = QAdam(warmup_steps=WARMUP_STEPS, beta1=0.8)


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
