"""Copies of the wrapper by `copy.deepcopy` and `torch.save`: alone for evaluation, together for training."""

import copy
import io

import pytest
import torch
from support.torch_training import batch, loss_of, make_model
from torch import nn
from torch.optim.swa_utils import AveragedModel

from bagua_comm import ErrorFeedback, GradientAllReduce, MinMaxUInt8, Quantized, Tuner, UnsupportedError
from bagua_comm.testing import run_ranks
from bagua_torch import DistributedDataParallel, connect
from bagua_torch.errors import MisuseError

SETTINGS = {
    "algorithm": GradientAllReduce(Quantized(MinMaxUInt8(32))),
    "bucket_bytes": 100,
    "broadcast_buffers": False,
    "find_unused_parameters": True,
    "gradient_as_bucket_view": False,
}


def trained(ddp, steps, rank=0):
    """The wrapper after steps of a new optimizer."""
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
    for step in steps:
        optimizer.zero_grad()
        loss_of(ddp, batch(rank, step)).backward()
        optimizer.step()
    return ddp


def assert_same(one, other):
    assert one.state_dict().keys() == other.state_dict().keys()
    for name, value in one.state_dict().items():
        assert torch.equal(value, other.state_dict()[name]), name


def test_a_copy_trains_on_as_the_wrapper_does():
    def body(comm):
        ddp = trained(DistributedDataParallel(make_model(), comm=comm, **SETTINGS), range(3), comm.rank)
        copied = copy.deepcopy(ddp)
        copied.eval()(batch(0, 0)[0])
        copied.train()
        assert isinstance(copied, nn.parallel.DistributedDataParallel)
        for each in (ddp, copied):
            with each.no_sync():
                loss_of(each, batch(comm.rank, 3)).backward()
            loss_of(each, batch(comm.rank, 4)).backward()
            trained(each, range(5, 7), comm.rank)
        assert_same(ddp, copied)
        assert {name: getattr(copied, name) for name in SETTINGS} == SETTINGS
        again = copy.deepcopy(copied)
        copied.load_state_dict(ddp.module.state_dict(), strict=False)
        assert_same(trained(ddp, range(2), comm.rank), trained(again, range(2), comm.rank))
        for each in (ddp, again):
            each.weight = comm.rank + 1
            trained(each, [2], comm.rank)
        assert_same(ddp, again)
        again.switch(feedback := GradientAllReduce(ErrorFeedback(Quantized(MinMaxUInt8()))))
        trained(again, [3], comm.rank)
        assert again.algorithm == feedback
        assert "_extra_state" in again.state_dict()
        with pytest.raises(UnsupportedError, match="lack the state of"):
            copy.deepcopy(again)
        return [p.detach().numpy() for p in again.parameters()]

    one, other = run_ranks(2, body)
    assert all(map(lambda a, b: (a == b).all(), one, other))


def test_a_rank_copies_and_evaluates_alone():
    def body(comm):
        ddp = DistributedDataParallel(make_model(), comm=comm)
        if comm.rank == 1:
            averaged = AveragedModel(ddp)
            averaged.update_parameters(ddp)
            expected = ddp.module(batch(0, 0)[0])
            assert torch.equal(averaged.eval()(batch(0, 0)[0]), expected)
            with torch.no_grad():
                assert torch.equal(copy.deepcopy(ddp)(batch(0, 0)[0]), expected)
            copied = copy.deepcopy(ddp).eval()
            assert copied.no_sync is not None  # to look is not to call
            with pytest.raises(MisuseError, match="evaluation mode, before it was trained"):
                loss_of(copied, batch(0, 0)).backward()
            frozen = copied.train().requires_grad_(False)
            assert torch.equal(frozen(batch(0, 0)[0]), expected)
            assert_same(copy.deepcopy(ddp), ddp)
        trained(ddp, range(1), comm.rank)

    run_ranks(2, body)


def test_a_saved_wrapper_is_loaded_and_trained():
    with connect(alone=True):
        ddp = trained(DistributedDataParallel(make_model(), find_unused_parameters=True), range(1))
        file = io.BytesIO()
        torch.save(ddp.eval(), file)
        file.seek(0)
        loaded = torch.load(file, weights_only=False)
        assert not loaded.training
        assert_same(trained(ddp.train(), range(1, 3)), trained(loaded.train(), range(1, 3)))
        assert loaded.find_unused_parameters


def test_what_a_copy_would_lack_is_refused():
    def body(comm):
        feedback = GradientAllReduce(ErrorFeedback(Quantized(MinMaxUInt8())))
        for arguments in ({"algorithm": feedback}, {"tuner": Tuner()}):
            ddp = trained(DistributedDataParallel(make_model(), comm=comm, **arguments), range(2))
            with pytest.raises(UnsupportedError, match=r"lack the state of .* copy its \.module"):
                copy.deepcopy(ddp)
        with pytest.raises(UnsupportedError, match="cannot be pickled"):
            torch.save(DistributedDataParallel(make_model(), comm=comm), io.BytesIO())

    run_ranks(1, body)
