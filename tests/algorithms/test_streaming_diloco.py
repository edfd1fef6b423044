"""Streaming DiLoCo: against the paper's algorithm in NumPy, over the weights of all ranks, with given updates."""

import pickle
import threading
from dataclasses import dataclass

import numpy as np
import pytest
from support.references import bits, common_start, trajectories
from support.waiting import until

from bagua_comm import (
    ArrayError,
    Average,
    CommAborted,
    CommMismatch,
    DiLoCo,
    Engine,
    ErrorFeedback,
    Exact,
    Int4,
    Plan,
    Point,
    Quantized,
    StreamingDiLoCo,
    TensorSpec,
    every,
)
from bagua_comm.elastic import State, run
from bagua_comm.testing import run_ranks, sample
from bagua_comm.testing.fleets import ThreadJob, run_fleet

NAMES = ("embedding", "layer.0", "layer.1", "layer.2", "head")
SPECS = [TensorSpec(name, (3, 2 + i), "float64") for i, name in enumerate(NAMES)]
STEPS = 13


def layer(name):
    """MaxText's division: the embedding and the head are fragment 0."""
    return int(name[-1]) + 1 if name.startswith("layer") else 0


# The model: its updates are given ------------------------------------------------------------------------


def initial():
    return {spec.name: sample(0, spec.shape, "float64", seed=7 + i) for i, spec in enumerate(SPECS)}


def update(name, rank, t):
    """What the inner optimizer of a rank adds to a tensor in step t = 1, 2, ..., whatever the weights are."""
    number = NAMES.index(name)
    return sample(rank, SPECS[number].shape, "float64", seed=100 * t + number)


class FixedModel:
    """One rank of the training."""

    def __init__(self, comm, algorithm, specs=SPECS, values=None, done=0):
        self.comm, self.done = comm, done
        self.plan = Plan.pack(specs, bucket_bytes=1, alignment=4 * comm.size, groups=algorithm.groups(specs))
        self.flats = self.plan.allocate()
        self.weights = self.plan.cut(self.flats)
        for name, value in (values or initial()).items():
            self.weights[name][...] = value
        self.engine = Engine(comm, algorithm, self.plan, self.flats)

    def step(self):
        """One step; returns the weights at its end."""
        for point in (Point.FORWARD, Point.BACKWARD):
            self.engine.at(point)
        self.done += 1
        for name, weight in self.weights.items():
            weight += update(name, self.comm.rank, self.done)
        self.engine.at(Point.STEP)
        self.engine.settle()
        return self.copy()

    def copy(self):
        return {name: weight.copy() for name, weight in self.weights.items()}


def trained(ranks, algorithm, steps=STEPS):
    """The weights after each step, [rank][step][name]."""

    def body(comm):
        model = FixedModel(comm, algorithm)
        with model.engine:
            trajectory = [model.step() for _ in range(steps)]
            model.engine.stop()
            return trajectory

    return run_ranks(ranks, body)


# The reference -------------------------------------------------------------------------------------------


