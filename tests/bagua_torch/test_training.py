"""Training with accumulation, mixed precision, clipping, compilation, several models and optimizers."""

import contextlib
import copy
import warnings

import numpy as np
import pytest
import torch
from support.torch_training import (
    ALGORITHMS,
    ASYNC_ALGORITHMS,
    CHANGING_ALGORITHMS,
    GRADIENT_ALGORITHMS,
    QADAM,
    WEIGHT_ALGORITHMS,
    assert_same_on_all_ranks,
    batch,
    filled,
    final_weights,
    gradients,
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
    ByteGrad,
    Decentralized,
    DiLoCo,
    GradientAllReduce,
    LowPrecisionDecentralized,
    LowPrecisionOnePeer,
    QAdam,
    UnsupportedError,
)
from bagua_comm.testing import run_ranks
from bagua_torch import DistributedDataParallel, QAdamOptimizer, as_array

RANKS = pytest.mark.parametrize("ranks", [1, 3])


def close(actual, expected):
    torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-6)


# Evaluation mode ------------------------------------------------------------------------------------------


@pytest.mark.algorithms("sample")
@pytest.mark.parametrize(
    "algorithm", [*GRADIENT_ALGORITHMS, QADAM, *WEIGHT_ALGORITHMS, *CHANGING_ALGORITHMS], ids=str
)
def test_training_in_evaluation_mode_exchanges_as_in_training_mode(algorithm):
    """Fine-tuning without dropout, and with the statistics of BatchNorm as they are."""

    def body(comm, modes):
        _, optimizer, ddp = wrapped(comm, algorithm, bucket_bytes=100)
        for step in range(8):
            ddp.train(modes[step % len(modes)])
            train_step(ddp, optimizer, batch(comm.rank, step))
        return final_weights(ddp)

    def trained(*modes):
        return run_ranks(2, lambda comm: body(comm, modes))

    for expected, late, mixed in zip(trained(True), trained(False), trained(True, False, False), strict=True):
        assert torch.equal(late, expected)
        assert torch.equal(mixed, expected)


# Accumulating gradients -----------------------------------------------------------------------------------


@pytest.mark.covering(1)
@RANKS
@pytest.mark.parametrize("synchronized", ["last", "every"])
def test_accumulated_gradients_are_those_of_one_large_batch(ranks, synchronized):
    """With no_sync but for the last batch, or averaged after every one of them."""
    plain = make_model()
    plain_optimizer = sgd(plain.parameters())
    for step in range(4):
        plain_optimizer.zero_grad()
        for part in range(3):
            sum(loss_of(plain, batch(rank, 10 * step + part)) / ranks for rank in range(ranks)).backward()
        plain_optimizer.step()

    def body(comm):
        _, optimizer, ddp = wrapped(comm, bucket_bytes=100)
        for step in range(4):
            optimizer.zero_grad()
            for part in range(3):
                local = synchronized == "last" and part < 2
                with ddp.no_sync() if local else contextlib.nullcontext():
                    loss_of(ddp, batch(comm.rank, 10 * step + part)).backward()
            optimizer.step()
        return final_weights(ddp)

    for actual in run_ranks(ranks, body):
        close(actual, weights(plain))


@pytest.mark.parametrize("algorithm", [*GRADIENT_ALGORITHMS, QADAM], ids=repr)
def test_no_sync_communicates_nothing(algorithm):
    def body(comm):
        model = nn.Sequential(nn.BatchNorm1d(4), make_model())
        ddp = DistributedDataParallel(model, optimizer_for(algorithm, model.parameters()), algorithm, comm=comm)
        before = comm.counters.total().calls, ddp.engine.counter.calls
        with ddp.no_sync():
            loss_of(ddp, batch(comm.rank, 0)).backward()
            mine = gradients(model)
            loss_of(ddp, batch(comm.rank, 0)).backward()
        close(gradients(model), 2 * mine)
        assert (comm.counters.total().calls, ddp.engine.counter.calls) == before
        ddp.close()
        return mine

    mine, other = run_ranks(2, body)
    assert not torch.equal(mine, other)


