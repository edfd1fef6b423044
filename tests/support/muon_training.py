"""Cases of Muon on several ranks, which run one after the other: `python muon_training.py NAME...`.

A sharded and a replicated model are stepped beside an unsharded one with the same gradients.
"""

import copy
import sys

import pytest
import torch
from fsdp_training import mesh_of_replicas, refused, run_named  # a program beside this one
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard, distribute_tensor
from torch.nn.functional import cross_entropy

import bagua_torch
import bagua_torch.fsdp
from bagua_comm import ArrayError, CommMismatch, DiLoCo, Exact, GradientAllReduce, Int4, UnsupportedError

SYMBOLS, WIDTH = 23, 20


class Transformer(nn.Module):
    """The sides of its matrices do not divide by three, nor some by two."""

    def __init__(self):
        super().__init__()
        self.symbols = nn.Embedding(SYMBOLS, WIDTH)
        self.blocks = nn.ModuleList(
            nn.TransformerEncoderLayer(WIDTH, 4, 53, 0.0, batch_first=True) for _ in range(2)
        )
        self.head = nn.Linear(WIDTH, SYMBOLS)

    def forward(self, x):
        x = self.symbols(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x).clone()


def make(mesh=None, shard=False):
    torch.manual_seed(0)
    model = Transformer()
    for each in [*model.blocks, model] if shard else []:
        fully_shard(each, mesh=mesh)
    return model


def rule(name, parameter):
    return None if name.startswith("blocks") and parameter.ndim == 2 else {"lr": 1e-3}


def muon_of(model, **settings):
    return bagua_torch.Muon(model.named_parameters(), 0.02, adam=rule, **settings)


def backward(model, seed):
    x = torch.randint(SYMBOLS, (3, 6), generator=torch.Generator().manual_seed(seed))
    cross_entropy(model(x).flatten(0, 1), x.flatten()).backward()


def whole(parameters):
    return [each.full_tensor() if hasattr(each, "full_tensor") else each.detach() for each in parameters]


def assert_same_steps(comm, model, dtype="bfloat16", **settings):
    """A sharded model and a replicated one, stepped together, and one that each rank steps alone."""
    models = model, make(), make()
    optimizers = sharded, replicated, alone = [muon_of(each, dtype=dtype, **settings) for each in models]
    sharded.distribute(comm)
    replicated.distribute(comm)
    for step in range(3):
        for optimizer in optimizers:
            optimizer.zero_grad()
        backward(model, comm.size * step + comm.rank)
        grads = whole(p.grad for p in model.parameters())
        for each in models[1:]:
            for p, grad in zip(each.parameters(), grads, strict=True):
                p.grad = grad.clone()
        for optimizer in optimizers:
            optimizer.step()
        found, copied, expected = (whole(each.parameters()) for each in models)
        assert all(map(torch.equal, found, expected)), step
        assert all(map(torch.equal, copied, expected)), step
    return sharded, (alone, models[2])


def a_sharded_and_a_replicated_model_have_the_bits_of_an_unsharded_one(comm):
    for dtype, settings in (("bfloat16", {}), ("float32", {"nesterov": False, "weight_decay": 0.0})):
        model = make(shard=True)
        with bagua_torch.fsdp.attach(model, Exact(), Exact(), comm):
            sharded, _ = assert_same_steps(comm, model, dtype, **settings)
            sharded.close()


