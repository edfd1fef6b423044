"""Buffers are alike on all ranks whenever a step is over; ranks wait for them only where they do for weights."""

import threading

import pytest
import torch
from support.torch_training import batch, filled, optimizer_for
from torch import nn
from torch.utils.checkpoint import checkpoint

from bagua_comm import (
    AsyncModelAverage,
    Decentralized,
    DiLoCo,
    GradientAllReduce,
    LowPrecisionDecentralized,
    every,
)
from bagua_comm.testing import run_ranks
from bagua_torch import DistributedDataParallel


def with_batch_norm():
    return filled(nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 1)))


def loss_of(model, x):
    return model(x).square().mean()


def buffers_of(model):
    return torch.cat([buffer.detach().double().reshape(-1) for buffer in model.buffers()])


def wrapped(comm, algorithm=None, *, given=True, **settings):
    model = with_batch_norm()
    optimizer = optimizer_for(algorithm or GradientAllReduce(), model.parameters())
    ddp = DistributedDataParallel(model, optimizer if given else [], algorithm, comm=comm, **settings)
    return model, optimizer, ddp


def step(ddp, optimizer, x):
    optimizer.zero_grad()
    loss_of(ddp, x).backward()
    optimizer.step()


def statistics_of_rank_0(steps):
    """The buffers after these numbers of batches, with constant weights."""
    model = with_batch_norm()
    for number in range(steps):
        model(batch(0, number))
    return buffers_of(model)


@pytest.mark.covering(1)
@pytest.mark.parametrize("given", [True, False], ids=["given", "not given"])
@pytest.mark.parametrize("through", ["evaluation", "evaluation of the module", "state_dict"])
def test_all_ranks_evaluate_alike_after_a_step(through, given):
    def body(comm):
        model, optimizer, ddp = wrapped(comm, given=given)
        for number in range(2):
            step(ddp, optimizer, batch(comm.rank, number))
        calls = comm.counters.total().calls
        if through == "state_dict":
            seen = [value.clone() for value in ddp.module.state_dict().values()]
        else:
            ddp.eval()
            with torch.no_grad():
                seen = [(ddp if through == "evaluation" else model)(batch(7, 7))]
        assert comm.counters.total().calls == calls
        ddp.close()
        return seen

    first, second = run_ranks(2, body, timeout_s=5)
    assert all(map(torch.equal, first, second))


def test_buffers_are_those_of_rank_0_once_a_backward_pass_has_ended():
    def body(comm):
        model, _, ddp = wrapped(comm, given=False)
        seen = []
        for number in range(3):
            loss_of(ddp, batch(comm.rank, number)).backward()
            seen.append(buffers_of(model))
        ddp.close()
        return seen

    for actual in run_ranks(3, body, timeout_s=5):
        for number, buffers in enumerate(actual):
            torch.testing.assert_close(buffers, statistics_of_rank_0(number + 1), rtol=1e-6, atol=1e-6)


def test_rank_0_alone_may_evaluate():
    def body(comm):
        _, optimizer, ddp = wrapped(comm)
        for number in range(2):
            step(ddp, optimizer, batch(comm.rank, number))
            if comm.rank == 0:
                ddp.eval()(batch(0, 0))
                ddp.train()
        ddp.close()

    run_ranks(2, body, timeout_s=5)


def test_a_step_has_one_broadcast_of_buffers_and_evaluation_none():
    """The buffers are of two dtypes: two messages."""

    def body(comm):
        _, optimizer, ddp = wrapped(comm)
        step(ddp, optimizer, batch(comm.rank, 0))
        seen = []
        for _ in range(2):
            before = comm.counters.total().calls
            step(ddp, optimizer, batch(comm.rank, 0))
            seen.append(comm.counters.total().calls - before)
        with ddp.no_sync():
            loss_of(ddp, batch(comm.rank, 1)).backward()
        ddp.eval()(batch(comm.rank, 1))
        seen.append(comm.counters.total().calls - before - seen[-1])
        ddp.close()
        return seen

    assert run_ranks(2, body, timeout_s=5) == [[2, 2, 0]] * 2


class Normalized(nn.Module):
    """A buffer that depends on this rank's batches, and that gradients depend on."""

    def __init__(self, outputs):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(4))
        self.register_buffer("largest", torch.zeros(4))
        self.outputs = outputs

    def forward(self, x):
        self.largest = torch.maximum(self.largest, x.abs().amax(0))
        y = self.scale.square() * self.largest
        return [y.sum() * (number + 1) for number in range(self.outputs)]


@pytest.mark.parametrize("by", ["outputs", "forward passes"])
def test_a_further_backward_pass_finds_the_buffers_of_its_forward_pass(by):
    def body(comm):
        model = Normalized(2 if by == "outputs" else 1)
        ddp = DistributedDataParallel(model, comm=comm)
        x = batch(comm.rank, 0)
        losses = ddp(x) if by == "outputs" else [*ddp(x), 2 * ddp(x)[0]]
        for loss in losses:
            loss.backward(retain_graph=True)
        model.eval()
        ddp.state_dict()
        ddp.close()
        return model.scale.grad, model.largest.clone()

    largest = [batch(rank, 0).abs().amax(0) for rank in range(2)]
    for gradient, buffer in run_ranks(2, body, timeout_s=5):
        torch.testing.assert_close(gradient, 3 * 2 * (largest[0] + largest[1]) / 2)
        assert torch.equal(buffer, largest[0])


