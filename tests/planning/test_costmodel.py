"""The model of step times: against sums by hand, a simulation in small ticks, and the bytes that are counted."""

import dataclasses
import itertools
import math

import numpy as np
import pytest
import torch
from support.rates import FREE

from bagua_comm import (
    Algorithm,
    ArrayError,
    AsyncModelAverage,
    Average,
    ByteGrad,
    Decentralized,
    DiLoCo,
    ErrorFeedback,
    Float16,
    GradientAllReduce,
    Hierarchical,
    Int4,
    LowPrecisionDecentralized,
    LowPrecisionOnePeer,
    MinMaxUInt8,
    Plan,
    QAdam,
    Quantized,
    Reproducible,
    SparseLoCo,
    StreamingDiLoCo,
    TensorSpec,
    TopK,
    UnsupportedError,
    after,
    every,
    topology,
)
from bagua_comm.bucket import make_buckets
from bagua_comm.planning.costmodel import METHODS, Cluster, CodecRates, Job, Rates, TorchDDP, advise, predict
from bagua_comm.planning.models import MODELS, Layer
from bagua_comm.testing import run_ranks
from benchmarks.training.calibration import Measurement, calibrate

MB = 1_000_000
JOB = Job(64 * MB, forward_s=1.0, backward_s=2.0, optimizer_s=0.5, bucket_bytes=64 * MB)
PAIR = Cluster(2, bandwidth_gbit=0.8, latency_s=0.01)  # 100 MB/s

each_method = pytest.mark.parametrize("method", METHODS.values(), ids=METHODS.keys())


# By hand ------------------------------------------------------------------------------------------------


def test_a_bucket_that_is_complete_last_is_exchanged_after_the_backward_pass():
    exact = predict(GradientAllReduce(), JOB, PAIR, FREE)
    assert exact.communication_s == pytest.approx(2 * (0.01 + 0.32))  # half of 64 MB, and half of it again
    assert exact.step_s == pytest.approx(3.5 + 0.66)
    assert exact.exposed_s == pytest.approx(0.66)
    assert exact.hidden == pytest.approx(0)
    assert exact.wire_bytes == exact.node_bytes == 64 * MB


def test_earlier_buckets_hide_behind_the_backward_pass():
    quarters = dataclasses.replace(JOB, bucket_bytes=16 * MB)  # complete after 0.5, 1, 1.5 and 2 s
    exact = predict(GradientAllReduce(), quarters, PAIR, FREE)
    assert exact.communication_s == pytest.approx(4 * 0.18)
    assert exact.step_s == pytest.approx(3.5 + 0.18)
    assert exact.hidden == pytest.approx(0.75)


def test_buckets_wait_for_each_other_on_the_lane():
    quarters = dataclasses.replace(JOB, bucket_bytes=16 * MB)
    slow = dataclasses.replace(PAIR, bandwidth_gbit=0.08)
    exact = predict(GradientAllReduce(), quarters, slow, FREE)
    assert exact.step_s == pytest.approx(1 + 0.5 + 4 * (2 * (0.01 + 0.8)) + 0.5)


def test_layers_that_are_complete_early_leave_early():
    early = dataclasses.replace(JOB, layers=(Layer(63 * MB, 1), Layer(1 * MB, 19)), bucket_bytes=1 * MB)
    exact = predict(GradientAllReduce(), early, PAIR, FREE)
    assert exact.step_s == pytest.approx(3.5 + 2 * (0.01 + 0.005))


def test_bytegrad_is_work_and_encoded_messages():
    rates = dataclasses.replace(FREE, minmax=CodecRates(encode=640e6, decode=320e6, combine=160e6))
    chunk = MinMaxUInt8().wire_nbytes(8 * MB, np.dtype("f4"))
    bytegrad = predict(ByteGrad(), JOB, PAIR, rates)
    assert bytegrad.communication_s == pytest.approx(0.1 + 0.2 + 0.4 + 2 * (0.01 + chunk / 100e6))
    assert bytegrad.wire_bytes == 2 * chunk