def errors_of_a_codec_do_not_accumulate(comm):
    """With the same gradients, weights differ by the errors of about one step; replicas stay equal."""
    far = {}
    for codec in None, Int4():
        model, copied, alone = make(shard=True), make(), make()
        optimizers = [muon_of(each, dtype="float32", weight_decay=0.0) for each in (model, copied, alone)]
        for optimizer in optimizers[:2]:
            optimizer.distribute(comm, codec=codec)
        for step in range(8):
            for optimizer in optimizers:
                optimizer.zero_grad()
            backward(alone, step)
            for p, q, r in zip(model.parameters(), copied.parameters(), alone.parameters(), strict=True):
                p.grad = distribute_tensor(r.grad, p.device_mesh, p.placements)
                q.grad = r.grad.clone()
            for optimizer in optimizers:
                optimizer.step()
        bits = [p.detach().numpy().tobytes() for p in copied.parameters()]
        assert comm.allgather_object(bits) == [bits] * comm.size
        for each in model, copied:
            pairs = zip(whole(each.parameters()), whole(alone.parameters()), strict=True)
            far[codec] = max((p - q).detach().abs().max().item() for p, q in pairs)
            assert far[codec] <= (0.02 * 0.4 if codec and comm.size > 1 else 0), far
        sent = optimizers[0].counters.total().wire_bytes
        far[codec, "bytes"] = sum(comm.allgather_object(sent))
        for optimizer in optimizers[:2]:
            optimizer.close()
    if comm.size > 1:
        assert far[Int4()] > 0.02 * 0.005, "it does round"
        assert 0.5 < far[Int4(), "bytes"] / far[None, "bytes"] < 0.75  # four bytes there, half a one back
        copied.zero_grad()
        backward(copied, 0)
        optimizers[1].distribute(comm, codec=Int4() if comm.rank else None)
        refused(comm, CommMismatch, "called Muon.step(settings=Int4(", optimizers[1].step)
        optimizers[1].close()
    refused(comm, ArrayError, "codec is 'int4', expected a Codec", muon_of(make()).distribute, comm, codec="int4")


def a_mesh_of_replicas_shares_in_each_of_them(comm):
    sharded, _ = assert_same_steps(comm, make(mesh_of_replicas(comm), shard=True))
    sharded.close()


def local_steps_between_replicas_have_the_bits_of_whole_models(comm):
    """Beside `DistributedDataParallel` over the first, or second, ranks of both replicas."""
    if comm.size != 4:
        return
    algorithm, model, other = DiLoCo(2), make(mesh_of_replicas(comm), shard=True), make()
    sharded, alone = muon_of(model), muon_of(other)
    handle = bagua_torch.fsdp.attach(model, Exact(), replicas=algorithm, optimizers=sharded)
    sharded.distribute(comm)
    with comm.split(comm.rank % 2) as peers:
        ddp = bagua_torch.DistributedDataParallel(other, alone, algorithm, comm=peers)
        for step in range(5):
            ddp.engine.settle()
            for optimizer in sharded, alone:
                optimizer.zero_grad()
            backward(model, comm.size * step + comm.rank)
            backward(ddp, step)
            for p, grad in zip(other.parameters(), whole(p.grad for p in model.parameters()), strict=True):
                p.grad.copy_(grad)
            sharded.step()
            alone.step()
        ddp.close()
    assert handle.exchanges.exchange.calls == 2
    assert all(map(torch.equal, whole(model.parameters()), whole(other.parameters())))
    sharded.close()
    handle.close()


def checkpoints_hold_the_states_of_an_unsharded_optimizer(comm):
    """So that they do not depend on owners or on the number of ranks; and training goes on from them."""
    model = make(shard=True)
    sharded, (alone, unsharded) = assert_same_steps(comm, model)
    options = StateDictOptions(full_state_dict=True)
    _, state = get_state_dict(model, sharded, options=options)
    _, expected = get_state_dict(unsharded, alone, options=options)
    for name, states in expected["state"].items() if comm.rank == 0 else ():
        assert states.keys() == state["state"][name].keys()
        for key, value in states.items():
            assert torch.equal(value, state["state"][name][key]), (name, key)
    sharded.close()
    weights, state = copy.deepcopy(get_state_dict(model, sharded))
    again = make(shard=True)
    loaded = muon_of(again)
    loaded.distribute(comm)
    set_state_dict(again, loaded, model_state_dict=weights, optim_state_dict=state)
    sharded.distribute(comm)
    for each, optimizer in ((model, sharded), (again, loaded)):
        optimizer.zero_grad()
        backward(each, 5)
        optimizer.step()
    assert all(map(torch.equal, whole(model.parameters()), whole(again.parameters())))


def a_wrapped_model_trains_by_it(comm):
    """The wrapper averages gradients; weights stay equal, and are those of ranks that all compute."""
    results = []
    for shares in (False, True):
        model = make()
        optimizer = muon_of(model)
        ddp = bagua_torch.DistributedDataParallel(model, [optimizer], GradientAllReduce(), comm=comm)
        if shares:
            optimizer.distribute(comm)
        for step in range(3):
            optimizer.zero_grad()
            backward(ddp, comm.size * step + comm.rank)
            optimizer.step()
        optimizer.close()
        ddp.close()
        results.append(whole(model.parameters()))
        comm.check_consistency(torch.cat([each.flatten() for each in results[-1]]).numpy())
    assert all(map(torch.equal, *results))


