"""Every algorithm, with deaths: what it keeps comes back, on the same number of ranks to the same bytes."""

import random

import numpy as np
import pytest
from random_kills import ALGORITHMS

import bagua_comm
from bagua_comm import Engine, Plan, Point, TensorSpec
from bagua_comm.elastic import State, run
from bagua_comm.testing.fleets import ThreadJob, run_fleet

STEPS = 8
SPECS = [TensorSpec(f"t{i}", (7, i + 1), "float32") for i in range(3)]
DETERMINISTIC = [name for name in ALGORITHMS if "Async" not in name]


def shortened(name):
    """An algorithm whose phases and rounds are over within a few steps."""
    for long, short in (
        ("warmup_steps=50", "warmup_steps=3"),
        ("after(50", "after(3"),
        ("local_steps=10", "local_steps=3"),
    ):
        name = name.replace(long, short)
    return eval(name.replace("warmup_steps=20", "warmup_steps=2").replace("0.01", "0.0"), vars(bagua_comm))


def training(algorithm):
    """A program that trains with this algorithm; a rank's gradients are its own."""

    def body(fleet):
        weights = {spec.name: np.ones(spec.shape, np.float32) for spec in SPECS}
        state = State(step=0, **weights)

        @run(state, fleet=fleet)
        def train(comm):
            plan = Plan.pack(SPECS, bucket_bytes=100, alignment=8 * comm.size)
            flats = {"weight": plan.allocate(), "grad": plan.allocate()}
            weight, grad = plan.cut(flats["weight"]), plan.cut(flats["grad"])
            for name, view in weight.items():
                view[...] = weights[name]
            with Engine(comm, algorithm, plan, flats) as engine:
                while state.step < STEPS:
                    engine.at(Point.FORWARD)
                    for name, view in grad.items():
                        view[...] = weight[name] + np.sin(np.arange(view.size) * (comm.rank + 2)).reshape(
                            view.shape
                        )
                        engine.ready(name)
                    engine.at(Point.BACKWARD)
                    for name, view in weight.items():
                        view -= 0.1 * grad[name]
                    engine.at(Point.STEP)
                    engine.settle()
                    for name, view in weight.items():
                        weights[name][...] = view
                    state.step += 1
                    state.commit()
            return comm.rank, {name: view.copy() for name, view in weights.items()}

        return train, state.history

    return body


def dies_at(job, moments):
    """Have process n die when it does something for the k-th time, for every (n, k)."""
    counts = dict.fromkeys(dict(moments), 0)
    due = dict(moments)

    def watch(number, what):
        if number in due:
            counts[number] += 1
            if counts[number] == due[number]:
                job.kill(number)

    job.watch = watch


def by_rank(outcomes):
    """What the ranks that ended have returned."""
    wrong = [outcome["error"] for outcome in outcomes if "error" in outcome]
    if wrong:
        raise wrong[0]
    ended = [outcome["result"][0] for outcome in outcomes if outcome.get("result") and outcome["result"][0]]
    return dict(ended)


def undisturbed(algorithm, size):
    return by_rank(run_fleet(ThreadJob(size), training(algorithm)))


@pytest.mark.parametrize("name", DETERMINISTIC)
def test_with_a_spare_the_weights_are_those_of_an_undisturbed_training(name):
    algorithm = shortened(name)
    expected = undisturbed(algorithm, 4)
    chance = random.Random(name)
    for _ in range(3):
        job = ThreadJob(6, wanted=4)
        victims = chance.choice([(0, 2), (1, 3)])  # neither is the other's buddy
        dies_at(job, [(victim, chance.randrange(1, 150)) for victim in victims])
        got = by_rank(run_fleet(job, training(algorithm)))
        assert len(got) >= 2 and got.keys() <= expected.keys()  # one that dies at the very end has no heir
        for rank, weights in got.items():
            for tensor, value in weights.items():
                np.testing.assert_array_equal(expected[rank][tensor], value, err_msg=f"{rank} {tensor} {victims}")
