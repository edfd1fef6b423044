"""Parameters that are frozen when a module is wrapped, and unfrozen later."""

import io

import pytest
import torch
from support.torch_training import ALGORITHMS, ASYNC_ALGORITHMS, QADAM, batch, filled, optimizer_for, sgd, weights
from torch import nn

from bagua_comm import (
    ArrayError,
    AsyncModelAverage,
    ByteGrad,
    CommMismatch,
    Decentralized,
    DiLoCo,
    ErrorFeedback,
    GradientAllReduce,
    Quantized,
    Reproducible,
    UnsupportedError,
    after,
    every,
)
from bagua_comm.testing import run_ranks
from bagua_torch import DistributedDataParallel

EXACT = GradientAllReduce()
FEEDBACK = GradientAllReduce(ErrorFeedback(Quantized()))


def make_model(seed=0):
    """A backbone that is frozen, and a head."""
    model = filled(nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 1)), seed)
    model[0].requires_grad_(False)
    return model


def wrapped(comm, algorithm=EXACT, *, seed=0, **options):
    model = make_model(seed)
    optimizer = optimizer_for(algorithm, model[2].parameters())
    return model, optimizer, DistributedDataParallel(model, optimizer, algorithm, comm=comm, **options)


def unfreeze(model, optimizer):
    """Like Lightning's BackboneFinetuning."""
    model[0].requires_grad_(True)
    optimizer.add_param_group({"params": list(model[0].parameters()), "lr": 0.02})


def step(model, optimizer, *batches):
    optimizer.zero_grad()
    (sum(model(x).square().mean() for x in batches) / len(batches)).backward()
    optimizer.step()


def alone(begin, end, ranks=2):
    """The weights of one model after the batches of all ranks."""
    model = make_model()
    optimizer = sgd(model[2].parameters())
    for number in range(end):
        if number == begin:
            unfreeze(model, optimizer)
        step(model, optimizer, *(batch(rank, number) for rank in range(ranks)))
    return weights(model)


@pytest.mark.covering(1)
@pytest.mark.parametrize("in_buckets", [True, False])
@pytest.mark.parametrize(
    ("algorithm", "tolerance"),
    [
        (EXACT, 1e-6),
        (after(4, EXACT, every(1, EXACT)), 1e-6),
        (ByteGrad(), 0.005),
        (FEEDBACK, 0.005),
        (Decentralized(), 0.005),
    ],
    ids=repr,
)
def test_a_layer_that_is_unfrozen_trains_as_in_one_process(algorithm, tolerance, in_buckets):
    def body(comm):
        model, optimizer, ddp = wrapped(
            comm, algorithm, seed=comm.rank, bucket_bytes=16, gradient_as_bucket_view=in_buckets
        )
        for number in range(6):
            if number == 3:
                unfreeze(model, optimizer)
            step(ddp, optimizer, batch(comm.rank, number))
        ddp.average_weights()
        ddp.close()
        return weights(model)

    first, second = run_ranks(2, body, timeout_s=5)
    assert torch.equal(first, second)
    torch.testing.assert_close(first, alone(3, 6), rtol=0, atol=tolerance)
    assert not torch.allclose(first, alone(4, 6), rtol=0, atol=tolerance)  # it did begin in that step


def test_the_state_of_other_parameters_stays():
    """Anchors, momenta and steps since the last outer step; the new parameters step in the same rounds."""

    def body(comm):
        model, optimizer, ddp = wrapped(comm, DiLoCo(local_steps=3), bucket_bytes=16)
        for number in range(4):
            step(ddp, optimizer, batch(comm.rank, number))
        before = ddp.engine.state_dict()["tensors"]
        unfreeze(model, optimizer)
        ddp(batch(comm.rank, 4)).square().mean().backward()
        optimizer.step()
        ddp.engine.settle()
        kept = ddp.engine.state_dict()["tensors"]
        for name, pieces in before.items():
            assert pieces["anchor"].tolist() == kept[name]["anchor"].tolist()
            assert pieces["momentum"].tolist() == kept[name]["momentum"].tolist()
        steps = {name: pieces["steps"] for name, pieces in kept.items()}
        ddp.close()
        return steps

    names = ["2.bias", "2.weight", "0.bias", "0.weight"]
    assert run_ranks(2, body, timeout_s=5) == [dict.fromkeys(names, 2)] * 2


