"""Uneven data: ranks that run out of batches join in until all have."""

import contextlib

import pytest
import torch
from support.torch_training import (
    CHANGING_ALGORITHMS,
    GRADIENT_ALGORITHMS,
    WEIGHT_ALGORITHMS,
    assert_same_on_all_ranks,
    batch,
    final_weights,
    loss_of,
    make_model,
    optimizer_for,
    sgd,
    train,
    train_step,
    weights,
    wrapped,
)
from torch import nn

from bagua_comm import (
    AsyncModelAverage,
    ByteGrad,
    CommError,
    DiLoCo,
    Exact,
    GradientAllReduce,
    LowPrecisionDecentralized,
    QAdam,
    TopK,
    UnsupportedError,
    after,
)
from bagua_comm.testing import run_ranks
from bagua_torch import DistributedDataParallel, MoE, QAdamOptimizer, sync_batchnorm

# How many batches each rank has.
UNEVEN = [(5, 3), (0, 4), (2, 2), (0, 0), (3, 0, 2), (1, 4, 2, 3)]
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
    **settings,
):
    """Train on these numbers of batches; return (weights, buffers, steps) of each rank."""

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
        train(comm, ddp, optimizer, range(100, 100 + afterwards))
        steps = ddp.engine.step
        if afterwards:
            ddp.switch(GradientAllReduce())
            assert_same_on_all_ranks(comm, model)
        ddp.close()
        return weights(model), {n: b.clone() for n, b in model.named_buffers()}, steps

    return run_ranks(len(batches), body, timeout_s=10)


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


@pytest.mark.covering(1)
@BATCHES
@DIVIDE
def test_gradients_are_those_of_the_ranks_that_have_data(batches, divide_by_initial_size):
    plain = make_model()
    expected = train_plain(batches, plain, sgd(plain.parameters()), divide_by_initial_size=divide_by_initial_size)

    results = joined(batches, GradientAllReduce(), divide_by_initial_size=divide_by_initial_size)

    for actual, _, steps in results:
        close(actual, expected)
        assert steps == max(batches)


@pytest.mark.covering(1)
@pytest.mark.parametrize("batches", [(3, 4), (2, 0), (3, 0, 2)], ids=str)
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


@pytest.mark.covering(1)
@pytest.mark.parametrize("batches", [(2, 4), (0, 4), (4, 1, 2)], ids=str)
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


@pytest.mark.covering(1)
@pytest.mark.parametrize(
    ("batches", "weight_decay"), [((5, 4), 0.0), ((4, 5), 0.1), ((5, 1), 0.1), ((0, 5), 0.0), ((5, 2, 4), 0.1)]
)
@DIVIDE
def test_momenta_are_those_of_the_ranks_that_have_data(batches, weight_decay, divide_by_initial_size):
    """Past QAdam's warm-up; also where a rank ends in the warm-up, with its own momentum as it was then."""
    algorithm = QAdam(warmup_steps=3, average=Exact())

    def make_optimizer(parameters):
        return QAdamOptimizer(parameters, lr=0.01, warmup_steps=3, weight_decay=weight_decay)

    plain = make_model()
    expected = train_plain(
        batches, plain, make_optimizer(plain.parameters()), divide_by_initial_size=divide_by_initial_size
    )

    results = joined(
        batches, algorithm, make_optimizer=make_optimizer, divide_by_initial_size=divide_by_initial_size
    )

    for actual, _, _ in results:
        torch.testing.assert_close(actual, expected, rtol=1e-3, atol=1e-5)


@pytest.mark.algorithms("sample")
@pytest.mark.covering(1)
@pytest.mark.parametrize(
    ("batches", "parts", "synchronized"), [((3, 5), 1, "last"), ((4, 0), 2, "every"), ((1, 4, 2, 3), 2, "last")]
)
@pytest.mark.parametrize(
    "algorithm",
    [
        *WEIGHT_ALGORITHMS,
        *CHANGING_ALGORITHMS,
        after(2, ByteGrad(), DiLoCo(2)),
        AsyncModelAverage(interval_s=0, warmup_steps=2),
    ],
    ids=repr,
)
def test_no_rank_waits_for_ever_where_weights_are_exchanged(algorithm, batches, parts, synchronized):
    """With and without accumulation, and in the training after it."""
    results = joined(batches, algorithm, parts=parts, synchronized=synchronized, afterwards=2)

    for actual, _, steps in results:
        assert actual.isfinite().all()
        assert steps == results[0][2] >= max(batches) + 2


