"""CUDA tensors, played by tensors of the CPU: the order of what hooks enqueue, and what is refused.

PyTorch's work happens at once here, as on a stream that is always ahead; a stream of the fake device stands for
it, and is CuPy's current one only inside `torch_stream`. Lanes work as late as they may. Where PyTorch reads what
its stream should have by then, a test waits for that stream, and for no other.
"""

import ast
import contextlib
import functools
import inspect
import threading
import time
import types
from collections import Counter
from pathlib import Path
from types import FunctionType

import pytest
import torch
from support.device_ranks import policies_in_turn, run_on_devices
from support.torch_training import (
    QADAM,
    batch,
    loss_of,
    make_model,
    optimizer_for,
    through_a_file,
    train_step,
    weights,
)
from torch import nn

import bagua_torch
from bagua_comm import (
    ByteGrad,
    CommError,
    Communicator,
    Decentralized,
    Engine,
    Exact,
    GradientAllReduce,
    LowPrecisionDecentralized,
    Own,
    QAdam,
    Quantized,
    Reproducible,
    UnsupportedError,
)
from bagua_comm.algorithms import from_name
from bagua_comm.engine.schedule import Exchanges, StepSchedule
from bagua_comm.execution.cuda import DeviceClock, SideStream, UseStream
from bagua_comm.execution.lane import StreamLane, ThreadLane
from bagua_comm.testing import run_ranks
from bagua_torch import DistributedDataParallel, torch_stream
from bagua_torch.training.engine import TorchEngine

ALGORITHMS = [
    *(from_name(name) for name in ("exact", "bytegrad", "error-feedback")),
    QADAM,
    *(from_name(name) for name in ("decentralized", "low-precision-ring", "low-precision-one-peer")),
    from_name("diloco", local_steps=2),
    from_name("streaming-diloco", local_steps=3, fragments=2, delay=2),
    from_name("every", n=2, algorithm="shift-one"),
    from_name("after", steps=2, first="bytegrad", then="low-precision-ring"),
]
QADAM_EXACT = QAdam(warmup_steps=3, average=Exact())


class PlayedByTheCPU:
    """PyTorch's stream of each device, and tensors as arrays there."""

    def __init__(self, device, cupy):
        self.device, self.cupy, self.streams, self.lent = device, cupy, {}, []

    @property
    def stream(self):
        """That of this thread's device; PyTorch has done everything on it already."""
        index = self.device.device
        if index not in self.streams:
            address = self.device.new_stream(eager=True).ptr
            theirs = types.SimpleNamespace(__cuda_stream__=lambda: (0, address))
            self.streams[index] = self.cupy.cuda.Stream.from_external(theirs)
        return self.streams[index]

    def torch_stream(self, device):
        return UseStream(self.stream)

    def as_array(self, tensor):
        return self.cupy.from_dlpack(tensor.detach())

    def as_tensor(self, array):
        self.lent.append(array)  # DLPack would keep it for the tensor's life
        return torch.from_numpy(array._host)

    def wait(self, *_):
        """The order of Python is the order of the stream."""
        self.stream.synchronize()


class Model:
    """A model that is trained; `wait` is called before PyTorch reads what was exchanged."""

    def __init__(self, comm, algorithm, wait=lambda *_: None):
        self.comm, self.wait, self.model = comm, wait, make_model()
        self.optimizer = optimizer_for(algorithm, self.model.parameters())
        self.wrapped = DistributedDataParallel(self.model, self.optimizer, algorithm, comm=comm, bucket_bytes=64)
        self.model.register_forward_pre_hook(wait)
        self.optimizer.register_step_pre_hook(wait)

    def train(self, steps):
        for step in steps:
            train_step(self.wrapped, self.optimizer, batch(self.comm.rank, step))

    def end(self):
        """The kind of lane, and the weights."""
        self.wrapped.average_weights()
        self.wait()
        lane, values = type(self.wrapped.engine._lane), weights(self.model).tolist()
        self.wrapped.close()
        return lane, values


def trained(comm, algorithm, *wait):
    model = Model(comm, algorithm, *wait)
    model.train(range(5))
    return model.end()


@functools.cache
def trained_on_host(algorithm):
    return [values for _, values in run_ranks(2, lambda comm: trained(comm, algorithm))]


