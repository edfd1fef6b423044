"""Every algorithm, with deaths: its state is restored, on the same number of ranks to the same bytes."""

import random
import threading

import numpy as np
import pytest
from random_kills import ALGORITHMS
from support.waiting import until

import bagua_comm
from bagua_comm import ArrayError, Engine, Plan, Point, TensorSpec
from bagua_comm.algorithms.base import pack
from bagua_comm.elastic import State, run
from bagua_comm.testing.fleets import ThreadJob, run_fleet

STEPS = 6
SPECS = [TensorSpec(f"t{i}", (7, i + 1), "float32") for i in range(3)]
WITH_FEEDBACK = "GradientAllReduce(ErrorFeedback(Quantized()))"
WITH_DECAY = "GradientAllReduce(ErrorFeedback(Quantized(), 0.8, 3, MinMaxUInt8()))"
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


def averaged(algorithm, step, grad, state):
    """What the algorithm has averaged of a bucket, the same on all ranks if they train alike."""
    is_qadam = isinstance(algorithm, bagua_comm.QAdam) and step >= algorithm.warmup_steps
    return state.momentum if is_qadam else grad


def training(algorithm, weights_of_ranks=None):
    """A program that trains with this algorithm; gradients differ between ranks."""

    def body(fleet):
        weights = {spec.name: np.ones(spec.shape, np.float32) for spec in SPECS}
        state = State(step=0, **weights)

        @run(state, fleet=fleet)
        def train(comm):
            exchanged = algorithm
            if "shift_one" in repr(algorithm) and comm.size % 2:
                exchanged = bagua_comm.Decentralized("all")  # the other pairs ranks
            plan = pack(exchanged, SPECS, bucket_bytes=100, alignment=8 * comm.size)
            flats = {"weight": plan.allocate(), "grad": plan.allocate()}
            weight, grad = plan.cut(flats["weight"]), plan.cut(flats["grad"])
            for name, view in weight.items():
                view[...] = weights[name]
            with Engine(comm, exchanged, plan, flats) as engine:
                while state.step < STEPS:
                    if weights_of_ranks is not None:
                        engine.weight = weights_of_ranks[(comm.rank + state.step) % len(weights_of_ranks)]
                    engine.at(Point.FORWARD)
                    for name, view in grad.items():
                        view[...] = weight[name] + np.sin(np.arange(view.size) * (comm.rank + 2)).reshape(
                            view.shape
                        )
                        engine.ready(name)
                    engine.at(Point.BACKWARD)
                    for i, flat in enumerate(flats["weight"]):
                        flat -= 0.1 * averaged(exchanged, state.step, flats["grad"][i], engine.states[i])
                    engine.at(Point.STEP)
                    engine.settle()
                    for name, view in weight.items():
                        weights[name][...] = view
                    state.step += 1
                    state.commit()
            return comm.rank, {name: view.copy() for name, view in weights.items()}

        return train, state.history

    return body


def by_rank(outcomes):
    """The results of the ranks that ended."""
    wrong = [outcome["error"] for outcome in outcomes if "error" in outcome]
    if wrong:
        raise wrong[0]
    ended = [outcome["result"][0] for outcome in outcomes if outcome.get("result") and outcome["result"][0]]
    return dict(ended)


def undisturbed(algorithm, size, weights_of_ranks=None):
    return by_rank(run_fleet(ThreadJob(size), training(algorithm, weights_of_ranks)))


def check_same_bytes(algorithm, deaths, weights_of_ranks=None):
    """Train on four ranks and two spares; process n dies when it does something for the k-th time."""
    expected = undisturbed(algorithm, 4, weights_of_ranks)
    job = ThreadJob(6, wanted=4)
    job.kill_at(deaths)
    got = by_rank(run_fleet(job, training(algorithm, weights_of_ranks)))
    assert len(got) >= 2  # one that dies at the very end has no heir
    assert got.keys() <= expected.keys()
    for rank, weights in got.items():
        for tensor, value in weights.items():
            np.testing.assert_array_equal(expected[rank][tensor], value, err_msg=f"{rank} {tensor} {deaths}")


