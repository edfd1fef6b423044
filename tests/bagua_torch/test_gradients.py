"""Gradients that users keep, replace, detach and drop."""

import copy

import pytest
import torch
from support.memory_formats import (
    EXACT,
    Parts,
)
from support.torch_training import batch, make_model, train, weights
from torch import nn

from bagua_comm import GradientAllReduce, Hierarchical, Quantized, Reproducible
from bagua_comm.testing import run_ranks
from bagua_torch import DistributedDataParallel
from bagua_torch.training.unused import keeps_zeros


def loss_of(model, step, rank):
    return model(batch(rank, step)).square().sum()


def mean_gradients(module, step, ranks=2):
    """In one process, without changing the module."""
    module = copy.deepcopy(module)
    module.zero_grad()
    for rank in range(ranks):
        (loss_of(module, step, rank) / ranks).backward()
    return [p.grad for p in module.parameters()]


def assert_mean(module, step):
    for p, expected in zip(module.parameters(), mean_gradients(module, step), strict=True):
        torch.testing.assert_close(p.grad, expected)


def give_it_other_memory(p):
    p.grad.data = torch.nan_to_num(p.grad).clone()


def give_another_tensor(p):
    p.grad = p.grad.clone()


def detach_and_zero(p):
    p.grad.detach_()
    p.grad.zero_()


def zero_other_memory(p):
    p.grad.data = torch.zeros_like(p.grad)


def forget_other_memory(p):
    p.grad.data = torch.ones_like(p.grad)
    p.grad = None


@pytest.mark.parametrize("own", [False, True], ids=["in buckets", "own"])
@pytest.mark.parametrize("change", [detach_and_zero, zero_other_memory, forget_other_memory])
def test_gradients_that_were_given_other_memory_are_averaged_all_the_same(change, own):
    def body(comm):
        model = make_model()
        ddp = DistributedDataParallel(model, comm=comm, bucket_bytes=100, gradient_as_bucket_view=not own)
        for step in range(4):
            loss_of(ddp, step, comm.rank).backward()
            assert_mean(model, step)
            for p in model.parameters():
                change(p)
        ddp.close()

    run_ranks(2, body)


@pytest.mark.parametrize("change", [give_it_other_memory, give_another_tensor])
def test_gradients_accumulated_elsewhere_count(change):
    def body(comm):
        model, plain = make_model(), make_model()
        ddp = DistributedDataParallel(model, comm=comm)
        for module in (model, plain):
            first, second = (ddp, ddp) if module is model else (plain, plain)
            with ddp.no_sync():
                loss_of(first, 0, comm.rank).backward()
            for p in module.parameters():
                change(p)
            loss_of(second, 1, comm.rank).backward()
        ddp.close()
        return [p.grad.clone() for p in model.parameters()], [p.grad for p in plain.parameters()]

    results = run_ranks(2, body)
    for averaged, _ in results:
        for actual, *own in zip(averaged, *(plain for _, plain in results), strict=True):
            torch.testing.assert_close(actual, sum(own) / 2)


@pytest.mark.parametrize("change", [give_it_other_memory, give_another_tensor])
def test_a_hook_that_replaces_a_gradient_within_the_pass(change):
    def body(comm):
        model = make_model()
        for p in model.parameters():
            p.register_post_accumulate_grad_hook(change)
        ddp = DistributedDataParallel(model, comm=comm, bucket_bytes=100)
        for step in range(3):
            model.zero_grad()
            loss_of(ddp, step, comm.rank).backward()
            assert_mean(model, step)
        ddp.close()

    run_ranks(2, body)


@pytest.mark.parametrize("own", [False, True], ids=["in buckets", "own"])
def test_gradients_that_are_kept_do_not_change_in_the_next_step(own):
    def body(comm):
        model = make_model()
        ddp = DistributedDataParallel(model, comm=comm, bucket_bytes=100, gradient_as_bucket_view=not own)
        kept = []
        for step in range(3):
            model.zero_grad()
            loss_of(ddp, step, comm.rank).backward()
            kept.append([p.grad for p in model.parameters()])
        for step, gradients in enumerate(kept):
            for gradient, expected in zip(gradients, mean_gradients(model, step), strict=True):
                torch.testing.assert_close(gradient, expected)
        ddp.close()

    run_ranks(2, body)


def test_the_tensor_of_a_gradient_is_the_same_in_every_step_unless_it_is_kept():
    def body(comm):
        model = make_model()
        ddp = DistributedDataParallel(model, comm=comm)
        ids = set()
        for step in range(3):
            model.zero_grad()
            loss_of(ddp, step, comm.rank).backward()
            ids.add(tuple(id(p.grad) for p in model.parameters()))
        assert len(ids) == 1
        ddp.close()

    run_ranks(1, body)


def test_unused_parameters_and_accumulation_with_gradients_of_their_own():
    def body(comm):
        model = nn.ModuleDict({"used": make_model(), "unused": make_model(1)})
        model.forward = lambda x: model["used"](x)
        ddp = DistributedDataParallel(
            model, comm=comm, find_unused_parameters=True, gradient_as_bucket_view=False
        )
        with ddp.no_sync():
            loss_of(ddp, 0, comm.rank).backward()
        assert all(p.grad is None for p in model["unused"].parameters())
        loss_of(ddp, 0, comm.rank).backward()
        assert all(p.grad is None for p in model["unused"].parameters())
        for p, expected in zip(model["used"].parameters(), mean_gradients(model["used"], 0), strict=True):
            torch.testing.assert_close(p.grad, 2 * expected)
        ddp.close()

    run_ranks(2, body)


def test_microbatches_join_and_replan_with_gradients_of_their_own():
    def trained(comm, in_buckets):
        model = make_model()
        optimizer = torch.optim.Adam(model.parameters(), lr=0.05)
        average = Reproducible(addends=4)
        ddp = DistributedDataParallel(
            model, optimizer, GradientAllReduce(average), comm=comm, gradient_as_bucket_view=in_buckets
        )
        for step in range(2):
            optimizer.zero_grad()
            for i in ddp.microbatches():
                ddp(batch(i, step)).square().sum().backward()
            optimizer.step()
            ddp.replan(bucket_bytes=100)
        ddp.switch(EXACT)
        with ddp.join():
            train(comm, ddp, optimizer, range(1 + 2 * comm.rank))
        ddp.close()
        return torch.cat([weights(model), *(p.grad.flatten() for p in model.parameters())])

    def body(comm):
        assert torch.equal(trained(comm, True), trained(comm, False))

    run_ranks(2, body)


def test_a_hook_gets_gradients_that_lie_as_their_parameters():
    seen = []

    def hook(state, bucket):
        for gradient, p in zip(bucket.gradients(), bucket.parameters(), strict=True):
            seen.append(gradient.stride() == p.stride() and torch.equal(gradient, p.grad))
        future = torch.futures.Future()
        future.set_result(bucket.buffer())
        return future

    def body(comm):
        module = Parts("channels_last", "transposed", "contiguous")
        ddp = DistributedDataParallel(module, comm=comm)
        ddp.register_comm_hook(None, hook)
        ddp(0).backward()
        ddp.close()

    run_ranks(1, body)
    assert seen == [True] * 3


def test_zeros_stay_zeros_only_if_no_level_encodes_them():
    assert keeps_zeros(GradientAllReduce(Hierarchical()))
    assert not keeps_zeros(GradientAllReduce(Hierarchical(Quantized())))
    assert not keeps_zeros(GradientAllReduce(Hierarchical(inside=Quantized())))
