"""Training on device arrays: the bytes of the host, in whatever order the device does things, and no waiting."""

import functools
import threading
from dataclasses import dataclass

import numpy as np
import pytest
from support.device_ranks import HostOnly, policies_in_turn, run_on_devices

from bagua_comm import (
    AsyncModelAverage,
    ByteGrad,
    CommAborted,
    CommError,
    Engine,
    ErrorFeedback,
    GradientAllReduce,
    LowPrecisionDecentralized,
    MinMaxUInt8,
    Plan,
    Point,
    QAdam,
    Quantized,
    SparseLoCo,
    TensorSpec,
    UnsupportedError,
    after,
    kernels,
    optim,
)
from bagua_comm.algorithms import from_name
from bagua_comm.execution.lane import StreamLane, ThreadLane
from bagua_comm.testing import run_ranks, sample

SPECS = [TensorSpec(name, shape, "float32") for name, shape in (("a", (7, 3)), ("b", (600,)), ("c", ()))]

KEEPING = [
    from_name("error-feedback"),
    from_name("qadam", warmup_steps=2),
    from_name("low-precision-one-peer"),
    from_name("after", steps=2, first="exact", then="low-precision-ring"),
    SparseLoCo(2, chunk=64, keep=6),
]
"""Algorithms that keep arrays from step to step."""

ALGORITHMS = [
    *KEEPING,
    *(from_name(name) for name in ("exact", "bytegrad", "hierarchical-bytes")),
    *(from_name(name) for name in ("decentralized", "shift-one", "one-peer", "low-precision-ring")),
    from_name("diloco", local_steps=2, average="quantized"),
    from_name("streaming-diloco", local_steps=3, fragments=2, delay=2),
    from_name("every", n=2, algorithm="decentralized"),
    from_name("by-node", algorithm="low-precision-one-peer"),
]

KINDS = [("nccl", StreamLane), ("local", ThreadLane), ("staged", ThreadLane)]


class Training:
    """A model whose gradient is what its weights are away from this rank's own aim."""

    def __init__(self, comm, algorithm, asarray):
        self.comm, self.algorithm, self.asarray = comm, algorithm, asarray
        self.plan = Plan.pack(SPECS, bucket_bytes=512, alignment=8 * comm.size)
        self.weights, self.grads = ([asarray(flat) for flat in self.plan.allocate()] for _ in ("weight", "grad"))
        self.aims = {spec.name: asarray(sample(comm.rank, spec.shape, "float32")) for spec in SPECS}
        self.engine = Engine(comm, algorithm, self.plan, {"weight": self.weights, "grad": self.grads})
        kind = optim.QAdam(0.1, algorithm.warmup_steps) if isinstance(algorithm, QAdam) else optim.SGD(0.1, 0.5)
        self.optimizer = kind
        self.states = [kind.init(weight) for weight in self.weights]

    def step(self):
        self.engine.at(Point.FORWARD)
        weights, grads = self.plan.cut(self.weights), self.plan.cut(self.grads)
        for name, aim in self.aims.items():
            kernels.of(aim).subtract(weights[name].reshape(-1), aim.reshape(-1), out=grads[name].reshape(-1))
            self.engine.ready(name)
        self.engine.at(Point.BACKWARD)
        for weight, grad, state, kept in zip(
            self.weights, self.grads, self.states, self.engine.states, strict=True
        ):
            momentum = [kept.momentum] if isinstance(self.algorithm, QAdam) else []
            self.optimizer.step(weight, grad, state, *momentum)
        self.engine.at(Point.STEP)

    def run(self, steps):
        for _ in range(steps):
            self.step()
        self.engine.settle()


def on_host(x):
    return x if isinstance(x, np.ndarray) else x.get()


def trained(comm, algorithm, asarray, steps=6):
    """The kind of lane, and the bytes of this rank's weights in the end."""
    training = Training(comm, algorithm, asarray)
    training.run(steps)
    weights = [on_host(weight).tobytes() for weight in training.weights]
    training.engine.close()
    return type(training.engine._lane), weights


@functools.cache
def trained_on_host(algorithm):
    return [weights for _, weights in run_ranks(2, lambda comm: trained(comm, algorithm, np.copy))]


# The same bytes


