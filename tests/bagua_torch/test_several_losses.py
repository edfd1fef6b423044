"""Several backward passes in one step: gradients are averaged, or an optimizer is kept from using them."""

import contextlib
import types
import warnings

import pytest
import torch
from support.torch_training import QADAM, batch, filled, wrapped
from torch import nn

from bagua_comm import (
    ArrayError,
    ByteGrad,
    CommError,
    Decentralized,
    DiLoCo,
    GradientAllReduce,
    LowPrecisionDecentralized,
    Reproducible,
    every,
)
from bagua_comm.testing import run_ranks
from bagua_torch import DistributedDataParallel


class Heads(nn.Module):
    """Two outputs from separate heads, and from a shared trunk if there is one."""

    def __init__(self, *, shared=True, wrap=lambda a, b: (a, b)):
        super().__init__()
        self.trunk = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)) if shared else nn.Identity()
        self.a, self.b = nn.Linear(4, 1), nn.Linear(4, 1)
        self.wrap = wrap

    def forward(self, x):
        hidden = self.trunk(x)
        return self.wrap(self.a(hidden).square().mean(), self.b(hidden).square().mean())


def make_heads(**settings):
    return filled(Heads(**settings))


def expected_gradients(ranks, passes=((0,), (1,)), **settings):
    """The mean over ranks of what the backward passes through these outputs compute together."""
    models = [make_heads(**settings) for _ in range(ranks)]
    for rank, model in enumerate(models):
        outputs = model(batch(rank, 0))
        for numbers in passes:
            sum(outputs[number] for number in numbers).backward(retain_graph=True)
    return [torch.stack(each).mean(0) for each in zip(*map(_gradients, models), strict=True)]


def _gradients(model):
    return [parameter.grad for parameter in model.parameters()]


@pytest.mark.covering(1)
@pytest.mark.parametrize("shared", [True, False], ids=["shared trunk", "separate heads"])
@pytest.mark.parametrize("order", [(0, 1), (1, 0)], ids=str)
@pytest.mark.parametrize("find_unused", [False, True])
def test_the_gradients_of_two_losses_are_averaged(shared, order, find_unused):
    ranks = 3

    def body(comm):
        model = make_heads(shared=shared)
        ddp = DistributedDataParallel(model, comm=comm, bucket_bytes=64, find_unused_parameters=find_unused)
        for _ in range(2):
            model.zero_grad()
            losses = ddp(batch(comm.rank, 0))
            for number in order:
                losses[number].backward(retain_graph=shared and number == order[0])
        ddp.close()
        return _gradients(model)

    expected = expected_gradients(ranks, shared=shared)
    for actual in run_ranks(ranks, body, timeout_s=5):
        torch.testing.assert_close(actual, expected)


def test_passes_of_several_losses_are_those_of_the_first_step_in_a_static_graph():
    def body(comm):
        model = make_heads()
        ddp = DistributedDataParallel(model, comm=comm, static_graph=True)
        for _ in range(3):
            model.zero_grad()
            a, b = ddp(batch(comm.rank, 0))
            a.backward(retain_graph=True)
            assert model.b.weight.grad is None
            b.backward()
        a, b = ddp(batch(comm.rank, 0))
        with pytest.raises(ArrayError, match="static_graph is True"):
            b.backward()
        ddp._steps.detach()
        return True

    assert all(run_ranks(2, body, timeout_s=5))


def test_ranks_of_a_static_graph_ask_once_where_each_step_is_one_of_expect_backward():
    def body(comm):
        model, optimizer, ddp = wrapped(comm, model=make_heads(), lr=0.1, static_graph=True)
        asked = []
        for number in range(3):
            before = comm.counters.by_operation["allreduce"].calls
            optimizer.zero_grad()
            ddp.expect_backward()
            sum(model(batch(comm.rank, number))).backward()
            optimizer.step()
            asked.append(comm.counters.by_operation["allreduce"].calls - before)
        ddp.close()
        return asked

    assert run_ranks(2, body, timeout_s=5) == [[1, 0, 0]] * 2


class Opaque:
    """Outputs that a module may return, one of which refers to itself."""

    def __init__(self, a, b):
        self.losses, self.owner = types.SimpleNamespace(a=a, b=b), self

    def __iter__(self):
        return iter((self.losses.a, self.losses.b))


def test_outputs_are_found_in_objects():
    def body(comm):
        model = make_heads(wrap=Opaque)
        ddp = DistributedDataParallel(model, comm=comm)
        a, b = ddp(batch(comm.rank, 0))
        a.backward(retain_graph=True)
        b.backward()
        ddp.close()
        return _gradients(model)

    for actual in run_ranks(2, body, timeout_s=5):
        torch.testing.assert_close(actual, expected_gradients(2))