def evaluate_and_save(ddp):
    with torch.no_grad():
        ddp.module(batch(0, 0))
    ddp.module.state_dict()


@pytest.mark.algorithms("sample")
@pytest.mark.parametrize("algorithm", WEIGHT_ALGORITHMS, ids=repr)
def test_a_rank_evaluates_and_saves_while_others_have_ended(algorithm):
    for actual, _, _ in joined((4, 1), algorithm, between=evaluate_and_save):
        assert actual.isfinite().all()


def test_a_rank_without_data_continues_exchanging_its_weights():
    """DiLoCo: a rank that made no step since takes the mean of the change as others do."""
    batches, algorithm = (4, 0), DiLoCo(local_steps=2)

    (busy, _, _), (idle, _, _) = joined(batches, algorithm)

    assert torch.equal(busy, idle)  # right after an outer step
    assert not torch.equal(busy, weights(make_model()))


def test_ranks_that_end_before_weights_are_exchanged_start_from_the_same_weights():
    """The phase of gradients ends on all ranks with the weights of the ranks that trained."""
    (busy, _, _), (idle, _, _) = joined((3, 1), after(3, GradientAllReduce(), LowPrecisionDecentralized()))

    assert torch.equal(busy, idle)


# Buffers, unused parameters, several models ---------------------------------------------------------------


def with_batch_norm():
    return nn.Sequential(nn.BatchNorm1d(4), make_model())


@pytest.mark.parametrize("batches", [(1, 3), (3, 1), (0, 3, 2)], ids=str)
def test_buffers_follow_a_rank_that_has_data(batches):
    """As with PyTorch's own: statistics continue to count when rank 0 has ended."""
    leader = batches.index(max(batches))

    results = joined(batches, GradientAllReduce(), make=with_batch_norm)

    for _, buffers, _ in results:
        assert int(buffers["0.num_batches_tracked"]) == batches[leader]
        for name, value in results[leader][1].items():
            assert torch.equal(buffers[name], value)


def test_unused_parameters_that_no_rank_with_data_uses():
    class Branches(nn.Module):
        def __init__(self):
            super().__init__()
            self.used, self.unused = make_model(), make_model()

        def forward(self, x):
            return self.used(x)

    start = weights(make_model())

    results = joined((2, 5, 0), GradientAllReduce(), make=Branches, find_unused_parameters=True)

    for actual, _, _ in results:
        assert torch.equal(actual, results[0][0])
        assert torch.equal(actual[len(start) :], start)
        assert not torch.equal(actual[: len(start)], start)


def test_the_optimizer_of_a_rank_that_ended_is_that_of_the_others():
    def body(comm):
        model = make_model()
        optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
        ddp = DistributedDataParallel(model, optimizer, comm=comm)
        with ddp.join():
            train(comm, ddp, optimizer, range((5, 1, 3)[comm.rank]))
        ddp.close()
        return {
            (number, name): torch.as_tensor(value)
            for number, state in optimizer.state_dict()["state"].items()
            for name, value in state.items()
        }

    first, *others = run_ranks(3, body)
    assert first[0, "step"] == 5
    for other in others:
        assert other.keys() == first.keys()
        assert all(torch.equal(other[key], value) for key, value in first.items())


def test_two_models_joined_one_after_the_other():
    plain = make_model(1), make_model(2)
    for model in plain:
        train_plain((2, 4), model, sgd(model.parameters()))

    def body(comm):
        models = make_model(1), make_model(2)
        optimizers = [sgd(model.parameters()) for model in models]
        ddps = [
            DistributedDataParallel(model, optimizer, comm=comm)
            for model, optimizer in zip(models, optimizers, strict=True)
        ]
        for ddp, optimizer in zip(ddps, optimizers, strict=True):
            with ddp.join():
                for step in range((2, 4)[comm.rank]):
                    train_step(ddp, optimizer, batch(comm.rank, 10 * step))
        for ddp in ddps:
            ddp.close()
        return [weights(model) for model in models]

    for actual in run_ranks(2, body):
        for mine, expected in zip(actual, plain, strict=True):
            close(mine, weights(expected))


