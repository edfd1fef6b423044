"""Parameters that are frozen and unfrozen in the course of training."""

import pytest
import torch
from support.torch_training import (
    ALGORITHMS,
    QADAM,
    batch,
    filled,
    final_weights,
    optimizer_for,
    weights,
    wrapped,
)
from torch import nn

from bagua_comm import (
    ArrayError,
    ByteGrad,
    CommMismatch,
    Decentralized,
    DiLoCo,
    ErrorFeedback,
    GradientAllReduce,
    UnsupportedError,
    after,
)
from bagua_comm.testing import run_ranks
from bagua_torch import DistributedDataParallel


def make_model():
    return filled(nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 1)))


def loss_of(model, x):
    return model(x).square().mean()


def adam(parameters):
    """With momenta and decay, which move whatever has a gradient, though it be zero."""
    return torch.optim.AdamW(parameters, lr=0.1, weight_decay=0.1)


def freeze(module, frozen):
    module.requires_grad_(not frozen)


def train_freezing(comm, ddp, optimizer, frozen_in):
    """Train on this rank's batches; `frozen_in` says for each step whether the first layer is frozen."""
    for step, frozen in enumerate(frozen_in):
        freeze(ddp.module[0], frozen)
        optimizer.zero_grad()
        loss_of(ddp, batch(comm.rank, step)).backward()
        optimizer.step()


def alone(ranks, frozen_in):
    """The weights after these steps of one model on the batches of all ranks."""
    model = make_model()
    optimizer = adam(model.parameters())
    for step, frozen in enumerate(frozen_in):
        freeze(model[0], frozen)
        optimizer.zero_grad()
        (sum(loss_of(model, batch(rank, step)) for rank in range(ranks)) / ranks).backward()
        optimizer.step()
    return weights(model)


@pytest.mark.covering(1)
@pytest.mark.parametrize("find_unused", [False, True])
@pytest.mark.parametrize("bucket_bytes", [1, 10**6])
def test_a_frozen_layer_stays_as_it_is_and_the_others_train_on(find_unused, bucket_bytes):
    frozen_in = [False, True, True, False, True, False]

    def body(comm):
        model, optimizer, ddp = wrapped(
            comm, model=make_model(), make=adam, find_unused_parameters=find_unused, bucket_bytes=bucket_bytes
        )
        for step, frozen in enumerate(frozen_in):
            freeze(model[0], frozen)
            optimizer.zero_grad()
            loss_of(ddp, batch(comm.rank, step)).backward()
            assert (model[0].weight.grad is None) == frozen
            optimizer.step()
        return final_weights(ddp)

    for actual in run_ranks(3, body, timeout_s=5):
        torch.testing.assert_close(actual, alone(3, frozen_in), rtol=1e-4, atol=1e-5)


@pytest.mark.covering(1)
@pytest.mark.parametrize("algorithm", [GradientAllReduce(), Decentralized()], ids=repr)
@pytest.mark.parametrize("wrappers", [1, 2])
def test_a_generator_and_a_discriminator_that_is_frozen_in_every_other_pass(wrappers, algorithm):
    class Both(nn.Module):
        def __init__(self):
            super().__init__()
            self.generator, self.discriminator = filled(nn.Linear(4, 4)), filled(nn.Linear(4, 1), seed=1)

        def forward(self, x, fake):
            return self.discriminator(self.generator(x) if fake else x).square().mean()

    def body(comm):
        model = Both()
        parts = [model.generator, model.discriminator]
        optimizers = [optimizer_for(algorithm, part.parameters()) for part in parts]
        if wrappers == 1:
            ddps = [DistributedDataParallel(model, optimizers, algorithm, comm=comm)]
            run = ddps[0]
        else:
            ddps = [
                DistributedDataParallel(part, optimizer, algorithm, comm=comm)
                for part, optimizer in zip(parts, optimizers, strict=True)
            ]

            def run(x, fake):
                return ddps[1](ddps[0](x) if fake else x).square().mean()

        for step in range(3):
            x = batch(comm.rank, step)
            freeze(model.discriminator, True)
            run(x, True).backward()
            optimizers[0].step()
            freeze(model.discriminator, False)
            for optimizer in optimizers:
                optimizer.zero_grad()
            run(x, False).backward()
            optimizers[1].step()
            optimizers[1].zero_grad()
        for ddp in ddps:
            ddp.switch(GradientAllReduce())
            ddp.close()
        return weights(model)

    plain = Both()
    optimizers = [optimizer_for(algorithm, part.parameters()) for part in (plain.generator, plain.discriminator)]
    for step in range(3):
        for optimizer, fake in zip(optimizers, (True, False), strict=True):
            plain.zero_grad()
            (sum(plain(batch(rank, step), fake) for rank in range(2)) / 2).backward()
            optimizer.step()
    first, second = run_ranks(2, body, timeout_s=5)
    assert torch.equal(first, second)
    if algorithm.payload == "grad":
        torch.testing.assert_close(first, weights(plain), rtol=1e-4, atol=1e-5)


