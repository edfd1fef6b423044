"""Wrappers that are dropped, and modules that are wrapped again: as when `fit` is called twice."""

import threading
import weakref

import pytest
import torch
from support.torch_training import (
    QADAM,
    assert_same_on_all_ranks,
    batch,
    final_weights,
    loss_of,
    make_model,
    optimizer_for,
    sgd,
    train,
    train_step,
    weights,
    wrapped,
)
from torch import nn

from bagua_comm import AsyncModelAverage, CommError, DiLoCo, ErrorFeedback, GradientAllReduce
from bagua_comm.execution import lane
from bagua_comm.testing import run_ranks
from bagua_torch import DistributedDataParallel
from bagua_torch.errors import MisuseError

ALGORITHMS = [
    GradientAllReduce(),
    GradientAllReduce(ErrorFeedback()),
    QADAM,
    DiLoCo(local_steps=2),
    AsyncModelAverage(interval_s=0),
]


@pytest.fixture(autouse=True)
def _rounds_end_soon(monkeypatch):
    """The last round of a dropped wrapper may have begun on one rank alone, and its end waits for the other."""
    monkeypatch.setattr(lane, "TASK_END_S", 0.2)


@pytest.mark.parametrize("keep", ["wrappers", "engines"])
def test_a_module_that_is_wrapped_three_times_is_exchanged_once_a_step(keep):
    def body(comm):
        model = make_model()
        kept, engines = [], []
        for fit in range(3):
            optimizer = sgd(model.parameters())
            ddp = DistributedDataParallel(model, optimizer, comm=comm)
            engines.append(ddp.engine)
            if keep == "wrappers":
                kept.append(ddp)
            train(comm, ddp, optimizer, range(3 * fit, 3 * fit + 3))
        assert_same_on_all_ranks(comm, model)
        ddp.close()
        return [engine.counter.calls for engine in engines]

    assert run_ranks(2, body) == [[3, 3, 3]] * 2


@pytest.mark.parametrize(
    ("algorithm", "kept"),
    [
        *((each, kept) for each in (ALGORITHMS[0], ALGORITHMS[-1]) for kept in ("kept", "dropped", "closed")),
        *((each, "kept by one rank") for each in ALGORITHMS),
    ],
    ids=str,
)
def test_wrapping_again_continues_from_the_same_weights(algorithm, kept):
    def body(comm):
        model = make_model()
        optimizer = optimizer_for(algorithm, model.parameters())
        older = []
        for fit in range(2):
            ddp = DistributedDataParallel(model, optimizer, algorithm, comm=comm, bucket_bytes=100)
            train(comm, ddp, optimizer, range(3 * fit, 3 * fit + 3))
            if kept == "kept" or (kept == "kept by one rank" and comm.rank == 1):
                older.append(ddp)
            elif kept == "closed":
                ddp.close()
            del ddp
        ddp = DistributedDataParallel(model, optimizer, algorithm, comm=comm, bucket_bytes=100)
        with ddp.join():
            train(comm, ddp, optimizer, range(20, 21 + comm.rank))
        for each in older:
            with pytest.raises(CommError, match="wrapped again"):
                each(batch(0, 0))
            each.close()
        ddp.switch(GradientAllReduce()) if algorithm is not QADAM else None
        assert_same_on_all_ranks(comm, model)
        return final_weights(ddp)

    for actual in run_ranks(2, body, timeout_s=10):
        assert actual.isfinite().all()


@pytest.mark.parametrize("algorithm", ALGORITHMS, ids=repr)
def test_a_wrapper_that_is_dropped_is_freed_and_exchanges_nothing(algorithm):
    """Its module and its optimizer then train by themselves, also on one rank alone."""
    threads = set(threading.enumerate())

    def body(comm):
        model, optimizer, ddp = wrapped(comm, algorithm)
        train(comm, ddp, optimizer, range(5))
        engine, dropped = ddp.engine, weakref.ref(ddp)
        calls = engine.counter.calls
        with torch.no_grad():
            ddp(batch(0, 0))
        del ddp  # nothing refers to itself: no garbage collection is needed
        assert dropped() is None
        comm.barrier()
        if comm.rank == 1:
            before = weights(model).clone()
            for step in range(3):
                train_step(model, optimizer, batch(1, step))
            assert not torch.equal(weights(model), before)
            model.state_dict()
        comm.barrier()
        if not isinstance(algorithm, AsyncModelAverage):  # whose last round may end later
            assert engine.counter.calls == calls
        assert all(not p._backward_hooks and not p._post_accumulate_grad_hooks for p in model.parameters())

    run_ranks(2, body, timeout_s=10)
    if not isinstance(algorithm, AsyncModelAverage):
        for thread in set(threading.enumerate()) - threads:
            thread.join(timeout=5)
            assert not thread.is_alive()


