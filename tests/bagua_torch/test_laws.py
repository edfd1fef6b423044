"""Laws of all algorithms in a wrapped model, where optimizers keep state and borrow it."""

import copy

import pytest
import torch
from support.torch_training import (
    ALGORITHMS,
    ASYNC_ALGORITHMS,
    QADAM,
    assert_same_on_all_ranks,
    batch,
    final_weights,
    gradients,
    loss_of,
    make_model,
    optimizer_for,
    train,
    train_step,
    weights,
    wrapped,
)
from torch import nn

from bagua_comm import (
    ArrayError,
    Decentralized,
    DiLoCo,
    ErrorFeedback,
    Exact,
    GradientAllReduce,
    LowPrecisionOnePeer,
    QAdam,
    Tuner,
    after,
    every,
)
from bagua_comm.algorithms.base import exchanges_weights, runs_in_rounds
from bagua_comm.testing import run_ranks
from bagua_torch import Checkpoints, DistributedDataParallel, as_array

BY_STEPS = [x for x in ALGORITHMS if not runs_in_rounds(x)]


def trained(algorithm, steps=6):
    def body(comm):
        _, optimizer, ddp = wrapped(comm, algorithm, bucket_bytes=100)
        train(comm, ddp, optimizer, range(steps))
        return final_weights(ddp)

    return run_ranks(2, body)


def assert_equal(ranks, others):
    for mine, theirs in zip(ranks, others, strict=True):
        assert torch.equal(mine, theirs)


# Combinators that change nothing -------------------------------------------------------------------------


@pytest.mark.algorithms("sample")
@pytest.mark.parametrize("algorithm", BY_STEPS, ids=repr)
def test_every_1_and_after_0_change_nothing(algorithm):
    expected = trained(algorithm)
    assert_equal(trained(every(1, algorithm)), expected)
    assert_equal(trained(after(0, Decentralized(), algorithm)), expected)


def test_a_combinator_passes_on_the_state_that_an_optimizer_shares():
    expected = trained(QADAM)
    assert torch.equal(*expected)
    assert_equal(trained(every(1, QADAM)), expected)
    assert_equal(trained(every(1, after(0, Decentralized(), QADAM))), expected)


def test_every_qadam_needs_an_optimizer_that_borrows_with_the_same_settings():
    def body(comm):
        model = make_model()
        for optimizer in (torch.optim.Adam(model.parameters()), optimizer_for(QAdam(7), model.parameters())):
            with pytest.raises(ArrayError, match="DistributedDataParallel"):
                DistributedDataParallel(model, optimizer, every(2, QADAM), comm=comm)

    run_ranks(1, body)


# Sequences -----------------------------------------------------------------------------------------------


@pytest.mark.covering(1)
@pytest.mark.parametrize("training_mode", [True, False])
@pytest.mark.parametrize(
    ("first", "then"),
    [
        (LowPrecisionOnePeer(), GradientAllReduce()),
        (Decentralized("one_peer_exponential"), QADAM),
        (every(2, GradientAllReduce()), GradientAllReduce(ErrorFeedback())),
        (every(2, QADAM), QADAM),
        (LowPrecisionOnePeer(), DiLoCo(2)),
        (ASYNC_ALGORITHMS[0], DiLoCo(2)),
        (ASYNC_ALGORITHMS[0], GradientAllReduce()),
    ],
    ids=repr,
)
def test_ranks_have_equal_weights_after_any_algorithm_and_can_save(first, then, training_mode, tmp_path):
    """In evaluation mode, exchanges begin with the backward pass, which needs the weights as they are."""

    def body(comm):
        algorithm = after(3, first, then)
        model, optimizer, ddp = wrapped(comm, algorithm, bucket_bytes=100)
        ddp.train(training_mode)
        train(comm, ddp, optimizer, range(7))
        ddp.state_dict()  # writes back what was exchanged
        assert_same_on_all_ranks(comm, model)
        checkpoints = Checkpoints(tmp_path, comm)
        checkpoints.save(7, model=ddp, optimizer=optimizer)
        checkpoints.close()
        train(comm, ddp, optimizer, range(7, 9))
        ddp.close()
        assert_same_on_all_ranks(comm, model)

    run_ranks(2, body)


# Stops ---------------------------------------------------------------------------------------------------


def with_buffers(algorithm):
    """A model with a BatchNorm, and its optimizer."""
    model = nn.Sequential(nn.BatchNorm1d(4), make_model())
    return model, optimizer_for(algorithm, model.parameters())


