"""Deaths after which nodes have other ranks, or replicas are lost: such state starts afresh, on all ranks."""

import numpy as np
import pytest

from bagua_comm import (
    DiLoCo,
    Engine,
    ErrorFeedback,
    GradientAllReduce,
    Hierarchical,
    LowPrecisionDecentralized,
    LowPrecisionOnePeer,
    MinMaxUInt8,
    Plan,
    Point,
    SparseLoCo,
    TensorSpec,
    TopK,
    by_node,
    every,
)
from bagua_comm.elastic import State, run
from bagua_comm.testing.fleets import ThreadJob, run_fleet

COUNT, DIES_AT, STEPS = 64, 2, 6
FEEDBACK = Hierarchical(ErrorFeedback())
ENCODED = Hierarchical(ErrorFeedback(residual_codec=MinMaxUInt8()))
SPARSE = Hierarchical(ErrorFeedback(TopK(16, 4)))


class Program:
    """Trains with gradients of `size`, and notes the weights and the states with which training begins."""

    def __init__(self, algorithm, hosts, deaths, *, ranks, size=0.0):
        self.algorithm, self.deaths, self.size = algorithm, deaths, size
        self.job = ThreadJob(len(hosts), wanted=ranks, hosts=list(hosts), timeout_s=10)
        self.begun, self.committed = {}, {}

    def run(self):
        """The weights in the end, by rank."""
        outcomes = run_fleet(self.job, self)
        wrong = [outcome["error"] for outcome in outcomes if "error" in outcome]
        if wrong:
            raise wrong[0]
        return dict(outcome["result"] for outcome in outcomes if outcome.get("result"))

    def __call__(self, fleet):
        weights = np.linspace(1, 64, COUNT, dtype=np.float32)
        state = State(step=0, weights=weights)

        @run(state, fleet=fleet)
        def train(comm):
            plan = Plan.pack([TensorSpec("a", (COUNT,), "float32")])
            storage = {"weight": [weights.copy()], "grad": plan.allocate()}
            with Engine(comm, self.algorithm, plan, storage) as engine:
                self.begun[state.step, comm.rank] = weights.copy(), engine.state_dict()["tensors"]["a"]
                comm.barrier()
                while state.step < STEPS:
                    self.step(engine, storage, comm.rank)
                    weights[...] = storage["weight"][0]
                    state.step += 1
                    state.commit()
                    comm.barrier()
                    if state.step == DIES_AT and self.deaths:
                        self.committed.setdefault(comm.rank, weights.copy())
                        comm.barrier()
                        if fleet.me in self.deaths:
                            self.job.kill(*self.deaths)
                        comm.barrier()
            return comm.rank, weights.copy()

        return train

    def step(self, engine, storage, rank):
        engine.at(Point.FORWARD)
        storage["grad"][0][...] = self.size * np.sin(np.arange(COUNT) * (rank + 2) + engine.step)
        engine.ready("a")
        engine.at(Point.BACKWARD)
        storage["weight"][0] -= storage["grad"][0]
        engine.at(Point.STEP)
        engine.settle()


CROSSWISE = "aabbba", (1, 2), 4
"""Each of two spares takes over a rank of the other's node."""
ANOTHER_HOST = "aabbc", (0,), 4
ONE_LESS = "abb", (0,), 3