def test_joining_twice_and_training_without():
    plain = make_model()
    optimizer = sgd(plain.parameters())
    train_plain((2, 4), plain, optimizer)
    train_plain((3, 3), plain, optimizer)
    expected = train_plain((3, 1), plain, optimizer)

    def body(comm):
        _, optimizer, ddp = wrapped(comm)
        for batches, context in (((2, 4), ddp.join()), ((3, 3), contextlib.nullcontext()), ((3, 1), ddp.join())):
            with context:
                for step in range(batches[comm.rank]):
                    train_step(ddp, optimizer, batch(comm.rank, 10 * step))
        return final_weights(ddp)

    for actual in run_ranks(2, body):
        close(actual, expected)


def test_gradients_join_without_optimizers_given():
    plain = make_model()
    expected = train_plain((1, 4), plain, torch.optim.SGD(plain.parameters(), lr=0.05))

    def body(comm):
        model = make_model()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        ddp = DistributedDataParallel(model, algorithm=GradientAllReduce(), comm=comm)
        with ddp.join():
            for step in range((1, 4)[comm.rank]):
                train_step(ddp, optimizer, batch(comm.rank, 10 * step))
        assert_same_on_all_ranks(comm, model)
        return final_weights(ddp)

    for actual in run_ranks(2, body):
        close(actual, expected)


def test_an_infinity_in_the_last_batch_of_a_rank():
    """The step that all ranks skip is no step on any."""

    def body(comm):
        model = make_model()
        optimizer, scaler = sgd(model.parameters()), torch.amp.GradScaler("cpu", init_scale=4.0)
        ddp = DistributedDataParallel(model, optimizer, comm=comm)
        with ddp.join():
            for step in range((2, 4)[comm.rank]):
                optimizer.zero_grad()
                overflow = float("inf") if step == 1 and comm.rank == 0 else 1.0
                scaler.scale(loss_of(ddp, batch(comm.rank, step)) * overflow).backward()
                scaler.step(optimizer)
                scaler.update()
        assert_same_on_all_ranks(comm, model)
        assert weights(model).isfinite().all()
        ddp.close()
        return ddp.engine.step

    assert run_ranks(2, body) == [3, 3]


# After an early end of a rank -----------------------------------------------------------------------------


def gradients_of(model):
    return [None if p.grad is None else p.grad.clone() for p in model.parameters()]


@pytest.mark.covering(1)
@pytest.mark.parametrize("algorithm", [*GRADIENT_ALGORITHMS, QAdam(warmup_steps=3)], ids=repr)
@pytest.mark.parametrize(
    ("left", "divide_by_initial_size", "find_unused_parameters"),
    [
        ("nothing", True, False),
        ("zeros", False, False),
        ("averaged", False, True),
        ("averaged", True, False),
        ("local", True, True),
        ("another tensor", False, False),
    ],
)
def test_exchanges_after_a_rank_has_ended_leave_its_gradients_as_they_were(
    algorithm, left, divide_by_initial_size, find_unused_parameters
):
    def body(comm):
        model, optimizer, ddp = wrapped(
            comm, algorithm, bucket_bytes=100, find_unused_parameters=find_unused_parameters
        )
        for epoch in range(2):
            with ddp.join(divide_by_initial_size=divide_by_initial_size):
                for step in range((1, 3)[comm.rank]):
                    optimizer.zero_grad(set_to_none=left != "zeros")
                    loss_of(ddp, batch(comm.rank, 10 * epoch + step)).backward()
                    optimizer.step()
                if left in ("nothing", "zeros"):
                    optimizer.zero_grad(set_to_none=left == "nothing")
                elif left == "local":
                    with ddp.no_sync():
                        loss_of(ddp, batch(comm.rank, 10 * epoch + 9)).backward()
                elif left == "another tensor":
                    for parameter in model.parameters():
                        parameter.grad = torch.full_like(parameter, 3.0)
                objects, values = [p.grad for p in model.parameters()], gradients_of(model)
            assert all(p.grad is g for p, g in zip(model.parameters(), objects, strict=True))
            for actual, expected in zip(gradients_of(model), values, strict=True):
                assert actual is None if expected is None else torch.equal(actual, expected)
            if left == "nothing":
                assert values[0] is None
        ddp.close()

    run_ranks(2, body, timeout_s=10)


