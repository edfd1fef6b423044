"""Cases of sharded training, which ranks run one after the other: `python fsdp_training.py NAME...`.

Exact training is compared with training on one rank that computes the gradients of all ranks, without sharding.
"""

import concurrent.futures
import copy
import shutil
import sys
import tempfile
import threading
import warnings
from contextlib import nullcontext, suppress
from functools import partial
from tempfile import TemporaryDirectory

import numpy as np
import pytest
import torch
from torch import distributed as dist
from torch import nn
from torch.distributed import checkpoint as dcp
from torch.distributed._composable.replicate_with_fsdp import replicate
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import distribute_tensor
from torch.nn.functional import mse_loss
from torch.utils.checkpoint import checkpoint

import bagua_torch
import bagua_torch.fsdp
from bagua_comm import (
    ArrayError,
    BaguaError,
    DiLoCo,
    ErrorFeedback,
    Exact,
    Float16,
    Hierarchical,
    MinMaxUInt8,
    Quantized,
    Reproducible,
    SparseLoCo,
    StreamingDiLoCo,
    UnsupportedError,
    elastic,
)
from bagua_comm.comm.weights import agree
from bagua_comm.testing import run_ranks
from bagua_torch.errors import MismatchError

EIGHT_BITS = Quantized(min_bytes=0)
WIDTH, INPUTS, OUTPUTS = 13, 7, 5


class Block(nn.Module):
    """Its first dimensions do not divide by any number of ranks."""

    recompute = False

    def __init__(self):
        super().__init__()
        self.norm, self.wide, self.narrow = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 41), nn.Linear(41, WIDTH)

    def body(self, x):
        return x + self.narrow(torch.tanh(self.wide(self.norm(x))))

    def forward(self, x):
        return checkpoint(self.body, x, use_reentrant=False) if self.recompute else self.body(x)


class Net(nn.Module):
    """Two blocks between two layers; with `tied`, one matrix serves at both ends; `unused` is never called."""

    def __init__(self, tied=False, unused=False, block=Block):
        super().__init__()
        self.first, self.blocks = nn.Linear(INPUTS, WIDTH), nn.ModuleList([block(), block()])
        self.last = nn.Linear(WIDTH, INPUTS if tied else OUTPUTS)
        if tied:
            self.last.weight = nn.Parameter(self.first.weight.detach().t().contiguous())
            self.back = nn.Linear(INPUTS, WIDTH)
            self.back.weight = self.first.weight
        if unused:
            self.unused = nn.Linear(3, 3)
        self.tied = tied

    def forward(self, x):
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        x = self.last(x)
        return self.last(self.back(x))[..., :OUTPUTS] if self.tied else x


def make(**settings):
    torch.manual_seed(0)
    return Net(**settings)


def batch(step, rank, dtype=torch.float32):
    generator = torch.Generator().manual_seed(1000 * step + rank)
    return tuple(torch.randn(8, n, generator=generator).to(dtype) for n in (INPUTS, OUTPUTS))


def gradients(model, step, rank, dtype=torch.float32):
    """The gradient of each parameter on a rank, without sharding, computed in `dtype`; None without one."""
    model = copy.deepcopy(model).to(dtype)
    x, y = batch(step, rank, dtype)
    mse_loss(model(x), y).backward()
    return [p.grad for p in model.parameters()]


def mean(tensors, divisor=None):
    """The sum in float32 in the order of the list, divided."""
    if tensors[0] is None:
        return None
    total = tensors[0].float().numpy().copy()
    for tensor in tensors[1:]:
        total = total + tensor.float().numpy()
    return torch.from_numpy(total / np.float32(divisor or len(tensors))).to(tensors[0].dtype)


def reference(model, steps, ranks, grads=gradients, average=mean):
    """Train without sharding; `grads(model, step, rank)` are those of a rank."""
    optimizer = torch.optim.Adam([p for p in model.parameters() if p.requires_grad], 1e-2)
    for step in range(steps):
        found = [grads(model, step, rank) for rank in range(ranks)]
        for parameter, *each in zip(model.parameters(), *found, strict=True):
            found_mean = average(each)
            parameter.grad = None if found_mean is None else found_mean.to(parameter.dtype)
        optimizer.step()
    return model


def shard(model, **settings):
    for block in model.blocks:
        fully_shard(block, **settings)
    return fully_shard(model, **settings)


def run_steps(model, optimizer, rank, numbers, dtype=torch.float32):
    """Train in the steps of these numbers; returns the last loss."""
    for step in numbers:
        x, y = batch(step, rank, dtype)
        optimizer.zero_grad()
        loss = mse_loss(model(x), y)
        loss.backward()
        optimizer.step()
    return loss.item()


def train(model, steps, rank, dtype=torch.float32, first=0):
    optimizer = torch.optim.Adam(model.parameters(), 1e-2)
    return run_steps(model, optimizer, rank, range(first, first + steps), dtype)


def whole(model):
    return [p.full_tensor().detach().clone() for p in model.parameters()]  # on one rank it is the shard


def assert_equal(model, expected):
    for (name, parameter), wanted in zip(model.named_parameters(), expected.parameters(), strict=True):
        found = parameter.full_tensor()
        assert torch.equal(found, wanted), (name, (found - wanted).abs().max())


def distance(model, expected):
    """The relative L2 distance of the parameters."""
    pairs = zip(whole(model), (p.detach() for p in expected.parameters()), strict=True)
    lost, norm = map(sum, zip(*((((a - b) ** 2).sum(), (b**2).sum()) for a, b in pairs), strict=True))
    return float((lost / norm).sqrt())


CASES = {}


def case(function):
    CASES[function.__name__] = function
    return function


# Exact training


@case
def exact(comm):
    for settings in ({}, {"reshard_after_forward": False}):
        model = shard(make(), **settings)
        with bagua_torch.fsdp.attach(model, Exact()) as handle:
            train(model, 4, comm.rank)
            called = handle.counters.by_operation
            assert set(called) == ({"allgather", "reduce_scatter"} if comm.size > 1 else set())
        assert_equal(model, reference(make(), 4, comm.size))
        train(model, 1, comm.rank, first=4)  # by PyTorch again
        assert all(each.calls == 12 for name, each in called.items() if name == "reduce_scatter")


@case
def flat_and_grouped(comm):
    model = make()
    fully_shard([*model.blocks])
    fully_shard(model)
    bagua_torch.fsdp.attach(model, Exact())
    train(model, 3, comm.rank)
    assert_equal(model, reference(make(), 3, comm.size))
    model = fully_shard(make())
    bagua_torch.fsdp.attach(model, Exact())
    train(model, 3, comm.rank)
    assert_equal(model, reference(make(), 3, comm.size))


@case
def reshard_to_fewer_ranks(comm):
    if comm.size != 4:
        return
    for method in (Exact(), EIGHT_BITS):
        model = shard(make(), reshard_after_forward=2)
        bagua_torch.fsdp.attach(model, Exact(), method)
        train(model, 3, comm.rank)
        if method == Exact():
            assert_equal(model, reference(make(), 3, comm.size))
        else:
            assert distance(model, reference(make(), 3, comm.size)) < 0.05