@pytest.fixture
def on_host(algorithm):
    """The result of training on the host. Call it before `played`, which changes tensors."""
    return trained_on_host(algorithm)


@pytest.fixture
def played(device, monkeypatch):
    import cupy

    played = PlayedByTheCPU(device, cupy)
    for module in (bagua_torch.training.engine, bagua_torch.tensors.checks, bagua_torch.comm_hook.__globals__):
        names = vars(module) if isinstance(module, types.ModuleType) else module
        for name in ("as_array", "as_tensor", "torch_stream"):
            if name in names:
                monkeypatch.setitem(names, name, getattr(played, name))
    return played


# Training -------------------------------------------------------------------------------------------------


KINDS = [("nccl", StreamLane), ("local", ThreadLane)]


@pytest.mark.algorithms("sample")
@pytest.mark.covering(1)
@policies_in_turn(
    ("algorithm", "kind", "lane"), [(algorithm, *kind) for algorithm in ALGORITHMS for kind in KINDS]
)
def test_training_is_in_the_order_of_pytorchs_stream(on_host, played, algorithm, kind, lane):
    def body(comm):
        return trained(comm, algorithm, played.wait)

    assert run_on_devices(played.device, 2, kind, body) == [(lane, values) for values in on_host]


@policies_in_turn(
    ("algorithm", "kind"), [(GradientAllReduce(), "nccl"), (Decentralized(), "local"), (QADAM_EXACT, "nccl")]
)
def test_new_buckets_are_filled_in_the_order_of_pytorchs_stream(on_host, played, algorithm, kind):
    def body(comm):
        model = Model(comm, algorithm, played.wait)
        for step in range(5):
            model.train([step])
            model.wrapped.replan(bucket_bytes=1 if step % 2 else 300)
        return model.end()

    assert [values for _, values in run_on_devices(played.device, 2, kind, body)] == on_host


def trained_with_a_layer_that_is_unfrozen_later(comm, algorithm, wait=lambda *_: None):
    module = make_model()
    module[0].requires_grad_(False)
    optimizer = optimizer_for(algorithm, module.parameters())
    module.register_forward_pre_hook(wait)
    optimizer.register_step_pre_hook(wait)
    ddp = DistributedDataParallel(module, optimizer, algorithm, comm=comm, bucket_bytes=64)
    for step in range(5):
        module[0].requires_grad_(step > 1)
        train_step(ddp, optimizer, batch(comm.rank, step))
    ddp.average_weights()
    wait()
    values = weights(module).tolist()
    ddp.close()
    return values


@pytest.fixture
def unfrozen_on_host(algorithm):
    return run_ranks(2, lambda comm: trained_with_a_layer_that_is_unfrozen_later(comm, algorithm))


@pytest.mark.slow
@policies_in_turn(("algorithm", "kind"), [(GradientAllReduce(), "nccl"), (Decentralized(), "local")])
def test_layers_that_are_unfrozen_later_train_with_the_bytes_of_the_host(
    unfrozen_on_host, played, algorithm, kind
):
    def body(comm):
        return trained_with_a_layer_that_is_unfrozen_later(comm, algorithm, played.wait)

    assert run_on_devices(played.device, 2, kind, body) == unfrozen_on_host


@policies_in_turn(("algorithm",), [(GradientAllReduce(),), (Decentralized(),)])
def test_a_wrapper_may_be_made_on_another_stream_than_it_is_trained_on(on_host, played, algorithm, monkeypatch):
    """PyTorch accumulates gradients where the wrapper was made, and joins that with where it is called."""
    backward = torch.Tensor.backward

    def joined(loss):
        training, accumulating = played.stream, made_on[played.device.device]
        accumulating.wait_event(training.record())
        played.streams[played.device.device] = accumulating
        backward(loss)
        played.streams[played.device.device] = training
        training.wait_event(accumulating.record())

    made_on = {}
    monkeypatch.setattr(torch.Tensor, "backward", joined)

    def body(comm):
        model = Model(comm, algorithm, played.wait)
        made_on[comm.device] = played.streams.pop(comm.device)
        model.train(range(5))
        assert played.stream != made_on[comm.device]
        return model.end()

    assert [values for _, values in run_on_devices(played.device, 2, "nccl", body)] == on_host