def test_no_sync_ends_with_an_exception_in_it():
    def body(comm):
        model = make_model()
        ddp = DistributedDataParallel(model, comm=comm)
        with pytest.raises(ZeroDivisionError), ddp.no_sync():
            raise ZeroDivisionError
        loss_of(ddp, batch(comm.rank, 0)).backward()
        comm.check_consistency(as_array(gradients(model)))
        ddp.close()

    run_ranks(2, body)


@pytest.mark.parametrize("algorithm", [ByteGrad(), QADAM], ids=repr)
def test_quantized_averages_of_accumulated_gradients_are_close_and_the_same_everywhere(algorithm):
    def trained(algorithm, optimizer_like):
        def body(comm):
            model = make_model()
            optimizer = optimizer_for(optimizer_like, model.parameters())
            ddp = DistributedDataParallel(model, optimizer, algorithm, comm=comm)
            for step in range(8):
                optimizer.zero_grad()
                with ddp.no_sync():
                    loss_of(ddp, batch(comm.rank, step)).backward()
                loss_of(ddp, batch(comm.rank, step + 100)).backward()
                optimizer.step()
            ddp.close()
            assert_same_on_all_ranks(comm, model)
            return weights(model)

        return run_ranks(2, body)[0]

    exact = (
        QAdam(warmup_steps=3, average=GradientAllReduce().average) if algorithm is QADAM else GradientAllReduce()
    )
    expected = trained(exact, algorithm)
    change = torch.linalg.norm(expected - weights(make_model()))

    assert torch.linalg.norm(trained(algorithm, algorithm) - expected) < 0.1 * change


# Parameters that are unused in some steps -----------------------------------------------------------------


