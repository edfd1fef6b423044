"""Uneven data: ranks that run out of batches take part until all have."""

import contextlib

import pytest
import torch
from torch_training import (
    GRADIENT_ALGORITHMS,
    assert_same_on_all_ranks,
    batch,
    loss_of,
    make_model,
    optimizer_for,
    sgd,
    train_step,
    weights,
)

from bagua_comm import (
    AsyncModelAverage,
    ByteGrad,
    DiLoCo,
    GradientAllReduce,
    LowPrecisionDecentralized,
    LowPrecisionOnePeer,
    after,
)
from bagua_comm.testing import run_ranks
from bagua_torch import DistributedDataParallel

# How many batches each rank has.
UNEVEN = [(3, 5), (5, 3), (0, 4), (4, 0), (2, 2), (0, 0), (5, 0, 2), (1, 4, 2, 3)]
BATCHES = pytest.mark.parametrize("batches", UNEVEN, ids=str)
DIVIDE = pytest.mark.parametrize("divide_by_initial_size", [True, False])


def joined(
    batches,
    algorithm,
    *,
    make=make_model,
    make_optimizer=None,
    divide_by_initial_size=True,
    parts=1,
    synchronized="last",
    between=None,
    afterwards=0,
    timeout_s=4,
    **settings,
):
    """Train on so many batches on each rank; (weights, buffers, steps) of each."""

    def body(comm):
        model = make()
        optimizer = (make_optimizer or (lambda p: optimizer_for(algorithm, p)))(model.parameters())
        ddp = DistributedDataParallel(model, optimizer, algorithm, comm=comm, bucket_bytes=100, **settings)
        with ddp.join(divide_by_initial_size=divide_by_initial_size):
            for step in range(batches[comm.rank]):
                optimizer.zero_grad()
                for part in range(parts):
                    local = synchronized == "last" and part < parts - 1
                    with ddp.no_sync() if local else contextlib.nullcontext():
                        loss_of(ddp, batch(comm.rank, 10 * step + part)).backward()
                optimizer.step()
                if between is not None:
                    between(ddp)
        if algorithm.payload == "grad" and ddp.engine.payload == "grad":
            assert_same_on_all_ranks(comm, model)
        for step in range(100, 100 + afterwards):
            train_step(ddp, optimizer, batch(comm.rank, step))
        ddp.close()
        return weights(model), {n: b.clone() for n, b in model.named_buffers()}, ddp.engine.step

    return run_ranks(len(batches), body, timeout_s=timeout_s)


def train_plain(batches, plain, optimizer, *, divide_by_initial_size=True, parts=1):
    """One model on the batches of all ranks that have any in a step."""
    for step in range(max(batches)):
        active = [rank for rank, count in enumerate(batches) if step < count]
        divisor = len(batches) if divide_by_initial_size else len(active)
        optimizer.zero_grad()
        for part in range(parts):
            sum(loss_of(plain, batch(rank, 10 * step + part)) / divisor for rank in active).backward()
        optimizer.step()
    return weights(plain)


def close(actual, expected):
    torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-6)


@BATCHES
@DIVIDE
def test_gradients_are_those_of_the_ranks_that_have_data(batches, divide_by_initial_size):
    plain = make_model()
    expected = train_plain(batches, plain, sgd(plain.parameters()), divide_by_initial_size=divide_by_initial_size)

    results = joined(batches, GradientAllReduce(), divide_by_initial_size=divide_by_initial_size)

    for actual, _, steps in results:
        close(actual, expected)
        assert steps == max(batches)


@pytest.mark.parametrize("batches", [(3, 5), (4, 0), (5, 0, 2), (1, 4, 2, 3)], ids=str)
@DIVIDE
@pytest.mark.parametrize("synchronized", ["last", "every"])
def test_accumulated_gradients_are_those_of_the_ranks_that_have_data(
    batches, divide_by_initial_size, synchronized
):
    plain = make_model()
    expected = train_plain(
        batches, plain, sgd(plain.parameters()), divide_by_initial_size=divide_by_initial_size, parts=3
    )

    results = joined(
        batches,
        GradientAllReduce(),
        divide_by_initial_size=divide_by_initial_size,
        parts=3,
        synchronized=synchronized,
    )

    for actual, _, _ in results:
        close(actual, expected)


@pytest.mark.parametrize("batches", [(3, 6), (6, 3), (0, 6), (6, 1, 3)], ids=str)
@pytest.mark.parametrize("algorithm", GRADIENT_ALGORITHMS, ids=repr)
def test_all_ranks_end_with_the_same_weights(algorithm, batches):
    """And train on from there: also the residuals and step counts fit together."""
    plain = make_model()
    start, expected = weights(plain), train_plain(batches, plain, sgd(plain.parameters()))

    (first, _, steps), *others = joined(batches, algorithm)
    for actual, _, other_steps in others:
        assert torch.equal(actual, first)
        assert other_steps == steps
    assert torch.linalg.norm(first - expected) < 0.1 * torch.linalg.norm(expected - start)

    (first, _, steps), *others = joined(batches, algorithm, afterwards=3)
    for actual, _, other_steps in others:
        assert torch.equal(actual, first)
        assert other_steps == steps == max(batches) + 3


@pytest.mark.parametrize("accumulate", ["no_sync", "every"])
@pytest.mark.parametrize("batches", [(3, 5), (0, 4), (4, 1, 2)], ids=str)
@pytest.mark.parametrize(
    "algorithm",
    [
        LowPrecisionDecentralized(),
        LowPrecisionOnePeer(),
        DiLoCo(3),
        AsyncModelAverage(0.0, warmup_steps=2),
        after(2, LowPrecisionOnePeer(), ByteGrad()),
        after(2, ByteGrad(), DiLoCo(2)),
    ],
    ids=repr,
)
def test_nobody_waits_for_ever_where_weights_are_exchanged(algorithm, batches, accumulate):
    def body(comm):
        model = make_model()
        optimizer = sgd(model.parameters())
        ddp = DistributedDataParallel(model, optimizer, algorithm, comm=comm, bucket_bytes=100)
        with ddp.join():
            for step in range(batches[comm.rank]):
                optimizer.zero_grad()
                with ddp.no_sync() if accumulate == "no_sync" else contextlib.nullcontext():
                    loss_of(ddp, batch(comm.rank, step)).backward()
                loss_of(ddp, batch(comm.rank, step + 100)).backward()
                optimizer.step()
        ddp.switch(GradientAllReduce())
        assert_same_on_all_ranks(comm, model)
        ddp.close()

    run_ranks(len(batches), body)
