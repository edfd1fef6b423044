"""Weights that are loaded into a wrapped model in the middle of training, and steps that a GradScaler skips."""

import copy
import warnings

import pytest
import torch
from support.torch_training import final_weights
from torch import nn

from bagua_comm import (
    AsyncModelAverage,
    CommMismatch,
    DiLoCo,
    LowPrecisionOnePeer,
    SparseLoCo,
    StreamingDiLoCo,
    every,
)
from bagua_comm.testing import run_ranks
from bagua_torch import Checkpoints, DistributedDataParallel


def make(comm, algorithm, lr=0.0, *, frozen=False):
    model = nn.Sequential(nn.Linear(8, 8), nn.Sequential(nn.Linear(8, 8)))
    for parameter in model.parameters():  # ranks are threads, and share PyTorch's generator
        parameter.data = torch.arange(parameter.numel()).sin().mul(0.3).reshape(parameter.shape)
    model[0].requires_grad_(not frozen)
    optimizer = torch.optim.SGD(model.parameters(), lr=lr)
    return model, optimizer, DistributedDataParallel(model, [optimizer], algorithm, comm=comm)


def step(comm, optimizer, ddp, number=0, count=1):
    for each in range(number, number + count):
        generator = torch.Generator().manual_seed(10 * each + comm.rank)
        optimizer.zero_grad()
        ddp(torch.randn(4, 8, generator=generator)).square().mean().backward()
        optimizer.step()


def threes(model):
    return {name: torch.full_like(value, 3.0) for name, value in model.state_dict().items()}


def load_module(model, ddp):
    model.load_state_dict(threes(model))


def load_parts(model, ddp):
    for layer in (model[0], model[1][0]):
        layer.load_state_dict(threes(layer))


def load_wrapper(model, ddp):
    ddp.load_state_dict({f"module.{name}": value for name, value in threes(model).items()}, strict=False)


def load_in_place(model, ddp):
    for parameter in model.parameters():
        parameter.data.fill_(3.0)
    ddp.engine.weights_replaced()


def load_as_data(model, ddp):
    for parameter in model.parameters():
        parameter.data = torch.full_like(parameter, 3.0)
    ddp.engine.weights_replaced()


def load_into_other_memory(model, ddp):
    for parameter in model.parameters():
        parameter.data = parameter.data.clone()
    load_module(model, ddp)
    ddp.state_dict()  # which looks at the buckets, too


LOADS = [load_module, load_parts, load_wrapper, load_in_place, load_as_data, load_into_other_memory]


@pytest.mark.covering(1)
@pytest.mark.parametrize("load", LOADS)
@pytest.mark.parametrize("algorithm", [DiLoCo(4), StreamingDiLoCo(4, 2, delay=2), SparseLoCo(4)], ids=repr)
def test_weights_loaded_in_the_middle_of_training_stay_as_they_are_at_rate_0(algorithm, load):
    def body(comm):
        model, optimizer, ddp = make(comm, algorithm, lr=0.1)
        step(comm, optimizer, ddp, count=5)
        optimizer.param_groups[0]["lr"] = 0.0
        load(model, ddp)
        step(comm, optimizer, ddp, count=9)
        return final_weights(ddp)

    for found in run_ranks(2, body):
        torch.testing.assert_close(found, torch.full_like(found, 3.0), rtol=0, atol=0)


def test_weights_that_are_loaded_before_others_are_unfrozen_stay_as_they_are_at_rate_0():
    def body(comm):
        model, optimizer, ddp = make(comm, DiLoCo(4), lr=0.1, frozen=True)
        step(comm, optimizer, ddp, count=5)
        load_module(model, ddp)
        model[0].requires_grad_(True)
        for group in optimizer.param_groups:
            group["lr"] = 0.0
        step(comm, optimizer, ddp, count=4)
        return final_weights(ddp)

    for found in run_ranks(2, body):
        torch.testing.assert_close(found, torch.full_like(found, 3.0), rtol=0, atol=0)


@pytest.mark.slow
@pytest.mark.parametrize(
    "algorithm", [DiLoCo(4), StreamingDiLoCo(4, 2, delay=2), LowPrecisionOnePeer()], ids=repr
)
def test_a_swap_for_an_evaluation_on_one_rank_changes_nothing(algorithm):
    def body(comm, swaps):
        model, optimizer, ddp = make(comm, algorithm, lr=0.1)
        for number in range(8):
            step(comm, optimizer, ddp, number)
            if swaps and comm.rank == 0:
                kept = copy.deepcopy(model.state_dict())
                model.load_state_dict(threes(model))
                with torch.no_grad():
                    model.eval()(torch.ones(1, 8))
                model.load_state_dict(kept)
                model.train()
        return final_weights(ddp)

    def trained(swaps):
        return run_ranks(2, lambda comm: body(comm, swaps))

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert all(map(torch.equal, trained(swaps=True), trained(swaps=False)))