@pytest.mark.parametrize(
    ("algorithm", "change"),
    [
        (by_node(LowPrecisionDecentralized()), CROSSWISE),
        (GradientAllReduce(FEEDBACK), ONE_LESS),
        *(
            pytest.param(algorithm, change, marks=pytest.mark.slow)
            for algorithm, change in [
                (by_node(DiLoCo(3)), CROSSWISE),
                (by_node(every(2, LowPrecisionOnePeer())), ANOTHER_HOST),
                (GradientAllReduce(FEEDBACK), ANOTHER_HOST),
                (by_node(LowPrecisionOnePeer()), CROSSWISE),
                (GradientAllReduce(FEEDBACK), CROSSWISE),
                (by_node(DiLoCo(3)), ANOTHER_HOST),
                (by_node(LowPrecisionDecentralized()), ANOTHER_HOST),
                (SparseLoCo(2, average=SPARSE), ANOTHER_HOST),
                (DiLoCo(2, average=FEEDBACK), ONE_LESS),
            ]
        ),
    ],
    ids=repr,
)
@pytest.mark.algorithms("all")
def test_weights_do_not_move_when_gradients_are_zero_and_ranks_have_other_nodes(algorithm, change):
    hosts, deaths, ranks = change
    program = Program(algorithm, hosts, deaths, ranks=ranks)

    with pytest.warns(RuntimeWarning, match=r"starts with a new state|all ranks make it anew") as caught:
        weights = program.run()

    assert len(caught) == 1
    assert len(weights) == min(ranks, len(hosts) - len(deaths))
    for x in weights.values():
        np.testing.assert_allclose(x, np.linspace(1, 64, COUNT, dtype=np.float32), rtol=0, atol=1e-4)


def test_weights_that_differ_become_their_mean_where_the_algorithm_starts_afresh():
    """Anchors are equal on all ranks: they cannot be made of the weights of each."""
    program = Program(by_node(DiLoCo(3)), *ANOTHER_HOST[:2], ranks=4, size=0.1)

    with pytest.warns(RuntimeWarning, match="engine 0 starts with a new state: on these ranks nothing"):
        program.run()

    mean = np.mean([program.committed[rank] for rank in range(4)], axis=0)
    assert np.abs(program.committed[0] - mean).max() > 0.01
    for rank in range(3):  # rank 3 has no chunk, since two nodes have one rank
        anchor = program.begun[DIES_AT, rank][1]["inner.anchor"]
        np.testing.assert_allclose(anchor, mean, rtol=0, atol=1e-5)


@pytest.mark.parametrize(
    "algorithm",
    [LowPrecisionDecentralized(), pytest.param(LowPrecisionOnePeer(), marks=pytest.mark.slow)],
    ids=repr,
)
def test_replicas_stay_those_of_the_neighbours_when_a_rank_and_its_buddy_die(algorithm):
    program = Program(algorithm, "aaaaaa", (1, 2), ranks=4, size=0.1)

    with pytest.warns(RuntimeWarning, match="it is lost on a rank; all ranks make it anew"):
        program.run()

    states = [program.begun[DIES_AT, rank][1] for rank in range(4)]
    for rank, state in enumerate(states):
        if isinstance(algorithm, LowPrecisionDecentralized):
            np.testing.assert_array_equal(state["weight"], states[(rank + 1) % 4]["left"])
            np.testing.assert_array_equal(state["weight"], states[(rank - 1) % 4]["right"])
        else:
            for edge in range(2):
                received = states[(rank + 2**edge) % 4]["received"]
                np.testing.assert_array_equal(state["sent"][edge], received[edge])


def test_a_spare_takes_over_a_rank_that_keeps_less_than_others():
    """On the larger node, a rank has no chunk, and so no residual."""
    algorithm = GradientAllReduce(ENCODED)
    expected = Program(algorithm, "abb", (), ranks=3, size=0.1).run()

    weights = Program(algorithm, "abbb", (2,), ranks=3, size=0.1).run()

    assert {rank: x.tobytes() for rank, x in weights.items()} == {
        rank: x.tobytes() for rank, x in expected.items()
    }


def test_weights_become_their_mean_though_nodes_of_other_sizes_keep_chunks_of_other_sizes():
    program = Program(by_node(LowPrecisionDecentralized()), "abb", (2,), ranks=3, size=0.1)

    program.run()

    mean = np.mean([program.committed[rank] for rank in range(3)], axis=0)
    assert np.abs(program.committed[0] - mean).max() > 0.01
    for rank in range(2):
        np.testing.assert_allclose(program.begun[DIES_AT, rank][0], mean, rtol=0, atol=1e-5)