@dataclass
class Reference:
    """Algorithm 2 of the paper, for all ranks at once; `fragment_of` gives the fragment of a tensor."""

    fragment_of: dict
    local_steps: int
    delay: int
    mix: float
    lr: float = 0.7
    momentum: float = 0.9

    def __post_init__(self):
        self.fragments = max(self.fragment_of.values()) + 1
        self.anchor, self.u = initial(), dict.fromkeys(NAMES, 0.0)
        self.sent = {}
        """By name: the step in which the changes of the ranks were taken, and their mean."""

    def names_due(self, t):
        due = [round(p * self.local_steps / self.fragments) for p in range(self.fragments)]
        return [n for n in NAMES if (t - due[self.fragment_of[n]]) % self.local_steps == 0]

    def step(self, xs, t, ranks=None):
        """`xs[r]` are the weights of rank r, by name; returns those after step t."""
        ranks = range(len(xs)) if ranks is None else ranks
        xs = [{n: x[n] + update(n, rank, t) for n in NAMES} for rank, x in zip(ranks, xs, strict=True)]
        for name in self.names_due(t):
            assert name not in self.sent
            self.sent[name] = t, sum(self.anchor[name] - x[name] for x in xs) / len(xs)
        for name in [n for n, (began, _) in self.sent.items() if began + self.delay == t]:
            _, delta = self.sent.pop(name)
            self.u[name] = self.momentum * self.u[name] + delta
            self.anchor[name] = self.anchor[name] - self.lr * (delta + self.momentum * self.u[name])
            for x in xs:
                x[name] = self.mix * x[name] + (1 - self.mix) * self.anchor[name]
        return xs

    def run(self, ranks, steps=STEPS):
        xs, trajectory = [initial() for _ in range(ranks)], []
        for t in range(1, steps + 1):
            xs = self.step(xs, t)
            trajectory.append(xs)
        return [[xs[rank] for xs in trajectory] for rank in range(ranks)]


def assert_same(actual, expected):
    for rank, (mine, theirs) in enumerate(zip(actual, expected, strict=True)):
        for t, (now, wanted) in enumerate(zip(mine, theirs, strict=True), start=1):
            for name in NAMES:
                np.testing.assert_allclose(
                    now[name], wanted[name], rtol=1e-12, atol=1e-12, err_msg=f"{name}, rank {rank}, step {t}"
                )


BY_COUNT = {  # the tensors have 6, 9, 12, 15 and 18 elements
    1: dict.fromkeys(NAMES, 0),
    2: dict(zip(NAMES, (0, 0, 1, 1, 0), strict=True)),
    3: dict(zip(NAMES, (1, 2, 2, 1, 0), strict=True)),
    5: dict(zip(NAMES, (4, 3, 2, 1, 0), strict=True)),
}


@pytest.mark.parametrize(
    ("ranks", "fragments", "local_steps", "delay", "mix"),
    [
        *((2, 1, 4, 0, 0), (3, 1, 4, 3, 0.5), (3, 2, 4, 1, 0.5)),
        *((2, 3, 5, 4, 0.25), (1, 5, 3, 2, 0), (3, 5, 10, 6, 0.5)),
    ],
)
def test_weights_follow_the_papers_algorithm(ranks, fragments, local_steps, delay, mix):
    actual = trained(ranks, StreamingDiLoCo(local_steps, fragments, delay, mix))
    reference = Reference(BY_COUNT[fragments], local_steps, delay, mix)
    assert_same(actual, reference.run(ranks))


def test_a_function_chooses_the_fragments():
    actual = trained(2, StreamingDiLoCo(6, layer, 2, 0.5, 0.6, 0.8))
    reference = Reference({name: layer(name) for name in NAMES}, 6, 2, 0.5, 0.6, 0.8)
    assert_same(actual, reference.run(2))


@pytest.mark.parametrize("average", [Exact(), Quantized(Int4()), ErrorFeedback()], ids=repr)
def test_without_fragments_and_delay_it_is_diloco_bit_for_bit(average):
    settings = {"outer_lr": 0.6, "outer_momentum": 0.8, "average": average}
    streaming = trajectories(2, StreamingDiLoCo(3, 1, 0, 0, **settings), start=common_start)
    plain = trajectories(2, DiLoCo(3, **settings), start=common_start)
    assert [bits(x) for x in streaming] == [bits(x) for x in plain]


def test_every_n_counts_its_own_steps_and_the_delay_in_steps_of_training():
    """One of two steps counts: the weights become equal one step after steps 3 and 7."""
    actual = trained(2, every(2, StreamingDiLoCo(2, 1, 1, 0)), steps=8)
    plain = trained(2, StreamingDiLoCo(4, 1, 1, 0), steps=9)
    for name in NAMES:  # the first of two steps counts, so that it is one step ahead
        together = [np.array_equal(actual[0][t][name], actual[1][t][name]) for t in range(8)]
        assert together == [False, False, False, True, False, False, False, True]
        later = [np.array_equal(plain[0][t][name], plain[1][t][name]) for t in range(9)]
        assert later == [False, False, False, False, True, False, False, False, True]


