"""Optimizers stay the objects that a program holds, whatever brings their state; states keep their dtype."""

from collections import defaultdict, namedtuple
from itertools import chain
from typing import NamedTuple

import pytest
import torch
from support.torch_training import QADAM, assert_same_on_all_ranks, batch, make_model, optimizer_for, train_step
from torch import nn
from torch.optim import Optimizer

from bagua_comm import DiLoCo, GradientAllReduce, UnsupportedError, elastic
from bagua_comm.checkpoint.optimizers import load_in_place, with_dtype
from bagua_comm.testing import run_ranks
from bagua_comm.testing.fleets import ThreadJob, run_fleet
from bagua_torch import Checkpoints, DistributedDataParallel, broadcast_optimizer, fuse
from bagua_torch.tensors.broadcast import map_leaves
from bagua_torch.tensors.flats import lay_out_state

Pair = namedtuple("Pair", "fast slow")


class Float32Momentum(Optimizer):
    """SGD with momentum in float32, whatever the dtype of the parameters."""

    def __init__(self, params, lr=0.05):
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            for p in group["params"]:
                state = self.state[p]
                if not state:
                    state["momentum"] = torch.zeros_like(p, dtype=torch.float32)
                state["momentum"].mul_(0.9).add_(p.grad.float())
                p.sub_((group["lr"] * state["momentum"]).to(p.dtype))


class Lookahead(Optimizer):
    """An outer optimizer that shares the groups and the states of the inner one, like many."""

    def __init__(self, inner):
        self.inner = inner
        super().__init__(inner.param_groups, {})
        self.param_groups = inner.param_groups
        self.state = self.fast = inner.state

    def step(self):
        self.inner.step()

    def state_dict(self):
        return self.inner.state_dict()

    def load_state_dict(self, saved):
        super().load_state_dict(saved)
        self.inner.load_state_dict(saved)
        self.fast = self.inner.state


def stepped(optimizer, times, seed=0):
    def closure():
        generator = torch.Generator().manual_seed(seed)
        for p in (p for group in optimizer.param_groups for p in group["params"]):
            p.grad = torch.randn(p.shape, generator=generator).to(p.dtype) + 0.1 * p.detach()
            if sparse:
                p.grad = p.grad.to_sparse(1)
        return torch.ones(())

    sparse = isinstance(optimizer, torch.optim.SparseAdam)
    for _ in range(times):
        closure()
        optimizer.step(closure) if isinstance(optimizer, torch.optim.LBFGS) else optimizer.step()
    return optimizer


def parameters_of(rank, dtype=torch.float32):
    """Two matrices, one of which lies transposed in memory."""
    tensors = [torch.full((3, 2), rank + 1.0, dtype=dtype), torch.full((2, 3), rank + 2.0, dtype=dtype).t()]
    return [nn.Parameter(tensor) for tensor in tensors]


def groups_of(parameters):
    return [{"params": [p]} for p in parameters]


OPTIMIZERS = {
    "SGD": lambda ps: torch.optim.SGD(groups_of(ps), lr=0.1, momentum=0.9),
    "Adam": lambda ps: torch.optim.Adam(groups_of(ps), lr=0.1, amsgrad=True),
    "fused=True": lambda ps: torch.optim.AdamW(groups_of(ps), lr=0.1, fused=True),
    "tensor lr": lambda ps: torch.optim.Adam(groups_of(ps), lr=torch.tensor(0.1)),
    "NAdam": lambda ps: torch.optim.NAdam(groups_of(ps)),
    "Rprop": lambda ps: torch.optim.Rprop(groups_of(ps)),
    "SparseAdam": lambda ps: torch.optim.SparseAdam(ps),
    "LBFGS": lambda ps: torch.optim.LBFGS(ps, max_iter=2),
    "QAdam": lambda ps: optimizer_for(QADAM, groups_of(ps)),
    "fuse": lambda ps: fuse(torch.optim.Adam(groups_of(ps), lr=0.1)),
    "own": lambda ps: Float32Momentum(groups_of(ps)),
    "outer": lambda ps: Lookahead(torch.optim.Adam(groups_of(ps), lr=0.1)),
}


