"""Two levels: an algorithm on the means of nodes, against plain loops over all ranks."""

from contextlib import nullcontext
from functools import partial
from itertools import count

import numpy as np
import pytest
from support.references import (
    LR,
    Trainer,
    assert_follows,
    bits,
    by_name,
    common_start,
    decentralized,
    decoded,
    low_precision_decentralized,
    low_precision_one_peer,
    make_plan,
    mean,
    trajectories,
)

from bagua_comm import (
    ArrayError,
    Checkpoints,
    Decentralized,
    DiLoCo,
    Engine,
    ErrorFeedback,
    GradientAllReduce,
    Hierarchical,
    LowPrecisionDecentralized,
    LowPrecisionOnePeer,
    MinMaxUInt8,
    Own,
    by_node,
    every,
)
from bagua_comm.algorithms.parts import without_part
from bagua_comm.algorithms.state import with_tensors
from bagua_comm.checkpoint import load_engine, tree_of_engine
from bagua_comm.planning.costmodel import Cluster, Job, predict
from bagua_comm.testing import run_ranks

EQUAL = ["aabb", "ab", "aa"]
UNEQUAL = ["abbba", "cabc"]
MORE = [pytest.param(nodes, marks=pytest.mark.slow) for nodes in ("abab", "aabbccdd", "abbb")]


def on_nodes(xs, gradient, nodes, reference, *, before_gradients):
    """`reference` on the means of the nodes. Their gradient is the mean of those that their ranks take.

    Where weights are averaged `before_gradients` are subtracted, each rank goes on with its own gradient.
    """
    members = [[r for r, node in enumerate(nodes) if node == name] for name in dict.fromkeys(nodes)]
    home = {r: n for n, ranks in enumerate(members) for r in ranks}

    def gradient_of_node(y, node, step):
        return mean([gradient(xs[r], r, step) for r in members[node]])

    means = reference([mean([xs[r] for r in ranks]) for ranks in members], gradient_of_node)
    next(means)
    for t in count():
        yield xs
        gradients = [gradient(x, r, t) for r, x in enumerate(xs)]
        ys = next(means)
        xs = [ys[home[r]] for r in range(len(nodes))]
        if before_gradients:
            node_gradients = [mean([gradients[r] for r in ranks]) for ranks in members]
            xs = [x + LR * (node_gradients[home[r]] - gradients[r]) for r, x in enumerate(xs)]