@pytest.mark.covering(1)
@pytest.mark.parametrize("algorithm", [QADAM, LowPrecisionDecentralized()], ids=repr)
def test_a_checkpoint_continues_with_the_same_bytes(on_host, played, algorithm):
    def body(comm):
        first = Model(comm, algorithm, played.wait)
        first.train(range(3))
        saved = [part.state_dict() for part in (first.wrapped, first.optimizer)]
        played.wait()
        saved = through_a_file(saved)
        first.train(range(1))  # which changes nothing in what is saved
        second = Model(comm, algorithm, played.wait)
        second.wrapped.load_state_dict(saved[0])
        second.optimizer.load_state_dict(saved[1])
        second.train(range(3, 5))
        first.wrapped.close()
        return second.end()

    assert [values for _, values in run_on_devices(played.device, 2, "nccl", body)] == on_host


def bare(tree):
    """A tree for a checkpoint without its marks."""
    if isinstance(tree, Own):
        return bare(tree.value)
    return {name: bare(value) for name, value in tree.items()} if isinstance(tree, dict) else tree


@pytest.mark.filterwarnings("ignore:.*zeros are averaged")
def test_tensors_of_pytorch_are_used_in_the_order_of_their_stream(played, monkeypatch):
    """Every public method is called, and every hook runs."""
    streams, called = Counter(), set()

    def noted(method, name, takes=lambda *_: True):
        def noting(*args, **keywords):
            if takes(*args):
                streams[name, played.cupy.cuda.get_current_stream().ptr == played.stream.ptr] += 1
            return method(*args, **keywords)

        return noting

    def told(method):
        def telling(*args, **keywords):
            called.add(method.__name__)
            return method(*args, **keywords)

        return telling

    deep = [
        (SideStream, ["future", "join"]),  # something is submitted, a lane is joined
        (Engine, ["_begin_phase", "_saved", "_load"]),
        (StepSchedule, ["_complete_with_zeros", "_close", "finish"]),
        (Exchanges, ["send", "wait", "commit"]),
    ]
    for owner, names in deep:
        for name in names:
            monkeypatch.setattr(owner, name, noted(getattr(owner, name), name))
    comms = []
    of_a_wrapper = lambda comm, xs, *_: comm in comms and isinstance(xs[0], played.cupy.ndarray)  # noqa: E731
    averaging = noted(Communicator.allreduce_many, "allreduce_many", of_a_wrapper)
    monkeypatch.setattr(Communicator, "allreduce_many", averaging)
    public = {name for name, value in vars(DistributedDataParallel).items() if isinstance(value, FunctionType)}
    public = {name for name in public if not name.startswith("_")}
    for name in public:
        monkeypatch.setattr(DistributedDataParallel, name, told(getattr(DistributedDataParallel, name)))

    def hook(state, bucket):
        future = torch.futures.Future()
        future.set_result(bucket.buffer())
        return future

    def body(comm):
        comms.append(comm)
        for algorithm in (GradientAllReduce(), ByteGrad(), LowPrecisionDecentralized()):
            model = Model(comm, algorithm, played.wait)
            if algorithm == GradientAllReduce():
                model.wrapped.register_comm_hook(None, hook)
            model.train(range(2))
            with model.wrapped.no_sync():
                loss_of(model.wrapped, batch(0, 0)).backward()
            model.wrapped(batch(0, 0))  # its backward pass reaches nothing, which is a warning
            model.optimizer.step()
            with model.wrapped.join():
                model.train(range(2 + comm.rank))
            model.train(range(1))
            model.wrapped.stop()
            model.wrapped.resume()
            model.train(range(1))
            model.wrapped.replan(bucket_bytes=100)
            model.train(range(1))
            saved = model.wrapped.state_dict()
            played.wait()
            model.wrapped.load_state_dict(saved)
            model.wrapped.copy_buffers()
            assert model.wrapped.will_sync_module_buffers() == bool(list(model.model.buffers()))
            tree = bare(model.wrapped.tree_of_engine())
            played.wait()
            model.wrapped.load_tree(model.model.state_dict(), tree)
            model.wrapped.switch(GradientAllReduce())
            loss = loss_of(model.wrapped, batch(0, 0))
            loss.backward(retain_graph=True)
            model.wrapped.expect_backward()
            loss.backward()
            model.wrapped.end_backward()
            model.optimizer.step()
            model.wrapped.switch(GradientAllReduce(Reproducible(addends=4)))
            for i in model.wrapped.microbatches():
                loss_of(model.wrapped, batch(0, i)).backward()
            model.optimizer.step()
            model.wrapped.switch(Decentralized())
            model.train(range(2))
            model.model.eval()(batch(0, 0))
            model.end()

    run_on_devices(played.device, 2, "nccl", body)
    assert called == public
    assert {name for name, _ in streams} == {"allreduce_many", *(name for _, names in deep for name in names)}
    assert [name for name, in_order in streams if not in_order] == []