def test_error_feedback_is_more_work_and_as_many_bytes_and_its_settings_are_work_too():
    rates = dataclasses.replace(FREE, minmax=CodecRates(encode=640e6, decode=320e6, combine=160e6), add=800e6)
    averages = [
        Quantized(),
        ErrorFeedback(),
        ErrorFeedback(decay=0.8, reset_every=9),
        ErrorFeedback(residual_codec=MinMaxUInt8()),
    ]
    plain, fed, decayed, encoded = (predict(GradientAllReduce(average), JOB, PAIR, rates) for average in averages)
    assert plain.wire_bytes == fed.wire_bytes == decayed.wire_bytes == encoded.wire_bytes
    more = [each.communication_s - fed.communication_s for each in (plain, decayed, encoded)]
    assert more == pytest.approx([-(0.4 + 64 * 7 / 800), 64 / 800, 0.1 + 0.2])


def test_a_reproducible_mean_is_a_byte_a_block_and_four_bytes_an_element():
    exact = predict(GradientAllReduce(), JOB, PAIR, FREE)
    found = predict(GradientAllReduce(Reproducible()), JOB, PAIR, FREE)
    assert found.wire_bytes == exact.wire_bytes * (1 + 1 / 512)
    assert found.communication_s == pytest.approx(exact.communication_s + 2 * (0.01 + 0.32 / 512))
    halves = dataclasses.replace(JOB, dtype="float16")
    wide = predict(GradientAllReduce(Reproducible()), halves, PAIR, FREE)
    assert wide.wire_bytes == 2 * found.wire_bytes
    doubles = dataclasses.replace(JOB, dtype="float64")
    double = predict(GradientAllReduce(Reproducible()), doubles, PAIR, FREE)
    assert double.wire_bytes == pytest.approx(found.wire_bytes)


def test_ranks_of_a_node_share_its_link():
    nodes = Cluster(2, 2, bandwidth_gbit=0.8, latency_s=0.0, intra_gbs=math.inf, intra_latency_s=0.0)
    flat = predict(GradientAllReduce(), JOB, nodes, FREE)
    assert flat.communication_s == pytest.approx(2 * (2 * 2 * 0.16))  # two ranks send to two, 16 MB each
    assert flat.node_bytes == 2 * 64 * MB

    hierarchical = predict(GradientAllReduce(Hierarchical()), JOB, nodes, FREE)
    assert hierarchical.communication_s == pytest.approx(2 * (2 * 0.16))
    assert hierarchical.node_bytes == 64 * MB

    ring = predict(GradientAllReduce(), JOB, dataclasses.replace(nodes, transport="nccl"), FREE)
    assert ring.communication_s == pytest.approx(2 * 0.48)  # three of four chunks cross the link, once
    assert ring.node_bytes == 96 * MB


CAPPED = Cluster(4, bandwidth_gbit=1.0, latency_s=0, flow_bandwidth_gbit=0.1)
BYTES = 120_000_000


def seconds_of(name, cluster):
    return predict(METHODS[name], Job(BYTES, bucket_bytes=BYTES), cluster, FREE).step_s


@pytest.mark.parametrize(("flows", "gbit"), [(1, 0.3), (2, 0.6), (3, 0.9), (4, 1.0), (9, 1.0)])
def test_a_rank_that_exchanges_with_all_others_sends_on_flows_to_each(flows, gbit):
    cluster = dataclasses.replace(CAPPED, flows=flows)
    assert seconds_of("exact", cluster) == pytest.approx(2 * BYTES * 3 / 4 / (gbit / 8 * 1e9))


@pytest.mark.parametrize(("flows", "gbit"), [(1, 0.1), (4, 0.4), (10, 1.0), (20, 1.0)])
def test_a_ring_leaves_a_node_on_the_flows_of_one_pair(flows, gbit):
    cluster = dataclasses.replace(CAPPED, flows=flows, transport="nccl", ranks_per_node=2, intra_gbs=math.inf)
    assert seconds_of("exact", cluster) == pytest.approx(2 * BYTES * 7 / 8 / (gbit / 8 * 1e9))


def test_one_peer_is_one_pair_and_each_rank_of_a_node_has_its_own():
    one = seconds_of("one-peer", CAPPED)
    assert one == pytest.approx(BYTES / (0.1 / 8 * 1e9))
    several = dataclasses.replace(CAPPED, nodes=2, ranks_per_node=2, intra_gbs=math.inf)
    assert seconds_of("shift-one", several) == pytest.approx(2 * BYTES / (0.2 / 8 * 1e9))