def test_buffers_that_are_reset_between_steps_stay_so():
    def body(comm):
        model, optimizer, ddp = wrapped(comm, given=False)
        step(ddp, optimizer, batch(comm.rank, 0))
        model[1].reset_running_stats()
        ddp.eval()(batch(comm.rank, 0))
        ddp.close()
        return buffers_of(model)

    for buffers in run_ranks(2, body, timeout_s=5):
        assert torch.equal(buffers, buffers_of(with_batch_norm()))


@pytest.mark.parametrize("dropped", [True, False])
def test_the_last_buffers_are_there_after_the_wrapper(dropped):
    def body(comm):
        model, optimizer, ddp = wrapped(comm, given=False)
        step(ddp, optimizer, batch(comm.rank, 0))
        if not dropped:
            ddp.close()
        del ddp
        return buffers_of(model)

    first, second = run_ranks(2, body, timeout_s=5)
    assert torch.equal(first, second)


def test_gradients_in_evaluation_mode_leave_buffers_alone():
    def body(comm):
        _, optimizer, ddp = wrapped(comm)
        ddp.eval()
        before = comm.counters.total().calls
        with ddp.join():
            for number in range(2 + comm.rank):
                step(ddp, optimizer, batch(comm.rank, number))
        ddp.close()
        return comm.counters.total().calls > before

    assert run_ranks(2, body, timeout_s=5) == [True, True]


# Algorithms that do not communicate in every step -----------------------------------------------------------


def test_ranks_train_at_their_own_pace_with_asynchronous_averaging():
    """Rank 1 begins when rank 0 has made all its steps."""
    done = threading.Event()

    def body(comm):
        model, optimizer, ddp = wrapped(comm, AsyncModelAverage(interval_s=0))
        if comm.rank:
            assert done.wait(5)
        for number in range(6 - 4 * comm.rank):
            step(ddp, optimizer, batch(comm.rank, number))
        if comm.rank == 0:
            done.set()
        own = buffers_of(model)
        ddp.stop()
        stopped = buffers_of(model)
        ddp.resume()
        step(ddp, optimizer, batch(comm.rank, 9))
        ddp.close()
        return own, stopped, buffers_of(model)

    (own, stopped, closed), (_, others, at_last) = run_ranks(2, body, timeout_s=5)
    assert torch.equal(stopped, own)
    assert torch.equal(others, own)
    assert torch.equal(closed, at_last)


@pytest.mark.parametrize(
    ("algorithm", "alike"),
    [
        (DiLoCo(local_steps=2), [False, True, False, True]),
        (every(2, Decentralized()), [True, False, True, False]),
        (LowPrecisionDecentralized(), [True] * 4),
        (AsyncModelAverage(interval_s=0, warmup_steps=2), [True, True, False, False]),
    ],
    ids=repr,
)
def test_buffers_are_sent_in_the_steps_in_which_an_algorithm_communicates(algorithm, alike):
    def body(comm):
        model, optimizer, ddp = wrapped(comm, algorithm)
        seen = []
        for number in range(4):
            before = comm.counters.total().calls
            step(ddp, optimizer, batch(comm.rank, number))
            sent = comm.counters.total().calls > before
            seen.append((sent, buffers_of(model)))
        ddp.stop()
        ddp.average_weights()
        seen.append((True, buffers_of(model)))
        ddp.resume()
        ddp.close()
        return seen

    first, second = run_ranks(2, body, timeout_s=5)
    for (sent, mine), (also_sent, theirs), equal in zip(first, second, [*alike, True], strict=True):
        assert sent == also_sent == equal
        assert torch.equal(mine, theirs) == equal


def test_buffers_are_alike_again_after_different_numbers_of_steps_while_stopped():
    def body(comm):
        model, optimizer, ddp = wrapped(comm, Decentralized())
        step(ddp, optimizer, batch(comm.rank, 0))
        ddp.stop()
        for number in range(2 * comm.rank):
            step(ddp, optimizer, batch(comm.rank, number))
        ddp.resume()
        ddp.eval()
        loss_of(ddp, batch(0, 0)).backward()
        ddp.close()
        return buffers_of(model)

    assert torch.equal(*run_ranks(2, body, timeout_s=2))


def test_buffers_are_alike_after_a_join_in_which_ranks_made_different_numbers_of_steps():
    def body(comm):
        model, optimizer, ddp = wrapped(comm, DiLoCo(local_steps=2))
        with ddp.join():
            for number in range(3 + 2 * comm.rank):
                step(ddp, optimizer, batch(comm.rank, number))
        ddp.stop()
        ddp.close()
        return buffers_of(model)

    assert torch.equal(*run_ranks(2, body, timeout_s=2))


@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpoints_that_run_batch_norm_once_more_leave_buffers_alike(reentrant):
    def body(comm):
        layers = with_batch_norm()

        class Checkpointed(nn.Module):
            def __init__(self):
                super().__init__()
                self.layers = layers

            def forward(self, x):
                x = checkpoint(self.layers[:2], x.requires_grad_(), use_reentrant=reentrant)
                return checkpoint(self.layers[2:], x, use_reentrant=reentrant)

        optimizer = optimizer_for(GradientAllReduce(), layers.parameters())
        ddp = DistributedDataParallel(Checkpointed(), optimizer, comm=comm)
        seen = []
        for number in range(2):
            step(ddp, optimizer, batch(comm.rank, number))
            seen.append(buffers_of(layers))
        ddp.close()
        return seen

    first, second = run_ranks(2, body, timeout_s=5)
    assert all(map(torch.equal, first, second))
