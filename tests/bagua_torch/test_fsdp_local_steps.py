"""Local steps between the replicas of a sharded model, beside an unsharded training with the same settings."""

import copy
import functools
import gc
from types import SimpleNamespace

import pytest
import torch
from support import thread_groups
from support.elastic_shards import results
from support.elastic_shards import whole as whole_shards
from support.fsdp_training import WIDTH, batch, mean, shard
from support.fsdp_training import make as make_net
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.functional import mse_loss

from bagua_comm import (
    ArrayError,
    CommMismatch,
    Decentralized,
    DiLoCo,
    ErrorFeedback,
    Exact,
    Hierarchical,
    Int4,
    Quantized,
    SparseLoCo,
    StreamingDiLoCo,
    UnsupportedError,
)
from bagua_comm.elastic import State, run
from bagua_comm.testing import run_ranks
from bagua_comm.testing.fleets import ThreadJob, run_fleet
from bagua_torch import DistributedDataParallel, fsdp

STEPS = 7
AdamW = functools.partial(torch.optim.AdamW, lr=1e-2, foreach=True)
SGD = functools.partial(torch.optim.SGD, lr=1e-2, momentum=0.9, foreach=False)
make = functools.partial(make_net, block=functools.partial(torch.nn.Linear, WIDTH, WIDTH))
"""A small net: each rank of each test computes anew how each operation on each parameter is sharded."""


class ShardSGD(torch.optim.Optimizer):
    """Steps the shards as plain tensors, without what `make` says of each operation."""

    def __init__(self, parameters):
        super().__init__(parameters, {"lr": 0.05})

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            for p in group["params"]:
                p.to_local().sub_(p.grad.to_local(), alpha=group["lr"])


@pytest.fixture(autouse=True)
def groups():
    thread_groups.install()
    yield
    thread_groups.uninstall()


