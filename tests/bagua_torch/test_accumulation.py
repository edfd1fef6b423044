"""Gradients accumulated over several passes, in any way: a step is one of the optimizers."""

import contextlib
import functools

import pytest
import torch
from support.torch_training import (
    WEIGHT_ALGORITHMS,
    batch,
    filled,
    gradients,
    loss_of,
    make_model,
    sgd,
    weights,
    wrapped,
)
from torch import nn
from torch.utils.checkpoint import checkpoint

from bagua_comm import ByteGrad, Decentralized, DiLoCo, GradientAllReduce, Point, SparseLoCo, after
from bagua_comm.testing import run_ranks
from bagua_torch import DistributedDataParallel

PARTS = 3
"""Microbatches of a step."""


def parts(rank, step):
    return [batch(rank, 10 * step + part) for part in range(PARTS)]


def passes_alone(ddp, xs):
    for x in xs:
        loss_of(ddp, x).backward()


def by_attribute(ddp, xs):
    for number, x in enumerate(xs):
        ddp.require_backward_grad_sync = number == len(xs) - 1
        loss_of(ddp, x).backward()


def by_no_sync(ddp, xs):
    for number, x in enumerate(xs):
        with contextlib.nullcontext() if number == len(xs) - 1 else ddp.no_sync():
            loss_of(ddp, x).backward()


def the_first_one_averaged(ddp, xs):
    loss_of(ddp, xs[0]).backward()
    with ddp.no_sync():
        for x in xs[1:]:
            loss_of(ddp, x).backward()


def forward_passes_first(ddp, xs):
    for loss in [loss_of(ddp, x) for x in xs]:
        loss.backward()


def one_backward_pass(ddp, xs):
    sum(loss_of(ddp, x) for x in xs).backward()


def a_graph_kept(ddp, xs):
    first = loss_of(ddp, xs[0])
    first.backward(retain_graph=True)
    sum(loss_of(ddp, x) for x in xs[1:]).backward()


def with_an_evaluation_between(ddp, xs):
    for x in xs:
        loss_of(ddp, x).backward()
        ddp.eval()
        with torch.no_grad():
            ddp(x)
        ddp.train()


def in_evaluation_mode(ddp, xs):
    ddp.eval()
    passes_alone(ddp, xs)
    ddp.train()


WAYS = [
    passes_alone,
    by_attribute,
    by_no_sync,
    the_first_one_averaged,
    forward_passes_first,
    one_backward_pass,
    a_graph_kept,
    with_an_evaluation_between,
    in_evaluation_mode,
]


def trained(way, algorithm, *, closure=False):
    """The weights of each rank after each step, and the numbers of steps and of exchanges."""

    def body(comm):
        model, optimizer, ddp = wrapped(comm, algorithm)
        after = []
        for step in range(4):

            def compute(step=step):
                optimizer.zero_grad()
                way(ddp, parts(comm.rank, step))
                return 0.0

            if closure:
                optimizer.step(compute)
            else:
                compute()
                optimizer.step()
            ddp.engine.settle()  # writes back what was exchanged
            after.append(weights(model))
        counted, calls = ddp.engine.step, ddp.engine.counter.calls
        ddp.close()
        return torch.stack(after), counted, calls

    return run_ranks(2, body, timeout_s=10)


@functools.cache
def in_one_pass(algorithm):
    return trained(one_backward_pass, algorithm)


@pytest.mark.algorithms("sample")
@pytest.mark.covering(1)
@pytest.mark.parametrize("closure", [False, True])
@pytest.mark.parametrize("way", WAYS, ids=lambda way: way.__name__)
@pytest.mark.parametrize("algorithm", [*WEIGHT_ALGORITHMS, SparseLoCo(2)], ids=repr)
def test_weights_are_exchanged_once_for_the_microbatches_of_a_step(algorithm, way, closure):
    """Each way trains as one pass over all microbatches does, after each step.

    Decentralized mixes weights in the first averaged pass: only then are later ones computed with mixed weights.
    """
    mixes_first = algorithm.window.closes is Point.BACKWARD
    if mixes_first and way is forward_passes_first:
        pytest.skip("the second graph would need weights from before they were mixed, which is an error")
    alike = not mixes_first or way in (by_attribute, by_no_sync, one_backward_pass)
    ranks = trained(way, algorithm, closure=closure)
    for (actual, counted, calls), (wanted, _, expected) in zip(ranks, in_one_pass(algorithm), strict=True):
        assert (counted, calls) == (4, expected)
        if alike:
            torch.testing.assert_close(actual, wanted, rtol=1e-4, atol=1e-5)


