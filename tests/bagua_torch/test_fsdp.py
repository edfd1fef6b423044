"""Sharded training (FSDP2) by this library; the cases that ranks run are in support/fsdp_training.py."""

import runpy
import sys
import weakref
from types import ModuleType, SimpleNamespace
from typing import ClassVar

import numpy as np
import pytest
import torch
import torch.distributed as dist
from support import fsdp_training
from support.launch import TESTS, run_python, torchrun
from torch import nn
from torch.distributed.fsdp import fully_shard

import bagua_torch
from bagua_comm import (
    ArrayError,
    BFloat16,
    ByteGrad,
    ErrorFeedback,
    Exact,
    Hierarchical,
    Int4,
    MinMaxUInt8,
    Quantized,
    Reproducible,
    UnsupportedError,
    quantized_allgather,
    quantized_reduce_scatter,
)
from bagua_comm.testing import run_ranks
from bagua_torch import DistributedDataParallel, fsdp
from bagua_torch.fsdp import torch_names
from bagua_torch.fsdp.collectives import Gather, Reduce, Replicate
from bagua_torch.fsdp.passes import BackwardPasses
from bagua_torch.process_group.groups import check_ranks

LOCAL = [name for name in fsdp_training.CASES if name.startswith("local_steps")]
CASES = {name: case for name, case in fsdp_training.CASES.items() if name not in LOCAL}
OF_FOUR = [
    name
    for name, case in CASES.items()
    if {"mesh_of_replicas", "init_device_mesh", "after_a_failure", 4}
    & {*case.__code__.co_names, *case.__code__.co_consts}
]
"""The cases that need four ranks, for a mesh of two dimensions."""
OF_ANY = [name for name in CASES if name not in OF_FOUR]
PROGRAM = TESTS / "support" / "fsdp_training.py"
FRAMEWORKS = TESTS / "support" / "fsdp_frameworks.py"


def assert_all_ran(result, names):
    assert result.returncode == 0, result.stdout + result.stderr
    assert [line.split()[1] for line in result.stdout.splitlines() if line.startswith("ok ")] == names


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_cases_under_torchrun():
    cases = [*OF_FOUR, *OF_ANY[1::2]]
    assert_all_ran(torchrun(4, PROGRAM, *cases, timeout_s=380), cases)


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_local_steps_under_torchrun():
    """Those of threads are in test_fsdp_local_steps.py, without PyTorch's own communication."""
    assert_all_ran(torchrun(4, PROGRAM, *LOCAL, timeout_s=380), LOCAL)


@pytest.mark.slow
@pytest.mark.timeout(400)
@pytest.mark.parametrize(("ranks", "cases"), [(1, [*CASES][1::4]), (3, OF_ANY[::2])], ids=["1", "3"])
def test_cases_under_mpirun(ranks, cases):
    """Those that torchrun does not run on four ranks. On three, parts differ in size; alone, a few are enough."""
    assert_all_ran(run_python(ranks, PROGRAM, *cases, timeout_s=380), cases)


@pytest.mark.slow
@pytest.mark.timeout(200)
def test_other_frameworks_train_through_it():
    assert_all_ran(torchrun(2, FRAMEWORKS, timeout_s=180), ["lightning", "accelerate", "trainer"])


def test_one_rank_trains_as_without_attaching(gloo):
    plain, model = (fully_shard(fsdp_training.make()) for _ in range(2))
    (handle,) = run_ranks(1, lambda comm: fsdp.attach(model, comm=comm))
    for each in (plain, model):
        fsdp_training.train(each, 3, 0)
    assert all(map(torch.equal, fsdp_training.whole(plain), fsdp_training.whole(model)))
    assert handle.counters.total().calls == 0
    assert handle.state_dict() == {"residuals of rank 0 of 1": {}}


def test_close_gives_the_model_back_to_pytorch(gloo):
    model = fully_shard(nn.Linear(4, 4))
    (group,) = model._get_fsdp_state()._fsdp_param_groups
    before = group._all_gather_comm, group._reduce_scatter_comm

    def body(comm):
        with fsdp.attach(model, ErrorFeedback(), comm=comm):
            assert isinstance(group._all_gather_comm, Gather)
            assert isinstance(group._reduce_scatter_comm, Reduce)

    run_ranks(1, body)
    assert (group._all_gather_comm, group._reduce_scatter_comm) == before


def test_modules_that_are_sharded_after_attach_are_named_in_the_first_forward_pass(gloo):
    def body(comm):
        model = nn.Sequential(fully_shard(nn.Linear(4, 4)), nn.ReLU(), nn.Linear(4, 4))
        with fsdp.attach(model, comm=comm):
            fully_shard(model)
            with pytest.warns(UserWarning, match="was called after attach for the root module, whose"):
                model(torch.ones(1, 4))
            model(torch.ones(1, 4))  # warnings are errors here
        fsdp.attach(model, comm=comm).close()

    run_ranks(1, body)


