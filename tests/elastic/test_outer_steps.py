"""DiLoCo and StreamingDiLoCo when ranks die and join: the same bits as tests/golden/make_outer_steps.py."""

import json
import subprocess
import sys

import numpy as np
import pytest
from support.golden import GOLDEN
from support.waiting import until

import bagua_comm
from bagua_comm import CommAborted, Engine, Point, TensorSpec
from bagua_comm.algorithms.base import pack
from bagua_comm.elastic import State, run
from bagua_comm.testing.fleets import ThreadJob, run_fleet

GIVEN, *CASES = json.loads((GOLDEN / "outer_steps.json").read_text())
INITIAL = {name: np.array(value) for name, value in GIVEN["initial"].items()}


def algorithm_of(case):
    settings = {name: case[name] for name in ("local_steps", "outer_lr", "outer_momentum")}
    if case["algorithm"] == "StreamingDiLoCo":
        settings |= {"delay": case["delay"], "mix": case["mix"], "fragments": case["fragments"].get}
    return getattr(bagua_comm, case["algorithm"])(**settings)


class Training:
    """A case: all processes train, and fail as it says."""

    def __init__(self, case):
        self.case, self.algorithm = case, algorithm_of(case)
        self.joining = sum(len(each["ranks"]) for each in case["failures"] if each["where"] == "join")
        self.job = ThreadJob(case["ranks"] + case["spares"], wanted=case["ranks"] + self.joining)
        self.rows = {}
        """By run, step and rank: the weights, and where they are committed the state of the engine."""

    def body(self, fleet):
        weights = {name: value.copy() for name, value in INITIAL.items()}
        state = State(step=0, **weights)

        @run(state, fleet=fleet)
        def train(comm):
            self.train(comm, fleet, state, weights)

    def train(self, comm, fleet, state, weights):
        """One run, until the end or a failure."""
        number = [(each["from"], each["ranks"]) for each in self.case["runs"]].index((state.step, comm.size))
        failure = [*self.case["failures"], {"where": "", "step": 0, "ranks": []}][number]
        specs = [TensorSpec(name, value.shape, "float64") for name, value in weights.items()]
        plan = pack(self.algorithm, specs, bucket_bytes=40, alignment=4 * comm.size)
        flats = plan.allocate()
        views = plan.cut(flats)
        for name, view in views.items():
            view[...] = weights[name]
        with Engine(comm, self.algorithm, plan, flats) as engine:
            while state.step < len(GIVEN["updates"]):
                engine.at(Point.FORWARD)
                engine.at(Point.BACKWARD)
                for name, change in GIVEN["updates"][state.step][comm.rank].items():
                    views[name] += change
                if (failure["where"], failure["step"]) == ("step", state.step + 1):
                    self.die(comm, fleet, failure["ranks"])
                engine.at(Point.STEP)
                engine.settle()
                for name, view in views.items():
                    weights[name][...] = view
                state.step += 1
                row = {"weights": {name: value.copy() for name, value in weights.items()}}
                self.rows[number, state.step, comm.rank] = row
                if state.step % self.case["commit_every"] == 0:
                    saved = engine.state_dict()["tensors"]
                    for field in ("anchor", "momentum"):
                        row[field] = {name: np.array(saved[name][field]) for name in weights}
                    if (failure["where"], failure["step"]) == ("commit", state.step):
                        self.die(comm, fleet, failure["ranks"])
                    state.commit()
                    comm.barrier()  # all have committed this step before one dies in a later one
                    if (failure["where"], failure["step"]) == ("join", state.step):
                        self.admit(comm)
            engine.stop()

    def admit(self, comm):
        """Let processes join, and leave this run for a rendezvous with them."""
        if comm.rank == 0:
            first = len(self.job.processes)
            for number in range(first, first + self.joining):
                self.job.start(self.body, number)
        until(lambda: len(self.job.joining) == self.joining)
        raise CommAborted("others wait to join")

    def die(self, comm, fleet, ranks):
        """Let these ranks die in their next call."""
        members = comm.allgather(np.array([fleet.me])).ravel().tolist()
        if comm.rank == ranks[0]:
            self.job.kill(*(members[rank] for rank in ranks))
        elif comm.rank in ranks:
            until(lambda: fleet.me in self.job.doomed)


def same(expected, actual):
    return np.array(expected).tobytes() == actual.tobytes()


def test_the_golden_file_is_what_its_script_makes():
    script = GOLDEN / "make_outer_steps.py"
    assert subprocess.run([sys.executable, script, "--check"], timeout=300).returncode == 0


def param(case):
    """A case; those of DiLoCo without a failed commit are like those of StreamingDiLoCo, and slow."""
    by_default = case["algorithm"] == "StreamingDiLoCo" or "commit" in [
        each["where"] for each in case["failures"]
    ]
    marks = () if by_default else pytest.mark.slow
    return pytest.param(case, id=f"{case['algorithm']}-{case['name']}", marks=marks)


@pytest.mark.parametrize("case", [param(case) for case in CASES])
def test_the_trajectory_is_the_golden_one(case):
    training = Training(case)
    for outcome in run_fleet(training.job, training.body):
        if "error" in outcome:
            raise outcome["error"]
    compared = 0
    for number, golden in enumerate(case["runs"]):
        for row in golden["steps"]:
            for rank, weights in enumerate(row["weights"]):
                where = f"run {number}, step {row['step']}, rank {rank}"
                found = training.rows[number, row["step"], rank]
                for field in ("weights", "anchor", "momentum"):
                    for name, value in (weights if field == "weights" else row.get(field, {})).items():
                        assert same(value, found[field][name]), f"{where}: {field} of {name}"
                        compared += 1
            assert (number, row["step"], len(row["weights"])) not in training.rows
    assert compared > 100