class Branches(nn.Module):
    """Takes some of its layers, others in every call."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(4, 2) for _ in range(5)])
        filled(self)

    def forward(self, x, chosen):
        return sum(self.layers[i](x) for i in chosen)


def chosen(rank, step, part):
    """Which layers a rank takes: others in every step and on every rank, now and then none that another takes."""
    generator = torch.Generator().manual_seed(100 * step + 10 * part + rank)
    return torch.randperm(4, generator=generator)[: 1 + (step + rank) % 2].tolist()  # the last layer: never


@pytest.mark.covering(1)
@RANKS
@pytest.mark.parametrize("find_unused", [False, True])
@pytest.mark.parametrize("parts", [1, 2])
def test_unused_parameters_change_from_step_to_step_and_differ_between_ranks(ranks, find_unused, parts):
    """Layers that no rank took in any part of a step have no gradient, or one of zeros."""
    plain = Branches()
    plain_optimizer = torch.optim.SGD(plain.parameters(), lr=0.05, momentum=0.9, weight_decay=0.1)
    for step in range(8):
        plain_optimizer.zero_grad()
        for part in range(parts):
            for rank in range(ranks):
                loss = plain(batch(rank, step), chosen(rank, step, part)).square().sum()
                (loss / ranks).backward()
        if not find_unused:
            for parameter in plain.parameters():
                parameter.grad = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
        plain_optimizer.step()

    def body(comm):
        model = Branches()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, weight_decay=0.1)
        ddp = DistributedDataParallel(
            model, optimizer, comm=comm, bucket_bytes=50, find_unused_parameters=find_unused
        )
        for step in range(8):
            optimizer.zero_grad()
            for part in range(parts):
                with ddp.no_sync() if part < parts - 1 else contextlib.nullcontext():
                    ddp(batch(comm.rank, step), chosen(comm.rank, step, part)).square().sum().backward()
            optimizer.step()
        return final_weights(ddp)

    for actual in run_ranks(ranks, body):
        close(actual, weights(plain))


@pytest.mark.algorithms("sample")
@pytest.mark.parametrize("algorithm", ALGORITHMS, ids=repr)
def test_unused_parameters_hang_no_algorithm(algorithm):
    def body(comm):
        model = Branches()
        optimizer = optimizer_for(algorithm, model.parameters())
        ddp = DistributedDataParallel(model, optimizer, algorithm, comm=comm, bucket_bytes=50)
        for step in range(6):
            optimizer.zero_grad()
            ddp(batch(comm.rank, step), chosen(comm.rank, step, 0)).square().sum().backward()
            optimizer.step()
        ddp.close()
        return bool(weights(model).isfinite().all())

    assert run_ranks(2, body) == [True, True]


# Mixed precision ------------------------------------------------------------------------------------------


def test_autocast_and_scaled_gradients_are_those_of_one_plain_model():
    def scaled_step(model, optimizer, scaler, losses):
        optimizer.zero_grad()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            scaler.scale(losses(model)).backward()
        scaler.step(optimizer)
        scaler.update()

    plain = make_model()
    optimizer, scaler = sgd(plain.parameters()), torch.amp.GradScaler("cpu", init_scale=64.0)
    for step in range(4):
        scaled_step(
            plain, optimizer, scaler, lambda m, step=step: sum(loss_of(m, batch(r, step)) / 2 for r in (0, 1))
        )

    def body(comm):
        _, optimizer, ddp = wrapped(comm)
        scaler = torch.amp.GradScaler("cpu", init_scale=64.0)
        for step in range(4):
            scaled_step(ddp, optimizer, scaler, lambda m, step=step: loss_of(m, batch(comm.rank, step)))
        return final_weights(ddp)

    for actual in run_ranks(2, body):
        torch.testing.assert_close(actual, weights(plain), rtol=0.02, atol=0.005)


@pytest.mark.parametrize(
    ("algorithm", "unscale_first"), [*zip(GRADIENT_ALGORITHMS, [False, True, False, True], strict=True)], ids=repr
)
def test_an_infinity_on_one_rank_makes_all_ranks_skip_alike(algorithm, unscale_first):
    def body(comm):
        model, optimizer, ddp = wrapped(comm, algorithm)
        scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
        scales, before = [], []
        for step in range(4):
            optimizer.zero_grad()
            overflow = float("inf") if step in (1, 2) and comm.rank == step - 1 else 1.0
            scaler.scale(loss_of(ddp, batch(comm.rank, step)) * overflow).backward()
            if unscale_first:
                scaler.unscale_(optimizer)
            before.append(weights(model))
            scaler.step(optimizer)
            scaler.update()
            scales.append(scaler.get_scale())
            skipped = torch.equal(before[-1], weights(model))
            assert skipped == (step in (1, 2))
            assert_same_on_all_ranks(comm, model)
        assert weights(model).isfinite().all()
        ddp.close()
        return scales

    assert run_ranks(2, body) == [[4.0, 2.0, 1.0, 1.0]] * 2


def skipping_a_step(comm, algorithm, skipping=0):
    """A trained model on whose rank `skipping` GradScaler just skipped a step."""
    model, optimizer, ddp = wrapped(comm, algorithm)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    for step in range(3):
        optimizer.zero_grad()
        overflow = float("inf") if step == 2 and comm.rank == skipping else 1.0
        scaler.scale(loss_of(ddp, batch(comm.rank, step)) * overflow).backward()
        scaler.step(optimizer)
        scaler.update()
    assert scaler.get_scale() == (2.0 if comm.rank == skipping else 4.0)
    return model, optimizer, ddp


THEN = {
    "train": lambda comm, ddp: None,
    "save": lambda comm, ddp: ddp.state_dict(),
    "average": lambda comm, ddp: ddp.average_weights(),
    "switch": lambda comm, ddp: ddp.switch(LowPrecisionOnePeer()),
    "evaluate": lambda comm, ddp: (ddp.eval()(batch(0, 0)), comm.barrier(), ddp.train()),
    "stop": lambda comm, ddp: (ddp.stop(), ddp.resume()),
}


@pytest.mark.algorithms("sample")
@pytest.mark.covering(1)
@pytest.mark.parametrize("then", THEN)
@pytest.mark.parametrize("algorithm", WEIGHT_ALGORITHMS, ids=repr)
def test_a_rank_may_skip_a_step_alone_where_weights_are_exchanged(algorithm, then):
    """In each next step, no rank waits for a message that another does not send."""

    def body(comm):
        model, optimizer, ddp = skipping_a_step(comm, algorithm)
        THEN[then](comm, ddp)
        train(comm, ddp, optimizer, range(3, 6))
        steps = ddp.engine.step
        ddp.switch(GradientAllReduce())
        assert_same_on_all_ranks(comm, model)
        assert weights(model).isfinite().all()
        ddp.close()
        return steps

    assert len(set(run_ranks(2, body, timeout_s=3))) == 1


@pytest.mark.algorithms("sample")
@pytest.mark.parametrize("algorithm", WEIGHT_ALGORITHMS, ids=repr)
def test_closing_after_a_rank_skipped_a_step_alone(algorithm):
    """It ends the step as `stop` does."""

    def body(comm, stop):
        model, _, ddp = skipping_a_step(comm, algorithm)
        if stop:
            ddp.stop()
            stopped = weights(model)
        ddp.close()
        assert not stop or torch.equal(weights(model), stopped)
        return weights(model)

    closed = run_ranks(2, lambda comm: body(comm, False), timeout_s=3)
    stopped = run_ranks(2, lambda comm: body(comm, True), timeout_s=3)
    assert all(map(torch.equal, closed, stopped))


@pytest.mark.parametrize("unscale_first", [False, True])
def test_qadam_with_a_grad_scaler_is_refused_and_trains_without_one(unscale_first):
    def body(comm):
        model, optimizer, ddp = wrapped(comm, QADAM)
        scaler = torch.amp.GradScaler("cpu")
        scaler.scale(loss_of(ddp, batch(comm.rank, 0))).backward()
        before = weights(model)
        if unscale_first:
            scaler.unscale_(optimizer)
        with pytest.raises(UnsupportedError, match="bfloat16, which needs no scaler"):
            scaler.step(optimizer)
        assert torch.equal(weights(model), before)
        train(comm, ddp, optimizer, range(5))
        assert_same_on_all_ranks(comm, model)
        ddp.close()

    run_ranks(2, body)


@pytest.mark.parametrize("algorithm", GRADIENT_ALGORITHMS, ids=repr)
def test_an_infinity_is_gone_with_its_gradients(algorithm):
    """Nothing of it stays behind in the buckets, the ends of which belong to no parameter."""

    def body(comm):
        model = make_model()
        ddp = DistributedDataParallel(model, algorithm=algorithm, comm=comm)
        finite = []
        for step in range(3):
            model.zero_grad()
            (loss_of(ddp, batch(comm.rank, step)) * (float("inf") if step == 0 else 1.0)).backward()
            finite.append(bool(gradients(model).isfinite().all()))
        ddp.close()
        return finite

    assert run_ranks(2, body) == [[False, True, True]] * 2


# Clipping -------------------------------------------------------------------------------------------------


@RANKS
def test_clipped_gradients_are_those_of_one_large_batch(ranks):
    plain = make_model()
    plain_optimizer, norms = sgd(plain.parameters()), []
    for step in range(4):
        plain_optimizer.zero_grad()
        loss_of(plain, torch.cat([batch(rank, step) for rank in range(ranks)])).backward()
        norms.append(nn.utils.clip_grad_norm_(plain.parameters(), 0.1).item())
        plain_optimizer.step()
    assert min(norms) > 0.1

    def body(comm):
        model = make_model()
        optimizer, norms = sgd(model.parameters()), []
        ddp = DistributedDataParallel(model, optimizer, comm=comm, bucket_bytes=100)
        for step in range(4):
            optimizer.zero_grad()
            loss_of(ddp, batch(comm.rank, step)).backward()
            norms.append(nn.utils.clip_grad_norm_(ddp.parameters(), 0.1).item())
            optimizer.step()
        ddp.close()
        return weights(model), norms

    for actual, actual_norms in run_ranks(ranks, body):
        close(actual, weights(plain))
        np.testing.assert_allclose(actual_norms, norms, rtol=1e-4)


# Compilation ----------------------------------------------------------------------------------------------


@pytest.mark.covering(1)
@pytest.mark.parametrize(
    ("compiled", "algorithm"),
    [
        pytest.param("module", GradientAllReduce(), marks=pytest.mark.slow),
        pytest.param("ddp", GradientAllReduce(), marks=pytest.mark.slow),
        pytest.param("module", QADAM, marks=pytest.mark.slow),
        pytest.param("ddp", LowPrecisionDecentralized(), marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_compiled_models_train_as_plain_ones(compiled, algorithm):
    def trained(compiled):
        def body(comm):
            model = nn.Sequential(nn.BatchNorm1d(4), make_model())
            optimizer = optimizer_for(algorithm, model.parameters())
            module = torch.compile(model, backend="aot_eager") if compiled == "module" else model
            ddp = DistributedDataParallel(module, optimizer, algorithm, comm=comm, bucket_bytes=100)
            called = torch.compile(ddp, backend="aot_eager") if compiled == "ddp" else ddp
            steps = []
            for step in range(5):
                optimizer.zero_grad()
                with ddp.no_sync():
                    loss_of(called, batch(comm.rank, step + 100)).backward()
                loss_of(called, batch(comm.rank, step)).backward()
                steps.append(gradients(model).clone())
                optimizer.step()
            ddp.close()
            return steps

        return run_ranks(2, body)

    torch.compiler.reset()
    for actual, expected in zip(trained(compiled), trained("nothing"), strict=True):
        for step, gradient in enumerate(actual):
            torch.testing.assert_close(gradient, expected[step], rtol=1e-4, atol=1e-6)


# Models and optimizers ------------------------------------------------------------------------------------


@RANKS
def test_two_models_that_train_against_each_other(ranks):
    """Each has its optimizer, and gradients of the one run through the other."""

    def step_of(one, other, optimizers, losses):
        for mine, optimizer in ((one, optimizers[0]), (other, optimizers[1])):
            for each in optimizers:
                each.zero_grad()
            sign = 1 if mine is one else -1
            losses(lambda x, sign=sign: sign * other(torch.tanh(one(x)).repeat(1, 2)).square().mean()).backward()
            optimizer.step()

    plain = make_model(1), make_model(2)
    optimizers = [sgd(model.parameters()) for model in plain]
    for step in range(4):
        step_of(*plain, optimizers, lambda f, step=step: sum(f(batch(r, step)) / ranks for r in range(ranks)))

    def body(comm):
        models = make_model(1), make_model(2)
        optimizers = [sgd(model.parameters()) for model in models]
        ddps = [
            DistributedDataParallel(model, optimizer, comm=comm, bucket_bytes=100)
            for model, optimizer in zip(models, optimizers, strict=True)
        ]
        for step in range(4):
            step_of(*ddps, optimizers, lambda f, step=step: f(batch(comm.rank, step)))
        for ddp in ddps:
            ddp.close()
        return [weights(model) for model in models]

    for actual in run_ranks(ranks, body):
        for mine, expected in zip(actual, plain, strict=True):
            close(mine, weights(expected))


@pytest.mark.algorithms("sample")
@pytest.mark.parametrize("algorithm", ALGORITHMS, ids=repr)
def test_one_optimizer_over_two_models_trains_as_two_optimizers(algorithm):
    if "AsyncModelAverage" in repr(algorithm):
        return  # two runs of it differ

    def trained(optimizers):
        def body(comm):
            models = [make_model(1), make_model(2)]
            parameters = [list(model.parameters()) for model in models]
            if optimizers == "one":
                made = [optimizer_for(algorithm, parameters[0] + parameters[1])] * 2
            else:
                made = [optimizer_for(algorithm, each) for each in parameters]
            ddps = [
                DistributedDataParallel(model, optimizer, algorithm, comm=comm)
                for model, optimizer in zip(models, made, strict=True)
            ]
            for step in range(8):
                for model in models:
                    model.zero_grad()
                sum(loss_of(ddp, batch(comm.rank, step)) for ddp in ddps).backward()
                for optimizer in dict.fromkeys(made):
                    optimizer.step()
            for ddp in ddps:
                ddp.close()
            return torch.cat([weights(model) for model in models])

        return run_ranks(2, body)

    for actual, expected in zip(trained("one"), trained("two"), strict=True):
        assert torch.equal(actual, expected)


@RANKS
@pytest.mark.parametrize("order", ["both", "alternating"])
def test_two_optimizers_over_one_model(ranks, order):
    def optimizers_of(model):
        *first, weight, bias = model.parameters()
        return [sgd(first), torch.optim.AdamW([weight, bias], lr=0.01)]

    def stepping(optimizers, step):
        return optimizers if order == "both" else [optimizers[step % 2]]

    plain = make_model()
    plain_optimizers = optimizers_of(plain)
    for step in range(6):
        plain.zero_grad()
        sum(loss_of(plain, batch(rank, step)) / ranks for rank in range(ranks)).backward()
        for optimizer in stepping(plain_optimizers, step):
            optimizer.step()

    def body(comm):
        model = make_model()
        optimizers = optimizers_of(model)
        ddp = DistributedDataParallel(model, optimizers, comm=comm, bucket_bytes=100)
        for step in range(6):
            model.zero_grad()
            loss_of(ddp, batch(comm.rank, step)).backward()
            for optimizer in stepping(optimizers, step):
                optimizer.step()
        return final_weights(ddp)

    for actual in run_ranks(ranks, body):
        close(actual, weights(plain))


@pytest.mark.algorithms("sample")
@pytest.mark.parametrize("algorithm", WEIGHT_ALGORITHMS, ids=repr)
@pytest.mark.parametrize("order", ["both", "alternating"])
def test_two_optimizers_make_one_step_together(algorithm, order):
    """Weights are exchanged once a step; where an optimizer is left out, that ends with the next forward pass."""

    def body(comm):
        model = make_model()
        *first, weight, bias = model.parameters()
        optimizers = [sgd(first), sgd([weight, bias])]
        ddp = DistributedDataParallel(model, optimizers, algorithm, comm=comm)
        for step in range(6):
            model.zero_grad()
            loss_of(ddp, batch(comm.rank, step)).backward()
            for optimizer in optimizers if order == "both" else [optimizers[step % 2]]:
                optimizer.step()
        loss_of(ddp, batch(comm.rank, 6))
        steps = ddp.engine.step
        ddp.close()
        return steps

    assert run_ranks(2, body) == [6, 6]


@pytest.mark.parametrize("algorithm", [GradientAllReduce(), LowPrecisionDecentralized(), QADAM], ids=repr)
def test_the_closure_of_an_optimizer_makes_the_backward_pass(algorithm):
    def trained(way):
        def body(comm):
            _, optimizer, ddp = wrapped(comm, algorithm)
            for step in range(4):
                if way == "after a forward pass that raised" and comm.rank == 0:
                    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
                        ddp(torch.ones(2, 1))
                outside = [loss_of(ddp, batch(comm.rank, step))] if way == "of a loss before it" else []

                def closure(step=step, outside=outside):
                    optimizer.zero_grad()
                    loss = outside[0] if outside else loss_of(ddp, batch(comm.rank, step))
                    loss.backward()
                    return loss

                if way:
                    optimizer.step(closure)
                else:
                    closure()
                    optimizer.step()
            return final_weights(ddp)

        with warnings.catch_warnings():
            warnings.simplefilter("error")
            return run_ranks(2, body, timeout_s=10)

    wanted = trained("")
    for way in ("of all", "of a loss before it", "after a forward pass that raised"):
        for actual, expected in zip(trained(way), wanted, strict=True):
            assert torch.equal(actual, expected), way


def test_a_step_of_the_optimizer_is_not_lost_if_no_forward_pass_was_between():
    def body(comm):
        model = make_model()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
        ddp = DistributedDataParallel(model, optimizer, LowPrecisionDecentralized(), comm=comm)
        loss_of(ddp, batch(0, 0)).backward()
        start, gradient = weights(model), gradients(model).clone()
        for _ in range(2):
            optimizer.step()
        ddp.average_weights()
        moved = weights(model) - start
        ddp.close()
        return torch.linalg.norm(moved) / torch.linalg.norm(gradient)

    for ratio in run_ranks(2, body):
        assert 0.9 < ratio < 1.1


# Initial state of ranks -----------------------------------------------------------------------------------

OPTIMIZERS = {
    "SGD": lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9),
    "Adam": lambda p: torch.optim.Adam(p, lr=0.01, amsgrad=True),
    "AdamW": lambda p: torch.optim.AdamW(p, lr=0.01),
    "RMSprop": lambda p: torch.optim.RMSprop(p, lr=0.01, momentum=0.5, centered=True),
    "QAdamOptimizer": lambda p: QAdamOptimizer(p, lr=0.01, warmup_steps=2),
}


def tensors_and_numbers(optimizer):
    """The state and settings of an optimizer, comparable to the bit."""
    state = optimizer.state_dict()
    return [
        [sorted((k, v.tolist() if isinstance(v, torch.Tensor) else v) for k, v in s.items())]
        for s in state["state"].values()
    ] + [{k: v for k, v in group.items() if k != "params"} for group in state["param_groups"]]


@pytest.mark.covering(1)
@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("fresh", ["none", "rank 0", "others"])
def test_ranks_that_trained_alone_start_from_rank_0(ranks, name, fresh):
    """Parameters and optimizers: also where rank 0's optimizer has no state yet, or is the only one with any."""

    def body(comm):
        model = make_model(seed=comm.rank)
        optimizer = OPTIMIZERS[name](model.parameters())
        optimizer.param_groups[0]["lr"] *= 1 + comm.rank
        for step in range(0 if fresh == ("rank 0" if comm.rank == 0 else "others") else 3):
            train_step(model, optimizer, batch(comm.rank, step))
        mine = weights(model), tensors_and_numbers(optimizer)
        ddp = DistributedDataParallel(model, optimizer, comm=comm)
        wrapped = weights(model), tensors_and_numbers(optimizer)
        train(comm, ddp, optimizer, range(3))
        ddp.close()
        return mine, wrapped, (weights(model), tensors_and_numbers(optimizer))

    results = run_ranks(ranks, body)
    (expected_weights, expected_state), _, (trained_weights, trained_state) = results[0]
    for _, (actual_weights, actual_state), (later_weights, later_state) in results:
        assert torch.equal(actual_weights, expected_weights)
        assert actual_state == expected_state
        assert torch.equal(later_weights, trained_weights)
        assert later_state == trained_state