@case
def mixed_precision(comm):
    half = torch.bfloat16
    for reduced in (torch.float32, half):
        model = shard(make(), mp_policy=MixedPrecisionPolicy(param_dtype=half, reduce_dtype=reduced))
        bagua_torch.fsdp.attach(model, Exact())

        def grads(*of, reduced=reduced):
            return [grad.to(reduced) for grad in gradients(*of, half)]

        train(model, 3, comm.rank, half)
        assert_equal(model, reference(make(), 3, comm.size, grads))


@case
def one_module_in_bfloat16(comm):
    half = torch.bfloat16
    model = fully_shard(make(), mp_policy=MixedPrecisionPolicy(param_dtype=half, reduce_dtype=half))
    bagua_torch.fsdp.attach(model, Exact())
    train(model, 3, comm.rank, half)
    assert_equal(model, reference(make(), 3, comm.size, lambda *of: gradients(*of, half)))


@case
def float16_with_pre_and_post_division(comm):
    half = torch.float16
    for method in (Exact(), EIGHT_BITS):
        model = fully_shard(make(), mp_policy=MixedPrecisionPolicy(param_dtype=half, reduce_dtype=half))
        bagua_torch.fsdp.attach(model, method)
        train(model, 3, comm.rank, half)
        assert distance(model, reference(make(), 3, comm.size, lambda *of: gradients(*of, half))) < 0.1


@case
def divide_factor(comm):
    for forced in (False, True) if comm.size > 1 else (False,):  # PyTorch then divides twice on one rank
        model = shard(make())
        for each in (model, *model.blocks):
            each.set_gradient_divide_factor(3.0)
            each.set_force_sum_reduction_for_comms(forced)
        bagua_torch.fsdp.attach(model, Exact())
        train(model, 3, comm.rank)
        assert_equal(model, reference(make(), 3, comm.size, average=lambda each: mean(each, 3.0)))


def train_by_two_passes(model, rank, *, exchange_last):
    """Train with two backward passes a step, of which both are exchanged, or their sum with the last one."""
    optimizer = torch.optim.Adam(model.parameters(), 1e-2)
    for step in range(3):
        optimizer.zero_grad()
        for micro in range(2):
            if exchange_last:
                model.set_requires_gradient_sync(micro == 1)
            x, y = batch(10 * step + micro, rank)
            mse_loss(model(x), y).backward()
        optimizer.step()


@case
def accumulation_before_the_exchange(comm):
    model = shard(make())
    bagua_torch.fsdp.attach(model, Exact())
    train_by_two_passes(model, comm.rank, exchange_last=True)

    def grads(model, step, rank):
        both = (gradients(model, 10 * step + micro, rank) for micro in range(2))
        return [a + b for a, b in zip(*both, strict=True)]

    assert_equal(model, reference(make(), 3, comm.size, grads))


@case
def accumulation_of_reduced_gradients(comm):
    model = shard(make())
    bagua_torch.fsdp.attach(model, Exact())
    train_by_two_passes(model, comm.rank, exchange_last=False)

    def grads(model, step, rank):
        return [*zip(*(gradients(model, 10 * step + micro, rank) for micro in range(2)), strict=True)]

    def average(each):
        return mean([first for first, _ in each]) + mean([second for _, second in each])

    assert_equal(model, reference(make(), 3, comm.size, grads, average))


@case
def frozen_and_unused(comm):
    def frozen():
        model = make(unused=True)
        model.blocks[0].requires_grad_(False)
        model.blocks[1].wide.weight.requires_grad_(False)
        return model

    for method in (Exact(), EIGHT_BITS, ErrorFeedback()):
        model = shard(frozen())
        bagua_torch.fsdp.attach(model, method)
        train(model, 3, comm.rank)
        expected = reference(frozen(), 3, comm.size)
        if method == Exact():
            assert_equal(model, expected)
            assert model.unused.weight.grad is None
        else:
            assert 0 <= distance(model, expected) < 0.05
            fed = comm.size > 1 and isinstance(method, ErrorFeedback)
            assert (model.unused.weight.grad is not None) == fed


@case
def unfrozen(comm):
    model = make()
    model.blocks[0].wide.requires_grad_(False)
    shard(model)
    handle = bagua_torch.fsdp.attach(model, ErrorFeedback())
    train(model, 2, comm.rank)
    model.blocks[0].wide.requires_grad_(True)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        train(model, 2, comm.rank, first=2)
    texts = [str(each.message) for each in caught if "restarts at zero" in str(each.message)]
    assert [("blocks.0" in text) for text in texts] == ([True] if comm.size > 1 else [])
    model.blocks[0].requires_grad_(False)
    (residuals,) = handle.state_dict().values()
    assert residuals.keys() == ({"", "blocks.1"} if comm.size > 1 else set())
    handle.load_state_dict(handle.state_dict())
    handle.close()


@case
def tied(comm):
    model = shard(make(tied=True))
    bagua_torch.fsdp.attach(model, Exact())
    train(model, 3, comm.rank)
    assert_equal(model, reference(make(tied=True), 3, comm.size))


@case
def meta_device(comm):
    with torch.device("meta"):
        model = Net()
    shard(model)
    bagua_torch.fsdp.attach(model, Exact(), Exact())
    model.to_empty(device="cpu")
    for (_, parameter), wanted in zip(model.named_parameters(), make().parameters(), strict=True):
        placed = distribute_tensor(wanted.detach(), parameter.device_mesh, parameter.placements)
        with torch.no_grad():
            parameter.copy_(placed)
    train(model, 3, comm.rank)
    assert_equal(model, reference(make(), 3, comm.size))


@case
def activation_checkpointing(comm):
    model = make()
    for block in model.blocks:
        block.recompute = True
    shard(model)
    bagua_torch.fsdp.attach(model, Exact())
    train(model, 3, comm.rank)
    assert_equal(model, reference(make(), 3, comm.size))


@case
def weights_of_ranks(comm):
    tokens = [3, 7, 0, 513][: comm.size]

    def weighted(method, mesh=None, **settings):
        model = shard(make(), mesh=mesh)
        optimizer = torch.optim.Adam(model.parameters(), 1e-2)
        with bagua_torch.fsdp.attach(model, method, **settings) as handle:
            for step in range(3):
                x, y = batch(step, comm.rank)
                optimizer.zero_grad()
                handle.weight = tokens[comm.rank]
                (mse_loss(model(x), y) * (1 if tokens[comm.rank] else torch.nan)).backward()
                assert handle.weight is None or comm.size == 1
                optimizer.step()
        return model

    def joined(each):
        return (sum(n * g.double() for n, g in zip(tokens, each, strict=True)) / sum(tokens)).float()

    expected = reference(make(), 3, comm.size, average=joined)
    for method, error in ((Exact(), 1e-5), (Reproducible(), 1e-5), (EIGHT_BITS, 0.03), (Hierarchical(), 1e-5)):
        one, other = (weighted(method, overlap=overlap) for overlap in (True, False))
        assert distance(one, expected) < error, method
        assert all(map(torch.equal, whole(one), whole(other)))
    for replicas in (None, Exact(), EIGHT_BITS):
        on_mesh = weighted(Exact(), mesh_of_replicas(comm), replicas=replicas)
        assert distance(on_mesh, expected) < (0.03 if replicas == EIGHT_BITS else 1e-5), replicas
    if comm.size == 1:
        return
    model, (x, y) = shard(make()), batch(0, 0)
    with suppress(BaguaError), bagua_torch.fsdp.attach(model, Exact()) as handle:
        handle.weight = -comm.rank
        refused(comm, ArrayError, "rank 1 has -1.0, expected", mse_loss(model(x), y).backward)
        raise BaguaError
    model = shard(make())
    optimizer = torch.optim.SGD(model.parameters(), 1e-2)
    with suppress(BaguaError), bagua_torch.fsdp.attach(model, Exact()) as handle:
        handle.weight = 3
        mse_loss(model(x), y).backward()
        if comm.rank == 1:
            handle.weight = 4
            with pytest.raises(ArrayError, match="it was set after the backward pass"):
                optimizer.step()
        optimizer.step()
        handle.weight = 3
        text = "rank 1 has set one after its backward pass had begun"
        refused(comm, ArrayError, text, mse_loss(model(x), y).backward)
        raise BaguaError


