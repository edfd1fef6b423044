"""Exchanges of sharded models on a lane; the cases that whole models run are in support/fsdp_training.py."""

import threading
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from torch import nn

from bagua_comm import ArrayError, ErrorFeedback, Exact, Quantized, UnsupportedError
from bagua_comm.testing import run_ranks
from bagua_torch.fsdp.collectives import Gather, Reduce
from bagua_torch.fsdp.overlap import IN_FLIGHT, Prefetch, Reductions
from bagua_torch.fsdp.passes import BackwardPasses


class Unit:
    """Stands for the parameters of a module."""

    is_in_forward = True
    shard_version = 0

    def __init__(self, name, log):
        self.name, self._log = name, log

    def prefetch(self):
        self._log.append(f"gather {self.name}")
        return True

    def drop_gathered(self):
        self._log.append(f"drop {self.name}")


class Model(nn.Module):
    """Its forward pass uses units, by their names."""

    def __init__(self, names="abc"):
        super().__init__()
        self.log = []
        self.units = {name: Unit(name, self.log) for name in names}
        self.prefetch = Prefetch(self)
        self.changing = ""

    def forward(self, names):
        for name in names:
            self.log.append(name)
            if name in self.changing:
                self.units[name].shard_version += 1
            if name in self.units:
                self.prefetch.check(self.units[name])
            self.prefetch.follow(self.units[name])
        return names

    def passes(self, names):
        self.log.clear()
        self(names)
        return " ".join(self.log)


def test_the_order_of_a_pass_predicts_the_next_one():
    model = Model()
    assert model.passes("abc") == "a b c", "nothing is known yet"
    assert model.passes("abc") == "a gather b b gather c c"


def test_a_module_that_runs_twice_is_gathered_twice():
    model = Model()
    model.passes("aba")
    assert model.passes("aba") == "a gather b b gather a a"


def test_what_a_pass_does_not_use_is_dropped_at_its_end_and_not_predicted_again():
    model = Model()
    model.passes("abc")
    assert model.passes("ac") == "a gather b c drop b"
    model.passes("abc")
    assert model.passes("abc") == "a b gather c c"


def test_a_pass_that_begins_later_follows_the_order_from_there():
    model = Model()
    model.passes("abc")
    assert model.passes("bc") == "b gather c c"


def test_a_pass_that_raises_drops_what_it_has_gathered():
    model = Model()
    model.passes("abc")
    with pytest.raises(KeyError):
        model.passes("a?")
    assert model.log == ["a", "gather b", "?", "drop b"]
    assert model.passes("abc") == "a gather b b gather c c", "as the pass before predicts, b too"


def test_what_a_pass_changes_before_it_uses_it_is_gathered_again_and_not_predicted_again():
    model = Model()
    model.passes("abc")
    model.changing = "b"
    assert model.passes("abc") == "a gather b b drop b gather c c"
    assert model.passes("abc") == "a b gather c c"


def test_nothing_is_gathered_outside_of_forward_passes_or_after_close():
    model = Model()
    model.passes("ab")
    model.passes("ab")
    model.log.clear()
    model.prefetch.follow(model.units["a"])
    assert model.log == []
    model.units["a"].is_in_forward = False  # as when it is recomputed in a backward pass
    assert model.passes("ab") == "a b"
    model.prefetch.close()
    model.units["a"].is_in_forward = True
    assert model.passes("ab") == "a b"


# On lanes

PASSES = BackwardPasses()


def unit(**settings):
    fixed = {"name": "layer", "gradient_numel": 2400, "divide_factor": None, "is_in_forward": False}
    return SimpleNamespace(**{**fixed, "reads_at_once": lambda reduced: False, **settings})


def on_lanes(ranks, body):
    """Run body(lane, comms): `comms` stands for the communicators of a model, with a lane."""

    def with_lane(comm):
        with comm.lane() as lane:
            return body(lane, SimpleNamespace(of=lambda group: lane.comm, lane_of=lambda comm: lane))

    return run_ranks(ranks, with_lane)


class InBackward(torch.autograd.Function):
    """Calls a function in the backward pass."""

    @staticmethod
    def forward(ctx, x, call):
        ctx.call = call
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        ctx.call()
        return grad, None


def backward(call):
    InBackward.apply(torch.ones(1, requires_grad=True), call).backward()


X = [torch.randn(2400, generator=torch.Generator().manual_seed(rank)) for rank in range(3)]


@pytest.mark.parametrize("method", [Exact(), Quantized(min_bytes=0)], ids=repr)
def test_a_gather_is_complete_after_the_wait(method):
    def body(lane, comms):
        prefetch = Prefetch(nn.Linear(1, 1))
        out, expected = torch.zeros(1600), torch.zeros(1600)
        for each in (out, expected):
            each[800 * lane.comm.rank :][:800] = X[lane.comm.rank][:800]
        bound = {lane.comm: method.bind_gather(lane.comm)}
        gathers = [Gather(comms, Unit("layer", []), bound, each) for each in (prefetch, None)]
        mine = slice(800 * lane.comm.rank, 800 * (lane.comm.rank + 1))
        work = gathers[0](output_tensor=out, input_tensor=out[mine], group=None)
        assert isinstance(work, dist.Work)
        assert work.wait()
        assert gathers[1](output_tensor=expected, input_tensor=expected[mine], group=None) is None
        return torch.equal(out, expected)

    assert on_lanes(2, body) == [True, True]