# Overlap -------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Gate(Average):
    """An average that waits until the test lets it pass."""

    passed: threading.Event
    limit_s = 20.0

    def __repr__(self):
        return "Gate()"

    def bind(self, comm):
        def average(x):
            assert self.passed.wait(self.limit_s), "training waited for an exchange that it should not wait for"
            return comm.allreduce(x, out=x, op="avg")

        return average


def test_training_waits_in_the_step_in_which_the_delay_ends_and_not_before():
    gates = [threading.Event(), threading.Event()]

    def body(comm):
        gate = gates[comm.rank]
        model = FixedModel(comm, StreamingDiLoCo(6, 2, 3, 0.5, average=Gate(gate)))
        commits = []
        with model.engine as engine:
            for t in range(1, 10):
                if t == 6:  # fragment 1, due in step 3, ends in this one; fragment 0 is due
                    assert not gate.is_set()
                    gate.set()
                model.step()
                commits.append(engine.commits)
                if t == 5:
                    assert engine.counters.wait.calls == 0
            engine.stop()
        return commits

    for commits in run_ranks(2, body):
        assert commits == [0, 0, 0, 0, 0, 1, 1, 1, 2]


def test_several_fragments_are_under_way_at_once_and_leave_in_order():
    def body(comm):
        model = FixedModel(comm, StreamingDiLoCo(5, 5, 4, 0.5))
        with model.engine as engine:
            under_way = []
            for _ in range(10):
                model.step()
                under_way.append([i for i, state in enumerate(engine.states) if state.pending.steps])
            engine.stop()
            assert not any(state.pending.steps for state in engine.states)
        return under_way

    mine, other = run_ranks(2, body)
    assert mine == other
    assert mine[4:] == [[0, 1, 2, 4], [0, 1, 3, 4], [0, 2, 3, 4], [1, 2, 3, 4], [0, 1, 2, 3], [0, 1, 2, 4]]


@pytest.mark.parametrize("action", ["stop", "close", "replan", "after"])
def test_what_is_under_way_is_written_back_when_training_stops(action):
    """With a weight of 0, all ranks have the same weights after that."""

    def body(comm):
        model = FixedModel(comm, StreamingDiLoCo(4, 1, 3, 0))
        with model.engine as engine:
            for _ in range(4):
                model.step()
            before = model.copy()
            if action == "replan":
                plan = Plan.pack(SPECS, bucket_bytes=200, alignment=4)
                moved = plan.cut(engine.replan(plan))
                return before, {name: value.copy() for name, value in moved.items()}
            if action != "after":
                getattr(engine, action)()
        return before, model.copy()

    (first, mine), (second, other) = run_ranks(2, body)
    for name in NAMES:
        assert (first[name] != second[name]).all()
        np.testing.assert_array_equal(mine[name], other[name])


# Checkpoints and elastic training ------------------------------------------------------------------------


def test_a_state_with_a_fragment_under_way_loads_on_another_number_of_ranks():
    algorithm = StreamingDiLoCo(4, 2, 2)

    def save(comm):
        model = FixedModel(comm, algorithm)
        with model.engine as engine:
            for _ in range(5):
                model.step()
            saved = engine.state_dict()
            assert sorted({pieces["pending.steps"] for pieces in saved["tensors"].values()}) == [0, 2]
            return pickle.dumps(saved), model.copy()

    ranks = run_ranks(3, save)
    values = {name: sum(x[name] for _, x in ranks) / 3 for name in NAMES}

    def load(comm):
        model = FixedModel(comm, algorithm, values=values, done=5)
        with model.engine as engine:
            engine.load_state_dict(pickle.loads(ranks[0][0]))
            trajectory = [model.step() for _ in range(8)]
            engine.stop()
            return trajectory

    reference = Reference(BY_COUNT[2], 4, 2, 0.5)
    xs = [initial() for _ in range(3)]
    for t in range(1, 6):
        xs = reference.step(xs, t)
    xs = [{name: sum(x[name] for x in xs) / 3 for name in NAMES}] * 2
    expected = []
    for t in range(6, 14):
        xs = reference.step(xs, t)
        expected.append(xs)
    assert_same(run_ranks(2, load), [[xs[rank] for xs in expected] for rank in range(2)])