def test_every_method_of_the_engine_enters_pytorchs_stream(monkeypatch):
    entered = []
    monkeypatch.setattr(
        bagua_torch.training.engine,
        "torch_stream",
        lambda device: entered.append(device) or contextlib.nullcontext(),
    )
    methods = [name for name, _ in inspect.getmembers(TorchEngine, inspect.isfunction) if name[0] != "_"]
    assert {"ready", "at", "settle", "close", "ready_bucket"} <= set(methods)
    for name in methods:
        with contextlib.suppress(TypeError, AttributeError):  # there is no engine behind it
            getattr(TorchEngine, name)(types.SimpleNamespace(device=name))
    assert entered == methods


def test_a_wrapper_reaches_a_device_only_through_its_engine():
    """Otherwise something may run on another stream than PyTorch's: that is seen on a device only, and rarely."""
    folder = Path(bagua_torch.__file__).parent
    outside = {"__init__", "arrays", "broadcast", "comm_hook", "engine"}
    outside |= {"checkpoint", "functional", "lightning", "moe", "sync_batchnorm"}  # beside the wrapper
    forbidden = {"Engine", "torch_stream", "as_tensor", "as_array", "cuda"}
    for path in sorted(folder.glob("*.py")):
        if path.stem in outside:
            continue
        names = {
            part
            for node in ast.walk(ast.parse(path.read_text()))
            if isinstance(node, (ast.Import, ast.ImportFrom))
            for alias in node.names
            for part in [*alias.name.split("."), *(getattr(node, "module", None) or "").split(".")]
        }
        # A check looks at a tensor, and enqueues nothing.
        allowed = {"as_array"} if path.stem == "checks" else set()
        assert names & forbidden <= allowed, path


def test_gradients_are_views_of_the_buckets(played):
    def body(comm):
        model = make_model()
        wrapped = DistributedDataParallel(model, comm=comm)
        loss_of(wrapped, batch(comm.rank, 0)).backward()
        (bucket,) = wrapped.engine.buckets
        begin = bucket.flat.data.ptr
        inside = [begin <= p.grad.data_ptr() < begin + bucket.nbytes for p in model.parameters()]
        wrapped.close()
        return inside

    assert run_on_devices(played.device, 2, "nccl", body) == [[True] * 6] * 2


def test_no_hook_makes_the_host_wait_for_the_device(played, device):
    def body(comm):
        wrapped = DistributedDataParallel(make_model(), comm=comm)
        for step in range(3):
            with device.forbid_host_sync(this_thread=True):
                loss_of(wrapped, batch(comm.rank, step)).backward()
        wrapped.close()

    run_on_devices(played.device, 2, "nccl", body)


def test_the_stages_of_a_step_are_seen_on_the_device(played):
    class Clock(DeviceClock):
        """Marks PyTorch's current stream, as `TorchClock` does on a device."""

        def mark(self):
            with played.torch_stream(None):
                return super().mark()

    def body(comm):
        model = make_model()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        wrapped = DistributedDataParallel(model, optimizer, comm=comm, bucket_bytes=64)
        for span in wrapped._steps.spans.values():
            span.clock = Clock(comm.device)
        for step in range(2):
            loss_of(wrapped, batch(comm.rank, step)).backward()
            optimizer.step()
            played.wait()
        lane = wrapped.engine._lane.name
        wrapped.close()
        spans = comm.tracer.spans()
        return [[s for s in spans if s.thread == f"device: {row}"] for row in (lane, *wrapped._steps.spans)]

    for exchanges, *stages in run_on_devices(played.device, 2, "nccl", body):
        assert [span.name for span in exchanges] == ["exchange"] * 2 * 3  # buckets
        assert [[span.name for span in spans] for spans in stages] == [
            [name] * 2 for name in ("forward", "backward", "optimizer")
        ]
        assert all(span.start_ns <= span.end_ns for spans in (exchanges, *stages) for span in spans)
        assert all(first.end_ns <= second.start_ns for first, second in stages)