@case
def clipping(comm):
    model, plain = shard(make()), make()
    bagua_torch.fsdp.attach(model, Exact())
    x, y = batch(0, comm.rank)
    mse_loss(model(x), y).backward()
    norm = nn.utils.clip_grad_norm_(model.parameters(), 0.1).full_tensor()
    for parameter, *each in zip(
        plain.parameters(), *(gradients(plain, 0, rank) for rank in range(comm.size)), strict=True
    ):
        parameter.grad = mean(each)
    assert torch.allclose(norm, nn.utils.clip_grad_norm_(plain.parameters(), 0.1))
    for a, b in zip(model.parameters(), plain.parameters(), strict=True):
        assert torch.allclose(a.grad.full_tensor(), b.grad)


@case
def replicated_shards(comm):
    """A mesh of two dimensions: gradients are reduced over two ranks by us, then over the others by PyTorch."""
    if comm.size != 4:
        return
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicas", "shards"))
    model = shard(make(), mesh=mesh)
    with bagua_torch.fsdp.attach(model, Exact(), EIGHT_BITS) as handle:
        train(model, 3, comm.rank)
        assert handle.counters["quantized_allgather"].wire_bytes < handle.counters["reduce_scatter"].wire_bytes
    assert distance(model, reference(make(), 3, comm.size)) < 0.05