class Held(NamedTuple):
    """The objects of an optimizer that a program may hold."""

    groups: list
    each_group: list
    parameters: list
    state: object

    @classmethod
    def of(cls, optimizer):
        groups = optimizer.param_groups
        return cls(groups, list(groups), [group["params"] for group in groups], optimizer.state)

    def check(self, optimizer):
        assert optimizer.param_groups is self.groups
        assert optimizer.state is self.state
        for group, mine, parameters in zip(optimizer.param_groups, self.each_group, self.parameters, strict=True):
            assert group is mine
            assert group["params"] is parameters


def bits(optimizer):
    """The state dict with every tensor as its dtype, strides and values."""

    def leaf(value):
        if not isinstance(value, torch.Tensor):
            return value
        return str(value.dtype), tuple(value.stride()), value.double().tolist()

    return map_leaves(optimizer.state_dict(), leaf)


@pytest.mark.parametrize("make", OPTIMIZERS.values(), ids=OPTIMIZERS)
@pytest.mark.parametrize("dtype", [torch.float32, pytest.param(torch.bfloat16, marks=pytest.mark.slow)])
@pytest.mark.parametrize("had", [0, 3], ids=["new", "stepped"])
def test_a_broadcast_fills_the_optimizer_in_place_bit_for_bit(make, dtype, had):
    def body(comm):
        optimizer = stepped(make(parameters_of(comm.rank, dtype)), 2 if comm.rank == 1 else had, seed=comm.rank)
        if comm.rank == 1:
            optimizer.param_groups[0]["added"] = ("by", ["rank", 1])
        held = Held.of(optimizer)
        mine = bits(optimizer)
        broadcast_optimizer(comm, optimizer, root=1)
        held.check(optimizer)
        got = bits(optimizer)
        with torch.no_grad():
            for p, value in zip(chain(*held.parameters), parameters_of(1, dtype), strict=True):
                p.copy_(value)
        stepped(optimizer, 2)
        held.check(optimizer)
        return mine, got, bits(optimizer)

    (mine, got, later), (of_root, *rest) = run_ranks(2, body)
    assert mine != of_root
    assert (got, later) == tuple(rest)
    assert got == of_root


def test_tensors_that_the_root_does_not_share_are_shared_no_longer():
    """And the other way round: here one learning rate was for both groups, there each has its own."""

    def body(comm):
        optimizer = OPTIMIZERS["tensor lr"](parameters_of(comm.rank))
        if comm.rank == 0:
            for number, group in enumerate(optimizer.param_groups):
                group["lr"] = torch.tensor(1.0 + number)
        broadcast_optimizer(comm, optimizer)
        optimizer.param_groups[0]["lr"].fill_(9)
        return [float(group["lr"]) for group in optimizer.param_groups]

    assert run_ranks(2, body) == [[9.0, 2.0]] * 2


def test_states_in_dicts_lists_and_named_tuples_come_over():
    class Nested(Float32Momentum):
        def load_state_dict(self, saved):
            for number, p in enumerate(p for group in self.param_groups for p in group["params"]):
                self.state[p] = saved["state"].get(number, {})

    def body(comm):
        optimizer = Nested(parameters_of(comm.rank))
        if comm.rank == 0:
            both = Pair(torch.ones(2), torch.zeros(2))
            optimizer.state[optimizer.param_groups[0]["params"][0]] = {"a": [{"b": both}, (1, None)], 3: "c"}
        broadcast_optimizer(comm, optimizer)
        found = optimizer.state[optimizer.param_groups[0]["params"][0]]
        assert type(found["a"][0]["b"]) is Pair
        return map_leaves(found, lambda leaf: leaf.tolist() if isinstance(leaf, torch.Tensor) else leaf)

    one, other = run_ranks(2, body)
    assert one == other == {"a": [{"b": Pair([1.0] * 2, [0.0] * 2)}, (1, None)], 3: "c"}