@pytest.mark.parametrize("name", [WITH_FEEDBACK, WITH_DECAY, "LowPrecisionDecentralized()"])
def test_with_a_spare_the_weights_are_those_of_an_undisturbed_training(name):
    check_same_bytes(shortened(name), [(1, 70), (3, 90)])


@pytest.mark.parametrize("name", ["DiLoCo(local_steps=3)", "StreamingDiLoCo(local_steps=3, fragments=2)"])
def test_with_a_spare_the_weights_of_ranks_since_the_last_outer_step_still_count(name):
    check_same_bytes(shortened(name), [(1, 50), (3, 75)], weights_of_ranks=[1, 7, 0, 513])


@pytest.mark.slow
@pytest.mark.parametrize("name", DETERMINISTIC)
def test_with_spares_the_weights_are_those_of_an_undisturbed_training_whenever_ranks_die(name):
    chance = random.Random(name)
    for _ in range(3):
        victims = chance.choice([(0, 2), (1, 3)])  # neither is the other's buddy
        check_same_bytes(shortened(name), [(victim, chance.randrange(1, 110)) for victim in victims])


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*engine 0 starts with a new state:RuntimeWarning")  # 3 ranks, no pairs
@pytest.mark.parametrize("name", ALGORITHMS)
def test_without_spares_every_algorithm_continues_with_fewer_ranks(name):
    chance = random.Random(name)
    victim, moment = chance.randrange(4), chance.randrange(1, 40)
    job = ThreadJob(4)
    job.kill_at([(victim, moment)])
    got = by_rank(run_fleet(job, training(shortened(name))))
    assert len(got) == 3
    for weights in got.values():
        for value in weights.values():
            assert np.isfinite(value).all()
    if not any(kind in name for kind in ("Decentralized", "OnePeer", "Async", "LoCo", "QAdam")):
        for tensor, value in got[0].items():  # gradients were averaged, so all ranks have the same
            np.testing.assert_array_equal(value, got[1][tensor])


class Kept:
    """The state that a program with an engine finds at its entry, and the state before."""

    def __init__(self, algorithm, field):
        self.algorithm, self.field, self.seen = algorithm, field, {}

    def __call__(self, fleet):
        weights = {spec.name: np.ones(spec.shape, np.float32) for spec in SPECS}
        state = State(step=0, **weights)

        @run(state, fleet=fleet)
        def train(comm):
            plan = Plan.pack(SPECS, bucket_bytes=1 << 20, alignment=8 * comm.size)
            flats = {"weight": plan.allocate(), "grad": plan.allocate()}
            weight, grad = plan.cut(flats["weight"]), plan.cut(flats["grad"])
            for name, view in weight.items():
                view[...] = weights[name]
            with Engine(comm, self.algorithm, plan, flats) as engine:
                self.note(fleet, comm, engine, plan)
                while state.step < 4:
                    engine.at(Point.FORWARD)
                    for name, view in grad.items():
                        view[...] = np.cos(np.arange(view.size) * (comm.rank + 3) + state.step).reshape(
                            view.shape
                        )
                        engine.ready(name)
                    for point in (Point.BACKWARD, Point.STEP):
                        engine.at(point)
                    engine.settle()
                    state.step += 1
                    state.commit()
                    self.note(fleet, comm, engine, plan)
                    comm.barrier()  # all have committed this step, and looked
                    if state.step == 2 and comm.size == 4 and fleet.me == 1:
                        self.job.kill(1)
                    comm.barrier()

        return train

    def note(self, fleet, comm, engine, plan):
        saved = engine.state_dict()["tensors"]
        values = {name: pieces[self.field].copy() for name, pieces in saved.items() if self.field in pieces}
        for pieces in saved.values():
            assert pieces.get("average.means") in (None, engine.step % 3 or (3 if engine.step else 0))
        self.seen[comm.size, engine.step, fleet.me] = values