class FailsForTheSecond(Reproducible):
    """An average that can be bound once."""

    bound: ClassVar[list[object]] = []

    def bind(self, comm, like=None):
        if self.bound:
            raise ArrayError("cannot be bound again")
        self.bound.append(comm)
        return super().bind(comm)


def test_an_error_leaves_the_model_to_pytorch_and_no_communicator_open(gloo):
    FailsForTheSecond.bound.clear()
    model = nn.Sequential(fully_shard(nn.Linear(4, 4)), fully_shard(nn.Linear(4, 4)))

    def body(comm):
        with pytest.raises(ArrayError, match="cannot be bound again"):
            fsdp.attach(model, FailsForTheSecond(), comm=comm)
        (derived,) = FailsForTheSecond.bound
        assert derived.guard.closed
        assert not comm.guard.closed
        fsdp.attach(model, Exact(), comm=comm).close()  # no module has custom communication

    run_ranks(1, body)


def test_connect_makes_a_group_that_close_destroys():
    with bagua_torch.connect(process_group=True):
        assert dist.get_world_size() == 1
    assert not dist.is_initialized()
    comm = bagua_torch.connect(process_group=True)
    dist.destroy_process_group()
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    comm.close()
    assert dist.is_initialized(), "this group is the caller's"
    with bagua_torch.connect(process_group=True):
        pass
    assert dist.is_initialized(), "there was one before"
    dist.destroy_process_group()


def test_a_group_that_close_destroys_does_not_live_as_long_as_the_communicator():
    comm = bagua_torch.connect(process_group=True)
    group = weakref.ref(dist.group.WORLD)
    comm.close()
    assert group() is None
    comm.close()


# The collectives, on ranks that are threads


def on_threads(ranks, body):
    """Run body(comm, comms): `comms` stands for the communicators of a model."""
    return run_ranks(ranks, lambda comm: body(comm, comms_of(comm)))


def comms_of(comm):
    return SimpleNamespace(of=lambda group: comm, lane_of=lambda comm: None)


def unit(numel, factor=None):
    return SimpleNamespace(name="layer", gradient_numel=numel, divide_factor=factor)


def gather_of(comm, method):
    return Gather(comms_of(comm), unit(2400), {comm: method.bind_gather(comm)})


X = [torch.randn(4 * 600, generator=torch.Generator().manual_seed(rank)) for rank in range(4)]


@pytest.mark.parametrize("op", [dist.ReduceOp.AVG, dist.ReduceOp.SUM])
@pytest.mark.parametrize(
    "method",
    [Exact(), Quantized(min_bytes=0), Quantized(BFloat16(), 0), Quantized(Int4(), 0), ErrorFeedback()],
    ids=repr,
)
def test_reduce_is_the_collective_of_its_method(method, op):
    name = "avg" if op == dist.ReduceOp.AVG else "sum"

    def expected(comm, x, residual):
        if method == Exact():
            return comm.reduce_scatter(x, op=name)
        codec = method.inner.codec if isinstance(method, ErrorFeedback) else method.codec
        return quantized_reduce_scatter(comm, x, op=name, codec=codec, residual=residual)

    def body(comm, comms):
        reduce = Reduce(comms, unit(2400), method, comm, BackwardPasses())
        residual = torch.zeros(2400) if isinstance(method, ErrorFeedback) else None
        for _ in range(2):
            out = torch.empty(600)
            reduce(output_tensor=out, input_tensor=X[comm.rank].clone(), group=None, op=op)
            assert torch.equal(out, expected(comm, X[comm.rank], residual))

    on_threads(4, body)


def test_reduce_decays_resets_and_encodes_its_residual():
    codec = MinMaxUInt8()
    method = ErrorFeedback(Quantized(), 0.8, 2, codec)

    def body(comm, comms):
        reduce, residual, found = (
            Reduce(comms, unit(2400), method, comm, BackwardPasses()),
            np.zeros(2400, np.float32),
            [],
        )
        for step in range(3):
            out, x = torch.empty(600), X[comm.rank] * (1 + step)
            reduce(output_tensor=out, input_tensor=x.clone(), group=None, op=dist.ReduceOp.AVG)
            residual *= step != 2
            expected = quantized_reduce_scatter(comm, x.numpy(), op="avg", residual=residual, decay=0.8)
            assert out.numpy().tobytes() == expected.tobytes()
            residual = codec.decode(codec.encode(residual[None]), residual[None].copy())[0]
            found.append((reduce.feedback.means, reduce.feedback.nbytes < 1.03 * residual.size))
        assert reduce.residual.tobytes() == residual.tobytes()
        return found

    assert on_threads(4, body) == [[(1, True), (2, True), (1, True)]] * 4


