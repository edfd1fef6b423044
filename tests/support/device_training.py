"""Bodies of tests of training on a device by two ranks: all algorithms, FSDP2, Muon, a GradScaler, the backend.

Each gets the name of a device, and the communicator of a process whose default process group is of the backend
"bagua". What it trains there it also trains on the host, by the same calls on the same ranks. Where gradients are
equal, so are bits; elsewhere a gradient that differs in its last bits may be rounded to another level of a codec.
"""

import functools

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

import bagua_torch
import bagua_torch.fsdp
from bagua_comm import (
    DiLoCo,
    ErrorFeedback,
    Exact,
    GradientAllReduce,
    Int4,
    MinMaxUInt8,
    Quantized,
    SparseLoCo,
    StreamingDiLoCo,
    TopK,
    quantized_allreduce,
)
from benchmarks.gpu.device import Hold
from benchmarks.gpu.training import refusing_to_wait, wait
from support.torch_training import (
    ALGORITHMS,
    ASYNC_ALGORITHMS,
    batch,
    gradients,
    loss_of,
    make_model,
    sgd,
    train_step,
    weights,
    wrapped,
)

EIGHT_BITS, FOUR_BITS = Quantized(min_bytes=0), Quantized(Int4(), min_bytes=0)
BYTEGRAD = Quantized(MinMaxUInt8.bagua(), min_bytes=0)
HOLD_S = 0.5
LATE = 50_000_000
"""Cycles of the device, some hundredths of a second, by which values come after the host has asked for them."""


def assert_as_on_the_host(train, device, *arguments, exact=False, **settings):
    """`train` returns on the device what it returns on the host."""
    found, expected = (train(each, *arguments, **settings).cpu() for each in (device, "cpu"))
    torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-4 if exact else 5e-2)


@functools.cache
def mesh_of(device, *shape):
    return init_device_mesh(device, shape, mesh_dim_names=("replicas", "shards")[-len(shape) :])


def sharded(device, *shape, model=None, **settings):
    """The model, sharded in units of a layer each."""
    model = (make_model() if model is None else model).to(device)
    for each in (*(layer for layer in model if isinstance(layer, nn.Linear)), model):
        fully_shard(each, mesh=mesh_of(device, *shape), **settings)
    return model


def shards(parameters):
    return torch.cat([each.to_local().detach().reshape(-1) for each in parameters])


def run_steps(comm, model, optimizer, device, steps=6):
    for step in range(steps):
        train_step(model, optimizer, batch(comm.rank, step).to(device))


def train_sharded(device, comm, *averages, shape=(2,), policy=None, local=False, **settings):
    """The shards of this rank after `attach(model, *averages, **settings)` and six steps."""
    model = sharded(device, *shape, **({} if policy is None else {"mp_policy": policy}))
    optimizer = sgd(model.parameters())
    if local:
        settings["optimizers"] = optimizer
    with bagua_torch.fsdp.attach(model, *averages, comm=comm, **settings):
        run_steps(comm, model, optimizer, device)
        return shards(model.parameters())


# Replicated models


def every_algorithm_trains_as_on_the_host(comm, device):
    def train(device, algorithm):
        model, optimizer, ddp = wrapped(comm, algorithm, model=make_model().to(device), bucket_bytes=64)
        run_steps(comm, ddp, optimizer, device)
        ddp.stop()
        ddp.average_weights()
        lane = type(ddp.engine._lane).__name__
        assert device == "cpu" or lane == ("ThreadLane" if algorithm in ASYNC_ALGORITHMS else "StreamLane"), lane
        ddp.close()
        comm.check_consistency(bagua_torch.as_array(weights(model).cpu()))
        return weights(model)

    for algorithm in (*ALGORITHMS, GradientAllReduce(ErrorFeedback(TopK(chunk=16, keep=4))), SparseLoCo(2)):
        if algorithm in ASYNC_ALGORITHMS:
            train(device, algorithm)
        else:
            assert_as_on_the_host(train, device, algorithm, exact=algorithm == GradientAllReduce())


# FSDP2


