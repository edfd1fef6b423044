"""Simulated steps: against the bytes of real training, sums by hand, and the same simulation of each rank."""

import dataclasses
import math

import numpy as np
import pytest
from support.engine_steps import backward
from support.rates import FREE

from bagua_comm import (
    Algorithm,
    ArrayError,
    ByteGrad,
    Decentralized,
    DiLoCo,
    Engine,
    Float16,
    GradientAllReduce,
    LowPrecisionDecentralized,
    MinMaxUInt8,
    Plan,
    Point,
    Quantized,
    TensorSpec,
    Window,
)
from bagua_comm.planning.costmodel import METHODS, Cluster, CodecRates, Job, Rates, TorchDDP
from bagua_comm.planning.costmodel.comparison import applies
from bagua_comm.planning.models import Layer
from bagua_comm.planning.simulator import Failures, Variation, goodput, simulate
from bagua_comm.planning.simulator.replay import replay
from bagua_comm.planning.simulator.tracing import trace
from bagua_comm.testing import run_ranks

COUNT = 1 << 17
JOB = Job(4 * COUNT, 0.1, 0.2, 0.02, bucket_bytes=2 * COUNT)
FOUR = Cluster(4, 1, 1.0)

# What is sent ------------------------------------------------------------------------------------------


def bytes_sent(algorithm, steps):
    """Bytes that a rank of four sends in a step, as an engine counts them."""
    half = COUNT // 2
    plan = Plan.pack([TensorSpec(name, (half,), "float32") for name in "ab"], bucket_bytes=4 * half)

    def body(comm):
        with Engine(comm, algorithm, plan, plan.allocate()) as engine:
            for _ in range(steps):
                engine.at(Point.FORWARD)
                backward(engine, "ab")
                engine.at(Point.STEP)
            engine.settle()
            return engine.counter.wire_bytes / steps

    return np.mean(run_ranks(4, body))


@pytest.mark.parametrize(
    ("algorithm", "steps"),
    [
        (GradientAllReduce(), 1),
        (ByteGrad(), 1),
        (Decentralized("one_peer_exponential"), 2),
        (LowPrecisionDecentralized(), 1),
        (DiLoCo(3, average=Quantized(MinMaxUInt8())), 3),
    ],
    ids=["exact", "bytegrad", "one-peer", "low-precision", "diloco"],
)
def test_a_simulated_rank_sends_the_bytes_that_an_engine_sends(algorithm, steps):
    assert simulate(algorithm, JOB, FOUR).wire_bytes == bytes_sent(algorithm, steps)


class SwapWithNext(Algorithm):
    """An algorithm that this library does not know: each rank gets the weights of the next one."""

    payload = "weight"
    window = Window(Point.STEP, Point.FORWARD)

    def init(self, bucket, comm):
        return bucket.flat.copy()

    def exchange(self, bucket, comm, state):
        comm.sendrecv(bucket.flat, state, dest=(comm.rank - 1) % comm.size, source=(comm.rank + 1) % comm.size)

    def commit(self, bucket, state):
        bucket.flat[...] = state


def test_an_algorithm_of_your_own_is_simulated():
    found = simulate(SwapWithNext(), JOB, dataclasses.replace(FOUR, bandwidth_gbit=0.1))
    assert found.wire_bytes == JOB.model_bytes
    assert found.step_s > JOB.compute_s + JOB.model_bytes * 8 / 0.1e9


# How long it takes -------------------------------------------------------------------------------------


@pytest.mark.parametrize(("nodes", "each"), [(2, 1), (4, 1), (8, 1), (2, 4)])
def test_exact_averages_of_a_long_array_take_as_long_as_their_bytes_on_the_link(nodes, each):
    nbytes, cluster = 64 << 20, Cluster(nodes, each, 1.0, latency_s=0, intra_gbs=1e9)
    p = cluster.size
    on_link = 2 * nbytes / p * each * (p - each)  # each of a node's ranks sends to all ranks elsewhere, twice
    found = simulate(GradientAllReduce(), Job(nbytes, bucket_bytes=nbytes), cluster, FREE)
    assert found.node_bytes == pytest.approx(on_link, rel=1e-3)
    assert found.step_s == pytest.approx(on_link * 8 / 1e9, rel=0.02)