def test_flows_as_fast_as_the_link_change_nothing():
    plain, wide = (dataclasses.replace(CAPPED, flow_bandwidth_gbit=value) for value in (math.inf, 1.0))
    assert advise(VGG16, plain) == advise(VGG16, wide)


def test_windows_determine_what_overlaps():
    weights = predict(Decentralized(), JOB, PAIR, FREE)
    assert weights.step_s == pytest.approx(3.5)  # 0.66 s behind 3 s
    assert weights.hidden == 1

    without_optimizer = dataclasses.replace(JOB, optimizer_s=0.0)
    for peers in ("all", "shift_one", "one_peer_exponential"):
        assert predict(Decentralized(peers), without_optimizer, PAIR, FREE).hidden == 1

    slow = dataclasses.replace(PAIR, bandwidth_gbit=0.08)
    assert predict(Decentralized("shift_one"), JOB, slow, FREE).step_s == pytest.approx(6.41 + 0.5)

    after_the_step = predict(LowPrecisionOnePeer(Float16()), JOB, PAIR, FREE)
    assert after_the_step.step_s == pytest.approx(3.5 + 0.33)
    assert after_the_step.hidden == pytest.approx(0)
    assert predict(LowPrecisionOnePeer(Float16()), without_optimizer, PAIR, FREE).hidden == pytest.approx(0)


def test_asynchronous_rounds_cost_no_time_but_their_work():
    slow = dataclasses.replace(PAIR, bandwidth_gbit=0.08)  # a round takes 6.42 s
    free = predict(AsyncModelAverage(0.0), JOB, slow, FREE)
    assert free.step_s == pytest.approx(3.5)
    assert free.wire_bytes == pytest.approx(64 * MB * 3.5 / 6.42)
    assert predict(AsyncModelAverage(35.0), JOB, slow, FREE).wire_bytes == pytest.approx(64 * MB / 10)

    working = dataclasses.replace(FREE, network_s_per_byte=1e-9)  # 0.128 s of 64 MB sent and as many received
    loaded = predict(AsyncModelAverage(0.0), JOB, dataclasses.replace(slow, cores_per_rank=0.5), working)
    assert loaded.step_s == pytest.approx(3.5 * 6.42 / (6.42 - 0.256))


def test_periodic_communication_costs_its_mean():
    once = predict(Decentralized("shift_one"), JOB, dataclasses.replace(PAIR, bandwidth_gbit=0.08), FREE)
    fourth = predict(
        every(4, Decentralized("shift_one")), JOB, dataclasses.replace(PAIR, bandwidth_gbit=0.08), FREE
    )
    assert fourth.exposed_s == pytest.approx(once.exposed_s / 4)
    assert fourth.wire_bytes == once.wire_bytes / 4
    assert predict(DiLoCo(local_steps=10), JOB, PAIR, FREE).step_s == pytest.approx(3.5 + 0.066)


def test_fragments_are_exposed_as_far_as_they_take_longer_than_their_delay():
    slow = dataclasses.replace(PAIR, bandwidth_gbit=0.01)
    once = predict(DiLoCo(local_steps=1), JOB, slow, FREE)
    for delay in (0, 1, 4):
        method = StreamingDiLoCo(local_steps=10, fragments=4, delay=delay)
        found = predict(method, JOB, slow, FREE)
        beside = min(4 * delay, 10)  # one lane sends all fragments, in 10 steps
        expected = max(0.0, once.communication_s - beside * JOB.compute_s) / 10
        assert found.exposed_s == pytest.approx(expected, rel=0.02), delay
        assert found.wire_bytes == once.wire_bytes / 10
    by_layer = StreamingDiLoCo(local_steps=10, fragments=lambda name: 0, delay=4)
    assert predict(by_layer, JOB, slow, FREE).wire_bytes == once.wire_bytes / 10


def test_a_warm_up_is_left_out():
    assert predict(after(9, GradientAllReduce(), ByteGrad()), JOB, PAIR) == predict(ByteGrad(), JOB, PAIR)
    assert predict(AsyncModelAverage(warmup_steps=9), JOB, PAIR) == predict(AsyncModelAverage(), JOB, PAIR)