def a_sharded_model_trains_as_on_the_host(comm, device):
    assert_as_on_the_host(train_sharded, device, comm, Exact(), exact=True)
    for averages in ((EIGHT_BITS, EIGHT_BITS), (BYTEGRAD,), (FOUR_BITS,), (ErrorFeedback(EIGHT_BITS),)):
        assert_as_on_the_host(train_sharded, device, comm, *averages)


def a_sharded_model_in_bfloat16_trains_as_on_the_host(comm, device):
    for reduced in (torch.float32, torch.bfloat16):
        policy = MixedPrecisionPolicy(torch.bfloat16, reduced)
        assert_as_on_the_host(train_sharded, device, comm, EIGHT_BITS, policy=policy)


def equal_gradients_have_the_bits_of_the_host(comm, device):
    """Of integers, whose products and sums are exact in any order."""

    def reduced(device, average):
        model = nn.Sequential(nn.Linear(4, 64, bias=False), nn.Linear(64, 6, bias=False))
        generator = torch.Generator().manual_seed(comm.rank)
        with torch.no_grad():
            for n, parameter in enumerate(model.parameters()):
                parameter.copy_(torch.randint(-4, 5, parameter.shape, generator=torch.Generator().manual_seed(n)))
        x, factors = (torch.randint(-9, 10, (8, n), generator=generator).float().to(device) for n in (4, 6))
        model = sharded(device, 2, model=model)
        with bagua_torch.fsdp.attach(model, average, comm=comm):
            (model(x) * factors).sum().backward()
            return shards(p.grad for p in model.parameters()).cpu()

    for average in (Exact(), EIGHT_BITS, BYTEGRAD, FOUR_BITS):
        found, expected = reduced(device, average), reduced("cpu", average)
        assert expected.any(), average
        assert torch.equal(found, expected), (average, (found - expected).abs().max())


def a_sharded_step_waits_for_nothing(comm, device):
    for averages in ((Exact(),), (EIGHT_BITS, EIGHT_BITS)):
        model = sharded(device, 2)
        optimizer, x = sgd(model.parameters()), batch(comm.rank, 0).to(device)
        with bagua_torch.fsdp.attach(model, *averages, comm=comm):
            for _ in range(3):
                train_step(model, optimizer, x)
            hold = Hold() if device == "cuda" else None
            wait(device)
            comm.barrier()
            with refusing_to_wait(device):
                held = None if hold is None else hold(HOLD_S)
                train_step(model, optimizer, x)
                assert held is None or not held.done, f"{averages}: the host has waited for the device"
            wait(device)


def exchanges_of_a_sharded_model_are_in_the_trace(comm, device):
    """Of the two steps of three units here, on rows of the device if they are made there."""
    model = sharded(device, 2)
    begin_ns = comm.tracer.now_ns()
    with bagua_torch.fsdp.attach(model, Exact(), comm=comm):
        run_steps(comm, model, sgd(model.parameters()), device, 2)
        wait(device)
    spans = [span for span in comm.tracer.spans() if span.start_ns > begin_ns]
    for name, row, least in (("reduce_scatter", "reductions", 2 * 3), ("allgather", "gathers", 2 * 3)):
        found = [span for span in spans if span.name == name]
        if device == "cuda":
            found = [span for span in found if span.thread == f"device: {row}"]
        assert len(found) >= least, (name, {(span.name, span.thread) for span in spans})
        assert all(span.start_ns < span.end_ns for span in found)


# Replicas


def replicas_average_and_train_locally_as_on_the_host(comm, device):
    """On a mesh of two replicas of one shard."""
    train = functools.partial(assert_as_on_the_host, train_sharded, device, comm, Exact(), shape=(2, 1))
    train(replicas=Exact(), exact=True)
    train(replicas=EIGHT_BITS, policy=MixedPrecisionPolicy(torch.bfloat16, torch.float32))
    train(replicas=DiLoCo(2), local=True, exact=True)
    for algorithm in (StreamingDiLoCo(4, fragments=2, delay=2), DiLoCo(2, average=FOUR_BITS), SparseLoCo(2)):
        train(replicas=algorithm, local=True)


# Optimizers