# Between steps --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("through", ["ddp", "module"])
def test_evaluation_between_steps_sees_the_mixed_weights(through):
    algorithm = LowPrecisionDecentralized()

    def body(comm):
        model, optimizer, ddp = wrapped(comm, algorithm)
        for step in range(4):
            train_step(ddp, optimizer, batch(comm.rank, step))
            unmixed = weights(model)
            ddp.eval()
            with torch.no_grad():
                seen = (ddp if through == "ddp" else ddp.module)(batch(0, 0))
            ddp.train()
            (state,) = ddp.engine.states
            mixed = make_model()
            for name, parameter in mixed.named_parameters():
                values = ddp.engine.plan.buckets[0].cut(state.weight)[name]
                parameter.data.copy_(torch.from_numpy(values))
            assert torch.equal(seen, mixed(batch(0, 0)))
            assert torch.equal(weights(model), weights(mixed))
            assert not torch.equal(unmixed, weights(mixed))
        return final_weights(ddp)

    def without_evaluation(comm):
        _, optimizer, ddp = wrapped(comm, algorithm)
        train(comm, ddp, optimizer, range(4))
        return final_weights(ddp)

    for actual, expected in zip(run_ranks(2, body), run_ranks(2, without_evaluation), strict=True):
        assert torch.equal(actual, expected)