def test_a_state_with_a_fragment_under_way_does_not_load_into_buckets_of_other_fragments():
    def body(comm):
        algorithm = StreamingDiLoCo(4, 2, 2)
        model = FixedModel(comm, algorithm)
        with model.engine as engine:
            for _ in range(5):
                model.step()
            saved = engine.state_dict()
        plan = Plan.pack(SPECS, bucket_bytes=230, groups=[0, 0, 0, 1, 1])
        with Engine(comm, algorithm, plan, plan.allocate()) as engine:
            with pytest.raises(
                ArrayError, match=r"'pending.steps' of 'layer.1' is 0, expected 2, .*groups=algorithm.groups"
            ):
                engine.load_state_dict(saved)
            engine.stop()

    run_ranks(2, body)


def test_a_rank_dies_and_another_joins_while_fragments_are_under_way():
    """Committed weights become their mean on another number of ranks; everything else goes on as it was."""
    algorithm, entries = StreamingDiLoCo(4, 2, 2), []

    def body(fleet):
        weights = initial()
        state = State(step=0, **{name.replace(".", "_"): value for name, value in weights.items()})
        log = []

        @run(state, fleet=fleet)
        def train(comm):
            began = state.step
            entries.extend([(began, comm.size)] * (comm.rank == 0))
            model = FixedModel(comm, algorithm, values=weights, done=began)
            with model.engine as engine:
                while not (comm.size == 3 and state.step >= max(began, 6) + 8):
                    for name, value in model.step().items():
                        weights[name][...] = value
                    log.append((state.step + 1, comm.rank, {name: x.copy() for name, x in weights.items()}))
                    state.step += 1
                    if state.step == 6 and fleet.me == 1:
                        job.kill(1)
                    state.commit()
                    comm.barrier()  # all have committed this step before one dies in the next
                    if comm.size == 2 and state.step == 9:
                        if comm.rank == 0:
                            job.start(body, 3)
                        until(lambda: job.joining)
                        raise CommAborted("another waits to join")
                engine.stop()

        return log

    job = ThreadJob(3)
    outcomes = run_fleet(job, body)
    assert [entry[1] for entry in entries] == [3, 2, 3]
    assert entries[1][0] == 5  # fragment 0 has left in step 4, and arrives in step 6
    reference, xs = Reference(BY_COUNT[2], 4, 2, 0.5), [initial() for _ in range(3)]
    expected, last = {}, max(t for outcome in outcomes for t, _, _ in outcome.get("result") or [(0, 0, 0)])
    for (began, size), (end, _) in zip(entries, [*entries[1:], (last, 0)], strict=True):
        mean = {name: sum(x[name] for x in xs) / len(xs) for name in NAMES}
        xs = [mean] * size if began else xs
        for t in range(began + 1, end + 1):
            xs = reference.step(xs, t)
            expected.update({(t, rank): x for rank, x in enumerate(xs)})
    for outcome in outcomes:
        for t, rank, weights in outcome.get("result") or ():
            if (t, rank) in expected and t != 6:  # of two attempts at this step, one failed
                for name in NAMES:
                    np.testing.assert_allclose(weights[name], expected[t, rank][name], rtol=1e-9, atol=1e-12)