def kept_by(algorithm, field):
    """The state of four ranks after step 2, and the state that three of them restore, by process and tensor."""
    program = Kept(algorithm, field)
    program.job = ThreadJob(4)
    outcomes = run_fleet(program.job, program)
    assert not [each for each in outcomes if "error" in each], outcomes
    before = [program.seen[4, 2, n] for n in range(4)]
    after = [program.seen[3, 2, n] for n in (0, 2, 3)]
    return before, after


@pytest.mark.parametrize("name", [WITH_FEEDBACK, WITH_DECAY])
def test_the_mean_of_the_residuals_does_not_change(name):
    before, after = kept_by(shortened(name), "average.residual")
    for name in before[0]:
        assert np.abs(before[0][name] - before[1][name]).max() > 0
        mean = np.mean([each[name].astype(np.float64) for each in before], axis=0)
        for each in after:
            np.testing.assert_allclose(mean, each[name], rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize(
    ("algorithm", "field"),
    [
        ("DiLoCo(local_steps=2)", "momentum"),
        ("DiLoCo(local_steps=2)", "anchor"),
        ("SparseLoCo(local_steps=2)", "anchor"),
        ("QAdam(warmup_steps=1)", "momentum"),
    ],
)
def test_replicated_state_does_not_change(algorithm, field):
    before, after = kept_by(eval(algorithm, vars(bagua_comm)), field)
    assert before[0]
    for name, value in before[0].items():
        for each in after:
            np.testing.assert_array_equal(value, each[name])


def test_by_node_recreates_the_state_of_parts_of_a_bucket_on_another_number_of_ranks():
    program = Kept(bagua_comm.by_node(bagua_comm.DiLoCo(local_steps=2)), "inner.momentum")
    program.job = ThreadJob(4, hosts=["a", "a", "b", "b"])
    with pytest.warns(RuntimeWarning, match="engine 0 starts with a new state: on these ranks nothing"):
        outcomes = run_fleet(program.job, program)
    assert not [each for each in outcomes if "error" in each], outcomes
    assert any(program.seen[4, 2, n] for n in range(4))


def test_a_commit_inside_of_a_training_step_is_an_error_on_all_ranks():
    def body(fleet):
        state = State(step=0)

        @run(state, fleet=fleet)
        def train(comm):
            plan = Plan.pack(SPECS, alignment=8 * comm.size)
            with Engine(comm, bagua_comm.GradientAllReduce(), plan, plan.allocate()) as engine:
                if comm.rank == 0:
                    engine.at(Point.FORWARD)
                state.commit()

    for outcome in run_fleet(ThreadJob(2), body):
        with pytest.raises(ArrayError, match=r"rank 0: a training step is under way \(step 0 of Gradient"):
            raise outcome["error"]


def test_another_algorithm_than_before_starts_again():
    def body(fleet):
        state = State(step=0)

        @run(state, fleet=fleet)
        def train(comm):
            plan = Plan.pack(SPECS, alignment=8 * comm.size)
            algorithm = bagua_comm.Decentralized("shift_one" if comm.size == 2 else "all")
            with Engine(comm, algorithm, plan, plan.allocate()) as engine:
                engine.at(Point.FORWARD), engine.at(Point.BACKWARD), engine.at(Point.STEP)
                state.commit()
                if comm.size == 2 and fleet.me == 0:
                    job.kill(0)
                comm.barrier()
                return engine.step

        return train

    job = ThreadJob(2)
    with pytest.warns(RuntimeWarning, match="engine 0 starts with a new state: Decentralized"):
        _, second = run_fleet(job, body)
    assert second["result"] == 1


def test_aborted_engines_leave_no_thread():
    threads = set(threading.enumerate())
    check_same_bytes(bagua_comm.ByteGrad(), [(1, 60)])
    until(lambda: threads.issuperset(threading.enumerate()))