def test_a_divide_factor_of_the_user_is_applied_once():
    def body(comm, comms):
        reduce = Reduce(comms, unit(2400, factor=10.0), Exact(), comm, BackwardPasses())
        out = torch.empty(1200)
        op = dist._make_nccl_premul_sum(0.1)
        reduce(output_tensor=out, input_tensor=X[comm.rank].clone(), group=None, op=op)
        return torch.equal(out, comm.reduce_scatter(X[comm.rank]) / 10)

    assert on_threads(2, body) == [True, True]


def test_another_reduction_is_refused_by_name():
    def body(comm, comms):
        reduce = Reduce(comms, unit(2400), Exact(), comm, BackwardPasses())
        with pytest.raises(UnsupportedError, match=r"PyTorch asks for .*MAX.*expected SUM, AVG or PREMUL_SUM"):
            reduce(output_tensor=torch.empty(1200), input_tensor=X[0], group=None, op=dist.ReduceOp.MAX)

    on_threads(2, body)


@pytest.mark.parametrize("op", [dist.ReduceOp.AVG, dist.ReduceOp.SUM])
def test_any_other_average_reduces_all_and_keeps_a_chunk(op):
    def body(comm, comms):
        reduce, out = (
            Reduce(comms, unit(2400), Hierarchical(Hierarchical()), comm, BackwardPasses()),
            torch.empty(600),
        )
        reduce(output_tensor=out, input_tensor=X[comm.rank].clone(), group=None, op=op)
        mean = torch.stack(X).double().mean(0)[600 * comm.rank :][:600]
        return torch.allclose(out.double(), mean * (4 if op == dist.ReduceOp.SUM else 1), atol=1e-5)

    assert on_threads(4, body) == [True] * 4


@pytest.mark.parametrize("method", [Exact(), Quantized(min_bytes=0), Quantized(min_bytes=1 << 20)], ids=repr)
def test_gather_from_a_view_of_its_output(method):
    def body(comm):
        out = torch.zeros(2400)
        mine = out[600 * comm.rank :][:600]
        mine.copy_(X[comm.rank][:600])
        large = method == Quantized(min_bytes=0)
        wanted = (quantized_allgather if large else type(comm).allgather)(comm, X[comm.rank][:600])
        gather_of(comm, method)(output_tensor=out, input_tensor=mine, group=None)
        return torch.equal(out, wanted.reshape(-1))

    assert run_ranks(4, body) == [True] * 4


@pytest.mark.covering(2)
@pytest.mark.parametrize("nodes", ["aabb", "abaa"])
@pytest.mark.parametrize("inside", [Exact(), Quantized(BFloat16(), 0)], ids=["exact inside", "coded inside"])
@pytest.mark.parametrize("inner", [Exact(), Quantized(min_bytes=0)], ids=["exact", "coded"])
def test_hierarchical_gathers_the_same_on_all_ranks_from_a_view_of_its_output(inner, inside, nodes):
    codec = next((each.codec for each in (inner, inside) if each != Exact()), None)

    def body(comm):
        out = torch.zeros(2400)
        mine = out[600 * comm.rank :][:600]
        gather = gather_of(comm, Hierarchical(inner, inside=inside))
        for _ in range(2):
            mine.copy_(X[comm.rank][:600])
            gather(output_tensor=out, input_tensor=mine, group=None)
        x = X[comm.rank][:600]
        wanted = comm.allgather(x) if codec is None else quantized_allgather(comm, x, codec=codec)
        return torch.equal(out, wanted.reshape(-1))

    assert run_ranks(4, body, nodes=nodes) == [True] * 4


@pytest.mark.parametrize("inner", [Exact(), Quantized(min_bytes=0)], ids=repr)
def test_hierarchical_reduces_inside_nodes_first(inner):
    def body(comm):
        reduce, out = (
            Reduce(comms_of(comm), unit(2400), Hierarchical(inner), comm, BackwardPasses()),
            torch.empty(600),
        )
        reduce(output_tensor=out, input_tensor=X[comm.rank].clone(), group=None, op=dist.ReduceOp.AVG)
        mean = torch.stack(X).mean(0)[600 * comm.rank :][:600]
        limit = 1e-6 if inner == Exact() else 0.05
        return torch.allclose(out, mean, atol=limit), "quantized_reduce_scatter" in comm.counters.by_operation

    coded = [inner != Exact() and rank in (0, 3) for rank in range(4)]  # only these two cross between nodes
    assert run_ranks(4, body, nodes=["a", "a", "a", "b"]) == [(True, each) for each in coded]


def of_replicas(**settings):
    fixed = {"name": "layer", "shard_numel": 2400, "divide_factor": None}
    return SimpleNamespace(**{"partial_gradients": None, **fixed, **settings})