@DIVIDE
def test_a_second_epoch_of_uneven_batches_begins_without_gradients_of_the_first(divide_by_initial_size):
    def body(comm):
        model, optimizer, ddp = wrapped(comm, model=nn.Linear(1, 1, bias=False), lr=0.1)
        seen = []
        for _ in range(3):
            with ddp.join(divide_by_initial_size=divide_by_initial_size):
                for _ in range((1, 2)[comm.rank]):
                    ddp(torch.ones(1, 1)).sum().backward()
                    seen.append(model.weight.grad.item())
                    optimizer.step()
                    optimizer.zero_grad()
        ddp.close()
        return seen

    alone = 0.5 if divide_by_initial_size else 1.0
    assert run_ranks(2, body) == [[1.0] * 3, [1.0, alone] * 3]


@pytest.mark.parametrize(
    ("synchronized", "local", "last", "gives_optimizer"),
    [
        ((1, 1), (0, 2), 1, True),
        ((2, 1), (0, 5), 0, False),
        ((1, 1, 2), (3, 0, 1), 2, True),
        ((1, 1), (2, 2), 0, False),
        ((0, 0), (1, 0), 0, True),
    ],
)
def test_all_ranks_end_with_equal_weights_where_the_last_steps_were_not_synchronized(
    synchronized, local, last, gives_optimizer
):
    def body(comm):
        model = make_model()
        optimizer = sgd(model.parameters())
        ddp = DistributedDataParallel(model, optimizer if gives_optimizer else (), comm=comm)
        with ddp.join():
            train(comm, ddp, optimizer, range(synchronized[comm.rank]))
            with ddp.no_sync():
                for step in range(local[comm.rank]):
                    train_step(ddp, optimizer, batch(comm.rank, 10 + step))
            mine = weights(model).clone()
        assert_same_on_all_ranks(comm, model)
        ddp.close()
        return mine, weights(model)

    results = run_ranks(len(synchronized), body, timeout_s=10)
    assert torch.equal(results[last][0], results[0][1])


def test_all_ranks_end_with_equal_weights_where_one_trained_the_plain_module():
    def body(comm):
        model, optimizer, ddp = wrapped(comm)
        with ddp.join():
            train_step(ddp, optimizer, batch(comm.rank, 0))
            if comm.rank == 1:
                train_step(ddp.module, optimizer, batch(1, 1))
        assert_same_on_all_ranks(comm, model)
        ddp.close()

    run_ranks(2, body, timeout_s=10)


NEEDS_ALL = {
    "SyncBatchNorm, '1'": lambda comm: sync_batchnorm.convert(nn.BatchNorm1d(4), comm),
    "": lambda comm: MoE(4, lambda: nn.Linear(4, 4), 2, comm=comm),
}


@pytest.mark.parametrize("name", NEEDS_ALL)
def test_join_is_refused_where_ranks_would_wait_for_one_that_has_ended(name):
    def body(comm):
        layer = NEEDS_ALL[name](comm)
        ddp = DistributedDataParallel(nn.Sequential(nn.Linear(4, 4), layer), comm=comm)

        def train_in_join(**settings):
            with ddp.join(**settings):
                for step in range(1 + comm.rank):
                    ddp(batch(comm.rank, step)).sum().backward()

        with pytest.raises(UnsupportedError, match=f"{name}.*Give it empty batches instead"):
            train_in_join()
        with pytest.raises(CommError, match="rank 0 has no more batches"):
            train_in_join(throw_on_early_termination=True)
        if name:
            layer.eval()  # as for fine-tuning
            train_in_join()
        ddp.close()

    run_ranks(2, body)


def test_join_is_refused_where_the_mean_is_one_over_those_that_send():
    def body(comm):
        DistributedDataParallel(make_model(), (), over_senders, comm=comm).join().__enter__()

    over_senders = GradientAllReduce(TopK(divide="senders"))
    with pytest.raises(UnsupportedError, match=r"join: TopK.* by the number of ranks that send"):
        run_ranks(2, body)