@pytest.mark.algorithms("sample")
@pytest.mark.parametrize("algorithm", [a for a in ALGORITHMS if a is not QADAM], ids=repr)
def test_no_algorithm_hangs_where_a_layer_is_frozen_for_a_while(algorithm):
    def body(comm):
        model, optimizer, ddp = wrapped(comm, algorithm, model=make_model())
        for step in range(6):
            freeze(model[0], step % 3 == 1)
            optimizer.zero_grad()
            loss_of(ddp, batch(comm.rank, step)).backward()
            optimizer.step()
        ddp.close()

    run_ranks(2, body, timeout_s=5)


def test_a_frozen_layer_stays_as_it_is_where_codecs_round_zeros():
    def body(comm):
        model, optimizer, ddp = wrapped(comm, GradientAllReduce(ErrorFeedback()), model=make_model(), make=adam)
        seen = []
        for step in range(4):
            freeze(model[0], step > 1)
            optimizer.zero_grad()
            loss_of(ddp, batch(comm.rank, step)).backward()
            optimizer.step()
            seen.append(weights(model[0]))
        ddp.close()
        return seen

    for seen in run_ranks(2, body, timeout_s=5):
        assert not torch.equal(seen[0], seen[1])
        assert torch.equal(seen[1], seen[3])


@pytest.mark.parametrize("find_unused", [False, True])
def test_a_layer_that_one_rank_alone_has_frozen_is_an_error_there(find_unused):
    def body(comm):
        model, optimizer, ddp = wrapped(comm, model=make_model(), make=adam, find_unused_parameters=find_unused)
        freeze(model[0], comm.rank == 1)
        for step in range(2):
            loss_of(ddp, batch(comm.rank, step)).backward()
            optimizer.step()

    with pytest.raises(CommMismatch, match=r"'0.\w+' is frozen on rank 1, but another rank has computed"):
        run_ranks(2, body, timeout_s=60)  # no rank waits that long


def test_a_gradient_from_before_is_kept_while_its_parameter_is_frozen():
    def body(comm):
        model = make_model()
        ddp = DistributedDataParallel(model, comm=comm)
        loss_of(ddp, batch(comm.rank, 0)).backward()
        before = model[0].weight.grad.clone()
        freeze(model[0], True)
        loss_of(ddp, batch(comm.rank, 1)).backward()
        ddp.close()
        torch.testing.assert_close(model[0].weight.grad, before)

    run_ranks(2, body, timeout_s=5)


@pytest.mark.covering(1)
@pytest.mark.parametrize("algorithm", [GradientAllReduce(), ByteGrad()], ids=["exact", "bytes"])
@pytest.mark.parametrize("frozen_in", [0, 1])
def test_a_rank_that_has_ended_joins_in_whatever_it_has_frozen(algorithm, frozen_in):
    def body(comm):
        _, optimizer, ddp = wrapped(comm, algorithm, model=make_model(), lr=0.1)
        with ddp.join():
            train_freezing(comm, ddp, optimizer, [step == frozen_in for step in range(1 + 2 * comm.rank)])
        return final_weights(ddp)

    first, second = run_ranks(2, body, timeout_s=5)
    assert torch.equal(first, second)


def test_freezing_under_an_algorithm_that_averages_momenta_is_refused():
    def body(comm):
        model = make_model()
        ddp = DistributedDataParallel(model, optimizer_for(QADAM, model.parameters()), QADAM, comm=comm)
        freeze(model[0], True)
        loss = loss_of(ddp, batch(comm.rank, 0))
        with pytest.raises(UnsupportedError, match=r"'0.bias' was frozen .* averaging its momentum"):
            loss.backward()
        ddp.close()

    run_ranks(2, body, timeout_s=5)


def test_a_static_graph_has_the_same_parameters_in_every_step():
    def body(comm):
        model = make_model()
        ddp = DistributedDataParallel(model, comm=comm, static_graph=True)
        loss_of(ddp, batch(comm.rank, 0)).backward()
        freeze(model[0], True)
        model.zero_grad()
        loss = loss_of(ddp, batch(comm.rank, 0))
        with pytest.raises((ArrayError, CommMismatch), match=r"static_graph|another rank"):
            loss.backward()
        ddp.close()

    run_ranks(2, body, timeout_s=5)


def test_weights_that_are_exchanged_now_and_then_are_frozen_too():
    """An outer step moves a frozen layer by its outer momentum, alike on all ranks."""

    def body(comm):
        _, optimizer, ddp = wrapped(comm, DiLoCo(local_steps=2), model=make_model(), make=adam)
        train_freezing(comm, ddp, optimizer, [False, False, True, True])
        return final_weights(ddp)

    first, second = run_ranks(2, body, timeout_s=5)
    assert torch.equal(first, second)


def test_a_frozen_layer_stays_as_it_is_while_weights_are_exchanged_before_gradients():
    def body(comm):
        model = make_model()
        before = weights(model[0])
        optimizer = adam(model.parameters())
        algorithm = after(3, Decentralized(), GradientAllReduce())
        ddp = DistributedDataParallel(model, optimizer, algorithm, comm=comm)
        freeze(model[0], True)
        for step in range(3):
            optimizer.zero_grad()
            loss_of(ddp, batch(comm.rank, step)).backward()
            assert model[0].weight.grad is None
            optimizer.step()
        ddp.close()
        return torch.equal(weights(model[0]), before)

    assert run_ranks(2, body, timeout_s=5) == [True, True]