def states_and_settings_that_do_not_fit(comm, model, optimizer):
    """A momentum of whole matrices, and a tensor that differs in few bits."""
    backward(model, 0)
    before, first, unsharded = whole(model.parameters()), optimizer.param_groups[-1], make()
    first["lr"] = torch.tensor(0.1 + 1e-7 * comm.rank, dtype=torch.float64)
    refused(comm, CommMismatch, "rank 1 called Muon.step", optimizer.step)
    first["lr"] = 0.1
    saved = muon_of(unsharded)
    backward(unsharded, 0)
    saved.step()
    optimizer.load_state_dict(saved.state_dict())
    refused(comm, (ArrayError, CommMismatch), "the momentum of a parameter is", optimizer.step)
    assert all(map(torch.equal, whole(model.parameters()), before))


def parameters_of_another_group_of_as_many_ranks(comm):
    if comm.size != 4:
        return
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("rows", "columns"))
    first, second = (nn.Linear(4, 6, bias=False) for _ in range(2))
    fully_shard(first, mesh=mesh["rows"])
    fully_shard(second, mesh=mesh["columns"])
    optimizer = bagua_torch.Muon(first.parameters())
    optimizer.distribute(comm)
    optimizer.add_param_group({"params": second.parameters()})
    second(torch.ones(2, 4)).sum().backward()
    refused(comm, (ArrayError, CommMismatch), "expected the group of 2 that shares", optimizer.step)
    optimizer.close()


def gradients_that_nobody_averages(comm):
    if comm.size == 1:
        return
    model = make()
    optimizer = muon_of(model)
    optimizer.distribute(comm)
    get_state_dict(model, optimizer)  # makes a step of its own, with gradients of 0
    backward(model, comm.rank)
    before = [each.detach().clone() for each in model.parameters()]
    refused(comm, CommMismatch, "mean gradients with checksum", optimizer.step)
    assert all(map(torch.equal, whole(model.parameters()), before))
    optimizer.zero_grad()
    backward(model, 0)
    optimizer.step()
    optimizer.close()


def bad_input(comm):
    model = make(shard=True)
    optimizer = muon_of(model)
    backward(model, 0)
    before = whole(model.parameters())
    if comm.size > 1:
        with pytest.raises(ArrayError, match=f"over {comm.size} ranks.*call distribute"):
            optimizer.step()
    optimizer.distribute(comm)
    refused(comm, ArrayError, "the ranks share the matrices already; call close", optimizer.distribute, comm)
    if comm.size > 1:
        first = optimizer.param_groups[-1]
        first["lr"] = 0.1 + comm.rank
        refused(comm, CommMismatch, "['muon', 1.1, 0.95, 0.1, True, ", optimizer.step)
        first["lr"] = 0.1
        parameter = model.blocks[0].linear1.weight
        kept = parameter.grad
        parameter.grad = None if comm.rank else kept
        refused(comm, CommMismatch, "but rank 1 called Muon.step", optimizer.step)
        parameter.grad, first["lr"] = kept, -1 if comm.rank else 0.1
        refused(comm, (ArrayError, CommMismatch), "lr is -1, expected a number of at least 0", optimizer.step)
        assert all(map(torch.equal, whole(model.parameters()), before))
        states_and_settings_that_do_not_fit(comm, model, optimizer)
    optimizer.close()
    columns = nn.Linear(12, 8, bias=False)
    fully_shard(columns, shard_placement_fn=lambda p: Shard(1))
    by_columns = bagua_torch.Muon(columns.parameters())
    refused(comm, UnsupportedError, "sharded by dimension 1, expected 0", by_columns.distribute, comm)


CASES = {
    case.__name__: case
    for case in (
        a_sharded_and_a_replicated_model_have_the_bits_of_an_unsharded_one,
        errors_of_a_codec_do_not_accumulate,
        a_mesh_of_replicas_shares_in_each_of_them,
        local_steps_between_replicas_have_the_bits_of_whole_models,
        checkpoints_hold_the_states_of_an_unsharded_optimizer,
        a_wrapped_model_trains_by_it,
        parameters_of_another_group_of_as_many_ranks,
        gradients_that_nobody_averages,
        bad_input,
    )
}

if __name__ == "__main__":
    run_named(CASES, sys.argv[1:] or list(CASES))