def test_weights_loaded_on_one_rank_alone_are_an_error_on_all():
    def body(comm):
        model, optimizer, ddp = make(comm, DiLoCo(100))
        if comm.rank == 0:
            load_module(model, ddp)
        step(comm, optimizer, ddp, count=2)
        with pytest.raises(CommMismatch, match="after step 0 on rank 0, and never on rank 1"):
            ddp.close()

    run_ranks(2, body)


@pytest.mark.parametrize("algorithm", [DiLoCo(4), StreamingDiLoCo(4, 2, delay=2)], ids=repr)
def test_one_rank_may_load_the_best_weights_after_the_last_step_for_a_test(algorithm):
    def body(comm):
        model, optimizer, ddp = make(comm, algorithm, lr=0.1)
        step(comm, optimizer, ddp, count=5)
        if comm.rank == 0:
            load_module(model, ddp)
        ddp.close()
        return model[0].weight.detach().clone()

    found, other = run_ranks(2, body)
    assert (found == 3).all()
    assert (other < 1).all()


@pytest.mark.slow
@pytest.mark.parametrize("algorithm", [DiLoCo(4), StreamingDiLoCo(4, 2, delay=2)], ids=repr)
def test_a_checkpoint_with_the_algorithms_state_continues_from_it(algorithm, tmp_path):
    def body(comm, how):
        _, optimizer, ddp = make(comm, algorithm, lr=0.1)
        step(comm, optimizer, ddp, count=5)
        with Checkpoints(tmp_path / how, comm) as checkpoints:
            saved = copy.deepcopy(ddp.state_dict())
            checkpoints.save(5, model=ddp)
            if how:
                step(comm, optimizer, ddp, 5, count=3)
            if how == "files":
                checkpoints.load(model=ddp)
            elif how == "dict":
                ddp.load_state_dict(saved)
        step(comm, optimizer, ddp, 5, count=6)
        return final_weights(ddp)

    expected = run_ranks(2, lambda comm: body(comm, ""))
    for how in ("files", "dict"):
        assert all(map(torch.equal, run_ranks(2, lambda comm: body(comm, how)), expected))  # noqa: B023


@pytest.mark.slow
@pytest.mark.parametrize("algorithm", [DiLoCo(4), SparseLoCo(4, keep=4096), LowPrecisionOnePeer()], ids=repr)
def test_an_average_in_the_middle_is_no_replacement_and_keeps_the_mean(algorithm):
    def body(comm, averages):
        model, optimizer, ddp = make(comm, algorithm)
        step(comm, optimizer, ddp, count=6)
        ddp.engine.settle()
        for parameter in model.parameters():
            parameter.data += 0.1 * comm.rank  # as local steps do
        ddp.engine.keep_weights()
        if averages:
            ddp.average_weights()
        step(comm, optimizer, ddp, 6, count=2)
        ddp.average_weights()
        return final_weights(ddp)

    (found, _), (expected, _) = (run_ranks(2, lambda comm: body(comm, averages)) for averages in (True, False))  # noqa: B023
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-3)


# Steps that a GradScaler skips --------------------------------------------------------------------------------


def save_dict(comm, ddp, folder):
    if comm.rank == 0:
        ddp.state_dict()


def save_module(comm, ddp, folder):
    if comm.rank == 0:
        ddp.module.state_dict()


def save_files(comm, ddp, folder):
    with Checkpoints(folder, comm) as checkpoints:
        checkpoints.save(1, model=ddp)


def evaluate(comm, ddp, folder):
    if comm.rank == 0:
        ddp.eval()
        with torch.no_grad():
            ddp(torch.ones(1, 8))
        ddp.train()


@pytest.mark.covering(1)
@pytest.mark.parametrize("use", [save_dict, save_module, save_files, evaluate])
@pytest.mark.parametrize(
    "algorithm", [DiLoCo(2), every(2, LowPrecisionOnePeer()), AsyncModelAverage(0.0)], ids=repr
)
def test_rank_0_alone_uses_weights_after_a_step_that_another_rank_has_skipped(algorithm, use, tmp_path):
    def body(comm):
        _, optimizer, ddp = make(comm, algorithm, lr=0.1)
        scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
        for number in range(3):
            optimizer.zero_grad()
            overflow = float("inf") if comm.rank and number else 1.0
            scaler.scale(ddp(torch.ones(2, 8)).sum() * overflow).backward()
            scaler.step(optimizer)
            scaler.update()
            use(comm, ddp, tmp_path)
            comm.barrier()
        steps = ddp.engine.step
        ddp.close()
        return steps

    assert run_ranks(2, body, timeout_s=10) == [3, 3]
