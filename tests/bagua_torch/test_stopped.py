"""Training of each rank alone between `stop` and `resume`, and training together afterwards."""

import gc

import pytest
import torch
from support.torch_training import batch, filled, optimizer_for
from torch import nn

from bagua_comm import (
    ArrayError,
    ByteGrad,
    Decentralized,
    DiLoCo,
    GradientAllReduce,
    Reproducible,
    Tuner,
    every,
)
from bagua_comm.testing import run_ranks
from bagua_torch import DistributedDataParallel


def make_model():
    return filled(nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 1)))


def wrapped(comm, algorithm, **settings):
    model = make_model()
    optimizer = optimizer_for(algorithm, model.parameters())
    return model, optimizer, DistributedDataParallel(model, optimizer, algorithm, comm=comm, **settings)


def step(comm, ddp, optimizer, number=0):
    optimizer.zero_grad()
    ddp(batch(comm.rank, number)).square().mean().backward()
    optimizer.step()


def resume_and_close(comm, ddp, optimizer):
    """Make one more step together."""
    ddp.resume()
    step(comm, ddp, optimizer)
    ddp.close()


def buffers_of(model):
    return [buffer.clone() for buffer in model.buffers()]


@pytest.mark.parametrize("end", ["stop", "close"])
def test_a_stopped_rank_keeps_its_buffers_and_waits_for_none(end):
    def body(comm):
        model, optimizer, ddp = wrapped(comm, Decentralized())
        step(comm, ddp, optimizer)
        ddp.stop()
        for number in range(comm.rank):
            step(comm, ddp, optimizer, number)
        before = buffers_of(model)
        getattr(ddp, end)()
        assert all(map(torch.equal, before, buffers_of(model)))
        ddp.close()

    run_ranks(2, body, timeout_s=5)


@pytest.mark.parametrize("algorithm", [Decentralized(), GradientAllReduce()], ids=repr)
def test_a_step_that_one_rank_left_out_while_stopped_is_over_at_resume(algorithm):
    def body(comm):
        _, optimizer, ddp = wrapped(comm, algorithm)
        step(comm, ddp, optimizer)
        ddp.stop()
        if comm.rank == 0:
            ddp(batch(0, 1)).square().mean().backward()  # of which a GradScaler found that it is infinite
        ddp.resume()
        for number in range(3):
            step(comm, ddp, optimizer, number)
        ddp.close()
        return ddp.engine.step

    first, second = run_ranks(2, body, timeout_s=5)
    assert first == second


@pytest.mark.parametrize("algorithm", [ByteGrad(), GradientAllReduce()], ids=repr)
@pytest.mark.parametrize("find_unused", [False, True])
def test_a_stopped_rank_freezes_layers_by_itself_and_waits_for_none(algorithm, find_unused):
    def body(comm):
        model, optimizer, ddp = wrapped(comm, algorithm, find_unused_parameters=find_unused)
        ddp.stop()
        before = model[0].weight.detach().clone()
        for number in range(2 * comm.rank):
            model[0].requires_grad_(False)
            step(comm, ddp, optimizer, number)
            assert model[0].weight.grad is None
            model[0].requires_grad_(True)
        assert torch.equal(model[0].weight, before)
        resume_and_close(comm, ddp, optimizer)

    run_ranks(2, body, timeout_s=5)


def test_parameters_that_a_stopped_rank_does_not_use_get_no_gradient():
    def body(comm):
        model = filled(nn.Linear(4, 1))
        model.unused = nn.Linear(4, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        ddp = DistributedDataParallel(model, optimizer, comm=comm, find_unused_parameters=True)
        ddp.stop()
        for number in range(comm.rank + 1):
            step(comm, ddp, optimizer, number)
            assert model.weight.grad is not None
            assert model.unused.weight.grad is None
        ddp.close()

    run_ranks(2, body, timeout_s=5)


def test_a_tuner_rests_while_ranks_are_stopped():
    def body(comm):
        tuner = Tuner(bucket_bytes=[1, 64], warmup_steps=0, steps_per_trial=1)
        _, optimizer, ddp = wrapped(comm, GradientAllReduce(), tuner=tuner)
        ddp.stop()
        for number in range(5 * comm.rank):
            step(comm, ddp, optimizer, number)
        assert tuner.searching
        resume_and_close(comm, ddp, optimizer)

    run_ranks(2, body, timeout_s=5)


def test_microbatches_of_a_stopped_rank_are_refused_since_their_sum_would_be_no_mean():
    def body(comm):
        _, _, ddp = wrapped(comm, GradientAllReduce(Reproducible(addends=4)))
        ddp.stop()
        numbers = ddp.microbatches()
        ddp(batch(comm.rank, next(numbers))).square().mean().backward()
        with pytest.raises(ArrayError, match="hold: the engine is stopped"):
            next(numbers)
        ddp.close()

    run_ranks(2, body, timeout_s=5)


@pytest.mark.parametrize("algorithm", [every(2, GradientAllReduce()), DiLoCo(2)], ids=repr)
def test_ranks_with_unevenly_much_data_share_their_buffers_at_the_end(algorithm):
    def body(comm):
        model, optimizer, ddp = wrapped(comm, algorithm)
        with ddp.join():
            for number in range(2 + comm.rank):
                step(comm, ddp, optimizer, number)
        ddp.close()
        return buffers_of(model)

    first, second = run_ranks(2, body, timeout_s=5)
    assert all(map(torch.equal, first, second))


@pytest.mark.parametrize("saved_when", ["stopped", "resumed"])
def test_a_state_saved_while_stopped_after_uneven_steps_says_to_resume_first(saved_when):
    def body(comm):
        _, optimizer, ddp = wrapped(comm, Decentralized())
        ddp.stop()
        for number in range(comm.rank):
            step(comm, ddp, optimizer, number)
        if saved_when == "resumed":
            ddp.resume()
        state = ddp.state_dict()
        ddp.resume()
        if saved_when == "resumed":
            ddp.load_state_dict(state)
        else:
            with pytest.raises(ArrayError, match=r"'step' is 0 on rank 0 and 1 on rank 1.*resume first"):
                ddp.load_state_dict(state)
        ddp.close()

    run_ranks(2, body, timeout_s=5)


@pytest.mark.parametrize("dropping", [(0, 1), (1,)], ids=["all ranks", "one rank"])
def test_an_engine_whose_wrapper_is_deleted_does_not_resume_with_different_weights(dropping):
    def body(comm):
        _, optimizer, ddp = wrapped(comm, GradientAllReduce())
        ddp.stop()
        step(comm, ddp, optimizer, comm.rank)
        engine = ddp.engine
        if comm.rank in dropping:
            del ddp
            gc.collect()
        with pytest.raises(ArrayError, match=f"rank {dropping[0]} has deleted the wrapper of this engine"):
            engine.resume()
        engine.abort()

    run_ranks(2, body, timeout_s=5)


def test_an_engine_whose_wrapper_is_deleted_resumes_with_equal_weights():
    def body(comm):
        _, _, ddp = wrapped(comm, GradientAllReduce())
        ddp.stop()
        engine = ddp.engine
        del ddp
        gc.collect()
        engine.resume()
        stopped = engine.stopped
        engine.close()
        return stopped

    assert run_ranks(2, body, timeout_s=5) == [False, False]