@pytest.mark.algorithms("sample")
@pytest.mark.parametrize("algorithm", ALGORITHMS, ids=repr)
def test_an_evaluation_on_one_rank_alone_waits_for_no_other_and_changes_nothing(algorithm):
    def body(comm, evaluates):
        _, optimizer, ddp = wrapped(comm, algorithm)
        for step in range(5):
            train_step(ddp, optimizer, batch(comm.rank, step))
            if evaluates and comm.rank == 0:
                with torch.inference_mode():
                    ddp.eval()(batch(0, 0))
                ddp.train()
        ddp.stop()
        ddp.average_weights()
        return final_weights(ddp)

    first, second = run_ranks(2, lambda comm: body(comm, True), timeout_s=5)
    assert torch.equal(first, second)
    if algorithm not in ASYNC_ALGORITHMS:  # their averages depend on time
        assert torch.equal(first, run_ranks(2, lambda comm: body(comm, False), timeout_s=5)[0])


@pytest.mark.algorithms("sample")
@pytest.mark.parametrize("algorithm", ALGORITHMS, ids=repr)
def test_two_forward_passes_before_one_backward_pass(algorithm):
    """They give what one pass over both batches gives; an evaluation between them changes nothing."""

    def trained(passes):
        def body(comm):
            model, optimizer, ddp = wrapped(comm, algorithm)
            steps = []
            for step in range(5):
                optimizer.zero_grad()
                parts = batch(comm.rank, step).chunk(passes)
                losses = []
                for x in parts:
                    losses.append(loss_of(ddp, x) / passes)
                    with torch.no_grad():
                        ddp(x)
                        ddp.module(x)
                sum(losses).backward()
                steps.append(gradients(model).clone())
                optimizer.step()
            ddp.close()
            return steps

        return run_ranks(2, body)

    if "AsyncModelAverage" in repr(algorithm):
        trained(passes=2)
        return
    for actual, expected in zip(trained(passes=2), trained(passes=1), strict=True):
        torch.testing.assert_close(actual, expected, rtol=0.05, atol=0.01)  # quantized ones differ by a code