class InChunks:
    """A codec that splits each row into `chunks`, with zeros behind the last one."""

    def __init__(self, codec, chunks):
        self.codec, self.chunks = codec, chunks

    def encode(self, rows):
        return rows

    def decode(self, rows, out):
        for row, result in zip(rows, out, strict=True):
            width = -(-row.size // self.chunks)
            chunks = np.zeros((self.chunks, width), row.dtype)
            chunks.reshape(-1)[: row.size] = row
            for chunk in chunks:
                chunk[...] = decoded(self.codec, chunk[None])[0]
            result[...] = chunks.reshape(-1)[: row.size]
        return out


def owners(nodes):
    return min(nodes.count(node) for node in nodes)


@pytest.mark.covering(1)
@pytest.mark.parametrize("nodes", [*EQUAL, *UNEQUAL, *MORE])
@pytest.mark.parametrize("peers", ["all", "shift_one", "one_peer_exponential"])
def test_weights_of_nodes_are_averaged_and_gradients_taken_before(peers, nodes):
    if peers == "shift_one" and len(set(nodes)) % 2 and len(set(nodes)) > 1:
        peers = "all"  # another test says that these are refused
    actual = trajectories(len(nodes), by_node(Decentralized(peers)), nodes=nodes)

    reference = partial(decentralized, peers="all" if len(set(nodes)) == 1 else peers)
    assert_follows(
        actual, partial(on_nodes, nodes=nodes, reference=reference, before_gradients=True), ranks=len(nodes)
    )


@pytest.mark.covering(1)
@pytest.mark.parametrize("nodes", [*EQUAL, *UNEQUAL, *MORE])
@pytest.mark.parametrize(
    ("kind", "reference"),
    [(LowPrecisionDecentralized, low_precision_decentralized), (LowPrecisionOnePeer, low_precision_one_peer)],
)
def test_quantized_changes_travel_between_nodes(kind, reference, nodes):
    actual = trajectories(len(nodes), by_node(kind(MinMaxUInt8(64))), nodes=nodes)

    among = partial(reference, codec=InChunks(MinMaxUInt8(64), owners(nodes)))
    assert_follows(
        actual,
        partial(on_nodes, nodes=nodes, reference=among, before_gradients=False),
        ranks=len(nodes),
        wide="float32",
        atol=5e-3,  # a mean of a node that is added in another order may be rounded to the next code
    )
    for name, first in dict(zip(reversed(nodes), reversed(actual), strict=True)).items():
        for rank, trajectory in enumerate(actual):
            if nodes[rank] == name:  # from the second step on, a node has one set of weights
                for mine, theirs in zip(trajectory[1:], first[1:], strict=True):
                    assert {key: x.tobytes() for key, x in mine.items()} == {
                        key: x.tobytes() for key, x in theirs.items()
                    }


def test_either_level_may_be_the_rarer_one():
    often, rare = by_node(every(3, Decentralized())), every(3, by_node(Decentralized()))
    nodes = "aabb"

    def spread_of(algorithm):
        """In each step, how far ranks of a node are apart, and nodes."""
        found = []
        for step in zip(*trajectories(4, algorithm, nodes=nodes), strict=True):
            a, b, c, d = (weights["b"] for weights in step)
            found.append((np.abs(a - b).max() + np.abs(c - d).max(), np.abs(a + b - c - d).max()))
        return found

    inside, between = zip(*spread_of(often), strict=True)
    assert max(inside[1:]) < inside[0]  # own gradients of one step only
    assert between[1] < 0.5 * between[0]
    inside, _ = zip(*spread_of(rare), strict=True)
    assert max(inside[1:4]) > max(spread[0] for spread in spread_of(often)[1:4])


@pytest.mark.parametrize("nodes", ["aabb", "abbb"])
def test_a_state_that_only_counts_steps_loads_on_any_rank(nodes):
    def body(comm):
        plan = make_plan(4)
        with Trainer(comm, by_node(Decentralized("shift_one")), plan) as training:
            training.run(3)
            saved = comm.allgather_object(training.state_dict()["engine"])
            training.engine.load_state_dict(saved[3 - comm.rank])
            return [state.inner.round for state in training.engine.states]

    for rounds in run_ranks(4, body, nodes=nodes):
        assert set(rounds) == {3}


PARTS = [by_node(DiLoCo(3)), by_node(LowPrecisionOnePeer()), GradientAllReduce(Hierarchical(ErrorFeedback()))]
"""Algorithms whose state is of a part of a bucket, which depends on the nodes."""


def saved_on(nodes, algorithm, steps=2):
    def body(comm):
        with Trainer(comm, algorithm, make_plan(4), start=common_start) as training:
            training.run(steps)
            return training.state_dict()["engine"]

    return run_ranks(len(nodes), body, nodes=nodes)


def errors_of_loading(saved, nodes, algorithm):
    def body(comm):
        with Trainer(comm, algorithm, make_plan(4), start=common_start) as training:
            try:
                training.engine.load_state_dict(saved[comm.rank])
            except ArrayError as exc:
                return str(exc)
            return None

    return run_ranks(len(nodes), body, nodes=nodes)


@pytest.mark.parametrize("algorithm", PARTS, ids=repr)
def test_the_state_of_a_chunk_is_refused_on_all_ranks_where_nodes_have_other_ranks(algorithm):
    """Rank 1 owned the second half of each bucket; on these nodes, it owns the first."""
    saved = saved_on("aabb", algorithm)
    assert errors_of_loading(saved, "bbaa", algorithm) == [None] * 4  # the same nodes by other names
    for nodes, here in (("abab", "rank 0 of node 1, nodes: 2 of 2"), ("aaaa", "nodes: 1 of 4")):
        (message, *others) = errors_of_loading(saved, nodes, algorithm)
        assert others == [message] * 3
        assert "Saved: elements " in message
        assert f"{here}. Place ranks on nodes as they were, or load the weights alone" in message
    if isinstance(algorithm, GradientAllReduce):
        (message, *_) = errors_of_loading(saved, "abcd", algorithm)
        assert "Here: all elements, each rank on a node of its own" in message


def test_the_state_of_a_chunk_without_its_place_is_refused_and_says_that_it_is_of_an_earlier_version():
    saved = saved_on("aabb", PARTS[0])
    for state in saved:
        tensors = {
            name: {path: without_part(x) if isinstance(x, list) else x for path, x in pieces.items()}
            for name, pieces in state["tensors"].items()
        }
        state.update(with_tensors(state, tensors))

    (message, *_) = errors_of_loading(saved, "aabb", PARTS[0])

    assert "'inner.anchor'" in message
    assert "Saved: an earlier version did not note it. Here: elements 0 to" in message


def test_one_copy_of_the_weights_leaves_a_node():
    def body(comm):
        sent = []
        plan = make_plan(comm.size, bucket_elements=10_000)
        with Trainer(comm, by_node(Decentralized("shift_one")), plan) as training:
            across = [state.levels.across for state in training.engine.states]
            before = [level.host.sent_bytes for level in across]
            training.step()
            sent = [level.host.sent_bytes - b for level, b in zip(across, before, strict=True)]
            size = sum(flat.nbytes for flat in by_name(plan, training.weights).values())
        return sum(sent), size

    results = run_ranks(4, body, nodes="aabb")
    size = results[0][1]
    for node in (results[:2], results[2:]):
        assert size <= sum(sent for sent, _ in node) <= 1.1 * size


def test_an_odd_number_of_nodes_cannot_be_paired():
    plan = make_plan(6)

    def body(comm):
        with pytest.raises(ArrayError, match="even number of them; got 3"):
            Engine(comm, by_node(Decentralized("shift_one")), plan, plan.allocate())
        assert comm.allreduce(np.array(1)) == 6

    run_ranks(6, body, nodes="aabbcc")


def test_the_cost_model_knows_the_traffic_that_leaves_a_node():
    job, cluster = Job(100_000_000, 0.1, 0.2), Cluster(nodes=4, ranks_per_node=8, bandwidth_gbit=10)
    flat, levels = (
        predict(algorithm, job, cluster)
        for algorithm in (LowPrecisionDecentralized(), by_node(LowPrecisionDecentralized()))
    )
    assert levels.node_bytes == pytest.approx(flat.node_bytes, rel=0.01)  # two edges of a ring leave a node
    assert predict(by_node(Decentralized("shift_one")), job, cluster).node_bytes == pytest.approx(
        100_000_000, 0.01
    )
    one_peer = Decentralized("one_peer_exponential")
    flat, levels = (predict(algorithm, job, cluster) for algorithm in (one_peer, by_node(one_peer)))
    assert levels.node_bytes < flat.node_bytes
    assert levels.step_s < flat.step_s
    with pytest.raises(ArrayError, match="even number"):
        predict(by_node(Decentralized("shift_one")), job, Cluster(nodes=3, ranks_per_node=2))
    predict(by_node(Decentralized("shift_one")), job, Cluster(nodes=1, ranks_per_node=8))


@pytest.mark.covering(1)
@pytest.mark.parametrize("nodes", ["aabb", "abbb"])
@pytest.mark.parametrize("inner", [LowPrecisionOnePeer(), DiLoCo(3)], ids=repr)
def test_checkpoints_on_disk_hold_every_ranks_chunk(tmp_path, inner, nodes):
    algorithm = by_node(inner)

    def weights(training):
        return {name: x.tobytes() for name, x in training.tensors().items()}

    def body(comm):
        with Checkpoints(tmp_path, comm) as checkpoints, Trainer(comm, algorithm, make_plan(4)) as training:
            training.run(4)
            engine = tree_of_engine(training.engine)
            checkpoints.save(4, {"engine": engine, "weights": Own(training.tensors())}, wait=True)
            training.run(3)
            through = weights(training)
        with Checkpoints(tmp_path, comm) as checkpoints, Trainer(comm, algorithm, make_plan(4)) as training:
            tree = checkpoints.load().tree
            training.load_tensors(tree["weights"])
            load_engine(training.engine, tree["engine"])
            training.run(3)
            return weights(training) == through

    assert all(run_ranks(4, body, nodes=nodes))


def test_the_state_of_a_chunk_is_refused_by_name_on_another_number_of_ranks(tmp_path):
    def save(comm):
        with (
            Checkpoints(tmp_path, comm) as checkpoints,
            Trainer(comm, by_node(DiLoCo(3)), make_plan(4)) as training,
        ):
            training.run(4)
            checkpoints.save(4, {"engine": tree_of_engine(training.engine), "weights": 1}, wait=True)

    def load(comm):
        with (
            Checkpoints(tmp_path, comm) as checkpoints,
            Trainer(comm, by_node(DiLoCo(3)), make_plan(4)) as training,
        ):
            tree = checkpoints.load().tree
            with pytest.raises(ArrayError, match=r"'inner\.anchor' of 'a' loads only on 4 ranks"):
                load_engine(training.engine, tree["engine"])
            assert tree["weights"] == 1

    run_ranks(4, save, nodes="aabb")
    run_ranks(2, load, nodes="ab")


@pytest.mark.parametrize(
    ("algorithm", "before", "after", "warns"),
    [
        (by_node(LowPrecisionDecentralized()), "aabb", "ab", False),
        (by_node(LowPrecisionDecentralized()), "aabb", "abab", True),
        (GradientAllReduce(Hierarchical(ErrorFeedback())), "abcd", "aabbcc", True),
        pytest.param(
            GradientAllReduce(Hierarchical(ErrorFeedback())), "aabb", "abcd", True, marks=pytest.mark.slow
        ),
    ],
)
def test_a_checkpoint_on_other_nodes_trains_as_new_engines_from_its_weights(
    tmp_path, algorithm, before, after, warns
):
    """Replicas are made of the weights, and residuals begin with zeros."""

    def save(comm):
        with Checkpoints(tmp_path, comm) as checkpoints, Trainer(comm, algorithm, make_plan(4)) as training:
            training.run(4)
            checkpoints.save(4, {"engine": tree_of_engine(training.engine)}, wait=True)

    def train(comm, *, load):
        plan = make_plan(12)
        with Checkpoints(tmp_path, comm) as checkpoints, Trainer(comm, algorithm, plan) as training:
            if load:
                load_engine(training.engine, checkpoints.load().tree["engine"])
                assert training.engine.step == 4
            training.engine._exchanges.set_step(0)  # the gradient depends on it
            return bits(training.run(2))

    run_ranks(4, save, nodes=before)
    expected = run_ranks(len(after), partial(train, load=False), nodes=after)
    with pytest.warns(RuntimeWarning, match="nodes have other ranks now") if warns else nullcontext():
        assert run_ranks(len(after), partial(train, load=True), nodes=after) == expected