def on_mesh(comm, *, sites=2, frozen=()):
    """A sharded model on a mesh of (sites, shards), whose process groups only know their ranks.

    `frozen`: how the names of frozen parameters begin.
    """
    thread_groups.renew(comm)
    mesh = init_device_mesh("cpu", (sites, comm.size // sites), mesh_dim_names=("replicas", "shards"))
    with thread_groups.LOCK:
        model = make()
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(not name.startswith(frozen))
    return shard(model, mesh=mesh), mesh


def train(model, optimizer, rank, steps):
    for step in steps:
        x, y = batch(step, rank)
        optimizer.zero_grad()
        mse_loss(model(x), y).backward()
        optimizer.step()


def weights_of(comm, mesh, model):
    """The weights of this rank's replica, as a whole."""
    found, (first, shards) = {}, (mesh.get_local_rank(0), mesh.size(1))
    for name, parameter in model.named_parameters():
        rows = comm.allgather_object(parameter.to_local().detach().clone())
        found[name] = torch.cat(rows[first * shards : (first + 1) * shards])
    return found


def sharded(algorithm, optimizer=ShardSGD):
    """By rank, the weights after `STEPS` steps."""

    def program(comm, mesh, model, optimizer, handle):
        train(model, optimizer, comm.rank, range(STEPS))
        return weights_of(comm, mesh, model)

    return between(program, algorithm=algorithm, optimizer=optimizer)


def unsharded(algorithm, optimizer, shards=2):
    """By replica, the weights of a whole model of which each rank computes the gradients of a replica's ranks."""

    def program(comm):
        with thread_groups.LOCK:
            model = make()
        made = optimizer(model.parameters())
        ddp = DistributedDataParallel(model, [made], algorithm, comm=comm)
        for step in range(STEPS):
            ddp.engine.settle()
            grads = []
            for rank in range(comm.rank * shards, (comm.rank + 1) * shards):
                other = copy.deepcopy(model)
                x, y = batch(step, rank)
                mse_loss(other(x), y).backward()
                grads.append([p.grad for p in other.parameters()])
            made.zero_grad()
            mse_loss(ddp(x), y).backward()
            for p, *each in zip(model.parameters(), *grads, strict=True):
                p.grad.copy_(mean(each))
            made.step()
        found = {name: each.clone() for name, each in ddp.module.state_dict().items()}
        ddp.close()
        return found

    return run_ranks(2, program)


def assert_same_bits(found, expected):
    assert found.keys() == expected.keys()
    for name, weights in found.items():
        assert torch.equal(weights, expected[name]), name


@pytest.mark.parametrize(
    ("algorithm", "optimizer"),
    [
        (DiLoCo(3), AdamW),
        (StreamingDiLoCo(5, fragments=3, delay=2), SGD),
        (StreamingDiLoCo(2, fragments=1, delay=0, mix=0), SGD),
    ],
    ids=["DiLoCo", "StreamingDiLoCo", "without delay"],
)
def test_the_bits_are_those_of_a_training_without_shards(algorithm, optimizer):
    replicas = unsharded(algorithm, optimizer)
    for rank, found in enumerate(sharded(algorithm, optimizer)):
        assert_same_bits(found, replicas[rank // 2])


def between(program, *, algorithm=None, optimizer=ShardSGD, frozen=()):
    """By rank, the results of `program(comm, mesh, model, optimizer, handle)` on a model with local steps."""

    def run(comm):
        model, mesh = on_mesh(comm, frozen=frozen)
        made = optimizer([p for p in model.parameters() if p.requires_grad])
        with fsdp.attach(model, Exact(), comm=comm, replicas=algorithm or DiLoCo(3), optimizers=made) as handle:
            return program(comm, mesh, model, made, handle)

    return run_ranks(4, run)


def assert_all_equal(rows):
    for row in rows[1:]:
        assert_same_bits(row, rows[0])


@pytest.mark.parametrize(
    "algorithm", [SparseLoCo(2), DiLoCo(2, average=Quantized(min_bytes=0))], ids=["SparseLoCo", "eight bits"]
)
def test_replicas_are_equal_after_an_outer_step_and_only_then(algorithm):
    def program(comm, mesh, model, optimizer, handle):
        train(model, optimizer, comm.rank, range(4))
        after_four = weights_of(comm, mesh, model)
        train(model, optimizer, comm.rank, [4])
        return after_four, weights_of(comm, mesh, model)

    for rows, equal in zip(zip(*between(program, algorithm=algorithm), strict=True), (True, False), strict=True):
        same = all(torch.equal(rows[0][name], rows[2][name]) for name in rows[0])
        assert same is equal
        assert_all_equal(rows[:2])
        assert_all_equal(rows[2:])


def test_a_link_between_replicas_has_the_shards_of_a_rank_once_in_many_steps():
    def program(comm, mesh, model, optimizer, handle):
        train(model, optimizer, comm.rank, range(6))
        return handle.exchanges.exchange

    elements = sum(p.numel() for p in make().parameters())
    for sent in between(program):
        assert sent.calls == 2
        assert sent.payload_bytes == pytest.approx(2 * 4 * elements / 2, rel=0.2)  # shards are padded


@pytest.mark.parametrize(
    ("algorithm", "optimizer"),
    [
        (DiLoCo(3), torch.optim.AdamW),
        (StreamingDiLoCo(4, fragments=2, delay=2), ShardSGD),
        (SparseLoCo(2), ShardSGD),
    ],
    ids=["DiLoCo", "StreamingDiLoCo", "SparseLoCo"],
)
def test_a_loaded_state_continues_with_the_same_bits(algorithm, optimizer):
    def program(comm, mesh, model, optimizer, handle):
        train(model, optimizer, comm.rank, range(5))
        saved = copy.deepcopy((model.state_dict(), optimizer.state_dict(), handle.state_dict()))
        train(model, optimizer, comm.rank, range(5, STEPS))
        expected = weights_of(comm, mesh, model)
        for each, state in zip((model, optimizer, handle), saved, strict=True):
            each.load_state_dict(state)
        train(model, optimizer, comm.rank, range(5, STEPS))
        assert_same_bits(weights_of(comm, mesh, model), expected)

    between(program, algorithm=algorithm, optimizer=optimizer)


def test_a_state_that_lacks_something_is_refused_on_all_ranks():
    def program(comm, mesh, model, optimizer, handle):
        train(model, optimizer, comm.rank, range(4))
        with pytest.raises(ArrayError, match="no 'local steps'"):
            handle.load_state_dict({"others": {}})
        state = handle.state_dict()
        if comm.rank == 1:
            state["local steps"]["shared"].popitem()
        with pytest.raises(ArrayError, match=r"'anchor' of .* is missing"):
            handle.load_state_dict(state)

    between(program)


def test_a_model_that_has_run_without_a_backward_pass_begins_with_the_first_replica():
    def program(comm):
        model, _ = on_mesh(comm)
        made = ShardSGD(model.parameters())
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.to_local().add_(comm.rank // 2)
            model(batch(0, 0)[0])
            with fsdp.attach(model, Exact(), comm=comm, replicas=DiLoCo(2), optimizers=made):
                return {"output": model(batch(0, 0)[0])}

    assert_all_equal(run_ranks(4, program))


def test_weights_that_a_module_loads_are_where_the_next_outer_step_begins():
    def program(comm, mesh, model, optimizer, handle):
        train(model, optimizer, comm.rank, range(4))
        model.load_state_dict({name: torch.ones_like(x) for name, x in model.state_dict().items()})
        train(model, optimizer, comm.rank, range(4, 6))
        found, anchor = weights_of(comm, mesh, model), handle.state_dict()["local steps"]["shared"]
        assert all(torch.equal(x, anchor[n]["anchor"].to_local()) for n, x in locals_of(model))
        return found

    for rows in between(program, optimizer=AdamW):
        assert all((weights - 1).abs().max() < 0.1 for weights in rows.values())  # two steps from there


def locals_of(model):
    return [(name, parameter.to_local()) for name, parameter in model.named_parameters()]


def test_weights_that_change_without_a_report_are_named():
    def program(comm, mesh, model, optimizer, handle):
        train(model, optimizer, comm.rank, range(2))
        with torch.no_grad():
            for _, local in locals_of(model):
                local.add_(1)
        train(model, optimizer, comm.rank, range(2, 4))

    with pytest.warns(UserWarning, match="neither an optimizer nor an exchange did that"):
        between(program)


def test_shards_that_were_replaced_move_back_to_their_bucket():
    def program(comm, mesh, model, optimizer, handle):
        train(model, optimizer, comm.rank, range(2))
        model.to(torch.float64).to(torch.float32)
        train(model, optimizer, comm.rank, range(2, 6))
        return weights_of(comm, mesh, model)

    assert_all_equal(between(program))


def test_a_step_that_only_makes_the_state_of_an_optimizer_does_not_count():
    """As `torch.distributed.checkpoint.state_dict` makes it before it loads."""

    def program(comm, mesh, model, optimizer, handle):
        for p in model.parameters():
            p.grad = torch.zeros_like(p)
        rates = [group["lr"] for group in optimizer.param_groups]
        for group in optimizer.param_groups:
            group["lr"] = 0.0
        optimizer.step()
        for group, rate in zip(optimizer.param_groups, rates, strict=True):
            group["lr"] = rate
        train(model, optimizer, comm.rank, range(5))
        return handle.exchanges.exchange.calls

    assert between(program) == [1] * 4


def test_frozen_parameters_are_not_exchanged():
    def program(comm, mesh, model, optimizer, handle):
        train(model, optimizer, comm.rank, range(3))
        return {*handle.state_dict()["local steps"]["shared"]}, weights_of(comm, mesh, model)

    before = make().state_dict()
    for names, weights in between(program, frozen=("blocks.0",)):
        assert names == {name for name in before if "blocks.0" not in name}
        assert all(torch.equal(weights[name], x) for name, x in before.items() if "blocks.0" in name)


def test_a_parameter_that_is_unfrozen_later_is_named():
    def program(comm, mesh, model, optimizer, handle):
        train(model, optimizer, comm.rank, range(2))
        model.last.weight.requires_grad_(True)
        with pytest.raises(ArrayError, match=r"'last\.weight' was frozen when attach was called"):
            train(model, optimizer, comm.rank, [2])

    between(program, frozen=("last.weight",))


def test_a_step_ends_with_the_last_of_several_optimizers():
    def program(comm):
        model, mesh = on_mesh(comm)
        both = [
            ShardSGD(model.blocks.parameters()),
            ShardSGD([*model.first.parameters(), *model.last.parameters()]),
        ]
        together = SimpleNamespace(
            zero_grad=lambda: [each.zero_grad() for each in both], step=lambda: [each.step() for each in both]
        )
        with fsdp.attach(model, Exact(), comm=comm, replicas=DiLoCo(3), optimizers=both):
            train(model, together, comm.rank, range(STEPS))
            return weights_of(comm, mesh, model)

    for found, expected in zip(run_ranks(4, program), sharded(DiLoCo(3)), strict=True):
        assert_same_bits(found, expected)


def test_a_step_of_an_optimizer_that_was_not_given_is_an_error():
    def program(comm, mesh, model, optimizer, handle):
        with pytest.raises(ArrayError, match=r"'first\.weight' was stepped by another optimizer \(SGD\)"):
            train(model, SGD(model.parameters()), comm.rank, [0])

    between(program)


def test_a_step_that_a_scaler_leaves_out_counts():
    def program(comm, mesh, model, optimizer, handle):
        scaler = torch.amp.GradScaler("cpu", init_scale=1.0)
        for step in range(3):
            x, y = batch(step, comm.rank)
            optimizer.zero_grad()
            scaler.scale(mse_loss(model(x), y)).backward()
            if step == 1 and comm.rank >= 2:  # of one replica
                next(model.parameters()).grad.to_local().fill_(float("inf"))
            scaler.step(optimizer)
            scaler.update()
        return handle.exchanges.exchange.calls, weights_of(comm, mesh, model)

    rows = between(program)
    assert [calls for calls, _ in rows] == [1] * 4
    assert_all_equal([weights for _, weights in rows])


def test_what_close_writes_reaches_modules_that_an_evaluation_has_left_gathered():
    def program(comm, mesh, model, optimizer, handle):
        train(model, optimizer, comm.rank, range(5))
        with torch.no_grad():
            model(batch(0, 0)[0])  # leaves the root gathered
        handle.close()
        assert hasattr(model.last.weight, "to_local")

    between(program, algorithm=StreamingDiLoCo(4, fragments=1, delay=3))


def test_local_steps_go_on_if_nobody_keeps_the_handle():
    def program(comm):
        model, mesh = on_mesh(comm)
        made = ShardSGD(model.parameters())
        fsdp.attach(model, Exact(), comm=comm, replicas=DiLoCo(2), optimizers=made)
        gc.collect()
        train(model, made, comm.rank, range(4))
        return weights_of(comm, mesh, model)

    assert_all_equal(run_ranks(4, program))


REFUSED = [
    (UnsupportedError, "which replicas train locally", {"replicas": Decentralized()}),
    (ArrayError, "depends on steps: give the optimizers", {"optimizers": None}),
    (ArrayError, "no optimizer given steps", {"optimizers": "a part"}),
    (ArrayError, r"optimizer 1 \(AdamW\) is in the list twice", {"optimizers": "twice"}),
    (ArrayError, "they are for the local steps", {"replicas": Exact()}),
    (ArrayError, "expected at most one fragment per bucket", {"replicas": StreamingDiLoCo(fragments=10_000)}),
    (CommMismatch, "ranks differ: replicas is DiLoCo", {"replicas": "by rank"}),
    (ArrayError, "but the root module has none", {"sites": 0}),
    (UnsupportedError, "leave Hierarchical out", {"replicas": DiLoCo(average=Hierarchical(ErrorFeedback()))}),
    (UnsupportedError, "float64", {"replicas": DiLoCo(average=Quantized(Int4())), "double": True}),
]


@pytest.mark.parametrize(("error", "text", "given"), REFUSED, ids=[text for _, text, _ in REFUSED])
def test_what_does_not_fit_is_refused_on_all_ranks(error, text, given):
    def program(comm):
        settings = {"replicas": DiLoCo(3), **given}
        sites, double = settings.pop("sites", 2), settings.pop("double", False)
        thread_groups.renew(comm)
        mesh = init_device_mesh("cpu", (sites, 2), mesh_dim_names=("replicas", "shards")) if sites else None
        with thread_groups.LOCK:
            model = make().double() if double else make()
        shard(model, mesh=mesh)
        made = AdamW(model.parameters())
        optimizers = settings.pop("optimizers", made)
        if optimizers == "a part":
            optimizers = AdamW([model.first.weight])
        if optimizers == "twice":
            optimizers = [made, made]
        if settings["replicas"] == "by rank":
            settings["replicas"] = DiLoCo(3 + (comm.rank == 2))
        with pytest.raises(error, match=text):
            fsdp.attach(model, Exact(), comm=comm, optimizers=optimizers, **settings)

    run_ranks(4, program)


class Elastic:
    """A training with local steps on a fleet of threads, in which the processes `dying` die after a step.

    Four ranks are two sites of two, and two are one site.
    """

    def __init__(self, job, dying=(), step=3, algorithm=None, again=None):
        self.job, self.dying, self.step, self.algorithm = job, dying, step, algorithm or DiLoCo(2)
        self.committed, self.restored, self.begun = {}, {}, {}
        self.killed, self.again = False, again  # the step before which the handle is closed, and made again

    def body(self, fleet):
        state = State(step=0)
        return run(state, fleet=fleet)(lambda comm: self.train(fleet, state, comm))

    def train(self, fleet, state, comm):
        model, _ = on_mesh(comm, sites=comm.size // 2)
        optimizer = ShardSGD(model.parameters())
        settings = {"comm": comm, "replicas": self.algorithm, "optimizers": optimizer}
        handle = fsdp.attach(model, Exact(), **settings)
        state.register(model=model, optimizer=optimizer)
        if state.step:
            self.restored[fleet.me] = self.outer(comm, handle)
            model(batch(0, 0)[0])
            self.begun[fleet.me] = whole_shards(comm, dict(model.named_parameters()))
        while state.step <= self.step:
            if state.step == self.again:
                handle.close()
                handle = fsdp.attach(model, Exact(), **settings)
            train(model, optimizer, comm.rank, [state.step])
            state.step += 1
            state.commit()
            if state.step == self.step and not self.killed:
                self.committed[fleet.me] = self.outer(comm, handle)
                comm.barrier()
                if fleet.me == self.dying[0]:
                    self.killed = True
                    self.job.kill(*self.dying)
        return comm.size, whole_shards(comm, dict(model.named_parameters()))

    def outer(self, comm, handle):
        shared = handle.state_dict()["local steps"]["shared"]
        tensors = {f"{name} {path}": x for name, found in shared.items() for path, x in found.items()}
        return whole_shards(comm, tensors)


def test_a_site_that_is_lost_is_survived_from_the_anchors():
    training = Elastic(ThreadJob(4), dying=(2, 3), step=4, algorithm=SparseLoCo(2), again=1)
    ended = results(run_fleet(training.job, training.body, limit_s=100))
    assert [size for size, _ in ended] == [2, 2]
    assert_all_equal([weights for _, weights in ended])
    for number in (0, 1):
        assert_same_bits(training.restored[number], training.committed[number])
        anchors = {name: training.committed[number][f"{name} anchor"] for name in training.begun[number]}
        assert_same_bits(training.begun[number], anchors)


def test_with_spares_the_site_that_was_lost_goes_on_as_well():
    training = Elastic(ThreadJob(6, wanted=4), dying=(2, 3))
    ended = results(run_fleet(training.job, training.body, limit_s=100))
    assert [size for size, _ in ended] == [4] * 4
    assert_all_equal([weights for _, weights in ended])  # step 4 is an outer one
    anchors = {name: training.committed[0][f"{name} anchor"] for name in training.begun[0]}
    for begun in training.begun.values():
        assert_same_bits(begun, anchors)