@pytest.mark.parametrize("algorithm", [Decentralized(), LowPrecisionDecentralized(), DiLoCo(1)], ids=repr)
def test_a_backward_pass_of_an_older_graph_raises_once_weights_were_written_back(algorithm):
    def body(comm):
        _, optimizer, ddp = wrapped(comm, algorithm)
        loss = loss_of(ddp, batch(comm.rank, 0))
        loss.backward(retain_graph=True)
        if algorithm.window.closes.name == "FORWARD":
            optimizer.step()
            ddp.eval()(batch(0, 0))
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()
        ddp.close()

    run_ranks(2, body)


def test_copying_the_wrapper_is_refused_and_copying_its_module_is_not():
    def body(comm):
        model, optimizer, ddp = wrapped(comm, LowPrecisionDecentralized())
        train_step(ddp, optimizer, batch(comm.rank, 0))
        with pytest.raises(UnsupportedError, match=r"copy its \.module"):
            copy.deepcopy(ddp)
        ddp.eval()(batch(0, 0))  # exchanges are written back
        ddp.train()
        copied = copy.deepcopy(ddp.module)
        average = torch.optim.swa_utils.AveragedModel(ddp.module)
        assert torch.equal(weights(copied), weights(model))
        assert torch.equal(weights(average), weights(model))
        train_step(copied, sgd(copied.parameters()), batch(comm.rank, 1))  # by itself: communicates nothing
        assert ddp.engine.step == 1
        ddp.close()

    run_ranks(2, body)