def test_work_of_communication_slows_computation_on_shared_cores():
    rates = dataclasses.replace(FREE, minmax=CodecRates(encode=640e6, decode=math.inf, combine=math.inf))
    early = dataclasses.replace(JOB, layers=(Layer(64 * MB - 4, 0), Layer(4, 1)), bucket_bytes=60 * MB)
    infinite = dataclasses.replace(PAIR, bandwidth_gbit=math.inf, latency_s=0.0)
    # 0.1 s of work are 0.4 s on a quarter of a core, while computation has the other quarter: it loses 0.2 s.
    shared = predict(ByteGrad(), early, dataclasses.replace(infinite, cores_per_rank=0.5), rates)
    assert shared.communication_s == pytest.approx(0.4)
    assert shared.step_s == pytest.approx(3.5 + 0.2)
    # After the backward pass it has half a core for itself.
    assert predict(ByteGrad(), JOB, dataclasses.replace(infinite, cores_per_rank=0.5), rates).exposed_s == (
        pytest.approx(0.2)
    )
    # With more cores than it can use, communication still takes one from computation.
    many = predict(ByteGrad(), early, dataclasses.replace(infinite, cores_per_rank=4), rates)
    assert many.step_s == pytest.approx(3.5 + 0.025)


def test_polling_takes_free_cores_from_computation_but_holds_no_message_up():
    early = dataclasses.replace(JOB, layers=(Layer(64 * MB - 4, 0), Layer(4, 1)), bucket_bytes=60 * MB)
    shared = dataclasses.replace(PAIR, cores_per_rank=0.5)
    polling = predict(GradientAllReduce(), early, shared, dataclasses.replace(FREE, polling=0.125))
    # A quarter of the cores for 0.66 s; then the last 4 bytes.
    assert polling.communication_s == pytest.approx(0.66 + 0.02, abs=1e-6)
    assert polling.step_s == pytest.approx(3.5 + 0.66 / 4 + 0.02, abs=1e-6)
    busy = predict(GradientAllReduce(), early, shared, dataclasses.replace(FREE, polling=1.0))
    assert busy.communication_s == pytest.approx(0.66 + 0.02, abs=1e-6)
    assert busy.step_s == pytest.approx(3.5 + 0.66 / 2 + 0.02, abs=1e-6)


def test_ddp_goes_around_a_ring_in_its_own_buckets():
    ddp = predict(TorchDDP(bucket_bytes=32 * MB), JOB, PAIR, FREE)
    assert ddp.step_s == pytest.approx(3.5 + 0.34)
    assert ddp.wire_bytes == 64 * MB
    assert predict(TorchDDP(dtype="float16"), JOB, PAIR, FREE).wire_bytes == 32 * MB


def test_published_steps_of_ddp_are_met():
    # VGG16 in float32 on 16 nodes of 8 V100 at 10 Gbit/s, 32 images a GPU: 4,550 images a second, where 29,300
    # would be linear, as read off the figures of Bagua's README.
    alone_s, published_s = 128 * 32 / 29_300, 128 * 32 / 4_550
    job = Job(
        sum(layer.nbytes for layer in MODELS["vgg16"]), alone_s / 3, alone_s * 2 / 3, layers=MODELS["vgg16"]
    )
    cluster = Cluster(16, 8, bandwidth_gbit=10.0, intra_gbs=100.0, transport="nccl")
    assert predict(TorchDDP(), job, cluster, Rates.gpu()).step_s == pytest.approx(published_s, rel=0.15)


# Limits and trends --------------------------------------------------------------------------------------

CLUSTER = Cluster(4, 2, bandwidth_gbit=2.0, cores_per_rank=0.5)
VGG16 = Job(sum(layer.nbytes for layer in MODELS["vgg16"]), 1.0, 2.0, 0.5, layers=MODELS["vgg16"])


@each_method
@pytest.mark.parametrize("transport", ["mpi", "nccl"])
def test_steps_are_no_longer_with_more_bandwidth_less_latency_and_fewer_bytes(method, transport):
    base = dataclasses.replace(CLUSTER, transport=transport)

    def step_s(cluster=base, job=VGG16):
        return predict(method, job, cluster).step_s

    networks = [
        [step_s(dataclasses.replace(base, bandwidth_gbit=gbit)) for gbit in (100, 3, 1, 0.1)],
        [step_s(dataclasses.replace(base, latency_s=s)) for s in (0, 1e-4, 1e-3, 1e-1)],
    ]
    sweeps = [
        # On a slow network asynchronous rounds are fewer, and so is their work.
        *([] if isinstance(method, AsyncModelAverage) else networks),
        [step_s(job=Job(n * MB, 1.0, 2.0, 0.5)) for n in (1, 30, 100, 1000)],
        [step_s(dataclasses.replace(base, cores_per_rank=cores)) for cores in (16, 2, 1, 0.25)],
    ]
    for steps in sweeps:
        assert all(a <= b + 1e-9 for a, b in itertools.pairwise(steps)), steps
        assert steps[0] >= VGG16.compute_s


