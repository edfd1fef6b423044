"""How far a training step is: the one stage that says what is exchanged next."""

import warnings

import pytest
import torch
from support.torch_training import QADAM, batch, loss_of, wrapped

from bagua_comm import ByteGrad, Decentralized
from bagua_comm.testing import run_ranks
from bagua_torch import DistributedDataParallel
from bagua_torch.training.stage import Stage

IDLE, OPEN, AVERAGED, REOPENED, ANNOUNCED, CLOSED = Stage


class Driven:
    """A model, and the stage after each thing that happens."""

    def __init__(self, comm, algorithm=None):
        self.comm, (self.model, self.optimizer, self.ddp) = comm, wrapped(comm, algorithm)

    def forward(self):
        return loss_of(self.ddp, batch(self.comm.rank, 0))

    def after(self, *actions):
        stages, loss = [], None
        for action in actions:
            if action == "forward":
                loss = self.forward()
            elif action == "no_sync":
                with self.ddp.no_sync():
                    self.forward().backward()
            elif action == "backward":
                loss.backward()
            elif action == "evaluate":
                self.ddp.eval()(batch(0, 0))
                self.ddp.train()
            elif action == "load":
                self.ddp.load_state_dict(self.ddp.state_dict())
            else:
                getattr(self.optimizer if action == "step" else self.ddp, action)()
            stages.append(self.ddp._steps.stage)
        return stages


@pytest.mark.parametrize("algorithm", [ByteGrad(), Decentralized(), QADAM], ids=repr)
def test_a_step_is_opened_averaged_and_ended(algorithm):
    def body(comm):
        driven = Driven(comm, algorithm)
        assert driven.after(*["forward", "backward", "step"] * 2) == [OPEN, AVERAGED, IDLE] * 2
        assert driven.ddp.engine.step == 2
        assert driven.after("forward", "forward", "backward") == [OPEN, OPEN, AVERAGED]
        assert driven.after("close", "close") == [CLOSED, CLOSED]

    run_ranks(2, body)


def test_gradients_that_are_averaged_twice_before_a_step():
    def body(comm):
        driven = Driven(comm)
        assert driven.after(*["forward", "backward"] * 2, "step") == [OPEN, AVERAGED, REOPENED, AVERAGED, IDLE]
        # A forward pass before the optimizer steps belongs to the next step.
        assert driven.after("forward", "backward", "forward", "step") == [OPEN, AVERAGED, REOPENED, ANNOUNCED]
        assert driven.after("forward", "backward") == [OPEN, AVERAGED]
        assert driven.ddp.engine.step == 2
        driven.ddp.close()

    run_ranks(2, body)


def test_where_weights_are_exchanged_a_step_that_was_left_out_counts():
    def body(comm):
        driven = Driven(comm, Decentralized())
        assert driven.after(*["forward", "backward"] * 2, "evaluate") == [OPEN, *[AVERAGED] * 4]  # microbatches
        assert driven.ddp.engine.step == 0
        driven.optimizer.zero_grad()
        assert driven.after("forward", "backward") == [OPEN, AVERAGED]
        assert driven.ddp.engine.step == 1
        driven.optimizer.zero_grad()
        assert driven.after("evaluate") == [IDLE]  # weights are read
        assert driven.ddp.engine.step == 2
        driven.ddp.close()

    run_ranks(2, body)


def test_parameters_that_stay_on_their_rank_open_no_step():
    def body(comm):
        driven = Driven(comm)
        assert driven.after("no_sync", "evaluate") == [IDLE, IDLE]
        assert driven.after("forward", "no_sync", "backward") == [OPEN, OPEN, AVERAGED]
        driven.ddp.close()

    run_ranks(2, body)


def test_an_optimizer_ends_a_pass_that_reached_no_parameter():
    def body(comm):
        driven = Driven(comm)
        before = driven.ddp.engine.counter.calls
        assert driven.after("forward", "step") == [OPEN, IDLE]
        assert driven.ddp.engine.counter.calls == before + 1
        assert driven.after("step") == [IDLE]  # nothing is open: nothing is exchanged
        assert driven.ddp.engine.counter.calls == before + 1
        driven.ddp.close()

    with pytest.warns(UserWarning, match="in step 0, SGD steps on rank . after .* zeros are averaged"):
        run_ranks(2, body)


@pytest.mark.parametrize("algorithm", [ByteGrad(), Decentralized()], ids=repr)
@pytest.mark.parametrize("skips", [True, False])
def test_a_rank_that_leaves_out_a_backward_pass_is_named_when_its_next_step_ends(algorithm, skips):
    def body(comm):
        driven = Driven(comm, algorithm)
        driven.after("forward", "backward", "step")
        if comm.rank == 1 and skips:
            driven.forward()  # `continue` in place of backward() and step()
        elif comm.rank == 1:
            with torch.no_grad():
                driven.forward()
        driven.after("forward", "backward", "step")

    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        run_ranks(2, body)
    texts = [str(each.message) for each in found]
    assert len(texts) == skips
    assert not skips or "in step 1, rank 1 made more training forward passes than backward passes" in texts[0]


def test_without_optimizers_the_next_forward_pass_ends_a_step():
    def body(comm):
        ddp = DistributedDataParallel(torch.nn.Linear(2, 1), comm=comm)
        for step in range(5):
            loss = ddp(torch.ones(1, 2)).sum()
            if step == 3 and comm.rank == 1:
                loss = ddp(torch.ones(1, 2)).sum()
            loss.backward()
            assert len(ddp._steps.watch.outputs) <= 2  # those of this step alone
        ddp.close()

    with pytest.warns(UserWarning, match="in step 3, rank 1 made more training forward passes"):
        run_ranks(2, body)


def test_loading_begins_a_new_step_and_a_closed_wrapper_stays_closed():
    def body(comm):
        driven = Driven(comm)
        assert driven.after("forward", "load", "forward", "backward", "load") == [
            OPEN,
            IDLE,
            OPEN,
            AVERAGED,
            IDLE,
        ]
        assert driven.after("close") == [CLOSED]
        driven.ddp.load_state_dict(driven.ddp.state_dict())
        assert driven.ddp._steps.stage is CLOSED

    run_ranks(2, body)


def test_a_step_of_this_rank_alone_averages_nothing_though_a_forward_pass_came_before_the_last_step():
    def body(comm):
        driven = Driven(comm)
        assert driven.after("forward", "backward", "forward", "step")[-1] is ANNOUNCED
        calls = driven.ddp.engine.counter.calls
        driven.optimizer.zero_grad()
        assert driven.after("no_sync", "step") == [ANNOUNCED, ANNOUNCED]
        driven.optimizer.zero_grad()
        assert driven.after("step") == [ANNOUNCED]
        assert all(parameter.grad is None for parameter in driven.model.parameters())
        assert driven.ddp.engine.counter.calls == calls
        assert driven.after("forward", "backward", "step") == [OPEN, AVERAGED, IDLE]
        driven.ddp.close()

    with pytest.warns(UserWarning, match="more training forward passes than backward passes"):
        run_ranks(2, body)