def test_momentum_of_a_dropped_wrapper_continues_in_its_optimizer():
    """Like that of the plain optimizer, also after the warm-up."""

    def body(comm):
        model, optimizer, ddp = wrapped(comm, QADAM)
        train(comm, ddp, optimizer, range(6))
        del ddp
        moments = [optimizer.state[p]["exp_avg"].clone() for p in model.parameters()]
        train_step(model, optimizer, batch(comm.rank, 7))
        for parameter, before in zip(model.parameters(), moments, strict=True):
            expected = before.lerp(parameter.grad, 1 - optimizer.beta1)
            torch.testing.assert_close(optimizer.state[parameter]["exp_avg"], expected)

    run_ranks(2, body)


def test_a_module_that_is_wrapped_inside_another_one_or_compiled_is_wrapped_again():
    def body(comm):
        model = make_model()
        first = DistributedDataParallel(model, comm=comm)
        second = DistributedDataParallel(nn.Sequential(model), comm=comm)
        loss_of(second, batch(comm.rank, 0)).backward()
        with pytest.raises(CommError, match="wrapped again"):
            first(batch(0, 0))
        calls = first.engine.counter.calls, second.engine.counter.calls
        second.close()
        return calls

    assert run_ranks(2, body) == [(0, 1)] * 2


def test_a_wrapper_in_place_of_its_module_is_refused_and_keeps_working():
    def body(comm):
        _, optimizer, ddp = wrapped(comm)
        for module, found in ((ddp, "module is a Dist"), (nn.Sequential(ddp), "module contains '0', a Dist")):
            with pytest.raises(MisuseError, match=f"{found}.*give the plain module"):
                DistributedDataParallel(module, comm=comm)
        train(comm, ddp, optimizer, range(2))
        more = nn.ModuleList([ddp, nn.Linear(2, 2)])  # it has parameters of its own
        DistributedDataParallel(more, comm=comm).close()
        ddp.close()
        return ddp.engine.counter.calls

    assert run_ranks(2, body) == [2, 2]


def test_modules_that_share_a_layer_are_exchanged_each_by_its_own_wrapper():
    def body(comm):
        shared = nn.Linear(4, 4)
        ddps = [DistributedDataParallel(nn.Sequential(shared, nn.Linear(4, 2)), comm=comm) for _ in range(2)]
        for number, ddp in enumerate([*ddps, *ddps]):
            ddp.module.zero_grad()
            loss_of(ddp, batch(comm.rank, number)).backward()
            assert_same_gradients(comm, ddp.module)
        calls = [ddp.engine.counter.calls for ddp in ddps]
        for ddp in ddps:
            ddp.close()
        return calls

    def assert_same_gradients(comm, module):
        for parameter in module.parameters():
            comm.check_consistency(parameter.grad.numpy())

    assert run_ranks(2, body) == [[2, 2]] * 2


def test_a_module_that_cannot_be_wrapped_again_keeps_its_wrapper():
    def body(comm):
        model, optimizer, ddp = wrapped(comm)
        with pytest.raises(ValueError, match="none of the parameters that are averaged"):
            DistributedDataParallel(model, sgd(make_model().parameters()), comm=comm)
        train(comm, ddp, optimizer, range(2))
        ddp.close()
        return ddp.engine.counter.calls

    assert run_ranks(2, body) == [2, 2]


def test_hooks_of_dropped_wrappers_do_not_pile_up():
    def body(comm):
        model = make_model()
        optimizer = sgd(model.parameters())
        counts = []
        for _ in range(4):
            ddp = DistributedDataParallel(model, optimizer, comm=comm)
            counts.append((len(model._forward_pre_hooks), len(optimizer._optimizer_step_pre_hooks)))
            del ddp
        return counts

    assert run_ranks(2, body) == [[(1, 1)] * 4] * 2