@pytest.mark.parametrize(
    "end", [DistributedDataParallel.close, lambda wrapped: wrapped.switch(ByteGrad())], ids=["close", "switch"]
)
def test_after_an_error_of_the_device_the_end_comes_at_once(played, device, end):
    broken = threading.Barrier(2, action=lambda: [device.break_device(index) for index in (0, 1)])

    def body(comm):
        wrapped = DistributedDataParallel(make_model(), comm=comm)
        lane = wrapped.engine._lane
        loss_of(wrapped, batch(comm.rank, 0)).backward()
        broken.wait()
        start = time.monotonic()
        with pytest.raises((CommError, played.cupy.cuda.runtime.CUDARuntimeError), match="illegal memory access"):
            end(wrapped)
        for left in (lane.comm, comm):
            with contextlib.suppress(CommError):
                left.close()
        return time.monotonic() - start

    assert max(run_on_devices(device, 2, "nccl", body)) < 25  # not as long as a call may wait for its peers


# PyTorch's own DistributedDataParallel --------------------------------------------------------------------


@pytest.mark.parametrize(("kind", "lane_type"), [("nccl", StreamLane), ("local", ThreadLane)])
@pytest.mark.parametrize("average", [Exact(), Quantized()], ids=repr)
def test_a_comm_hook_averages_after_the_work_that_pytorch_has_enqueued(played, average, kind, lane_type):
    def body(comm):
        hook = bagua_torch.comm_hook(average, comm)
        lane = hook.__closure__[hook.__code__.co_freevars.index("lane")].cell_contents
        flat, parameters = torch.zeros(4), [nn.Parameter(torch.zeros(4))]
        bucket = types.SimpleNamespace(buffer=lambda: flat, index=lambda: 0, parameters=lambda: parameters)
        with played.torch_stream(None):
            ours = played.as_array(flat)
            ours[...] = played.cupy.asarray(torch.tensor([0.0, 1.0, 2.0, 255.0]).numpy())
            hook(None, bucket)
            lane.wait()
        played.wait()
        lane.close()
        return type(lane), flat.round().tolist()

    assert run_on_devices(played.device, 2, kind, body) == [(lane_type, [0.0, 1.0, 2.0, 255.0])] * 2


# Streams and devices --------------------------------------------------------------------------------------


def test_in_torch_stream_cupys_current_stream_is_pytorchs(device, monkeypatch):
    import cupy

    device.count, entered = 2, []

    @contextlib.contextmanager
    def current_device(its):
        entered.append(its.index)
        yield

    theirs = [device.new_stream().ptr, 0]
    current = lambda: types.SimpleNamespace(cuda_stream=theirs[entered[-1]])  # noqa: E731
    monkeypatch.setattr(torch.cuda, "device", current_device)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: entered[-1])
    monkeypatch.setattr(torch.cuda, "current_stream", current)
    for index, address in enumerate(theirs):
        with torch_stream(torch.device("cuda", index)):
            assert (device.device, cupy.cuda.get_current_stream().ptr) == (index, address)
        assert cupy.cuda.get_current_stream().ptr == 0
    assert entered == [0, 1]


def test_a_default_stream_for_each_thread_is_refused_with_what_to_do(device, monkeypatch):
    import cupy

    monkeypatch.setattr(cupy.cuda, "get_current_stream", lambda: types.SimpleNamespace(ptr=2))
    monkeypatch.setattr(torch.cuda, "device", contextlib.nullcontext)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: types.SimpleNamespace(cuda_stream=0))
    on_gpu = torch.ones(1).as_subclass(Elsewhere)
    for call in (lambda: torch_stream(Elsewhere.device).__enter__(), lambda: bagua_torch.as_array(on_gpu)):
        with pytest.raises(
            UnsupportedError, match=r"CUPY_CUDA_PER_THREAD_DEFAULT_STREAM=1\), which .* unset that"
        ):
            call()


def test_torch_stream_does_nothing_for_the_cpu(monkeypatch):
    monkeypatch.setattr(torch.cuda, "device", None)
    with torch_stream(torch.device("cpu")):
        assert torch.ones(1).item() == 1


class Elsewhere(torch.Tensor):
    device = torch.device("cuda", 1)