@pytest.mark.parametrize("method", [Exact(), Reproducible(), Quantized(min_bytes=0), ErrorFeedback()], ids=repr)
def test_replicas_are_averaged_by_their_method(method):
    def body(comm):
        replicate, mean = Replicate(of_replicas(), method, comm, BackwardPasses()), method.bind(comm)
        for _ in range(2):
            x = X[comm.rank].clone()
            replicate(x)
            assert torch.equal(x, mean(X[comm.rank].clone()))
        return replicate.residual is not None

    assert run_ranks(2, body) == [isinstance(method, ErrorFeedback)] * 2


def test_an_average_that_was_postponed_is_of_the_sum():
    def body(comm):
        unit, last = of_replicas(partial_gradients=2 * X[comm.rank]), X[comm.rank].clone()
        Replicate(unit, Exact(), comm, BackwardPasses())(last)
        return torch.equal(last, comm.allreduce(3 * X[comm.rank], op="avg"))

    assert run_ranks(2, body) == [True, True]


def test_the_divisor_of_the_user_divides_the_sum_over_replicas():
    def body(comm):
        x = X[comm.rank].clone()
        Replicate(of_replicas(divide_factor=3.0), Exact(), comm, BackwardPasses())(x)
        return torch.equal(x, X[0] + X[1])

    assert run_ranks(2, body) == [True, True]


def test_the_residual_of_replicas_needs_the_gradients_of_all_parameters():
    def body(comm):
        with pytest.raises(UnsupportedError, match="2400 gradient elements of layer are reduced, expected 2402"):
            Replicate(of_replicas(shard_numel=2402), ErrorFeedback(), comm, BackwardPasses())(X[0].clone())

    run_ranks(2, body)


def test_error_feedback_needs_the_gradients_of_all_parameters():
    def body(comm, comms):
        reduce = Reduce(comms, unit(2402), ErrorFeedback(), comm, BackwardPasses())
        with pytest.raises(UnsupportedError, match="2400 gradient elements of layer are reduced, expected 2402"):
            reduce(output_tensor=torch.empty(1200), input_tensor=X[0], group=None, op=dist.ReduceOp.AVG)

    on_threads(2, body)


# Bad input


def test_meshes_of_other_ranks_are_refused():
    check_ranks([(4, [(4, 6)]), (6, [(4, 6)])], {4: 0, 6: 1})
    for rows, text in [
        (
            [(0, [(0, 1, 2, 3)]), (1, [(0, 1, 2, 3)])],
            "sharded over ranks [0, 1, 2, 3] of torch.distributed, but comm",
        ),
        ([(0, [(0, 1)]), (1, [(1, 0)])], "give a comm with all ranks of the mesh"),
        ([(0, [(0, 1)]), (0, [(0, 1)])], "have ranks [0, 0] in torch.distributed, expected different ones"),
        ([(0, [(0, 1)]), (1, [])], "expected different ones, sharded alike"),
    ]:
        with pytest.raises(UnsupportedError) as info:
            check_ranks(rows, {rank: index for index, (rank, _) in enumerate(rows)})
        assert text in str(info.value)


def test_a_model_that_is_not_sharded_is_refused():
    for message in run_ranks(2, lambda comm: refusal(comm, nn.Linear(2, 2))):
        assert message.startswith("bagua_torch.fsdp.attach: the model has no sharded parameters; call torch.")


@pytest.mark.parametrize("reduce", ["quantized", ByteGrad(), Quantized], ids=repr)
def test_what_is_no_average_is_refused_by_the_name_of_the_argument(reduce):
    def body(comm):
        with pytest.raises(ArrayError, match=r"fsdp.attach: reduce is .*, expected an Average such as Exact\(\)"):
            fsdp.attach(nn.Linear(2, 2), reduce, comm=comm)

    run_ranks(2, body)


def test_the_wrapper_refuses_a_sharded_model_and_names_attach(gloo):
    model = fully_shard(fsdp_training.make())

    def body(comm):
        with pytest.raises(UnsupportedError, match=r"is a .*, as of a module .*call bagua_torch.fsdp.attach"):
            DistributedDataParallel(model, comm=comm)

    run_ranks(1, body)


def refusal(comm, model):
    with pytest.raises(ArrayError) as info:
        fsdp.attach(model, comm=comm)
    return str(info.value)


def test_for_a_pytorch_without_these_names_the_error_names_those_that_were_tried(monkeypatch):
    name = "torch.distributed.fsdp._fully_shard._fsdp_api"
    monkeypatch.setitem(sys.modules, name, ModuleType(name))
    with pytest.raises(ImportError, match=r"PyTorch .* lacks .*AllGather.*tried with PyTorch 2.11 and 2.13"):
        runpy.run_path(torch_names.__file__)
