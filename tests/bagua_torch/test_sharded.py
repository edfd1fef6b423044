"""PyTorch's ZeroRedundancyOptimizer: where it fits, and what is said where it does not."""

import textwrap
import warnings

import pytest
import torch
from support.launch import TESTS, torchrun
from support.torch_training import assert_same_on_all_ranks, batch, final_weights, make_model, train_step, weights

from bagua_comm import DiLoCo, GradientAllReduce, Own, UnsupportedError
from bagua_comm.elastic import State
from bagua_comm.testing import run_ranks
from bagua_torch import Checkpoints, DistributedDataParallel

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # PyTorch's own file uses what PyTorch deprecates
    from torch.distributed.optim import ZeroRedundancyOptimizer


def sharded(model, lr=0.1, **settings):
    return ZeroRedundancyOptimizer(model.parameters(), torch.optim.Adam, lr=lr, **settings)


def test_a_sharded_optimizer_gets_the_settings_of_rank_0_and_keeps_its_states(gloo):
    def body(comm):
        model = make_model(comm.rank)
        optimizer, plain = sharded(model, lr=0.1 * (1 + comm.rank)), make_model(comm.rank)
        group = optimizer.param_groups[0]
        ddp = DistributedDataParallel(model, optimizer, comm=comm)
        assert optimizer.param_groups[0] is group
        assert group["lr"] == 0.1
        beside = torch.optim.Adam(plain.parameters(), lr=0.1)
        their_ddp = DistributedDataParallel(plain, beside, comm=comm)
        for step in range(3):
            train_step(ddp, optimizer, batch(comm.rank, step))
            train_step(their_ddp, beside, batch(comm.rank, step))
            for one in (group, beside.param_groups[0]):
                one["lr"] *= 0.5
        assert torch.equal(weights(model), weights(plain))
        DistributedDataParallel(model, optimizer, comm=comm).close()  # after steps
        assert len(optimizer.optim.state) == 6
        their_ddp.close()

    run_ranks(2, body)


def test_its_state_goes_through_a_checkpoint_by_rank(gloo, tmp_path):
    def body(comm):
        def trained(steps, at=0):
            model = make_model()
            optimizer = sharded(model)
            ddp = DistributedDataParallel(model, optimizer, comm=comm)
            with Checkpoints(tmp_path, comm) as checkpoints:
                if at:
                    checkpoints.load(at, model=ddp, optimizer=optimizer)
                for step in range(at, steps):
                    train_step(ddp, optimizer, batch(comm.rank, step))
                    optimizer.param_groups[0]["lr"] *= 0.9
                    if step == 1 and not at:
                        checkpoints.save(2, model=ddp, optimizer=optimizer, wait=True)
            return final_weights(ddp)

        assert torch.equal(trained(4), trained(4, at=2))

    run_ranks(2, body)


def test_where_it_does_not_fit_it_is_refused_on_all_ranks(gloo):
    def body(comm):
        model = make_model()
        with pytest.raises(UnsupportedError, match=r"DiLoCo.* lets the weights of ranks differ, but a Zero"):
            DistributedDataParallel(model, sharded(model), DiLoCo(), comm=comm)
        with pytest.raises(UnsupportedError, match=r"has overlap_with_ddp=True, .*construct it without"):
            DistributedDataParallel(model, sharded(model, overlap_with_ddp=True), comm=comm)
        optimizer = sharded(model)
        ddp = DistributedDataParallel(model, optimizer, comm=comm)
        with pytest.raises(UnsupportedError, match="join: a ZeroRedundancyOptimizer needs all ranks"), ddp.join():
            pass
        with pytest.raises(UnsupportedError, match="lets the weights of ranks differ"):
            ddp.switch(DiLoCo())
        with ddp.join(throw_on_early_termination=True):
            train_step(ddp, optimizer, batch(comm.rank, 0))
        ddp.switch(GradientAllReduce())
        assert_same_on_all_ranks(comm, model)
        ddp.close()

    run_ranks(2, body)


@pytest.mark.parametrize("given", [lambda optimizer: optimizer, lambda optimizer: Own(optimizer, "drop")])
def test_an_elastic_state_refuses_it_by_name(gloo, given):
    optimizer = sharded(make_model())
    with pytest.raises(UnsupportedError, match=r"optimizer is a ZeroRedundancyOptimizer.* a plain optimizer"):
        State(step=0, optimizer=given(optimizer))


@pytest.mark.slow
def test_over_gloo_each_rank_keeps_its_share_and_weights_are_those_of_a_plain_optimizer(tmp_path):
    path = tmp_path / "script.py"
    path.write_text(
        textwrap.dedent(
            f"""
            import sys
            sys.path.insert(0, {str(TESTS)!r})
            import torch
            from support.torch_training import assert_same_on_all_ranks, batch, make_model, train_step, weights
            from torch.distributed.optim import ZeroRedundancyOptimizer
            import bagua_torch

            with bagua_torch.connect(timeout_s=60) as comm:
                def trained(make, steps, load=False, save=False):
                    model = make_model(comm.rank)
                    optimizer = make(model.parameters())
                    ddp = bagua_torch.DistributedDataParallel(model, optimizer, comm=comm)
                    with bagua_torch.Checkpoints({str(tmp_path / "checkpoints")!r}, comm) as checkpoints:
                        if load:
                            checkpoints.load(model=ddp, optimizer=optimizer)
                        for step in steps:
                            train_step(ddp, optimizer, batch(comm.rank, step))
                        if save:
                            checkpoints.save(3, model=ddp, optimizer=optimizer, wait=True)
                    assert_same_on_all_ranks(comm, model)
                    ddp.close()
                    return weights(model), optimizer

                def sharded(parameters):
                    return ZeroRedundancyOptimizer(parameters, torch.optim.Adam, lr=0.05)

                expected, _ = trained(lambda p: torch.optim.Adam(p, lr=0.05), range(6))
                found, optimizer = trained(sharded, range(6))
                assert torch.equal(found, expected)
                assert 0 < len(optimizer.optim.state) < 6
                trained(sharded, range(3), save=True)
                found, _ = trained(sharded, range(3, 6), load=True)
                assert torch.equal(found, expected)
                print("done", flush=True)
            """
        )
    )
    result = torchrun(2, path)
    assert result.returncode == 0, result.stdout + result.stderr
    assert result.stdout.count("done") == 2
