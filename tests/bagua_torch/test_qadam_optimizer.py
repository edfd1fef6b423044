"""QAdamOptimizer: by itself, beside torch.optim.Adam, and beside the algorithm."""

import copy

import numpy as np
import pytest
import torch
from support.torch_training import batch, gradients, loss_of, make_model, through_a_file, train_step, weights
from torch import nn

from bagua_comm import ArrayError, Exact, GradientAllReduce, QAdam, optim
from bagua_comm.testing import run_ranks, sample
from bagua_torch import DistributedDataParallel, QAdamOptimizer, as_array


@pytest.mark.parametrize(("betas", "weight_decay"), [((0.9, 0.999), 0.0), ((0.5, 0.9), 0.1), ((0.0, 0.99), 0.1)])
def test_in_the_warm_up_it_is_adam_to_the_bit(weight_decay, betas):
    models = make_model(), make_model()
    settings = {"lr": 0.01, "betas": betas, "weight_decay": weight_decay}
    ours = QAdamOptimizer(models[0].parameters(), warmup_steps=20, **settings)
    theirs = torch.optim.Adam(models[1].parameters(), **settings)

    for step in range(20):
        for model, optimizer in zip(models, (ours, theirs), strict=True):
            train_step(model, optimizer, batch(0, step))
        assert torch.equal(weights(models[0]), weights(models[1])), f"step {step}"

    for (name, mine), other in zip(ours.state.items(), theirs.state.values(), strict=True):
        assert int(mine["step"]) == int(other["step"]), name
        assert torch.equal(mine["exp_avg"], other["exp_avg"])
        assert torch.equal(mine["exp_avg_sq"], other["exp_avg_sq"])


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_in_the_warm_up_it_is_adam_in_other_precisions(dtype):
    models = make_model().to(dtype), make_model().to(dtype)
    optimizers = [
        QAdamOptimizer(models[0].parameters(), lr=0.01, warmup_steps=20),
        torch.optim.Adam(models[1].parameters(), lr=0.01, foreach=False),
    ]

    for step in range(10):
        for model, optimizer in zip(models, optimizers, strict=True):
            train_step(model, optimizer, batch(0, step).to(dtype))

    assert torch.equal(weights(models[0]), weights(models[1]))


def test_groups_and_schedules_are_those_of_adam():
    models = make_model(), make_model()
    optimizers = []
    for model, make in zip(models, (QAdamOptimizer, torch.optim.Adam), strict=True):
        *first, weight, bias = model.parameters()
        groups = [{"params": first}, {"params": [weight, bias], "lr": 0.1, "betas": (0.9, 0.9), "eps": 1e-3}]
        optimizers.append(make(groups, lr=0.01))
    schedules = [torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9) for optimizer in optimizers]

    for step in range(10):
        for model, optimizer, schedule in zip(models, optimizers, schedules, strict=True):
            train_step(model, optimizer, batch(0, step))
            schedule.step()

    assert torch.equal(weights(models[0]), weights(models[1]))


@pytest.mark.parametrize("weight_decay", [0.0, 0.1])
def test_alone_it_freezes_its_variance_after_the_warm_up(weight_decay):
    """Its formula is that of the optimizer of flat arrays, with the momentum of one rank."""
    x = sample(0, (50,), "float64")
    parameter = nn.Parameter(torch.from_numpy(x.copy()))
    settings = {"lr": 0.01, "warmup_steps": 5, "weight_decay": weight_decay}
    optimizer = QAdamOptimizer([parameter], **settings)
    reference = optim.QAdam(**settings)
    state, momentum = reference.init(x), np.zeros_like(x)

    for step in range(20):
        g = sample(0, (50,), "float64", seed=step)
        parameter.grad = torch.from_numpy(g.copy())
        optimizer.step()
        if step >= 5:  # else the reference does it
            momentum += (1 - 0.9) * (g - momentum)
        reference.step(x, g, state, momentum)

    np.testing.assert_allclose(parameter.detach().numpy(), x, rtol=1e-12)
    np.testing.assert_allclose(optimizer.state[parameter]["exp_avg_sq"].numpy(), state.variance, rtol=1e-12)