@pytest.mark.algorithms("sample")
@pytest.mark.covering(1)
@pytest.mark.parametrize("algorithm", [a for a in ALGORITHMS if a is not QADAM and a not in ASYNC_ALGORITHMS])
def test_no_algorithm_hangs_and_all_move_to_other_buckets_afterwards(algorithm):
    def body(comm):
        model, optimizer, ddp = wrapped(comm, algorithm, bucket_bytes=16)
        for number in range(8):
            if number == 2:
                model[0].bias.requires_grad_(True)
                optimizer.add_param_group({"params": [model[0].bias]})
            if number == 3:
                model[0].weight.requires_grad_(True)
                optimizer.add_param_group({"params": [model[0].weight]})
            step(ddp, optimizer, batch(comm.rank, number))
        ddp.switch(EXACT)
        ddp.replan(bucket_bytes=10**6)
        step(ddp, optimizer, batch(comm.rank, 8))
        ddp.close()
        return weights(model)

    first, second = run_ranks(2, body, timeout_s=5)
    assert torch.equal(first, second)
    assert first.isfinite().all()


@pytest.mark.covering(1)
@pytest.mark.parametrize("algorithm", [EXACT, every(2, Decentralized()), DiLoCo(local_steps=2)], ids=repr)
def test_a_rank_that_has_unfrozen_nothing_is_an_error_on_all_ranks(algorithm):
    def body(comm):
        model, optimizer, ddp = wrapped(comm, algorithm)

        def train():
            for number in range(6):
                if number == 3 and comm.rank == 1:
                    unfreeze(model, optimizer)
                step(ddp, optimizer, batch(comm.rank, number))

        with pytest.raises(CommMismatch) as caught:
            train()
        return str(caught.value)

    quiet, loud = run_ranks(2, body, timeout_s=60)  # no rank waits that long
    assert "allgather_object" in quiet
    assert "rank 1 has unfrozen '0.weight' (4, 4) of torch.float32" in loud
    assert "between the same two steps" in loud


def test_ranks_that_unfreeze_different_parameters():
    def body(comm):
        model, optimizer, ddp = wrapped(comm)
        [model[0].weight, model[0].bias][comm.rank].requires_grad_(True)
        optimizer.add_param_group({"params": list(model[0].parameters())})
        with pytest.raises(
            CommMismatch, match=rf"rank {comm.rank} has unfrozen .*; unfreeze the same parameters"
        ):
            ddp(batch(comm.rank, 0))
        model[0].requires_grad_(False)
        step(ddp, optimizer, batch(comm.rank, 0))  # goes on
        ddp.close()

    run_ranks(2, body, timeout_s=5)


def test_an_optimizer_that_does_not_step_it_on_one_rank_is_an_error_on_all():
    def body(comm):
        model, optimizer, ddp = wrapped(comm)
        model[0].requires_grad_(True)
        if comm.rank == 0:
            optimizer.add_param_group({"params": list(model[0].parameters())})
        with pytest.raises(ArrayError, match=r"no optimizer given steps '0.weight', '0.bias'"):
            ddp(batch(comm.rank, 0))
        if comm.rank == 1:
            optimizer.add_param_group({"params": list(model[0].parameters())})
        step(ddp, optimizer, batch(comm.rank, 0))
        ddp.close()
        return weights(model)

    first, second = run_ranks(2, body, timeout_s=5)
    assert torch.equal(first, second)


def refused(ddp, model, optimizer, comm, error, message):
    unfreeze(model, optimizer)
    with pytest.raises(error, match=message):
        step(ddp, optimizer, batch(comm.rank, 1))