def test_exchanges_hide_behind_the_backward_pass():
    layers = tuple(Layer(1 << 22, 1.0) for _ in range(8))
    job = Job(8 << 22, 0.5, 4.0, 0.1, bucket_bytes=1 << 22, layers=layers)
    last = simulate(GradientAllReduce(), Job(1 << 22, bucket_bytes=1 << 22), FOUR, FREE).step_s
    found = simulate(GradientAllReduce(), job, FOUR, FREE)
    assert found.step_s == pytest.approx(job.compute_s + last, rel=1e-3)
    assert found.communication_s == pytest.approx(8 * last, rel=1e-2)


def test_ranks_that_share_cores_with_their_lane_take_longer():
    steps = [
        simulate(ByteGrad(), JOB, dataclasses.replace(FOUR, cores_per_rank=c)).step_s for c in (0.5, 2, math.inf)
    ]
    assert steps == sorted(steps, reverse=True)
    assert steps[0] > steps[-1]


@pytest.mark.algorithms("all")
@pytest.mark.parametrize("name", METHODS)
def test_one_rank_stands_for_all_where_they_are_alike(name):
    method = METHODS[name]
    method = dataclasses.replace(method, local_steps=3) if hasattr(method, "local_steps") else method
    for cluster in (Cluster(4, 2, 1.0, cores_per_rank=1.0), Cluster(2, 4, 10.0, transport="nccl")):
        if applies(method, JOB, cluster):
            program = trace(method, JOB, cluster)
            one, all_of_them = (replay(program, cluster, Rates(), ranks=n) for n in (1, cluster.size))
            assert all_of_them.step_s == pytest.approx(one.step_s, rel=1e-9)


def test_thousands_of_ranks_are_simulated():
    cluster = Cluster(512, 8, 100.0, transport="nccl")
    found = simulate(METHODS["hierarchical-bytes"], JOB, cluster, Rates.gpu(), variation=Variation(compute=0.1))
    assert found.step_s > JOB.compute_s


def test_pytorchs_averages_pass_along_a_ring():
    found = simulate(TorchDDP(), JOB, FOUR)
    assert found.wire_bytes == 2 * 3 / 4 * JOB.model_bytes
    assert simulate(TorchDDP(dtype="float16"), JOB, FOUR).wire_bytes == found.wire_bytes / 2


# Ranks that differ -------------------------------------------------------------------------------------


def test_a_seed_gives_the_same_steps():
    first, again, other = (
        simulate(GradientAllReduce(), JOB, FOUR, variation=Variation(compute=0.2), seed=seed)
        for seed in (1, 1, 2)
    )
    assert first == again
    assert first.step_s != other.step_s


def test_all_wait_for_the_slowest_rank_and_gossip_does_so_less():
    cluster, variation = Cluster(64, 1, 100.0), Variation(rare=0.02, rare_factor=5)
    exact, gossip, local = (
        simulate(method, JOB, cluster, FREE, variation=variation, steps=100).step_s / JOB.compute_s
        for method in (GradientAllReduce(), METHODS["low-precision-ring"], METHODS["diloco-100"])
    )
    # the expected largest of 64: 5 with probability 1 - 0.98^64
    assert exact == pytest.approx(1 + 4 * (1 - 0.98**64), rel=0.1)
    assert local < gossip < exact
    assert local < 1.5


@pytest.mark.parametrize(("second", "steps"), [(2, 20), (4, 11), (3, 20)])
def test_a_rank_waits_for_those_whose_messages_it_expects_and_no_others(second, steps):
    """Rank 3 is slow first, and rank 2 waits for it; then `second` is, which begins as late as it has waited."""
    job, cluster = dataclasses.replace(JOB, model_bytes=8), Cluster(8, latency_s=0)

    def slower(step):
        return np.where(np.arange(8) == (3, second, -1)[step], 10.0, 1.0)

    program = trace(SwapWithNext(), job, cluster)
    two = replay(program, cluster, FREE, ranks=8, slower=slower, repeats=2)
    assert sum(two.steps_s) == pytest.approx(steps * job.compute_s, rel=1e-3)