def diloco(ranks, steps, *, every, outer_lr, outer_momentum, skipped=()):
    """DiLoCo written from its paper, over plain models: the weights of each rank after each step.

    In the steps `skipped`, the optimizer of rank 1 does not step.
    """
    models = [make_model() for _ in range(ranks)]
    optimizers = [sgd(model.parameters()) for model in models]
    anchor = weights(models[0])
    momentum, after = torch.zeros_like(anchor), [[] for _ in models]
    for step in range(steps):
        for rank, (model, optimizer) in enumerate(zip(models, optimizers, strict=True)):
            optimizer.zero_grad()
            for x in parts(rank, step):
                loss_of(model, x).backward()
            if rank != 1 or step not in skipped:
                optimizer.step()
        if (step + 1) % every == 0:
            change = torch.stack([anchor - weights(model) for model in models]).mean(0)
            momentum = outer_momentum * momentum + change
            anchor = anchor - outer_lr * (change + outer_momentum * momentum)
            for model in models:
                nn.utils.vector_to_parameters(anchor.clone(), model.parameters())
        for model, rows in zip(models, after, strict=True):
            rows.append(weights(model))
    return [torch.stack(rows) for rows in after]


@pytest.mark.parametrize("way", [passes_alone, by_attribute], ids=lambda way: way.__name__)
def test_diloco_counts_steps_of_the_optimizer_as_its_paper_does(way):
    settings = {"outer_lr": 0.7, "outer_momentum": 0.5}
    expected = diloco(2, 4, every=2, **settings)
    for (actual, *_), wanted in zip(trained(way, DiLoCo(2, **settings)), expected, strict=True):
        torch.testing.assert_close(actual, wanted, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("clears_late", [False, True])
@pytest.mark.parametrize("synced", [False, True])
def test_a_step_that_a_scaler_leaves_out_on_one_rank_counts_once(synced, clears_late):
    settings, skipped = {"outer_lr": 0.7, "outer_momentum": 0.5}, (1, 2)

    def body(comm):
        model, optimizer, ddp = wrapped(comm, DiLoCo(2, **settings))
        scaler, after = torch.amp.GradScaler("cpu", init_scale=4.0), []
        for step in range(5):
            if not clears_late:
                optimizer.zero_grad()
            for number, x in enumerate(parts(comm.rank, step)):
                ddp.require_backward_grad_sync = synced or number == PARTS - 1
                loss = loss_of(ddp, x)
                if clears_late and number == 0:
                    optimizer.zero_grad()
                overflow = float("inf") if comm.rank and step in skipped and number == 0 else 1.0
                scaler.scale(loss * overflow).backward()
            scaler.step(optimizer)
            scaler.update()
            ddp.engine.settle()
            after.append(weights(model))
        steps = ddp.engine.step
        ddp.close()
        return torch.stack(after), steps

    expected = diloco(2, 5, every=2, skipped=skipped, **settings)
    for (actual, steps), wanted in zip(run_ranks(2, body, timeout_s=10), expected, strict=True):
        assert steps == 5
        torch.testing.assert_close(actual, wanted, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("way", WAYS, ids=lambda way: way.__name__)
def test_averaged_gradients_accumulate_to_those_of_the_mean_loss(way):
    def body(comm):
        model = make_model()
        ddp = DistributedDataParallel(model, comm=comm)
        way(ddp, parts(comm.rank, 0))
        if way is the_first_one_averaged:
            ddp(torch.zeros(1, 4)).sum().mul(0).backward()
        ddp.close()
        return gradients(model)

    plain = make_model()
    for rank in range(2):
        for x in parts(rank, 0):
            (loss_of(plain, x) / 2).backward()
    for actual in run_ranks(2, body, timeout_s=10):
        torch.testing.assert_close(actual, gradients(plain))


def train_and_skip(comm, algorithm, *, normalizes=False, checkpoints=False):
    """Steps of which rank 0 leaves out two itself, and clears gradients after the next forward pass."""
    part = filled(nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4) if normalizes else nn.Tanh()))
    model = Checkpointed(part) if checkpoints else part
    optimizer = sgd(model.parameters())
    ddp = DistributedDataParallel(model, optimizer, algorithm, comm=comm)
    means = []
    for step in range(6):
        loss = loss_of(ddp, batch(comm.rank, step).requires_grad_(checkpoints))
        optimizer.zero_grad(set_to_none=step % 2 == 0)
        loss.backward()
        means.append(gradients(model).clone())
        if comm.rank or step not in (1, 2):
            optimizer.step()
    steps = ddp.engine.step
    ddp.switch(GradientAllReduce())
    comm.check_consistency(weights(model).numpy())
    ddp.close()
    return steps, means


