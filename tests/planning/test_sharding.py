"""Predicted steps of sharded models: bytes against counters, and times against measurements."""

import itertools
import json
import math
from pathlib import Path

import numpy as np
import pytest

from bagua_comm import ArrayError, ErrorFeedback, Exact, Hierarchical, MinMaxUInt8, Quantized, Reproducible
from bagua_comm.planning.advise import attachment, best_of_replicas, best_of_shards
from bagua_comm.planning.costmodel import SHARDED, Cluster, Job, Rates, Sharded, advise_sharded, predict_sharded
from bagua_comm.planning.models import layers_of
from bagua_comm.testing import run_ranks

OURS = {name: method for name, method in SHARDED.items() if method.reduce is not None}
OURS["inside too"] = Sharded(
    Hierarchical(Quantized(), inside=Quantized()), Hierarchical(Quantized(MinMaxUInt8(64)), inside=Quantized())
)
OURS["inside alone"] = Sharded(Hierarchical(inside=Quantized()), Hierarchical(inside=Quantized()))
OURS["error feedback"] = Sharded(ErrorFeedback(), Exact())
OURS["reproducible"] = Sharded(Reproducible(block=64), Exact())


@pytest.mark.parametrize("nodes", [[0, 1], [0, 0, 1, 1], [0, 1, 2, 0, 1, 2]], ids=str)
def test_bytes_of_every_way_are_those_that_the_communicator_counts(nodes):
    per_node = nodes.count(0)
    cluster, count = Cluster(len(nodes) // per_node, per_node), 24 * 64

    def counted(comm, method):
        """Gather and reduce a module as `bagua_torch.fsdp` does."""
        intra, inter = comm.by_node()
        over = intra if method.by_node else comm
        x = np.ones(count, np.float32)
        shard, whole = np.zeros(count // over.size, np.float32), x.copy()
        gather, reduce = method.gather.bind_gather(over), method.reduce.bind_shards(over, [(count // 64, 64)])
        before = comm.counters.total().wire_bytes
        gather(shard, whole)
        reduce(x, shard, "avg")
        if method.by_node:
            method.replicas.bind(inter)(shard)
        return comm.counters.total().wire_bytes - before

    rows = run_ranks(
        len(nodes), lambda comm: {name: counted(comm, each) for name, each in OURS.items()}, nodes=nodes
    )
    for name, method in OURS.items():
        predicted = predict_sharded(method, Job(4 * count), cluster).wire_bytes
        padding = 24 if name == "reproducible" else 0  # of exponents: a block more, in chunks that differ
        found = [row[name] for row in rows]
        assert found == [pytest.approx(predicted, abs=padding)] * len(nodes), name


def test_the_root_is_gathered_once():
    layers, cluster = layers_of((1, 100, 1), (2, 1000, 1)), Cluster(4)
    sizes, exact = [4000, 4000, 400], SHARDED["exact"]
    job = Job(sum(sizes), bucket_bytes=1, layers=layers)
    assert predict_sharded(exact, job, cluster).wire_bytes == 3 / 4 * (3 * 8000 + 2 * 400)


def test_over_nccl_exchanges_run_beside_computation():
    job, cluster = Job(1 << 28, 0.1, 0.2), Cluster(4, 8, 100, transport="nccl")
    slow = Job(1 << 28)
    alone, beside = (predict_sharded(SHARDED["two-levels"], each, cluster, Rates.gpu()) for each in (slow, job))
    assert alone.step_s == pytest.approx(alone.communication_s)
    assert max(job.compute_s, alone.step_s) <= beside.step_s < job.compute_s + alone.step_s


# Measurements -----------------------------------------------------------------------------------------------

RESULTS = sorted((Path(__file__).parents[2] / "benchmarks" / "results").glob("fsdp-gpt-*.json"))
NAMES = {
    "PyTorch": "pytorch",
    "exact": "exact",
    "gradients in eight bits": "gradients",
    "eight bits": "both",
    "PyTorch, replicas": "pytorch-replicas",
    "eight bits, replicas": "bytes-replicas",
}
TOLERANCE = 1.2
"""Steps that differ by less than this ratio count as equal, as in benchmarks.training.costmodel."""


def inputs(record, path):
    """The cluster and the model of a record of benchmarks.fsdp, whose ranks share two cores."""
    width, layers = record["arguments"]["width"], record["arguments"]["layers"]
    parts = layers_of((1, (8192 + 32 + 2) * width, 1), (layers, 12 * width**2 + 13 * width, 3))
    per_node = 2 if "2x2" in path.name else 1
    cores = record["machine"]["cores"] / record["ranks"]
    gbit = record["arguments"]["gbit"]
    cluster = Cluster(record["ranks"] // per_node, per_node, gbit, 100e-6, cores_per_rank=cores)
    return parts, cluster


@pytest.mark.parametrize("path", RESULTS, ids=lambda path: path.stem)
def test_the_order_of_predicted_steps_is_that_of_the_records(path):
    """The time of computation is not in the records: it is what the exact row leaves."""
    record = json.loads(path.read_text())
    layers, cluster = inputs(record, path)
    nbytes = sum(layer.nbytes for layer in layers)
    rows = {NAMES[row["method"]]: row for row in record["results"] if row["method"] in NAMES}
    assert len(rows) >= 4
    measured = {name: row["median_s"] for name, row in rows.items()}
    waits = predict_sharded(SHARDED["exact"], Job(nbytes, layers=layers), cluster).step_s
    job = Job(nbytes, max(0.0, measured["exact"] - waits), layers=layers)
    advice = {each.name: each for each in advise_sharded(job, cluster)}
    predicted = {name: advice[name].prediction.step_s for name in rows}

    def apart(steps, a, b):
        return math.log(steps[a] / steps[b]) if max(steps[a] / steps[b], steps[b] / steps[a]) > TOLERANCE else 0.0

    for a, b in itertools.combinations(rows, 2):
        same_shards = SHARDED[a].by_node == SHARDED[b].by_node
        if apart(measured, a, b) and (same_shards or apart(predicted, a, b)):
            assert math.log(predicted[a] / predicted[b]) * apart(measured, a, b) > 0, (a, b)
    best = best_of_shards([advice[name] for name in rows])
    assert measured[best.name] <= TOLERANCE * min(s for name, s in measured.items() if not SHARDED[name].by_node)
    for name, row in rows.items():  # headers are counted on the link
        assert row["wire_bytes"] in (None, advice[name].prediction.wire_bytes), name
        assert row["link_bytes"] == pytest.approx(advice[name].prediction.node_bytes, rel=0.01), name


def test_there_are_records_of_hosts_of_one_and_of_two_ranks():
    assert {"2x2" in path.name for path in RESULTS} == {True, False}


# Advice -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("cluster", "shards", "replicas"),
    [
        (Cluster(4, 1, 0.1), "both", None),
        (Cluster(4, 1, 1000, cores_per_rank=0.5), "exact", None),
        (Cluster(4, 8, 0.1), "two-levels-both", "bytes-replicas"),
        (Cluster(1, 8, 10), "exact", None),
    ],
)
def test_the_advice_follows_the_network(cluster, shards, replicas):
    rows = advise_sharded(Job(1 << 28, 1.0), cluster)
    best = best_of_replicas(rows)
    assert (best_of_shards(rows).name, None if best is None else best.name) == (shards, replicas)


def test_ways_in_two_levels_need_nodes_of_several_ranks():
    one_level = {"pytorch", "exact", "gradients", "both"}
    for cluster in (Cluster(4), Cluster(1, 4)):
        assert {each.name for each in advise_sharded(Job(1 << 20), cluster)} == one_level
    assert {each.name for each in advise_sharded(Job(1 << 20), Cluster(2, 2))} == set(SHARDED)
    exact = {"pytorch", "exact", "two-levels", "pytorch-replicas", "exact-replicas"}
    assert {each.name for each in advise_sharded(Job(1 << 20, dtype="float64"), Cluster(2, 2))} == exact


def test_state_is_that_of_adam_for_the_shards_of_a_rank():
    states = {each.name: each.state_bytes for each in advise_sharded(Job(1 << 20), Cluster(4, 2))}
    assert states["both"] == states["two-levels"] == (1 << 20) / 2
    assert states["bytes-replicas"] == states["pytorch-replicas"] == 2 << 20


def test_what_to_type_makes_the_same_way():
    cluster = Cluster(4, 2, transport="nccl")
    assert attachment(SHARDED["pytorch"], cluster) == ["fully_shard(model)"]
    assert attachment(SHARDED["bytes-replicas"], cluster) == [
        'mesh = init_device_mesh("cuda", (4, 2), mesh_dim_names=("replicas", "shards"))',
        "fully_shard(model, mesh=mesh)",
        "bagua_torch.fsdp.attach(model, Exact(), replicas=Quantized())",
    ]

    class Called:
        @staticmethod
        def attach(model, reduce, gather=None, *, replicas=None):
            return reduce, gather or Exact(), replicas

    names = {"model": None, "bagua_torch": type("module", (), {"fsdp": Called})}
    exec("from bagua_comm import *", names)
    for name, method in OURS.items():
        made = eval(attachment(method, cluster)[-1], names)
        assert made == (method.reduce, method.gather, method.replicas), name


def test_ways_that_mean_nothing_are_refused():
    with pytest.raises(ArrayError, match="Sharded: gather is ErrorFeedback"):
        Sharded(Exact(), ErrorFeedback())
    with pytest.raises(ArrayError, match=r"Sharded: replicas is Exact\(\), but by_node is False"):
        Sharded(Exact(), Exact(), Exact())