@pytest.mark.algorithms("sample")
@pytest.mark.parametrize("algorithm", ALGORITHMS, ids=repr)
def test_a_stopped_rank_trains_as_a_single_process_does_and_continues_from_there(algorithm):
    assert_trains_alone(algorithm)


@pytest.mark.parametrize("algorithm", [QADAM, DiLoCo(3)], ids=repr)
def test_nothing_that_a_stopped_rank_has_trained_is_lost(algorithm):
    """QAdam is past its warm-up; DiLoCo, between two outer steps."""
    assert_trains_alone(algorithm)


def assert_trains_alone(algorithm):
    def body(comm):
        model, optimizer = with_buffers(algorithm)
        ddp = DistributedDataParallel(
            model, optimizer, algorithm, comm=comm, bucket_bytes=100, find_unused_parameters=True
        )
        train(comm, ddp, optimizer, range(4))
        ddp.stop()
        alone, alone_optimizer = with_buffers(algorithm)
        alone.load_state_dict(copy.deepcopy(model.state_dict()))
        alone_optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
        for step in range(4, 6 + comm.rank):  # each rank at its own pace
            train_step(ddp, optimizer, batch(comm.rank, step))
            train_step(alone, alone_optimizer, batch(comm.rank, step))
            torch.testing.assert_close(weights(model), weights(alone), rtol=1e-5, atol=1e-6)
            torch.testing.assert_close(model[0].running_mean, alone[0].running_mean)
        before = comm.allgather_object(weights(model).tolist())
        ddp.resume()
        now = weights(model)
        if exchanges_weights(ddp.engine.phase):
            assert now.tolist() == before[comm.rank]
        else:
            torch.testing.assert_close(now, torch.tensor(before).mean(0))
            assert_same_on_all_ranks(comm, model)
        ddp.eval()
        with torch.no_grad():
            ddp(batch(0, 0))  # reads the weights
        assert torch.equal(weights(model), now)
        ddp.train()
        train(comm, ddp, optimizer, range(8, 12))
        if not exchanges_weights(ddp.engine.phase):
            comm.check_consistency(as_array(weights(model)))
        ddp.close()

    run_ranks(2, body)


def test_a_switch_of_a_stopped_model_averages_its_weights():
    def body(comm):
        model, optimizer, ddp = wrapped(comm, GradientAllReduce())
        train(comm, ddp, optimizer, range(2))
        ddp.stop()
        train(comm, ddp, optimizer, range(2, 4 + comm.rank))
        ddp.switch(DiLoCo(2))
        assert_same_on_all_ranks(comm, model)
        train(comm, ddp, optimizer, range(4))
        ddp.close()
        assert_same_on_all_ranks(comm, model)

    run_ranks(2, body)


# Other averages ------------------------------------------------------------------------------------------


def test_a_tuner_that_tries_error_feedback_loses_no_residual():
    """The sum of all averages is that of the exact ones, up to what the last one has lost."""

    def body(comm):
        tuner = Tuner(averages=[ErrorFeedback()], blocks=(), bucket_bytes=[100, 500], warmup_steps=0, trials=4)
        model, exact_model = make_model(), make_model()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
        ddp = DistributedDataParallel(
            model, optimizer, GradientAllReduce(), comm=comm, tuner=tuner, bucket_bytes=100
        )
        exact, actual, tried = torch.zeros(()), torch.zeros(()), set()
        for step in range(40):
            optimizer.zero_grad()
            (1000 * loss_of(ddp, batch(comm.rank, step))).backward()
            tried.add(type(ddp.algorithm.average))
            actual = actual + gradients(model)
            exact_model.zero_grad()
            for rank in range(comm.size):
                (1000 / comm.size * loss_of(exact_model, batch(rank, step))).backward()
            exact = exact + gradients(exact_model)
            optimizer.step()
        assert tried == {Exact, ErrorFeedback}
        ddp.replan(algorithm=GradientAllReduce())  # which has nothing left to make up for after one step
        optimizer.zero_grad()
        (0 * loss_of(ddp, batch(comm.rank, 0))).backward()
        actual = actual + gradients(model)
        ddp.close()
        return actual, exact

    for actual, exact in run_ranks(2, body):
        torch.testing.assert_close(actual, exact, rtol=1e-5, atol=0.05)