@pytest.mark.parametrize("fails_on", [0, 1])
def test_an_optimizer_that_does_not_return_or_load_its_state_is_refused_on_all_ranks(fails_on):
    def body(comm):
        optimizer = stepped(OPTIMIZERS["SGD"](parameters_of(comm.rank)), comm.rank)

        def fail(*_):
            if comm.rank == fails_on:
                raise KeyError("no such thing")

        optimizer.register_state_dict_pre_hook(fail)
        optimizer.register_load_state_dict_post_hook(fail)
        held = Held.of(optimizer)
        what = "return its state" if fails_on == 0 else "load the state of rank 0"
        with pytest.raises(
            UnsupportedError, match=f"SGD of rank {fails_on} does not {what}: KeyError: 'no such thing'"
        ):
            broadcast_optimizer(comm, optimizer)
        held.check(optimizer)

    run_ranks(2, body)


def test_a_sparse_state_is_refused_on_all_ranks():
    def body(comm):
        optimizer = OPTIMIZERS["SGD"](parameters_of(comm.rank))
        optimizer.state[optimizer.param_groups[0]["params"][0]]["seen"] = torch.eye(3).to_sparse()
        with pytest.raises(UnsupportedError, match=r"of rank 0 .*is torch.sparse_coo, expected torch.strided"):
            broadcast_optimizer(comm, optimizer)

    run_ranks(2, body)


def test_an_outer_optimizer_keeps_sharing_groups_and_states_with_its_inner_one():
    def body(comm):
        outer = stepped(OPTIMIZERS["outer"](parameters_of(comm.rank)), comm.rank + 1)
        broadcast_optimizer(comm, outer)
        assert outer.param_groups is outer.inner.param_groups
        assert outer.state is outer.fast is outer.inner.state
        assert isinstance(outer.state, defaultdict)

    run_ranks(2, body)


def test_a_wrapper_whose_groups_are_a_property_is_filled():
    """Like Accelerate's AcceleratedOptimizer."""

    class Wrapper(Optimizer):
        def __init__(self, optimizer):
            self.optimizer = optimizer

        param_groups = property(
            lambda self: self.optimizer.param_groups,
            lambda self, new: setattr(self.optimizer, "param_groups", new),
        )
        state = property(
            lambda self: self.optimizer.state, lambda self, new: setattr(self.optimizer, "state", new)
        )

        def state_dict(self):
            return self.optimizer.state_dict()

        def load_state_dict(self, saved):
            self.optimizer.load_state_dict(saved)

    def body(comm):
        inner = stepped(OPTIMIZERS["Adam"](parameters_of(comm.rank)), comm.rank, seed=comm.rank)
        held = Held.of(inner)
        broadcast_optimizer(comm, Wrapper(inner), root=1)
        held.check(inner)
        return bits(inner)

    one, other = run_ranks(2, body)
    assert one == other


def test_loading_in_place_is_loading():
    """Beside PyTorch's own: the same groups and states, casts too."""
    for name, make in OPTIMIZERS.items():
        saved = stepped(make(parameters_of(0)), 2).state_dict()
        mine, theirs = (stepped(make(parameters_of(0, torch.bfloat16)), 1) for _ in range(2))
        held = Held.of(mine)
        load_in_place(mine, saved)
        theirs.load_state_dict(saved)
        held.check(mine)
        assert bits(mine) == bits(theirs), name


# Callers --------------------------------------------------------------------------------------------------


def test_a_learning_rate_set_in_a_group_held_since_before_wrapping_takes_effect():
    """A warm-up by hand, and a scheduler; through fuse, switch and replan."""

    def body(comm):
        model = make_model(comm.rank)
        plain = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        group = plain.param_groups[0]
        optimizer = fuse(plain)
        scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
        ddp = DistributedDataParallel(model, optimizer, DiLoCo(local_steps=2), comm=comm)
        for step in range(8):
            if step == 4:
                ddp.switch(GradientAllReduce())
            if step == 6:
                ddp.replan(bucket_bytes=64)
            assert optimizer.param_groups[0] is group
            if step % 2:
                group["lr"] = 0.02 * (step + 1)
            train_step(ddp, optimizer, batch(comm.rank, step))
            scheduler.step()
        assert_same_on_all_ranks(comm, model)
        ddp.close()

    run_ranks(2, body)