@each_method
def test_without_costs_a_step_is_computation(method):
    instant = Cluster(4, 2, math.inf, 0.0, math.inf, 0.0)
    prediction = predict(method, VGG16, instant, FREE)
    assert prediction.step_s == pytest.approx(VGG16.compute_s)
    assert prediction.communication_s == 0
    assert prediction.hidden == 1


@each_method
def test_one_rank_sends_nothing(method):
    if method in (Decentralized("shift_one"), every(4, Decentralized("shift_one"))):
        with pytest.raises(ArrayError, match="even number"):
            predict(method, VGG16, Cluster(1))
        return
    prediction = predict(method, VGG16, Cluster(1))
    assert (prediction.step_s, prediction.wire_bytes) == (VGG16.compute_s, 0)


@each_method
def test_a_step_is_never_shorter_than_its_work(method):
    prediction = predict(method, VGG16, CLUSTER)
    assert prediction.step_s >= prediction.compute_s
    assert 0 <= prediction.hidden <= 1


def test_layers_of_models_add_up():
    parameters = {name: sum(layer.nbytes for layer in layers) // 4 for name, layers in MODELS.items()}
    assert parameters == {
        "vgg16": 138_357_544,
        "resnet50": 25_557_032,
        "vit-b16": 86_567_656,
        "bert-large": 335_141_888,
        "gpt2": 124_439_808,
        "gpt2-xl": 1_557_611_200,
    }


@pytest.mark.slow
@pytest.mark.needs("transformers")
@pytest.mark.parametrize(("name", "width", "depth", "heads"), [("gpt2", 768, 12, 12), ("gpt2-xl", 1600, 48, 25)])
def test_the_layers_of_gpt2_are_those_of_transformers(name, width, depth, heads):
    from transformers import GPT2Config, GPT2LMHeadModel

    with torch.device("meta"):
        model = GPT2LMHeadModel(GPT2Config(n_embd=width, n_layer=depth, n_head=heads)).transformer
    sizes = [sum(p.numel() for p in part.parameters()) for part in (*model.h, model.ln_f)]
    embeddings = model.wte.weight.numel() + model.wpe.weight.numel()
    assert [layer.nbytes for layer in MODELS[name]] == [4 * n for n in reversed([embeddings, *sizes])]


# Bytes --------------------------------------------------------------------------------------------------

EXCHANGED = {
    **{name: method for name, method in METHODS.items() if not isinstance(method, TorchDDP)},
    "hierarchical-error-feedback": GradientAllReduce(Hierarchical(ErrorFeedback())),
    "one-block": GradientAllReduce(Quantized(MinMaxUInt8.bagua())),
    "four-bits": GradientAllReduce(Quantized(Int4())),
    "qadam": QAdam(warmup_steps=1),
    "diloco-3-bytes": DiLoCo(local_steps=3, average=Quantized()),
    "streaming-3": StreamingDiLoCo(local_steps=3, fragments=1, delay=2, average=Quantized(Int4())),
    "every-3-ring": every(3, LowPrecisionDecentralized()),
    "sparseloco": SparseLoCo(3, 64, 16),
    "sparseloco-hierarchical": SparseLoCo(4, average=Hierarchical(TopK(100, 10, bits=16))),
}
for _name in ("diloco-100", "diloco-100-bytes", "streaming-diloco", "streaming-diloco-int4"):
    del EXCHANGED[_name]  # no exchange in so few steps, or several buckets


@pytest.mark.parametrize("nodes", [[0, 0], [0, 1, 2], [0, 0, 1, 1]], ids=str)
def test_bytes_are_those_that_the_communicator_counts(nodes):
    size, steps, elements = len(nodes), 12, 24 * 40  # all intervals and rounds of graphs fit in the steps
    methods = {name: m for name, m in EXCHANGED.items() if size % 2 == 0 or "shift_one" not in repr(m)}

    def sent_by(comm, method):
        plan = Plan.pack([TensorSpec("x", (elements,), "float32")])
        (bucket,) = make_buckets(plan, plan.allocate())
        state = method.init(bucket, comm)
        before = comm.counters.total().wire_bytes
        for step in range(1, steps + 1):  # step 0 would be QAdam's warm-up
            bucket.step = step
            method.begin(bucket, state)
            method.exchange(bucket, comm, state)
            method.commit(bucket, state)
        return comm.counters.total().wire_bytes - before

    counted = run_ranks(
        size, lambda comm: {name: sent_by(comm, method) for name, method in methods.items()}, nodes=nodes
    )
    cluster = Cluster(size // nodes.count(0), nodes.count(0))
    predicted = {name: predict(method, Job(4 * elements), cluster).wire_bytes for name, method in methods.items()}
    assert counted == [pytest.approx({name: sent * steps for name, sent in predicted.items()})] * size


@pytest.mark.parametrize(("nodes", "per_node"), [(2, 2), (4, 2), (2, 4), (3, 1), (8, 1), (1, 4)])
def test_bytes_of_a_node_are_those_that_cross(nodes, per_node):
    size = nodes * per_node
    job, cluster = Job(4000), Cluster(nodes, per_node)
    rounds = (size - 1).bit_length()

    def crossing(peers):
        return sum(rank // per_node != peer // per_node for rank in range(size) for peer in peers(rank))

    def ahead(rank):
        return [topology.one_peer_exponential(rank, size, step).dest for step in range(rounds)]

    sent = predict(Decentralized("one_peer_exponential"), job, cluster).node_bytes
    assert sent == pytest.approx(4000 * crossing(ahead) / rounds / nodes)
    wire = MinMaxUInt8().wire_nbytes(1000, np.dtype("f4"))
    on_ring = predict(LowPrecisionDecentralized(), job, cluster).node_bytes
    assert on_ring == pytest.approx(wire * crossing(lambda rank: topology.ring(rank, size)) / nodes)
    others = predict(GradientAllReduce(), job, cluster).node_bytes
    chunk = -(-1000 // size) * 4
    assert others == pytest.approx(2 * chunk * crossing(lambda rank: range(size)) / nodes)


# Against a simulation -----------------------------------------------------------------------------------

NETWORK, POLLING, CORES = 1.2e-9, 0.3, 0.5


def simulate(compute_s, opens_s, closes_s, buckets, cores, tick_s=5e-4):
    """The step of a rank in small ticks: computation beside a lane, whose tasks are (wire seconds, work seconds).

    Args:
        compute_s: Of computation with the cores for itself.
        opens_s: Computation before the lane may begin.
        closes_s: Computation that goes on without waiting for the lane; the rest waits.
        buckets: [(computation before it is complete, [tasks])].
        cores: Cores of the rank.
    """
    queue = [(max(ready_s, opens_s), *task) for ready_s, tasks in buckets for task in tasks]
    done = now = 0.0
    wire, work = queue[0][1:] if queue else (0.0, 0.0)
    while done < compute_s or queue:
        computing = done < (closes_s if queue else compute_s)
        lane = bool(queue) and done >= queue[0][0]
        share = 0.0
        if lane:
            # The part of the task that is done in this tick, by the slower of its wire and its work.
            most = min(1.0, cores / 2 if computing else cores)
            _, whole_wire, whole_work = queue[0]
            needs = max(whole_wire, whole_work / most)
            part = tick_s / needs if needs else 1.0
            share = min(most, part * (whole_work + POLLING * whole_wire) / tick_s)
            wire, work = wire - part * whole_wire, work - part * whole_work
            if wire <= 1e-12 and work <= 1e-12:
                queue.pop(0)
                wire, work = queue[0][1:] if queue else (0.0, 0.0)
        if computing:
            done += tick_s * (1 - share / cores)
        now += tick_s
    return now


def simulated(name, job, mbytes_s):
    """A step of four ranks that share two cores, of which the model knows neither the rates nor the overheads."""
    chunk_s, work_s = job.model_bytes / 4 * 3 / (0.85 * mbytes_s * MB), job.model_bytes / 4 * 3 * 2 * NETWORK
    n = job.model_bytes
    phase, quarter = (chunk_s, work_s), (chunk_s / 3.94, work_s / 3.94)
    tasks = {
        "exact": [phase, (0, n / 9e9), phase],
        "bytegrad": [(0, n / 1.7e9), quarter, (0, n / 1.8e9), quarter, (0, n / 2.8e9)],
        "decentralized": [phase, (0, n / 9e9), phase],
        "low-precision-one-peer": [
            (0, n / 5e9),
            (0, n / 1.7e9),
            (n / 3.94 / (0.85 * mbytes_s * MB), n / 3.94 * 2 * NETWORK),
            *2 * [(0, n / 2.8e9), (0, 2 * n / 9e9)],
            (0, 3 * n / 9e9),
            (0, n / 7e9),
        ],
    }[name]
    backward, ends = job.forward_s, job.forward_s + job.backward_s
    pieces = job.buckets()

    def cut(nbytes):
        return [(wire * nbytes / n, work * nbytes / n) for wire, work in tasks]

    if name in ("exact", "bytegrad"):
        buckets = [(backward + share * job.backward_s, cut(nbytes)) for nbytes, share in pieces]
        opens = backward
    else:
        opens = 0.0 if name == "decentralized" else job.compute_s
        ends = ends if name == "decentralized" else job.compute_s
        buckets = [(opens, cut(nbytes)) for nbytes, _ in pieces]
    return simulate(job.compute_s, opens, ends, buckets, CORES)


JOBS = {
    "vgg16": dataclasses.replace(VGG16, bucket_bytes=40 * MB),
    "even": Job(100 * MB, 0.6, 1.2, 0.1, bucket_bytes=20 * MB),
}
NAMES = ("exact", "bytegrad", "decentralized", "low-precision-one-peer")


def measurement(name, job, mbytes_s):
    cluster = Cluster(4, bandwidth_gbit=mbytes_s * 8e-3, cores_per_rank=CORES)
    return Measurement(METHODS[name], JOBS[job], cluster, simulated(name, JOBS[job], mbytes_s))


def test_calibrated_on_a_few_steps_it_predicts_the_others():
    known = [measurement(name, "vgg16", mbytes_s) for name in ("exact", "bytegrad") for mbytes_s in (125, 1250)]
    rates = calibrate(known)
    others = [measurement(name, job, mbytes_s) for name in NAMES for job in JOBS for mbytes_s in (62, 250, 1250)]

    def errors(rates):
        return [abs(predict(m.method, m.job, m.cluster, rates).step_s / m.step_s - 1) for m in others]

    assert max(errors(rates)) < 0.1
    assert max(errors(Rates())) > 0.2  # it had something to learn
    assert 0.8 < rates.direct <= 0.9
    assert rates.network_s_per_byte == pytest.approx(NETWORK, rel=0.2)


def test_calibration_with_true_rates_changes_little():
    points = [
        Measurement(method, VGG16, cluster, predict(method, VGG16, cluster).step_s)
        for method in (GradientAllReduce(), ByteGrad(), TorchDDP())
        for cluster in (CLUSTER, dataclasses.replace(CLUSTER, bandwidth_gbit=10.0))
    ]
    fitted, given = (dataclasses.asdict(rates) for rates in (calibrate(points), Rates()))
    for name, value in given.items():
        assert fitted[name] == pytest.approx(value, rel=1e-3), name


def test_calibration_survives_an_outlier():
    points = [
        measurement(name, "vgg16", mbytes_s) for name in ("exact", "bytegrad") for mbytes_s in (62, 125, 1250)
    ]
    spoilt = [*points[:-1], points[-1]._replace(step_s=3 * points[-1].step_s), points[-1]]
    rates = calibrate(spoilt)
    errors = [abs(predict(m.method, m.job, m.cluster, rates).step_s / m.step_s - 1) for m in points]
    assert np.median(errors) < 0.1


def test_calibration_stays_within_possible_values():
    impossible = [Measurement(GradientAllReduce(), JOB, PAIR, 3.5)]  # faster than the wire
    rates = calibrate(impossible)
    assert rates.direct <= 1
    assert rates.network_s_per_byte >= 0


# Advice and errors --------------------------------------------------------------------------------------


def test_advice_is_sorted_and_has_the_algorithms_that_apply():
    advice = advise(VGG16, CLUSTER)
    assert [a.prediction.step_s for a in advice] == sorted(a.prediction.step_s for a in advice)
    assert {a.name for a in advice} == set(METHODS)
    assert {a.name for a in advise(VGG16, Cluster(3))} == set(METHODS) - {
        "shift-one",
        "shift-one-every-4",
        "shift-one-by-node",
        "low-precision-by-node",
        "hierarchical",
        "hierarchical-bytes",
        "hierarchical-all-bytes",
        "hierarchical-int4",
        "sparseloco-hierarchical",
    }


def test_algorithms_that_do_not_take_the_dtype_are_left_out():
    wide = Job(8 * MB, dtype="float64")
    assert "bytegrad" not in {a.name for a in advise(wide, CLUSTER)}
    with pytest.raises(UnsupportedError, match="float64"):
        predict(every(2, LowPrecisionOnePeer()), wide, CLUSTER)
    with pytest.raises(ArrayError, match="even number"):
        predict(after(5, ByteGrad(), Decentralized("shift_one")), JOB, Cluster(3))


def test_slow_networks_want_few_bytes_and_fast_ones_little_work():
    def best(gbit):
        steps = {a.name: a.prediction.step_s for a in advise(VGG16, Cluster(4, 1, gbit, cores_per_rank=0.5))}
        return min(("exact", "bytegrad"), key=lambda name: steps[name])

    assert [best(0.5), best(100)] == ["bytegrad", "exact"]


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Cluster(0), "nodes is 0, expected an integer from 1"),
        (lambda: Cluster(2, 1.5), "ranks_per_node is 1.5"),
        (lambda: Cluster(2, bandwidth_gbit=0), "bandwidth_gbit is 0, expected a number from 1e-18"),
        (lambda: Cluster(2, latency_s=-1), "latency_s is -1"),
        (lambda: Cluster(2, flows=0), "flows is 0, expected an integer from 1"),
        (lambda: Cluster(2, flows=1001), "flows is 1001, expected an integer from 1 to 1000"),
        (lambda: Cluster(2, flow_bandwidth_gbit=0), "flow_bandwidth_gbit is 0, expected a number from 1e-18"),
        (lambda: Cluster(2, latency_s=math.inf), "latency_s is inf"),
        (lambda: Cluster(2, cores_per_rank=math.nan), "cores_per_rank is nan"),
        (lambda: Cluster(2, transport="smoke"), '"mpi" or "nccl"'),
        (lambda: Job(0), "model_bytes is 0"),
        (lambda: Job(8, backward_s="long"), "backward_s is 'long'"),
        (lambda: Job(8, dtype="int8"), "dtype is 'int8'"),
        (lambda: Job(8, layers=(Layer(4, 1),)), "layers have 4 bytes, expected model_bytes, 8"),
        (lambda: Rates(direct=1.5), "direct is 1.5"),
        (lambda: Rates(add=0), "add is 0"),
        (lambda: Rates.from_dict({"copies": 1}), "'copies'; expected some of minmax, cast"),
        (lambda: Rates.from_dict({"cast": {"encode": 1}}), "missing 2 .* 'decode' and 'combine'"),
        (lambda: Rates.from_dict([]), r"found \[\]"),
        (lambda: calibrate([]), "there is no measurement"),
        (lambda: calibrate([Measurement(ByteGrad(), JOB, PAIR, 0.0)]), "step_s of .* is 0.0"),
    ],
)
def test_arguments_out_of_range_are_refused(make, message):
    with pytest.raises(ArrayError, match=message):
        make()


def test_rates_survive_json():
    assert Rates.from_dict(dataclasses.asdict(Rates.gpu())) == Rates.gpu()
    assert Rates.from_dict({"ring": 0.5}) == Rates(ring=0.5)


def test_unknown_names_are_refused():
    @dataclasses.dataclass(frozen=True)
    class Unknown(Algorithm, Average):
        payload, window = Decentralized.payload, Decentralized.window

        def bind(self, comm):
            raise NotImplementedError

        def check(self, dtype):
            pass

    for method in (Unknown(), GradientAllReduce(Unknown())):
        with pytest.raises(UnsupportedError, match=r"the model does not know what .*Unknown"):
            predict(method, JOB, PAIR)