@pytest.mark.parametrize("op", [dist.ReduceOp.AVG, dist._make_nccl_premul_sum(0.1)], ids=["avg", "factor"])
@pytest.mark.parametrize("method", [Exact(), Quantized(min_bytes=0), ErrorFeedback()], ids=repr)
def test_reductions_are_complete_when_the_backward_pass_ends(method, op):
    def body(lane, comms):
        factor = unit(divide_factor=10.0)
        later, now = (
            Reduce(comms, factor, method, lane.comm, PASSES, each) for each in (Reductions(PASSES), None)
        )
        outs, expected = torch.zeros(IN_FLIGHT + 2, 800), torch.zeros(800)

        def call():
            for out in outs:
                later(output_tensor=out, input_tensor=X[lane.comm.rank].clone(), group=None, op=op)

        backward(call)
        for out in outs:
            now(output_tensor=expected, input_tensor=X[lane.comm.rank].clone(), group=None, op=op)
            assert torch.equal(out, expected)

    on_lanes(3, body)


def test_results_are_nan_until_they_are_computed():
    def body(lane, comms):
        reduce, outs = (
            Reduce(comms, unit(), Exact(), lane.comm, PASSES, Reductions(PASSES)),
            torch.zeros(IN_FLIGHT, 1200),
        )
        gate = threading.Event()
        lane.submit(gate.wait, 30)

        def call():
            for out in outs:
                reduce(
                    output_tensor=out, input_tensor=X[lane.comm.rank].clone(), group=None, op=dist.ReduceOp.AVG
                )
            assert outs.isnan().all()
            gate.set()

        backward(call)
        return bool(outs.isfinite().all())

    assert on_lanes(2, body) == [True, True]


def test_a_result_that_is_read_at_once_is_complete_on_return():
    def body(lane, comms):
        reads = unit(reads_at_once=lambda reduced: True)
        reduce, out = Reduce(comms, reads, Exact(), lane.comm, PASSES, Reductions(PASSES)), torch.zeros(1200)
        reduce(output_tensor=out, input_tensor=X[lane.comm.rank].clone(), group=None, op=dist.ReduceOp.SUM)
        return torch.equal(out, (X[0] + X[1])[1200 * lane.comm.rank :][:1200])

    assert on_lanes(2, body) == [True, True]


def test_a_pass_that_raises_ends_its_reductions_first_and_restarts_its_residual():
    def body(lane, comms):
        passes = BackwardPasses()
        reduce = Reduce(comms, unit(), ErrorFeedback(), lane.comm, passes, Reductions(passes))
        out, gate, result = torch.zeros(1200), threading.Event(), lane.result

        def release_and_wait(future):
            gate.set()
            return result(future)

        def call():
            lane.submit(gate.wait, 30)
            reduce(output_tensor=out, input_tensor=X[lane.comm.rank].clone(), group=None, op=dist.ReduceOp.AVG)
            raise KeyError("in the middle of a pass")

        lane.result = release_and_wait
        with pytest.raises(KeyError):
            backward(call)
        gate.set()
        assert out.isfinite().all()
        assert reduce.residual is None

    on_lanes(2, body)


def test_outside_of_a_backward_pass_a_reduction_ends_at_once():
    def body(lane, comms):
        reduce, out = Reduce(comms, unit(), Exact(), lane.comm, PASSES, Reductions(PASSES)), torch.zeros(1200)
        reduce(output_tensor=out, input_tensor=X[lane.comm.rank].clone(), group=None, op=dist.ReduceOp.SUM)
        return torch.equal(out, (X[0] + X[1])[1200 * lane.comm.rank :][:1200])

    assert on_lanes(2, body) == [True, True]


def test_bad_gradients_are_refused_before_the_lane_is_used():
    def body(lane, comms):
        reduce = Reduce(comms, unit(gradient_numel=2402), ErrorFeedback(), lane.comm, PASSES, Reductions(PASSES))
        with pytest.raises(UnsupportedError, match="2400 gradient elements of layer are reduced, expected 2402"):
            reduce(output_tensor=torch.empty(1200), input_tensor=X[0], group=None, op=dist.ReduceOp.AVG)

    on_lanes(2, body)


def test_the_first_error_on_the_lane_is_raised_once_when_the_backward_pass_ends():
    def body(lane, comms):
        def breaks():
            raise ArrayError("broken")

        later, added = Reductions(PASSES), []

        def call():
            for _ in range(IN_FLIGHT + 2):
                later.add(lane, lane.submit(breaks))
                added.append(1)

        with pytest.raises(ArrayError, match="broken"):
            backward(call)
        assert len(added) == IN_FLIGHT + 2
        later.wait()
        lane.wait()

    on_lanes(1, body)