@pytest.mark.parametrize("divide", [True, False])
def test_a_rank_without_data_joins_in_every_pass(divide):
    def body(comm):
        model, optimizer, ddp = wrapped(comm, model=make_heads(), lr=0.0)
        with ddp.join(divide_by_initial_size=divide):
            for _ in range(1 + comm.rank):
                optimizer.zero_grad()
                a, b = ddp(batch(comm.rank, 0))
                a.backward(retain_graph=True)
                b.backward()
                optimizer.step()
        ddp.close()
        return _gradients(model), model.trunk[1].running_mean.clone()

    alone = make_heads()
    for loss in alone(batch(1, 0)):
        loss.backward(retain_graph=True)
    (_, first), (actual, second) = run_ranks(2, body, timeout_s=5)
    torch.testing.assert_close(actual, [g / 2 if divide else g for g in _gradients(alone)])
    assert torch.equal(first, second)


@pytest.mark.parametrize("algorithm", [ByteGrad(), GradientAllReduce(Reproducible())], ids=repr)
def test_a_rounding_average_is_the_same_on_all_ranks_after_each_pass(algorithm):
    def body(comm):
        model = make_heads()
        ddp = DistributedDataParallel(model, algorithm=algorithm, comm=comm)
        a, b = ddp(batch(comm.rank, 0))
        a.backward(retain_graph=True)
        b.backward()
        ddp.close()
        return _gradients(model)

    first, second = run_ranks(2, body, timeout_s=5)
    assert all(map(torch.equal, first, second))
    exact = expected_gradients(2)
    scale = max(g.abs().max() for g in exact)
    for actual, gradient in zip(first, exact, strict=True):
        torch.testing.assert_close(actual, gradient, rtol=0, atol=float(scale) / 32)


@pytest.mark.parametrize(
    "algorithm",
    [
        Decentralized(),
        DiLoCo(local_steps=2),
        pytest.param(LowPrecisionDecentralized(), marks=pytest.mark.slow),
        pytest.param(every(2, Decentralized()), marks=pytest.mark.slow),
    ],
    ids=repr,
)
def test_where_weights_are_exchanged_two_losses_make_one_step(algorithm):
    def body(comm, split):
        model, optimizer, ddp = wrapped(comm, algorithm, model=make_heads(shared=False))
        for step in range(4):
            optimizer.zero_grad()
            a, b = ddp(batch(comm.rank, step))
            if split:
                a.backward()
                b.backward()
            else:
                (a + b).backward()
            optimizer.step()
        steps = ddp.engine.step
        ddp.close()
        return steps, [parameter.detach().clone() for parameter in model.parameters()]

    split, together = (run_ranks(2, lambda comm, s=s: body(comm, s), timeout_s=5) for s in (True, False))
    for (steps, actual), (_, expected) in zip(split, together, strict=True):
        assert steps == 4
        torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize(
    ("algorithm", "steps"), [(QADAM, 4), (GradientAllReduce(Reproducible(addends=4)), 1)], ids=repr
)
def test_an_algorithm_that_cannot_average_twice_in_a_step_says_so_on_all_ranks(algorithm, steps):
    """QAdam after its warm-up of three steps; sums of a number of microbatches, which is then too low."""

    def body(comm):
        _, optimizer, ddp = wrapped(comm, algorithm, model=make_heads(shared=False))
        for step in range(steps):
            optimizer.zero_grad()
            for _ in ddp.microbatches() if steps == 1 else range(1):
                a, b = ddp(batch(comm.rank, step))
                if step < steps - 1:
                    (a + b).backward()
                else:
                    a.backward()
            if step < steps - 1:
                optimizer.step()
        with pytest.raises((ArrayError, CommError), match=r"no_sync|addends"):
            b.backward()
        ddp._steps.detach()

    run_ranks(2, body, timeout_s=5)


# Gradients that stay on their rank --------------------------------------------------------------------------