# Bad input -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fragments", "groups", "message"),
    [
        (
            6,
            range(5),
            "fragments is 6, but the tensors are in 5 buckets; expected at most one fragment per bucket",
        ),
        (2, [0] * 5, "fragments is 2, but the tensors are in 1 buckets"),
        (layer, [0] * 5, "'embedding' of fragment 0 and 'layer.0' of fragment 1 share a bucket; pack tensors by"),
        (
            lambda name: name,
            range(5),
            r"fragments\('embedding'\) is 'embedding', expected an integer of at least 0",
        ),
        (lambda name: -1, range(5), r"fragments\('embedding'\) is -1, expected an integer of at least 0"),
    ],
)
def test_buckets_that_do_not_fit_the_fragments_are_refused_on_all_ranks(fragments, groups, message):
    def body(comm):
        plan = Plan.pack(SPECS, bucket_bytes=1000, groups=list(groups))
        with pytest.raises(ArrayError, match=f"StreamingDiLoCo: {message}"):
            Engine(comm, StreamingDiLoCo(fragments=fragments), plan, plan.allocate())

    run_ranks(2, body)


def test_settings_that_differ_between_ranks_are_refused_on_all_ranks():
    def settings(comm):
        with pytest.raises(CommMismatch, match=r"different algorithms: StreamingDiLoCo\(.*delay=.\b.* and"):
            FixedModel(comm, StreamingDiLoCo(delay=1 + comm.rank))

    def functions(comm):
        def choose(name):
            return (layer(name) + (comm.rank and name == "head")) % 4

        with pytest.raises(CommMismatch, match=r"'head' is in fragment \d of 4 on rank \d, and in"):
            FixedModel(comm, StreamingDiLoCo(fragments=choose))

    run_ranks(2, settings)
    run_ranks(2, functions)


def test_fragments_have_about_equal_bytes_whichever_order_tensors_are_in():
    """Those of the character-level transformer of the benchmarks; a bucket of others joins a fragment whole."""
    block = {"norm": 96, "project": 96 * 288, "mix": 96 * 96, "up": 96 * 384, "down": 384 * 96}
    sizes = {"symbols": 97 * 96, "places": 64 * 96, "logits": 96 * 97}
    sizes |= {f"blocks.{i}.{name}": size for i in range(2) for name, size in block.items()}
    specs = [TensorSpec(name, (size,), "float32") for name, size in sizes.items()]
    algorithm = StreamingDiLoCo(fragments=4)
    numbers = dict(zip(sizes, algorithm.groups(specs), strict=True))
    totals = [sum(4 * sizes[name] for name in sizes if numbers[name] == p) for p in range(4)]
    assert max(totals) < 1.05 * sum(totals) / 4
    assert algorithm.groups(specs[::-1]) == list(numbers.values())[::-1]
    plan = Plan.pack(specs, bucket_bytes=100_000, groups=algorithm.groups(specs))
    assert [numbers[bucket.tensors[0].name] for bucket in plan.buckets] == algorithm._of_buckets(plan)
    assert sorted(set(algorithm._of_buckets(Plan.pack(specs, bucket_bytes=100_000)))) == [0, 1, 2, 3]


def test_the_largest_message_is_a_fragment():
    def sent(comm, algorithm):
        model = FixedModel(comm, algorithm)
        with model.engine as engine:
            steps = [0]
            for _ in range(8):
                model.step()
                engine.flush()
                steps.append(engine.counter.wire_bytes)
            engine.stop()
            return np.diff(steps).tolist()

    plain, streaming = (
        run_ranks(2, lambda comm, a=a: sent(comm, a))[0]
        for a in (StreamingDiLoCo(4, 1, 0), StreamingDiLoCo(4, 4, 2, 0.5))
    )
    assert sum(plain) == sum(streaming[:4]) * 2 == sum(streaming[4:]) * 2
    assert max(streaming) < max(plain) / 2
