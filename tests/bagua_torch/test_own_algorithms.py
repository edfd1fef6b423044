"""Algorithms of users, with the required members alone, train a model with PyTorch."""

import pytest
import torch
from support.own_algorithms import Beside, Half, Plain, RandomPeer, Unhashable
from support.torch_training import assert_same_on_all_ranks, train, weights, wrapped

from bagua_comm import GradientAllReduce, after, every
from bagua_comm.testing import run_ranks


def trained(algorithm, steps=4):
    """The weights of two ranks after some steps."""

    def body(comm):
        model, optimizer, ddp = wrapped(comm, algorithm)
        train(comm, ddp, optimizer, range(steps))
        ddp.close()
        if algorithm == Plain():
            assert_same_on_all_ranks(comm, model)
        return weights(model)

    return run_ranks(2, body)


@pytest.mark.parametrize("algorithm", [Plain(), Unhashable(), after(2, GradientAllReduce(), Plain())], ids=repr)
def test_the_mean_of_the_gradients_is_ours(algorithm):
    for own, ours in zip(trained(algorithm), trained(GradientAllReduce()), strict=True):
        assert torch.equal(own, ours)


@pytest.mark.parametrize("algorithm", [RandomPeer(), every(2, RandomPeer()), Beside(), Half()], ids=repr)
def test_others_train_too(algorithm):
    first, second = trained(algorithm)
    alone, _ = trained(every(1000, RandomPeer()))
    assert first.isfinite().all()
    assert second.isfinite().all()
    assert not torch.equal(first, alone)