@pytest.mark.parametrize("warmup_steps", [1, 3, 100])
def test_the_algorithm_beside_it_changes_nothing_on_one_rank(warmup_steps):
    def trained(comm, algorithm):
        model = make_model()
        optimizer = QAdamOptimizer(model.parameters(), lr=0.01, warmup_steps=warmup_steps, weight_decay=0.1)
        ddp = DistributedDataParallel(model, optimizer, algorithm, comm=comm)
        for step in range(6):
            train_step(ddp, optimizer, batch(0, step))
        ddp.close()
        return weights(model)

    def body(comm):
        return trained(comm, QAdam(warmup_steps=warmup_steps)), trained(comm, GradientAllReduce())

    ((beside, alone),) = run_ranks(1, body)
    torch.testing.assert_close(beside, alone, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize(("ranks", "weight_decay"), [(2, 0.1), (3, 0.0)])
def test_averaged_exactly_it_is_one_optimizer_on_the_mean_gradient(ranks, weight_decay):
    """Before, at and after the end of the warm-up."""

    def make_optimizer(model):
        return QAdamOptimizer(model.parameters(), lr=0.01, warmup_steps=4, weight_decay=weight_decay)

    plain = make_model()
    plain_optimizer, expected = make_optimizer(plain), []
    for step in range(7):
        plain_optimizer.zero_grad()
        sum(loss_of(plain, batch(rank, step)) / ranks for rank in range(ranks)).backward()
        plain_optimizer.step()
        expected.append(weights(plain))

    def body(comm):
        model, steps = make_model(), []
        optimizer, algorithm = make_optimizer(model), QAdam(warmup_steps=4, average=Exact())
        ddp = DistributedDataParallel(model, optimizer, algorithm, comm=comm, bucket_bytes=100)
        for step in range(7):
            train_step(ddp, optimizer, batch(comm.rank, step))
            steps.append(weights(model))
        ddp.close()
        return steps

    for steps in run_ranks(ranks, body):
        for actual, wanted in zip(steps, expected, strict=True):
            torch.testing.assert_close(actual, wanted, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("at", [2, 4, 7])
def test_its_checkpoint_restarts_bit_for_bit(at):
    def train(model, optimizer, first, last):
        for step in range(first, last):
            train_step(model, optimizer, batch(0, step))

    model = make_model()
    optimizer = QAdamOptimizer(model.parameters(), lr=0.01, warmup_steps=4)
    train(model, optimizer, 0, at)
    saved = through_a_file([model.state_dict(), optimizer.state_dict()])
    train(model, optimizer, at, 10)

    other = make_model(seed=1)
    other_optimizer = QAdamOptimizer(other.parameters(), lr=0.01, warmup_steps=4)
    other.load_state_dict(saved[0])
    other_optimizer.load_state_dict(saved[1])
    train(other, other_optimizer, at, 10)

    assert torch.equal(weights(other), weights(model))


def test_a_checkpoint_holds_no_more_than_the_momenta():
    """They are views of buckets while they are shared; a plain optimizer loads them."""

    def body(comm):
        model = make_model()
        optimizer = QAdamOptimizer(model.parameters(), lr=0.01, warmup_steps=2)
        ddp = DistributedDataParallel(model, optimizer, QAdam(warmup_steps=2), comm=comm)
        for step in range(4):
            train_step(ddp, optimizer, batch(comm.rank, step))
        saved = through_a_file(optimizer.state_dict())
        ddp.close()
        plain = QAdamOptimizer(make_model().parameters(), lr=0.01, warmup_steps=2)
        plain.load_state_dict(saved)
        mine = torch.cat([state["exp_avg"].reshape(-1) for state in optimizer.state.values()])
        theirs = torch.cat([state["exp_avg"].reshape(-1) for state in plain.state.values()])
        assert torch.equal(mine, theirs)
        comm.check_consistency(as_array(mine))

    run_ranks(2, body)


def test_closing_gives_the_momenta_back():
    def body(comm):
        model = make_model()
        optimizer = QAdamOptimizer(model.parameters(), lr=0.01, warmup_steps=2)
        ddp = DistributedDataParallel(model, optimizer, QAdam(warmup_steps=2), comm=comm)
        for step in range(4):
            train_step(ddp, optimizer, batch(comm.rank, step))
        flats = [state.momentum for state in ddp.engine.states]
        ddp.close()
        for state in optimizer.state.values():
            assert not any(np.shares_memory(as_array(state["exp_avg"]), flat) for flat in flats)
        train_step(model, optimizer, batch(0, 4))
        assert gradients(model).isfinite().all()
        return weights(model)

    first, second = run_ranks(2, body)
    assert torch.equal(first, second)


def test_a_copy_trains_on():
    model = make_model()
    optimizer = QAdamOptimizer(model.parameters(), lr=0.01, warmup_steps=2)
    train_step(model, optimizer, batch(0, 0))

    copied_model, copied = copy.deepcopy((model, optimizer))
    train_step(model, optimizer, batch(0, 1))
    train_step(copied_model, copied, batch(0, 1))

    assert torch.equal(weights(copied_model), weights(model))


def test_a_weight_without_a_gradient_in_the_warm_up_stays_as_it_is():
    parameter = nn.Parameter(torch.ones(2))
    optimizer = QAdamOptimizer([parameter], lr=0.1, warmup_steps=2)

    for step in range(5):
        parameter.grad = torch.tensor([1.0, 0.0 if step < 2 else 1.0])
        optimizer.step()

    assert parameter[0] < 0.7
    assert parameter[1] == 1


WRONG = [{"warmup_steps": 0}, {"betas": (1.0, 0.999)}, {"betas": (0.9, -0.1)}, {"lr": -1.0}, {"eps": -1.0}]


@pytest.mark.parametrize("settings", [*WRONG, {"weight_decay": -0.1}], ids=repr)
def test_a_setting_out_of_range_is_refused(settings):
    with pytest.raises(ArrayError, match=next(iter(settings))):
        QAdamOptimizer([nn.Parameter(torch.ones(1))], **settings)


@pytest.mark.parametrize("setting", [{"warmup_steps": 5}, {"betas": (0.5, 0.999)}], ids=repr)
def test_groups_that_cannot_share_one_average_are_refused_also_later(setting):
    groups = [{"params": [nn.Parameter(torch.ones(1))]}, {"params": [nn.Parameter(torch.ones(1))], **setting}]
    for call in (lambda: QAdamOptimizer(groups), lambda: QAdamOptimizer(groups[:1]).add_param_group(groups[1])):
        with pytest.raises(ArrayError, match="all groups must have the same"):
            call()