@pytest.mark.algorithms("sample")
@pytest.mark.covering(1)
@policies_in_turn(
    ("algorithm", "kind", "lane"), [(algorithm, *kind) for algorithm in ALGORITHMS for kind in KINDS]
)
def test_training_on_a_device_gives_the_bytes_of_the_host(device, algorithm, kind, lane):
    import cupy

    def body(comm):
        return trained(comm, algorithm, cupy.asarray)

    assert run_on_devices(device, 2, kind, body) == [(lane, weights) for weights in trained_on_host(algorithm)]


@policies_in_turn(("kind",), [(kind,) for kind, _ in KINDS])
def test_nodes_of_different_sizes_give_the_bytes_of_the_host(device, kind):
    import cupy

    algorithm, nodes = from_name("by-node", algorithm="low-precision-one-peer"), "abb"

    def body(comm):
        return trained(comm, algorithm, cupy.asarray)[1]

    expected = run_ranks(3, lambda comm: trained(comm, algorithm, np.copy)[1], nodes=nodes)
    assert run_on_devices(device, 3, kind, body, nodes=nodes) == expected


# No thread waits


@pytest.mark.algorithms("sample")
@policies_in_turn(("algorithm",), [(algorithm,) for algorithm in ALGORITHMS])
def test_over_nccl_the_host_waits_neither_for_the_device_nor_for_peers(device, algorithm):
    import cupy

    ahead = threading.Event()

    def body(comm):
        training = Training(comm, algorithm, cupy.asarray)
        training.engine.at(Point.FORWARD)  # compares the weights, on the host
        with device.forbid_host_sync(this_thread=True):
            training.run(3)  # by when NCCL is connected, and the algorithm has changed
            if comm.rank == 1:
                assert ahead.wait(30)
            training.run(2)
            ahead.set()
        training.engine.close()

    run_on_devices(device, 2, "nccl", body)
    assert ahead.is_set()
    assert device.launches  # it did work there


@pytest.mark.parametrize("kind", ["nccl", "local"])
def test_rounds_beside_training_are_committed_when_the_device_is_done(device, kind):
    import cupy

    def body(comm):
        training = Training(comm, AsyncModelAverage(interval_s=0), cupy.asarray)
        while training.engine.commits < 2:
            with device.forbid_host_sync(this_thread=True):
                training.step()
            cupy.cuda.get_current_stream().synchronize()  # time passes
        with device.forbid_host_sync(this_thread=True):
            training.engine.stop()
        weights = [on_host(weight) for weight in training.weights]
        training.engine.close()
        return type(training.engine._lane), weights

    (lane, first), (_, second) = run_on_devices(device, 2, kind, body)
    assert lane is ThreadLane
    for a, b in zip(first, second, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)


# Checkpoints and plans


def moved(value):
    """The checkpoint that the host would save."""
    if isinstance(value, dict):
        return {key: moved(inner) for key, inner in value.items()}
    return value.get() if hasattr(value, "get") else value


def kept(value):
    """The checkpoint that the device saves."""
    return value


@pytest.mark.covering(1)
@policies_in_turn(("algorithm", "convert"), [(a, convert) for a in KEEPING for convert in (kept, moved)])
def test_a_checkpoint_continues_with_the_same_bytes(device, algorithm, convert):
    import cupy

    def body(comm):
        first, second = (Training(comm, algorithm, cupy.asarray) for _ in range(2))
        first.run(3)
        saved = convert(first.engine.state_dict())
        for old, new in zip(first.weights, second.weights, strict=True):
            new[...] = old
        second.states = first.states
        second.engine.load_state_dict(saved)
        second.run(3)
        weights = [weight.get().tobytes() for weight in second.weights]
        for training in (first, second):
            training.engine.close()
        return weights

    assert run_on_devices(device, 2, "local", body) == trained_on_host(algorithm)


def test_a_checkpoint_of_a_device_continues_on_the_host(device):
    import cupy

    def body(comm):
        first = Training(comm, LowPrecisionDecentralized(), cupy.asarray)
        second = Training(comm, LowPrecisionDecentralized(), np.copy)
        first.run(3)
        second.engine.load_state_dict(first.engine.state_dict())
        kept = [
            (there.weight.get().tolist(), here.weight.tolist())
            for there, here in zip(first.engine.states, second.engine.states, strict=True)
        ]
        for training in (first, second):
            training.engine.close()
        return kept

    for kept in run_on_devices(device, 2, "local", body):
        for there, here in kept:
            assert here == there