def mesh_of_replicas(comm):
    """Two shards on an even number of ranks, else shards on all."""
    shards = 2 if comm.size % 2 == 0 else comm.size
    return init_device_mesh("cpu", (comm.size // shards, shards), mesh_dim_names=("replicas", "shards"))


@case
def replicas_by_averages(comm):
    expected, mesh = reference(make(), 3, comm.size), mesh_of_replicas(comm)
    for method, limit in [
        (Exact(), 1e-5),
        (Reproducible(), 1e-5),
        (EIGHT_BITS, 0.1),
        (ErrorFeedback(), 0.1),
        (Hierarchical(), 1e-5),
    ]:
        model = shard(make(), mesh=mesh)
        with bagua_torch.fsdp.attach(model, Exact(), replicas=method) as handle:
            train(model, 3, comm.rank)
            if mesh.size(0) > 1 and method == EIGHT_BITS:
                assert "quantized_allreduce" in handle.counters.by_operation
        assert distance(model, expected) < limit, method
        for parameter in model.parameters():
            comm.check_consistency(parameter.full_tensor().detach().clone())
        train(model, 1, comm.rank, first=3)  # by PyTorch again


@case
def replicas_as_pytorch_averages_them(comm):
    """As PyTorch's own all-reduce of two replicas, in each of its settings."""
    if comm.size != 4:
        return
    mesh, half = mesh_of_replicas(comm), torch.bfloat16

    def trained(replicas, policy=None, factor=None, forced=False, micro=1, dtype=torch.float32, **settings):
        if policy is not None:
            settings["mp_policy"] = policy
        model = shard(make(), mesh=mesh, **settings)
        for each in (model, *model.blocks):
            if factor:
                each.set_gradient_divide_factor(factor)
            each.set_force_sum_reduction_for_comms(forced)
        bagua_torch.fsdp.attach(model, Exact(), replicas=replicas)
        optimizer = torch.optim.Adam(model.parameters(), 1e-2)
        for step in range(2):
            optimizer.zero_grad()
            for i in range(micro):
                model.set_requires_all_reduce(i == micro - 1)
                x, y = batch(10 * step + i, comm.rank, dtype)
                mse_loss(model(x), y).backward()
            optimizer.step()
        return whole(model)

    for settings in [
        {},
        {"micro": 2},
        {"factor": 3.0},
        {"forced": True, "reshard_after_forward": False},
        {"policy": MixedPrecisionPolicy(half, torch.float32), "dtype": half},
        {"policy": MixedPrecisionPolicy(torch.float16, torch.float16), "dtype": torch.float16},
    ]:
        for a, b in zip(trained(None, **settings), trained(Exact(), **settings), strict=True):
            assert torch.allclose(a, b, rtol=1e-3, atol=1e-5), (settings, (a - b).abs().max())


@case
def replicas_start_equal(comm):
    mesh = mesh_of_replicas(comm)
    model = make()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(mesh.get_local_rank(0))
    shard(model, mesh=mesh)
    bagua_torch.fsdp.attach(model, Exact(), replicas=Exact())
    train(model, 3, comm.rank)
    assert distance(model, reference(make(), 3, comm.size)) < 1e-5


@case
def replicas_of_whole_models(comm):
    """A mesh with one shard: what `replicate` does, by any average."""
    mesh = init_device_mesh("cpu", (comm.size, 1), mesh_dim_names=("replicas", "shards"))
    model = shard(make(), mesh=mesh)
    with bagua_torch.fsdp.attach(model, replicas=EIGHT_BITS) as handle:
        train(model, 3, comm.rank)
        assert set(handle.counters.by_operation) <= {"broadcast", "quantized_allreduce"}
    assert distance(model, reference(make(), 3, comm.size)) < 0.1


@case
def distributed_checkpoint(comm):
    """PyTorch's checkpoints with the residuals of the handle: training continues to the same bits."""
    mesh = mesh_of_replicas(comm)
    path = comm.broadcast_object(tempfile.mkdtemp() if comm.rank == 0 else None, root=0)

    def start():
        model = shard(make(), mesh=mesh)
        handle = bagua_torch.fsdp.attach(model, ErrorFeedback(), EIGHT_BITS, replicas=ErrorFeedback())
        return model, handle, torch.optim.Adam(model.parameters(), 1e-2)

    def state_of(model, handle, optimizer):
        weights, moments = get_state_dict(model, optimizer)
        return {"model": weights, "optimizer": moments, f"residuals-{comm.rank}": handle.state_dict()}

    model, handle, optimizer = start()
    run_steps(model, optimizer, comm.rank, range(3))
    dcp.save(state_of(model, handle, optimizer), checkpoint_id=path)
    run_steps(model, optimizer, comm.rank, range(3, 6))
    expected = whole(model)
    handle.close()

    model, handle, optimizer = start()
    run_steps(model, optimizer, comm.rank, [7])  # so that there are residuals to load into
    state = state_of(model, handle, optimizer)
    dcp.load(state, checkpoint_id=path)
    set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
    handle.load_state_dict(state[f"residuals-{comm.rank}"])
    run_steps(model, optimizer, comm.rank, range(3, 6))
    for a, b in zip(expected, whole(model), strict=True):
        assert torch.equal(a, b)
    comm.barrier()
    if comm.rank == 0:
        shutil.rmtree(path)


@case
def state_of_another_mesh_is_refused(comm):
    """A residual belongs to a shard: rank 1 of four has shard 1 of one mesh, and shard 0 of the other."""
    if comm.size != 4:
        return

    def attached(ranks):
        mesh = DeviceMesh("cpu", ranks, mesh_dim_names=("replicas", "shards"))
        model = shard(make(), mesh=mesh)
        return model, bagua_torch.fsdp.attach(model, ErrorFeedback(), replicas=Exact())

    (_, handle), (model, other) = attached([[0, 1], [2, 3]]), attached([[0, 2], [1, 3]])
    refused(comm, ArrayError, "residuals belong to a rank", other.load_state_dict, handle.state_dict())
    model.set_all_reduce_hook(lambda gradients: None)
    refused(comm, ArrayError, "set_all_reduce_hook was called", model, batch(0, comm.rank)[0])


@case
def a_group_of_its_own_for_reductions(comm):
    model = shard(make())
    if not hasattr(model, "set_separate_reduce_scatter_group"):
        return
    bagua_torch.fsdp.attach(model, Exact())
    model.set_separate_reduce_scatter_group(True)
    train(model, 2, comm.rank)
    assert_equal(model, reference(make(), 2, comm.size))


# Fewer bits


@case
def eight_bits(comm):
    exact, plain = shard(make()), reference(make(), 10, comm.size)
    with bagua_torch.fsdp.attach(exact, Exact()) as handle:
        train(exact, 10, comm.rank)
        sent = handle.counters.total()
    model = shard(make())
    with bagua_torch.fsdp.attach(model, EIGHT_BITS, EIGHT_BITS) as handle:
        train(model, 10, comm.rank)
        if comm.size > 1:
            assert set(handle.counters.by_operation) == {"quantized_allgather", "quantized_reduce_scatter"}
            assert handle.counters.total().payload_bytes == sent.payload_bytes
            assert sent.wire_bytes > 3 * handle.counters.total().wire_bytes > 0
        model.unshard()
        for parameter in model.parameters(recurse=False):
            comm.check_consistency(parameter.detach().clone())
        model.blocks[0].unshard()
        for parameter in model.blocks[0].parameters():
            comm.check_consistency(parameter.detach().clone())
        model.blocks[0].reshard()
        model.reshard()
    assert distance(model, plain) < 0.1


@case
def eight_bits_are_those_of_numpy(comm):
    """One step of SGD, against the codec on rows as PyTorch lays out the gradients of one module."""
    if comm.size == 1:
        return
    p, codec, model = comm.size, MinMaxUInt8(), fully_shard(make())
    bagua_torch.fsdp.attach(model, EIGHT_BITS)
    x, y = batch(0, comm.rank)
    mse_loss(model(x), y).backward()
    rows = [[] for _ in range(p)]
    for rank in range(p):
        chunks = [[] for _ in range(p)]
        for grad in gradients(make(), 0, rank):
            length = -(-grad.shape[0] // p)
            for i in range(p):
                part = grad[i * length : (i + 1) * length]
                padded = torch.zeros(length, *grad.shape[1:])
                padded[: part.shape[0]] = part
                chunks[i].append(padded.reshape(-1).numpy())
        for i in range(p):
            flat = np.concatenate(chunks[i])[None]
            rows[i].append(codec.decode(codec.encode(flat), np.empty_like(flat))[0])
    total = rows[comm.rank][0]
    for row in rows[comm.rank][1:]:
        total = total + row
    total, at = torch.from_numpy(total / np.float32(p)), 0
    for parameter in model.parameters():
        local = parameter.grad.to_local()
        assert torch.equal(local.reshape(-1), total[at : at + local.numel()])
        at += -(-parameter.shape[0] // p) * (parameter.numel() // parameter.shape[0])
    assert at == total.numel()


@case
def small_modules_are_exact(comm):
    model = shard(make())
    with bagua_torch.fsdp.attach(model, Quantized(min_bytes=1 << 20), Quantized(min_bytes=1 << 20)):
        train(model, 3, comm.rank)
    assert_equal(model, reference(make(), 3, comm.size))


@case
def other_averages(comm):
    expected = reference(make(), 3, comm.size)
    both = Hierarchical(EIGHT_BITS, inside=EIGHT_BITS)
    for method, gather, limit in (
        (Hierarchical(), Hierarchical(), 0.01),
        (Hierarchical(EIGHT_BITS), Exact(), 0.1),
        (both, both, 0.1),
        (Reproducible(), Exact(), 1e-5),
    ):
        model = shard(make())
        with bagua_torch.fsdp.attach(model, method, gather):
            train(model, 3, comm.rank)
            total = model(batch(0, 0)[0]).sum()
            assert len({*comm.allgather_object(total.item())}) == 1
            total.backward()
        assert distance(model, expected) < limit


def reproducible_mean(tensors, weights=None):
    """The mean of microbatches, on one rank without shards."""

    def body(alone):
        average, last = Reproducible(addends=len(tensors)).bind(alone), tensors[-1].numpy().copy()
        for tensor in tensors[:-1]:
            average.hold(tensor.numpy().copy())
        if weights is None:
            return average(last)
        weighting = agree(alone, weights, [len(weights)])
        average.weigh_held(weighting.factors[:-1])
        weighting.average(last, average)
        return last

    return None if tensors[0] is None else torch.from_numpy(run_ranks(1, body)[0])


def train_in_microbatches(model, steps, microbatches, handle=None, weights=None):
    optimizer = torch.optim.Adam(model.parameters(), 1e-2)
    for step in range(steps):
        optimizer.zero_grad()
        for index in microbatches:
            x, y = batch(step, index)
            if handle is not None:
                handle.weight = weights[index]
            mse_loss(model(x), y).backward()
        optimizer.step()


@case
def reproducible_on_any_number_of_ranks(comm):
    """The same bits on each number of ranks that divides 12, and without shards."""
    addends, share = 12, 12 // comm.size
    model = shard(make())
    with bagua_torch.fsdp.attach(model, Reproducible(addends=addends)) as handle:
        train_in_microbatches(model, 2, range(comm.rank * share, (comm.rank + 1) * share))
        reduced = handle.counters.by_operation
    assert_equal(model, reference(make(), 2, addends, average=reproducible_mean))
    assert "reproducible_allreduce" not in reduced
    if comm.size > 1:
        assert reduced["reduce_scatter"].calls == 2 * 3  # one for each module and step
    model, weights = shard(make()), [1, 7, 0, 513, 2.5, 3, 0, 40, 1, 1, 9, 8]
    with bagua_torch.fsdp.attach(model, Reproducible(addends=addends)) as handle:
        train_in_microbatches(model, 2, range(comm.rank * share, (comm.rank + 1) * share), handle, weights)
    assert_equal(model, reference(make(), 2, addends, average=partial(reproducible_mean, weights=weights)))
    model = shard(make())
    with bagua_torch.fsdp.attach(model, Reproducible(addends=2 * comm.size)):
        train(model, 1, comm.rank)
        refused(comm, ArrayError, "after 1 of the 2 backward passes", train, model, 1, comm.rank)
    model = shard(make())
    with bagua_torch.fsdp.attach(model, Reproducible(addends=2 * comm.size)):
        x, _ = batch(0, comm.rank)
        model(x).square().mean().backward()
        model.zero_grad()
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            model(x).square().mean().backward()
        is_warned = any("of 1 of the 2 backward passes" in str(each.message) for each in caught)
        assert is_warned
    model = shard(make())
    for number, text in ((comm.size + 1, "expected a multiple"), (comm.size - 1, "expected")):
        if comm.size > 1:
            refused(comm, ArrayError, text, bagua_torch.fsdp.attach, model, Reproducible(addends=number))


@case
def error_feedback_continues_from_its_state(comm):
    def start():
        model = shard(make())
        return model, torch.optim.SGD(model.parameters(), 0.1)

    model, optimizer = start()
    handle = bagua_torch.fsdp.attach(model, ErrorFeedback())
    run_steps(model, optimizer, comm.rank, range(3))
    state, weights = copy.deepcopy(handle.state_dict()), whole(model)
    key = f"residuals of rank {comm.rank} of {comm.size}"
    assert set(state[key]) == ({"", "blocks.0", "blocks.1"} if comm.size > 1 else set())
    run_steps(model, optimizer, comm.rank, range(3, 5))
    expected = whole(model)
    handle.close()

    model, optimizer = start()
    handle = bagua_torch.fsdp.attach(model, ErrorFeedback())
    for parameter, weight in zip(model.parameters(), weights, strict=True):
        placed = distribute_tensor(weight, parameter.device_mesh, parameter.placements)
        with torch.no_grad():
            parameter.copy_(placed)
    handle.load_state_dict(state)
    run_steps(model, optimizer, comm.rank, range(3, 5))
    for a, b in zip(expected, whole(model), strict=True):
        assert torch.equal(a, b)

    refused(
        comm, ArrayError, "residuals belong to a rank", handle.load_state_dict, {"residuals of rank 0 of 17": {}}
    )
    refused(comm, ArrayError, "expected a result of state_dict()", handle.load_state_dict, None)
    refused(comm, ArrayError, "expected a result of state_dict()", handle.load_state_dict, {key: None})
    for wrong, text in [
        ({"blocks.7": torch.zeros(3)}, "for module 'blocks.7', expected none"),
        ({"blocks.1": 3}, "has 3 for module 'blocks.1'"),
        ({"blocks.1": torch.zeros(3)}, "(3,) of torch.float32 for module 'blocks.1'"),
        (
            {"blocks.1": torch.zeros(state[key].get("blocks.1", torch.zeros(1)).shape).double()},
            "of torch.float64",
        ),
    ]:
        one_is_wrong = {key: state[key] | wrong} if comm.rank == 0 else state
        refused(comm, ArrayError, text, handle.load_state_dict, one_is_wrong)
    if comm.size > 1:
        lacking = {key: {}} if comm.rank == 1 else state
        refused(comm, ArrayError, "has no residual for module", handle.load_state_dict, lacking)
        handle.close()
        handle = bagua_torch.fsdp.attach(model, EIGHT_BITS)
        refused(comm, ArrayError, "expected none; it is of another model", handle.load_state_dict, state)
    handle.close()


@case
def residuals_in_a_distributed_checkpoint(comm):
    """`torch.distributed.checkpoint` saves and loads the handle as it does the model."""
    model, method = shard(make()), ErrorFeedback(Quantized(), 0.8, 7, MinMaxUInt8())
    with (
        bagua_torch.fsdp.attach(model, method) as handle,
        TemporaryDirectory(ignore_cleanup_errors=True) as folder,
    ):
        folder = comm.allgather_object(folder)[0]
        train(model, 3, comm.rank)
        key, counts = f"residuals of rank {comm.rank} of {comm.size}", "means since the last reset"
        before = copy.deepcopy(handle.state_dict())
        dcp.save({"model": model.state_dict(), "fsdp": handle}, checkpoint_id=folder)
        handle.close()
        model = shard(make())
        with bagua_torch.fsdp.attach(model, method) as again:
            dcp.load({"model": model.state_dict(), "fsdp": again}, checkpoint_id=folder)
            after = again.state_dict()
            if comm.size > 1:
                count = torch.tensor(comm.rank)
                for wrong, text in [
                    ({}, "has no number of means since the reset for module"),
                    ({"": count.float()}, "means since the reset () of torch.float32 for module '', expected ()"),
                    ({"": 0 * count - 9}, "since the reset of -9 for module '', expected at least 0"),
                    ({"blocks.9": count}, "for module 'blocks.9', expected none"),
                    ({"": count}, "different numbers of means since the reset"),
                ]:
                    bad = {key: after[key], counts: {**after[counts], **wrong} if wrong else {}}
                    refused(comm, ArrayError, text, again.load_state_dict, bad)
        saved, loaded = before[key], after[key]
        assert before.get(counts, {}) == after.get(counts, {}) == {name: torch.tensor(3) for name in saved}
        assert saved.keys() == loaded.keys() == ({"", "blocks.0", "blocks.1"} if comm.size > 1 else set())
        assert all(torch.equal(saved[name], loaded[name]) and saved[name].any() for name in saved)
        comm.barrier()


# Overlap


class Pauses(Block):
    """A block that calls functions in the middle of its passes."""

    in_forward = in_backward = staticmethod(lambda: None)

    def body(self, x):
        self.in_forward()
        return super().body(x + During.apply(x, self))


class During(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, block):
        ctx.block = block
        return x * 0

    @staticmethod
    def backward(ctx, grad):
        ctx.block.in_backward()
        return grad * 0, None


@case
def modules_compute_while_others_are_exchanged(comm):
    """In one step, each exchange ends while a block waits for it; else the step would not end."""
    if comm.size == 1:
        return
    model = make()
    model.blocks = nn.ModuleList([Pauses(), Pauses()])
    first, second = model.blocks
    handle = bagua_torch.fsdp.attach(shard(model), Exact())
    (gathering,), (reducing,) = (each._lanes.values() for each in handle._lanes)

    def hold(lane):
        """Hold up what is exchanged next, until `ends` is called while a block computes."""
        gate = threading.Event()
        lane.submit(gate.wait, 30)
        return gate

    def ends(name, lane, gate):
        with comm.tracer.span(f"during {name}"):
            gate.set()
            futures = [future for future, _ in tuple(lane._pending)]
            assert len(futures) > 1
            assert not concurrent.futures.wait(futures, 30).not_done

    gates = {}
    train(model, 1, comm.rank)  # the forward pass in whose order the next one gathers
    model.first.register_forward_pre_hook(lambda *_: gates.update(second=hold(gathering)))
    first.in_forward = lambda: ends("allgather", gathering, gates["second"])
    second.in_backward = lambda: gates.update(reduction=hold(reducing))
    first.in_backward = lambda: ends("reduce_scatter", reducing, gates["reduction"])
    train(model, 1, comm.rank, first=1)
    spans = comm.tracer.spans()
    for name in ("allgather", "reduce_scatter"):
        (outer,) = [span for span in spans if span.name == f"during {name}"]
        inside = [
            span
            for span in spans
            if span.name == name and outer.start_ns < span.end_ns <= outer.end_ns and span.thread != outer.thread
        ]
        assert inside, name
    handle.close()


@case
def ranks_know_the_times_of_passes_of_all(comm):
    model = shard(make())
    with bagua_torch.fsdp.attach(model, Exact()):
        train(model, 8, comm.rank)
        if comm.size > 1:  # ranks with unequal numbers of passes would wait for each other
            with pytest.raises(ArrayError, match="FSDP2 needs equal numbers"):
                elastic.share(comm.size, comm, shift=True)
    rows = comm.health().rows
    assert len(rows) == (comm.size if comm.size > 1 else 0)  # a rank alone has nothing to compare
    assert all(row.steps >= 3 and row.own_s > 0 for row in rows.values())


@case
def overlap_changes_no_bit(comm):
    def trained(overlap, method, gather, *, micro=1, hooks=False, **settings):
        model = shard(make(unused=True), **settings)
        seen = []
        if hooks:  # called in the backward pass
            for parameter in model.parameters():
                parameter.register_post_accumulate_grad_hook(
                    lambda p: seen.append(p.grad.to_local().sum().item())
                )
        with bagua_torch.fsdp.attach(model, method, gather, overlap=overlap) as handle:
            optimizer = torch.optim.Adam(model.parameters(), 1e-2)
            for step in range(3):
                optimizer.zero_grad(set_to_none=step != 1)
                for i in range(micro):
                    x, y = batch(10 * step + i, comm.rank)
                    mse_loss(model(x), y).backward()
                optimizer.step()
            calls = {name: (each.calls, each.wire_bytes) for name, each in handle.counters.by_operation.items()}
        return whole(model), seen, calls

    half = MixedPrecisionPolicy(torch.bfloat16, torch.bfloat16, cast_forward_inputs=True)
    for method, gather, settings in [
        (Exact(), Exact(), {"micro": 2}),
        (Exact(), Exact(), {"hooks": True}),
        (ErrorFeedback(), EIGHT_BITS, {"reshard_after_forward": False}),
        (EIGHT_BITS, EIGHT_BITS, {"mp_policy": half}),
    ]:
        with_overlap, without = (trained(overlap, method, gather, **settings) for overlap in (True, False))
        assert all(map(torch.equal, with_overlap[0], without[0])), (method, settings)
        assert with_overlap[1:] == without[1:], (method, settings)


class Chooses(Net):
    """Runs the blocks whose numbers are in `chosen`."""

    chosen = (0, 1)

    def forward(self, x):
        x = self.first(x)
        for i in self.chosen:
            x = self.blocks[i](x)
        return self.last(x)


@case
def what_was_gathered_in_vain_is_dropped(comm):
    """A block that a pass skips is gathered again when it runs, with parameters that have changed since."""

    def trained(overlap):
        torch.manual_seed(0)
        model = shard(Chooses())
        optimizer = torch.optim.Adam(model.parameters(), 1e-2)
        handle = bagua_torch.fsdp.attach(model, Exact(), overlap=overlap)
        for step in range(4):
            optimizer.zero_grad()
            x, y = batch(step, comm.rank)
            mse_loss(model(x), y).backward()
            model.chosen = (0,)
            with torch.no_grad():
                model(x)
            model.chosen = (0, 1)
            model.reshard()  # PyTorch keeps the parameters of the root after a forward pass
            groups = [group for each in model.blocks for group in each._get_fsdp_state()._fsdp_param_groups]
            assert not any(group._all_gather_result for group in groups)
            optimizer.step()
        calls = handle.counters["allgather"].calls
        handle.close()
        return whole(model), calls

    (with_overlap, calls), (without, fewer) = trained(True), trained(False)
    assert all(map(torch.equal, with_overlap, without))
    assert calls == fewer + (comm.size > 1)  # only once


@case
def a_forward_pass_that_raises_leaves_nothing_behind(comm):
    model = shard(Chooses())
    if not hasattr(model, "reset_iter_state"):
        return
    handle = bagua_torch.fsdp.attach(model, Exact())
    train(model, 1, comm.rank)
    model.chosen = (0, 7)  # there is no block 7; 1 has been gathered
    try:
        model(batch(0, comm.rank)[0])
    except IndexError:
        model.reset_iter_state()
    model.chosen = (0, 1)
    plain = Chooses()
    with torch.no_grad():
        for parameter, weight in zip(plain.parameters(), whole(model), strict=True):
            parameter.copy_(weight)
    x = batch(1, comm.rank)[0]
    assert torch.equal(model(x), plain(x))
    handle.close()


class Fails(Net):
    """Raises `KeyError` at a place of a pass: in the forward or backward pass of a block, or in a hook."""

    at = ""

    def __init__(self, unused=False):
        super().__init__(unused=unused)
        self.blocks = nn.ModuleList([Pauses(), Pauses()])
        for i, block in enumerate(self.blocks):
            block.in_forward, block.in_backward = (partial(self.reach, f"{each}{i}") for each in ("in", "back"))

    def reach(self, place):
        if place == self.at:
            raise KeyError(place)


def after_a_failure(rank, attach, place, *, micro=1, failing=0, reset=True, to_none=True, rate=0.1, **settings):
    """The gradients of a step after one with large gradients, whose pass number `failing` raises."""
    torch.manual_seed(0)
    model = shard(Fails(), **settings)
    model.blocks[0].wide.weight.register_post_accumulate_grad_hook(lambda p: model.reach("hook"))
    handle = nullcontext() if attach is None else attach(model)
    parameters = list(model.parameters())
    optimizer = torch.optim.SGD(parameters, rate)

    def step(number, scale):
        for i in range(micro):
            model.set_requires_all_reduce(i == micro - 1)
            model.at = place if scale > 1 and i == failing else ""
            x, y = batch(10 * number + i, rank)
            loss = mse_loss(model(x), scale * y)
            model.reach("loss")
            loss.backward()

    with handle:
        step(0, 1)
        optimizer.step()
        optimizer.zero_grad(set_to_none=to_none)
        with suppress(KeyError):
            step(1, 1000)
            raise AssertionError(f"nothing failed at {place}")
        if reset:
            model.reset_iter_state()
        optimizer.zero_grad(set_to_none=to_none)
        step(2, 1)
        return [None if p.grad is None else p.grad.full_tensor() for p in parameters]


@case
def the_step_after_a_pass_that_raised_has_the_gradients_of_pytorch(comm):
    if comm.size == 1 or not hasattr(shard(make()), "reset_iter_state"):
        return

    def assert_alike(place, *averages, limit=1e-5, scale=1, **settings):
        def attach(model):
            return bagua_torch.fsdp.attach(
                model, *averages[:1], Exact(), replicas=averages[1] if averages[1:] else None
            )

        ours = after_a_failure(comm.rank, attach, place, rate=0.1 * scale, **settings)
        wanted = after_a_failure(comm.rank, None, place, **settings)
        for a, b in zip(ours, wanted, strict=True):
            assert (a is None) == (b is None), (place, settings)
            if b is not None:
                lost, norm = (float(torch.linalg.vector_norm(each)) for each in (scale * a - b, b))
                assert lost <= limit * norm + 1e-7, (place, averages, settings, lost, norm)

    zeroed = {"to_none": False}
    assert_alike("in1", Exact())
    assert_alike("loss", Exact(), reset=False)
    assert_alike("back0", Exact(), **zeroed)
    assert_alike("back0", Exact(), reset=False, **zeroed)
    assert_alike("hook", Exact())
    assert_alike("loss", ErrorFeedback(), limit=0.1)
    two = {"scale": 2, "micro": 2, "limit": 1e-4}  # the mean of two passes, where PyTorch's gradients are the sum
    for place, failing, settings in [
        ("loss", 1, zeroed | {"reset": False}),
        ("back0", 0, zeroed),
        ("back0", 1, {}),
    ]:
        assert_alike(place, Reproducible(addends=2 * comm.size), failing=failing, **two, **settings)
    if comm.size == 4:
        mesh = mesh_of_replicas(comm)
        assert_alike("loss", Exact(), Exact(), mesh=mesh, micro=2, failing=1)
        assert_alike("in0", Exact(), ErrorFeedback(), mesh=mesh, micro=2, failing=1, limit=0.1, **zeroed)


@case
def what_a_forward_pass_changes_before_it_is_used_is_used_as_it_is_then(comm):
    """As a teacher that follows its student, here a block that halves the weights of the next one."""

    def outputs(overlap):
        torch.manual_seed(0)
        model = Net()
        model.blocks = nn.ModuleList([Pauses(), Pauses()])
        first, second = shard(model).blocks

        def halve():
            with torch.no_grad():
                for parameter in second.parameters():
                    parameter.mul_(0.5)

        first.in_forward = halve
        with torch.no_grad(), bagua_torch.fsdp.attach(model, Exact(), overlap=overlap):
            return [model(batch(0, comm.rank)[0]) for _ in range(3)]

    assert all(map(torch.equal, outputs(True), outputs(False)))


@case
def pipeline_stages_reduce_outside_of_a_backward_pass(comm):
    """As PipelineStage does: the gradients of all microbatches at once, when their passes have ended."""

    def gradients_of(attach):
        model = shard(make())
        handle = attach(model) if attach else nullcontext()
        with handle:
            model.set_is_last_backward(False)
            model.set_requires_gradient_sync(False)
            model.set_reshard_after_backward(False)
            for i in range(2):
                x, y = batch(i, comm.rank)
                mse_loss(model(x), y).backward()
            model.set_is_last_backward(True)
            model.set_reshard_after_backward(True)
            model.set_requires_gradient_sync(True)
            state = fully_shard.state(model)
            for each in state._state_ctx.all_states:
                for group in each._fsdp_param_groups:
                    group.post_backward()
            state._root_post_backward_final_callback()
            for parameter in model.parameters():
                parameter.grad.mul_(0.5)  # as the stage scales them, at once
            return [parameter.grad.full_tensor() for parameter in model.parameters()]

    for a, b in zip(
        *map(gradients_of, (lambda model: bagua_torch.fsdp.attach(model, Exact()), None)), strict=True
    ):
        assert torch.allclose(a, b)


@case
def an_unused_layer_among_accumulated_gradients_of_another_dtype(comm):
    policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32)
    for method in (ErrorFeedback(), Reproducible()):
        model = shard(make(unused=True), mp_policy=policy)
        with bagua_torch.fsdp.attach(model, method):
            for i in range(2):
                model.set_requires_gradient_sync(i == 1)
                x, y = batch(i, comm.rank, torch.bfloat16)
                mse_loss(model(x), y).backward()
            grad = model.unused.weight.grad
            assert comm.size == 1 or (grad.dtype == torch.float32 and not grad.full_tensor().any())
            assert all(p.grad.to_local().any() for p in model.blocks.parameters() if p.to_local().numel())


@case
def close_gives_back_what_attach_has_set_and_nothing_else(comm):
    mesh = mesh_of_replicas(comm)
    model = shard(make(), mesh=mesh)
    groups = [each._get_fsdp_state()._fsdp_param_groups[0] for each in (model, *model.blocks)]
    before = [{**vars(group)} for group in groups]
    handle = bagua_torch.fsdp.attach(model, Exact(), replicas=ErrorFeedback())
    train(model, 1, comm.rank)
    model.blocks[1].set_all_reduce_hook(print)
    handle.close()
    root, first, last = groups
    assert root.post_forward_mesh_info is None  # since PyTorch has made it the root
    assert first.post_forward_mesh_info is first.mesh_info
    assert last._all_reduce_hook is print
    for group, values in zip(groups, before, strict=True):
        assert group.mesh_info is values["mesh_info"]
        assert {"post_backward", "_reset_iter_state"}.isdisjoint(vars(group))
        for name in ("_all_gather_comm", "_reduce_scatter_comm", "reduce_scatter_unused_params"):
            assert getattr(group, name, None) is values.get(name)


class BreaksOnOne(Float16):
    """A codec that raises where it is `broken`."""

    broken = False

    def steps(self, count, like):
        steps = super().steps(count, like)

        def encode(chunks, wire):
            if self.broken:
                raise ArrayError("this codec is broken")
            steps.encode(chunks, wire)

        return steps._replace(encode=encode)


@case
def an_error_of_an_exchange_is_raised_on_all_ranks(comm):
    if comm.size == 1:
        return
    for method, gather in ((Exact(), Quantized(BreaksOnOne(), 0)), (Quantized(BreaksOnOne(), 0), Exact())):
        model = shard(make())
        with suppress(BaguaError), bagua_torch.fsdp.attach(model, method, gather):
            train(model, 2, comm.rank)
            BreaksOnOne.broken = comm.rank == 1
            try:
                train(model, 1, comm.rank)
            except BaguaError as exc:
                found = type(exc), str(exc)
                raise
            finally:
                BreaksOnOne.broken = False
        rows = comm.allgather_object(found)
        assert rows[1] == (ArrayError, "this codec is broken"), rows
        assert all(issubclass(kind, BaguaError) for kind, _ in rows)
    model = shard(make())
    bagua_torch.fsdp.attach(model, Exact())
    train(model, 2, comm.rank)
    assert_equal(model, reference(make(), 2, comm.size))


# Bad input


def refused(ranks, kind, text, function, *args, **settings):
    """Check that a call raises this error on all ranks, and that the ranks can continue."""
    try:
        function(*args, **settings)
    except kind as exc:
        found = str(exc)
    else:
        found = "nothing"
    for each in ranks.allgather_object(found):
        assert text in each, each


@case
def bad_input(comm):
    attach = bagua_torch.fsdp.attach
    refused(comm, ArrayError, "call torch.distributed.fsdp.fully_shard on it first", attach, make())
    refused(comm, ArrayError, "model is a list, expected a module", attach, [make()])
    model = shard(make())
    refused(comm, ArrayError, "expected an Average", attach, model, Quantized)
    refused(comm, ArrayError, "to gather, expected Exact()", attach, model, gather=ErrorFeedback())
    refused(comm, ArrayError, "inner is ErrorFeedback", attach, model, gather=Hierarchical(ErrorFeedback()))
    refused(comm, ArrayError, "overlap is 1, expected True or False", attach, model, overlap=1)
    refused(comm, ArrayError, "inner is ErrorFeedback", attach, model, Hierarchical(ErrorFeedback()))
    wide = shard(make().double())
    refused(comm, UnsupportedError, "cannot code float64", attach, wide, Quantized())
    refused(comm, UnsupportedError, "cannot code float64", attach, wide, Exact(), Quantized())
    mixed = make()
    mixed.first.to(torch.bfloat16)
    mixed.requires_grad_(False)
    refused(
        comm, UnsupportedError, "several dtypes (torch.bfloat16, torch.float32)",
        attach, fully_shard(mixed), Exact(), Quantized(),
    )  # fmt: skip
    replicated = replicate(make(), mesh=init_device_mesh("cpu", (comm.size,)))
    refused(comm, UnsupportedError, "is replicated, not sharded", attach, replicated)
    refused(comm, ArrayError, "but the root module has none; give", attach, model, replicas=Exact())
    refused(comm, ArrayError, "expected an Average", attach, model, replicas="eight bits")
    mesh = mesh_of_replicas(comm)
    with torch.device("meta"):
        empty = shard(Net(), mesh=mesh)
    refused(comm, ArrayError, "initialize them first", attach, empty, replicas=Exact())
    replicated = fully_shard(make(), mesh=mesh)
    refused(comm, UnsupportedError, "leave addends out", attach, replicated, Reproducible(addends=12))
    refused(comm, ArrayError, "residuals that cannot", attach, replicated, replicas=Hierarchical(ErrorFeedback()))
    hooked = fully_shard(make(), mesh=mesh)
    hooked.set_all_reduce_hook(print)
    refused(comm, ArrayError, "set_all_reduce_hook was called", attach, hooked, replicas=Exact())
    with attach(model):
        refused(comm, ArrayError, "close the handle", attach, model)
    if comm.size == 1:
        return
    one_differs = [EIGHT_BITS, Exact()][comm.rank == 1]
    refused(comm, MismatchError, "and Exact() on rank 1; give the same on all ranks", attach, model, one_differs)
    other = shard(make(unused=comm.rank == 1))
    refused(comm, MismatchError, "ranks differ: ", attach, other)
    half = comm.split(comm.rank % 2)
    refused(comm, UnsupportedError, "give a comm with all ranks of the mesh", attach, model, comm=half)
    half.close()
    no_comm = 7 if comm.rank == 1 else None
    refused(comm, ArrayError, "comm is 7, expected a Communicator", attach, model, comm=no_comm)
    only_one = None if comm.rank == 1 else EIGHT_BITS
    refused(comm, BaguaError, "", attach, model, only_one if comm.rank else "eight bits")
    model(batch(0, comm.rank)[0])  # nothing was changed


def local_training(comm, replicas, algorithm):
    """A sharded model with local steps between this number of replicas, its optimizer and its handle."""
    mesh = init_device_mesh("cpu", (replicas, comm.size // replicas), mesh_dim_names=("replicas", "shards"))
    model = shard(make(), mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    handle = bagua_torch.fsdp.attach(model, Exact(), replicas=algorithm, optimizers=optimizer)
    return model, optimizer, handle


@case
def local_steps_have_the_bits_of_whole_models(comm):
    """Beside `DistributedDataParallel` over the first, or second, ranks of both replicas."""
    if comm.size != 4:
        return
    algorithm, steps = DiLoCo(2), 5
    model, optimizer, handle = local_training(comm, 2, algorithm)
    run_steps(model, optimizer, comm.rank, range(steps))
    handle.close()
    other, first = make(), comm.rank // 2 * 2
    optimizer = torch.optim.AdamW(other.parameters(), 1e-2)
    with comm.split(comm.rank % 2) as peers:
        ddp = bagua_torch.DistributedDataParallel(other, optimizer, algorithm, comm=peers)
        for step in range(steps):
            ddp.engine.settle()
            found = [gradients(other, step, rank) for rank in (first, first + 1)]
            optimizer.zero_grad()
            x, y = batch(step, comm.rank)
            mse_loss(ddp(x), y).backward()
            for parameter, *each in zip(other.parameters(), *found, strict=True):
                parameter.grad.copy_(mean(each))
            optimizer.step()
        ddp.close()
    assert_equal(model, other)


def local_checkpoint(model, optimizer, handle, replica=None):
    """What `torch.distributed.checkpoint` saves, and loads in place."""
    weights, moments = get_state_dict(model, optimizer)
    own = {"model": weights, "moments": moments["state"]}
    return {"own": handle.of_replica(own, replica), "fsdp": handle}


@case
def local_steps_on_other_meshes(comm):
    if comm.size != 4:
        return
    with TemporaryDirectory(ignore_cleanup_errors=True) as mine:
        path = comm.broadcast_object(mine, root=0)
        for algorithm in (DiLoCo(3), StreamingDiLoCo(4, fragments=2, delay=2), SparseLoCo(2)):
            model, optimizer, handle = local_training(comm, 2, algorithm)
            run_steps(model, optimizer, comm.rank, range(5))
            dcp.save(local_checkpoint(model, optimizer, handle), checkpoint_id=path)
            anchors = wholes_of(handle)
            run_steps(model, optimizer, comm.rank, range(5, 9))
            handle.close()
            again, optimizer, handle = local_training(comm, 2, algorithm)
            dcp.load(local_checkpoint(again, optimizer, handle), checkpoint_id=path)
            run_steps(again, optimizer, comm.rank, range(5, 9))
            handle.close()
            assert all(map(torch.equal, whole(model), whole(again))), algorithm
            for replicas in (1, 4) if not isinstance(algorithm, SparseLoCo) else (1,):
                other, optimizer, handle = local_training(comm, replicas, algorithm)
                dcp.load(local_checkpoint(other, optimizer, handle, 0), checkpoint_id=path)
                found = wholes_of(handle)
                assert found.keys() == anchors.keys()
                assert all(torch.equal(found[key], x) for key, x in anchors.items()), (algorithm, replicas)
                run_steps(other, optimizer, comm.rank, range(5, 9))
                handle.close()
        comm.barrier()


def wholes_of(handle):
    """The anchors and momenta of the outer optimizer, unsharded."""
    shared = handle.state_dict()["local steps"]["shared"]
    return {(name, path): x.full_tensor() for name, found in shared.items() for path, x in found.items()}


@case
def another_codec(comm):
    model = shard(make())
    method = Quantized(Float16(), min_bytes=0)
    with bagua_torch.fsdp.attach(model, method, method) as handle:
        train(model, 3, comm.rank)
        assert comm.size == 1 or "quantized_allgather" in handle.counters.by_operation
    assert distance(model, reference(make(), 3, comm.size)) < 0.01


def run_named(programs, names):
    """Run programs on a new communicator; rank 0 prints the name of each when it has ended. Collective."""
    torch.set_num_threads(1)
    comm = bagua_torch.connect(process_group=True, timeout_s=60)
    for name in names:
        programs[name](comm)
        if comm.rank == 0:
            print("ok", name, flush=True)
    comm.close()


if __name__ == "__main__":
    run_named(CASES, sys.argv[1:] or list(CASES))
    assert not dist.is_initialized()