def muon_trains_as_on_the_host(comm, device):
    def train(device, is_sharded, codec=None):
        model = sharded(device, 2) if is_sharded else make_model().to(device)
        muon = bagua_torch.Muon(
            model.named_parameters(), 0.02, dtype="float32", adam=lambda name, p: {} if p.ndim < 2 else None
        )
        if is_sharded:
            handle, trained = bagua_torch.fsdp.attach(model, Exact(), comm=comm), model
        else:
            handle = trained = bagua_torch.DistributedDataParallel(model, [muon], GradientAllReduce(), comm=comm)
        muon.distribute(comm, codec=codec)
        run_steps(comm, trained, muon, device)
        muon.close()
        handle.close()
        return shards(model.parameters()) if is_sharded else weights(model)

    for is_sharded in (False, True):
        assert_as_on_the_host(train, device, is_sharded, exact=True)
    assert_as_on_the_host(train, device, True, Int4())


def a_grad_scaler_leaves_out_the_same_steps_on_all_ranks(comm, device):
    """In float16, with clipped gradients; an infinity on one rank."""
    model, optimizer, ddp = wrapped(comm, model=make_model().to(device), bucket_bytes=64)
    scaler, before = torch.amp.GradScaler(device, init_scale=2.0**10), weights(model).clone()
    for step in range(4):
        x = batch(comm.rank, step).to(device)
        optimizer.zero_grad()
        with torch.autocast(device, torch.float16):
            loss = loss_of(ddp, x) * (float("inf") if (comm.rank, step) == (1, 2) else 1.0)
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        norm = nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        scaler.step(optimizer)
        scaler.update()
        assert bool(norm.isfinite()) is (step != 2)
        if step != 2:
            assert 0 < gradients(model).norm().item() <= 0.501
    assert scaler.get_scale() == 2.0**9
    ddp.close()
    found = weights(model)
    assert found.isfinite().all()
    assert not torch.equal(found, before)
    comm.check_consistency(bagua_torch.as_array(found.cpu()))


# The backend


def the_backend_makes_every_call(comm, device):
    rank, size = comm.rank, comm.size

    def of(rank, n=6, dtype=torch.float32):
        return (torch.arange(n, device=device) + 10 * rank).to(dtype)

    everyone = [of(each) for each in range(size)]
    total, whole = sum(everyone), torch.cat(everyone)
    group = dist.new_group(backend=f"{device}:bagua")
    for calls in (None, group):
        for dtype in (torch.float32, torch.bfloat16, torch.int64):
            x = of(rank, dtype=dtype)
            dist.all_reduce(x, group=calls)
            assert torch.equal(x, total.to(dtype)), dtype
        x, out, part = of(rank), torch.empty(6 * size, device=device), torch.empty(3, device=device)
        mean = x.clone()
        work = dist.all_reduce(mean, dist.ReduceOp.AVG, group=calls, async_op=True)
        dist.all_gather_into_tensor(out, x, group=calls)
        dist.reduce_scatter_tensor(part, x, group=calls)
        work.wait()
        assert torch.equal(mean, total / size)
        assert torch.equal(out, whole)
        assert torch.equal(part, total[3 * rank : 3 * rank + 3])
        dist.barrier(group=calls)
    swapped, uneven, splits = torch.empty_like(x), torch.empty_like(x), [[4, 2], [2, 4]][rank]
    dist.all_to_all_single(swapped, x)
    assert torch.equal(swapped, torch.cat([each[3 * rank : 3 * rank + 3] for each in everyone]))
    dist.all_to_all_single(uneven, x, splits, splits)
    assert uneven.tolist() == ([0, 1, 2, 3, 10, 11] if rank == 0 else [4, 5, 12, 13, 14, 15])
    lists = [torch.empty_like(x) for _ in range(size)]
    dist.all_gather(lists, x)
    assert torch.equal(torch.cat(lists), whole)
    copy = x.clone()
    dist.broadcast(copy, src=1)
    assert torch.equal(copy, everyone[1])
    received = torch.empty_like(x)
    ops = [dist.P2POp(dist.isend, x, 1 - rank), dist.P2POp(dist.irecv, received, 1 - rank)]
    for each in dist.batch_isend_irecv(ops):
        each.wait()
    assert torch.equal(received, everyone[1 - rank])
    if rank == 0:
        dist.send(total, 1)
    else:
        dist.recv(received, 0)
        assert torch.equal(received, total)
    stream = torch.cuda.Stream() if device == "cuda" else None
    with torch.cuda.stream(stream):  # does nothing without a stream
        if stream is not None:
            torch.cuda._sleep(LATE)
        late = of(rank)
        work = dist.all_reduce(late, async_op=True)
        found = [work.get_future().then(lambda future: future.value()[0] * 2).wait()]
        work.wait()
        found.append(late + 1)
    wait(device)
    assert torch.equal(found[0], 2 * total)
    assert torch.equal(found[1], total + 1)