class Tools(nn.Module):
    """A module with a method beside its forward pass, and a loss that it does not return."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 1)
        self.penalty = None

    def forward(self, x):
        y = self.layer(x)
        self.penalty = y.abs().mean()
        return y.square().mean()

    def method(self, x):
        return self.layer(x).square().mean()


def stray_by_method(ddp, x):
    ddp.method(x).backward()


def stray_by_hidden_loss(ddp, x):
    loss = ddp(x)
    loss.backward(retain_graph=True)
    ddp.module.penalty.backward()


def stray_by_weights(ddp, x):
    ddp(x).backward()
    ddp.module.layer.weight.square().sum().backward()


STRAYS = [stray_by_method, stray_by_hidden_loss, stray_by_weights]


@pytest.mark.covering(1)
@pytest.mark.parametrize("stray", STRAYS)
@pytest.mark.parametrize("given", [True, False], ids=["given", "not given"])
def test_no_optimizer_continues_with_a_gradient_that_is_not_averaged(stray, given):
    def body(comm):
        model = filled(Tools())
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        ddp = DistributedDataParallel(model, optimizer if given else [], comm=comm)
        ddp(batch(comm.rank, 0)).backward()
        optimizer.step()
        stray(ddp, batch(comm.rank, 1))
        if not given:
            optimizer.step()
        go_on = optimizer.step if given else lambda: ddp(batch(comm.rank, 2))
        with pytest.raises(ArrayError, match=r"'layer.(weight|bias)' .* is not averaged: .* expect_backward\(\)"):
            go_on()
        ddp.close()

    run_ranks(2, body, timeout_s=5)


def test_an_error_on_one_rank_alone_reaches_the_others():
    def body(comm):
        _, optimizer, ddp = wrapped(comm, model=filled(Tools()), lr=0.1)
        for step in range(2):
            ddp(batch(comm.rank, step)).backward()
            if comm.rank == 1:
                stray_by_method(ddp, batch(1, step))
            optimizer.step()

    with pytest.raises(ArrayError, match="is not averaged"):
        run_ranks(2, body, timeout_s=60)  # no rank waits that long


def after_expect_backward(ddp, x):
    ddp(x).backward()
    ddp.expect_backward()
    ddp.module.penalty.detach()
    ddp.method(x).backward()


def in_no_sync(ddp, x):
    ddp(x).backward()
    with ddp.no_sync():
        ddp.method(x).backward()


def by_the_module(ddp, x):
    local = ddp.module(x)
    ddp(x).backward()
    local.backward()


def through_a_pass_of_no_sync(ddp, x):
    with ddp.no_sync():
        local = ddp(x)
    ddp(x).backward()
    local.backward()


def before_an_average(ddp, x):
    ddp.method(x).backward()
    ddp(x).backward()


def without_a_trace(ddp, x):
    ddp(x).backward()
    ddp.method(x).backward()
    ddp.zero_grad()


def of_the_inputs(ddp, x):
    ddp(x).backward()
    torch.autograd.grad(ddp.method(x.requires_grad_()), x)


@pytest.mark.parametrize(
    "passes",
    [
        after_expect_backward,
        in_no_sync,
        by_the_module,
        through_a_pass_of_no_sync,
        before_an_average,
        without_a_trace,
        of_the_inputs,
    ],
)
def test_an_optimizer_may_use_gradients_that_are_averaged_or_stay_on_their_rank(passes):
    def body(comm):
        _, optimizer, ddp = wrapped(comm, model=filled(Tools()), lr=0.0)
        for step in range(2):
            optimizer.zero_grad()
            passes(ddp, batch(comm.rank, step))
            optimizer.step()
        ddp.close()

    run_ranks(2, body, timeout_s=5)


def test_where_nothing_is_averaged_an_optimizer_may_use_any_gradient():
    def body(comm, algorithm):
        _, optimizer, ddp = wrapped(comm, algorithm, model=filled(Tools()), lr=0.0)
        for stray in STRAYS:
            ddp(batch(comm.rank, 0)).backward()
            stray(ddp, batch(comm.rank, 1))
            optimizer.step()
        ddp.close()

    run_ranks(1, lambda comm: body(comm, None), timeout_s=5)
    run_ranks(2, lambda comm: body(comm, Decentralized()), timeout_s=5)


def test_a_module_of_two_wrappers_is_averaged_by_the_one_that_ran_it():
    def body(comm):
        trunk, a, b = nn.Linear(4, 4), nn.Linear(4, 1), nn.Linear(4, 1)
        models = [nn.Sequential(trunk, a), nn.Sequential(trunk, b)]
        optimizers = [torch.optim.SGD(model.parameters(), lr=0.1) for model in models]
        wrappers = [
            DistributedDataParallel(model, optimizer, comm=comm)
            for model, optimizer in zip(models, optimizers, strict=True)
        ]
        for ddp, optimizer in zip(wrappers * 2, optimizers * 2, strict=True):
            optimizer.zero_grad()
            ddp(batch(comm.rank, 0)).square().sum().backward()
            optimizer.step()
        for ddp in wrappers:
            ddp.close()
        return trunk.weight.detach().clone()

    first, second = run_ranks(2, body, timeout_s=5)
    assert torch.equal(first, second)


def test_after_a_pass_of_inputs_alone_a_pass_of_the_module_stays_on_its_rank():
    def body(comm):
        model = make_heads(shared=False)
        ddp = DistributedDataParallel(model, comm=comm)
        x = batch(comm.rank, 0).requires_grad_()
        a, b = ddp(x)
        (a + b).backward(retain_graph=True)
        torch.autograd.grad(a, x)
        with contextlib.nullcontext() if comm.rank else ddp.no_sync():
            sum(ddp.module(x)).backward()
        calls = ddp.engine.counter.calls
        ddp.close()
        return calls

    assert run_ranks(2, body, timeout_s=5) == [1, 1]


@pytest.mark.parametrize("algorithm", [ByteGrad(), DiLoCo(2)], ids=repr)
def test_a_step_warns_if_the_wrapper_was_never_called(algorithm):
    def train(comm):
        model = nn.Linear(4, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        ddp = DistributedDataParallel(model, [optimizer], algorithm, comm=comm)
        for _ in range(2):
            model(torch.ones(2, 4)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        ddp.close()

    with pytest.warns(UserWarning, match="SGD steps, but no forward pass has gone through the wrapper") as warned:
        run_ranks(2, train)
    assert {each.filename for each in warned} == {__file__}
    assert len(warned) == 2  # once on each rank


def train_in(ways, *, comm, algorithm=None, given=True):
    """Steps of a model, whose gradient comes from each of these ways."""
    model = nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    ddp = DistributedDataParallel(model, [optimizer] if given else None, algorithm, comm=comm)
    x = torch.full((2, 4), comm.rank + 1.0)
    for way in ways:
        if "stop" in way:
            ddp.stop()
        if "average" in way:
            ddp(x).sum().backward()
        if "raw" in way:
            model(x).sum().backward()
        if "no_sync" in way:
            with ddp.no_sync():
                ddp(x).sum().backward()
        if "zero" not in way:
            optimizer.step()
        optimizer.zero_grad()
        if "stop" in way:
            ddp.resume()
    ddp.close()


LOCAL = [("average", "average", "raw", "raw"), ("no_sync", "no_sync"), ("average", "average no_sync")]


@pytest.mark.parametrize("given", [True, False])
@pytest.mark.parametrize("ways", LOCAL)
def test_a_step_by_gradients_of_this_rank_alone_warns_once(ways, given):
    with pytest.warns(UserWarning, match="by a gradient of this rank alone, so weights differ") as warned:
        run_ranks(2, lambda comm: train_in(ways, comm=comm, given=given))
    assert len(warned) == 2  # once on each rank
    assert not given or {each.filename for each in warned} == {__file__}


@pytest.mark.parametrize("averaged", [True, False])
def test_a_closure_makes_the_averaged_pass_of_its_step(averaged):
    def body(comm):
        torch.manual_seed(0)
        model = torch.nn.Linear(3, 2)
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        ddp = DistributedDataParallel(model, [optimizer], comm=comm)

        def closure():
            loss = (ddp if averaged else model)(torch.full((2, 3), 1.0 + comm.rank)).square().sum()
            loss.backward()
            return loss

        for _ in range(2):
            optimizer.zero_grad()
            with ddp.no_sync():
                ddp(torch.ones(2, 3)).sum().backward()
            optimizer.step(closure)
        ddp.close()

    if averaged:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            run_ranks(2, body)
    else:
        with pytest.warns(UserWarning, match="by a gradient of this rank alone, so weights differ"):
            run_ranks(2, body)


def test_a_step_of_weights_that_are_not_exchanged_warns():
    with pytest.warns(UserWarning, match="by a gradient of this rank alone, so weights differ"):
        run_ranks(2, lambda comm: train_in(["average", "raw"], comm=comm, algorithm=Decentralized()))


@pytest.mark.filterwarnings("error::UserWarning")
def test_a_step_of_weights_that_are_exchanged_does_not_warn():
    exchanged = ["average", "average no_sync", "raw zero", "average"]
    run_ranks(2, lambda comm: train_in(exchanged, comm=comm, algorithm=Decentralized()))


@pytest.mark.filterwarnings("error::UserWarning")
@pytest.mark.parametrize("given", [True, False])
def test_gradients_that_are_not_stepped_or_stay_on_purpose_do_not_warn(given):
    ways = ["average", "raw zero", "no_sync zero", "average", "stop raw", "stop no_sync", "average"]
    run_ranks(2, lambda comm: train_in(ways, comm=comm, given=given))
    run_ranks(1, lambda comm: train_in(["average", "raw", "no_sync"], comm=comm, given=given))