def test_a_slow_link_slows_all_down():
    slow = Job(64 << 20)
    alike, drawn = (
        simulate(GradientAllReduce(), slow, Cluster(16), FREE, variation=Variation(links=v)).step_s
        for v in (0, 0.5)
    )
    slowest = np.exp(0.5 * seeded_links(16)).min()
    assert drawn / alike == pytest.approx(1 / slowest, rel=0.05)


def seeded_links(nodes):
    rng = np.random.default_rng(0)
    rng.random(nodes)  # which ranks are slow is drawn first
    return rng.standard_normal(nodes)


# Deaths ------------------------------------------------------------------------------------------------

STEP = simulate(GradientAllReduce(), JOB, Cluster(64))


def lost(failures, **settings):
    return goodput(STEP, GradientAllReduce(), JOB, Cluster(64), failures, **settings)


def test_without_deaths_only_commits_take_time():
    found = lost(Failures(mtbf_hours=1e9, commit_steps=10), hours=10, trials=2)
    commit_s = 3 * JOB.model_bytes / 5.6e9
    assert found.share == pytest.approx(STEP.step_s / (STEP.step_s + commit_s / 10))
    assert found.deaths == found.lost == found.down == 0


def test_a_job_that_starts_again_loses_half_of_the_time_between_checkpoints():
    failures = Failures(640, "restart", spares=10**6, checkpoint_minutes=60, restart_s=600, detection_s=0)
    found = lost(failures, hours=1000, trials=20)
    assert found.deaths == pytest.approx(100, rel=0.1)  # 64 nodes, 1,000 hours
    # a death each 10 hours: ten minutes, and half an hour on average
    assert found.down == pytest.approx(1 / 61, rel=0.15)
    assert found.lost == pytest.approx(0.5 / 10.2, rel=0.15)
    assert found.share == pytest.approx(1 - found.down - found.lost - found.saving, abs=0.01)


def test_elastic_training_loses_less_and_spares_help():
    elastic, without = (lost(Failures(100, spares=n, repair_hours=100), hours=200, trials=5) for n in (200, 0))
    again = lost(Failures(100, "restart", spares=200), hours=200, trials=5)
    assert elastic.share > 0.95 > again.share
    assert without.share == pytest.approx((1 + np.exp(-1)) / 2, abs=0.2)  # half of the nodes are in repair


# Bad input ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: Variation(compute=-0.1), "compute is -0.1, expected a number from 0 to 2"),
        (lambda: Variation(rare=1.5), "rare is 1.5, expected a number from 0 to 1"),
        (lambda: Variation(slow_factor=0.5), "slow_factor is 0.5, expected a number from 1"),
        (lambda: Variation(links=math.nan), "links is nan"),
        (lambda: Failures(mtbf_hours=0), "mtbf_hours is 0, expected a number from 0.001"),
        (lambda: Failures(recovery="hope"), 'recovery is \'hope\', expected "elastic" or "restart"'),
        (lambda: Failures(spares=-1), "spares is -1, expected an integer from 0"),
        (lambda: simulate(ByteGrad(), JOB, FOUR, steps=0), "steps is 0, expected an integer from 1"),
        (lambda: simulate(ByteGrad(), JOB, FOUR, seed=-1), "seed is -1"),
        (lambda: simulate(ByteGrad(), JOB, Cluster(1 << 15)), "cluster has 32768 ranks, expected at most 16384"),
        (lambda: simulate(Decentralized("shift_one"), JOB, Cluster(3)), "shift_one"),
        (lambda: lost(Failures(1e-3), hours=1e6), "deaths are expected"),
        (lambda: lost(None, trials=0), "trials is 0"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_settings_out_of_range_are_named(call, message):
    with pytest.raises(ArrayError) as caught:
        call()
    assert message in str(caught.value)


def test_a_codec_that_casts_costs_what_casts_cost():
    slow = dataclasses.replace(FREE, cast=CodecRates(1e6, 1e6, 1e6))
    free, cast = (simulate(GradientAllReduce(Quantized(Float16())), JOB, FOUR, r).step_s for r in (FREE, slow))
    # encode all, combine the parts of 4 ranks, decode all: three arrays, half of whose work hides
    assert cast - free > 1.0