def test_an_optimizer_resumed_on_rank_0_keeps_float32_states_for_bfloat16_weights_on_all_ranks():
    def body(comm):
        model = make_model().bfloat16()
        optimizer = Float32Momentum(model.parameters())
        if comm.rank == 0:
            stepped(optimizer, 3)
        ddp = DistributedDataParallel(model, optimizer, comm=comm)
        dtypes = {entry["momentum"].dtype for entry in optimizer.state.values()}
        for step in range(3):
            train_step(ddp, optimizer, batch(comm.rank, step).bfloat16())
        assert_same_on_all_ranks(comm, model)
        ddp.close()
        return dtypes

    assert run_ranks(2, body) == [{torch.float32}] * 2


def test_a_checkpoint_loads_into_the_same_groups_and_gives_states_the_dtype_that_they_had(tmp_path):
    def body(comm):
        def fresh(dtype=torch.bfloat16):
            return Float32Momentum(make_model().to(dtype).parameters())

        saved, loaded, converted = stepped(fresh(), 3), fresh(), fresh(torch.float16)
        held = Held.of(loaded)
        with Checkpoints(tmp_path, comm) as checkpoints:
            checkpoints.save(1, optimizer=saved, wait=True)
            checkpoints.load(optimizer=loaded)
            checkpoints.load(optimizer=converted)
        held.check(loaded)
        assert bits(loaded) == bits(saved)
        # Parameters of another dtype: as PyTorch's own load_state_dict.
        assert {entry["momentum"].dtype for entry in converted.state.values()} == {torch.float16}

    run_ranks(2, body)


def test_states_of_another_dtype_lie_as_their_parameter_whatever_the_file_has():
    parameter = nn.Parameter(torch.ones(2, 3, 4, 4, dtype=torch.bfloat16).to(memory_format=torch.channels_last))
    optimizer = torch.optim.SGD([parameter], lr=0.1, momentum=0.9)
    optimizer.register_load_state_dict_post_hook(lay_out_state)
    momentum = torch.arange(96.0).reshape(2, 3, 4, 4) / 7
    saved = {**optimizer.state_dict(), "state": {0: {"momentum_buffer": momentum}}}
    load_in_place(optimizer, saved, with_dtype)
    loaded = optimizer.state[parameter]["momentum_buffer"]
    assert torch.equal(loaded, momentum)
    assert loaded.stride() == parameter.stride()


def test_recovery_leaves_groups_and_dtypes_as_they_were():
    job = ThreadJob(3)
    due = [1]

    def body(fleet):
        model = make_model().bfloat16()
        optimizer = Float32Momentum(model.parameters())
        group = optimizer.param_groups[0]
        state = elastic.State(model=model, optimizer=optimizer, step=0)

        @elastic.run(state, fleet=fleet)
        def train(comm):
            ddp = DistributedDataParallel(model, optimizer, comm=comm)
            while state.step < 5:
                assert optimizer.param_groups[0] is group
                group["lr"] = 0.1 / (1 + state.step)
                if state.step == 3 and fleet.me in due:
                    due.remove(fleet.me)
                    job.kill(fleet.me)
                train_step(ddp, optimizer, batch(comm.rank, state.step).bfloat16())
                state.step += 1
                state.commit()
            assert_same_on_all_ranks(comm, model)
            ddp.close()
            return {str(entry["momentum"].dtype) for entry in optimizer.state.values()}

        return train

    outcomes = run_fleet(job, body)
    assert [outcome.get("result") for outcome in outcomes].count({"torch.float32"}) == 2, outcomes