@pytest.mark.parametrize("kind", ["nccl", "local"])
def test_values_and_state_move_to_a_new_plan(device, kind):
    import cupy

    algorithm = GradientAllReduce(ErrorFeedback(Quantized()))

    def body(comm):
        training = Training(comm, algorithm, cupy.asarray)
        training.run(2)
        before = {name: view.get() for name, view in training.plan.cut(training.grads).items()}
        plan = Plan.pack(reversed(SPECS), bucket_bytes=10_000, alignment=8 * comm.size)
        flats = training.engine.replan(plan)
        after_it = {name: view.get() for name, view in plan.cut(flats).items()}
        residuals = [state.average.residual.get() for state in training.engine.states]
        training.engine.close()
        return before, after_it, residuals

    for before, after_it, residuals in run_on_devices(device, 2, kind, body):
        for name, value in before.items():
            np.testing.assert_array_equal(after_it[name], value)
        assert all(residual.any() for residual in residuals)


# Errors, failures, and observation


def test_device_arrays_that_no_transport_moves_are_refused_at_once(device):
    import cupy

    def body(comm):
        with pytest.raises(UnsupportedError, match="Engine: storage is a cupy array, but this communicator's"):
            Training(comm, GradientAllReduce(), cupy.asarray)

    run_ranks(2, body, wrap=HostOnly)


@dataclass(frozen=True)
class Failing(GradientAllReduce):
    def exchange(self, bucket, comm, state):
        super().exchange(bucket, comm, state)
        if bucket.step == 1:
            raise CommError("lost")


@pytest.mark.parametrize("kind", ["nccl", "local"])
def test_an_exchange_that_fails_surfaces_when_the_window_closes(device, kind):
    import cupy

    def body(comm):
        training = Training(comm, Failing(), cupy.asarray)
        training.step()
        with pytest.raises(CommError, match="lost"):
            training.step()
        with pytest.raises(CommAborted):
            training.engine.close()

    run_on_devices(device, 2, kind, body)


@pytest.mark.parametrize("kind", ["nccl", "staged"])
def test_exchanges_are_seen_on_a_row_of_the_device(device, kind):
    import cupy

    def body(comm):
        training = Training(comm, ByteGrad(), cupy.asarray)
        training.run(2)
        training.weights[0].get()
        row = f"device: {training.engine._lane.name}"
        training.engine.close()
        return [
            (span.name, span.args["bucket"], span.args["step"])
            for span in comm.tracer.spans()
            if span.thread == row
        ]

    buckets = 2
    expected = [("exchange", bucket, step) for step in range(2) for bucket in range(buckets)]
    assert [expected] * 2 == run_on_devices(device, 2, kind, body)


def test_a_nan_does_not_stay_in_the_padding(device):
    import cupy

    def body(comm):
        training = Training(comm, ByteGrad(), cupy.asarray)
        training.run(1)
        for bucket in training.engine.buckets:
            bucket.flat[...] = float("nan")
        training.run(1)
        found = [bucket.padding.get() for bucket in training.engine.buckets]
        training.engine.close()
        return [bool(np.isfinite(values).all()) for values in found]

    assert run_on_devices(device, 2, "nccl", body) == [[True, True]] * 2


@pytest.mark.parametrize("device", ["lazy"], indirect=True)
@pytest.mark.parametrize("block", [64, None])
@pytest.mark.parametrize("size", [100, 40_000])
def test_kernels_of_codecs_are_loaded_when_the_engine_is_made(device, monkeypatch, block, size):
    import cupy

    loaded, get_function = [], cupy.RawModule.get_function
    monkeypatch.setattr(
        cupy.RawModule, "get_function", lambda module, name: loaded.append(name) or get_function(module, name)
    )
    algorithm = after(9, GradientAllReduce(Quantized(MinMaxUInt8(block=block))), AsyncModelAverage())
    plan = Plan.pack([TensorSpec("a", (size,), "float32")], bucket_bytes=1 << 20)

    def body(comm):
        storage = {payload: [cupy.zeros(size, np.float32)] for payload in ("grad", "weight")}
        with Engine(comm, algorithm, plan, storage) as engine:
            assert type(engine._lane) is ThreadLane
            assert {"encode", "combine", "decode"} <= {*loaded}
            comm.transports[0].barrier()
            before = len(loaded)
            engine.at(Point.FORWARD)
            engine.ready("a")
            engine.at(Point.BACKWARD)
            assert len(loaded) == before
            engine.stop()

    run_on_devices(device, 2, "nccl", body)