class Checkpointed(nn.Module):
    def __init__(self, part):
        super().__init__()
        self.part = part

    def forward(self, x):
        return checkpoint(self.part, x, use_reentrant=True)


@pytest.mark.parametrize("settings", [{}, {"normalizes": True}, {"checkpoints": True}], ids=str)
@pytest.mark.parametrize("algorithm", [Decentralized("shift_one"), DiLoCo(2)], ids=repr)
def test_a_step_that_one_rank_skips_counts_though_gradients_are_cleared_after_the_forward_pass(
    algorithm, settings
):
    """As in many programs: the loss, zero_grad(), backward(). With buffers, ranks once waited for each other."""
    ranks = run_ranks(2, lambda comm: train_and_skip(comm, algorithm, **settings), timeout_s=10)
    assert [steps for steps, _ in ranks] == [6, 6]


def test_gradients_are_averaged_in_the_step_after_one_that_a_rank_has_skipped():
    algorithm = after(3, DiLoCo(3), GradientAllReduce())
    (_, ours), (_, theirs) = run_ranks(2, lambda comm: train_and_skip(comm, algorithm, normalizes=True))
    assert all(map(torch.equal, ours[3:], theirs[3:]))
    assert not torch.equal(ours[2], theirs[2])


def test_an_evaluation_before_the_program_mends_an_overflow_ends_no_step():
    def body(comm):
        model, optimizer, ddp = wrapped(comm, DiLoCo(2))
        for step in range(3):
            optimizer.zero_grad()
            (loss_of(ddp, batch(comm.rank, step)) * (float("inf") if comm.rank and step else 1.0)).backward()
            ddp.eval()
            with torch.no_grad():
                ddp(batch(0, 0))
            ddp.train()
            for parameter in model.parameters():
                parameter.grad.nan_to_num_(0.0, 0.0, 0.0)
            optimizer.step()
        steps = ddp.engine.step
        ddp.close()
        return steps

    assert run_ranks(2, body, timeout_s=10) == [3, 3]


def test_an_overflow_in_the_first_microbatch_is_no_step_of_its_own():
    def body(comm):
        _, optimizer, ddp = wrapped(comm, DiLoCo(2))
        scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
        for step in range(3):
            optimizer.zero_grad()
            for part, x in enumerate(parts(comm.rank, step)):
                overflow = float("inf") if (step, part, comm.rank) == (1, 0, 0) else 1.0
                scaler.scale(loss_of(ddp, x) * overflow).backward()
            scaler.step(optimizer)
            scaler.update()
        loss_of(ddp, batch(comm.rank, 0))
        steps = ddp.engine.step
        ddp.close()
        return steps

    assert run_ranks(2, body, timeout_s=10) == [3, 3]


def test_lbfgs_makes_one_step_of_many_evaluations():
    def body(comm):
        model = make_model()
        optimizer = torch.optim.LBFGS(model.parameters(), max_iter=4)
        ddp = DistributedDataParallel(model, optimizer, DiLoCo(2), comm=comm)
        for step in range(3):

            def closure(step=step):
                optimizer.zero_grad()
                loss = loss_of(ddp, batch(comm.rank, step))
                loss.backward()
                return loss

            optimizer.step(closure)
        steps = ddp.engine.step
        ddp.close()
        return steps

    assert run_ranks(2, body, timeout_s=10) == [3, 3]


def test_the_attribute_sends_as_little_as_no_sync_and_may_stay_false_in_an_evaluation():
    """nanoGPT sets `require_backward_grad_sync` in each microbatch, and evaluates with whatever was last."""

    def body(comm, attribute):
        model, optimizer, ddp = wrapped(comm, ByteGrad())
        for step in range(2):
            optimizer.zero_grad()
            (by_attribute if attribute else by_no_sync)(ddp, parts(comm.rank, step))
            optimizer.step()
        if attribute:
            ddp.require_backward_grad_sync = False
        with torch.no_grad():
            ddp(batch(0, 0))
        calls = ddp.engine.counter.calls
        ddp.close()
        return weights(model), calls

    both = (run_ranks(2, lambda comm, a=attribute: body(comm, a)) for attribute in (True, False))
    for ours, theirs in zip(*both, strict=True):
        assert ours[1] == theirs[1] == 2
        assert torch.equal(ours[0], theirs[0])