@pytest.mark.algorithms("sample")
@pytest.mark.parametrize("algorithm", WEIGHT_ALGORITHMS, ids=repr)
def test_after_a_repeated_step_an_evaluation_or_a_save_on_one_rank_alone_waits_for_no_other(algorithm):
    def body(comm):
        model, optimizer, ddp = wrapped(comm, algorithm)
        for step in range(3):
            train_step(ddp, optimizer, batch(comm.rank, step))
            optimizer.step()
            if comm.rank == 0:
                with torch.inference_mode():
                    model.eval()(batch(0, 0))
                model.train().state_dict()
            comm.barrier()
        ddp.stop()
        ddp.average_weights()
        return final_weights(ddp)

    first, second = run_ranks(2, body, timeout_s=5)
    assert torch.equal(first, second)


@pytest.mark.algorithms("sample")
@pytest.mark.parametrize("algorithm", WEIGHT_ALGORITHMS, ids=repr)
def test_an_optimizer_may_step_twice_before_the_plain_module_runs(algorithm):
    """The second step is exchanged before a graph of the plain module needs the weights."""

    def body(comm):
        model, optimizer, ddp = wrapped(comm, algorithm)
        for step in range(4):
            optimizer.zero_grad()
            x = batch(comm.rank, step)
            (loss_of(model, x) + loss_of(ddp, x)).backward()
            optimizer.step()
            optimizer.step()
        ddp.switch(GradientAllReduce())
        assert_same_on_all_ranks(comm, model)
        ddp.close()

    run_ranks(2, body, timeout_s=5)