def pytorchs_own_wrappers_train_over_the_backend_as_on_the_host(comm, device):
    eight_bits = dist.new_group(pg_options=bagua_torch.BackendOptions(average=EIGHT_BITS))

    def replicated(device, group):
        model = make_model().to(device)
        ddp = nn.parallel.DistributedDataParallel(model, process_group=group, bucket_cap_mb=0.0005)
        run_steps(comm, ddp, sgd(model.parameters()), device, 3)
        return weights(model)

    def shared(device):
        model = sharded(device, 2)
        optimizer = sgd(model.parameters())
        run_steps(comm, model, optimizer, device, 3)
        train_step(model, optimizer, batch(comm.rank, 3).to(device))
        nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        whole = torch.cat([p.full_tensor().detach().reshape(-1) for p in model.parameters()])
        comm.check_consistency(bagua_torch.as_array(whole.cpu()))
        return torch.cat([whole, shards(p.grad for p in model.parameters())])

    assert_as_on_the_host(replicated, device, None, exact=True)
    assert_as_on_the_host(replicated, device, eight_bits)
    assert_as_on_the_host(shared, device, exact=True)


# CUDA graphs


def calls_that_pytorch_has_captured_give_the_bytes_of_eager_ones(comm, device):
    size = 20_001  # half of it, in one block, takes two passes
    sparse = TopK(bits=2).bind(comm)
    averages = [lambda x, out: sparse(out.copy_(x))]
    for codec in (MinMaxUInt8(), MinMaxUInt8(None), MinMaxUInt8.bagua(), Int4()):
        averages.append(functools.partial(quantized_allreduce, comm, codec=codec, op="avg"))
    for average in averages:
        x, out = torch.zeros(size, device=device), torch.zeros(size, device=device)

        def give(seed, x=x):
            x.copy_(torch.randn(size, generator=torch.Generator().manual_seed(10 * seed + comm.rank)))

        def call(x=x, out=out, average=average):
            with bagua_torch.torch_stream(x.device):
                average(x, out=out)

        expected = []
        for seed in range(3):
            give(seed)
            call()
            expected.append(out.cpu())
        comm.transports[0].barrier()
        replay = call
        if device == "cuda":
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):  # in global mode, which forbids all threads to allocate
                call()
            replay = graph.replay
        for seed, again in ((1, replay), (2, replay), (0, call), (1, replay)):
            give(seed)
            out.zero_()
            again()
            assert torch.equal(out.cpu(), expected[seed]), (average, seed)
        wait(device)


BODIES = [
    every_algorithm_trains_as_on_the_host,
    a_sharded_model_trains_as_on_the_host,
    equal_gradients_have_the_bits_of_the_host,
    a_sharded_model_in_bfloat16_trains_as_on_the_host,
    a_sharded_step_waits_for_nothing,
    exchanges_of_a_sharded_model_are_in_the_trace,
    muon_trains_as_on_the_host,
    a_grad_scaler_leaves_out_the_same_steps_on_all_ranks,
    replicas_average_and_train_locally_as_on_the_host,
    the_backend_makes_every_call,
    pytorchs_own_wrappers_train_over_the_backend_as_on_the_host,
    calls_that_pytorch_has_captured_give_the_bytes_of_eager_ones,
]
