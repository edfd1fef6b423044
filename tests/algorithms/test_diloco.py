"""DiLoCo: against local SGD with an outer optimizer, over the list of all ranks' weights."""

import logging

import numpy as np
import pytest
import torch
from support.references import STEPS, Trainer, make_plan

from bagua_comm import DiLoCo, Engine, Plan, Point, TensorSpec
from bagua_comm.testing import run_ranks


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


def test_by_default_a_lasting_change_is_not_taken_several_times():
    def body(comm):
        with Trainer(comm, DiLoCo(1), make_plan(1)) as training:
            training.update = lambda: [np.add(x, 1, out=x) for x in training.weights]
            return [next(iter(weights.values())).flat[0] for weights in training.run(STEPS)]

    moved = np.diff(run_ranks(2, body)[0])
    assert (moved > 1).all()
    assert (moved < 1.5).all()


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