@pytest.mark.parametrize("algorithm", [QADAM, AsyncModelAverage(warmup_steps=9)], ids=repr)
def test_algorithms_that_cannot_take_more_parameters_say_so(algorithm):
    def body(comm):
        model, optimizer, ddp = wrapped(comm, algorithm)
        step(ddp, optimizer, batch(comm.rank, 0))
        message = (
            "QAdam.* has averaged the momentum" if algorithm is QADAM else "AsyncModelAverage.* freeze it after"
        )
        refused(ddp, model, optimizer, comm, UnsupportedError, message)
        model[0].requires_grad_(False)
        ddp.close()

    run_ranks(2, body, timeout_s=5)


@pytest.mark.parametrize("where", ["join", "stop", "open", "held", "evaluation"])
def test_unfreezing_where_ranks_cannot_begin_together_is_refused(where):
    algorithm = {"open": Decentralized(), "held": GradientAllReduce(Reproducible(addends=4))}.get(where, EXACT)

    def body(comm):
        model, optimizer, ddp = wrapped(comm, algorithm)
        if where == "join":
            with ddp.join():
                refused(ddp, model, optimizer, comm, UnsupportedError, "in `join`")
                model[0].requires_grad_(False)
        elif where == "stop":
            ddp.stop()
            refused(ddp, model, optimizer, comm, UnsupportedError, "between `stop` and `resume`")
        elif where == "open":
            ddp(batch(comm.rank, 0))
            refused(ddp, model, optimizer, comm, ArrayError, "was unfrozen within a step")
        elif where == "held":
            for number in ddp.microbatches():
                ddp(batch(comm.rank, number)).square().mean().backward()
                break
            ddp.engine.hold()
            refused(ddp, model, optimizer, comm, ArrayError, "was unfrozen within a step")
        else:
            ddp.eval()
            refused(ddp, model, optimizer, comm, ArrayError, "in evaluation mode")

    run_ranks(2, body, timeout_s=5)


@pytest.mark.parametrize("how", ["find_unused_parameters", "static_graph"])
def test_unused_parameters_are_agreed_on_with_the_new_ones(how):
    def body(comm):
        model, optimizer, ddp = wrapped(comm, **{how: True})
        for number in range(6):
            if number == 3:
                unfreeze(model, optimizer)
            step(ddp, optimizer, batch(comm.rank, number))
        ddp.close()
        return weights(model)

    for actual in run_ranks(2, body, timeout_s=5):
        torch.testing.assert_close(actual, alone(3, 6), rtol=0, atol=1e-6)


@pytest.mark.parametrize("algorithm", [FEEDBACK, DiLoCo(local_steps=3)], ids=repr)
def test_a_checkpoint_continues_bit_for_bit_where_the_layer_is_frozen_again_on_wrapping(algorithm):
    """The algorithm's state of the layer is kept until it is unfrozen."""

    def body(comm):
        model, optimizer, ddp = wrapped(comm, algorithm)
        for number in range(4):
            if number == 2:
                unfreeze(model, optimizer)
            step(ddp, optimizer, batch(comm.rank, number))
        saved = io.BytesIO()
        torch.save([ddp.state_dict(), optimizer.state_dict()], saved)
        step(ddp, optimizer, batch(comm.rank, 4))
        ddp.close()
        saved.seek(0)
        state, of_optimizer = torch.load(saved, weights_only=True)
        again, optimizer, ddp = wrapped(comm, algorithm)
        ddp.load_state_dict(state)
        unfreeze(again, optimizer)
        optimizer.load_state_dict(of_optimizer)
        step(ddp, optimizer, batch(comm.rank, 4))
        ddp.close()
        return weights(model), weights(again)

    for straight, resumed in run_ranks(2, body, timeout_s=5):
        assert torch.equal(straight, resumed)


def test_unfrozen_parameters_are_reset_in_the_same_step_as_the_others():
    def body(comm):
        algorithm = GradientAllReduce(ErrorFeedback(Quantized(), reset_every=4))
        model, optimizer, ddp = wrapped(comm, algorithm)
        found = []
        for number in range(6):
            if number == 3:
                unfreeze(model, optimizer)
            step(ddp, optimizer, batch(comm.rank, number))
            found.append([state.average.state.means for state in ddp.engine.states])
        return found

    assert run_ranks(2, body) == [[[1], [2], [3], [4, 4], [1, 1], [2, 2]]] * 2
